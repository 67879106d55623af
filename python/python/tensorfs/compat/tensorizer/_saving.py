"""`TensorSerializer`: writes tensors of torch and arrays of numpy to tensorizer files."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import operator
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..._errors import DtypeError, MismatchError, SafetensorError, error
from ..._tensorfs import TensorizerWriter, process_token
from ._secrets import EncryptionParams, key_of
from ._stored import Path, TensorType, shown_name
from .stream_io import local_path

_BATCH_MAX = 256 << 20
"""The most bytes, in one batch, of copies and of tensors that are removed from their module after the write. A longer
tensor is written alone."""

_CODES = {
    **{"bool": "|b1", "uint8": "|u1", "int8": "|i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4"},
    **{"uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8"},
    "bfloat16": "<V2\0torch.bfloat16",
    **{
        name: f"|V1\0torch.{name}"
        for name in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        )
    },
}
"""The codes of dtypes in a file, by the names of the dtypes in torch and numpy."""


class _ToWrite(NamedTuple):
    """A tensor that is to be written."""

    module_index: int
    path: Path
    type: TensorType
    tensor: Any
    remove_from: Any = None
    """The module from which the tensor is removed after the write."""


class _Memory(NamedTuple):
    """A tensor as it is written, with the place of its bytes in memory."""

    dtype: str
    shape: list[int]
    address: int | None
    """None for a meta tensor, which has no memory. Its bytes are zeros."""
    length: int | None
    """The length in bytes. None for a tensor whose data is not written."""
    owner: Any
    is_copy: bool = False
    """Whether the bytes are a copy, which only this object keeps alive."""


class TensorSerializer:
    """Writes a tensorizer file.

    `file_obj` is a path or a `file://` URL, a descriptor, or a binary file object that can seek. A file at a path
    appears whole when the serializer is closed. Until then, the old file at this path stays. If the path is a link, the
    link stays, and leads to the new file. A file object has to be at its first byte. When the serializer is closed, the
    file object is truncated after the last tensor and closed.

    `encryption` has the key with which the data is encrypted. No unencrypted byte of the data is written.

    `compress_tensors` has no effect, as in the tensorizer package. `limit_cpu_concurrency` has no effect, because a
    fixed number of threads computes the hashes.
    """

    def __init__(
        self,
        file_obj: Any,
        compress_tensors: bool = False,
        *,
        encryption: EncryptionParams | None = None,
        limit_cpu_concurrency: int | None = None,
    ) -> None:
        self._writer: TensorizerWriter | None = None
        self._file: Any = None
        key, derivation = key_of(encryption)
        if limit_cpu_concurrency is not None and operator.index(limit_cpu_concurrency) < 1:
            raise ValueError(f"limit_cpu_concurrency={limit_cpu_concurrency}: expected a number from 1 on, or None")
        self._names: dict[str, Path] = {}
        # For each layer of nested dicts and lists: the type of its keys, which is `str` for a dict and `int` for a
        # list.
        self._layers: dict[Path, type] = {}
        self._failed = False
        self._process = process_token()
        if isinstance(file_obj, (str, bytes, os.PathLike)):
            path = os.path.realpath(local_path(file_obj))
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._writer = TensorizerWriter(path, key=key, derivation=derivation)
            return
        self._file = io.FileIO(os.dup(file_obj), "wb") if _is_descriptor(file_obj) else file_obj
        _check_file_object(self._file)
        self._writer = TensorizerWriter(file=self._file, key=key, derivation=derivation)

    @property
    def total_tensor_bytes(self) -> int:
        """Bytes of the tensors that have been written so far."""
        return self._open().data_len

    def write_tensor(self, idx: int, name: str | Path, tensor_type: TensorType | int, tensor: Any) -> None:
        """Writes a tensor of torch or an array of numpy. `idx` is the index of its module."""
        path = (name,) if isinstance(name, str) else tuple(name)
        self._write([_ToWrite(operator.index(idx), path, TensorType(tensor_type), tensor)])

    def write_state_dict(self, state_dict: Any) -> None:
        """Writes the tensors of a dict or a list, which may contain further dicts and lists. Keys are texts."""
        self._write(_ToWrite(0, path, TensorType.STATE_DICT, tensor) for path, tensor in _leaves(state_dict, ()))

    def write_module(
        self, m: Any, remove_tensors: bool = False, *, include_non_persistent_buffers: bool = True
    ) -> None:
        """Writes the parameters and buffers of a module, for `TensorDeserializer.load_into_module`.

        With `remove_tensors` the module has None in place of each tensor that is written.
        """
        self._write(_of_module(m, remove_tensors, include_non_persistent_buffers))

    def close(self) -> None:
        """Completes the file, which appears at its path then. After an error, no part of the file is left at its path.

        Raises `ValueError` if no tensor was written: a file without tensors cannot be read.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            if self._failed:
                writer.abort()
            elif not self._names:
                writer.abort()
                raise ValueError("no tensor was written; a tensorizer file has at least one")
            else:
                _cut(self._file, writer.finish())
        finally:
            if self._file is not None:
                self._file.close()

    def __del__(self) -> None:
        writer = self.__dict__.get("_writer")
        if writer is None or self._process != process_token():
            return
        if self._names and not self._failed:
            warnings.warn("a TensorSerializer was not closed, so its file was not written", ResourceWarning, source=self)
        writer.abort()

    def _open(self) -> TensorizerWriter:
        if self._writer is None:
            raise ValueError("the serializer is closed")
        return self._writer

    def _write(self, tensors: Iterable[_ToWrite]) -> None:
        writer = self._open()
        try:
            waiting = deque(tensors)
            for one in waiting:
                self._add_name(one)
            writer.reserve([_native(one, _described(one)) for one in waiting])
            # Tensors are removed from `waiting`, so that a written tensor can be freed.
            for batch in _batches(waiting.popleft() for _ in range(len(waiting))):
                writer.write([_native(one, memory) for one, memory in batch])
                for one, _ in batch:
                    if one.remove_from is not None:
                        setattr(one.remove_from, str(one.path[0]).rpartition(".")[2], None)
        except BaseException:
            self._failed = True
            raise

    def _add_name(self, one: _ToWrite) -> None:
        """Records the name of a tensor. Refuses a name that a reader could confuse with the name of another tensor."""
        path = one.path
        if not all(isinstance(step, str) or (type(step) is int and step >= 0) for step in path) or not path:
            raise TypeError(f"name {path!r}: expected a text, or a path of texts and positions")
        if len(path) > 1 or not isinstance(path[0], str):
            if one.type is not TensorType.STATE_DICT:
                raise ValueError(f"tensor {path!r}: a path is the name of a value of a state dict only")
        joined = ".".join(map(str, path))
        if not joined or joined[0] == "\x1e":
            raise ValueError(f"name {joined!r}: expected a text that is not empty, and does not begin with the byte 0x1e")
        above = (path[:depth] for depth in range(1, len(path)))
        written = (layer for layer in above if self._names.get(".".join(map(str, layer))) == layer)
        clash = self._names.get(joined) or (path if path in self._layers else next(written, None))
        if clash is not None:
            raise ValueError(f"tensor {shown_name(path)!r}: there is {shown_name(clash)!r} already")
        for depth, step in enumerate(path):
            if self._layers.setdefault(path[:depth], type(step)) is not type(step):
                raise ValueError(f"tensor {shown_name(path)!r}: {list(path[:depth])} has both texts and positions")
        self._names[joined] = path


