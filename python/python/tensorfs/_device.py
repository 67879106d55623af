"""The device that tensors are loaded to."""

from __future__ import annotations

import re
import sys

from ._errors import error

# The names that safetensors knows; torch judges the number.
_KNOWN = re.compile(r"cpu|mps(:0)?|(cuda|musa|npu|xpu|xla|mlu|hpu)(:\d+)?|\d+", re.ASCII)

_DIGITS_MAX = 9
"""Most digits of a number that torch and the driver take."""


def parse(device: object) -> int | None:
    """The GPU that a word, a number or a `torch.device` means; None for the CPU."""
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
    """The GPU that torch uses if none is named."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
