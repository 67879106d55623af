"""`with tensorfs.patched():` makes code that uses safetensors load by tensorfs, without a change of that code."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import sys
import threading
from types import ModuleType
from typing import Any, Iterator

from . import _device, _frameworks, _settings
from ._errors import SafetensorError
from ._open import safe_open
from ._settings import RemoteSource, Unpack
from ._tensorfs import SCHEMES


class _Block:
    """A `with` block of `patched`. An async task that has copied the context of the block may run longer than the
    block."""

    def __init__(self, around: _Block | None, copy: bool | None, remote: RemoteSource) -> None:
        self.around, self.copy, self.remote, self.ended = around, copy, remote, False


_innermost: contextvars.ContextVar[_Block | None] = contextvars.ContextVar("tensorfs.patched", default=None)
_lock = threading.Lock()


class _Searched:
    """A module, and its names that are bound to the `safe_open` of safetensors, or to the class that replaces it. The
    names were found when the module had `count` names."""

    __slots__ = ("module", "names", "is_ours", "is_large", "count", "bindings")

    def __init__(self, module: ModuleType, names: dict[str, Any]) -> None:
        self.module, self.names, self.count = module, names, -1
        package = str(names.get("__name__")).partition(".")[0]
        self.is_ours, self.is_large = package == "tensorfs", package in _LARGE
        self.bindings: list[str] = []

    def search(self, count: int) -> None:
        self.count = count
        either = {id(_stand_in), id(_stand_in.genuine)}
        # Most modules have no such name. This test finds that out fastest.
        if self.is_ours or self.is_large or either.isdisjoint(map(id, list(self.names.values()))):
            self.bindings = []
        else:
            self.bindings = [name for name, value in list(self.names.items()) if id(value) in either]


_NAME = "safe_open"
"""The name that most modules give to `safe_open`."""

_LARGE = sys.stdlib_module_names | {"cuda", "mpmath", "numpy", "pandas", "scipy", "sympy", "torch", "triton"}
"""Large packages, which have most of the attributes in a process. They are searched for the name `_NAME` only."""

_searched: dict[str, _Searched] = {}
_known: dict[str, Any] = {}
"""`sys.modules` at the time of the last search."""
_names: list[dict[str, Any]] = []
"""The names of each module in `_searched`; `_counts` has their numbers. As lists, thousands of modules are compared in
one step."""
_counts: list[int] = []
_bound: list[_Searched] = []
"""The modules in `_searched` that have bindings."""
_users = 0
_stand_in: Any = None


@contextlib.contextmanager
def patched(*, copy: bool | None = None, **remote: Unpack[RemoteSource]) -> Iterator[None]:
    """Replaces `safetensors.safe_open` within the block, also in modules that imported it before. Only the thread or
    async task that enters the block is affected. `load_file` and `load_model` of safetensors call `safe_open`, so they
    load by tensorfs too. Tensors for frameworks other than torch and numpy, and for devices that tensorfs does not
    support, are still loaded by safetensors. By default tensors that the page cache holds share the memory of the
    mapped files, as all tensors of safetensors do. With `copy=False` all tensors share it, with `copy=True` none: see
    `safe_open`. `credentials_file`, `profile`, `endpoint`, `region` and `ca_file` mean the same as in `safe_open`, and
    apply to URLs.
    """
    block = _Block(_innermost.get(), copy, _settings.with_absolute_paths(remote))
    _install()
    try:
        token = _innermost.set(block)
        yield
    finally:
        block.ended = True
        # A generator may end in another context than the one in which it began.
        with contextlib.suppress(ValueError):
            _innermost.reset(token)
        _uninstall()


def _active() -> _Block | None:
    block = _innermost.get()
    while block is not None and block.ended:
        block = block.around
    return block


def _after_fork() -> None:
    # Another thread of the parent may have held the lock during the fork. The child lacks that thread, so the lock
    # would never be free.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _install() -> None:
    global _users, _stand_in
    import safetensors

    with _lock:
        if _users == 0:
            if _stand_in is None:
                _stand_in = _make_stand_in(safetensors.safe_open)
            _replace(_stand_in.genuine, _stand_in)
        _users += 1


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _replace(_stand_in, _stand_in.genuine)


def _replace(old: Any, new: Any) -> None:
    """Replaces `old` by `new` in every module, because most modules import `safe_open` by name.

    There may be thousands of modules. So only those whose number of names has changed since the last call are searched.
    """
    global _known, _counts, _bound
    modules = sys.modules.copy()
    if modules != _known:
        _known = modules
        for key in _searched.keys() - modules.keys():
            del _searched[key]
        for key, module in modules.items():
            found = _searched.get(key)
            if isinstance(module, ModuleType) and (found is None or found.module is not module):
                # `vars` is used because getting attributes may import more modules, and setting them may be
                # forbidden.
                _searched[key] = _Searched(module, vars(module))
        _names[:] = [each.names for each in _searched.values()]
    counts = list(map(len, _names))
    if counts != _counts:
        _counts = counts
        for each, count in zip(_searched.values(), counts):
            if each.count != count:
                each.search(count)
        _bound = [each for each in _searched.values() if each.bindings]
    # A module that had None under this name may have bound the name to `old` later, which its number of names does not
    # show.
    if id(old) in map(id, map(dict.get, _names, itertools.repeat(_NAME))):
        for each in _searched.values():
            if each.names.get(_NAME) is old and not each.is_ours:
                each.names[_NAME] = new
    for each in _bound:
        for name in each.bindings:
            if each.names.get(name) is old:
                each.names[name] = new


def _make_stand_in(real: type) -> type:
    class Kind(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            block = _active()
            if block is None or not _is_ours(*args, **kwargs):
                return real(*args, **kwargs)
            filename = args[0] if args else kwargs.get("filename")
            is_url = isinstance(filename, str) and filename.partition("://")[0] in SCHEMES
            return safe_open(*args, **{"copy": block.copy, **(block.remote if is_url else {}), **kwargs})

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (real, safe_open))

    class SafeOpen(metaclass=Kind):
        """Stands in for `safetensors.safe_open`."""

        genuine = real

    SafeOpen.__name__ = SafeOpen.__qualname__ = "safe_open"
    return SafeOpen


def _is_ours(filename: Any = None, framework: Any = None, device: Any = "cpu", **_: Any) -> bool:
    if not _frameworks.is_known(framework):
        return False
    try:
        _frameworks.find(framework, _device.parse(device))
    except SafetensorError:
        return False
    return True
