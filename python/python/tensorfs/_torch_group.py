"""Process groups of torch: their store is used as a mailbox, and they get collectives of their own."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any, Callable, Sequence

from ._errors import GroupError, error
from ._group import STORE_LOST, Group

_opened: Counter[str] = Counter()
"""The number of `safe_open` and `load_into` calls that have used each group of torch, by the name of the group. It is
the same on all ranks."""

_stores: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Three connections to the store of each group: for the thread of a load, for the watching thread, and for
collectives."""


def group_of(process_group: Any, timeout: float | None) -> Group:
    """The group for the argument `process_group`, which is a group of `torch.distributed` or of this package."""
    if isinstance(process_group, Group):
        return process_group
    dist = sys.modules.get("torch.distributed")
    kind = getattr(dist, "ProcessGroup", None)
    if dist is None or kind is None or not isinstance(process_group, kind):
        what = type(process_group).__name__
        raise TypeError(f"process_group: expected a group of torch.distributed that this process is in, not {what}")
    rank, size = process_group.rank(), process_group.size()
    _opened[process_group.group_name] += 1
    number = _opened[process_group.group_name]
    if process_group not in _stores:
        store = _store_of(dist, process_group)
        _stores[process_group] = _within(timeout, lambda: [store.clone() for _ in range(3)])
    for store in _stores[process_group]:
        store.set_timeout(timedelta(seconds=timeout or 1e6))
    main, beside, spare = (dist.PrefixStore(f"tensorfs/{number}", store) for store in _stores[process_group])

    def wire(word: str) -> Wire:
        return Wire(dist.PrefixStore(f"wire{word}", spare), rank, size, timeout)

    return Group(rank, size, Mailbox(main), Mailbox(beside), wire, timeout)


def _within(timeout: float | None, work: Callable[[], Any]) -> Any:
    """The result of `work`, which may wait for ever if the store is gone. `work` runs on a thread of its own, and the
    caller waits at most `timeout` seconds for that thread."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((work(), None))
        except Exception as failed:
            done.append((None, failed))

    beside = threading.Thread(target=run, name="tensorfs-group", daemon=True)
    beside.start()
    beside.join(timeout or None)
    if not done or done[0][1] is not None:
        raise error(STORE_LOST, "group", cls=GroupError)
    return done[0][0]


def _store_of(dist: Any, process_group: Any) -> Any:
    try:
        return process_group.get_group_store()
    except AttributeError:
        # Older versions of torch have no such method.
        return dist.distributed_c10d._world.pg_map[process_group][1]


class Mailbox:
    """A `Store` of torch, as a mailbox."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def claim(self, key: str, value: str) -> str:
        return self._store.compare_set(key, "", value).decode()

    def delete(self, key: str) -> None:
        self._store.delete_key(key)


class Wire:
    """Collectives over gloo, in a group of their own, so that a failure does not break the group of the caller."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float | None) -> None:
        import torch
        from torch.distributed import ProcessGroupGloo

        self._torch, self._rank, self._size = torch, rank, size
        limit = timedelta(seconds=timeout or 1e6)
        self._group = ProcessGroupGloo(store, rank, size, timeout=limit)

    def drop(self, failed: bool) -> None:
        """Frees the gloo group, which may wait for collectives until their deadline. After a failure another thread
        does that, so that this one does not wait."""
        group, self._group = [self._group], None
        if failed:
            # This is no daemon thread: the interpreter has to wait for it at its end, and must not stop it.
            threading.Thread(target=group.clear, name="tensorfs-group").start()

    def buffer(self, nbytes: int) -> tuple[Any, int]:
        """New memory for collectives, and its address."""
        made = self._torch.empty(nbytes, dtype=self._torch.uint8)
        return made, made.data_ptr()

    def all_gather(self, into: Any, of: Any) -> Callable[[], bool]:
        """Begins to send `of` to all ranks. Returns a function that tells whether this is done, and raises an error if
        it failed."""
        return _done(self._group._allgather_base(into, of))

    def broadcast(self, of: Any, root: int) -> Callable[[], bool]:
        """Begins to send the bytes of one rank to all."""
        options = self._torch.distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return _done(self._group.broadcast([of], options))

    def scatter(self, into: Any, of: Any, sizes_in: Sequence[int], sizes_out: Sequence[int]) -> Callable[[], bool]:
        """Begins to send to each rank its own bytes."""
        return _done(self._group.alltoall_base(into, of, list(sizes_in), list(sizes_out)))


def _done(work: Any) -> Callable[[], bool]:
    def is_done() -> bool:
        if not work.is_completed():
            return False
        work.wait()
        return True

    return is_done


