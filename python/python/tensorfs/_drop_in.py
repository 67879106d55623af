"""The functions of the modules that replace those of safetensors, such as `tensorfs.flax` for `safetensors.flax`."""

from __future__ import annotations

import importlib
import os
from typing import Any, Generic, TypeVar, Union

from . import _bytes, _frameworks
from ._names import Names
from ._open import Source, safe_open

T = TypeVar("T")

SHARED_NAMES = [
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
"""The public names that all these modules have. They import some with `as`, for type checkers."""


class DropIn(Generic[T]):
    """The functions for one framework. `framework` is the name of its module in tensorfs and in safetensors."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

        def load(data: bytes) -> dict[str, T]:
            """All tensors of a safetensors file that is in memory. The tensors are on the CPU."""
            return _bytes.load(data, _frameworks.find(framework))

        def load_file(filename: Source, *, backend: str = "mmap", names: Names = None, **how: Any) -> dict[str, T]:
            """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of
            `safe_open`."""
            with safe_open(filename, framework, backend=backend, **how) as opened:
                return opened.get_tensors(names)

        def save(tensors: dict[str, T], metadata: dict[str, str] | None = None) -> bytes:
            """The bytes of a safetensors file with these tensors. The package safetensors makes them, and must be
            installed."""
            return bytes(self.genuine().save(tensors, metadata))

        def save_file(
            tensors: dict[str, T], filename: Union[str, os.PathLike[str]], metadata: dict[str, str] | None = None
        ) -> None:
            """Writes these tensors to a safetensors file. The package safetensors does this, and must be installed."""
            self.genuine().save_file(tensors, filename, metadata)

        # These are functions and not methods, so that pickle stores each of them by its name.
        for function in (load, load_file, save, save_file):
            function.__module__, function.__qualname__ = f"tensorfs.{framework}", function.__name__
        self.load, self.load_file, self.save, self.save_file = load, load_file, save, save_file

    def genuine(self) -> Any:
        """The module of safetensors for this framework. It writes all files.

        Raises `ImportError` if safetensors is not installed.
        """
        module = f"safetensors.{self._framework}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "safetensors":
                raise
            raise ImportError(f"tensorfs saves by {module}, and it is not installed: pip install safetensors") from None
