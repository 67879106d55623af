"""Which part of the whole tensor the local shard of a DTensor of torch is."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any, Iterator, List, Tuple

Ranges = List[Tuple[int, int]]
"""Indices along one dimension, as first index and end, in the order in which a shard has them."""

Box = List[Tuple[int, int]]
"""First index and end in each dimension of the whole tensor."""

_BOXES_MAX = 1 << 16
"""Each box is loaded by itself, so there must not be too many."""


class Unknown(Exception):
    """Why it cannot be told which part a local shard is."""


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor, of any version of torch."""
    for name in ("torch.distributed.tensor", "torch.distributed._tensor"):
        found = getattr(sys.modules.get(name), "DTensor", None)
        if found is not None and isinstance(tensor, found):
            return True
    return False


def local_boxes(dtensor: Any, local_shape: list[int]) -> list[Box]:
    """The boxes of the whole tensor that lie one after the other in the memory of the contiguous local shard; none
    where the shard is empty.

    Raises `Unknown` where the placements do not say it, or say otherwise than the shape of the shard.
    """
    mesh, whole = dtensor.device_mesh, list(dtensor.shape)
    differs = Unknown(f"has a local shard of shape {local_shape}, which {_shown(dtensor)} do not make of {whole}")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # This process is not in the mesh: it holds nothing.
        if math.prod(local_shape):
            raise differs
        return []
    held: list[Ranges] = [[(0, size)] if size else [] for size in whole]
    candidates: dict[int, list[Ranges]] = {}
    for dim, mesh_dims in _sharded(dtensor.placements).items():
        splits = [_Split(mesh, number, coordinate[number], dtensor.placements[number]) for number in mesh_dims]
        candidates[dim] = list(_candidates(whole[dim], splits, _order(dtensor, dim)))
    if not math.prod(local_shape):
        # FSDP2 shapes an empty shard of an empty shard otherwise than the placements do: [0, 0], not [3, 0].
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
    """One dimension of a mesh that a dimension of the tensor is split over."""

    def __init__(self, mesh: Any, mesh_dim: int, rank: int, placement: Any) -> None:
        self.mesh_dim, self.size, self.rank = mesh_dim, mesh.size(mesh_dim), rank
        # 1 for `Shard`.
        self.factor = int(getattr(placement, "split_factor", 1))

    def chunk(self, ranges: Ranges) -> Ranges:
        return _chunk(ranges, self.size, self.rank)

    def strided(self, ranges: Ranges) -> Ranges:
        """The result joins this rank's part of each of `factor` chunks."""
        parts = (self.chunk(_chunk(ranges, self.factor, index)) for index in range(self.factor))
        return _joined(itertools.chain.from_iterable(parts))


def _sharded(placements: Any) -> dict[int, list[int]]:
    """For each dimension of the tensor that is split the dimensions of the mesh that it is split over."""
    sharded: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placements):
        # Classes derived from these may mean anything.
        kind = type(placement)
        name = kind.__name__ if kind.__module__.startswith("torch.") else ""
        if name in ("Shard", "_StridedShard"):
            sharded.setdefault(placement.dim, []).append(mesh_dim)
        elif name != "Replicate":
            raise Unknown(f"has the placement {placement!r}: only Shard and Replicate say which part a rank holds")
    return sharded


def _order(dtensor: Any, dim: int) -> list[int] | None:
    """The order in which mesh dimensions split this dimension, where torch has noted another than from left to
    right."""
    for entry in getattr(dtensor._spec, "shard_order", None) or ():
        if entry.tensor_dim == dim:
            return list(entry.mesh_dims)
    return None


def _candidates(size: int, splits: list[_Split], order: list[int] | None) -> Iterator[Ranges]:
    """The indices that one rank may hold of a dimension. Where it divides evenly all are the same."""
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
    """The order of plain splits that `_StridedShard` stands for, as FSDP2 uses it: a dimension that other mesh
    dimensions, further to the right, have split before. None where it stands for no order, or none is strided."""
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
    """Chunk `number` of `count`, of equal length but for the last ones, as `torch.chunk` has them."""
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
    """The rows of a shard with these indices."""
    # Up to the last dimension that has gaps each index is a box of its own.
    cut = max((dim for dim, ranges in enumerate(held) if len(ranges) > 1), default=0)
    if math.prod(map(_length, held[:cut])) * len(held[cut] if held else ()) > _BOXES_MAX:
        raise Unknown("has a local shard of too many parts")
    single = [[(index, index + 1) for start, stop in ranges for index in range(start, stop)] for ranges in held[:cut]]
    return [list(box) for box in itertools.product(*single, *held[cut:])]


def _shown(dtensor: Any) -> str:
    placements = ", ".join(map(str, dtensor.placements))
    return f"the placements ({placements}) on a mesh of {'x'.join(map(str, dtensor.device_mesh.shape))}"
