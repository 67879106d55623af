"""`FilesBufferOnDevice`: the tensors of files in the memory of a device."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, NamedTuple, Sequence

from ..._errors import error
from .frameworks import TensorBase, joined
from .st_types import Device, DType


class Kept(NamedTuple):
    """A tensor of the files, which the buffer of one rank holds."""

    rank: int
    file: int
    """The number of its file among those of the rank, sorted by path."""
    filename: str
    shape: list[int]


class FilesBufferOnDevice:
    """The tensors of files, loaded. Each call returns the same memory; writing to a tensor changes those that are
    returned later.

    Tensors stay valid after `close`, also with `borrowed_tensors=True`.
    """

    def __init__(
        self, kept: Mapping[str, Kept], tensors: Mapping[str, TensorBase], pg: Any, borrowed_tensors: bool = False
    ) -> None:
        self.pg, self.borrowed_tensors = pg, borrowed_tensors
        self.key_to_rank_lidx = {name: (one.rank, one.file) for name, one in kept.items()}
        self._kept = kept
        self._tensors: Mapping[str, TensorBase] | None = tensors

    def close(self) -> None:
        """Lets go of the tensors."""
        self._tensors = None

    def get_filename(self, tensor_name: str) -> str:
        """The path of the file with this tensor."""
        return self._find(tensor_name).filename

    def get_shape(self, tensor_name: str) -> list[int]:
        """The shape of this tensor, as its header states it."""
        return list(self._find(tensor_name).shape)

    def get_tensor_wrapped(
        self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """This tensor, as an object with its device and its dtype."""
        return self._loaded(tensor_name).to(device=device, dtype=dtype)

    def get_tensor(self, tensor_name: str, device: Device | None = None, dtype: DType = DType.AUTO) -> Any:
        """This tensor."""
        return self.get_tensor_wrapped(tensor_name, device, dtype).get_raw()

    def get_sharded_wrapped(
        self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """`get_sharded`, as an object with its device and its dtype."""
        return self.get_tensor_wrapped(tensor_name, device, dtype)

    def get_sharded(self, tensor_name: str, dim: int, device: Device | None = None, dtype: DType = DType.AUTO) -> Any:
        """The part of this tensor that is the process' own in a dimension: in a group of one the whole."""
        return self.get_sharded_wrapped(tensor_name, dim, device, dtype).get_raw()

    def push_tensor(
        self, tensor_name: str, dst_rank: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> Any:
        """This tensor on one rank, and None on the others. In a group of one the tensor."""
        return self.get_tensor(tensor_name, device, dtype)

    def get_multi_cols(
        self, tensor_names: Sequence[str], dim: int, device: Device | None = None, dtype: DType = DType.AUTO
    ) -> TensorBase:
        """The tensors one after the other in a dimension: file by file, and those of a file in this order."""
        if not tensor_names:
            raise IndexError("get_multi_cols: expected one name or more")
        for name in tensor_names:
            # As the package, also for a single tensor.
            self._find(name).shape[dim]
        by_file = sorted(tensor_names, key=lambda name: self.key_to_rank_lidx[name])
        return joined([self._loaded(name) for name in by_file], dim).to(device=device, dtype=dtype)

    def as_dict(self, tensor_shard_dim: Mapping[str, int]) -> dict[str, TensorBase]:
        """`get_sharded_wrapped` of each name in its dimension."""
        return {name: self.get_sharded_wrapped(name, dim) for name, dim in tensor_shard_dim.items()}

    def iter_local_tensors(self, tensor_names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Pairs of name and tensor."""
        for name in tensor_names:
            yield name, self._loaded(name).get_raw()

    def _find(self, name: str) -> Kept:
        found = self._kept.get(name)
        if found is None:
            raise ValueError(f"no file has the tensor {name!r}, or a filter left it out")
        return found

    def _loaded(self, name: str) -> TensorBase:
        self._find(name)
        if self._tensors is None:
            raise error(f"tensor {name}: the buffer is closed", tensor=name)
        return self._tensors[name]
