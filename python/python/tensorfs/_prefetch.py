"""Tensors that are loaded in the background, batch by batch. Each tensor is returned once."""

from __future__ import annotations

import atexit
import os
import threading
import traceback
from typing import Any, Callable, Iterator, Sequence

from ._errors import error
from ._tensorfs import Cancel, process_token

_running: set[PrefetchLoader] = set()


def _close_all() -> None:
    # If the interpreter stops a loading thread at its end, the process may crash. So the threads end before.
    for loader in list(_running):
        loader.close()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_running.clear)


class PrefetchLoader:
    """Tensors that are being loaded. Each is returned once, by `take` or by iterating."""

    def __init__(
        self,
        batches: Sequence[Sequence[str]],
        load: Callable[[Sequence[str], Cancel], dict[str, Any]],
        ahead: int | None = None,
    ) -> None:
        self._batches, self._load, self._ahead = batches, load, ahead
        self._batch_of = {name: number for number, batch in enumerate(batches) for name in batch}
        self._ready: dict[str, Any] = {}
        self._loaded = 0
        self._wanted = 0
        self._taken: set[str] = set()
        self._failed: BaseException | None = None
        self._closed = False
        self._cancel = Cancel()
        self._changed = threading.Condition()
        self._process = process_token()
        self._thread = threading.Thread(target=self._run, name="tensorfs-prefetch", daemon=True)
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:
            # Ctrl-C may come when the thread runs already.
            self._cancel.cancel()
            self._closed = True
            _running.discard(self)
            raise

    def names(self) -> list[str]:
        """The names of the tensors, in file order."""
        return list(self._batch_of)

    def __len__(self) -> int:
        return len(self._batch_of)

    def take(self, name: str) -> Any:
        """Waits for the tensor of this name and returns it. Each tensor can be taken once."""
        if name not in self._batch_of:
            raise error(f"tensor {name} is not in the prefetch plan", tensor=name)
        self._check_process()
        with self._changed:
            if name in self._taken:
                raise error(f"{name}: tensor already delivered (each is handed out once)", tensor=name)
            self._wait_for(self._batch_of[name])
            self._taken.add(name)
            return self._ready.pop(name)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields pairs of name and tensor in the order of loading, except those that `take` has returned."""
        for batch in self._batches:
            for name in batch:
                self._check_process()
                with self._changed:
                    if name in self._taken:
                        continue
                    self._wait_for(self._batch_of[name])
                    self._taken.add(name)
                    tensor = self._ready.pop(name)
                yield name, tensor
                # While the generator is suspended, it must not keep the tensor alive.
                del tensor

    def close(self) -> None:
        """Ends the load and frees tensors that were not returned yet. Tensors that were returned stay valid."""
        if process_token() != self._process:
            return
        self._cancel.cancel()
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()
        # The traceback of the error refers to frames, which keep their objects alive.
        self._failed = None

    def __enter__(self) -> PrefetchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        # After a fork, the loading thread exists in the parent only.
        if process_token() != self._process:
            raise error("this prefetch belongs to the process that started it; start another one")

    def _wait_for(self, batch: int) -> None:
        self._wanted = max(self._wanted, batch)
        self._changed.notify_all()
        self._changed.wait_for(lambda: self._closed or self._loaded > batch or self._failed is not None)
        if self._closed:
            raise error("prefetch loader closed")
        if self._loaded <= batch and self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        try:
            self._load_all()
        finally:
            _running.discard(self)

    def _load_all(self) -> None:
        for number, batch in enumerate(self._batches):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._ahead is None or number <= self._wanted + self._ahead
                )
                if self._closed:
                    return
            try:
                tensors = self._load(batch, self._cancel)
            except BaseException as failed:
                # The frames of the traceback would keep the memory of the load alive.
                traceback.clear_frames(failed.__traceback__)
                with self._changed:
                    self._failed = failed
                    self._changed.notify_all()
                return
            with self._changed:
                self._loaded = number + 1
                if not self._closed:
                    self._ready.update(tensors)
                self._changed.notify_all()
            del tensors