def _is_descriptor(file_obj: Any) -> bool:
    return isinstance(file_obj, int) and not isinstance(file_obj, bool)


def _check_file_object(file_obj: Any) -> None:
    if isinstance(file_obj, io.TextIOBase) or not hasattr(file_obj, "write"):
        raise TypeError(f"expected a path, a URL or a binary file object, not {type(file_obj).__name__}")
    if hasattr(file_obj, "writable") and not file_obj.writable():
        raise ValueError("the file object is not open for writing; open it in the mode wb")
    if "a" in str(getattr(file_obj, "mode", "")):
        raise ValueError("the file object is open for appending; open it in the mode wb")
    with contextlib.suppress(AttributeError, TypeError, OSError):
        if fcntl.fcntl(file_obj.fileno(), fcntl.F_GETFL) & os.O_APPEND:
            raise ValueError("the file is open for appending (O_APPEND), so no byte could be replaced; open it without")
    if hasattr(file_obj, "seekable") and not file_obj.seekable():
        raise ValueError("the file object cannot seek; write to a file, and copy it")
    if file_obj.tell():
        raise ValueError(f"the file object is at byte {file_obj.tell()}; go to its first byte, by seek(0)")


def _cut(file: Any, length: int) -> None:
    """Truncates a file object to its first `length` bytes. Its position is at the end of these bytes, both before and
    after the call."""
    if hasattr(file, "truncate"):
        file.seek(0, os.SEEK_END)
        if file.tell() > length:
            file.truncate(length)
        file.seek(length)


