"""The settings of reading. A setting comes from its argument, else from its environment variable, else from its
default."""

from __future__ import annotations

import os
import typing
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Mapping, Optional, TypedDict, Union

from ._tensorfs import Loader, expect_local_path, parse_size

TYPES: dict[str, tuple[type, ...]] = {
    "chunk": (int, str),
    "io_depth": (int,),
    "pinned_max": (int, str),
    "source": (str,),
    "engine": (str,),
    "io_timeout": (int, float),
}
"""The arguments that are settings of a loader, and the types that their values may have."""

WORDS = tuple(TYPES)


def loader(
    chunk: int | str | None = None,
    io_depth: int | str | None = None,
    pinned_max: int | str | None = None,
    source: str | None = None,
    engine: str | None = None,
    io_timeout: float | str | None = None,
    gpu: int | None = None,
) -> Loader:
    """The loader with these settings, for the CPU or for a GPU. Equal settings share one loader."""

    return _loader(
        _size(*_chosen("chunk", chunk), 4096, 1 << 30),
        _number(*_chosen("io_depth", io_depth), 1, 4096),
        _size(*_chosen("pinned_max", pinned_max), 1 << 20, 1 << 40),
        _word(*_chosen("source", source), ("auto", "direct", "buffered")),
        _word(*_chosen("engine", engine), ("auto", "uring", "threads", "cufile")),
        _seconds(*_chosen("io_timeout", io_timeout)),
        gpu,
    )


def unproven_tail(given: str | None = None) -> str:
    """The consequence of a missing proof that the last pieces are there: "warn" or "error"."""
    return _word(*_chosen("unproven_tail", given), ("warn", "error"))


def disk_cache(folder: str | None = None, size: int | str | None = None) -> tuple[str | None, int | None]:
    """The folder of the disk cache for remote sources, or None for no disk cache, and the most bytes that it may
    take."""
    name, value = _chosen("cache_dir", folder)
    if value == "":
        raise ValueError(f"{name}: expected a folder, or none")
    place = None if value is None or value == "none" else _local(name, str(value))
    return place, _size("cache_dir_size", size, 16 << 20, (1 << 64) - 1)


class RemoteSource(TypedDict, total=False):
    """The arguments that say where a remote source lies, and which file or profile its credentials come from."""

    credentials_file: str | os.PathLike[str] | None
    profile: str | None
    endpoint: str | None
    region: str | None
    ca_file: str | os.PathLike[str] | None


REMOTE_WORDS = tuple(RemoteSource.__annotations__)

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:

    class _Unpacked:
        """Replaces `typing.Unpack` in Python 3.10, which lacks it: `Unpack[X]` is X, so `get_type_hints` finds X."""

        def __class_getitem__(cls, form):
            return form

    # `get_type_hints` looks this name up at run time.
    Unpack = getattr(typing, "Unpack", _Unpacked)

Remote = Union[tuple[Optional[str], Optional[str], Optional[str], Optional[str], Optional[str]], None]
"""The settings of a remote source: the file with the credentials, the profile, the server, the region, and the file of
certificates. None means that all of them come from the environment."""


def remote(given: Mapping[str, Any]) -> Remote:
    """Checks the settings of one remote source. `given` has the arguments by name."""
    for name, value in given.items():
        if name not in REMOTE_WORDS:
            raise TypeError(f"unexpected argument {name!r}")
        if name.endswith("_file") or value is None:
            continue
        if not isinstance(value, str):
            raise TypeError(f"{name}: expected a str, not {type(value).__name__}")
        if value == "":
            raise ValueError(f"{name}: expected a text that is not empty")
    names = ("credentials_file", "ca_file")
    file, trusted = (None if given.get(name) is None else _local(name, given[name]) for name in names)
    words = (file, given.get("profile"), given.get("endpoint"), given.get("region"), trusted)
    return None if words == (None,) * 5 else words


def with_absolute_paths(given: RemoteSource) -> RemoteSource:
    """The arguments of one remote source, checked. Their paths are absolute, so that they mean the same in every
    working directory."""
    chosen = remote(given)
    return {} if chosen is None else typing.cast(RemoteSource, dict(zip(REMOTE_WORDS, chosen)))


def _local(name: str, path: str | os.PathLike[str]) -> str:
    """The absolute path of a file or folder of this machine."""
    expect_local_path(name, path)
    return os.path.abspath(path)


def _chosen(name: str, given: object) -> tuple[str, object]:
    variable = f"TENSORFS_{name.upper()}"
    # An empty variable counts as unset.
    return (name, given) if given is not None else (variable, os.environ.get(variable) or None)


@lru_cache(maxsize=64)
def _loader(
    chunk: int | None,
    depth: int | None,
    staging: int | None,
    source: str,
    engine: str,
    timeout: float | None,
    gpu: int | None,
) -> Loader:
    return Loader(chunk=chunk, depth=depth, staging=staging, source=source, engine=engine, timeout=timeout, gpu=gpu)


def _size(name: str, value: object, least: int, most: int) -> int | None:
    if value is None:
        return None
    size = parse_size(str(value))
    if size is None or not least <= size <= most:
        raise ValueError(f"{name}={value}: expected a size from {least} to {most} bytes, like 16M")
    return size


def _number(name: str, value: object, least: int, most: int) -> int | None:
    if value is None:
        return None
    text = str(value)
    number = int(text) if text.isascii() and text.isdigit() else -1
    if not least <= number <= most:
        raise ValueError(f"{name}={value}: expected a number from {least} to {most}")
    return number


def _word(name: str, value: object, words: tuple[str, ...]) -> str:
    if value is None:
        return words[0]
    if value not in words:
        raise ValueError(f"{name}={value}: expected {', '.join(words[:-1])} or {words[-1]}")
    return str(value)


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 1e9:
        raise ValueError(f"{name}={value}: expected seconds, or 0 for none")
    return seconds
