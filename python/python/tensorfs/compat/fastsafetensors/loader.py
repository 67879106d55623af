"""`SafeTensorsFileLoader` and `fastsafe_open`."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, Sequence, Union

from ..._errors import error
from .._files import FileSet
from .._in_group import GroupLoads
from ..._reader import Info
from ._groups import check_framework, device_of, gpu_of, group_of
from .common import SafeTensorsMetadata, TensorFrame
from .file_buffer import FilesBufferOnDevice, Kept, Local, Shared
from .frameworks import TensorBase, wrapped
from .st_types import DTYPE_SIZES, DType

Filter = Callable[[str], bool]
StrPath = Union[str, os.PathLike[str]]


class SafeTensorsFileLoader:
    """Loads the tensors of files into the memory of a device.

    `pg` is a process group of torch, a `SingleGroup`, or None. `device` is the CPU or a GPU. The other arguments exist
    because fastsafetensors has them. They have no effect.
    """

    def __init__(
        self,
        pg: Any,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        disable_cache: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        use_fgds: bool = False,
        **kwargs: Any,
    ) -> None:
        check_framework(framework)
        self.pg = group_of(pg)
        self.device = device_of(device)
        self._ranks: dict[str, int] = {}
        self._files: FileSet | None = None
        self._meta: dict[str, tuple[SafeTensorsMetadata, int]] | None = None
        self._frames: dict[str, TensorFrame] | None = None
        self._filter: Filter | None = None
        self._closed = False

    def set_tensor_filter(self, keep_tensor: Filter | None) -> None:
        """Sets a filter: only tensors for whose names `keep_tensor` is true are loaded. None means all tensors."""
        self._filter = keep_tensor

    def add_filenames(self, filenames: Mapping[int, Sequence[StrPath]]) -> None:
        """Adds files. `filenames` maps each rank to the files that it reads. They are opened together with all files
        that were added before, so that the pieces in the shards of a checkpoint are joined to whole tensors."""
        ranks = dict(self._ranks)
        for rank, path in _in_turn(filenames):
            ranks[path] = rank
        if ranks:
            files = FileSet(list(ranks), gpu_of(self.device))
            _refuse_unknown(files)
            self._set(ranks, files)

    def get_keys(self) -> list[str]:
        """The names of the tensors that the filter keeps, file by file."""
        return [info.name for info in self._infos()]

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of a tensor. Raises `ValueError` if the filter leaves the tensor out."""
        if self._filter is not None and not self._filter(tensor_name):
            raise ValueError(f"the filter leaves the tensor {tensor_name!r} out")
        if self._files is None:
            raise KeyError(tensor_name)
        return list(self._files.by_name[tensor_name].shape)

    @property
    def meta(self) -> dict[str, tuple[SafeTensorsMetadata, int]]:
        """The header and the rank of each file."""
        if self._meta is None:
            files = () if self._files is None else self._files.files
            self._meta = {file.path: (SafeTensorsMetadata(file), self._ranks[file.path]) for file in files}
        return self._meta

    @property
    def frames(self) -> dict[str, TensorFrame]:
        """The facts about all tensors, as the headers state them."""
        if self._frames is None:
            headers = [header for header, _ in self.meta.values()]
            self._frames = {name: frame for header in headers for name, frame in header.tensors.items()}
        return self._frames

    def copy_files_to_device(
        self,
        dtype: DType = DType.AUTO,
        use_buf_register: bool = True,
        max_copy_block_size: int = 16 << 30,
        allow_inflight: bool = False,
        borrowed_tensors: bool = False,
    ) -> FilesBufferOnDevice:
        """Loads the tensors. In a group of several processes it only opens the files, and all ranks have to call it.
        `dtype` casts tensors to a dtype whose elements are not longer than the stored elements."""
        if self._closed:
            raise error("the loader is closed: make another one")
        if borrowed_tensors and self.pg.size() > 1:
            raise ValueError(f"borrowed_tensors: expected a group of one process, not of {self.pg.size()}")
        dtype = DType(dtype)
        infos = self._infos()
        if self._files is None:
            return FilesBufferOnDevice({}, Local({}), self.pg, borrowed_tensors)
        for info in infos:
            if dtype != DType.AUTO and DTYPE_SIZES[dtype] > DTYPE_SIZES[DType(info.dtype)]:
                raise error(f"tensor `{info.name}`: {info.dtype} is shorter than {dtype.value}; cast it after loading")
        kept = self._kept(self._files, infos)
        if self.pg.size() > 1:
            loads = GroupLoads(self._files.paths, gpu_of(self.device), self.pg)
            return FilesBufferOnDevice(kept, Shared(loads, kept, dtype), self.pg)
        loaded = self._files.load(infos)
        tensors: dict[str, TensorBase] = {}
        for info in infos:
            tensors[info.name] = wrapped(loaded.pop(info.name), info.dtype).to(dtype=dtype)
        return FilesBufferOnDevice(kept, Local(tensors), self.pg, borrowed_tensors)

    def reset(self) -> None:
        """Forgets the added files. The buffers that were returned stay valid."""
        self._set({}, None)

    def close(self) -> None:
        """Forgets the added files, and loads nothing more. The buffers that were returned stay valid."""
        self.reset()
        self._closed = True

    def _set(self, ranks: dict[str, int], files: FileSet | None) -> None:
        self._ranks, self._files = ranks, files
        self._meta = self._frames = None

    def _infos(self) -> list[Info]:
        infos = [] if self._files is None else self._files.infos
        return [info for info in infos if self._filter is None or self._filter(info.name)]

    def _kept(self, files: FileSet, infos: Sequence[Info]) -> dict[str, Kept]:
        """The place of each tensor by name, in the order of the ranks, and within a rank of the sorted paths."""
        places: dict[str, tuple[int, int]] = {}
        for rank in range(self.pg.size()):
            of_rank = sorted(path for path in files.paths if self._ranks[path] == rank)
            places.update((path, (rank, index)) for index, path in enumerate(of_rank))
        found = {}
        for info in infos:
            path = files.paths[files.file_of(info)]
            if path not in places:
                raise ValueError(f"{path}: is of rank {self._ranks[path]}, and the group has {self.pg.size()}")
            found[info.name] = Kept(*places[path], path, info.shape, info.dtype)
        return dict(sorted(found.items(), key=lambda item: item[1][:2]))


