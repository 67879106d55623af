"""`safe_open` of instanttensor: tensors of torch in file order, loaded ahead in the background."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
from typing import Any, Callable, Iterator, Literal, Union

from ... import _device, _frameworks
from ..._errors import DtypeError
from ..._reader import Info
from .._files import FileSet
from .._in_group import GroupLoads
from ._settings import Candidate, Reading, reading_of

_AHEAD = 1
"""The number of batches that are loaded before they are requested."""


class safe_open:
    """Opens safetensors files, whose tensors are loaded once, in file order.

    `filename` is a path or a list of paths, which is sorted. `framework` is "pt". `device` is a GPU, or the CPU.
    `buffer_size` is the most bytes that are loaded at a time. A longer tensor is loaded alone. `chunk_size` and
    `io_depth` set `chunk` and `io_depth` of tensorfs. A `backend` that reads through the page cache sets
    `source="buffered"`. `max_free_mem_usage` limits the bytes that are loaded at a time to this fraction of the free
    memory of the GPU. `concurrency` is checked, but has no effect. Tensors own their memory even with `copy=False`.

    All ranks of a `process_group` have to open the same files, and to iterate. Each byte is read by one rank, and the
    load begins with the loop.

    With `load_now=False` the load begins when the context is entered. `tensor_filter` is a list of patterns. A tensor
    is loaded if a pattern matches its whole name. The patterns are globs, or exact names
    (`tensor_name_match_mode="exact"`), or regular expressions (`"regex"`).
    """

    def __init__(
        self,
        filename: Union[str, os.PathLike[str], list[str]],
        framework: str,
        device: Any,
        process_group: Any = None,
        *,
        buffer_size: int | None = None,
        chunk_size: int | None = None,
        concurrency: int | None = None,
        io_depth: int | None = None,
        max_free_mem_usage: float | None = None,
        load_now: bool = True,
        copy: bool = True,
        backend: Union[Candidate, list[Candidate], None] = None,
        tensor_filter: list[str] | None = None,
        tensor_name_match_mode: Literal["exact", "glob", "regex"] = "glob",
    ) -> None:
        self._weights: Any = None
        self._loads: GroupLoads | None = None
        self._begun = self._iterated = self._closed = False
        if tensor_filter is not None and process_group is not None:
            raise ValueError("tensor_filter: not with a process_group, all of whose ranks need the same tensors")
        matches = _matcher(tensor_filter, tensor_name_match_mode)
        paths = _sorted(filename)
        gpu = _gpu_of(device)
        if framework != "pt":
            raise ValueError(f'framework={framework!r}: expected "pt"')
        size = 1 if process_group is None else int(process_group.size())
        reading = reading_of(buffer_size, chunk_size, concurrency, io_depth, max_free_mem_usage, backend, size)
        self.filename, self.framework, self.device = paths, framework, device
        self.process_group, self.copy = process_group, copy
        if size > 1 and paths:
            # The group opens the files first, so that a file that one rank cannot open is an error on all ranks.
            self._loads = GroupLoads(paths, gpu, process_group, **reading.how)
        self._files = FileSet(paths, gpu, **reading.how) if paths else None
        self._infos = [] if self._files is None else [info for info in self._files.infos if matches(info.name)]
        self._by_name = {info.name: info for info in self._infos}
        self._most = _most(reading, gpu)
        self._check_format()
        if load_now:
            self._begin()

    def __enter__(self) -> safe_open:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._end()

    def __del__(self) -> None:
        if self.__dict__.get("_weights") is not None:
            self._end()

    def keys(self) -> list[str]:
        """The names of the tensors, in file order."""
        return self.offset_keys()

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in file order."""
        return [info.name for info in self._infos]

    def metadata(self) -> dict[str, str] | None:
        """The metadata of the last file that has any."""
        files = () if self._files is None else self._files.files
        return next((file.metadata for file in reversed(files) if file.metadata is not None), None)

    def get_tensor_metadata(self, name: str) -> tuple[Any, Any]:
        """The dtype and the shape of a tensor, as objects of torch."""
        import torch

        info = self._by_name[name]
        return _torch_dtype(info), torch.Size(info.shape)

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """Yields pairs of name and tensor in file order. It can be called once. While the caller uses a tensor, the
        next ones are loaded, in bounded memory."""
        if self._closed:
            raise RuntimeError("tensors() after the end of the context")
        if self._iterated:
            raise RuntimeError("tensors() again: tensors are loaded once; open the files again")
        self._begin()
        self._iterated = True
        if self._weights is not None:
            with contextlib.closing(self._weights) as weights:
                yield from weights
            if self._closed:
                raise RuntimeError("tensors() after the end of the context")

    def _begin(self) -> None:
        """Begins the load, unless it has begun already."""
        if self._begun or self._closed:
            return
        self._begun = True
        if self._files is not None and self._infos:
            for info in self._infos:
                _torch_dtype(info)
            if self._loads is None:
                self._weights = self._files.stream(self._infos, _AHEAD, self._most)
            else:
                self._weights = self._loads.stream(self.keys(), self._most)

    def _end(self) -> None:
        if self._weights is not None:
            self._weights.close()
        if self._loads is not None:
            self._loads.close()

    def _check_format(self) -> None:
        for file in () if self._files is None else self._files.files:
            found = (file.metadata or {}).get("format", "pt")
            if found != "pt":
                raise ValueError(f'{file.path}: its metadata says format={found!r}; expected "pt"')


def _matcher(patterns: list[str] | None, mode: str) -> Callable[[str], bool]:
    if mode not in ("exact", "glob", "regex"):
        raise ValueError(f"tensor_name_match_mode={mode!r}: expected 'exact', 'glob' or 'regex'")
    if patterns is None:
        return lambda name: True
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError("tensor_filter: expected a list of str, or None")
    if mode == "exact":
        return frozenset(patterns).__contains__
    compiled = []
    for pattern in patterns:
        try:
            compiled.append(re.compile(pattern if mode == "regex" else fnmatch.translate(pattern)))
        except re.error as e:
            raise ValueError(f"tensor_filter: {pattern!r} is no regular expression: {e}") from None
    return lambda name: any(one.fullmatch(name) for one in compiled)


def _sorted(filename: Any) -> list[str]:
    if isinstance(filename, (str, os.PathLike)):
        return [os.fspath(filename)]
    if not isinstance(filename, list):
        raise TypeError(f"filename: expected a path or a list of paths, not {type(filename).__name__}")
    return sorted(os.fspath(path) for path in filename)


def _gpu_of(device: Any) -> int | None:
    """The number of the GPU. None for the CPU, which instanttensor itself does not support."""
    if device is None or isinstance(device, bool):
        raise TypeError(f"device: expected a GPU, not {device!r}")
    kind = str(device).partition(":")[0]
    if not (isinstance(device, int) or kind in ("cpu", "cuda")):
        raise ValueError(f"device={device}: expected a GPU, or cpu")
    return _device.parse(device)


def _most(reading: Reading, gpu: int | None) -> int | None:
    """The most bytes of a batch."""
    limits = [] if reading.buffer is None else [reading.buffer]
    if gpu is not None:
        import torch

        # A batch is in use while the next one is loaded.
        limits.append(int(torch.cuda.mem_get_info(gpu)[0] * reading.free_share) // (_AHEAD + 1))
    return max(1, min(limits)) if limits else None


def _torch_dtype(info: Info) -> Any:
    try:
        return _frameworks.find("pt").dtype(info.dtype, info.name)
    except DtypeError as e:
        raise ValueError(str(e)) from None
