"""A process group: its ranks check that they have opened the same checkpoint, and a load succeeds or fails on all of
them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import threading
import time
from collections import Counter
from typing import Any, Callable, Iterator, Protocol

from . import _errors
from ._errors import GroupError, SafetensorError
from ._tensorfs import Cancel, Checkpoint, process_token

_POLL_SECONDS = (0.0002, 0.01)
"""Shortest and longest time between two looks into the mailbox, in seconds."""

_HEARTBEAT_SECONDS_MAX = 1.0
"""Longest time between two signs of life of a rank, in seconds."""

_RANK_END_SECONDS_MAX = 60.0
"""In a group without a deadline: the seconds that a rank waits until the end of another rank is noticed."""

_SUCCESS_MESSAGE = "{}"
"""The outcome of an operation in which no rank failed."""

_ENDED = "its process has ended"

STORE_LOST = "the store of the process group does not answer: rank 0, or the launcher that holds it, has ended or hangs"
"""All ranks raise this error if the store is lost, because they cannot exchange messages about the cause."""


class Mailbox(Protocol):
    """A place where the ranks of a group leave messages for each other."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes | None:
        """The value of a key, or None if the key is not set. Does not wait."""

    def claim(self, key: str, value: str) -> str:
        """Sets a key if it has no value yet. Returns the value that it has then."""

    def delete(self, key: str) -> None: ...


class Group:
    """The group of one `safe_open` or of one load. All ranks begin its operations in the same order."""

    def __init__(
        self,
        rank: int,
        size: int,
        mailbox: Mailbox,
        beside: Mailbox,
        wire: Callable[[str], Any] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        self.rank, self.size, self.mailbox, self.timeout = rank, size, mailbox, timeout
        # A second mailbox, for the thread that watches the other ranks: a connection to a store answers one call at a
        # time.
        self.beside = beside
        # Makes the object for collectives, at its first use, from a word that is the same on all ranks.
        self._make_wire, self._wire = wire, None
        self.hosts: list[str] = []
        self._pids: dict[int, int] = {}
        self._number = 0
        self._closed = False
        self._process = process_token()
        self._lock = threading.Lock()
        # A descriptor for each other rank of this host. It becomes readable when the process of that rank ends.
        self._watched: dict[int, int] = {}
        # The keys of the messages of the last operation. Once all ranks have begun the next operation, no rank reads
        # them any more.
        self.old: list[str] = []

    @property
    def ranks_of_host(self) -> list[int]:
        """The ranks on this host, including this rank."""
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]

    def pid(self, rank: int) -> int:
        """The process id of a rank on this host."""
        return self._pids[rank]

    def wire_of(self, word: str) -> Any:
        """The object for the collectives of the group. The first call makes it from `word`."""
        if self._make_wire is None:
            raise _errors.error("this process group has no collectives", cls=GroupError)
        if self._wire is None:
            self._wire = self._make_wire(word)
        return self._wire

    @contextlib.contextmanager
    def operation(self) -> Iterator[Operation]:
        """A block that all ranks enter. If it fails on one rank, it fails on all ranks with the same error. Otherwise
        it ends when all ranks have come to its end."""
        if process_token() != self._process:
            raise _errors.error("this process group belongs to the process that opened it", cls=GroupError)
        with self._lock:
            if self._closed:
                raise _errors.error("File is closed")
            self._number += 1
            operation = Operation(self, f"{self._number}")
            try:
                yield operation
                operation.finish()
            except BaseException as failed:
                self._drop_wire(True)
                common = operation.common(failed)
                if common is failed:
                    raise
                try:
                    raise common from None
                finally:
                    # Without this, the frame and the error would refer to each other.
                    del common
            finally:
                operation.end()

    def agree(self, operation: Operation, checkpoint: Checkpoint) -> None:
        """Compares the files that each rank has opened. Raises the same error on all ranks if they differ."""
        catalog, files = checkpoint.state()
        mine = {"host": _host(), "pid": os.getpid(), "catalog": catalog, "files": files}
        every = [json.loads(said) for said in operation.exchange(json.dumps(mine).encode())]
        self.hosts = [one["host"] for one in every]
        self._pids = {rank: every[rank]["pid"] for rank in self.ranks_of_host}
        watched = {}
        for rank, pid in self._pids.items():
            if rank != self.rank and hasattr(os, "pidfd_open"):
                with contextlib.suppress(OSError):
                    watched[rank] = os.pidfd_open(pid)
        # Set in one step, because the watching thread uses it.
        self._watched = watched
        differing = _differing(every)
        if differing is not None:
            raise _of_rank(*differing)

    def __del__(self) -> None:
        for descriptor in self._watched.values():
            os.close(descriptor)

    def ended(self, seconds: float, wake: int) -> int | None:
        """Waits until `wake` is readable, or the process of another rank of this host has ended, or `seconds` have
        passed. Returns a rank whose process has ended, or None."""
        poll = select.poll()
        for descriptor in (wake, *self._watched.values()):
            poll.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(seconds * 1000)}
        return min((rank for rank, descriptor in self._watched.items() if descriptor in found), default=None)

    def has_ended(self, rank: int) -> bool:
        """Whether the process of a rank of this host has ended."""
        poll = select.poll()
        if rank in self._watched:
            poll.register(self._watched[rank], select.POLLIN)
        return bool(poll.poll(0))

    def _drop_wire(self, failed: bool) -> None:
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.drop(failed)

    def close(self) -> None:
        """Closes the descriptors that watch the other ranks, and the collectives. Waits for no other rank."""
        with self._lock:
            watched, self._watched = self._watched, {}
            for descriptor in watched.values():
                os.close(descriptor)
            self._drop_wire(False)
            self._closed = True


