"""Saving is left to the package safetensors."""

from __future__ import annotations

import importlib
from typing import Any


def genuine(module: str) -> Any:
    """A module of safetensors, such as `safetensors.torch`.

    Raises `ImportError` if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "safetensors":
            raise
        raise ImportError(f"tensorfs saves by {module}, and it is not installed: pip install safetensors") from None


def named(module: str, here: str, name: str, names: tuple[str, ...]) -> Any:
    """For `__getattr__` of the module `here`: the attribute of `module` of safetensors, if it is one of `names`."""
    if name in names:
        return getattr(genuine(module), name)
    raise AttributeError(f"module {here!r} has no attribute {name!r}")
