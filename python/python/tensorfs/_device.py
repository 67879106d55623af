"""Where tensors are loaded to."""

from __future__ import annotations

import re

from ._errors import error

# What safetensors knows; a number is left to torch.
_KNOWN = re.compile(r"cpu|mps(:0)?|(cuda|musa|npu|xpu|xla|mlu|hpu)(:\d+)?|\d+", re.ASCII)


def parse(device: object) -> str:
    """The device that a word, a number or a `torch.device` means."""
    if device is None:
        return "cpu"
    text = str(device)
    if isinstance(device, bool) or not (isinstance(device, (str, int)) or type(device).__module__ == "torch"):
        raise error(f"device {device!r} is invalid")
    if not _KNOWN.fullmatch(text):
        raise error(f"device {text} is invalid")
    if text != "cpu":
        raise error(f"device {text} is not supported: load to cpu, and move the tensors from there")
    return text
