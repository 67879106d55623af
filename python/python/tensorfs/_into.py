"""Loading into memory that is there already: of tensors, arrays, buffers."""

from __future__ import annotations

import sys
from typing import Any, Mapping, NamedTuple

from . import _frameworks, _settings
from ._errors import MismatchError, SafetensorError, error
from ._open import Source, open_checkpoint
from ._reader import Info
from ._tensorfs import memory_of


class Loaded(NamedTuple):
    """Names that did not meet: torch has the same two fields."""

    missing_keys: list[str]
    """In the mapping, not in the checkpoint: left as they were."""
    unexpected_keys: list[str]
    """In the checkpoint, not in the mapping."""


class Target(NamedTuple):
    """Memory that waits for a tensor."""

    address: int
    nbytes: int
    dtype: str | None
    """None where it is bytes of anything."""
    shape: list[int] | None
    owner: Any
    """What keeps it."""
    gpu: int | None = None
    """Where it is; None for the CPU."""


def load_into(
    mapping: Mapping[str, Any], filename: Source, *, strict: bool = True, cast: bool = False, **how: Any
) -> Loaded:
    """Loads a checkpoint into what `mapping` has by the same names: tensors of torch on the CPU or on GPUs, arrays of
    numpy, other objects that take DLPack, or writable buffers. They have to be contiguous and of the right shape.

    With `strict` the names have to be the same; else those in both are loaded. With `cast` floating point elements
    become the dtype that waits for them; else a differing dtype is an error. Nothing is written unless all of it
    fits. `how` is what `safe_open` takes to say how to read.

    Where it fails in between, as by Ctrl-C, the memory holds old and new bytes. Where a disk did not answer in time, it
    may still write there when it does: the memory is of no use any more.
    """
    loader = _settings.loader(**how)
    checkpoint = open_checkpoint(filename, loader)
    every = {facts[0]: Info(*facts) for facts in checkpoint.tensors()}
    result = Loaded([name for name in mapping if name not in every], [name for name in every if name not in mapping])
    if strict and (result.missing_keys or result.unexpected_keys):
        raise _differing_names(filename, result)
    by_device: dict[int | None, list[tuple[Any, Target]]] = {}
    for name, into in mapping.items():
        info = every.get(name)
        if info is None:
            continue
        target = target_of(into, name)
        wanted = _cast(info, target, cast)
        if target.nbytes:
            wish = (info.position, None, wanted, target.address)
            by_device.setdefault(target.gpu, []).append((wish, target._replace(owner=(into, target.owner))))
    targets = [target for found in by_device.values() for _, target in found]
    _refuse_overlaps(targets, [name for name in mapping if name in every])
    planned = []
    for gpu, found in by_device.items():
        to = _settings.loader(**how, gpu=gpu)
        planned.append((gpu, to, to.plan(checkpoint, [wish for wish, _ in found]), [target for _, target in found]))
    for gpu, to, plan, found_targets in planned:
        memory = [(target.address, target.nbytes, target.owner) for target in found_targets]
        to.fill(checkpoint, plan, memory, None, None if gpu is None else _frameworks.find("pt", gpu).stream())
    return result


def _differing_names(filename: Source, names: Loaded) -> SafetensorError:
    def shown(what: str, found: list[str]) -> str:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return f"; {what}: {', '.join(found[:4])}{more}" if found else ""

    missing = shown("not in the checkpoint", names.missing_keys)
    unexpected = shown("only in the checkpoint", names.unexpected_keys)
    return error(f"{filename}: the names differ{missing}{unexpected}", cls=MismatchError, path=str(filename))


def _cast(info: Info, target: Target, cast: bool) -> str | None:
    """The dtype that the elements are to become, if they fit into the target at all."""

    def refused(expected: object, found: object, what: str, hint: str = "") -> SafetensorError:
        message = f"tensor `{info.name}`: the checkpoint has {what} {expected}, what waits for it {found}{hint}"
        return error(message, cls=MismatchError, tensor=info.name)

    if target.shape is not None and _unpacked(target) != info.shape:
        raise refused(info.shape, target.shape, "shape")
    if target.dtype is None or target.dtype == info.dtype:
        if target.nbytes != info.nbytes:
            raise refused(info.nbytes, target.nbytes, "length in bytes")
        return None
    if not cast:
        raise refused(info.dtype, target.dtype, "dtype", "; cast=True casts floating point elements")
    return target.dtype


def _unpacked(target: Target) -> list[int] | None:
    """Its shape in elements: torch has two of F4 in one."""
    shape = target.shape
    if target.dtype == "F4" and shape:
        return [*shape[:-1], shape[-1] * 2]
    return shape


def _refuse_overlaps(targets: list[Target], names: list[str]) -> None:
    spans = sorted((target.address, target.address + target.nbytes) for target in targets)
    for (_, end), (start, _) in zip(spans, spans[1:]):
        if start < end:
            raise error(f"two of {', '.join(names[:4])}... share memory: each tensor needs its own", cls=MismatchError)


def target_of(into: Any, name: str) -> Target:
    """The memory of an object."""

    def refused(why: str) -> SafetensorError:
        return error(f"tensor `{name}`: what waits for it {why}", cls=MismatchError, tensor=name)

    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(into, torch.Tensor):
        gpu = into.device.index if into.device.type == "cuda" else None
        if (into.device.type != "cpu" and gpu is None) or into.layout is not torch.strided:
            raise refused(f"is on {into.device} with layout {into.layout}; it has to be dense, on the CPU or a GPU")
        if not into.is_contiguous() or into.is_conj() or into.is_neg():
            raise refused("is not contiguous")
        dtype = _frameworks.find("pt").dtype_name(into.dtype)
        if dtype is None:
            raise refused(f"has {into.dtype}, which no checkpoint has")
        return Target(into.data_ptr(), into.nbytes, dtype, list(into.shape), into, gpu)
    if numpy is not None and isinstance(into, numpy.ndarray):
        if not into.flags.c_contiguous or not into.flags.writeable:
            raise refused("is not contiguous, or must not be written to")
        dtype = _frameworks.find("np").dtype_name(into.dtype)
        if dtype is None:
            raise refused(f"has {into.dtype}, which no checkpoint has")
        return Target(into.__array_interface__["data"][0], into.nbytes, dtype, list(into.shape), into)
    if hasattr(into, "__dlpack__"):
        try:
            address, nbytes, dtype, shape, owner = memory_of(into)
        except (BufferError, TypeError) as e:
            raise refused(str(e)) from None
        return Target(address, nbytes, dtype, list(shape), owner)
    return _buffer(into, refused)


def _buffer(into: Any, refused: Any) -> Target:
    import ctypes

    try:
        view = memoryview(into)
    except TypeError:
        raise refused(f"is a {type(into).__name__}, which has no memory to load into") from None
    if view.readonly or not view.c_contiguous:
        raise refused("is not contiguous, or must not be written to")
    # Holds the buffer, so that it is not resized meanwhile.
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return Target(ctypes.addressof(held), view.nbytes, None, None, held)
