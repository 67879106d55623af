"""Loads safetensors files with the names and arguments of the instanttensor package.

    from tensorfs.compat.instanttensor import safe_open

    with safe_open(files, framework="pt", device="cuda:0") as f:
        for name, tensor in f.tensors():
            model.get_parameter(name).copy_(tensor)
"""

from ._safe_open import safe_open
from ._settings import Backend, BackendPolicy

__all__ = ["Backend", "BackendPolicy", "safe_open"]
