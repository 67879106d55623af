"""Decides which rank of a group reads which part of the requested tensors. The module is pure: from the same requests,
all ranks compute the same schedule."""

from __future__ import annotations

import itertools
import json
import math
from typing import Callable, Iterator, NamedTuple, Sequence

Box = tuple[tuple[int, int], ...]
"""First index and end in each dimension of the whole tensor."""

_READ_MAX = 1 << 20
"""The most bytes that the loader reads at a time if it has to spread them over several places. Requests for parts of
the same rows are read together only if a row is not longer than this."""

_ROW_MIN = 1 << 20
"""If the elements of one index have at least this length in bytes, the parts of them that different ranks ask for are
read one by one."""


class Want(NamedTuple):
    """A part of a tensor that a rank asks for."""

    position: int
    box: Box
    cast: str | None
    bits: int
    """The length of an element in bits, after a cast."""

    @property
    def nbytes(self) -> int:
        return elements_of(self.box) * self.bits // 8


class Segment(NamedTuple):
    """A part of a want. Its bytes follow each other in the memory for the want."""

    want: Want
    box: Box
    ranks: tuple[int, ...]
    """The ranks that ask for this part."""

    @property
    def nbytes(self) -> int:
        return elements_of(self.box) * self.want.bits // 8

    @property
    def offset(self) -> int:
        """The first byte of the segment in the memory of the want."""
        first, stride = 0, 1
        for (start, _), (low, high) in reversed(list(zip(self.box, self.want.box))):
            first += (start - low) * stride
            stride *= high - low
        return first * self.want.bits // 8