def _leaves(value: Any, above: Path) -> Iterator[tuple[Path, Any]]:
    """The tensors in dicts and lists, with their paths."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} in {list(above)}: expected a text")
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        pairs = enumerate(value)
    else:
        raise TypeError(f"{type(value).__name__} at {list(above)}: expected a tensor, or a dict or list of them")
    for step, below in pairs:
        if _is_tensor(below):
            yield (*above, step), below
        else:
            yield from _leaves(below, (*above, step))


def _is_tensor(value: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    )


def _of_module(m: Any, remove: bool, non_persistent: bool) -> Iterator[_ToWrite]:
    for index, (module_name, module) in enumerate(list(m.named_modules())):
        for name, tensor in list(module.named_parameters(recurse=False)):
            yield _ToWrite(index, (f"{module_name}.{name}",), TensorType.PARAM, tensor, module if remove else None)
        for name, tensor in list(module.named_buffers(recurse=False)):
            if non_persistent or name not in module._non_persistent_buffers_set:
                yield _ToWrite(index, (f"{module_name}.{name}",), TensorType.BUFFER, tensor, module if remove else None)


def _batches(tensors: Iterable[_ToWrite]) -> Iterator[list[tuple[_ToWrite, _Memory]]]:
    """Tensors that are written together, with their memory."""
    batch: list[tuple[_ToWrite, _Memory]] = []
    length = 0
    for one in tensors:
        memory = _memory_of(one)
        freed = (memory.length or 0) if memory.is_copy or one.remove_from is not None else 0
        if batch and length + freed > _BATCH_MAX:
            yield batch
            batch, length = [], 0
        batch.append((one, memory))
        length += freed
    if batch:
        yield batch


def _described(one: _ToWrite) -> _Memory:
    """Dtype and shape of a tensor, without its bytes. Refuses an object that cannot be written."""
    tensor, torch, numpy = one.tensor, sys.modules.get("torch"), sys.modules.get("numpy")
    name = shown_name(one.path)
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.is_nested or torch.nn.parameter.is_lazy(tensor):
            raise error(f"tensor {name!r}: is nested or uninitialized, so it has no shape", tensor=str(name))
        code = _code(str(tensor.dtype).removeprefix("torch."), one)
        if tensor.layout != torch.strided:
            raise error(f"tensor {name!r}: has the layout {tensor.layout}; write tensor.to_dense()", tensor=str(name))
    elif numpy is not None and isinstance(tensor, numpy.ndarray):
        if isinstance(tensor, numpy.ma.MaskedArray):
            raise TypeError(f"tensor {name!r}: is a masked array, and the format has no masks; write array.filled(value)")
        code = _code(tensor.dtype.name, one)
    else:
        raise TypeError(f"tensor {name!r}: expected a tensor of torch or an array of numpy, not {type(tensor).__name__}")
    return _Memory(code, list(tensor.shape), None, None, tensor)


def _memory_of(one: _ToWrite) -> _Memory:
    """The bytes of a tensor, on the CPU and contiguous."""
    described, tensor, torch = _described(one), one.tensor, sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        import numpy

        array = numpy.asarray(tensor, dtype=tensor.dtype.newbyteorder("<"), order="C")
        address, before = (made.__array_interface__["data"][0] for made in (array, tensor))
        return described._replace(address=address, length=array.nbytes, owner=array, is_copy=address != before)
    if tensor.is_meta:
        return _without_zeros(described, tensor.nbytes)
    try:
        _check_storage(one)
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = plain.data_ptr()
    except SafetensorError:
        raise
    except (RuntimeError, TypeError, NotImplementedError) as e:
        raise _no_memory(one, str(e).splitlines()[0]) from e
    if address == 0 and plain.nbytes:
        raise _no_memory(one, f"a {type(plain).__name__} has no address")
    is_copy = plain.device != tensor.device or address != tensor.data_ptr()
    return described._replace(address=address, length=plain.nbytes, owner=plain, is_copy=is_copy)


def _check_storage(one: _ToWrite) -> None:
    """Refuses a tensor whose storage was shortened or freed, because a read would go past the end of the storage."""
    tensor = one.tensor
    if not tensor.numel():
        return
    last = tensor.storage_offset() + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    wanted, found = (last + 1) * tensor.itemsize, tensor.untyped_storage().nbytes()
    if found < wanted:
        raise _no_memory(one, f"its storage has {found} of the {wanted} bytes that it needs")


def _no_memory(one: _ToWrite, why: str) -> SafetensorError:
    name = shown_name(one.path)
    return error(f"tensor {name!r}: has no memory to write: {why}", cls=MismatchError, tensor=str(name))


def _without_zeros(described: _Memory, length: int) -> _Memory:
    """How a meta tensor is written. Its data is left out if the tensorizer package can read a tensor without data: the
    tensor must have dimensions, and numpy must have its dtype. Otherwise zeros are written."""
    if (described.shape and "\0" not in described.dtype) or not length:
        return described
    return described._replace(length=length)


def _code(dtype: str, one: _ToWrite) -> str:
    code = _CODES.get(dtype)
    if code is None:
        message = f"tensor {shown_name(one.path)!r}: tensorfs reads no tensorizer files with {dtype}; cast the tensor"
        raise error(message, "unknown_dtype", cls=DtypeError, tensor=str(shown_name(one.path)))
    return code


def _native(one: _ToWrite, memory: _Memory) -> tuple[bytes, int, int, str, list[int], int | None, int | None]:
    """A tensor in the form that the native part expects."""
    name = shown_name(one.path)
    raw = name.encode() if isinstance(name, str) else b"\x1e" + json.dumps(name, separators=(",", ":")).encode()
    return raw, int(one.type), one.module_index, memory.dtype, memory.shape, memory.address, memory.length
