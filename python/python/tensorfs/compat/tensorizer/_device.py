"""The device that tensors are loaded to."""

from __future__ import annotations

import importlib.util
from typing import Any


class Device:
    """The device that the caller wants. With `wanted=None`, the first GPU that torch finds, or the CPU if torch finds
    no GPU."""

    def __init__(self, wanted: Any) -> None:
        self.torch: Any = None
        self._wanted: Any = None
        if importlib.util.find_spec("torch") is None:
            if str(wanted) not in ("None", "cpu"):
                raise RuntimeError(f"device {wanted}: needs torch, which is not installed; load to the CPU")
            return
        import torch

        self.torch = torch
        has_gpu = torch.cuda.is_available()
        self._wanted = torch.device(("cuda" if has_gpu else "cpu") if wanted is None else wanted)
        if self._wanted.type == "cuda" and not has_gpu:
            raise RuntimeError(f"device {self._wanted}: torch finds no GPU; load to the CPU")

    def __str__(self) -> str:
        return str(self._wanted or "cpu")

    @property
    def is_cpu(self) -> bool:
        return self._wanted is None or self._wanted.type == "cpu"

    def target(self) -> Any:
        """The device as an object of torch. A GPU without a number stands for the GPU that torch uses now."""
        wanted, torch = self._wanted, self.torch
        if wanted.type != "cuda" or wanted.index is not None:
            return wanted
        default = torch.empty(0).device
        return default if default.type == "cuda" else torch.device("cuda", torch.cuda.current_device())

    def gpu(self) -> int | None:
        """The number of the GPU. None for other devices, whose tensors are loaded to the CPU first."""
        if self._wanted is None or self._wanted.type != "cuda":
            return None
        return int(self.target().index)