class Piece(NamedTuple):
    """Segments of one tensor that one rank reads."""

    segments: tuple[Segment, ...]

    @property
    def position(self) -> int:
        return self.segments[0].want.position

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for segment in self.segments for rank in segment.ranks})

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def reads(self, shape: Sequence[int]) -> Iterator[tuple[Segment, Segment]]:
        """Pairs of a segment and a part of it, in the order in which a rank reads these parts. If the segments are
        parts of the same rows, few rows are read at a time, so that no byte is read twice."""
        dim = next((dim for dim, (low, high) in enumerate(self.segments[0].box) if high - low > 1), None)
        same_rows = dim is not None and len({one.box[: dim + 1] for one in self.segments}) == 1
        if dim is None or not same_rows or len({one.box for one in self.segments}) == 1:
            yield from ((one, one) for one in self.segments)
            return
        row = math.prod(shape[dim + 1 :]) * self.segments[0].want.bits // 8
        step = max(_READ_MAX // max(row, 1), 1)
        low, high = self.segments[0].box[dim]
        for start in range(low, high, step):
            for one in self.segments:
                yield one, _narrowed(one, dim, start, min(start + step, high))

    def weight(self, size: int) -> int:
        """Bytes that the reader of this piece sends in a group of `size` ranks. A segment for all ranks is sent once.
        Any other segment is sent once to each of its ranks."""
        return sum(one.nbytes * (1 if len(one.ranks) == size else len(one.ranks)) for one in self.segments)


Round = dict[int, list[Piece]]
"""Pieces by the rank that reads them."""


class Schedule(NamedTuple):
    """The pieces that each rank reads."""

    alone: dict[int, list[Piece]]
    """Pieces of each rank that no other rank asks for."""
    shared: dict[int, list[Piece]]
    """Pieces that each rank reads for several ranks."""

    def rounds(self, limit: int, size: int) -> list[Round]:
        """Divides the shared pieces into rounds. In each round, a rank sends at most `limit` bytes. Pieces for all
        ranks and pieces for some of the ranks are in different rounds."""
        rounds: list[Round] = []
        for is_for_all in (True, False):
            first = len(rounds)
            for rank, pieces in self.shared.items():
                number, length = first, 0
                for piece in pieces:
                    if all(len(one.ranks) == size for one in piece.segments) != is_for_all:
                        continue
                    if length and length + piece.weight(size) > limit:
                        number, length = number + 1, 0
                    length += piece.weight(size)
                    rounds.extend({} for _ in range(number + 1 - len(rounds)))
                    rounds[number].setdefault(rank, []).append(piece)
        return rounds


def encoded(wants: Sequence[Want]) -> bytes:
    """The message with the requests of a rank."""
    return json.dumps(wants, separators=(",", ":")).encode()


def decoded(message: bytes) -> list[Want]:
    """The requests in a message of a rank."""
    return [
        Want(position, tuple((start, stop) for start, stop in box), cast, bits)
        for position, box, cast, bits in json.loads(message)
    ]


def schedule(wants: dict[int, list[Want]], shape_of: Callable[[int], Sequence[int]], limit: int, size: int) -> Schedule:
    """Divides the reads of all requested parts among the ranks. A rank reads only parts that it asks for itself, and
    all ranks read about the same number of bytes. A shared piece has a `weight` of at most `limit` bytes."""
    by_tensor: dict[int, dict[Want, list[int]]] = {}
    for rank, several in sorted(wants.items()):
        for want in dict.fromkeys(several):
            if want.nbytes:
                by_tensor.setdefault(want.position, {}).setdefault(want, []).append(rank)
    pieces: list[Piece] = []
    for position, found in by_tensor.items():
        segments = [Segment(want, want.box, tuple(ranks)) for want, ranks in found.items()]
        pieces.extend(_pieces(segments, shape_of(position), limit, size))
    made = Schedule({rank: [] for rank in sorted(wants)}, {rank: [] for rank in sorted(wants)})
    read = dict.fromkeys(sorted(wants), 0)
    # The pieces that only one rank asks for come first, so that the shared pieces can balance the load.
    for piece in sorted(pieces, key=lambda piece: len(piece.ranks) > 1):
        ranks = piece.ranks
        reader = min(ranks, key=lambda rank: read[rank])
        read[reader] += piece.nbytes
        (made.alone if len(ranks) == 1 else made.shared)[reader].append(piece)
    return made


def chunk_of(size: int, count: int, number: int) -> tuple[int, int]:
    """First index and end of chunk `number` of the `count` chunks into which `torch.chunk` and `Shard` cut a dimension.
    All chunks have the same length, except that the last ones may be shorter or empty."""
    length = -(-size // count)
    return min(number * length, size), min((number + 1) * length, size)


def _pieces(segments: list[Segment], shape: Sequence[int], limit: int, size: int) -> Iterator[Piece]:
    if any(segment.want.bits % 8 for segment in segments):
        # The elements are no whole bytes, so a cut could lie within a byte. If a segment is too long, each of its ranks
        # reads all of it.
        for segment in segments:
            fits = Piece((segment,)).weight(size) <= limit
            yield from [Piece((segment,))] if fits else [Piece((segment._replace(ranks=(rank,)),)) for rank in segment.ranks]
        return
    yield from _cut(segments, shape, 0, limit, size)


def _cut(segments: list[Segment], shape: Sequence[int], dim: int, limit: int, size: int) -> Iterator[Piece]:
    """Cuts segments into pieces along `dim` and later dimensions. In each dimension before `dim`, all segments have the
    same single index."""
    whole = Piece(tuple(segments))
    if dim == len(shape) or len(whole.ranks) == 1:
        yield whole
        return
    bounds = sorted({bound for segment in segments for bound in segment.box[dim]})
    for low, high in itertools.pairwise(bounds):
        inside = [one for one in segments if one.box[dim][0] <= low and high <= one.box[dim][1]]
        if not inside:
            continue
        piece = Piece(tuple(_narrowed(one, dim, low, high) for one in inside))
        if len(piece.ranks) == 1:
            yield piece
            continue
        weight = piece.weight(size)
        differ = len({one.box for one in piece.segments}) > 1
        row = math.prod(shape[dim + 1 :]) * inside[0].want.bits // 8
        step = max(limit * (high - low) // weight, 0)
        if step == 0 or (differ and row >= _ROW_MIN):
            for index in range(low, high):
                yield from _cut([_narrowed(one, dim, index, index + 1) for one in inside], shape, dim + 1, limit, size)
            continue
        for start in range(low, high, step):
            stop = min(start + step, high)
            yield Piece(tuple(_narrowed(one, dim, start, stop) for one in inside))


def _narrowed(segment: Segment, dim: int, low: int, high: int) -> Segment:
    return segment._replace(box=(*segment.box[:dim], (low, high), *segment.box[dim + 1 :]))


def elements_of(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(stop - start for start, stop in box)
