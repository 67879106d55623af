"""Checkpoints as numpy arrays: in place of `safetensors.numpy`."""

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
    import numpy

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

_MODULE = "safetensors.numpy"


def load(data: bytes) -> dict[str, numpy.ndarray]:
    """All arrays of a safetensors file in memory."""
    return _bytes.load(data, _frameworks.find("np"))


def load_file(filename: Source, *, backend: str = "mmap", names: Names = None, **how: Any) -> dict[str, numpy.ndarray]:
    """Loads all arrays of a checkpoint, or those that `names` selects. `how` are further arguments of `safe_open`."""
    with safe_open(filename, "np", backend=backend, **how) as opened:
        return opened.get_tensors(names)


def save(tensor_dict: dict[str, numpy.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """The bytes of a file with these arrays. safetensors writes them and must be installed."""
    return bytes(genuine(_MODULE).save(tensor_dict, metadata))


def save_file(
    tensor_dict: dict[str, numpy.ndarray],
    filename: Union[str, "os.PathLike[str]"],
    metadata: dict[str, str] | None = None,
) -> None:
    """Writes these arrays to a file. safetensors writes it and must be installed."""
    genuine(_MODULE).save_file(tensor_dict, filename, metadata)
