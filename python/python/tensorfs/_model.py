"""`load_model`: loads a checkpoint into a torch model, whose parameters may share memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._errors import MismatchError, error


class _Span(NamedTuple):
    """A range of memory."""

    device: str
    start: int
    end: int
    is_dense: bool
    """Whether the tensor covers all bytes of the range."""

    @property
    def length(self) -> int:
        return self.end - self.start

    def covers(self, other: _Span) -> bool:
        return self.device == other.device and self.is_dense and self.start <= other.start and other.end <= self.end


def load_into_model(model: Any, tensors: dict[str, Any], strict: bool) -> tuple[set[str], list[str]]:
    """Does the same as `load_model` of safetensors, with tensors that are loaded already."""
    state = model.state_dict()
    spans = {name: span for name, tensor in state.items() if (span := _span(tensor)) is not None}
    _refuse_conflicts(state, spans, tensors)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    filled: dict[str, list[_Span]] = {}
    for name in tensors.keys() & spans.keys():
        filled.setdefault(spans[name].device, []).append(spans[name])
    lacking = set()
    # Only one of several missing names that share memory is returned: the name with the longest memory, which would
    # fill the others.
    for name in sorted(missing, key=lambda name: (name in spans and -spans[name].length, name)):
        span = spans.get(name)
        if span is None:
            lacking.add(name)
        elif not any(other.covers(span) for other in filled.get(span.device, ())):
            lacking.add(name)
            filled.setdefault(span.device, []).append(span)
    if strict and (lacking or unexpected):
        message = f"Error(s) in loading state_dict for {type(model).__name__}:"
        for what, names in (("Missing", lacking), ("Unexpected", unexpected)):
            if names:
                shown = ", ".join(f'"{name}"' for name in sorted(names))
                message += f"\n    {what} key(s) in state_dict: {shown}"
        raise RuntimeError(message)
    return lacking, list(unexpected)


def _refuse_conflicts(state: dict[str, Any], spans: dict[str, _Span], tensors: dict[str, Any]) -> None:
    """Refuses tensors if one would overwrite another with different bytes. Runs before any write."""
    # `load_state_dict` refuses a tensor of another shape.
    names = [name for name in tensors if name in spans and tensors[name].shape == state[name].shape]
    for group in _overlapping(names, spans):
        lost = _overwritten(state, spans, tensors, group)
        if lost is None:
            continue
        pairs = ([lost, other] for other in group[group.index(lost) + 1 :])
        other = next(pair[1] for pair in pairs if _overwritten(state, spans, tensors, pair) is not None)
        shared = f"tensors `{lost}` and `{other}` share memory in the model"
        raise error(f"{shared}, but the checkpoint has different bytes for it", cls=MismatchError, tensor=other)


def _overlapping(names: list[str], spans: dict[str, _Span]) -> list[list[str]]:
    """Groups of names whose memory overlaps, each in the order of `names`."""
    place = {name: position for position, name in enumerate(names)}
    groups: list[list[str]] = []
    device, end = "", 0
    for name in sorted(names, key=lambda name: spans[name]):
        span = spans[name]
        if groups and span.device == device and span.start < end:
            groups[-1].append(name)
            end = max(end, span.end)
        else:
            groups.append([name])
            device, end = span.device, span.end
    return [sorted(group, key=place.__getitem__) for group in groups if len(group) > 1]


def _overwritten(
    state: dict[str, Any], spans: dict[str, _Span], tensors: dict[str, Any], names: list[str]
) -> str | None:
    """The first name whose bytes would be overwritten if all tensors were written in this order. None if there is no
    such name. Tries the writes on scratch memory of the same length."""
    import torch

    first = state[names[0]]
    if all(_layout(state[name], spans[name]) == _layout(first, spans[names[0]]) for name in names):
        # Here all names have the same layout, as tied weights do, so their bytes are compared without scratch memory.
        right = _raw(tensors[names[-1]].to(first.dtype))
        different = (name for name in names if not torch.equal(_raw(tensors[name].to(first.dtype)), right))
        return next(different, None)
    # A multiple of 16 bytes, which is aligned for elements of any width.
    base = min(spans[name].start for name in names) // 16 * 16
    length = max(spans[name].end for name in names) - base
    memory = torch.empty(length, dtype=torch.uint8, device=tensors[names[0]].device)
    views = {}
    for name in names:
        target = state[name]
        start = (spans[name].start - base) // target.element_size()
        view = torch.empty(0, dtype=target.dtype, device=memory.device)
        view.set_(memory.untyped_storage(), start, target.shape, target.stride())
        view = view.conj() if target.is_conj() else view
        view = torch._neg_view(view) if target.is_neg() else view
        try:
            view.copy_(tensors[name])
        except RuntimeError:
            # `load_state_dict` refuses a tensor in which several elements share the same memory.
            continue
        views[name] = view
    pairs = ((name, view, tensors[name].to(view.dtype)) for name, view in views.items())
    return next((name for name, view, right in pairs if not torch.equal(_raw(view), _raw(right))), None)


def _layout(tensor: Any, span: _Span) -> tuple[Any, ...]:
    return span, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def _raw(tensor: Any) -> Any:
    """The bytes of a tensor, for comparisons: a NaN is not equal to itself, but its bytes are."""
    import torch

    return tensor.resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _span(tensor: Any) -> _Span | None:
    """The memory range of a tensor. None if it has no memory."""
    if not hasattr(tensor, "untyped_storage"):
        # The extra state of a module may be any object.
        return None
    try:
        storage, width = tensor.untyped_storage(), tensor.element_size()
        if not tensor.numel() or not storage.data_ptr():
            return None
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        start = storage.data_ptr() + tensor.storage_offset() * width
    except (RuntimeError, NotImplementedError):
        return None
    return _Span(str(tensor.device), start, start + (last + 1) * width, last + 1 == tensor.numel())
