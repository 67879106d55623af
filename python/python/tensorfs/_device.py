"""Where tensors are loaded to."""

from __future__ import annotations

from ._errors import error


def parse(device: object) -> str:
    """The device that a word, a number or a `torch.device` means."""
    if device is None:
        return "cpu"
    text = str(device)
    if isinstance(device, bool) or not (isinstance(device, (str, int)) or type(device).__module__ == "torch"):
        raise error(f"device {device!r} is invalid")
    if text != "cpu":
        raise error(f"device {text} is not supported: load to cpu, and move the tensors from there")
    return text
