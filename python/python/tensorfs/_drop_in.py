"""The functions that a module in place of one of safetensors has, for the tensors of its framework."""

from __future__ import annotations

import importlib
import os
from typing import Any, Generic, TypeVar, Union

from . import _bytes, _frameworks
from ._names import Names
from ._open import Source, safe_open

T = TypeVar("T")


class DropIn(Generic[T]):
    """The functions of a framework by its name, which is also that of its module here and in safetensors."""

    def __init__(self, framework: str) -> None:
        self._framework = framework

        def load(data: bytes) -> dict[str, T]:
            """All tensors of a safetensors file in memory, on the CPU."""
            return _bytes.load(data, _frameworks.find(framework))

        def load_file(filename: Source, *, backend: str = "mmap", names: Names = None, **how: Any) -> dict[str, T]:
            """Loads all tensors of a checkpoint, or those that `names` selects. `how` are further arguments of
            `safe_open`."""
            with safe_open(filename, framework, backend=backend, **how) as opened:
                return opened.get_tensors(names)

        def save(tensors: dict[str, T], metadata: dict[str, str] | None = None) -> bytes:
            """The bytes of a file with these tensors. safetensors writes them and must be installed."""
            return bytes(self.genuine().save(tensors, metadata))

        def save_file(
            tensors: dict[str, T], filename: Union[str, os.PathLike[str]], metadata: dict[str, str] | None = None
        ) -> None:
            """Writes these tensors to a file. safetensors writes it and must be installed."""
            self.genuine().save_file(tensors, filename, metadata)

        # Functions and no methods: so they are pickled by their name.
        for function in (load, load_file, save, save_file):
            function.__module__, function.__qualname__ = f"tensorfs.{framework}", function.__name__
        self.load, self.load_file, self.save, self.save_file = load, load_file, save, save_file

    def genuine(self) -> Any:
        """The module of safetensors, which writes all files.

        Raises `ImportError` if it is not installed.
        """
        module = f"safetensors.{self._framework}"
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as e:
            if (e.name or "").partition(".")[0] != "safetensors":
                raise
            raise ImportError(f"tensorfs saves by {module}, and it is not installed: pip install safetensors") from None
