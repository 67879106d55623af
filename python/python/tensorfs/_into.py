"""Loads checkpoints into the memory of existing tensors, arrays and buffers."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any, Callable, Hashable, Iterator, Mapping, NamedTuple

from . import _frameworks, _settings
from ._dtensor import Box
from ._errors import MismatchError, SafetensorError, error
from ._open import Source, StrPath, choice_words, open_checkpoint, proof_arguments, secret_of
from ._reader import Info, Part
from ._share import Place, Team, want_of
from ._targets import Target, count_write, target_of
from ._tensorfs import Checkpoint, Loader, can_cast, unwritable

_COMPARED_MAX = 64 << 20
"""The most bytes that are read of each tensor at a time, when two tensors are compared."""


class Loaded(NamedTuple):
    """Names that only the mapping or only the checkpoint has. The fields have the names that torch uses."""

    missing_keys: list[str]
    """Names that only the mapping has. Their memory is unchanged."""
    unexpected_keys: list[str]
    """Names that only the checkpoint has."""


class _TensorRequest(NamedTuple):
    """A part of a tensor, and the memory to load it into."""

    info: Info
    part: Part
    cast: str | None
    address: int
    nbytes: int
    owner: Any

    def native(self, address: int) -> tuple[int, Part, str | None, int]:
        return self.info.position, self.part, self.cast, address


def load_into(
    mapping: Mapping[str, Any],
    filename: Source,
    *,
    strict: bool = True,
    cast: bool = False,
    zero: str | None = None,
    state: str | None = None,
    key: str | bytes | None = None,
    passphrase: str | bytes | None = None,
    key_file: StrPath | None = None,
    passphrase_file: StrPath | None = None,
    expect_shards: int | None = None,
    reference: StrPath | None = None,
    unproven_tail: str | None = None,
    cache_dir: StrPath | None = None,
    cache_dir_size: int | str | None = None,
    process_group: Any = None,
    share: str | None = None,
    **how: Any,
) -> Loaded:
    """Loads each tensor of a checkpoint into the object that `mapping` has under the same name: a torch tensor on the
    CPU or on a GPU, a numpy array, another object that supports DLPack, or a writable buffer. The objects have to be
    contiguous and of the right shape. For a DTensor, only the part that its local shard holds is read.

    With `strict`, the mapping and the checkpoint must have the same names. Otherwise the names that both of them have
    are loaded. With `cast`, floating point elements are cast to the dtype of the object, if it is F32, F16 or BF16. Any
    other difference between dtypes is an error. Nothing is written unless all tensors fit. `zero`, `state`, `key`,
    `passphrase`, `key_file`, `passphrase_file`, `expect_shards`, `reference`, `unproven_tail`, `cache_dir` and
    `cache_dir_size` mean the same as in `safe_open`. `how` are arguments of `safe_open` about reading and about remote
    sources.

    Several names may share the same memory, as tied weights do. The checkpoint needs to have only one of these names.
    If it has several of them, their bytes must be equal.

    With a `process_group`, all its ranks call this function, each with its own mapping, and each byte is read once: see
    `safe_open`.

    After a failure, or after Ctrl-C, the memory holds a mixture of old and new bytes. If the failure was that a disk
    did not answer in time, the disk may still write to the memory later: do not use that memory again.
    """
    if not hasattr(mapping, "items"):
        hint = ", such as its state_dict()" if hasattr(mapping, "state_dict") else ""
        raise TypeError(f"expected a mapping from names to memory{hint}, not {type(mapping).__name__}")
    choices = choice_words(zero, state)
    secret = secret_of(key, passphrase, key_file, passphrase_file)
    remote = {word: how.pop(word) for word in _settings.REMOTE_WORDS if word in how}
    proof = proof_arguments(expect_shards, reference, unproven_tail, cache_dir, cache_dir_size, **remote)

    def job() -> _Job:
        loader = _settings.loader(**how)
        return _job(mapping, filename, open_checkpoint(filename, loader, choices, secret, proof), loader, strict, cast)

    if process_group is None:
        return _carried_out(job(), how)
    with Team(process_group, share, how) as team:
        return _carried_out_in_group(team, job)


class _Job(NamedTuple):
    """A load whose tensors all fit."""

    checkpoint: Checkpoint
    by_gpu: dict[int | None, list[_TensorRequest]]
    """The requests by the number of their GPU. None is the CPU."""
    written: list[Any]
    """The owners of all memory that is written."""
    result: Loaded


def _job(
    mapping: Mapping[str, Any], filename: Source, checkpoint: Checkpoint, loader: Loader, strict: bool, cast: bool
) -> _Job:
    """Checks that all tensors fit, before anything is written. Raises an error if one does not."""
    every = {facts[0]: Info(*facts) for facts in checkpoint.tensors()}
    targets = {name: target_of(into, name) for name, into in mapping.items() if name in every}
    absent = [name for name in mapping if name not in every]
    aliases = _aliases(absent, mapping, targets)
    missing = [name for name in absent if name not in aliases]
    result = Loaded(missing, [name for name in every if name not in mapping])
    if strict and (result.missing_keys or result.unexpected_keys):
        raise _differing_names(filename, result)
    requests = {name: _requests(every[name], target, cast) for name, target in targets.items()}
    _check_writable(targets)
    _check_shared(targets, requests, checkpoint, loader)
    by_device: dict[int | None, dict[int, list[_TensorRequest]]] = {}
    for name, target in targets.items():
        if target.nbytes:
            # Only one of several names that share memory is loaded.
            by_device.setdefault(target.gpu, {})[target.address] = requests[name]
    by_gpu = {gpu: [request for several in found.values() for request in several] for gpu, found in by_device.items()}
    return _Job(checkpoint, by_gpu, [target.owner for target in (*targets.values(), *aliases.values())], result)


def _carried_out(job: _Job, how: dict[str, Any]) -> Loaded:
    planned = []
    for gpu, mine in job.by_gpu.items():
        to = _settings.loader(**how, gpu=gpu)
        plan = to.plan(job.checkpoint, [request.native(request.address) for request in mine])
        planned.append((gpu, to, mine, plan))
    with _counted(job.written):
        for gpu, to, mine, plan in planned:
            memory = [(request.address, request.nbytes, request.owner) for request in mine]
            to.fill(job.checkpoint, plan, memory, None, None if gpu is None else _frameworks.find("pt", gpu).stream())
    return job.result


def _carried_out_in_group(team: Team, make: Callable[[], _Job]) -> Loaded:
    """Carries out the loads of all ranks of a process group together."""
    with team.group.operation() as operation:
        job = make()
        team.group.agree(operation, job.checkpoint)
        places = [
            Place(want_of(one.info, one.part, one.cast, one.nbytes), one.address, one.nbytes, one.owner, gpu)
            for gpu, several in job.by_gpu.items()
            for one in several
        ]
        with _counted(job.written):
            team.fill(operation, job.checkpoint, places)
    return job.result


@contextlib.contextmanager
def _counted(written: list[Any]) -> Iterator[None]:
    # Counts a write before the load, because an interrupted load may not reach the count after the load. Counts another
    # write after the load, for values that a backward pass saved in the meantime.
    count_write(written)
    try:
        yield
    finally:
        count_write(written)


def _differing_names(filename: Source, names: Loaded) -> SafetensorError:
    def shown(what: str, found: list[str]) -> str:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return f"; {what}: {', '.join(found[:4])}{more}" if found else ""

    missing = shown("not in the checkpoint", names.missing_keys)
    unexpected = shown("only in the checkpoint", names.unexpected_keys)
    return error(f"{filename}: the names differ{missing}{unexpected}", cls=MismatchError, path=str(filename))


def _aliases(absent: list[str], mapping: Mapping[str, Any], targets: dict[str, Target]) -> dict[str, Target]:
    """Those names in `absent` whose memory is filled by the load of another name, each with its target."""
    filled: dict[Hashable, list[Target]] = {}
    for target in targets.values():
        filled.setdefault(target.identity, []).append(target)

    aliases = {}
    for name in absent:
        try:
            target = target_of(mapping[name], name)
        except Exception:
            # Objects without usable memory are not written to.
            continue
        if any(map(target.is_alias_of, filled.get(target.identity, []))):
            aliases[name] = target
    return aliases


def _requests(info: Info, target: Target, cast: bool) -> list[_TensorRequest]:
    """The requests that fill a target, in the order of its memory."""
    becomes = _cast(info, target, cast)
    if not target.nbytes:
        return []
    if target.boxes is None:
        return [_TensorRequest(info, None, becomes, target.address, target.nbytes, target.owner)]
    requests, address = [], target.address
    # A box takes the same fraction of the bytes as of the elements.
    elements = sum(map(_elements, target.boxes))
    for box in target.boxes:
        nbytes = target.nbytes * _elements(box) // elements
        part = [*box[:-1], (box[-1][0] * 2, box[-1][1] * 2)] if _is_packed(target) and box else box
        requests.append(_TensorRequest(info, part, becomes, address, nbytes, target.owner))
        address += nbytes
    return requests


def _cast(info: Info, target: Target, cast: bool) -> str | None:
    """The dtype to which the elements are cast. None if they are not cast. Refuses a tensor that does not fit into the
    target."""

    def refused(expected: object, found: object, what: str, hint: str = "") -> SafetensorError:
        message = f"tensor `{info.name}`: the checkpoint has {what} {expected}, the target {found}{hint}"
        return error(message, cls=MismatchError, tensor=info.name)

    if target.shape is not None and _unpacked(target) != info.shape:
        raise refused(info.shape, target.shape, "shape")
    if target.dtype is None or target.dtype == info.dtype:
        if target.boxes is None and target.nbytes != info.nbytes:
            raise refused(info.nbytes, target.nbytes, "length in bytes")
        return None
    if not can_cast(info.dtype, target.dtype):
        raise refused(info.dtype, target.dtype, "dtype", "; there is no cast between them")
    if not cast:
        raise refused(info.dtype, target.dtype, "dtype", "; cast=True casts its elements")
    return target.dtype


def _is_packed(target: Target) -> bool:
    """Whether the target has the dtype in which torch stores two elements in one."""
    return target.dtype == _frameworks.PACKED


def _unpacked(target: Target) -> list[int] | None:
    """The shape of the target, counted in elements of the checkpoint."""
    shape = target.shape
    return [*shape[:-1], shape[-1] * 2] if _is_packed(target) and shape else shape


def _check_writable(targets: dict[str, Target]) -> None:
    """Refuses read-only memory, such as a file that is mapped for reading: a write to it would end the process."""
    names = [name for name, target in targets.items() if target.nbytes and target.gpu is None]
    refused = unwritable([(targets[name].address, targets[name].nbytes) for name in names])
    if refused is not None:
        name = names[refused]
        message = f"tensor `{name}`: the target lies in memory that must not be written to"
        raise error(message, cls=MismatchError, tensor=name)


def _check_shared(
    targets: dict[str, Target], requests: dict[str, list[_TensorRequest]], checkpoint: Checkpoint, loader: Loader
) -> None:
    """Refuses memory that two names share, unless both cover exactly the same memory and the checkpoint has equal bytes
    for them."""

    def place(name: str) -> tuple[int, int, int]:
        target = targets[name]
        return -1 if target.gpu is None else target.gpu, target.address, target.nbytes

    names = sorted((name for name, target in targets.items() if target.nbytes), key=place)
    for name, other in zip(names, names[1:]):
        (gpu, start, length), (other_gpu, other_start, _) = place(name), place(other)
        if gpu != other_gpu or start + length <= other_start:
            continue
        shared = f"tensors `{name}` and `{other}`: their targets share memory"
        if place(name) != place(other):
            raise error(f"{shared}, but are not the same", cls=MismatchError, tensor=other)
        if not _same_bytes(requests[name], requests[other], checkpoint, loader):
            raise error(f"{shared}, but the checkpoint has different bytes for them", cls=MismatchError, tensor=other)


def _same_bytes(one: list[_TensorRequest], other: list[_TensorRequest], checkpoint: Checkpoint, loader: Loader) -> bool:
    """Whether the tensors of both requests have the same length and the same bytes. Reads these bytes."""
    pairs: Iterator[tuple[list[_TensorRequest], list[_TensorRequest]]] = iter([(one, other)])
    if [_extent(request) for request in one] == [_extent(request) for request in other]:
        slabs = [_slabs(request) for request in one], [_slabs(request) for request in other]
        pairs = (([mine], [yours]) for pair in zip(*slabs) for mine, yours in zip(*pair))
    return all(_read(mine, checkpoint, loader) == _read(yours, checkpoint, loader) for mine, yours in pairs)


def _read(requests: list[_TensorRequest], checkpoint: Checkpoint, loader: Loader) -> bytearray:
    """Reads the parts, one after the other, into new memory."""
    into = bytearray(sum(request.nbytes for request in requests))
    target = target_of(into, "")
    ends = itertools.accumulate((request.nbytes for request in requests), initial=target.address)
    memory = [(address, request.nbytes, target.owner) for address, request in zip(ends, requests)]
    plan = loader.plan(checkpoint, [request.native(address) for request, (address, *_) in zip(requests, memory)])
    loader.fill(checkpoint, plan, memory)
    return into


def _slabs(request: _TensorRequest) -> Iterator[_TensorRequest]:
    """Splits a part into consecutive pieces of at most `_COMPARED_MAX` bytes."""
    box = _box(request)
    bits = request.nbytes * 8 // _elements(box)
    # If an element is not a whole number of bytes, a row may end within a byte.
    dim = next((dim for dim, (start, stop) in enumerate(box) if stop - start > 1), None)
    if request.nbytes <= _COMPARED_MAX or bits % 8 or dim is None:
        yield request
        return
    start, stop = box[dim]
    row = request.nbytes // (stop - start)
    step = max(_COMPARED_MAX // row, 1)
    for first in range(start, stop, step):
        end = min(first + step, stop)
        part = [*box[:dim], (first, end), *box[dim + 1 :]]
        yield from _slabs(request._replace(part=part, nbytes=row * (end - first)))


def _box(request: _TensorRequest) -> Box:
    return [(0, size) for size in request.info.shape] if request.part is None else request.part


def _extent(request: _TensorRequest) -> tuple[int, list[int]]:
    return request.nbytes, [stop - start for start, stop in _box(request)]


def _elements(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)
