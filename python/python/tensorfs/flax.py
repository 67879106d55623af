"""Loads checkpoints as arrays of jax. This module replaces `safetensors.flax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._bytes import deserialize
from ._drop_in import DropIn
from ._open import safe_open
from ._serialize import TensorSpec, serialize, serialize_file

if TYPE_CHECKING:
    import jax

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

_functions: DropIn[jax.Array] = DropIn("flax")
load = _functions.load
load_file = _functions.load_file
save = _functions.save
save_file = _functions.save_file
