"""Checkpoints as arrays of jax: in place of `safetensors.flax`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Union

from . import _bytes, _frameworks
from ._bytes import deserialize
from ._genuine import genuine
from ._names import Names
from ._open import Source, safe_open
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

_MODULE = "safetensors.flax"


def load(data: bytes) -> dict[str, jax.Array]:
    """All tensors of a safetensors file in memory."""
    return _bytes.load(data, _frameworks.find("flax"))


def load_file(
    filename: Source, *, backend: str = "mmap", names: Names = None, **how: Any
) -> dict[str, jax.Array]:
    """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of `safe_open`."""
    with safe_open(filename, "flax", backend=backend, **how) as opened:
        return opened.get_tensors(names)


def save(tensors: dict[str, jax.Array], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file with these tensors. safetensors writes them and must be installed."""
    return bytes(genuine(_MODULE).save(tensors, metadata))


def save_file(
    tensors: dict[str, jax.Array],
    filename: Union[str, "os.PathLike[str]"],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes these tensors to a file. safetensors writes it and must be installed."""
    genuine(_MODULE).save_file(tensors, filename, metadata)
