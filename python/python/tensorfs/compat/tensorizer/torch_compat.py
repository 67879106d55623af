"""`torch.save` and `torch.load` with the tensors in a tensorizer file. This module replaces `tensorizer.torch_compat`.

    with tensorizer_saving():
        torch.save(module, "module.pt")          # and module.pt.tensors

    with tensorizer_loading(device="cuda"):
        module = torch.load("module.pt", weights_only=False)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
import logging
import os
import pickle
import threading
import types
from typing import Any, Callable, Iterator, NamedTuple

import torch

from ..._errors import MismatchError, SafetensorError, error
from .serialization import TensorDeserializer, TensorSerializer

__all__ = ("tensorizer_loading", "tensorizer_saving")

logger = logging.getLogger(__name__)

_FileLike = Any
"""The first argument of `torch.load`: a path or a file object."""

_MARK, _VERSION, _STORAGE = "TensorizerPickler", 0, "storage"
"""The first three items of the persistent id of a storage. The number of the storage and its torch dtype follow."""


class _Block(NamedTuple):
    """A `with` block that was entered."""

    file_obj: Any
    replaces: Any
    """The function of the caller that saves or loads the tensors. None if this module does that."""
    arguments: dict[str, Any]
    suppress_weights_only: bool


class _Call(NamedTuple):
    """A call of `torch.save` or `torch.load` within a block."""

    block: _Block
    file_obj: Any

    @property
    def takes_all(self) -> bool:
        """Whether the file of torch has to refer to every tensor of the tensorizer file."""
        return self.block.replaces is None and self.block.arguments.get("filter_func") is None

    def refused(self, tensor: object, why: str) -> SafetensorError:
        """The error about a tensor of the tensorizer file."""
        file = getattr(self.file_obj, "name", self.file_obj)
        name = os.fsdecode(file) if isinstance(file, (str, bytes, os.PathLike)) else f"<{type(self.file_obj).__name__}>"
        message = f"{name}: tensor `{tensor}` {why}; the two files are not of one save"
        return error(message, "size_mismatch", cls=MismatchError, path=name, tensor=str(tensor))


_saving: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("tensorfs.saving", default=None)
_loading: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("tensorfs.loading", default=None)
_call: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("tensorfs.call", default=None)


class _Pickler(pickle.Pickler):
    """Pickles the number of each storage in place of its bytes, and collects the storages for the tensorizer file."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._call = _call.get()
        self._tensors: list[Any] = []
        self._numbers: dict[tuple[int, int, Any], int] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # torch defines `persistent_id` in a subclass. It is renamed, so that the method of this class is called first.
        if "persistent_id" in cls.__dict__:
            cls._other_id = cls.__dict__["persistent_id"]  # type: ignore[method-assign]
            del cls.persistent_id

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("_other_id" if name == "persistent_id" else name, value)

    def _other_id(self, obj: Any) -> Any:
        return None

    def persistent_id(self, obj: Any) -> Any:
        if self._call is None or not torch.is_storage(obj):
            return self._other_id(obj)
        untyped = getattr(obj, "_untyped_storage", obj)
        if untyped.device.type == "meta" or not untyped.data_ptr():
            return self._other_id(obj)
        key = untyped.data_ptr(), untyped.nbytes(), untyped.device
        number = self._numbers.setdefault(key, len(self._tensors))
        if number == len(self._tensors):
            made = torch.empty(0, dtype=torch.uint8, device=untyped.device)
            self._tensors.append(made.set_(untyped))
        return _MARK, _VERSION, _STORAGE, number, getattr(obj, "dtype", None)

    def dump(self, obj: Any) -> None:
        super().dump(obj)
        tensors, self._tensors = self._tensors, []
        self._numbers.clear()
        if self._call is None or not tensors:
            return
        block, file_obj = self._call
        if block.replaces is not None:
            block.replaces(file_obj, tensors, block.arguments)
            return
        serializer = TensorSerializer(file_obj, **block.arguments)
        serializer.write_state_dict(tensors)
        serializer.close()


