"""`FilesBufferOnDevice`: the tensors of files in the memory of a device."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from ..._errors import error
from .._in_group import GroupLoads
from .frameworks import TensorBase, joined, wrapped
from .st_types import Device, DType


class Kept(NamedTuple):
    """The place and the facts of a tensor in the files."""

    rank: int
    """The rank that reads the file of the tensor."""
    file: int
    """The number of the file among the files of that rank, sorted by path."""
    filename: str
    shape: list[int]
    dtype: str


class Local:
    """The tensors of a process that loads alone. They are loaded already, and each call returns the same memory."""

    def __init__(self, tensors: Mapping[str, TensorBase]) -> None:
        self._tensors = tensors

    def take(self, dims: Mapping[str, int]) -> dict[str, TensorBase]:
        """Tensors by name. The dimensions have no effect, because a single process gets whole tensors."""
        return {name: self._tensors[name] for name in dims}

    def push(self, name: str, rank: int) -> TensorBase | None:
        """The tensor of this name, whatever `rank` is."""
        return self._tensors[name]

    def close(self) -> None:
        """Does nothing, because the caller may still use the tensors."""


class Shared:
    """The tensors of a process group, which are loaded when all ranks ask for them."""

    def __init__(self, loads: GroupLoads, kept: Mapping[str, Kept], dtype: DType) -> None:
        self._loads, self._kept, self._dtype = loads, kept, dtype

    def take(self, dims: Mapping[str, int]) -> dict[str, TensorBase]:
        """The parts of this rank, by name. `dims` has the dimension in which each tensor is cut; a negative number
        means the whole tensor."""
        for name, dim in dims.items():
            if dim >= len(self._kept[name].shape):
                raise IndexError(f"tensor {name!r} of shape {self._kept[name].shape} has no dimension {dim}")
        loaded = self._loads.load({name: dim if dim >= 0 else None for name, dim in dims.items()})
        return {name: self._wrapped(name, loaded.pop(name)) for name in dims}

    def push(self, name: str, rank: int) -> TensorBase | None:
        """Returns the tensor on the rank `rank`, and None on all other ranks."""
        tensor = self._loads.push(name, rank)
        return None if tensor is None else self._wrapped(name, tensor)

    def close(self) -> None:
        """Closes the files."""
        self._loads.close()

    def _wrapped(self, name: str, tensor: Any) -> TensorBase:
        return wrapped(tensor, self._kept[name].dtype).to(dtype=self._dtype)


class FilesBufferOnDevice:
    """The tensors of files.

    In a group of one process, they are loaded already. Each call returns the same memory: a write to a tensor changes
    the tensors that later calls return. In a group of several processes, each call loads the tensors that it returns.
    All ranks have to make the same calls in the same order, and each byte is read by one rank.

    Tensors stay valid after `close`, also with `borrowed_tensors=True`.
    """

    def __init__(
        self, kept: Mapping[str, Kept], tensors: Local | Shared, pg: Any, borrowed_tensors: bool = False
    ) -> None:
        self.pg, self.borrowed_tensors = pg, borrowed_tensors
        self.key_to_rank_lidx = {name: (one.rank, one.file) for name, one in kept.items()}
        self._kept = kept
        self._tensors: Local | Shared | None = tensors

    def close(self) -> None:
        """Closes the files, and gives up the references to the tensors."""
        closed, self._tensors = self._tensors, None
        if closed is not None:
            closed.close()

    def get_filename(self, tensor_name: str) -> str:
        """The path of the file with this tensor."""
        return self._find(tensor_name).filename

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of this tensor, as its header states it."""
        return list(self._find(tensor_name).shape)

    def get_tensor_wrapped(
        self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """The tensor of this name, as an object with its device and its dtype."""
        return self.get_sharded_wrapped(tensor_name, -1, device, dtype)

    def get_tensor(self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO) -> Any:
        """The tensor of this name."""
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """The result of `get_sharded`, as an object with its device and its dtype."""
        return self._take({tensor_name: dim})[tensor_name].to(device=device, dtype=dtype)

    def get_sharded(self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO) -> Any:
        """The part of a tensor that belongs to this rank. The dimension `dim` is cut as `torch.chunk` cuts it. With
        `dim=-1`, and in a group of one process, this is the whole tensor."""
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> Any:
        """Returns the tensor on the rank `dst_rank`, and None on all other ranks. A group of one process always gets
        the tensor."""
        self._find(tensor_name)
        pushed = self._open(tensor_name).push(tensor_name, dst_rank)
        return None if pushed is None else pushed.to(device=device, dtype=dtype).get_raw()

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """The parts that `get_sharded` would return for these tensors, joined in the dimension `dim`. They are joined
        file by file, and within a file in the order of `tensor_names`."""
        if not tensor_names:
            raise IndexError("get_multi_cols: expected one name or more")
        for name in tensor_names:
            # Raises an error for a dimension that does not exist, even for a single tensor, as the replaced package
            # does.
            self._find(name).shape[dim]
        by_file = sorted(tensor_names, key=lambda name: self.key_to_rank_lidx[name])
        parts = self._take(dict.fromkeys(by_file, dim))
        return joined([parts[name] for name in by_file], dim).to(device=device, dtype=dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """The result of `get_sharded_wrapped` for each name and its dimension."""
        return self._take(tensor_shard_dim)

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Yields pairs of name and tensor. Works only in a group of one process."""
        if self.pg.size() > 1:
            raise RuntimeError(f"iter_local_tensors: expected a group of one process, not of {self.pg.size()}")
        for name in tensor_names:
            yield name, self.get_tensor(name)

    def _find(self, name: str) -> Kept:
        found = self._kept.get(name)
        if found is None:
            raise ValueError(f"no file has the tensor {name!r}, or a filter left it out")
        return found

    def _open(self, name: str) -> Local | Shared:
        if self._tensors is None:
            raise error(f"tensor {name}: the buffer is closed", tensor=name)
        return self._tensors

    def _take(self, dims: Mapping[str, int]) -> dict[str, TensorBase]:
        for name in dims:
            self._find(name)
            self._open(name)
        return {} if self._tensors is None else self._tensors.take(dims)
