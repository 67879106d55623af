"""The warning, or the error, about a checkpoint without a proof that its last pieces are there."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Iterable, NamedTuple

from ._errors import error
from ._settings import Remote

UnprovenTail = tuple[str, str, int]
"""A path and a message from the native part, and a number that is the same for the same files."""


class UnprovenTailWarning(UserWarning):
    """Nothing proves that the last pieces of a checkpoint are there. If the shard of the last rank was lost, the
    tensors only look smaller.

    Each of `expect_shards=`, `reference=` and a manifest beside the shards is such a proof. With
    `unproven_tail="error"` or TENSORFS_UNPROVEN_TAIL=error there is an error in place of this warning.
    """


class Proof(NamedTuple):
    """The arguments of a caller about the proof of the last pieces of a checkpoint, and about remote sources."""

    demands: tuple[int | None, str | None, str | None, int | None, Remote]
    """The number of shards, the reference file that lists all tensors, the folder of the disk cache, its size in bytes,
    and the settings of a remote source."""
    unproven: str
    """The consequence if nothing proves the last pieces: "warn" or "error"."""


# For each set of files, by its number: the registry in which the warning filters of Python note that the warning was
# shown.
_registries: dict[int, dict[Any, Any]] = {}


def judge(found: Iterable[UnprovenTail], proof: Proof) -> None:
    """Warns about each of these checkpoints, or raises the error. As long as the warning filters of Python stay the
    same, the warning about a checkpoint is shown once."""
    for path, message, files in found:
        if proof.unproven == "error":
            raise error(message, "unproven_tail", path=path)
        _warn(message, _registries.setdefault(files, {}))


def _warn(message: str, registry: dict[Any, Any]) -> None:
    filename, line, module = _caller()
    # Python shows a warning once for each line of code that causes it. If it was shown for another line, this line
    # counts as shown too.
    if any(isinstance(key, tuple) for key in registry):
        registry[message, UnprovenTailWarning, line] = True
    warnings.warn_explicit(message, UnprovenTailWarning, filename, line, module, registry)


def _caller() -> tuple[str, int, str]:
    """File, line and module of the code that called this package, directly or by way of safetensors."""
    frame = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in ("tensorfs", "safetensors"):
            return frame.f_code.co_filename, frame.f_lineno, module
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown>", 1, __name__