class Operation:
    """One operation of a group, such as a load. Each rank has an object for it."""

    def __init__(self, group: Group, name: str) -> None:
        self._group, self.name, self._mailbox = group, name, group.mailbox
        self._said = 0
        self._outcome: str | None = None
        self._posted = [self._key("outcome")] if group.rank == 0 else []
        self._over = False
        self._wake = os.eventfd(0)
        self._lost: Exception | None = None
        self._looked = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="tensorfs-group", daemon=True)
        self.cancel = Cancel()
        """Cancels the loads of this rank when another rank fails."""
        self._watcher.start()

    def exchange(self, message: bytes, ranks: list[int] | None = None) -> list[bytes]:
        """Sends a message to all ranks. Returns the messages of all ranks, or of `ranks`."""
        self.post(str(self._said), message)
        said = [self.wait(str(self._said), rank) for rank in ranks or range(self._group.size)]
        self._said += 1
        if ranks is None:
            old, self._group.old = self._group.old, []
            for key in old:
                self._mailbox.delete(key)
        return said

    def post(self, word: str, message: bytes = b"1") -> None:
        """Leaves a message that other ranks may wait for."""
        key = self._key(f"{word}/{self._group.rank}")
        self._posted.append(key)
        self._mailbox.set(key, message)

    def wait(self, word: str, rank: int) -> bytes:
        """Waits for the message of a rank. Raises the error of the operation if that rank ends."""
        key = self._key(f"{word}/{rank}")
        found: list[bytes] = []

        def is_there() -> bool:
            message = self._mailbox.get(key)
            found.extend([] if message is None else [message])
            return bool(found)

        self.until(is_there)
        return found[0]

    def until(self, is_done: Callable[[], bool]) -> None:
        """Waits until `is_done()` is true. Raises the error of the operation as soon as the operation has failed on any
        rank."""
        pause = _POLL_SECONDS[0]
        while not is_done():
            self.check()
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """A block that waits for collectives. A collective fails if a rank is gone. The block then waits for the error
        about that rank, and raises it in place of the error of the collective."""
        try:
            yield
        except RuntimeError as failed:
            over = time.monotonic() + (self._group.timeout or 0.0)
            self.until(lambda: time.monotonic() > over)
            message = f"a collective of the process group failed: {_first_line(failed)}"
            raise _errors.error(message, "group", cls=GroupError) from None

    @contextlib.contextmanager
    def files_of(self, rank: int) -> Iterator[None]:
        """A block that opens files of another rank of this host. The files are missing if that rank has failed or its
        process has ended. The block then waits for the error about that rank, and raises it in place of the error about
        the file."""
        try:
            yield
        except OSError as failed:
            if not isinstance(failed, (FileNotFoundError, ProcessLookupError)) and not self._group.has_ended(rank):
                raise
            over = time.monotonic() + (self._group.timeout or _RANK_END_SECONDS_MAX)
            self.until(lambda: time.monotonic() > over)
            raise

    def check(self) -> None:
        """Raises the error of the operation if the operation has failed on any rank."""
        if self._lost is not None:
            raise _CommonError(self._lost)
        if self._outcome not in (None, _SUCCESS_MESSAGE):
            raise _exception(self._outcome)
        limit = self._group.timeout
        if limit and time.monotonic() - self._looked > 2 * limit:
            raise _errors.error(STORE_LOST, "group", cls=GroupError)

    def finish(self) -> None:
        """Waits until all ranks have come to the end of the block. From then on the operation cannot fail any more."""
        self.exchange(b"")
        outcome = self._mailbox.claim(self._key("outcome"), _SUCCESS_MESSAGE)
        if outcome != _SUCCESS_MESSAGE:
            raise _exception(outcome)

    def common(self, failed: BaseException) -> BaseException:
        """The error that all ranks raise, after this rank has failed with `failed`."""
        if isinstance(failed, _CommonError):
            return failed.taken()
        try:
            outcome = self._mailbox.claim(self._key("outcome"), _error_message(failed, self._group.rank))
        except Exception:
            return _errors.error(STORE_LOST, "group", cls=GroupError)
        return failed if outcome == _SUCCESS_MESSAGE or not isinstance(failed, Exception) else _exception(outcome).error

    def end(self) -> None:
        """Ends the watching thread. The messages of this operation stay in the mailbox until the next operation."""
        self._over = True
        os.eventfd_write(self._wake, 1)
        self._watcher.join()
        os.close(self._wake)
        self._group.old = [*self._posted, self._key(f"beat/{self._group.rank}")]

    def _key(self, word: str) -> str:
        return f"{self.name}/{word}"

    def _watch(self) -> None:
        """Body of the thread that sends signs of life of this rank, and watches for the signs of life of the other
        ranks."""
        try:
            self._watch_with(self._group.beside)
        except Exception:
            self._lost = _errors.error(STORE_LOST, "group", cls=GroupError)
        if self._lost or self._outcome not in (None, _SUCCESS_MESSAGE):
            self.cancel.cancel()

    def _watch_with(self, mailbox: Mailbox) -> None:
        group, beat, next_look = self._group, 0, 0.0
        # The last sign of life of each other rank, and the time at which it changed.
        seen = dict.fromkeys(set(range(group.size)) - {group.rank}, (b"", time.monotonic()))
        pause = min((group.timeout or 60.0) / 20, _HEARTBEAT_SECONDS_MAX)
        while not self._over:
            beat += 1
            mailbox.set(self._key(f"beat/{group.rank}"), str(beat).encode())
            if time.monotonic() >= next_look and group.timeout:
                self._refuse_silent(mailbox, seen, group.timeout)
                # The store answers the ranks one after the other, so the pause grows with their number.
                next_look = time.monotonic() + pause + group.size * 0.01
            ended = group.ended(pause, self._wake)
            if ended is not None:
                mailbox.claim(self._key("outcome"), _fault(ended, _ENDED))
            outcome = mailbox.get(self._key("outcome"))
            if outcome is not None:
                self._outcome = outcome.decode()
                return
            self._looked = time.monotonic()

    def _refuse_silent(self, mailbox: Mailbox, seen: dict[int, tuple[bytes, float]], limit: float) -> None:
        """Lets the operation fail if a rank has given no sign of life for 80% of the deadline."""
        for rank, (before, since) in seen.items():
            now, beat = time.monotonic(), mailbox.get(self._key(f"beat/{rank}"))
            if beat is not None and beat != before:
                seen[rank] = beat, now
            elif now - since > 0.8 * limit:
                what = "does not answer" if before else "did not come to this load"
                mailbox.claim(self._key("outcome"), _fault(rank, f"it {what} within {limit:g} s (io_timeout)"))


