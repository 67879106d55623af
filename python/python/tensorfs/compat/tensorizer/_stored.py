"""Decodes the list of tensors of a tensorizer file, and the headers of its tensors. The native part has checked both
before, so this module does not check them again."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple, Union

from ..._errors import error

HEAD_LEN = 73
"""Length of the fixed head in bytes. The list of tensors follows it."""

_ENCRYPTED, _VERSIONED = 1, 2
"""Flags of the head."""

_LONG = 5
"""The version of an entry whose dimensions have 64 bits."""

_PATH_MARK = 0x1E
"""First byte of a name that encodes a path."""

Step = Union[str, int]
Path = tuple[Step, ...]
"""The keys and positions that lead to a tensor in nested dicts and lists."""


class TensorType(IntEnum):
    """The role in which a tensor was saved."""

    PARAM = 0
    BUFFER = 1
    STATE_DICT = 2


class HashType(IntEnum):
    """The kind of a hash in the header of a tensor."""

    CRC32 = 0
    SHA256 = 1


class Entry(NamedTuple):
    """An entry in the list of tensors."""

    path: Path
    type: TensorType
    dtype: str
    """The code of the dtype in numpy."""
    torch_dtype: str | None
    """The name of the dtype in torch, if numpy lacks this dtype."""
    shape: tuple[int, ...]
    """The shape in elements of torch and numpy."""
    is_long: bool
    header: tuple[int, int]
    """First byte and end of its header in the file."""
    data_length: int

    @property
    def numpy_code(self) -> str:
        """The numpy code for an array of this tensor. If numpy lacks the dtype, it is a code of integers of the same
        width."""
        return self.dtype if self.torch_dtype is None else self.dtype.replace("V", "i")

    @property
    def name(self) -> str | Path:
        """The name that callers see: a text, or a path as a tuple."""
        return shown_name(self.path)

    @property
    def joined(self) -> str:
        """The name of the tensor in tensorfs: the steps of its path, joined by dots."""
        return ".".join(map(str, self.path))


class Header(NamedTuple):
    """The header of a tensor."""

    module_index: int
    hashed: bytes
    """The part of the header that the hashes cover. They also cover the data of the tensor, which follows it."""
    hashes: list[tuple[HashType, bytes]]


class StoredList(NamedTuple):
    """The tensors of a file, in their order."""

    version: int
    is_encrypted: bool
    entries: list[Entry]


def shown_name(path: Path) -> str | Path:
    return path[0] if len(path) == 1 and isinstance(path[0], str) else path


def area_of(head: bytes, start: int, path: str) -> tuple[int, int]:
    """First byte and end of the list of tensors. `head` has the first bytes of the tensorizer file, which begins at
    byte `start`."""
    if len(head) < HEAD_LEN or not head.startswith(b"|TZR|"):
        raise error(f"{path}: is no tensorizer file; load it by tensorfs.safe_open", "header_decode", path=path)
    (length,) = struct.unpack_from("<Q", head, 65)
    return start + HEAD_LEN, start + HEAD_LEN + length


def decode_list(head: bytes, area: bytes) -> StoredList:
    """Decodes the list of tensors, whose bytes are `area`. `head` has the bytes before the list."""
    (version,) = struct.unpack_from("<I", head, 5)
    flags = head[9]
    (count,) = struct.unpack_from("<Q", head, 57)
    is_encrypted = version == 3 or (version >= 4 and bool(flags & _ENCRYPTED))
    entries, offset = [], 0
    for _ in range(count):
        entry_version = 1
        if flags & _VERSIONED:
            (entry_version,) = struct.unpack_from("<I", area, offset)
            offset += 4
        entry, offset = _entry(area, offset, entry_version == _LONG)
        entries.append(entry)
    return StoredList(version, is_encrypted, entries)


def _entry(area: bytes, offset: int, is_long: bool) -> tuple[Entry, int]:
    name, offset = _text(area, offset, "H")
    kind = TensorType(area[offset])
    dtype, offset = _text(area, offset + 1, "B")
    shape, offset = _shape(area, offset, is_long)
    header, data, length = struct.unpack_from("<QQQ", area, offset)
    code, _, torch_dtype = dtype.decode().partition("\0")
    path: Path = tuple(json.loads(name[1:])) if name[0] == _PATH_MARK else (name.decode(),)
    entry = Entry(path, kind, code, torch_dtype or None, shape, is_long, (header, data), length)
    return entry, offset + 24


def decode_header(header: bytes, is_long: bool, is_encrypted: bool) -> Header:
    (module_index,) = struct.unpack_from("<H", header, 8)
    _, offset = _text(header, 11, "H")
    _, offset = _text(header, offset, "B")
    _, offset = _shape(header, offset, is_long)
    (length,) = struct.unpack_from("<H", header, offset)
    offset += 2
    end = offset + length
    # A hash is computed with zeros in place of all hash values, and without the part that describes the encryption.
    hashed = bytearray(header)
    hashes = []
    count, offset = header[offset], offset + 1
    for _ in range(count):
        kind, size = header[offset], header[offset + 1]
        offset += 2
        hashes.append((HashType(kind), header[offset : offset + size]))
        hashed[offset : offset + size] = bytes(size)
        offset += size
    if is_encrypted:
        del hashed[end:-8]
    return Header(module_index, bytes(hashed), hashes)


def _text(data: bytes, offset: int, length: str) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(f"<{length}", data, offset)
    start = offset + struct.calcsize(length)
    return data[start : start + size], start + size


def _shape(data: bytes, offset: int, is_long: bool) -> tuple[tuple[int, ...], int]:
    layout = f"<{data[offset]}{'Q' if is_long else 'I'}"
    return struct.unpack_from(layout, data, offset + 1), offset + 1 + struct.calcsize(layout)


def nested(entries: list[tuple[Path, Any]], wrap: Any) -> Any:
    """Values by their paths, as nested dicts and lists. `wrap` converts the dict of a layer to the object that is
    returned."""
    base: dict[Step, Any] = {}
    for path, value in entries:
        if not path:
            return value
        layer = base
        for step in path[:-1]:
            layer = layer.setdefault(step, _Layer())
        layer[path[-1]] = value
    return _wrapped(base, wrap)


class _Layer(dict[Step, Any]):
    """A dict that was made for a layer. Any other dict is a value."""


def _wrapped(layer: dict[Step, Any], wrap: Any) -> Any:
    return wrap({step: _wrapped(below, wrap) if isinstance(below, _Layer) else below for step, below in layer.items()})


def as_list_or_dict(layer: dict[Step, Any]) -> Any:
    """A layer as it was saved: as a list if its keys are positions."""
    if layer and all(isinstance(step, int) for step in layer):
        return [layer[step] for step in sorted(layer)]  # type: ignore[type-var]
    return layer


def structure_of(entries: list[Entry], is_wanted: Any) -> dict[Step, Any]:
    """The layers of a file: nested dicts, whose leaves are the paths of the wanted tensors."""
    base: dict[Step, Any] = {}
    for entry in entries:
        layer = base
        for depth, step in enumerate(entry.path):
            first = next(iter(layer), step)
            if isinstance(first, str) != isinstance(step, str):
                above = list(entry.path[:depth])
                message = f"tensor {entry.joined}: the layer {above} has the key {first!r} and the position {step!r}"
                raise error(f"{message}, so it is neither a dict nor a list; save it again", "header_decode")
            if depth + 1 < len(entry.path):
                layer = layer.setdefault(step, {})
            else:
                layer[step] = entry.path
    _prune(base, is_wanted)
    return base


def _prune(layer: dict[Step, Any], is_wanted: Any) -> None:
    for step, below in list(layer.items()):
        if isinstance(below, dict):
            _prune(below, is_wanted)
        elif not is_wanted(below):
            del layer[step]
