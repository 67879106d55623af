"""Files that the ranks of a process group load together."""

from __future__ import annotations

from typing import Any, Generator, Mapping, Sequence

from .._open import _batches, safe_open
from .._reader import Info, Part


class GroupLoads:
    """Loads of a process group. All ranks make the same calls in the same order: each byte is read by one of them, and
    an error of one is an error of all."""

    def __init__(self, paths: Sequence[str], gpu: int | None, process_group: Any, **how: Any) -> None:
        self._gpu = gpu
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        self._opened = safe_open(list(paths), "pt", device, process_group=process_group, **how)

    def load(self, dims: Mapping[str, int | None]) -> dict[str, Any]:
        """Tensors by name: the part of this rank in a dimension, or the whole tensor where that is None."""
        cut = {name: dim for name, dim in dims.items() if dim is not None}
        if not cut:
            return self._opened.get_tensors(list(dims))
        if len(dims) == 1:
            return {name: self._opened.get_sharded(name, dim) for name, dim in cut.items()}
        return dict(self._opened.tensors(list(dims), shard=cut))

    def push(self, name: str, rank: int) -> Any:
        """A tensor on one rank, None on the others."""
        return self._opened.push_tensor(name, rank)

    def stream(self, names: Sequence[str], most: int | None) -> Generator[tuple[str, Any], None, None]:
        """Pairs of name and tensor in this order, batch by batch of at most `most` bytes. An iterator that is left early
        is an error on the other ranks."""
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
        """Closes the files. Waits for no other rank."""
        self._opened.__exit__()
