"""Files by path or `file://` URL: in place of `tensorizer.stream_io`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import stat
from typing import Any, BinaryIO, Union
from urllib.parse import unquote

from ..._errors import error, shown
from ..._open import Secret, open_checkpoint
from ..._tensorfs import SCHEMES, Checkpoint, Loader, real_name
from ._stored import HEAD_LEN

__all__ = ["open_stream"]

FileSpec = Union[str, bytes, os.PathLike[str], os.PathLike[bytes], int]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)

_COPIED = 16 << 20
_POSITION_END = 1 << 62


def open_stream(
    path_uri: str | bytes | os.PathLike[str] | os.PathLike[bytes],
    mode: str = "rb",
    s3_access_key_id: str | None = None,
    s3_secret_access_key: str | None = None,
    s3_endpoint: str | None = None,
    s3_config_path: str | bytes | os.PathLike[str] | None = None,
    buffer_size: int | None = None,
    force_http: bool | None = None,
    *,
    begin: int | None = None,
    end: int | None = None,
    s3_region_name: str | None = None,
    s3_signature_version: str | None = None,
    certificate_handling: Any = None,
) -> BinaryIO:
    """Opens a local file by its path, or by a `file://` URL, at its byte `begin`. A mode that writes makes the folders
    above it. `buffer_size` is in bytes.

    The other arguments are about S3 and HTTP, and change nothing, as in the tensorizer package.

    Raises `ValueError` for other URLs, and for modes that are not binary.
    """
    if "b" not in mode:
        raise ValueError(f'mode {mode!r}: a binary mode is needed, such as "rb" or "wb"')
    path = local_path(path_uri, hint="; TensorDeserializer reads its URL")
    if set("wax") & set(mode):
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
    opened: Any = open(path, mode, buffering=io.DEFAULT_BUFFER_SIZE if buffer_size is None else buffer_size)
    if begin:
        opened.seek(begin)
    return opened  # type: ignore[no-any-return]


def local_path(spec: str | bytes | os.PathLike[str] | os.PathLike[bytes], hint: str = "") -> str:
    """The path that a path or a URL means.

    Raises `ValueError` for a URL of something that is no local file, with `hint` for one of a remote source.
    """
    text = os.fsdecode(spec)
    found = _URL.fullmatch(text) if isinstance(spec, (str, bytes)) else None
    if found is None:
        return text
    scheme, rest = found[1].lower(), found[2]
    host, slash, path = rest.partition("/")
    if scheme != "file":
        message = f"{real_name(text)}: only local files are opened as streams and written{hint if scheme in SCHEMES else ''}"
        raise ValueError(shown(message))
    if host not in ("", "localhost") or not slash:
        raise ValueError(shown(f"{real_name(text)}: expected file:///PATH, with a path from the root on"))
    return unquote("/" + path)


def source_path(spec: str | bytes | os.PathLike[str] | os.PathLike[bytes]) -> str:
    """The path or the URL that tensors are read from.

    Raises `ValueError` for a URL of another kind.
    """
    text = os.fsdecode(spec)
    found = _URL.fullmatch(text) if isinstance(spec, (str, bytes)) else None
    if found is None or found[1].lower() == "file":
        return local_path(spec)
    if found[1].lower() not in SCHEMES:
        message = f"{real_name(text)}: expected a path, file:///PATH, or a URL of {', '.join(SCHEMES)}"
        raise ValueError(shown(message))
    return f"{found[1].lower()}://{found[2]}"


class TensorSource:
    """The bytes that `spec` stands for: at a path or a URL, or behind a descriptor.

    A file object that reads a regular file is read by its descriptor. The rest of any other one is copied to memory if
    it begins as a tensorizer file.
    """

    def __init__(self, spec: Any) -> None:
        self._given: Any = None
        self._descriptor: int | None = None
        self._path = ""
        self.start = 0
        """Where the tensorizer file begins: at the position of a file object. Its offsets count from byte 0."""
        if isinstance(spec, bool):
            raise TypeError("expected a path, a URL, a file object or a descriptor, not bool")
        if isinstance(spec, int):
            if not stat.S_ISREG(os.fstat(spec).st_mode):
                raise ValueError(f"descriptor {spec}: is no regular file; pass a file object, which is read to its end")
            self.name, self._descriptor = f"<descriptor {spec}>", spec
        elif isinstance(spec, (str, bytes, os.PathLike)):
            self._path = source_path(spec)
            self.name = real_name(self._path)
        else:
            self._given = spec
            self.name = _name_of(spec)
            self.start = _position_of(spec)

    def open(self, loader: Loader, secret: Secret) -> Checkpoint:
        """The checkpoint that it is. `secret` opens it if it is encrypted."""
        descriptor = self._descriptor if self._given is None else _regular_file(self._given)
        if self._given is None and descriptor is None:
            return open_checkpoint(self._path, loader, (), secret)
        if descriptor is not None:
            return Checkpoint.open_descriptor(descriptor, self.name, loader.timeout, secret, self.start)
        head = _head_of(self._given)
        # A file object may have no end. One that ends within the head is refused when it is opened.
        if len(head) == HEAD_LEN and not head.startswith(b"|TZR|"):
            message = f"{self.name}: does not begin with `|TZR|` at byte {self.start}, so it is no tensorizer file"
            raise error(message, "header_decode", path=self.name)
        descriptor = os.memfd_create("tensorfs-tensors", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", buffering=0, closefd=False) as copy:
                # A hole stands for the bytes in front.
                copy.seek(self.start)
                copy.write(head)
                shutil.copyfileobj(self._given, copy, _COPIED)
            return Checkpoint.open_descriptor(descriptor, self.name, loader.timeout, secret, self.start)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Closes the file object of the caller, as the tensorizer package does."""
        given, self._given = self._given, None
        if given is not None and hasattr(given, "close"):
            given.close()


