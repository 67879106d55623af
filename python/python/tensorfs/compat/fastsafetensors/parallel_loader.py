"""`ParallelLoader`: returns the tensors of many files one after the other, while the next ones are loaded."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any, Callable, Generator, Iterable, Iterator, Sequence

from ..._reader import Info
from .._files import FileSet
from .._in_group import GroupLoads
from ._groups import gpu_of, group_of
from .common import SingleGroup
from .loader import Filter, SafeTensorsFileLoader, StrPath


class BudgetInfeasibleError(ValueError):
    """The memory that `device_memory_budget` allows is too small for the tensors."""


class PipelineParallel:
    """Returns the tensors of files one after the other, while a thread loads the next ones.

    In a group of several processes, all ranks have to iterate, and each byte is read by one rank. Nothing is loaded
    ahead.

    `queue_size` is the number of batches that are loaded before they are requested, in addition to the next batch. With
    -1 nothing is loaded ahead. `max_batch_bytes` is the most bytes of a batch. `device_memory_budget` limits the bytes
    of the batches that are in memory at a time, together with the returned tensors that the caller keeps. By default
    the caller is expected to keep all tensors. With `resident_tensor`, it keeps those for whose names the function is
    true, and with `accumulate_resident=False` none. The arguments about broadcasts, `borrowed_tensors` and
    `use_chunk_budget_as_allocation_size` are checked, but have no effect. `overlap_io` has no effect.
    """

    def __init__(
        self,
        pg: Any,
        loader: SafeTensorsFileLoader,
        hf_weights_files: Sequence[StrPath],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        tensor_filter: Filter | None = None,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        _check(max_concurrent_producers == 1, f"max_concurrent_producers={max_concurrent_producers}: expected 1")
        self.pg = group_of(pg)
        is_limited = max_batch_bytes is not None or device_memory_budget is not None
        _check(
            is_limited or not use_chunk_budget_as_allocation_size,
            "use_chunk_budget_as_allocation_size: needs max_batch_bytes or device_memory_budget",
        )
        _check(resident_tensor is None or accumulate_resident, "resident_tensor: not with accumulate_resident=False")
        _check(not borrowed_tensors or not accumulate_resident, "borrowed_tensors: needs accumulate_resident=False")
        is_single = self.pg.size() == loader.pg.size() == 1
        _check(is_single or not borrowed_tensors, "borrowed_tensors: needs a group of one, or all_local=True")
        _check(
            is_single or tensor_filter is None,
            "tensor_filter: needs a group of one, or all_local=True, since all ranks get the same tensors",
        )
        _check(
            broadcast_run_bytes >= 0 and broadcast_run_tensors >= 0,
            f"broadcast_run_bytes={broadcast_run_bytes}, broadcast_run_tensors={broadcast_run_tensors}: expected 0 or more",
        )
        self.loader = loader
        if tensor_filter is not None:
            loader.set_tensor_filter(tensor_filter)
        self.hf_weights_files = list(hf_weights_files)
        self.queue_size, self.use_tqdm_on_load = queue_size, use_tqdm_on_load
        self.max_batch_bytes, self.device_memory_budget = max_batch_bytes, device_memory_budget
        self._resident: Filter | None = resident_tensor if accumulate_resident else lambda name: False
        """Whether the caller keeps the tensor of a name. None if the caller keeps all tensors."""
        if is_limited and self.hf_weights_files:
            self._limits(self._wanted(self._open()))

    def iterate_weights(self) -> Generator[tuple[str, Any], None, None]:
        """Yields pairs of name and tensor, file by file, and within a file in the order of their bytes. Tensors own
        their memory."""
        if not self.hf_weights_files:
            return
        # The tensors of a batch share memory. A tensor that the caller keeps is copied, so that it does not keep the
        # whole batch.
        stays = self._resident if self.device_memory_budget is not None else None
        with self._begun() as weights:
            for name, tensor in weights:
                if stays is not None and stays(name):
                    tensor = tensor.clone()
                yield name, tensor
                # While the generator is suspended, it must not keep the tensor alive.
                del tensor

    def close(self) -> None:
        """Closes the loader. Tensors that were returned stay valid."""
        self.loader.close()

    @contextlib.contextmanager
    def _begun(self) -> Iterator[Iterable[tuple[str, Any]]]:
        """Begins the load, which ends with the block."""
        with contextlib.ExitStack() as ends:
            # The group opens the files first, so that a file that one rank cannot open is an error on all ranks.
            loads = None if self.pg.size() == 1 else GroupLoads(self._paths(), gpu_of(self.loader.device), self.pg)
            if loads is not None:
                ends.callback(loads.close)
            files = self._open()
            infos = self._wanted(files)
            most, ahead = self._limits(infos)
            if loads is None:
                weights: Iterable[tuple[str, Any]] = ends.enter_context(files.stream(infos, ahead, most))
            else:
                weights = ends.enter_context(contextlib.closing(loads.stream([info.name for info in infos], most)))
            yield ends.enter_context(contextlib.closing(_with_bar(files, infos, weights, self.use_tqdm_on_load)))

    def _paths(self) -> list[str]:
        return [str(path) for path in self.hf_weights_files]

    def _open(self) -> FileSet:
        return FileSet(self._paths(), gpu_of(self.loader.device))

    def _wanted(self, files: FileSet) -> list[Info]:
        keep = self.loader._filter
        return [info for info in files.infos if keep is None or keep(info.name)]

    def _limits(self, infos: Sequence[Info]) -> tuple[int | None, int]:
        """The most bytes of a batch, and the number of batches that are loaded ahead."""
        ahead, most = max(self.queue_size + 1, 0), self.max_batch_bytes
        longest = max(infos, key=lambda info: info.nbytes, default=None)
        if longest is None:
            return most, ahead
        _check(
            most is None or longest.nbytes <= most,
            f"max_batch_bytes={most}: tensor {longest.name!r} has {longest.nbytes} bytes; allow as many",
        )
        budget = self.device_memory_budget
        if budget is None:
            return most, ahead
        stay = sum(info.nbytes for info in infos if self._resident is None or self._resident(info.name))
        if self._resident is None:
            # The caller keeps every batch, and nothing else is in memory.
            _check_budget(stay <= budget, budget, stay, 0)
            return most, ahead
        # The batch in use and the batch that is being loaded are also in memory.
        while ahead and (budget - stay) // (ahead + 2) < longest.nbytes:
            ahead -= 1
        of_batch = (budget - stay) // (ahead + 2)
        _check_budget(longest.nbytes <= of_batch, budget, stay, 2 * longest.nbytes)
        return of_batch if most is None else min(most, of_batch), ahead


class ParallelLoader(PipelineParallel):
    """A `PipelineParallel` that makes its own `SafeTensorsFileLoader`.

    With `all_local`, every process reads all files itself, even in a group. The arguments that belong to
    `SafeTensorsFileLoader` mean the same as there.
    """

    def __init__(
        self,
        pg: Any,
        hf_weights_files: Sequence[StrPath],
        max_concurrent_producers: int = 1,
        queue_size: int = 0,
        use_tqdm_on_load: bool = True,
        device: Any = "cpu",
        bbuf_size_kb: int = 16 * 1024,
        max_threads: int = 16,
        nogds: bool = False,
        set_numa: bool = True,
        debug_log: bool = False,
        framework: str = "pytorch",
        tensor_filter: Filter | None = None,
        all_local: bool = False,
        max_batch_bytes: int | None = None,
        use_chunk_budget_as_allocation_size: bool = False,
        device_memory_budget: int | None = None,
        accumulate_resident: bool = True,
        resident_tensor: Callable[[str], bool] | None = None,
        use_fgds: bool = False,
        broadcast_run_bytes: int = 16 << 20,
        broadcast_run_tensors: int = 64,
        overlap_io: bool = True,
        borrowed_tensors: bool = False,
        **kwargs: Any,
    ) -> None:
        pg = SingleGroup() if all_local else pg
        super().__init__(
            pg,
            SafeTensorsFileLoader(pg, device, framework=framework),
            hf_weights_files,
            max_concurrent_producers,
            queue_size,
            use_tqdm_on_load,
            tensor_filter=tensor_filter,
            max_batch_bytes=max_batch_bytes,
            use_chunk_budget_as_allocation_size=use_chunk_budget_as_allocation_size,
            device_memory_budget=device_memory_budget,
            accumulate_resident=accumulate_resident,
            resident_tensor=resident_tensor,
            broadcast_run_bytes=broadcast_run_bytes,
            broadcast_run_tensors=broadcast_run_tensors,
            borrowed_tensors=borrowed_tensors,
        )


def _check_budget(fits: bool, budget: int, stay: int, loading: int) -> None:
    if not fits:
        raise BudgetInfeasibleError(
            f"device_memory_budget={budget}: {stay + loading} bytes are needed: {stay} for tensors that stay, {loading} for "
            "those in use and being loaded"
        )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _with_bar(
    files: FileSet, infos: Sequence[Info], weights: Iterable[tuple[str, Any]], is_wanted: bool
) -> Generator[tuple[str, Any], None, None]:
    """Yields the same pairs, and shows a bar of tqdm that counts files."""
    bar = _bar(len(files.paths)) if is_wanted and _is_first_rank() else None
    if bar is None:
        yield from weights
        return
    file_of = {info.name: files.file_of(info) for info in infos}
    with bar:
        for name, tensor in weights:
            bar.update(max(file_of[name] - bar.n, 0))
            yield name, tensor
            del tensor
        bar.update(bar.total - bar.n)


def _bar(total: int) -> Any:
    try:
        tqdm = importlib.import_module("tqdm.auto")
    except ImportError:
        return None
    return tqdm.tqdm(total=total, desc="Loading safetensors files", unit="file")


def _is_first_rank() -> bool:
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return True
    return bool(distributed.get_rank() == 0)
