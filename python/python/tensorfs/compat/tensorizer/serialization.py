"""`TensorDeserializer` and `TensorSerializer`. This module replaces `tensorizer.serialization`."""

from __future__ import annotations

import contextlib
import ctypes
import operator
import types
from collections.abc import KeysView, Mapping
from typing import Any, Callable, Iterable, Iterator, Sequence, Union

from ... import _frameworks, _settings
from ..._errors import error
from ..._tensorfs import can_cast
from . import _hashes
from ._device import Device
from ._hashes import HashMismatchError
from ._saving import TensorSerializer
from ._secrets import CryptographyError, DecryptionParams, EncryptionParams, cryptography_errors, secret_of
from ._stored import (
    HEAD_LEN,
    Entry,
    HashType,
    Header,
    Path,
    Step,
    TensorType,
    area_of,
    as_list_or_dict,
    decode_header,
    decode_list,
    nested,
    structure_of,
)
from .stream_io import TensorSource

__all__ = [
    "CryptographyError",
    "DecryptionParams",
    "EncryptionParams",
    "FilterFuncType",
    "HashMismatchError",
    "HashType",
    "TensorDeserializer",
    "TensorSerializer",
    "TensorType",
]

FilterFuncType = Callable[[Union[str, Sequence[Step]]], Any]
"""A function that gets the name of a tensor, or its path as a tuple, and says whether to load the tensor."""

_CAST_TO = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}
"""The dtypes to which tensors can be cast while they are read."""


_BATCH_MAX = 512 << 20
"""The most bytes that are loaded together while a loop goes over the tensors. A longer tensor is loaded alone."""


