"""Loads checkpoints as arrays of jax. This module replaces `safetensors.flax`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._bytes import deserialize as deserialize
from ._drop_in import SHARED_NAMES, DropIn
from ._open import safe_open as safe_open
from ._serialize import TensorSpec as TensorSpec, serialize as serialize, serialize_file as serialize_file

if TYPE_CHECKING:
    import jax

__all__ = [*SHARED_NAMES]

_functions: DropIn[jax.Array] = DropIn("flax")
load = _functions.load
load_file = _functions.load_file
save = _functions.save
save_file = _functions.save_file
