"""Opens files by path or URL. This module replaces `tensorizer.stream_io`."""

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
    """Opens a local file by its path, or by a `file://` URL, at its byte `begin`. A mode that writes makes the missing
    folders of the path. `buffer_size` is in bytes.

    The other arguments are about S3 and HTTP. They have no effect on local files, as in the tensorizer package.

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
    """The local path that `spec` names, which is a path or a `file://` URL.

    Raises `ValueError` for any other URL. If the URL is that of a remote source, `hint` ends the message.
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

    Raises `ValueError` for a URL that tensorfs cannot read.
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
    """The bytes that `spec` names: at a path or a URL, or of a descriptor or a file object.

    A file object that reads a regular file is read by its descriptor. Any other file object is copied to memory, from
    its position to its end, if a tensorizer file begins there.
    """

    def __init__(self, spec: Any) -> None:
        self._given: Any = None
        self._descriptor: int | None = None
        self._path = ""
        self.start = 0
        """First byte of the tensorizer file, which begins at the position of a file object. Its offsets still count
        from byte 0 of the file object."""
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
        """Opens these bytes as a checkpoint. `secret` is the key if they are encrypted."""
        descriptor = self._descriptor if self._given is None else _regular_file(self._given)
        if self._given is None and descriptor is None:
            return open_checkpoint(self._path, loader, (), secret)
        if descriptor is not None:
            return Checkpoint.open_descriptor(descriptor, self.name, loader.timeout, secret, self.start)
        head = _head_of(self._given)
        # A file object may have no end, so the head is checked before the copy. A file that ends within the head is
        # refused when the copy is opened.
        if len(head) == HEAD_LEN and not head.startswith(b"|TZR|"):
            message = f"{self.name}: does not begin with `|TZR|` at byte {self.start}, so it is no tensorizer file"
            raise error(message, "header_decode", path=self.name)
        descriptor = os.memfd_create("tensorfs-tensors", os.MFD_CLOEXEC)
        try:
            with open(descriptor, "wb", buffering=0, closefd=False) as copy:
                # The copy has a hole in place of the bytes before `start`.
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
    """The name of a file object in messages. Refuses an object that is no file object for reading."""
    if isinstance(spec, io.TextIOBase) or not hasattr(spec, "read"):
        raise TypeError(f"expected a path, a URL or a binary file object, not {type(spec).__name__}")
    if hasattr(spec, "readable") and not spec.readable():
        raise ValueError("the file object is not open for reading; open it in the mode rb")
    name = getattr(spec, "name", None)
    return real_name(os.fsdecode(name)) if isinstance(name, (str, bytes)) else f"<{type(spec).__name__}>"


def _position_of(spec: Any) -> int:
    """The position of a file object. 0 if the object does not tell its position, or tells one that no file can have."""
    position: Any = None
    with contextlib.suppress(AttributeError, NotImplementedError, OSError, ValueError):
        position = spec.tell()
    if not isinstance(position, int) or isinstance(position, bool):
        return 0
    return position if 0 <= position < _POSITION_END else 0


def _head_of(spec: Any) -> bytes:
    """The next bytes of a file object: the length of the head of a tensorizer file, or fewer if the file object ends
    before."""
    head = b""
    while len(head) < HEAD_LEN and (read := spec.read(HEAD_LEN - len(head))):
        head += read
    return head


def _regular_file(spec: Any) -> int | None:
    """The descriptor of a file object that reads a regular file. None for any other file object."""
    opened = spec.file if type(spec).__module__ == "tempfile" and hasattr(spec, "file") else spec
    raw = opened.raw if isinstance(opened, (io.BufferedReader, io.BufferedRandom)) else opened
    # Any other file object may return the descriptor of a file with other bytes. For example, it may decompress that
    # file.
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