class TensorDeserializer(Mapping[Any, Any], contextlib.AbstractContextManager["TensorDeserializer"]):
    """The tensors of a tensorizer file by name. They are parameters of torch, or arrays of numpy if torch is not
    installed.

    `file_obj` is a path, a URL (`file://`, or of a remote source such as `s3://`), a binary file object or a
    descriptor. A file object is closed together with the deserializer, or as soon as all tensors are loaded. By default
    `device` is the first GPU, or the CPU if torch finds no GPU. `dtype` is a dtype of torch to which all tensors are
    cast, except booleans. `filter_func` chooses the tensors of the mapping.

    All tensors are loaded at once. With `lazy_load`, each tensor is loaded when it is first used. With `verify_hash`,
    the bytes of each tensor are compared with the hashes in the file. `encryption` has the key of an encrypted file.

    `plaid_mode`, `plaid_mode_buffers` and `num_readers` have no effect: the engine of tensorfs decides how to read.

    Raises `tensorfs.SafetensorError` for a file that is refused. `HashMismatchError` and `CryptographyError` are
    subclasses of it.
    """

    def __init__(
        self,
        file_obj: Any,
        device: Any = None,
        filter_func: FilterFuncType | None = None,
        dtype: Any = None,
        *,
        lazy_load: bool = False,
        plaid_mode: bool | None = None,
        plaid_mode_buffers: int | None = None,
        num_readers: int | None = None,
        verify_hash: bool = False,
        encryption: DecryptionParams | None = None,
    ) -> None:
        self._cleanup = contextlib.ExitStack()
        self._is_closed = False
        if num_readers is not None and operator.index(num_readers) < 1:
            raise ValueError(f"num_readers={num_readers}: expected a number from 1 on, or None")
        self._device = Device(device)
        self._dtype, self._verify_hash = dtype, verify_hash
        if dtype is not None and self._device.torch is None:
            raise TypeError("dtype needs torch, which is not installed")
        with contextlib.ExitStack() as failed:
            self._source = TensorSource(file_obj)
            failed.callback(self._source.close)
            self._loader = _settings.loader()
            with cryptography_errors():
                self._checkpoint = self._source.open(self._loader, secret_of(encryption))
            entries = self._read_list()
            wanted = [entry for entry in entries if filter_func is None or filter_func(entry.name)]
            self._entries = {entry.path: entry for entry in wanted}
            self._structure = structure_of(entries, self._entries.__contains__)
            self._positions = {path: self._checkpoint.tensor(entry.joined) for path, entry in self._entries.items()}
            self._headers: dict[Path, Header] = {}
            self._cache: dict[Path, Any] = {}
            self._next_read = 0
            self.total_tensor_bytes: int = sum(
                self._positions[entry.path][4] if lazy_load else entry.data_length for entry in wanted
            )
            """Bytes of all tensors of the mapping. As in the tensorizer package, meta tensors count with `lazy_load`
            only."""
            self.total_bytes_read = 0
            """Bytes of tensors that were read so far."""
            if not lazy_load:
                self._load(list(self._entries), verify_hash)
                self._source.close()
            failed.pop_all()
        self._cleanup.callback(self._source.close)

    def _read_list(self) -> list[Entry]:
        """The list of tensors, in the order of their bytes."""
        read, timeout = self._checkpoint.read_ranges, self._loader.timeout
        if len(self._checkpoint.files) != 1:
            raise error(f"{self._source.name}: are several files; pass one tensorizer file")
        start = self._source.start
        (head,) = read(0, [(start, start + HEAD_LEN)], timeout)
        (area,) = read(0, [area_of(head, start, self._source.name)], timeout)
        found = decode_list(head, area)
        self._is_encrypted = found.is_encrypted
        return found.entries

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Tensors that are loaded stay valid."""
        self._is_closed = True
        self._cleanup.close()

    def __del__(self) -> None:
        cleanup = self.__dict__.get("_cleanup")
        if cleanup is not None:
            cleanup.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._structure)

    def __len__(self) -> int:
        return len(self._structure)

    def __contains__(self, key: object) -> bool:
        return key in self._structure

    def keys(self) -> KeysView[Any]:
        """The names of the tensors and layers at the top level, in the order of the file."""
        return self._structure.keys()

    def __getitem__(self, name: Any) -> Any:
        """A tensor, or a layer of nested tensors as a read-only mapping."""
        if name not in self._structure:
            raise KeyError(f"Tensor {name} not found")
        if not isinstance(self._structure[name], dict):
            return self._loaded([(name,)], None)[0]
        return self._nested((name,), None, types.MappingProxyType) or types.MappingProxyType({})

    def tree(
        self, prefix: Iterable[Step] | None = None, *, default: Any = None, filter_func: FilterFuncType | None = None
    ) -> Any:
        """The tensors in nested dicts and lists, as they were saved. With `prefix`, only the tensors below this path,
        or the one tensor that has this path. Returns `default` if there are no such tensors."""
        if isinstance(prefix, (str, int)):
            raise TypeError(f"prefix: expected a sequence of keys, not {type(prefix).__name__}; for one key pass ({prefix!r},)")
        found = self._nested(tuple(prefix or ()), filter_func, as_list_or_dict)
        return default if found is None else found

    def _nested(self, prefix: Path, filter_func: FilterFuncType | None, wrap: Any) -> Any:
        depth = len(prefix)
        paths = [path for path in self._entries if path[:depth] == prefix]
        paths = [path for path in paths if filter_func is None or filter_func(self._entries[path].name)]
        if not paths:
            return None
        tensors = self._loaded(paths, None)
        return nested([(path[depth:], tensor) for path, tensor in zip(paths, tensors)], wrap)

    def read_tensors(
        self, filter_func: FilterFuncType | None = None, num_tensors: int = -1, verify_hash: bool | None = None
    ) -> Iterator[tuple[int, int, Any, Any]]:
        """Yields for each tensor: the index of its module, its `TensorType`, its name, and the tensor.

        `num_tensors` is the most tensors that one call returns. The next call continues after the last of these
        tensors.
        """
        for path, tensor in self._read(filter_func, num_tensors, lambda paths: self._loaded(paths, verify_hash)):
            entry = self._entries[path]
            yield self._header(path).module_index, entry.type, entry.name, tensor

    def read_numpy_arrays(
        self,
        filter_func: FilterFuncType | None = None,
        num_tensors: int = -1,
        allow_raw_data: bool = False,
        verify_hash: bool | None = None,
    ) -> Iterator[tuple[int, int, Any, Any, bool, str | None]]:
        """Yields for each tensor: the index of its module, its `TensorType`, its name, its array, whether numpy lacks
        its dtype, and in that case the name of the dtype in torch.

        A tensor whose dtype numpy lacks, such as bfloat16, raises `ValueError`. With `allow_raw_data`, its array has
        integers with the same bits instead. `num_tensors` is as in `read_tensors`.
        """
        if not self._device.is_cpu:
            raise RuntimeError(f"read_numpy_arrays gives arrays on the CPU, but the device is {self._device}")
        for path, array in self._read(filter_func, num_tensors, lambda paths: self._arrays(paths, verify_hash)):
            entry = self._entries[path]
            if entry.torch_dtype is not None and not allow_raw_data:
                raise ValueError(
                    f"tensor {entry.name!r} has the dtype {entry.torch_dtype}, which numpy lacks; allow_raw_data=True "
                    "gives its bytes, and read_tensors a tensor of torch"
                )
            is_raw = entry.torch_dtype is not None
            yield self._header(path).module_index, entry.type, entry.name, array, is_raw, entry.torch_dtype

    def _read(
        self, filter_func: FilterFuncType | None, num_tensors: int, load: Callable[[list[Path]], list[Any]]
    ) -> Iterator[tuple[Path, Any]]:
        if num_tensors < -1:
            raise ValueError(f"num_tensors={num_tensors}: expected a number from 0 on, or -1 for all")
        chosen = []
        for number, (path, entry) in enumerate(self._entries.items()):
            if number >= self._next_read and (filter_func is None or filter_func(entry.name)):
                chosen.append((number, path))
        chosen = chosen if num_tensors == -1 else chosen[:num_tensors]
        for batch in _batches(chosen, self._entries):
            for (number, path), loaded in zip(batch, load([path for _, path in batch])):
                self._next_read = number + 1
                yield path, loaded

    def load_into_module(self, m: Any, filter_func: FilterFuncType | None = None, verify_hash: bool | None = None) -> int:
        """Gives a module the parameters and buffers of the file, in place of its own ones, which may be without memory.
        Returns the number of loaded tensors.

        The file has to be one that `write_module` has written.
        """
        modules = dict(m.named_modules())
        chosen = [entry for entry in self._entries.values() if filter_func is None or filter_func(entry.name)]
        for entry in chosen:
            if entry.type is TensorType.STATE_DICT:
                raise NotImplementedError(
                    f"tensor {entry.name!r} was saved by write_state_dict, so it has no place in a module; pass this "
                    "TensorDeserializer to load_state_dict"
                )
            module, _, _ = entry.joined.rpartition(".")
            if module not in modules:
                raise KeyError(f"tensor {entry.name!r}: the module has no submodule {module!r}")
        tensors = self._loaded([entry.path for entry in chosen], verify_hash)
        for entry, tensor in zip(chosen, tensors):
            module, _, attribute = entry.joined.rpartition(".")
            if entry.type is TensorType.PARAM:
                modules[module].register_parameter(attribute, tensor)
            else:
                modules[module].register_buffer(attribute, tensor)
        self._source.close()
        return len(chosen)

    def verify_module(self, m: Any) -> tuple[bool, list[tuple[Any, bool]]]:
        """Compares the tensors of a module with the hashes in the file. Returns whether all of them match, and a list
        that says for each tensor whether it matches."""
        there = {**m.state_dict(), **dict(m.named_buffers())}
        # In the file, the name of a tensor of the top module begins with a dot.
        found = {path: there.get(entry.joined.removeprefix(".")) for path, entry in self._entries.items()}
        on_cpu = {path: tensor.detach().cpu().contiguous() for path, tensor in found.items() if tensor is not None}
        headers = self._all_headers(list(on_cpu))
        checked = [self._in_memory(path, headers[path], tensor) for path, tensor in on_cpu.items()]
        matches = {path: message is None for path, message in zip(on_cpu, _hashes.mismatches(checked))}
        for path, tensor in on_cpu.items():
            # The elements of a meta tensor are zeros, which no hash covers.
            if not self._entries[path].data_length:
                is_zero = not tensor.reshape(-1).view(self._device.torch.uint8).any().item()
                matches[path] = matches[path] and is_zero and tensor.nbytes == self._positions[path][4]
        results = [(entry.name, matches.get(path, False)) for path, entry in self._entries.items()]
        return all(result for _, result in results), results

    def _loaded(self, paths: list[Path], verify_hash: bool | None) -> list[Any]:
        """The tensors with these paths. Those that are not in the cache are loaded."""
        missing = [path for path in paths if path not in self._cache]
        if missing:
            self._load(missing, self._verify_hash if verify_hash is None else verify_hash)
        return [self._cache[path] for path in paths]

    def _load(self, paths: list[Path], verify: bool) -> None:
        """Loads tensors together, each into memory of its own."""
        torch, gpu = self._device.torch, self._device.gpu()
        framework = _frameworks.find("np" if torch is None else "pt", gpu)
        infos = [self._positions[path] for path in paths]
        # The hashes are about the stored elements, so these are not cast before they are verified.
        cast = None if verify or torch is None else _CAST_TO.get(str(self._dtype))
        made, requests = [], []
        for name, position, dtype, shape, nbytes in infos:
            framework.check(dtype, shape, name)
            becomes = cast if cast is not None and cast != dtype and can_cast(dtype, cast) else None
            tensor, address = framework.empty(becomes or dtype, shape, name)
            made.append(tensor)
            if nbytes:
                requests.append((position, becomes, address, tensor.nbytes, tensor))
        self._fill(requests, gpu, framework.stream())
        self.total_bytes_read += sum(self._entries[path].data_length for path in paths)
        if verify:
            headers = self._all_headers(paths)
            hosts = made if torch is None else [tensor.cpu() for tensor in made]
            checked = [self._in_memory(path, headers[path], tensor) for path, tensor in zip(paths, hosts)]
            _hashes.check(checked, self._source.name)
        for number, path in enumerate(paths):
            # Each loaded tensor is freed before the next one is cast.
            self._cache[path], made[number] = self._finished(made[number]), None

    def _finished(self, tensor: Any) -> Any:
        """A loaded tensor in the form that callers get: cast, on the device, and as a parameter."""
        torch = self._device.torch
        if torch is None:
            return tensor
        # A cast during the read does not change this, because it is always from floats to floats.
        has_gradient = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        cast = None if self._dtype is None or tensor.dtype == torch.bool else self._dtype
        tensor = tensor.to(device=self._device.target(), dtype=cast)
        return torch.nn.Parameter(tensor, requires_grad=has_gradient)

    def _arrays(self, paths: list[Path], verify_hash: bool | None) -> list[Any]:
        """The stored elements as arrays of numpy."""
        import numpy

        if all(path in self._cache for path in paths) and self._dtype is None:
            return [self._as_array(path) for path in paths]
        made = [numpy.empty(self._entries[path].shape, self._entries[path].numpy_code) for path in paths]
        requests = [
            (self._positions[path][1], None, array.__array_interface__["data"][0], array.nbytes, array)
            for path, array in zip(paths, made)
            if array.nbytes
        ]
        self._fill(requests, None, None)
        self.total_bytes_read += sum(array.nbytes for array in made)
        if self._verify_hash if verify_hash is None else verify_hash:
            headers = self._all_headers(paths)
            checked = [self._in_memory(path, headers[path], array) for path, array in zip(paths, made)]
            _hashes.check(checked, self._source.name)
        return made

    def _as_array(self, path: Path) -> Any:
        """A loaded tensor as an array in the same memory."""
        import numpy

        entry, tensor = self._entries[path], self._cache[path]
        if isinstance(tensor, numpy.ndarray):
            return tensor.view(entry.numpy_code)
        memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""
        if tensor.nbytes:
            memory._owner = tensor
        return numpy.ndarray(entry.shape, entry.numpy_code, memory)

    def _fill(self, requests: list[tuple[int, str | None, int, int, Any]], gpu: int | None, stream: Any) -> None:
        """Loads tensors. A request has the position of a tensor, the dtype to cast to, and the address, the length in
        bytes and the owner of its memory."""
        self._check_open()
        if not requests:
            return
        loader = self._loader if gpu is None else _settings.loader(gpu=gpu)
        plan = loader.plan(self._checkpoint, [(position, None, cast, address) for position, cast, address, *_ in requests])
        memory = [(address, nbytes, owner) for _, _, address, nbytes, owner in requests]
        with cryptography_errors():
            loader.fill(self._checkpoint, plan, memory, None, stream)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self._source.name}: is closed; load tensors before that")

    def _in_memory(self, path: Path, header: Header, tensor: Any) -> _hashes.Loaded:
        address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.__array_interface__["data"][0]
        entry = self._entries[path]
        # The zeros of a meta tensor are not in the file.
        nbytes = tensor.nbytes if entry.data_length else 0
        return _hashes.Loaded(entry.name, header, address, nbytes, tensor)

    def _header(self, path: Path) -> Header:
        return self._all_headers([path])[path]

    def _all_headers(self, paths: list[Path]) -> dict[Path, Header]:
        missing = [self._entries[path] for path in paths if path not in self._headers]
        if missing:
            # The headers of all other tensors are likely to be needed too, so they are read together.
            missing = [entry for entry in self._entries.values() if entry.path not in self._headers]
            self._check_open()
            read = self._checkpoint.read_ranges(0, [entry.header for entry in missing], self._loader.timeout)
            for entry, header in zip(missing, read):
                self._headers[entry.path] = decode_header(header, entry.is_long, self._is_encrypted)
        return self._headers


def _batches(chosen: list[tuple[int, Path]], entries: dict[Path, Entry]) -> Iterator[list[tuple[int, Path]]]:
    """Splits tensors into batches to load together."""
    batch: list[tuple[int, Path]] = []
    length = 0
    for number, path in chosen:
        if batch and length + entries[path].data_length > _BATCH_MAX:
            yield batch
            batch, length = [], 0
        batch.append((number, path))
        length += entries[path].data_length
    if batch:
        yield batch
