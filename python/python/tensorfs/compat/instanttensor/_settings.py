"""Checks the arguments about reading, and their environment variables, by the rules of instanttensor, and converts them
to settings of tensorfs."""

from __future__ import annotations

import math
import os
from enum import Enum
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

_PAGE = os.sysconf("SC_PAGE_SIZE")
_CHUNK = 8 << 20
_CHUNK_MAX = 1 << 30
_DEPTH_MAX = 1024


class Backend(Enum):
    """The ways of reading that instanttensor has."""

    AIO = 0
    AIO_BUFFERED = 1
    URING = 2
    URING_BUFFERED = 3
    CUFILE = 4
    MMAP = 5


class BackendPolicy(Enum):
    """Groups of ways of reading, by their purpose."""

    BUFFERED = "BUFFERED"


Candidate = Union[Backend, BackendPolicy]

_THROUGH_PAGE_CACHE = (Backend.AIO_BUFFERED, Backend.URING_BUFFERED, Backend.MMAP, BackendPolicy.BUFFERED)
_WITH_THREADS = (Backend.MMAP, Backend.CUFILE)


class Reading(NamedTuple):
    """The arguments, converted to settings of tensorfs."""

    how: dict[str, Any]
    """Settings of a loader."""
    buffer: Optional[int]
    """The most bytes of a batch of tensors."""
    free_share: float
    """The fraction of the free memory of the GPU that batches may take."""


def reading_of(
    buffer_size: int | None,
    chunk_size: int | None,
    concurrency: int | None,
    io_depth: int | None,
    max_free_mem_usage: float | None,
    backend: Union[Candidate, list[Candidate], None],
    group_size: int,
) -> Reading:
    """Checks the arguments. For an argument that is None, its environment variable counts.

    Raises `ValueError` for a wrong argument, and `RuntimeError` for a fraction of memory that is not between 0 and 1.
    """
    buffer = _chosen("buffer_size", buffer_size, int)
    chunk = _chosen("chunk_size", chunk_size, int)
    threads = _chosen("concurrency", concurrency, int)
    depth = _chosen("io_depth", io_depth, int)
    share = _chosen("max_free_mem_usage", max_free_mem_usage, float)
    candidates = _candidates(backend if backend is not None else _backends_of_environment())
    _check_threads(threads, candidates)
    _check("chunk_size", chunk, None)
    _check("io_depth", depth, _DEPTH_MAX)
    _check("buffer_size", buffer, None)
    aligned = -(-(_CHUNK if chunk is None else chunk) // _PAGE) * _PAGE
    if aligned > _CHUNK_MAX:
        raise ValueError(f"chunk_size={chunk}: expected at most {_CHUNK_MAX} bytes")
    needed = aligned * group_size * (1 if depth is None else depth)
    if buffer is not None and buffer < needed:
        raise ValueError(
            f"buffer_size={buffer} is less than {needed} bytes, which chunk_size={_CHUNK if chunk is None else chunk} and "
            f"io_depth={1 if depth is None else depth} need in a group of {group_size}"
        )
    share = 0.5 if share is None else share
    if not math.isfinite(share) or not 0 < share <= 1:
        raise RuntimeError(f"max_free_mem_usage={share}: expected more than 0 and at most 1")
    how = {"chunk": None if chunk is None else aligned, "io_depth": depth, "source": _source(candidates)}
    return Reading(how, buffer, share)


def _chosen(name: str, given: Any, parse: Callable[[str], Any]) -> Any:
    text = os.environ.get(f"INSTANTTENSOR_{name.upper()}")
    return given if given is not None or text is None else parse(text)


def _check(name: str, value: int | None, most: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, not {type(value).__name__}")
    if value <= 0:
        raise ValueError(f"{name}={value}: expected a number from 1 on")
    if most is not None and value > most:
        raise ValueError(f"{name}={value}: expected at most {most}")


def _check_threads(threads: int | None, candidates: Sequence[Candidate] | None) -> None:
    if threads is None:
        return
    if threads < 0:
        raise ValueError(f"concurrency={threads}: expected 0 or more")
    if threads == 0 and candidates and candidates[0] in _WITH_THREADS:
        raise ValueError(f"concurrency=0: {candidates[0].name} needs one thread or more")


def _candidates(backend: Any) -> list[Candidate] | None:
    if backend is None:
        return None
    found = backend if isinstance(backend, list) else [backend]
    if not found:
        raise ValueError("backend=[]: expected one or more, or None")
    for one in found:
        if not isinstance(one, (Backend, BackendPolicy)):
            raise TypeError(f"backend: expected a Backend, a BackendPolicy or a list of them, not {type(one).__name__}")
    return found


def _backends_of_environment() -> list[Candidate] | None:
    text = os.environ.get("INSTANTTENSOR_BACKEND")
    if text is None:
        return None
    known: dict[str, Candidate] = {**Backend.__members__, **BackendPolicy.__members__}
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise ValueError(f"INSTANTTENSOR_BACKEND={text}: {word} is none of {', '.join(known)}")
    if not words:
        raise ValueError(f"INSTANTTENSOR_BACKEND={text}: expected one or more of {', '.join(known)}")
    return [known[word] for word in words]


def _source(candidates: Sequence[Candidate] | None) -> str | None:
    """The setting `source` for the first candidate: "buffered" if it reads through the page cache. None lets tensorfs
    choose."""
    return "buffered" if candidates and candidates[0] in _THROUGH_PAGE_CACHE else None
