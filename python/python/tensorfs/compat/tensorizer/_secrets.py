"""Keys of encrypted files, as the tensorizer package names them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..._errors import SafetensorError, error
from ..._open import Secret

_KINDS = ("key_required", "not_encrypted", "decrypt_failed")


class CryptographyError(SafetensorError):
    """A key is missing, wrong, or for a file without encryption."""


class DecryptionParams:
    """The key, or the passphrase, that a file was encrypted with. Made by `from_key` or `from_string`."""

    def __init__(self) -> None:
        self._secret: Secret = None

    @classmethod
    def from_key(cls, key: bytes) -> DecryptionParams:
        """A key of 32 bytes."""
        if not isinstance(key, (bytes, bytearray, memoryview)) or len(key) != 32:
            raise ValueError("key: expected 32 bytes")
        made = cls()
        made._secret = "key", bytes(key)
        return made

    @classmethod
    def from_string(cls, source: str | bytes) -> DecryptionParams:
        """A passphrase."""
        if not isinstance(source, (str, bytes)) or not source:
            raise ValueError("source: expected a text or bytes that are not empty")
        made = cls()
        made._secret = "passphrase", source.encode() if isinstance(source, str) else source
        return made

    def __repr__(self) -> str:
        return "<DecryptionParams>"


def secret_of(encryption: Any) -> Secret:
    """The secret of an argument `encryption`."""
    if encryption is None:
        return None
    if not isinstance(encryption, DecryptionParams):
        raise TypeError(f"encryption: expected DecryptionParams, not {type(encryption).__name__}")
    if encryption._secret is None:
        raise ValueError("encryption: has no key; make it by DecryptionParams.from_key or from_string")
    return encryption._secret


@contextlib.contextmanager
def cryptography_errors() -> Iterator[None]:
    """Raises errors about keys within the block as `CryptographyError`."""
    try:
        yield
    except SafetensorError as e:
        if e.kind not in _KINDS or isinstance(e, CryptographyError):
            raise
        raise error(str(e), e.kind, cls=CryptographyError, path=e.path, tensor=e.tensor) from None
