"""The tensors of a checkpoint, in the form in which engines iterate over them."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterator, Sequence

from .._open import Source, safe_open
from ._lazy import lazy_tensor
from ._options import Options

_LAZY_MIN = 1 << 20
"""Tensors with at least this length in bytes are read when they are used. Shorter tensors are read before, in
groups."""

_SHORT_MAX = 64 << 20
"""A group of short tensors, which are read together, ends when it has this length in bytes."""

Wanted = Callable[[str], bool]


def weights(
    source: Source,
    device: str,
    options: Options,
    *,
    is_model: bool = True,
    wanted: Wanted | None = None,
    process_group: Any = None,
    bar: Callable[[int], Any] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yields pairs of name and tensor of a checkpoint. `wanted` says for the name of a tensor whether it is loaded. In
    a process group all ranks have to iterate, and each rank may want different tensors. `bar` makes a progress bar for
    a number of bytes."""
    how = options.arguments(is_model)
    if options.lazy:
        how.pop("share", None)
        yield from _counted(_lazy(_open_lazily(source, device, how), device, wanted), 0, bar)
        return
    if process_group is None:
        how.pop("share", None)
    with safe_open(source, "pt", device, process_group=process_group, **how) as opened:
        names = _names(opened, wanted)
        total = 0 if bar is None else sum(opened.get_tensor_metadata(name).nbytes for name in names)
        yield from _counted(opened.tensors(names), total, bar)


def weights_by_name(source: Source, options: Options, *, is_model: bool = True) -> dict[str, Any]:
    """All tensors of a checkpoint, on the CPU. With the option `lazy`, they are read when they are used. Without it,
    they are views of mapped files, where that is possible."""
    if options.lazy:
        return dict(_lazy(_open_lazily(source, "cpu", options.arguments(is_model)), "cpu", None))
    with safe_open(source, "pt", "cpu", copy=False, **options.arguments(is_model)) as opened:
        return opened.get_tensors()


def _names(opened: safe_open, wanted: Wanted | None) -> list[str]:
    return [name for name in opened.offset_keys() if wanted is None or wanted(name)]


def _open_lazily(source: Source, device: str, how: dict[str, Any]) -> safe_open:
    """An open checkpoint for tensors that are read later. It stays open as long as these tensors exist."""
    opened = safe_open(source, "pt", device, **how)
    # Ends loading ahead, which would load parts that only other ranks use.
    opened._reader().close()
    return opened


def _lazy(opened: safe_open, device: str, wanted: Wanted | None) -> Iterator[tuple[str, Any]]:
    names = _names(opened, wanted)
    found = {name: _if_long(opened, name, device) for name in names}
    together = _together(opened, [name for name in names if found[name] is None])
    for name in names:
        if found[name] is None:
            found.update(opened.get_tensors(next(together)))
        yield name, found.pop(name)


def _together(opened: safe_open, names: list[str]) -> Iterator[list[str]]:
    """Groups of tensors that are read together, in the same order."""
    group, length = [], 0
    for name in names:
        group.append(name)
        length += opened.get_tensor_metadata(name).nbytes
        if length >= _SHORT_MAX:
            yield group
            group, length = [], 0
    if group:
        yield group


def _if_long(opened: safe_open, name: str, device: str) -> Any:
    """A tensor that is read when it is used. None if it is short, or if torch has no such elements."""
    facts = opened.get_tensor_metadata(name)
    return lazy_tensor(opened, name, facts, device) if facts.nbytes >= _LAZY_MIN else None


def _counted(pairs: Iterator[tuple[str, Any]], total: int, bar: Callable[[int], Any] | None) -> Iterator[tuple[str, Any]]:
    if bar is None or not total:
        yield from pairs
        return
    with bar(total) as shown:
        for name, tensor in pairs:
            shown.update(tensor.nbytes)
            yield name, tensor


def device_of(word: str | None = None) -> str:
    """The device that tensors are loaded to: the current NVIDIA GPU of torch. It is the CPU if `word` is "cpu", or if
    there is no NVIDIA GPU."""
    import torch

    if word == "cpu" or torch.version.hip is not None or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def group_of(coordinator: Any) -> Any:
    """The group of torch by which the ranks of an engine's group coordinator exchange messages. None for a single
    rank."""
    from torch.distributed import ProcessGroup

    if coordinator is None or coordinator.world_size < 2:
        return None
    group = coordinator.cpu_group
    # A group whose members can change while it runs has another class, and is not used.
    return group if isinstance(group, ProcessGroup) else None


def sorted_files(files: Sequence[str]) -> list[str]:
    """Sorts files in an order that is the same on all ranks."""
    return sorted(files, key=lambda file: (os.path.basename(file), file))
