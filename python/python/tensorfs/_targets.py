"""Finds the memory of torch tensors, numpy arrays and other objects, to load into it."""

from __future__ import annotations

import sys
from typing import Any, Callable, Hashable, Iterable, NamedTuple

from . import _dtensor, _frameworks
from ._dtensor import Box
from ._errors import MismatchError, SafetensorError, error
from ._tensorfs import memory_of


class Target(NamedTuple):
    """Memory to load into: for a whole tensor, or for the part of a tensor that this process has."""

    address: int
    nbytes: int
    dtype: str | None
    """None for a plain buffer, which takes the bytes of any dtype."""
    shape: list[int] | None
    """The shape of the whole tensor, in elements of its framework. None for a plain buffer."""
    owner: Any
    """The object that keeps the memory alive."""
    gpu: int | None = None
    """Number of the GPU that has the memory. None for the CPU."""
    boxes: list[Box] | None = None
    """The parts of the tensor that the memory holds, one after the other. None if it holds the whole tensor."""
    identity: Hashable = None
    """A value that is equal for two targets with the same memory, even if the memory has no bytes. None if it is not
    known whether memory is the same."""

    def is_alias_of(self, other: Target) -> bool:
        """Whether a load into the other target also fills this target with the right bytes."""
        if self.identity is None or self.identity != other.identity or self.dtype not in (None, other.dtype):
            return False
        # A whole tensor has the same bytes in any shape. The bytes of a shard depend on its position in the tensor.
        same = (self.shape, self.boxes) == (other.shape, other.boxes)
        return same or (self.boxes is None and other.boxes is None)


Refused = Callable[[str], SafetensorError]


def target_of(into: Any, name: str) -> Target:
    """The memory of an object.

    Raises `MismatchError` if the object has no memory, or memory that cannot be loaded into.
    """

    def refused(why: str) -> SafetensorError:
        return error(f"tensor `{name}`: the target {why}", cls=MismatchError, tensor=name)

    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(into, torch.Tensor):
        return _of_torch(torch, into, refused)
    if numpy is not None and isinstance(into, numpy.ndarray):
        return _of_array(numpy, into, refused)
    if hasattr(into, "__dlpack__"):
        try:
            address, nbytes, dtype, shape, owner = memory_of(into)
        except (BufferError, TypeError) as e:
            raise refused(str(e)) from None
        except Exception as e:
            # The code of another library, which may raise any exception, makes the DLPack capsule.
            raise refused(f"does not give its memory by DLPack: {type(e).__name__}: {e}") from None
        identity = (None, address, nbytes) if nbytes else None
        return Target(address, nbytes, dtype, list(shape), owner, identity=identity)
    return _of_buffer(into, refused)


