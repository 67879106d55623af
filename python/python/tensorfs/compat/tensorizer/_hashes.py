"""Compares the bytes of tensors in memory with the hashes in their headers."""

from __future__ import annotations

import ctypes
import hashlib
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterable, NamedTuple

from ..._errors import SafetensorError, error
from ._stored import HashType, Header

_STEP = 64 << 20
"""The most bytes that one call hashes."""


class HashMismatchError(SafetensorError):
    """The bytes of a tensor do not match a hash in its header."""


class Loaded(NamedTuple):
    """Memory that holds the bytes of a tensor."""

    name: object
    header: Header
    address: int
    nbytes: int
    owner: Any
    """The object that keeps the memory alive."""


def mismatch(loaded: Loaded) -> str | None:
    """A message about the first hash in the header that the bytes do not match. None if they match all hashes."""
    data = memoryview((ctypes.c_char * loaded.nbytes).from_address(loaded.address)) if loaded.nbytes else memoryview(b"")
    for kind, value in loaded.header.hashes:
        found = _HASHES[kind](loaded.header.hashed, data)
        if found != value:
            word = {HashType.CRC32: "CRC32", HashType.SHA256: "SHA-256"}[kind]
            return (
                f"tensor {loaded.name!r}: its header and its bytes have the {word} {found.hex()}, "
                f"its header says {value.hex()}; restore the file from a good copy"
            )
    return None


def mismatches(all_loaded: Iterable[Loaded]) -> list[str | None]:
    """The result of `mismatch` for each tensor, computed on all cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "tensorfs-hash") as pool:
        return list(pool.map(mismatch, all_loaded))


def check(all_loaded: Iterable[Loaded], path: str) -> None:
    """Raises `HashMismatchError` if the bytes of a tensor differ from its hashes."""
    for message in mismatches(all_loaded):
        if message is not None:
            raise error(message, "hash_mismatch", cls=HashMismatchError, path=path)


def _crc32(header: bytes, data: memoryview) -> bytes:
    value = zlib.crc32(header)
    for start in range(0, len(data), _STEP):
        value = zlib.crc32(data[start : start + _STEP], value)
    return value.to_bytes(4, "little")


def _sha256(header: bytes, data: memoryview) -> bytes:
    hashed: Any = hashlib.sha256(header)
    for start in range(0, len(data), _STEP):
        hashed.update(data[start : start + _STEP])
    return bytes(hashed.digest())


_HASHES: dict[HashType, Callable[[bytes, memoryview], bytes]] = {HashType.CRC32: _crc32, HashType.SHA256: _sha256}
