"""Loads checkpoints as torch tensors. This module replaces `safetensors.torch`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._bytes import deserialize as deserialize
from ._drop_in import SHARED_NAMES, DropIn
from ._model import load_into_model
from ._names import Names
from ._open import Source, safe_open as safe_open
from ._serialize import TensorSpec as TensorSpec, serialize as serialize, serialize_file as serialize_file

if TYPE_CHECKING:
    import torch

__all__ = [*SHARED_NAMES, "load_model", "save_model", "storage_ptr", "storage_size"]

_functions: DropIn[torch.Tensor] = DropIn("torch")
load = _functions.load
save = _functions.save
save_file = _functions.save_file


def load_file(
    filename: Source, device: Any = "cpu", *, backend: str = "mmap", names: Names = None, **how: Any
) -> dict[str, torch.Tensor]:
    """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of `safe_open`."""
    with safe_open(filename, "pt", device, backend=backend, **how) as opened:
        return opened.get_tensors(names)


def load_model(
    model: torch.nn.Module,
    filename: Source,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: str = "mmap",
    **how: Any,
) -> tuple[set[str], list[str]]:
    """Loads a checkpoint into a model by `model.load_state_dict`, which copies all tensors. `tensorfs.load_into` loads
    without that copy. Returns the names that the checkpoint lacks, and the names that the model lacks. With `strict`,
    such names raise a `RuntimeError`.

    If several names share memory in the model, as tied weights do, the checkpoint needs to have only one of them. If it
    has several of them, their bytes must be equal.
    """
    return load_into_model(model, load_file(filename, device, backend=backend, **how), strict)


def save_model(
    model: torch.nn.Module, filename: str, metadata: dict[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Writes a model to a safetensors file. If several names share memory, only one is written. The package
    safetensors does this, and must be installed."""
    _functions.genuine().save_model(model, filename, metadata, force_contiguous)


def storage_ptr(tensor: torch.Tensor) -> int:
    """The address of the memory that a tensor shares with its views. 0 for a tensor without memory."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """The length in bytes of the memory that a tensor shares with its views."""
    return tensor.untyped_storage().nbytes()
