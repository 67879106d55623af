"""Loads of a process group: each rank reads a part, and the other ranks get the bytes by shared memory, by the page
cache of the host, or by collectives."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator, NamedTuple, Sequence

from . import _errors, _frameworks, _requests, _settings, _torch_group
from ._errors import GroupError
from ._group import Group, Operation
from ._reader import Info, Part, Reader
from ._requests import Box, Piece, Round, Schedule, Segment, Want
from ._tensorfs import Area, Checkpoint, Loader

_WIRE = 64 << 20
"""Bytes of all buffers for collectives in one rank."""

_ROUND = 64 << 20
"""The most bytes that a rank reads into the page cache before the other ranks copy them."""

_FILES_MAX = 128
"""The most files of shared memory that one load uses."""

SHARES = (None, "host", "network")


Find = Callable[[], "list[tuple[Info, Part]]"]
"""A function that returns the tensors and parts that this rank asks for. It is called within the operation, so that an
exception in it becomes an error of all ranks."""


class Place(NamedTuple):
    """Memory into which a want is loaded."""

    want: Want
    address: int
    nbytes: int
    owner: Any
    gpu: int | None = None
    """Number of the GPU that has the memory. None for the CPU."""


class Team:
    """The group of a `safe_open` or a load, and the way in which its ranks share what they read."""

    def __init__(self, process_group: Any, share: str | None, how: dict[str, Any]) -> None:
        if share not in SHARES:
            raise ValueError(f"share={share!r}: expected host or network")
        self._share, self._how = share, how
        self.group: Group = _torch_group.group_of(process_group, self.loader().timeout)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()

    def loader(self, gpu: int | None = None, **other: Any) -> Loader:
        """The loader with the settings of the `safe_open` or load, changed by `other`, for the CPU or for a GPU."""
        return _settings.loader(**{**self._how, **other}, gpu=gpu)

    @property
    def by_host(self) -> bool:
        """Whether ranks share their reads only with ranks of the same host, so that hosts exchange nothing. Without the
        argument `share`, this is so if all ranks are on one host."""
        return self._share == "host" or (self._share is None and len(self.group.ranks_of_host) == self.group.size)

    @property
    def ranks(self) -> list[int]:
        """The ranks that share reads with this rank, including this rank."""
        return self.group.ranks_of_host if self.by_host else list(range(self.group.size))

    def plan(self, operation: Operation, checkpoint: Checkpoint, wants: Sequence[Want], limit: int) -> Schedule:
        """Exchanges the requests of all ranks, and divides the reads among the ranks."""
        ranks = self.ranks
        every = operation.exchange(_requests.encoded(wants))
        asked = {rank: _requests.decoded(every[rank]) for rank in ranks}
        return _requests.schedule(asked, _shapes(checkpoint), limit, len(ranks))

    def load(self, reader: Reader, gpu: int | None, find: Find) -> dict[str, Any]:
        """Loads tensors, or parts of them, into new memory. Each rank may ask for different tensors."""
        with self.group.operation() as operation:
            wanted = find()
            for info, _ in wanted:
                reader.framework.check(info.dtype, info.shape, info.name)
            wants = [want_of(info, part) for info, part in wanted]
            if self.by_host and reader.loader.on_cpu:
                make = self._load_shared(operation, reader, wanted, wants)
            else:
                plan = reader.loader.plan(reader.checkpoint, [_native(want, None) for want in wants])
                areas, _ = reader._memory_of(plan)
                placed = plan.placed(reader.checkpoint)
                self.fill(operation, reader.checkpoint, _places(wants, areas, placed, gpu), reader._count)

                def make() -> dict[str, Any]:
                    return reader.framework.views(areas, placed)

        return make()

    def iterate(
        self,
        reader: Reader,
        gpu: int | None,
        find: Find,
        cut: Callable[[list[tuple[Info, Part]]], list[list[tuple[Info, Part]]]],
    ) -> Iterator[tuple[str, Any]]:
        """Loads batch after batch. All ranks load the same batch at the same time, and each rank gets those tensors of
        the batch that it asks for."""
        with self.group.operation() as operation:
            mine = {info.position: (info, part) for info, part in find()}
            every = operation.exchange(json.dumps(list(mine)).encode())
        asked = {position for said in every for position in json.loads(said)}
        order = [position for position in reader.checkpoint.file_order() if position in asked]
        batches = cut([(Info(*reader.checkpoint.tensor_at(position)), None) for position in order])
        is_over = False
        try:
            for batch in batches:
                found = [mine[info.position] for info, _ in batch if info.position in mine]
                tensors = self.load(reader, gpu, lambda: found)
                while tensors:
                    yield (name := next(iter(tensors))), tensors.pop(name)
            is_over = True
        except GeneratorExit:
            if not is_over:
                self.leave("it left the loop over tensors()")
            raise

    def leave(self, why: str) -> None:
        """Makes an operation of the group fail with the reason `why`: the operation that the other ranks are in, or
        that they begin next."""
        with contextlib.suppress(Exception), self.group.operation():
            raise _errors.error(why, "group", cls=GroupError)

    def fill(
        self,
        operation: Operation,
        checkpoint: Checkpoint,
        places: Sequence[Place],
        count: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Loads into existing memory."""
        by_want: dict[Want, list[Place]] = {}
        for place in places:
            by_want.setdefault(place.want, []).append(place)
        exchange = _PageCache if self.by_host else _Collectives
        exchange(self, operation, checkpoint, by_want, count).run()

    def _load_shared(
        self, operation: Operation, reader: Reader, wanted: Sequence[tuple[Info, Part]], wants: list[Want]
    ) -> Callable[[], dict[str, Any]]:
        """Loads the wants that several ranks of a host have in common into shared memory. Each rank reads a part of
        them. In the end each rank maps this memory privately, so that no other rank sees its writes. All other wants
        get ordinary memory."""
        checkpoint, loader, me = reader.checkpoint, reader.loader, self.group.rank
        schedule = self.plan(operation, checkpoint, wants, _ROUND)
        several = [piece for pieces in schedule.shared.values() for piece in pieces]
        shared = sorted({one.want for piece in several for one in piece.segments}, key=str)
        blocks = _Blocks(self.group, operation, loader.plan(checkpoint, [_native(want, None) for want in shared]), shared)
        mine = (*schedule.alone[me], *schedule.shared[me])
        shape_of = _shapes(checkpoint)
        segments = [part for piece in mine for one, part in piece.reads(shape_of(piece.position)) if one.want in blocks]
        requests, memory = [], []
        for one in segments:
            area, address = blocks.place(one)
            requests.append(_native(one.want, address, one.box))
            memory.append((address, one.nbytes, area))
        own = [(info, part, want) for (info, part), want in zip(wanted, wants) if want not in blocks]
        own_plan = loader.plan(checkpoint, [_native(want, None) for _, _, want in own])
        areas, own_memory = reader._memory_of(own_plan)
        for plan, into in ((loader.plan(checkpoint, requests), memory), (own_plan, own_memory)):
            reader._count(loader.fill(checkpoint, plan, into, operation.cancel, None))
        tensors = blocks.mapped(reader.framework, {info.name: want for (info, _), want in zip(wanted, wants) if want in blocks})

        def make() -> dict[str, Any]:
            found = {**reader.framework.views(areas, own_plan.placed(checkpoint)), **tensors()}
            return {info.name: found[info.name] for info, _ in wanted}

        return make


