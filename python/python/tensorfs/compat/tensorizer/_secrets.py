"""The keys of encrypted files, in classes with the names of the tensorizer package."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..._errors import SafetensorError, error
from ..._open import Secret
from ..._tensorfs import derive_key

_KINDS = ("key_required", "not_encrypted", "decrypt_failed")

_KEY_LEN = 32
_SALT_LEN = 16

_WORK_MAX = 16 << 30
"""The most bytes that all passes of a key derivation write together. A file that needs more is refused."""


class CryptographyError(SafetensorError):
    """A key is missing or wrong, or was given for a file that is not encrypted."""


def _checked_key(key: Any) -> bytes:
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise TypeError(f"key: expected bytes, not {type(key).__name__}; from_string takes a passphrase")
    made = bytes(key)
    if len(made) != _KEY_LEN:
        raise ValueError(f"key: expected {_KEY_LEN} bytes, not {len(made)}; from_string takes a passphrase")
    return made


def _checked_passphrase(source: Any, encoding: str) -> bytes:
    if not isinstance(source, (str, bytes)):
        raise TypeError(f"source: expected a text or bytes, not {type(source).__name__}")
    if not source:
        raise ValueError("source: is empty; give a passphrase")
    return source.encode(encoding) if isinstance(source, str) else source


class _OpsLimit(enum.IntEnum):
    """The presets of libsodium for the number of passes of a key derivation."""

    MIN = 1
    INTERACTIVE = 2
    MODERATE = 3
    SENSITIVE = 4


class _MemLimit(enum.IntEnum):
    """The presets of libsodium for the memory of a key derivation, in bytes."""

    MIN = 8 << 10
    INTERACTIVE = 64 << 20
    MODERATE = 256 << 20
    SENSITIVE = 1 << 30


class _Derivation(NamedTuple):
    """The parameters with which a key is derived from a passphrase."""

    passes: int
    memory_bytes: int
    salt: bytes


def _checked_derivation(opslimit: Any, memlimit: Any, salt: Any) -> _Derivation:
    """The limits and the salt of a key derivation. Raises an error for values that readers would refuse."""
    for name, limit, other in (("opslimit", opslimit, _MemLimit), ("memlimit", memlimit, _OpsLimit)):
        if isinstance(limit, other) or not isinstance(limit, (int, type(None))):
            raise TypeError(f"{name}: expected a number or None, not {type(limit).__name__.lstrip('_')}")
    memory = int(_MemLimit.MODERATE if memlimit is None else memlimit)
    if not _MemLimit.MIN <= memory <= _MemLimit.SENSITIVE:
        raise ValueError(f"memlimit={memory}: expected {_MemLimit.MIN:d} to {_MemLimit.SENSITIVE:d} bytes")
    passes = int(_OpsLimit.MODERATE if opslimit is None else opslimit)
    if not _OpsLimit.MIN <= passes <= _WORK_MAX // memory:
        raise ValueError(f"opslimit={passes}: expected 1 to {_WORK_MAX // memory} passes over {memory} bytes of memory")
    if salt is None:
        salt = secrets.token_bytes(_SALT_LEN)
    if not isinstance(salt, (bytes, bytearray, memoryview)):
        raise TypeError(f"salt: expected bytes or None, not {type(salt).__name__}")
    salt = bytes(salt)
    if len(salt) != _SALT_LEN:
        raise ValueError(f"salt: expected {_SALT_LEN} bytes, not {len(salt)}")
    return _Derivation(passes, memory, salt)


@dataclasses.dataclass(init=False, repr=False)
class EncryptionParams:
    """The key that a file is encrypted with. `key` has its 32 bytes. `random` and `from_string` make a new key.

    `EncryptionParams(key)` uses an existing key. Keep `key`, or the passphrase: the file can only be opened with it.
    """

    OpsLimit = _OpsLimit
    MemLimit = _MemLimit

    key: bytes
    _derivation: _Derivation | None

    def __init__(self, key: bytes) -> None:
        self.key = _checked_key(key)
        self._derivation = None

    @classmethod
    def random(cls) -> EncryptionParams:
        """A random key."""
        return cls(secrets.token_bytes(_KEY_LEN))

    @classmethod
    def from_string(
        cls,
        source: str | bytes,
        opslimit: int | None = None,
        memlimit: int | None = None,
        salt: bytes | None = None,
        *,
        encoding: str = "utf-8",
    ) -> EncryptionParams:
        """Derives a key from a passphrase, by Argon2id. `DecryptionParams.from_string` derives the same key again.

        `opslimit` is the number of passes, 3 by default, and `memlimit` the memory in bytes, 256 MiB by default. At
        most 1 GiB of memory is used, and all passes together write 16 GiB at most. `salt` has 16 bytes. None makes a
        random salt. The file stores these three values.
        """
        passphrase, derivation = _checked_passphrase(source, encoding), _checked_derivation(opslimit, memlimit, salt)
        made = cls(derive_key(passphrase, *derivation))
        made._derivation = derivation
        return made

    @property
    def salt(self) -> bytes:
        """The salt of the derivation. Raises `ValueError` for a key that is not derived from a passphrase."""
        if self._derivation is None:
            raise ValueError("the key is not derived from a passphrase, so it has no salt")
        return self._derivation.salt

    def __repr__(self) -> str:
        return "<EncryptionParams>"


@dataclasses.dataclass(init=False, repr=False)
class DecryptionParams:
    """The key, or the passphrase, that a file was encrypted with. Made by `from_key` or `from_string`."""

    key: bytes | None
    source: bytes | None
    """The passphrase."""

    def __init__(self) -> None:
        self.key = None
        self.source = None

    @classmethod
    def from_key(cls, key: bytes) -> DecryptionParams:
        """A key of 32 bytes: `key` of the `EncryptionParams`."""
        made = cls()
        made.key = _checked_key(key)
        return made

    @classmethod
    def from_string(cls, source: str | bytes, *, encoding: str = "utf-8") -> DecryptionParams:
        """A passphrase."""
        made = cls()
        made.source = _checked_passphrase(source, encoding)
        return made

    def __repr__(self) -> str:
        return "<DecryptionParams>"


def secret_of(encryption: Any) -> Secret:
    """The secret in the argument `encryption` of a reader."""
    if encryption is None:
        return None
    if not isinstance(encryption, DecryptionParams):
        raise TypeError(f"encryption: expected DecryptionParams or None, not {type(encryption).__name__}")
    if encryption.key is not None:
        return "key", encryption.key
    if encryption.source is not None:
        return "passphrase", encryption.source
    raise ValueError("encryption: has no key; make it by DecryptionParams.from_key or from_string")


def key_of(encryption: Any) -> tuple[bytes | None, tuple[int, int, bytes] | None]:
    """The key in the argument `encryption` of a writer, and its derivation."""
    if encryption is None:
        return None, None
    if not isinstance(encryption, EncryptionParams):
        raise TypeError(f"encryption: expected EncryptionParams or None, not {type(encryption).__name__}")
    return _checked_key(encryption.key), encryption._derivation


@contextlib.contextmanager
def cryptography_errors() -> Iterator[None]:
    """Raises errors about keys within the block as `CryptographyError`."""
    try:
        yield
    except SafetensorError as e:
        if e.kind not in _KINDS or isinstance(e, CryptographyError):
            raise
        raise error(str(e), e.kind, cls=CryptographyError, path=e.path, tensor=e.tensor) from None