class _CommonError(Exception):
    """Carries the error with which an operation fails on all ranks."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def taken(self) -> Exception:
        """The error. When it is raised, this exception becomes its context. The two must not refer to each other, so
        this exception gives up its reference."""
        error = self.error
        del self.error
        return error


def _fault(rank: int, why: str) -> str:
    return json.dumps({"rank": rank, "class": "GroupError", "message": why, "kind": "group"})


def _of_rank(rank: int, why: str) -> _CommonError:
    return _exception(_fault(rank, why))


_CLASSES: dict[str, type[Exception]] = {
    cls.__name__: cls for cls in (ValueError, TypeError, KeyError, IndexError, MemoryError, RuntimeError)
}


def _error_message(failed: BaseException, rank: int) -> str:
    """An error of this rank as a message to the other ranks."""
    if isinstance(failed, OSError):
        return json.dumps(
            {"rank": rank, "class": "OSError", "errno": failed.errno or errno.EIO, "message": failed.strerror or str(failed), "path": failed.filename}
        )
    if isinstance(failed, SafetensorError):
        name = next(name for name, cls in _errors.CLASSES.items() if isinstance(failed, cls))
        return json.dumps(
            {"rank": rank, "class": name, "message": str(failed), "kind": failed.kind, "path": failed.path, "tensor": failed.tensor}
        )
    name = next((name for name, cls in _CLASSES.items() if isinstance(failed, cls)), "RuntimeError")
    message = str(failed) if name == type(failed).__name__ and str(failed) else f"{type(failed).__name__}: {failed}"
    return json.dumps({"rank": rank, "class": name, "message": message})


def _exception(outcome: str) -> _CommonError:
    """The error that a message from `_error_message` stands for."""
    told = json.loads(outcome)
    message = f"rank {told['rank']}: {told['message']}"
    if told["class"] == "OSError":
        return _CommonError(OSError(told["errno"], message, told["path"]))
    if told["class"] in _CLASSES:
        return _CommonError(_CLASSES[told["class"]](message))
    cls = _errors.CLASSES.get(told["class"], SafetensorError)
    made = _errors.error(message, told["kind"], cls=cls, path=told.get("path"), tensor=told.get("tensor"))
    if isinstance(made, GroupError):
        made.rank = told["rank"]
    return _CommonError(made)


def _differing(every: list[dict[str, Any]]) -> tuple[int, str] | None:
    """The first rank whose files differ from those of most ranks, and the difference as a text. None if all ranks
    agree."""

    def state(one: dict[str, Any]) -> str:
        # The last item of a file is left out, because it differs between hosts for the same file.
        return json.dumps([one["catalog"], [file[:4] for file in one["files"]]])

    states = [state(one) for one in every]
    most = max(states, key=Counter(states).__getitem__)
    hosts: dict[str, list[Any]] = {}
    for rank, one in enumerate(every):
        right = hosts.setdefault(one["host"], one["files"]) if states[rank] == most else every[states.index(most)]["files"]
        for mine, file in zip(one["files"], right):
            if mine[:4] != file[:4]:
                return rank, f"it sees {_shown(mine)}, other ranks see {_shown(file)}"
            if one["host"] == every[0]["host"] and mine != file and hosts.get(one["host"]) is right:
                return rank, f"its {_shown(mine)} is another file than that of other ranks of its host"
        if len(one["files"]) != len(right):
            return rank, f"it sees {len(one['files'])} files, other ranks see {len(right)}"
        if states[rank] != most:
            return rank, "it sees other tensors in the same files: a view, or another version of tensorfs"
    return None


def _shown(file: list[Any]) -> str:
    name, length, seconds, nanoseconds, _ = file
    when = "at an unknown time" if seconds is None else time.strftime("%F %T", time.gmtime(seconds)) + f".{nanoseconds:09}"
    return f"{name} of {length} bytes, changed {when}"


def _host() -> str:
    """A text that is equal for processes which share a running kernel, a namespace of process ids and a host name."""
    words = [socket.gethostname()]
    for path, read in (("/proc/sys/kernel/random/boot_id", lambda p: open(p).read().strip()), ("/proc/self/ns/pid", os.readlink)):
        try:
            words.append(read(path))
        except OSError:
            words.append(f"{os.getpid()}")
    return " ".join(words)


def _first_line(failed: BaseException) -> str:
    return (str(failed).splitlines() or [type(failed).__name__])[0]
