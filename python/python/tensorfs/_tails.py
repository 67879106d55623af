"""Checkpoints whose last pieces nothing proves: the warning about them, and the error in its place."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Iterable, NamedTuple

from ._errors import error
from ._settings import Remote

UnprovenTail = tuple[str, str, int]
"""Path and message of the native part, and a number that is the same for the same files."""


class UnprovenTailWarning(UserWarning):
    """Nothing proves that the last pieces of a checkpoint are there: if the last rank shard was lost, its tensors only
    look smaller.

    `expect_shards=`, `reference=` and a manifest beside the shards prove it. With `unproven_tail="error"` or
    TENSORFS_UNPROVEN_TAIL=error it is an error.
    """


class Proof(NamedTuple):
    """The proof of the last pieces of a checkpoint that a caller asks for."""

    demands: tuple[int | None, str | None, str | None, int | None, Remote]
    """The number of its shards, a file that knows its tensors, the folder of a disk cache with its size, and where the
    checkpoint lies if it is remote."""
    unproven: str
    """The consequence if nothing proves them: "warn" or "error"."""


# By the files of a checkpoint: the registry of Python's filters for the warning about it.
_registries: dict[int, dict[Any, Any]] = {}


def judge(found: Iterable[UnprovenTail], proof: Proof) -> None:
    """Warns of each of these checkpoints, once as long as the filters of Python stay the same; or raises the error."""
    for path, message, files in found:
        if proof.unproven == "error":
            raise error(message, "unproven_tail", path=path)
        _warn(message, _registries.setdefault(files, {}))


def _warn(message: str, registry: dict[Any, Any]) -> None:
    filename, line, module = _caller()
    # Python shows a warning once for each line of code.
    if any(isinstance(key, tuple) for key in registry):
        registry[message, UnprovenTailWarning, line] = True
    warnings.warn_explicit(message, UnprovenTailWarning, filename, line, module, registry)


def _caller() -> tuple[str, int, str]:
    """File, line and module of the code that called this package, also by way of safetensors."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("tensorfs", "safetensors"):
            return frame.f_code.co_filename, frame.f_lineno, module
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>", 1, __name__
