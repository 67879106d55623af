"""Files that the ranks of a process group load together."""

from __future__ import annotations

from typing import Any, Generator, Mapping, Sequence

from .._open import _batches, safe_open
from .._reader import Info, Part


class GroupLoads:
    """Loads of a process group. All ranks make the same calls in the same order. Each byte is read by one rank, and an
    error of one rank is an error of all ranks."""

    def __init__(self, paths: Sequence[str], gpu: int | None, process_group: Any, **how: Any) -> None:
        self._gpu = gpu
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        self._opened = safe_open(list(paths), "pt", device, process_group=process_group, **how)

    def load(self, dims: Mapping[str, int | None]) -> dict[str, Any]:
        """Tensors by name. `dims` maps each name to the dimension in which the tensor is cut into the parts of the
        ranks, or to None for the whole tensor."""
        cut = {name: dim for name, dim in dims.items() if dim is not None}
        if not cut:
            return self._opened.get_tensors(list(dims))
        if len(dims) == 1:
            return {name: self._opened.get_sharded(name, dim) for name, dim in cut.items()}
        return dict(self._opened.tensors(list(dims), shard=cut))

    def push(self, name: str, rank: int) -> Any:
        """Returns the tensor on the rank `rank`, and None on all other ranks."""
        return self._opened.push_tensor(name, rank)

    def stream(self, names: Sequence[str], most: int | None) -> Generator[tuple[str, Any], None, None]:
        """Yields pairs of name and tensor in this order. They are loaded in batches of at most `most` bytes. If a rank
        leaves the loop early, that is an error on the other ranks."""
        batches = _batches([(self._opened._info(name), None) for name in names], most)
        try:
            for batch in batches:
                tensors = self._opened._group().load(self._opened._reader(), self._gpu, lambda: batch)
                for info, _ in batch:
                    yield info.name, tensors.pop(info.name)
        except GeneratorExit:
            self._opened._group().leave("it left the loop over the tensors")
            raise

    def close(self) -> None:
        """Closes the files. Does not wait for other ranks."""
        self._opened.__exit__()
