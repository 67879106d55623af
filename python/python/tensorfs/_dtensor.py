"""Finds the part of the whole tensor that the local shard of a torch DTensor holds."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Iterator, List, Tuple

Ranges = List[Tuple[int, int]]
"""Ranges of indices along one dimension, each as (first index, end), in the order in which the shard stores them."""

Box = List[Tuple[int, int]]
"""A part of the whole tensor: first index and end in each dimension."""

_BOXES_MAX = 1 << 16
"""The most boxes of one shard. Each box is loaded by a request of its own, so a shard with more boxes is refused."""


class Unknown(Exception):
    """The reason why the part of a local shard cannot be determined."""


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor. The module that defines the class depends on the version of torch."""
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(name), "DTensor", None)
        if found is not None and isinstance(tensor, found):
            return True
    return False


def local_boxes(dtensor: Any, local_shape: list[int]) -> list[Box]:
    """The boxes of the whole tensor that the contiguous local shard holds, in the order of its memory. An empty shard
    has no boxes.

    Raises `Unknown` if the placements do not determine them, or contradict the shape of the shard.
    """
    mesh, whole = dtensor.device_mesh, list(dtensor.shape)
    differs = Unknown(f"has a local shard of shape {local_shape}, which {_shown(dtensor)} do not make of {whole}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # A process outside of the mesh has no elements.
        if math.prod(local_shape):
            raise differs
        return []
    held: list[Ranges] = [[(0, size)] if size else [] for size in whole]
    candidates: dict[int, list[Ranges]] = {}
    for dim, mesh_dims in _sharded(dtensor.placements).items():
        splits = [_Split(mesh, number, coordinate[number], dtensor.placements[number]) for number in mesh_dims]
        candidates[dim] = list(_candidates(whole[dim], splits, _order(dtensor, dim)))
    if not math.prod(local_shape):
        # The shape of an empty shard is not compared. If an empty shard was sharded again, FSDP2 gives it the shape [0,
        # 0], where the placements give [3, 0].
        if math.prod(whole) and not any([] in several for several in candidates.values()):
            raise differs
        return []
    for dim, several in candidates.items():
        found: list[Ranges] = []
        for ranges in several:
            if ranges not in found and _length(ranges) == local_shape[dim]:
                found.append(ranges)
        if not found:
            raise differs
        if len(found) > 1:
            raise Unknown(f"has {_shown(dtensor)}, which may mean several parts of dimension {dim}")
        held[dim] = found[0]
    if [_length(ranges) for ranges in held] != local_shape:
        raise Unknown(f"its local shard of shape {local_shape} is not what {_shown(dtensor)} make of {whole}")
    return _boxes(held)


class _Split:
    """A mesh dimension over which a dimension of the tensor is split."""

    def __init__(self, mesh: Any, mesh_dim: int, rank: int, placement: Any) -> None:
        self.mesh_dim, self.size, self.rank = mesh_dim, mesh.size(mesh_dim), rank
        # Only a `_StridedShard` has a split factor. A `Shard` counts as 1.
        self.factor = int(getattr(placement, "split_factor", 1))

    def chunk(self, ranges: Ranges) -> Ranges:
        return _chunk(ranges, self.size, self.rank)

    def strided(self, ranges: Ranges) -> Ranges:
        """Cuts the ranges into `factor` chunks, takes the part of this rank from each chunk, and joins these parts."""
        parts = (self.chunk(_chunk(ranges, self.factor, index)) for index in range(self.factor))
        return _joined(itertools.chain.from_iterable(parts))


def _sharded(placements: Any) -> dict[int, list[int]]:
    """The mesh dimensions over which each dimension of the tensor is split."""
    sharded: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        # Only the classes of torch itself are accepted: a derived class may place elements differently.
        kind = type(placement)
        name = kind.__name__ if kind.__module__.startswith("torch.") else ""
        if name in ("Shard", "_StridedShard"):
            sharded.setdefault(placement.dim, []).append(mesh_dim)
        elif name != "Replicate":
            raise Unknown(f"has the placement {placement!r}: only Shard and Replicate say which part a rank holds")
    return sharded


def _order(dtensor: Any, dim: int) -> list[int] | None:
    """The order in which the mesh dimensions split the tensor dimension `dim`. None if the order is from left to
    right."""
    for entry in getattr(dtensor._spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            return list(entry.mesh_dims)
    return None


def _candidates(size: int, splits: list[_Split], order: list[int] | None) -> Iterator[Ranges]:
    """The ranges of indices of one dimension that this rank may hold, one result for each possible meaning of the
    placements. All results are equal if the dimension divides evenly."""
    whole = [(0, size)] if size else []
    in_order = splits if order is None else [split for number in order for split in splits if split.mesh_dim == number]
    ranges = whole
    for split in in_order:
        ranges = split.chunk(ranges) if split.factor == 1 else split.strided(ranges)
    yield ranges
    decoded = _decoded(splits)
    if decoded is not None:
        ranges = whole
        for split in decoded:
            ranges = split.chunk(ranges)
        yield ranges


def _decoded(splits: list[_Split]) -> list[_Split] | None:
    """The order of plain splits that `_StridedShard` stands for in FSDP2. There, the split factor of a `_StridedShard`
    is the product of the sizes of those mesh dimensions to its right that have split the tensor dimension before. None
    if no order fits the factors, or if no split is strided."""
    if all(split.factor == 1 for split in splits):
        return None
    order: list[_Split] = []
    for split in reversed(splits):
        before, index = 1, 0
        while before != split.factor and index < len(order):
            before *= order[index].size
            index += 1
        if before != split.factor:
            return None
        order.insert(index, split)
    return order


def _chunk(ranges: Ranges, count: int, number: int) -> Ranges:
    """Chunk `number` of the `count` chunks into which `torch.chunk` would cut these indices. All chunks have the same
    length, except that the last ones may be shorter or empty."""
    length = -(-_length(ranges) // count)
    first, end = number * length, (number + 1) * length
    taken, before = [], 0
    for start, stop in ranges:
        low, high = max(first - before, 0), min(end - before, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        before += stop - start
    return taken


def _joined(ranges: Iterator[tuple[int, int]]) -> Ranges:
    joined: Ranges = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _boxes(held: list[Ranges]) -> list[Box]:
    """The boxes of a shard with these indices in each dimension."""
    # `cut` is the last dimension with several ranges. Each index of the dimensions before it gets its own box.
    cut = max((dim for dim, ranges in enumerate(held) if len(ranges) > 1), default=0)
    if math.prod(map(_length, held[:cut])) * len(held[cut] if held else ()) > _BOXES_MAX:
        raise Unknown("has a local shard of too many parts")
    single = [[(index, index + 1) for start, stop in ranges for index in range(start, stop)] for ranges in held[:cut]]
    return [list(box) for box in itertools.product(*single, *held[cut:])]


def _shown(dtensor: Any) -> str:
    placements = ", ".join(map(str, dtensor.placements))
    return f"the placements ({placements}) on a mesh of {'x'.join(map(str, dtensor.device_mesh.shape))}"
