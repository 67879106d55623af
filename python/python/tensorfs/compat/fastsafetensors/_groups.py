"""The processes that load together, and the device of each."""

from __future__ import annotations

import sys
from typing import Any

from ..._errors import error
from .common import SingleGroup
from .st_types import Device, DeviceType

_FRAMEWORKS = ("pt", "pytorch", "torch")


def group_of(pg: Any) -> Any:
    """The group that an argument stands for: an object with the methods `size` and `rank`. Raises `TypeError` if it is
    no group."""
    if pg is None:
        return SingleGroup()
    is_group = callable(getattr(pg, "size", None)) and callable(getattr(pg, "rank", None))
    kind = getattr(sys.modules.get("torch.distributed"), "ProcessGroup", None)
    if not is_group or (pg.size() > 1 and (kind is None or not isinstance(pg, kind))):
        raise TypeError(f"pg: expected a process group of torch, a SingleGroup or None, not {type(pg).__name__}")
    return pg


def check_framework(framework: Any) -> None:
    """Refuses all frameworks except torch."""
    if framework not in _FRAMEWORKS:
        raise error(f"framework {framework!r} is not supported: expected one of {', '.join(_FRAMEWORKS)}")


def device_of(device: Any) -> Device:
    """The device that a text or a `torch.device` names. Raises `ValueError` if it is neither the CPU nor a GPU, and
    `RuntimeError` if torch finds no GPU."""
    try:
        import torch
    except ImportError:
        found = Device.from_str(str(device))
    else:
        made = torch.device(device)
        found = Device(DeviceType(made.type), made.index)
        if found.type != DeviceType.CPU and not torch.cuda.is_available():
            raise RuntimeError(f"device {found.as_str()}: torch finds no GPU; load to the CPU")
    return found


def gpu_of(device: Device) -> int | None:
    """The number of the GPU. If the device has no number, the GPU that torch uses now. None for the CPU."""
    if device.type == DeviceType.CPU:
        return None
    import torch

    return int(torch.cuda.current_device() if device.index is None else device.index)
