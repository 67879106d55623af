"""Tensorizer files by the names and arguments of the tensorizer package.

    from tensorfs.compat.tensorizer import TensorDeserializer

    with TensorDeserializer("model.tensors", device="cpu") as tensors:
        model.load_state_dict(tensors)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import serialization, stream_io
from .serialization import FilterFuncType, HashMismatchError, TensorDeserializer, TensorType

if TYPE_CHECKING:
    from . import utils

__all__ = [
    "FilterFuncType",
    "HashMismatchError",
    "TensorDeserializer",
    "TensorType",
    "serialization",
    "stream_io",
    "utils",
]


def __getattr__(name: str) -> Any:
    # This module needs torch, and the others do not.
    if name == "utils":
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
