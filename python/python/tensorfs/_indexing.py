"""Interprets indices: finds the part of a tensor that an index selects."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Sequence

from ._errors import error


class Cut(NamedTuple):
    """The wanted indices of one dimension. `single` means that the index was a number: the result lacks this
    dimension."""

    start: int
    stop: int
    step: int
    single: bool

    @property
    def size(self) -> int:
        return len(range(self.start, self.stop, self.step))


def plain(index: Any, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """First index and end in each dimension, if the index consists of plain slices without steps. None for any other
    index, which may be valid too."""
    items = index if type(index) is tuple else (index,)
    if len(items) > len(shape):
        return None
    part = []
    for item, size in zip(items, shape):
        if type(item) is not slice or item.step is not None:
            return None
        start, stop = item.start, item.stop
        start = 0 if start is None else start
        stop = size if stop is None else stop
        if type(start) is not int or type(stop) is not int or not 0 <= start < stop <= size:
            return None
        part.append((start, stop))
    for size in shape[len(items) :]:
        part.append((0, size))
    return part


def simple(index: Any, shape: Sequence[int]) -> list[Cut] | None:
    """Interprets an index by the rules of torch. None if only torch can interpret or refuse this index."""
    items = [_scalar(item) for item in _items(index)]
    if any(item is not Ellipsis and type(item) not in (int, slice) for item in items) or items.count(Ellipsis) > 1:
        return None
    items = _expanded(items, shape)
    if len(items) > len(shape):
        return None
    cuts = []
    for item, size in zip(items, shape):
        if isinstance(item, int):
            if not -size <= item < size:
                return None
            item %= size
            cuts.append(Cut(item, item + 1, 1, True))
            continue
        if not all(bound is None or type(bound) is int for bound in (item.start, item.stop, item.step)):
            return None
        if item.step is not None and item.step < 1:
            return None
        start, stop, step = item.indices(size)
        cuts.append(Cut(start, max(start, stop), step, False))
    return cuts + _whole(shape[len(cuts) :])


def strict(index: Any, shape: Sequence[int]) -> list[Cut]:
    """Interprets an index by the rules of safetensors: an index past the end is an error."""
    if isinstance(index, list):
        if index:
            raise error("Non empty lists are not implemented")
        index = slice(0, 0)
    items = _items(index)
    if sum(item is Ellipsis for item in items) > 1:
        raise error("Only one ellipsis (...) is allowed in slice index")
    items = _expanded(items, shape)
    parsed = [_parsed(item, dim, shape[dim] if dim < len(shape) else 0) for dim, item in enumerate(items)]
    shown = f"Error during slicing [{', '.join(map(_shown, items, parsed))}] with shape {list(shape)}: "
    if len(items) > len(shape):
        raise error(f"{shown}more slicing indexes than dimensions in tensor")
    # Begins with the last dimension: if the index is wrong in several dimensions, safetensors names the last of them.
    for dim, cut in reversed(list(enumerate(parsed))):
        size = shape[dim]
        # An empty slice of an empty dimension is valid, although it begins past the end.
        empty = cut.start == cut.stop == 0
        if not empty and (cut.start >= size or cut.stop > size):
            asked = cut.start if cut.start >= size else cut.stop - 1
            raise error(f"{shown}index {asked} out of bounds for tensor dimension #{dim} of size {size}")
    return [cut._replace(stop=max(cut.start, cut.stop)) for cut in parsed] + _whole(shape[len(parsed) :])


def _whole(shape: Sequence[int]) -> list[Cut]:
    return [Cut(0, size, 1, False) for size in shape]


def _items(index: Any) -> list[Any]:
    return list(index) if isinstance(index, tuple) else [index]


def _expanded(items: list[Any], shape: Sequence[int]) -> list[Any]:
    """Replaces an ellipsis by a slice for each remaining dimension."""
    missing = [slice(None)] * max(len(shape) - sum(item is not Ellipsis for item in items), 0)
    for position, item in enumerate(items):
        if item is Ellipsis:
            return items[:position] + missing + items[position + 1 :]
    return items


def _parsed(item: Any, dimension: int, size: int) -> Cut:
    if isinstance(item, slice):
        step = 1 if item.step is None else _i64(item.step)
        if step < 1:
            raise error(f"Slice step must be a positive integer, got {step}")
        start, stop = (None if bound is None else _i64(bound) for bound in (item.start, item.stop))
        start = 0 if start is None else start + size if start < 0 else start
        stop = size if stop is None else stop + size if stop < 0 else stop
        return Cut(max(start, 0), max(stop, 0), step, False)
    try:
        number = _i64(item)
    except Exception:
        raise error(f"Unsupported slice index at position {dimension}: expected slice, int, or ellipsis") from None
    if number < -size:
        raise error(f"Invalid index {number} for dimension {dimension} of size {size}")
    number = number + size if number < 0 else number
    return Cut(number, number + 1, 1, True)


def _scalar(item: Any) -> Any:
    """Converts an integer array or tensor without dimensions to an int. Returns any other item unchanged. Bools and
    unsigned bytes are masks, so they stay unchanged too."""
    if getattr(item, "shape", None) == () and not str(getattr(item, "dtype", "")).endswith(("bool", "uint8")):
        try:
            return operator.index(item)
        except TypeError:
            pass
    return item


def _i64(number: Any) -> int:
    value = operator.index(number)
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError(f"{value} does not fit 64 bits")
    return int(value)


def _shown(item: Any, cut: Cut) -> str:
    if cut.single:
        return str(cut.start)
    start, stop = ("" if bound is None else str(_i64(bound)) for bound in (item.start, item.stop))
    return f"{start}:{stop}" + ("" if cut.step == 1 else f":{cut.step}")
