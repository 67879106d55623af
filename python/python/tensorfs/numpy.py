"""Checkpoints as numpy arrays: in place of `safetensors.numpy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._names import Names
from ._open import Source, safe_open

if TYPE_CHECKING:
    import numpy

__all__ = ["load_file"]


def load_file(filename: Source, *, backend: str = "mmap", names: Names = None, **how: Any) -> dict[str, numpy.ndarray]:
    """All arrays of a checkpoint, or those that `names` means. `how` is what `safe_open` takes beside."""
    with safe_open(filename, "np", backend=backend, **how) as opened:
        return opened.get_tensors(names)