class _Blocks:
    """Memory that the ranks of a host share, in files without names. It has the regions of a plan, which is the same on
    all ranks."""

    def __init__(self, group: Group, operation: Operation, plan: Any, wants: list[Want]) -> None:
        self._placements = {want: place for want, place in zip(wants, plan.placements)}
        lengths = [length - _frameworks.PAGE for length in plan.rooms]
        # If there are more regions than files, a file holds several regions.
        each = -(-len(lengths) // _FILES_MAX) or 1
        starts = [sum(lengths[number // each * each : number]) for number in range(len(lengths))]
        self._regions = [(number // each, starts[number], length) for number, length in enumerate(lengths)]
        self._files: list[int] = []
        self._maps: dict[tuple[int, bool], Area] = {}
        leader, total = group.ranks_of_host[0], len(lengths)
        try:
            if total and group.rank == leader:
                for first in range(0, total, each):
                    descriptor = os.memfd_create("tensorfs", os.MFD_CLOEXEC)
                    self._files.append(descriptor)
                    os.ftruncate(descriptor, sum(lengths[first : first + each]))
                operation.post("memory", json.dumps(self._files).encode())
            elif total:
                found = json.loads(operation.wait("memory", leader))
                with operation.files_of(leader):
                    for descriptor in found:
                        self._files.append(os.open(f"/proc/{group.pid(leader)}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
            if total:
                # The leader keeps its files open until all ranks have opened them.
                operation.post("opened")
                for rank in group.ranks_of_host if group.rank == leader else ():
                    operation.wait("opened", rank)
            for region in sorted({place[0] for place in plan.placements}):
                for private in (False, True):
                    file, start, length = self._regions[region]
                    self._maps[region, private] = Area.of_shared(self._files[file], start, length, private)
        finally:
            for descriptor in self._files:
                os.close(descriptor)

    def __contains__(self, want: Want) -> bool:
        return want in self._placements

    def place(self, segment: Segment) -> tuple[Area, int]:
        """The area and the address that the bytes of a segment are loaded to."""
        region, offset, *_ = self._placements[segment.want]
        area = self._maps[region, False]
        return area, area.address + offset + segment.offset

    def mapped(self, framework: Any, names: dict[str, Want]) -> Callable[[], dict[str, Any]]:
        """A function that makes the tensors of these wants. It is called once all ranks have read their parts."""
        placed = []
        for name, want in names.items():
            region, offset, nbytes, dtype, shape = self._placements[want]
            placed.append((name, region, offset, nbytes, dtype, tuple(shape)))
        used = {region for _, region, *_ in placed}
        areas = {region: self._maps[region, True] for region in used}
        self._maps.clear()

        def make() -> dict[str, Any]:
            over = {region: (framework.over(area), area.address) for region, area in areas.items()}
            return framework.views(over, placed)

        return make


class _Exchange:
    """A load of a group into existing memory of each rank."""

    limit = _ROUND

    def __init__(
        self,
        team: Team,
        operation: Operation,
        checkpoint: Checkpoint,
        places: dict[Want, list[Place]],
        count: Callable[[Any], None],
    ) -> None:
        self._team, self.group, self.operation, self.checkpoint = team, team.group, operation, checkpoint
        self.ranks, self.places, self._count = team.ranks, places, count
        self.schedule = team.plan(operation, checkpoint, list(places), self.limit)

    def read(self, pieces: Sequence[Piece], **other: str) -> None:
        """Reads those segments of these pieces that this rank asks for to their places. `other` changes settings of the
        loader."""
        by_gpu: dict[int | None, list[tuple[Segment, Place]]] = {}
        for piece in pieces:
            for one in piece.segments:
                for place in self.places.get(one.want, ()):
                    by_gpu.setdefault(place.gpu, []).append((one, place))
        for gpu, found in by_gpu.items():
            loader = self._team.loader(gpu, **other)
            requests = [_native(one.want, place.address + one.offset, one.box) for one, place in found]
            memory = [(place.address + one.offset, one.nbytes, place.owner) for one, place in found]
            plan = loader.plan(self.checkpoint, requests)
            self._count(loader.fill(self.checkpoint, plan, memory, self.operation.cancel, _stream(gpu)))


class _PageCache(_Exchange):
    """One rank of a host reads each part into the page cache, and the other ranks of the host copy it from there."""

    def run(self) -> None:
        me = self.group.rank
        rounds = self.schedule.rounds(self.limit, len(self.ranks))
        for number, by_rank in enumerate([*rounds, {}]):
            if number < len(rounds):
                self.read(by_rank.get(me, ()), source="buffered")
                self.operation.post(f"read{number}")
            if number > 0:
                before = rounds[number - 1]
                for rank in before:
                    self.operation.wait(f"read{number - 1}", rank)
                self.read([piece for rank, several in before.items() if rank != me for piece in several], source="buffered")
        self.read(self.schedule.alone[me])


class _Collectives(_Exchange):
    """Each part is read by one rank. The rank sends the part to the other ranks while it reads the next one."""

    def __init__(self, team: Team, *rest: Any) -> None:
        # Each rank has two buffers to send from, and one buffer for each rank to receive into.
        self.limit = max(_WIRE // (team.group.size + 2) // 4096 * 4096, 64 << 10)
        super().__init__(team, *rest)
        self._wire: Any = None
        self._shape_of = _shapes(self.checkpoint)

    def run(self) -> None:
        rounds = self.schedule.rounds(self.limit, len(self.ranks))
        if rounds:
            beside = ThreadPoolExecutor(1, "tensorfs-group")
            try:
                self._run_rounds(rounds, beside)
            except BaseException:
                self.operation.cancel.cancel()
                raise
            finally:
                # This does not wait: a read that is under way keeps its memory alive, and ends within the deadline.
                beside.shutdown(wait=False, cancel_futures=True)
        self.read(self.schedule.alone[self.group.rank])

    def _run_rounds(self, rounds: list[Round], beside: ThreadPoolExecutor) -> None:
        made = beside.submit(self.group.wire_of, self.operation.name)
        with self.operation.collective():
            self.operation.until(made.done)
            self._wire = made.result()
        ahead = beside.submit(self._staged, rounds[0])
        for number, by_rank in enumerate(rounds):
            self.operation.until(ahead.done)
            sent = ahead.result()
            if number + 1 < len(rounds):
                ahead = beside.submit(self._staged, rounds[number + 1])
            with self.operation.collective():
                self._exchange(by_rank, *sent)

    def _is_for_all(self, by_rank: Round) -> bool:
        size = len(self.ranks)
        return all(len(one.ranks) == size for several in by_rank.values() for piece in several for one in piece.segments)

    def _sent(self, by_rank: Round, reader: int, to: int) -> list[Segment]:
        """The segments that the rank `reader` sends to the rank `to` in a round, in the order of sending."""
        return [one for piece in by_rank.get(reader, ()) for one in piece.segments if to in one.ranks]

    def _staged(self, by_rank: Round) -> tuple[Any, int]:
        """Reads the pieces of this rank into a new buffer, in the order in which they are sent."""
        me = self.group.rank
        if self._is_for_all(by_rank):
            segments = self._sent(by_rank, me, me)
            length = max(_length(self._sent(by_rank, rank, rank)) for rank in self.ranks)
        else:
            segments = [one for to in self.ranks for one in self._sent(by_rank, me, to)]
            length = _length(segments)
        buffer, address = self._wire.buffer(length)
        ends = itertools.accumulate((one.nbytes for one in segments), initial=address)
        first: dict[Segment, int] = {}
        again: list[tuple[int, Segment]] = []
        for one, at in zip(segments, ends):
            if first.setdefault(one, at) != at:
                again.append((at, one))
        requests, memory = [], []
        for piece in by_rank.get(me, ()):
            for one, part in piece.reads(self._shape_of(piece.position)):
                at = first[one] + part.offset - one.offset
                requests.append(_native(part.want, at, part.box))
                memory.append((at, part.nbytes, buffer))
        loader = self._team.loader()
        plan = loader.plan(self.checkpoint, requests)
        self._count(loader.fill(self.checkpoint, plan, memory, self.operation.cancel, None))
        for at, one in again:
            ctypes.memmove(at, first[one], one.nbytes)
        return buffer, address

    def _exchange(self, by_rank: Round, buffer: Any, address: int) -> None:
        """Sends and receives the bytes of a round, by the collective that its pieces need, and copies the received
        bytes to their places."""
        me, length = self.group.rank, len(buffer)
        received = {rank: self._sent(by_rank, rank, me) for rank in self.ranks}
        if not self._is_for_all(by_rank):
            sizes_out = [_length(self._sent(by_rank, me, to)) for to in self.ranks]
            sizes_in = [_length(received[rank]) for rank in self.ranks]
            into, start = self._wire.buffer(sum(sizes_in))
            done = self._wire.scatter(into, buffer, sizes_in, sizes_out)
            starts = [start + before for before in itertools.accumulate(sizes_in, initial=0)]
        elif len(by_rank) == 1:
            into, start = buffer, address
            done = self._wire.broadcast(buffer, next(iter(by_rank)))
            starts = [start] * len(self.ranks)
        else:
            into, start = self._wire.buffer(length * len(self.ranks))
            done = self._wire.all_gather(into, buffer)
            starts = [start + number * length for number in range(len(self.ranks))]
        self.operation.until(done)
        for rank, at in zip(self.ranks, starts):
            for one in received[rank]:
                self._put(one, into, at - start, at)
                at += one.nbytes

    def _put(self, segment: Segment, buffer: Any, first: int, address: int) -> None:
        for place in self.places.get(segment.want, ()):
            to = place.address + segment.offset
            if place.gpu is None:
                ctypes.memmove(to, address, segment.nbytes)
                continue
            owner = place.owner[1] if isinstance(place.owner, tuple) else place.owner
            flat = owner.detach().reshape(-1).view(buffer.dtype)
            start = to - flat.data_ptr()
            flat[start : start + segment.nbytes].copy_(buffer[first : first + segment.nbytes])


def want_of(info: Info, part: Part, cast: str | None = None, nbytes: int = 0) -> Want:
    """The request for a tensor or a part of it. With a cast, `nbytes` is the length after the cast."""
    whole = tuple((0, size) for size in info.shape)
    box = whole if part is None else tuple(part)
    elements = _requests.elements_of(whole if cast is None else box)
    length = info.nbytes if cast is None else nbytes
    return Want(info.position, box, cast, length * 8 // elements if elements else 8)


def _native(want: Want, address: int | None, box: Box | None = None) -> tuple[int, Part, str | None, int | None]:
    return want.position, list(want.box if box is None else box), want.cast, address


def _places(wants: Sequence[Want], areas: Sequence[tuple[Any, int]], placed: Sequence[Any], gpu: int | None) -> list[Place]:
    places = []
    for want, (_, region, offset, nbytes, *_) in zip(wants, placed):
        if nbytes:
            area, address = areas[region]
            if gpu is None:
                address = area.address if isinstance(area, Area) else address + -address % _frameworks.PAGE
            places.append(Place(want, address + offset, nbytes, area, gpu))
    return places


def _shapes(checkpoint: Checkpoint) -> Callable[[int], Sequence[int]]:
    """A function that returns the shape of the tensor at a position."""
    return lambda position: checkpoint.tensor_at(position)[3]


def _stream(gpu: int | None) -> int | None:
    return None if gpu is None else _frameworks.find("pt", gpu).stream()


def _length(segments: Sequence[Segment]) -> int:
    return sum(one.nbytes for one in segments)
