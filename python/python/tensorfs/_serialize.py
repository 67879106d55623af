"""Makes safetensors files of memory whose addresses the caller passes."""

from __future__ import annotations

import ctypes
import json
import math
import operator
import os
import tempfile
from typing import Any, Iterator, Mapping, NoReturn, Sequence, Union

from ._errors import error

# Name of a dtype in numpy and torch -> name in a header, and bits of an element. Tensors lie in a file in the order of
# this table: so each tensor begins at a multiple of the length of its elements.
_DTYPES = {
    "uint64": ("U64", 64),
    "int64": ("I64", 64),
    "float64": ("F64", 64),
    "complex64": ("C64", 64),
    "float32": ("F32", 32),
    "uint32": ("U32", 32),
    "int32": ("I32", 32),
    "bfloat16": ("BF16", 16),
    "float16": ("F16", 16),
    "uint16": ("U16", 16),
    "int16": ("I16", 16),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 8),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 8),
    "float8_e8m0fnu": ("F8_E8M0", 8),
    "float8_e4m3fn": ("F8_E4M3", 8),
    "float8_e5m2": ("F8_E5M2", 8),
    "int8": ("I8", 8),
    "uint8": ("U8", 8),
    "float4_e2m1fn_x2": ("F4", 4),
    "bool": ("BOOL", 8),
}
_BITS = dict(_DTYPES.values())
_PLACE = {dtype: place for place, (dtype, _) in enumerate(_DTYPES.values())}
_PACKED = "float4_e2m1fn_x2"
_WIDTH_OF_LENGTHS = 64


class TensorSpec:
    """A tensor in memory, for `serialize` and `serialize_file`: the name of its dtype in numpy or torch, its shape, its
    address, and its length in bytes. The memory must stay valid until these functions return. An element of the torch
    dtype `float4_e2m1fn_x2` holds two elements of the file, so the attribute `shape` doubles the last dimension."""

    __slots__ = ("_dtype", "_shape", "_data_ptr", "_data_len")

    def __init__(self, *, dtype: str, shape: Sequence[int], data_ptr: int, data_len: int) -> None:
        if dtype not in _DTYPES:
            raise error(f"Unknown dtype {json.dumps(dtype)}. Supported dtypes: {', '.join(_DTYPES)}", "unknown_dtype")
        sizes = [_unsigned(size) for size in shape]
        if dtype == _PACKED and sizes:
            sizes[-1] *= 2
        self._dtype, self._shape = _DTYPES[dtype][0], sizes
        self._data_ptr, self._data_len = _unsigned(data_ptr), _unsigned(data_len)

    @property
    def dtype(self) -> str:
        """The name of the dtype in a header."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """The shape in a header."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """The address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """The length in bytes."""
        return self._data_len

    def __repr__(self) -> str:
        where = f"data_ptr={self._data_ptr}, data_len={self._data_len}"
        return f"TensorSpec(dtype={self._dtype!r}, shape={self._shape}, {where})"


def serialize(tensor_dict: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file with these tensors."""
    return b"".join(_parts(tensor_dict, metadata))


def serialize_file(
    tensor_dict: Mapping[str, TensorSpec],
    filename: Union[str, os.PathLike[str]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes these tensors to a safetensors file, which appears under its name when it is complete."""
    if not isinstance(filename, (str, os.PathLike)):
        raise TypeError(f"filename: expected a str or a path, not {type(filename).__name__}")
    path = os.fsdecode(filename)
    parts = _parts(tensor_dict, metadata)
    header = next(parts)
    try:
        # Writes to a temporary file first, so that a reader sees either the old file or the whole new file.
        with tempfile.NamedTemporaryFile(dir=os.path.dirname(path) or ".", prefix=".tensorfs-", delete=False) as file:
            try:
                file.write(header)
                for part in parts:
                    file.write(part)
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as e:
        raise error(f"Error while serializing: {path}: {e.strerror or e}", "io", path=path) from e


def _parts(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> Iterator[Any]:
    """The header, and then the bytes of each tensor, without a copy."""
    header: dict[str, Any] = {}
    if metadata is not None:
        for key, value in metadata.items():
            for word in (key, value):
                if not isinstance(word, str):
                    raise TypeError(f"metadata: expected words, not {type(word).__name__}")
        header["__metadata__"] = {key: metadata[key] for key in sorted(metadata)}
    begin, ordered = 0, []
    for name, spec in tensors.items():
        if not isinstance(name, str) or not all(hasattr(spec, word) for word in ("dtype", "shape", "data_ptr", "data_len")):
            _refuse_type(name, spec)
        if name == "__metadata__":
            raise error("a tensor of a safetensors file cannot have the name `__metadata__`", tensor=name)
        ordered.append((_PLACE[spec.dtype], name.encode(), name, spec))
    ordered.sort(key=operator.itemgetter(0, 1))
    for _, _, name, spec in ordered:
        bits = math.prod(spec.shape) * _BITS[spec.dtype]
        if bits >= 1 << _WIDTH_OF_LENGTHS + 3:
            raise error(f"Error while serializing: tensor `{name}` of shape {spec.shape} has more than 2^64 bytes", tensor=name)
        if bits % 8 or bits // 8 != spec.data_len:
            raise error(
                f"Error while serializing: tensor `{name}`: {spec.dtype} {spec.shape} takes {bits / 8:g} bytes, and "
                f"{spec.data_len} are given",
                tensor=name,
            )
        end = begin + spec.data_len
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, _, _, spec in ordered:
        if spec.data_len:
            yield memoryview((ctypes.c_ubyte * spec.data_len).from_address(spec.data_ptr)).cast("B")


def _refuse_type(name: object, spec: object) -> NoReturn:
    found = type(spec if isinstance(name, str) else name).__name__
    raise TypeError(f"tensor_dict: expected names and a TensorSpec for each, not {found}")


def _unsigned(number: Any) -> int:
    found = operator.index(number)
    if not 0 <= found < 1 << _WIDTH_OF_LENGTHS:
        raise OverflowError(f"{found} is no number of 64 bits without a sign")
    return found


def _umask() -> int:
    """The umask of this process: the permission bits that its new files lack."""
    with open("/proc/self/status") as status:
        found = next((line for line in status if line.startswith("Umask:")), "Umask: 022")
    return int(found.split()[1], 8)
