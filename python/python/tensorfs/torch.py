"""Checkpoints as torch tensors: in place of `safetensors.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._names import Names
from ._open import Source, safe_open

if TYPE_CHECKING:
    import torch

__all__ = ["load_file"]


def load_file(
    filename: Source, device: Any = "cpu", *, backend: str = "mmap", names: Names = None, **how: Any
) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, or those that `names` means. `how` is what `safe_open` takes beside."""
    with safe_open(filename, "pt", device, backend=backend, **how) as opened:
        return opened.get_tensors(names)
