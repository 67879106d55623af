"""The device that tensors are loaded to."""

from __future__ import annotations

import re
import sys

from ._errors import error

# The device names that safetensors accepts. torch checks whether there is a device with that number.
_KNOWN = re.compile(r"cpu|mps(:0)?|(cuda|musa|npu|xpu|xla|mlu|hpu)(:\d+)?|\d+", re.ASCII)

_DIGITS_MAX = 9
"""The most digits of a device number that torch and the GPU driver accept."""


def parse(device: object) -> int | None:
    """The number of the GPU that `device` names, which is a text, a number or a `torch.device`. None for the CPU."""
    if device is None:
        return None
    text = str(device)
    if isinstance(device, bool) or not (isinstance(device, (str, int)) or type(device).__module__ == "torch"):
        raise error(f"device {device!r} is invalid")
    if not _KNOWN.fullmatch(text):
        raise error(f"device {text} is invalid")
    if text == "cpu":
        return None
    if len(text.rpartition(":")[2]) > _DIGITS_MAX and text[-1].isdigit():
        raise error(f"device {text[:20]}... is invalid: no GPU has a number of more than {_DIGITS_MAX} digits")
    if text == "cuda":
        return _current()
    kind, _, number = text.rpartition(":")
    if kind not in ("", "cuda") or not number.isdigit():
        raise error(f"device {text} is not supported: load to cpu, and move the tensors from there")
    return int(number)


def _current() -> int:
    """The number of the GPU that torch uses by default. 0 if torch is not imported, or finds no GPU."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
