"""Loads checkpoints as numpy arrays. This module replaces `safetensors.numpy`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Union

from ._bytes import deserialize as deserialize
from ._drop_in import SHARED_NAMES, DropIn
from ._open import safe_open as safe_open
from ._serialize import TensorSpec as TensorSpec, serialize as serialize, serialize_file as serialize_file

if TYPE_CHECKING:
    import numpy

__all__ = [*SHARED_NAMES]

_functions: DropIn[numpy.ndarray] = DropIn("numpy")
load = _functions.load
load_file = _functions.load_file


def save(tensor_dict: dict[str, numpy.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these arrays. The package safetensors makes them, and must be installed."""
    return bytes(_functions.genuine().save(tensor_dict, metadata))


def save_file(
    tensor_dict: dict[str, numpy.ndarray],
    filename: Union[str, os.PathLike[str]],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes these arrays to a safetensors file. The package safetensors does this, and must be installed."""
    _functions.genuine().save_file(tensor_dict, filename, metadata)
