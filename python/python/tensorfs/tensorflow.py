"""Loads checkpoints as tensors of tensorflow. This module replaces `safetensors.tensorflow`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._bytes import deserialize
from ._drop_in import DropIn
from ._open import safe_open
from ._serialize import TensorSpec, serialize, serialize_file

if TYPE_CHECKING:
    import tensorflow

__all__ = [
    "TensorSpec",
    "deserialize",
    "load",
    "load_file",
    "safe_open",
    "save",
    "save_file",
    "serialize",
    "serialize_file",
]

_functions: DropIn[tensorflow.Tensor] = DropIn("tensorflow")
load = _functions.load
load_file = _functions.load_file
save = _functions.save
save_file = _functions.save_file