def _name_of(spec: Any) -> str:
    """The name of a file object in messages. Refuses objects that are none."""
    if isinstance(spec, io.TextIOBase) or not hasattr(spec, "read"):
        raise TypeError(f"expected a path, a URL or a binary file object, not {type(spec).__name__}")
    if hasattr(spec, "readable") and not spec.readable():
        raise ValueError("the file object is not open for reading; open it in the mode rb")
    name = getattr(spec, "name", None)
    return real_name(os.fsdecode(name)) if isinstance(name, (str, bytes)) else f"<{type(spec).__name__}>"


def _position_of(spec: Any) -> int:
    """The position of a file object; 0 for one that does not tell it, or no place of a file."""
    position: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError, OSError, ValueError):
        position = spec.tell()
    if not isinstance(position, int) or isinstance(position, bool):
        return 0
    return position if 0 <= position < _POSITION_END else 0


def _head_of(spec: Any) -> bytes:
    """The next bytes of a file object: the head of a tensorizer file, or all if there are fewer."""
    head = b""
    while len(head) < HEAD_LEN and (read := spec.read(HEAD_LEN - len(head))):
        head += read
    return head


def _regular_file(spec: Any) -> int | None:
    """The descriptor of a file object that reads a regular file."""
    opened = spec.file if type(spec).__module__ == "tempfile" and hasattr(spec, "file") else spec
    raw = opened.raw if isinstance(opened, (io.BufferedReader, io.BufferedRandom)) else opened
    # Another file object, such as one that unpacks, may give the descriptor of a file with other bytes.
    if not isinstance(raw, io.FileIO):
        return None
    descriptor = None
    with contextlib.suppress(OSError):
        descriptor = raw.fileno()
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
    if isinstance(opened, io.BufferedRandom):
        # Bytes that were written to the object may not be in the file yet.
        opened.flush()
    return descriptor
