"""Writes tensorizer files in the layout of the tensorizer package, or with one field changed.

The tests do not use the tensorizer package, because it needs torch. `tests/fixtures/make_tensorizer.py` makes files
with this module, and checks that the package reads them.
"""

import dataclasses
import hashlib
import struct
import zlib

import secretbox

# Bytes of the area of entries in files of the tensorizer package.
AREA = 256 * 1024

DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "F64": "<f8", "I64": "<i8", "U64": "<u8", "C64": "<c8", "BF16": "<V2\0torch.bfloat16",
    "F8_E4M3": "|V1\0torch.float8_e4m3fn", "F8_E5M2": "|V1\0torch.float8_e5m2",
    "F8_E4M3FNUZ": "|V1\0torch.float8_e4m3fnuz", "F8_E5M2FNUZ": "|V1\0torch.float8_e5m2fnuz",
    "F8_E8M0": "|V1\0torch.float8_e8m0fnu", "F4": "|V1\0torch.float4_e2m1fn_x2",
}

PARAMETER, BUFFER, STATE_DICT = 0, 1, 2
VERSIONED = 2


@dataclasses.dataclass
class Stored:
    """A tensor as it is stored. `dtype` is the text in the file. The fields `entry_...` replace fields of its entry."""

    name: bytes
    dtype: bytes
    shape: list
    data: bytes
    kind: int = STATE_DICT
    is_long: bool = False
    header_len: int = None
    data_len: int = None
    hashes: list = None
    encryption: bytes = b""
    encrypted: bytes = None
    entry_shape: list = None
    entry_dtype: bytes = None
    entry_kind: int = None
    entry_header: int = None
    entry_data: int = None
    entry_len: int = None

    @classmethod
    def of(cls, name, dtype, shape, data, **fields):
        """A tensor with its name and its dtype in safetensors. A name that is a path is a list."""
        import json

        raw = b"\x1e" + json.dumps(name, separators=(",", ":")).encode() if isinstance(name, list) else name.encode()
        shape = [*shape[:-1], shape[-1] // 2] if dtype == "F4" else list(shape)
        return cls(raw, DTYPES[dtype].encode(), shape, data, **fields)


def _described(name, kind, dtype, shape, is_long):
    return (
        struct.pack("<H", len(name)) + name, bytes([kind]), bytes([len(dtype)]) + dtype,
        bytes([len(shape)]) + struct.pack(f"<{len(shape)}{'Q' if is_long else 'I'}", *shape),
    )


def header_of(tensor):
    """The header before the data of a tensor, with its CRC32 and SHA-256."""
    name, kind, dtype, shape = _described(tensor.name, tensor.kind, tensor.dtype, tensor.shape, tensor.is_long)
    body = struct.pack("<H", 0) + kind + name + dtype + shape
    data_len = struct.pack("<q", len(tensor.data) if tensor.data_len is None else tensor.data_len)

    def joined(hashes):
        section = bytes([len(hashes)]) + b"".join(bytes([kind, len(value)]) + value for kind, value in hashes)
        section = struct.pack("<H", len(section)) + section
        size = 8 + len(body) + len(section) + len(tensor.encryption) + len(data_len)
        size = size if tensor.header_len is None else tensor.header_len
        return struct.pack("<Q", size) + body + section, data_len

    if tensor.hashes is not None:
        before, after = joined(tensor.hashes)
        return before + tensor.encryption + after
    # The hashes cover the plain data, and a header without the part that describes the encryption.
    empty = b"".join(joined([(0, bytes(4)), (1, bytes(32))]))
    crc = zlib.crc32(tensor.data, zlib.crc32(empty))
    before, after = joined([(0, struct.pack("<I", crc)), (1, hashlib.sha256(empty + tensor.data).digest())])
    return before + tensor.encryption + after


def encrypted_file_of(tensors, key, piece=2 << 20, derivation=None):
    """A file of tensors that are encrypted with `key` in pieces of this length. `derivation` has the passes and the
    memory of the key derivation that the file states."""
    stored = []
    for number, tensor in enumerate(tensors):
        nonce = hashlib.sha256(tensor.name + bytes([number])).digest()[:24]
        section, data = secretbox.encrypt(key, tensor.data, piece, nonce)
        if derivation and tensor.data:
            part = struct.pack("<HHQQIH", 1, 1, *derivation, 2, 16) + bytes(16)
            section = struct.pack("<HQ", 2, len(part)) + part + section[10:]
            section = struct.pack("<Q", len(section)) + section
        stored.append(dataclasses.replace(tensor, encryption=section, encrypted=data))
    return file_of(stored, version=3)


def write_long(path, length):
    """Writes a file whose first tensor, `long`, has `length` zeros, which take no disk space. Returns the bytes of the
    second tensor, `last`."""
    last = bytes(range(1, 17))
    long = Stored.of("long", "U8", [length], b"", is_long=True, hashes=[], data_len=length, entry_len=length)
    end = Stored.of("last", "F32", [4], last, hashes=[])
    hole = len(file_of([long, end], end=b"")) - len(header_of(end)) - len(last)
    end.entry_header = hole + length
    end.entry_data = end.entry_header + len(header_of(end))
    data = file_of([long, end])
    with open(path, "wb") as file:
        file.write(data[:hole])
        file.seek(hole + length)
        file.write(data[hole:])
    return last


def file_of(
    tensors, version=None, area=None, count=None, flags=None, magic=b"|TZR|", end=bytes(8), area_len=None, order=None,
    start=0
):
    """A tensorizer file that begins at byte `start` of a larger file, from whose first byte its offsets count. `area`
    is the size of the area of entries. `area_len` is the number that the head states for this size. `order` has the
    positions of the tensors in the list."""
    is_long = any(tensor.is_long for tensor in tensors)
    if version is None:
        version = 5 if is_long else 2 if any(b"\0" in tensor.dtype for tensor in tensors) else 1
    flags = (VERSIONED if is_long else 0) if flags is None else flags
    headers = [header_of(tensor) for tensor in tensors]
    parts = []
    for tensor in tensors:
        dtype = tensor.dtype if tensor.entry_dtype is None else tensor.entry_dtype
        shape = tensor.shape if tensor.entry_shape is None else tensor.entry_shape
        kind = tensor.kind if tensor.entry_kind is None else tensor.entry_kind
        name, kind, dtype, shape = _described(tensor.name, kind, dtype, shape, tensor.is_long)
        tag = struct.pack("<I", 5 if tensor.is_long else 1) if flags & VERSIONED else b""
        parts.append(tag + name + kind + dtype + shape)
    used = sum(len(part) + 24 for part in parts)
    area = used if area is None else area
    entries, body, place = [], b"", start + 73 + area
    for tensor, part, header in zip(tensors, parts, headers):
        start = place if tensor.entry_header is None else tensor.entry_header
        data = place + len(header) if tensor.entry_data is None else tensor.entry_data
        length = len(tensor.data) if tensor.entry_len is None else tensor.entry_len
        entries.append(part + struct.pack("<QQQ", start, data, length))
        body += header + (tensor.data if tensor.encrypted is None else tensor.encrypted)
        place += len(header) + len(tensor.data)
    total = sum(len(tensor.data) for tensor in tensors)
    head = magic + struct.pack("<I", version) + flags.to_bytes(32, "little")
    head += struct.pack("<QQQ", total, 0, len(tensors) if count is None else count)
    head += struct.pack("<Q", area if area_len is None else area_len)
    entries = b"".join(entries if order is None else [entries[index] for index in order])
    return head + entries.ljust(area, b"\0") + body + end