class _Unpickler(pickle.Unpickler):
    """Takes the storages of tensors from the tensorizer file, which is loaded when the first storage is needed."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self._call = _call.get()
        self._tensors: dict[Any, Any] | None = None
        # The storages that were used, by number, each with its length in bytes. `_numbers` has their numbers by the
        # address of the torch object.
        self._taken: dict[int, tuple[Any, int]] = {}
        self._numbers: dict[int, int] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "persistent_load" in cls.__dict__:
            cls._other_load = cls.__dict__["persistent_load"]  # type: ignore[method-assign]
            del cls.persistent_load

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("_other_load" if name == "persistent_load" else name, value)

    def _other_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"a persistent id that nothing knows: {pid!r}")

    def persistent_load(self, pid: Any) -> Any:
        if self._call is None or not (isinstance(pid, tuple) and len(pid) > 2 and pid[0] == _MARK):
            return self._other_load(pid)
        if pid[1] != _VERSION or pid[2] != _STORAGE or len(pid) != 5:
            raise pickle.UnpicklingError(f"{pid!r}: a newer version of tensorizer saved this; save it again")
        number, dtype = pid[3:]
        if self._tensors is None:
            self._tensors = self._load(self._call)
        if not isinstance(number, int) or number not in self._tensors:
            message = f"tensor {number} is not among the {len(self._tensors)} of the tensorizer file; is it another save's?"
            raise pickle.UnpicklingError(message)
        if number not in self._taken:
            storage = self._storage(self._call, number, self._tensors[number])
            self._taken[number] = storage, storage.nbytes()
            self._numbers[storage._cdata] = number
        storage, _ = self._taken[number]
        # torch expects a storage without a dtype to be a storage of bytes.
        return torch.TypedStorage(wrap_storage=storage, dtype=dtype or torch.uint8, _internal=True)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "torch._utils" and name.startswith("_rebuild_tensor"):
            return functools.partial(self._rebuild, found)
        return found

    def _rebuild(self, rebuild: Any, storage: Any, offset: int, size: Any, stride: Any, *others: Any) -> Any:
        """Makes a tensor on a storage. Refuses a tensor that extends past the end of the storage, because torch would
        lengthen the storage by uninitialized memory."""
        number = self._numbers.get(getattr(getattr(storage, "_untyped_storage", storage), "_cdata", 0))
        if number is not None and 0 not in size:
            dtype = next((other for other in others if isinstance(other, torch.dtype)), storage.dtype)
            end = offset + sum((count - 1) * step for count, step in zip(size, stride)) + 1
            self._check_length(number, end * dtype.itemsize)
        return rebuild(storage, offset, size, stride, *others)

    def load(self) -> Any:
        loaded = super().load()
        # Code of the saved objects may have made tensors without `_rebuild`, so the lengths are checked again.
        for number, (storage, _) in self._taken.items():
            self._check_length(number, storage.nbytes())
        if self._call is not None and self._tensors is not None and self._call.takes_all:
            for number in self._tensors.keys() - self._taken.keys():
                count = f"{len(self._taken)} of {len(self._tensors)}"
                raise self._call.refused(number, f"is not in the file of torch, which has {count}")
        return loaded

    def _check_length(self, number: int, wanted: int) -> None:
        found = self._taken[number][1]
        if wanted > found and self._call is not None:
            raise self._call.refused(number, f"has {found} bytes, and the file of torch needs {wanted}")

    @staticmethod
    def _storage(call: _Call, number: int, tensor: Any) -> Any:
        """A storage that has exactly the bytes of a tensor."""
        if not isinstance(tensor, torch.Tensor):
            raise call.refused(number, f"is a {type(tensor).__name__}; expected a tensor")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes and tensor.is_contiguous():
            return storage
        # The function of the caller may return views of longer memory.
        return tensor.clone(memory_format=torch.contiguous_format).untyped_storage()

    @staticmethod
    def _load(call: _Call) -> dict[Any, Any]:
        block, file_obj = call
        if block.replaces is not None:
            return dict(enumerate(block.replaces(file_obj, block.arguments)))
        with TensorDeserializer(file_obj, **block.arguments) as deserializer:
            tensors = deserializer.tree(default=[])
            if not isinstance(tensors, list):
                raise call.refused(next(iter(tensors)), "has a name; expected a number")
            # If there is a filter, some numbers are missing.
            found = dict(zip(sorted(deserializer), tensors))
        for number, tensor in found.items():
            if isinstance(tensor, torch.Tensor) and tensor.dtype != torch.uint8:
                raise call.refused(number, f"has {tensor.dtype}; expected {torch.uint8}")
        return found


_pickle = types.ModuleType("tensorfs_pickle")
_pickle.__dict__.update(vars(pickle), Pickler=_Pickler, Unpickler=_Unpickler, __name__="tensorfs_pickle")

_lock = threading.Lock()
_users = {"save": 0, "load": 0}
_genuine: dict[str, Any] = {}


def _after_fork() -> None:
    # Another thread of the parent may have held the lock during the fork. The child lacks that thread, so the lock
    # would never be free.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _beside(f: Any) -> str | None:
    """The path of the tensorizer file beside the file `f` of torch. None for a file in memory."""
    if isinstance(f, io.BytesIO):
        logger.warning("a file in memory has no name, so its tensors stay in it; set file_obj to choose a file for them")
        return None
    return os.fsdecode(f.name if hasattr(f, "name") and not isinstance(f, os.PathLike) else f) + ".tensors"


@contextlib.contextmanager
def _called(block: _Block, f: Any) -> Iterator[bool]:
    """Lasts as long as a call within `block`. Yields whether the tensors of the call are in a tensorizer file."""
    file_obj = block.file_obj
    if file_obj is None:
        file_obj = _beside(f)
    elif callable(file_obj):
        file_obj = file_obj(f)
    token = _call.set(None if file_obj is None else _Call(block, file_obj))
    try:
        yield file_obj is not None
    finally:
        _call.reset(token)


def _usual(pickle_module: Any) -> None:
    if pickle_module not in (None, pickle):
        raise ValueError(f"pickle_module={pickle_module.__name__}: within this block only pickle can be used")


def _save(obj: object, f: _FileLike, pickle_module: Any = pickle, *args: Any, **arguments: Any) -> Any:
    genuine, block = _genuine["save"], _saving.get()
    if block is None:
        return genuine(obj, f, pickle_module, *args, **arguments)
    _usual(pickle_module)
    with _called(block, f):
        return genuine(obj, f, _pickle, *args, **arguments)


def _load(
    f: _FileLike,
    map_location: Any = None,
    pickle_module: Any = None,
    *args: Any,
    weights_only: bool | None = None,
    **arguments: Any,
) -> Any:
    genuine, block = _genuine["load"], _loading.get()
    if block is None:
        return genuine(f, map_location, pickle_module, *args, weights_only=weights_only, **arguments)
    _usual(pickle_module)
    with _called(block, f):
        weights_only = False if block.suppress_weights_only else weights_only
        return genuine(f, map_location, _pickle, *args, weights_only=weights_only, **arguments)


@contextlib.contextmanager
def _within(name: str, variable: contextvars.ContextVar[_Block | None], block: _Block, ours: Any) -> Iterator[None]:
    """Replaces the function `name` of torch. Only the thread or async task that enters the block is affected."""
    with _lock:
        if _users[name] == 0:
            _genuine[name] = getattr(torch, name)
            setattr(torch, name, functools.wraps(_genuine[name])(ours))
        _users[name] += 1
    token = variable.set(block)
    try:
        yield
    finally:
        # A generator may end in another context than the one in which it began.
        with contextlib.suppress(ValueError):
            variable.reset(token)
        with _lock:
            _users[name] -= 1
            if _users[name] == 0:
                setattr(torch, name, _genuine[name])


def tensorizer_saving(
    file_obj: Any = None, *, save_func: Callable[[Any, Any, dict[str, Any]], Any] | None = None, **kwargs: Any
) -> contextlib.AbstractContextManager[None]:
    """Within this block `torch.save` writes the tensors to a tensorizer file. Only the thread or async task that enters
    the block is affected.

    `file_obj` is the tensorizer file, in a form that `TensorSerializer` accepts. It may also be a function: it gets the
    first argument of `torch.save`, and returns the tensorizer file, or None to leave the tensors in the file of torch.
    By default, the tensorizer file has the path of the file of torch, with `.tensors` added. If there is a `save_func`,
    `save_func(file_obj, tensors, kwargs)` writes the tensors. Otherwise `TensorSerializer` writes them, with the
    arguments `kwargs`.
    """
    return _within("save", _saving, _Block(file_obj, save_func, kwargs, False), _save)


def tensorizer_loading(
    file_obj: Any = None,
    *,
    load_func: Callable[[Any, dict[str, Any]], Any] | None = None,
    suppress_weights_only: bool = False,
    **kwargs: Any,
) -> contextlib.AbstractContextManager[None]:
    """Within this block `torch.load` loads files that were saved within `tensorizer_saving`, and takes their tensors
    from the tensorizer file. Other files of torch are loaded as always. Only the thread or async task that enters the
    block is affected.

    `file_obj` means the same as in `tensorizer_saving`. If there is a `load_func`, `load_func(file_obj, kwargs)`
    returns the tensors. Otherwise `TensorDeserializer` loads them, with the arguments `kwargs`: their device is chosen
    by `device=`, and not by `map_location`. With `suppress_weights_only`, torch ignores `weights_only=True`, which it
    would refuse within this block.

    Raises `TypeError` for a `dtype`, because the file has the bytes of tensors without their dtypes.
    """
    if load_func is None and kwargs.get("dtype") is not None:
        raise TypeError(f"dtype={kwargs['dtype']}: the file has bytes without their dtypes; cast the loaded tensors")
    return _within("load", _loading, _Block(file_obj, load_func, kwargs, suppress_weights_only), _load)
