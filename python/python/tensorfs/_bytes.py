"""Reads safetensors files that are in memory."""

from __future__ import annotations

from typing import Any

from ._tensorfs import describe


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The tensors of a file: for each, its name, and a dict with `dtype`, `shape` and `data`. `data` is a writable
    copy."""
    whole = memoryview(bytes)
    return [
        (name, {"dtype": dtype, "shape": shape, "data": bytearray(whole[start:end])})
        for name, dtype, shape, start, end in describe(bytes)
    ]


def load(data: bytes, framework: Any) -> dict[str, Any]:
    """The tensors of the file `data`. Each tensor has memory of its own."""
    tensors = {}
    for name, found in deserialize(data):
        made = framework.of_bytes(found["data"], found["dtype"], found["shape"], name)
        tensors[name] = made if framework.finish is None else framework.finish(made)
    return tensors
