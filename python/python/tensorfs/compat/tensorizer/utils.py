"""Measures the memory in use, and makes models without memory. This module replaces `tensorizer.utils`."""

from __future__ import annotations

import contextlib
import resource
from typing import Any, Callable, Iterator, NamedTuple, Optional

import torch

__all__ = [
    "CPUMemoryUsage",
    "GlobalGPUMemoryUsage",
    "MemoryUsage",
    "TorchGPUMemoryUsage",
    "convert_bytes",
    "get_device",
    "get_gpu_name",
    "get_mem_usage",
    "no_init_or_tensor",
]


def convert_bytes(num: float, decimal: bool = True) -> str:
    """A number of bytes as a text, in the largest unit that is not above it, such as "1.5 GB". With `decimal=False` the
    units are powers of 1024, such as "1.4 GiB"."""
    step, infix = (1000, "") if decimal else (1024, "i")
    units = ["bytes", *(f"{letter}{infix}B" for letter in "KMGTP")]
    while num >= step and len(units) > 1:
        num /= step
        del units[0]
    return f"{num:.1f} {units[0]}"


def get_device() -> torch.device:
    """The first GPU, or the CPU if torch finds no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class CPUMemoryUsage(NamedTuple):
    """Memory of the host in bytes."""

    maxrss: int
    """The greatest resident memory of this process so far, plus that of the largest of its ended children."""
    free: int
    """Memory that nothing uses, not even the page cache."""

    @classmethod
    def now(cls) -> CPUMemoryUsage:
        """The state now."""
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        with open("/proc/meminfo", encoding="ascii") as lines:
            free = next((line.split()[1] for line in lines if line.startswith("MemFree:")), "0")
        return cls(own.ru_maxrss + children.ru_maxrss << 10, int(free) << 10)

    def __str__(self) -> str:
        return f"CPU: (maxrss: {_mib(self.maxrss)} F: {_mib(self.free)})"


class GlobalGPUMemoryUsage(NamedTuple):
    """Memory of a GPU in bytes."""

    total: int
    free: int
    used: int
    """The memory that all processes use."""

    @classmethod
    def now(cls, device: Any = None) -> Optional[GlobalGPUMemoryUsage]:
        """The state now. None without a GPU."""
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, total - free)

    def __str__(self) -> str:
        return f"GPU: (U: {_mib(self.used)} F: {_mib(self.free)} T: {_mib(self.total)})"


class TorchGPUMemoryUsage(NamedTuple):
    """Memory of a GPU that torch has reserved, and the part of it that is in use, in bytes."""

    reserved: int
    reserved_max: int
    used: int
    used_max: int

    @classmethod
    def now(cls, device: Any = None) -> Optional[TorchGPUMemoryUsage]:
        """The state now. None without a GPU."""
        if not torch.cuda.is_available():
            return None
        cuda = torch.cuda
        return cls(
            cuda.memory_reserved(device),
            cuda.max_memory_reserved(device),
            cuda.memory_allocated(device),
            cuda.max_memory_allocated(device),
        )

    def __str__(self) -> str:
        reserved, used = f"{_mib(self.reserved)}/{_mib(self.reserved_max)}", f"{_mib(self.used)}/{_mib(self.used_max)}"
        return f"TORCH: (R: {reserved}, A: {used})"


class MemoryUsage(NamedTuple):
    """Memory of the host, of a GPU, and of torch on that GPU."""

    cpu: CPUMemoryUsage
    gpu: Optional[GlobalGPUMemoryUsage]
    torch: Optional[TorchGPUMemoryUsage]

    @classmethod
    def now(cls, device: Any = None) -> MemoryUsage:
        """The state now."""
        return cls(CPUMemoryUsage.now(), GlobalGPUMemoryUsage.now(device), TorchGPUMemoryUsage.now(device))

    def __str__(self) -> str:
        return " ".join(str(part) for part in self if part is not None)


def _mib(number: int) -> str:
    return f"{number >> 20:,}MiB"


def get_mem_usage() -> str:
    """`MemoryUsage.now()` in one line."""
    return str(MemoryUsage.now())


def get_gpu_name() -> str:
    """The name of the GPU that torch uses. "N/A" if there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "N/A"


class _Unallocated(torch.overrides.TorchFunctionMode):
    """Makes `torch.empty` return meta tensors, whose initialization takes no time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _unallocated() -> Iterator[None]:
    with _Unallocated():
        yield


def no_init_or_tensor(loading_code: Callable[..., Any] | None = None) -> Any:
    """Makes models get parameters without memory, within this `with` block or within a call of `loading_code`, whose
    result is returned. `load_into_module` can then give them the parameters of a file. Other threads are not
    affected."""
    if loading_code is None:
        return _unallocated()
    if not callable(loading_code):
        raise TypeError(f"expected a function, or None for a context manager, not {type(loading_code).__name__}")
    with _unallocated():
        return loading_code()
