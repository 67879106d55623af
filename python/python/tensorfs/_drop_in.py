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
