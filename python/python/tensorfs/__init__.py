"""Loads checkpoints in safetensors form, from one file or many, at the speed of the disk.

    import tensorfs

    with tensorfs.safe_open("run7", framework="pt") as f:
        weight = f.get_tensor("model.embed_tokens.weight")
"""

from __future__ import annotations

from typing import Any

from ._bytes import deserialize
from ._consolidate import Consolidated, consolidate
from ._errors import DtypeError, GroupError, MismatchError, SafetensorError
from ._into import Loaded, load_into
from ._lazy import LazyTensor, LazyTensors, lazy
from ._mount import mount
from ._names import Names
from ._open import Slice, Source, TensorMetadata, safe_open
from ._patch import patched
from ._prefetch import PrefetchLoader
from ._serialize import TensorSpec, serialize, serialize_file
from ._tails import UnprovenTailWarning
from ._tensorfs import Tensor, __version__, release_pinned

PySafeSlice = Slice
"""The name of `Slice` in safetensors."""

TensorMeta = TensorMetadata
"""The name of `TensorMetadata` in safetensors."""

__all__ = [
    "Consolidated",
    "DtypeError",
    "GroupError",
    "LazyTensor",
    "LazyTensors",
    "Loaded",
    "MismatchError",
    "PrefetchLoader",
    "PySafeSlice",
    "SafetensorError",
    "Slice",
    "Tensor",
    "TensorMeta",
    "TensorMetadata",
    "TensorSpec",
    "UnprovenTailWarning",
    "__version__",
    "consolidate",
    "deserialize",
    "lazy",
    "load_file",
    "load_into",
    "mount",
    "patched",
    "release_pinned",
    "safe_open",
    "serialize",
    "serialize_file",
]


def load_file(
    filename: Source, framework: str = "pt", device: Any = "cpu", *, names: Names = None, **how: Any
) -> dict[str, Any]:
    """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of `safe_open`."""
    with safe_open(filename, framework, device, **how) as opened:
        return opened.get_tensors(names)

