"""Loads checkpoints as tensors of paddle. This module replaces `safetensors.paddle`."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from . import _bytes, _device, _frameworks
from ._bytes import deserialize as deserialize
from ._drop_in import SHARED_NAMES, DropIn
from ._names import Names
from ._open import Source, safe_open as safe_open
from ._serialize import TensorSpec as TensorSpec, serialize as serialize, serialize_file as serialize_file

if TYPE_CHECKING:
    import paddle

__all__ = [*SHARED_NAMES]

_functions: DropIn[paddle.Tensor] = DropIn("paddle")
save = _functions.save
save_file = _functions.save_file

_NUMPY = {
    **{word: word for word in ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")},
    # numpy lacks these dtypes: another dtype of the same width stands for each of them.
    **{"bfloat16": "float16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"},
}


def __getattr__(name: str) -> Any:
    """Makes `NPDTYPES`, which needs paddle. It is not in `__all__`, because the other names of this module do not need
    paddle."""
    if name != "NPDTYPES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _numpy_types()
    except ImportError as e:
        raise AttributeError(f"module {__name__!r} has NPDTYPES only where paddle is installed: {e}") from e


@functools.cache
def _numpy_types() -> dict[Any, type]:
    """For each dtype of paddle, the type of numpy that stands for it."""
    framework, numpy = importlib.import_module("paddle"), importlib.import_module("numpy")
    return {framework.bool: bool, **{getattr(framework, word): getattr(numpy, given) for word, given in _NUMPY.items()}}


def load(data: bytes, device: Any = "cpu") -> dict[str, paddle.Tensor]:
    """All tensors of a safetensors file that is in memory."""
    return _bytes.load(data, _frameworks.find("paddle", _device.parse(device)))


def load_file(
    filename: Source, device: Any = "cpu", *, backend: str = "mmap", names: Names = None, **how: Any
) -> dict[str, paddle.Tensor]:
    """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of `safe_open`."""
    with safe_open(filename, "paddle", device, backend=backend, **how) as opened:
        return opened.get_tensors(names)