def count_write(owners: Iterable[Any]) -> None:
    """Makes torch count a write to each tensor among the owners of targets. torch then refuses a backward pass that
    needs the old values of such a tensor."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    increment = getattr(torch.autograd.graph, "increment_version", None)
    with torch._C.DisableTorchFunctionSubclass():
        for owner in owners:
            # A DTensor has its own counter of writes, beside the counter of its local shard.
            for tensor in owner if isinstance(owner, tuple) else (owner,):
                if not isinstance(tensor, torch.Tensor) or torch.Tensor.is_inference(tensor):
                    continue
                if increment is not None:
                    increment(tensor)
                elif not _dtensor.is_dtensor(tensor):
                    # Older versions of torch lack `increment_version`. There, a write of no bytes to a view counts,
                    # because views share the counter.
                    torch.Tensor.detach(tensor).view(-1)[:0].view(torch.uint8).zero_()


def _of_array(numpy: Any, into: Any, refused: Refused) -> Target:
    own = _without_overrides(numpy.ndarray, into)
    if not own("flags").c_contiguous or not own("flags").writeable:
        raise refused("is not contiguous, or must not be written to")
    dtype = _frameworks.find("np").dtype_name(own("dtype"))
    if dtype is None:
        raise refused(f"has {own('dtype')}, which no checkpoint has")
    address, nbytes = own("__array_interface__")["data"][0], own("nbytes")
    identity = (None, address, nbytes) if nbytes else None
    return Target(address, nbytes, dtype, list(own("shape")), into, identity=identity)


def _of_torch(torch: Any, into: Any, refused: Refused) -> Target:
    if not _dtensor.is_dtensor(into):
        return _of_plain(torch, into, refused)
    with torch.no_grad():
        local = into.to_local()
    found = _of_plain(torch, local, refused)
    try:
        boxes = _dtensor.local_boxes(into, found.shape)
    except _dtensor.Unknown as e:
        raise refused(str(e)) from None
    shape = list(into.shape)
    is_whole = boxes == [[(0, size) for size in shape]] or 0 in shape
    # Both the DTensor and its local shard are owners: it may be that only the local shard keeps the memory alive, and
    # only the DTensor keeps the local shard alive.
    return found._replace(shape=shape, boxes=None if is_whole else boxes, owner=(into, local))


def _of_plain(torch: Any, into: Any, refused: Refused) -> Target:
    """The target for a plain tensor, whose elements lie in its own memory."""
    # A Python subclass may override every attribute, so the attributes of `torch.Tensor` are used.
    own = _without_overrides(torch.Tensor, into)
    with torch._C.DisableTorchFunctionSubclass():
        _refuse_other_kinds(torch, into, refused)
        device, layout, shape = own("device"), own("layout"), list(own("shape"))
        gpu = device.index if device.type == "cuda" else None
        if (device.type != "cpu" and gpu is None) or layout is not torch.strided:
            raise refused(f"is on {device} with layout {layout}; it has to be dense, on the CPU or a GPU")
        dtype = _frameworks.find("pt").dtype_name(own("dtype"))
        if dtype is None:
            raise refused(f"has {own('dtype')}, which no checkpoint has")
        try:
            is_plain = own("is_contiguous")() and not own("is_conj")() and not own("is_neg")()
            address, nbytes, storage = own("data_ptr")(), own("nbytes"), own("untyped_storage")()
            end = own("storage_offset")() * own("element_size")() + nbytes
            has = storage.nbytes()
        except (RuntimeError, NotImplementedError):
            # For example, the arguments of a function within torch.func have no memory.
            raise refused("has no memory of its own") from None
        if not is_plain:
            raise refused("is not contiguous")
        if nbytes and (address == 0 or has < end):
            raise refused(f"has {has if address else 0} bytes of memory, and needs {end}; allocate it first")
        # Tensors without elements have no address, so their storage identifies them.
        identity = (gpu, address, nbytes) if nbytes else (storage._cdata, end)
        return Target(address, nbytes, dtype, shape, into, gpu, identity=identity)


def _without_overrides(cls: type, into: Any) -> Callable[[str], Any]:
    """Attributes and methods of an object as `cls` defines them, without the overrides of a subclass."""

    def own(name: str) -> Any:
        return getattr(cls, name).__get__(into)

    return own


def _refuse_other_kinds(torch: Any, into: Any, refused: Refused) -> None:
    """Refuses tensors whose elements do not lie in the memory of the tensor itself."""
    kind = type(into)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise refused(f"is a {kind.__module__}.{kind.__qualname__}, of which it is not known where its elements lie")
    if torch.nn.parameter.is_lazy(into):
        raise refused("is a parameter that is not initialized yet")
    own = _without_overrides(torch.Tensor, into)
    if own("is_meta"):
        raise refused("is on meta, which has no memory; allocate it first, as to_empty() does")
    if own("is_nested") or own("is_quantized"):
        raise refused("is nested or quantized; it has to be dense")


def _of_buffer(into: Any, refused: Refused) -> Target:
    import ctypes

    try:
        view = memoryview(into)
    except TypeError:
        raise refused(f"is a {type(into).__name__}, which has no memory to load into") from None
    if view.readonly or not view.c_contiguous:
        raise refused("is not contiguous, or must not be written to")
    # `held` keeps the buffer exported, so that it cannot be resized during the load.
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    address = ctypes.addressof(held)
    identity = (None, address, view.nbytes) if view.nbytes else None
    return Target(address, view.nbytes, None, None, held, identity=identity)
