"""Reading tensors of an open checkpoint into memory of a framework."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from ._tensorfs import Cancel, Checkpoint, Loader, Plan

Part = Optional[List[Tuple[int, int]]]
"""What of a tensor is wanted: first index and end in each dimension; None for all."""

_WHOLE_MAX = 4 << 20
"""Up to this length a tensor that the page cache holds is copied at once, by the calling thread."""

_PLACE_MIN = 1 << 20
"""Shorter ones are copied to their place; longer ones get a place that the disk can write to."""


class Info(NamedTuple):
    """A tensor as the native part knows it."""

    name: str
    position: int
    dtype: str
    shape: list[int]
    nbytes: int


class Reader:
    """What an open checkpoint, its slices and its background loads share."""

    def __init__(self, checkpoint: Checkpoint, framework: Any, loader: Loader, strict: bool) -> None:
        self.checkpoint, self.framework, self.loader, self.strict = checkpoint, framework, loader, strict
        # What all loads took, summed up.
        self.stats: dict[str, Any] = {}

    def whole(self, info: Info) -> Any:
        if info.nbytes <= _WHOLE_MAX and self.loader.on_cpu:
            tensor, address = self.framework.empty(info.dtype, info.shape, info.name)
            if info.nbytes == 0:
                return tensor
            if self.loader.load_cached(self.checkpoint, info.position, None, address, info.nbytes):
                return tensor
            if info.nbytes < _PLACE_MIN:
                return self._load_to(info, None, tensor, address)
        return self.load([(info, None)])[info.name]

    def part(self, info: Info, part: list[tuple[int, int]], shape: list[int]) -> Any:
        """The indices `part` of a tensor, as a tensor of this shape."""
        tensor, address = self.framework.empty(info.dtype, shape, info.name)
        if 0 in shape:
            return tensor
        if self.loader.on_cpu and self.loader.load_cached(
            self.checkpoint, info.position, part, address, tensor.nbytes
        ):
            return tensor
        return self._load_to(info, part, tensor, address)

    def _load_to(self, info: Info, part: Part, tensor: Any, address: int) -> Any:
        """Loads a part to a tensor of its shape, of whose bytes nobody else knows yet."""
        plan = self.loader.plan(self.checkpoint, [(info.position, part, None, address)])
        self._fill(plan, [(address, plan.placements[0][2], tensor)], None)
        return tensor

    def _fill(self, plan: Plan, memory: list[Any], cancel: Cancel | None) -> None:
        took = self.loader.fill(self.checkpoint, plan, memory, cancel, self.framework.stream())
        for key, value in took.items():
            if key in ("pinning", "cufile_unused"):
                self.stats[key] = value
            elif key in ("staging_peak", "pinned"):
                self.stats[key] = max(value, self.stats.get(key, 0))
            else:
                self.stats[key] = value + self.stats.get(key, 0)

    def load(self, wanted: Sequence[tuple[Info, Part]], cancel: Cancel | None = None) -> dict[str, Any]:
        """Loads tensors, or parts of them, together."""
        framework = self.framework
        for info, _ in wanted:
            framework.dtype(info.dtype, info.name)
        plan = self.loader.plan(self.checkpoint, [(info.position, part, None, None) for info, part in wanted])
        return self._carry_out(plan, cancel)

    def load_all(self) -> dict[str, Any]:
        """Loads all tensors, in file order: as `load` does, with less ado for each."""
        for dtype, name in self.checkpoint.dtypes().items():
            self.framework.dtype(dtype, name)
        return self._carry_out(self.loader.plan_all(self.checkpoint), None)

    def _carry_out(self, plan: Plan, cancel: Cancel | None) -> dict[str, Any]:
        framework = self.framework
        areas = [framework.area(room) for room in plan.rooms]
        memory = [area[0] if area[1] == 0 else (area[1], area[2], area[0]) for area in areas]
        self._fill(plan, memory, cancel)
        return framework.views([area[:2] for area in areas], plan.placed(self.checkpoint))