class fastsafe_open:
    """Opens files and loads all their tensors, which `get_tensor` returns one by one.

    `filenames` is a path, a list of paths, or a mapping from ranks to lists of paths.
    """

    def __init__(
        self,
        filenames: Union[StrPath, Sequence[StrPath], Mapping[int, Sequence[StrPath]]],
        framework: str = "pt",
        pg: Any = None,
        device: Any = "cpu",
        nogds: bool = False,
        debug_log: bool = False,
        max_copy_block_size: int = 16 << 30,
        use_fgds: bool = False,
    ) -> None:
        self.loader = SafeTensorsFileLoader(pg, device, framework=framework)
        if isinstance(filenames, (str, os.PathLike)):
            filenames = [filenames]
        self.loader.add_filenames(filenames if isinstance(filenames, Mapping) else {0: filenames})
        self.fb = self.loader.copy_files_to_device()

    def __enter__(self) -> fastsafe_open:
        return self

    def __exit__(self, *_: object) -> None:
        self.fb.close()
        self.loader.close()

    def metadata(self) -> dict[str, Any]:
        """The metadata of each file, by its path. An empty text for a file without metadata."""
        return {path: header.metadata for path, (header, _) in self.loader.meta.items()}

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self.fb.key_to_rank_lidx)

    def get_tensor_wrapped(self, name: str) -> TensorBase:
        """The tensor of this name, as an object with its device and its dtype."""
        return self.fb.get_tensor_wrapped(name)

    def get_tensor(self, name: str) -> Any:
        """The tensor of this name."""
        return self.fb.get_tensor(name)


def _in_turn(filenames: Mapping[int, Sequence[StrPath]]) -> list[tuple[int, str]]:
    """Pairs of rank and path: the first file of each rank, then the second file of each rank, and further in this
    way."""
    if not isinstance(filenames, Mapping):
        raise TypeError(f"filenames: expected a mapping from ranks to lists of paths, not {type(filenames).__name__}")
    found = []
    for rank, paths in filenames.items():
        if not isinstance(paths, (list, tuple)):
            raise TypeError(f"filenames of rank {rank}: expected a list of paths, not {type(paths).__name__}")
        found += [(turn, rank, os.fspath(path)) for turn, path in enumerate(paths)]
    return [(rank, path) for _, rank, path in sorted(found, key=lambda entry: entry[0])]


def _refuse_unknown(files: FileSet) -> None:
    known = DType.__members__
    for info in files.infos:
        if info.dtype not in known:
            raise ValueError(f"{files.paths[files.file_of(info)]}: tensor {info.name!r} has {info.dtype}, which torch has not")
