"""Reads tensors of an open checkpoint into memory of a framework."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

from ._errors import SafetensorError
from ._frameworks import WIDTHS
from ._tensorfs import Ahead, Area, Cancel, Checkpoint, Loader, Plan

Part = Optional[List[Tuple[int, int]]]
"""The wanted part of a tensor: first index and end in each dimension. None for the whole tensor."""

_WHOLE_MAX = 4 << 20
"""Length in bytes of the longest tensor that the calling thread itself copies, if the page cache holds it."""

_PLACE_MIN = 1 << 20
"""Tensors with at least this length in bytes get memory that the disk can write to directly. Shorter tensors are
copied."""


_OWN_MIN = 4 << 20
"""Tensors with at least this length in bytes are loaded ahead alone. Shorter tensors are loaded ahead in batches."""

_BATCH = 8 << 20
"""A batch of tensors that are loaded ahead ends when it has this length in bytes. Its tensors share one memory, which
stays allocated as long as any of them exists."""


class Info(NamedTuple):
    """A tensor as the native part describes it."""

    name: str
    position: int
    dtype: str
    shape: list[int]
    nbytes: int


class Reader:
    """The state that an open checkpoint, its slices and its background loads share."""

    def __init__(
        self, checkpoint: Checkpoint, framework: Any, loader: Loader, strict: bool, copy: bool | None = True
    ) -> None:
        self.checkpoint, self.framework, self.loader, self.strict = checkpoint, framework, loader, strict
        # Whether every tensor gets its own memory. None means that only tensors that are not better mapped get their
        # own memory.
        self.copy = copy if loader.on_cpu else True
        # For each mapped shard: the base object for views, and its address. None if a shard cannot be mapped.
        self._mapped: dict[int, tuple[Any, int] | None] = {}
        # The sums of the costs of all loads.
        self.stats: dict[str, Any] = {}
        # Nothing is loaded ahead for a GPU.
        self._ahead = Ahead() if loader.on_cpu else None
        # Whether the last small tensor that was requested was missing in the page cache.
        self._is_cold = False
        # With `copy=None`: the loader, which decides which tensors are better mapped. `_misses` says whether a
        # requested tensor was not better mapped.
        self._maps = loader if self.copy is None else None
        self._misses = False

    def close(self) -> None:
        """Frees what was loaded ahead. Later requests load their tensors themselves."""
        if self._ahead is not None:
            self._ahead.close()

    @property
    def ahead(self) -> tuple[int, int]:
        """Bytes that are loaded ahead now, and bytes that were loaded ahead but never used."""
        return (0, 0) if self._ahead is None else self._ahead.bytes

    def shared(self, info: Info, part: Part, shape: Sequence[int]) -> Any:
        """A tensor, or rows of it, in the memory of the mapped shard. None if the bytes are not contiguous or not
        aligned there, if the shard cannot be mapped, or, with `copy=None`, if the tensor is better copied."""
        if info.nbytes == 0 or 0 in shape:
            return None
        found = self.loader.run_of(self.checkpoint, info.position)
        if found is None:
            return None
        (shard, offset), nbytes = found, info.nbytes
        if part is not None:
            if any(bounds != (0, size) for bounds, size in zip(part[1:], info.shape[1:])):
                return None
            row, rest = divmod(nbytes, info.shape[0])
            first, end = part[0]
            if rest:
                return None
            offset, nbytes = offset + first * row, (end - first) * row
        if offset % WIDTHS.get(info.dtype, 1):
            return None
        if self.copy is None and not self.loader.is_better_mapped(self.checkpoint, shard, offset, nbytes):
            return None
        self.framework.check(info.dtype, shape, info.name)
        if shard not in self._mapped:
            area = Area.of_shard(self.checkpoint, shard, self.loader.timeout)
            self._mapped[shard] = None if area is None else (self.framework.over(area), area.address)
            # Checks the shard again, which may have been truncated before it was mapped.
            self.loader.run_of(self.checkpoint, info.position)
        mapped = self._mapped[shard]
        if mapped is None:
            return None
        place = (info.name, 0, offset, nbytes, info.dtype, tuple(shape))
        return self.framework.views([mapped], [place])[info.name]

    def all_shared(self, infos: Sequence[Info]) -> dict[str, Any]:
        """Tensors in the memory of mapped shards, in this order. Those that cannot be shared are read together."""
        tensors = {info.name: self.shared(info, None, info.shape) for info in infos}
        missing: list[tuple[Info, Part]] = [(info, None) for info in infos if tensors[info.name] is None]
        if missing:
            tensors.update(self.load(missing))
        return tensors

    def whole(self, info: Info) -> Any:
        if not self.copy:
            made = self.shared(info, None, info.shape)
            if made is not None:
                if self._misses and self._ahead is not None:
                    # Read-ahead has to learn of this request too: otherwise it would not expect the next tensor that is
                    # not mapped.
                    self._ahead.ask(self.checkpoint, info.position, False, begins=False)
                return made
            self._misses = True
        if self._ahead is not None:
            is_there, wanted = self._ahead.ask(self.checkpoint, info.position, self._is_cold, self._maps)
            if wanted:
                self._begin(self._ahead, wanted)
            if is_there:
                made = self._take(self._ahead, info)
                if made is not None:
                    return made
        try:
            return self._whole_now(info)
        except BaseException:
            # After a load that failed or was interrupted, the loads ahead of it do not go on in the background.
            if self._ahead is not None:
                self._ahead.drop()
            raise

    def _whole_now(self, info: Info) -> Any:
        if info.nbytes <= _WHOLE_MAX and self.loader.on_cpu:
            tensor, address = self.framework.empty(info.dtype, info.shape, info.name)
            if info.nbytes == 0:
                return tensor
            if self.loader.copy_from_page_cache(self.checkpoint, info.position, None, address, info.nbytes):
                self._is_cold = False
                return tensor
            self._is_cold = True
            if info.nbytes < _PLACE_MIN:
                return self._load_to(info, None, tensor, address)
        return self.load([(info, None)])[info.name]

    def _begin(self, ahead: Ahead, wanted: list[int]) -> None:
        """Begins to load the tensors at these positions ahead of requests."""
        try:
            together: list[Info] = []
            length = 0
            for position in wanted:
                info = Info(*self.checkpoint.tensor_at(position))
                try:
                    self.framework.check(info.dtype, info.shape, info.name)
                except SafetensorError:
                    continue
                if info.nbytes >= _OWN_MIN:
                    plan = self.loader.plan_ahead(self.checkpoint, position)
                    if plan is None:
                        break
                    self._begin_plan(ahead, [info], plan)
                    continue
                together.append(info)
                length += info.nbytes
                if length >= _BATCH:
                    self._begin_plan(ahead, together, self._plan(together))
                    together, length = [], 0
            if together:
                self._begin_plan(ahead, together, self._plan(together))
        except MemoryError:
            pass
        except Exception:
            # The error is dropped: if a request for the tensor fails later, it raises its own error.
            ahead.close()
        finally:
            ahead.drop_choices(wanted)

    def _plan(self, infos: Sequence[Info]) -> Plan:
        return self.loader.plan(self.checkpoint, [(info.position, None, None, None) for info in infos])

    def _begin_plan(self, ahead: Ahead, infos: list[Info], plan: Plan) -> None:
        """Begins to load tensors into memory that they share, because most of a large memory lies on huge pages."""
        areas, memory = self._memory_of(plan)
        mode = self.framework.mode()
        placed = {place[0]: place for place in plan.placed(self.checkpoint)}
        tensors = [(info.position, info.nbytes, (mode, areas, placed[info.name])) for info in infos]
        ahead.begin(self.loader, self.checkpoint, plan, memory, tensors)

    def _memory_of(self, plan: Plan) -> tuple[list[tuple[Any, int]], list[Any]]:
        """Allocates memory for a plan. Returns it in the form for `views`, and in the form for `Loader.fill`."""
        areas = [self.framework.area(room) for room in plan.rooms]
        memory = [area[0] if area[1] == 0 else (area[1], area[2], area[0]) for area in areas]
        return [area[:2] for area in areas], memory

    def _take(self, ahead: Ahead, info: Info) -> Any:
        """A tensor that was loaded ahead. None if the caller has to load it."""
        found = ahead.take(self.loader, info.position)
        if found is None:
            return None
        (mode, areas, place), took = found
        if took is not None:
            self._count(took)
        # Within some `with` blocks, such as inference mode, torch makes another kind of tensor than outside of them.
        if mode != self.framework.mode():
            return None
        return self.framework.views(areas, [place])[info.name]

    def part(self, info: Info, part: list[tuple[int, int]], shape: list[int]) -> Any:
        """The part `part` of a tensor, as a tensor of the shape `shape`."""
        if not self.copy:
            made = self.shared(info, part, shape)
            if made is not None:
                return made
        tensor, address = self.framework.empty(info.dtype, shape, info.name)
        if 0 in shape:
            return tensor
        if self.loader.on_cpu and self.loader.copy_from_page_cache(
            self.checkpoint, info.position, part, address, tensor.nbytes
        ):
            return tensor
        return self._load_to(info, part, tensor, address)

    def _load_to(self, info: Info, part: Part, tensor: Any, address: int) -> Any:
        """Loads a part into `tensor`, a new tensor of its shape that nothing else uses yet."""
        plan = self.loader.plan(self.checkpoint, [(info.position, part, None, address)])
        self._fill(plan, [(address, plan.placements[0][2], tensor)], None)
        return tensor

    def _fill(self, plan: Plan, memory: list[Any], cancel: Cancel | None) -> None:
        self._count(self.loader.fill(self.checkpoint, plan, memory, cancel, self.framework.stream()))

    def _count(self, took: dict[str, Any]) -> None:
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
        """Loads all tensors, in file order. It does the same as `load`, with less work for each tensor."""
        for dtype, name in self.checkpoint.dtypes().items():
            self.framework.dtype(dtype, name)
        return self._carry_out(self.loader.plan_all(self.checkpoint), None)

    def _carry_out(self, plan: Plan, cancel: Cancel | None) -> dict[str, Any]:
        areas, memory = self._memory_of(plan)
        self._fill(plan, memory, cancel)
        return self.framework.views(areas, plan.placed(self.checkpoint))


class FinishingReader(Reader):
    """A reader for a framework that makes its tensors of filled numpy arrays."""

    def whole(self, info: Info) -> Any:
        return self._finished(super().whole(info))

    def part(self, info: Info, part: list[tuple[int, int]], shape: list[int]) -> Any:
        return self._finished(super().part(info, part, shape))

    def load(self, wanted: Sequence[tuple[Info, Part]], cancel: Cancel | None = None) -> dict[str, Any]:
        return self._all_finished(super().load(wanted, cancel))

    def load_all(self) -> dict[str, Any]:
        return self._all_finished(super().load_all())

    def all_shared(self, infos: Sequence[Info]) -> dict[str, Any]:
        return self._all_finished(super().all_shared(infos))

    def _all_finished(self, tensors: dict[str, Any]) -> dict[str, Any]:
        # Tensors are made one after the other, so that an array that was copied is freed before the next copy.
        for name in tensors:
            tensors[name] = self._finished(tensors[name])
        return tensors

    def _finished(self, tensor: Any) -> Any:
        # The tensor may be finished already: a method of the base class may have called another method of this class.
        return self.framework.finish(tensor) if self.framework.is_array(tensor) else tensor


def reader_for(
    checkpoint: Checkpoint, framework: Any, loader: Loader, strict: bool, copy: bool | None = True
) -> Reader:
    """The reader that makes tensors of this framework."""
    cls = Reader if framework.finish is None else FinishingReader
    return cls(checkpoint, framework, loader, strict, copy)
