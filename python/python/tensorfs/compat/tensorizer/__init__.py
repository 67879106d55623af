"""Reads and writes tensorizer files, with the names and arguments of the tensorizer package.

    from tensorfs.compat.tensorizer import TensorDeserializer

    with TensorDeserializer("model.tensors", device="cpu") as tensors:
        model.load_state_dict(tensors)

The module `serialization` reads and writes files. The module `torch_compat` is for `torch.save` and `torch.load`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import serialization, stream_io
from .serialization import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    FilterFuncType,
    HashMismatchError,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)

if TYPE_CHECKING:
    from . import torch_compat, utils

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "HashMismatchError",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
    "serialization",
    "stream_io",
    "torch_compat",
    "utils",
]


def __getattr__(name: str) -> Any:
    # Only these two modules need torch, so they are imported when they are first used.
    if name in ("torch_compat", "utils"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
