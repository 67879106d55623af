"""Files that are opened together, and their tensors in the order in which the replaced packages return them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Sequence

from .. import _frameworks, _settings
from .._open import _background, _batches, _refuse_unfit, open_checkpoint
from .._prefetch import PrefetchLoader
from .._reader import Info, Part, Reader
from .._tensorfs import Checkpoint, Loader

_OPENED_AT_A_TIME = 16


class OneFile:
    """One file with its own tensors. If the file is a shard of a checkpoint, these are the pieces in this shard."""

    def __init__(self, path: str, checkpoint: Checkpoint) -> None:
        self.path, self._checkpoint = path, checkpoint
        facts = checkpoint.tensors()
        self.infos = [Info(*facts[position]) for position in checkpoint.file_order()]

    @classmethod
    def open(cls, path: str, loader: Loader) -> OneFile:
        """Opens the file at `path` within the deadline of `loader`."""
        return cls(path, open_checkpoint([path], loader))

    @property
    def metadata(self) -> dict[str, str] | None:
        """The metadata of its header."""
        return self._checkpoint.metadata()

    def data_offsets(self, info: Info) -> list[int]:
        """First byte and end of a tensor in the data section of the file."""
        offsets = self._checkpoint.data_offsets(info.position)
        return list(offsets) if offsets is not None else [0, info.nbytes]

    @property
    def header_length(self) -> int | None:
        """Length in bytes of all that is before the data section. None for a file without tensors."""
        for info in self.infos:
            offsets, pieces = self._checkpoint.data_offsets(info.position), self._checkpoint.pieces(info.position)
            if offsets is not None and pieces:
                return pieces[0][1] - offsets[0]
        return None

    @property
    def source(self) -> str:
        """The path of the file without links. A checkpoint of several files names its files by such paths."""
        return str(self._checkpoint.files[0])


class FileSet:
    """Files that form a checkpoint: independent files, or shards, of which the pieces are joined to whole tensors."""

    def __init__(self, paths: Sequence[str], gpu: int | None = None, **how: Any) -> None:
        self.paths = list(paths)
        self._gpu, self._loader = gpu, _settings.loader(**how, gpu=gpu)
        loader = self._loader
        self._checkpoint = open_checkpoint(self.paths, loader)
        self.files = self._open_each()
        self._file_of = self._find_files()
        facts = self._checkpoint.tensors()
        infos = [Info(*facts[position]) for position in self._checkpoint.file_order()]
        self.infos = sorted(infos, key=self.file_of)
        """The tensors: file by file in the order of the paths, and within a file in the order of their bytes."""
        self.by_name = {info.name: info for info in self.infos}
        self._reader: Reader | None = None

    def _open_each(self) -> list[OneFile]:
        if len(self.paths) == 1:
            return [OneFile(self.paths[0], self._checkpoint)]
        with ThreadPoolExecutor(min(_OPENED_AT_A_TIME, len(self.paths)), "tensorfs-open") as pool:
            return list(pool.map(lambda path: OneFile.open(path, self._loader), self.paths))

    def _find_files(self) -> dict[str, int]:
        of_name: dict[str, int] = {}
        for index, file in enumerate(self.files):
            for info in file.infos:
                of_name.setdefault(info.name, index)
        of_source = {file.source: index for index, file in reversed(list(enumerate(self.files)))}
        found = {}
        for name, position, *_ in self._checkpoint.tensors():
            # A shard may have a piece of a tensor under another name.
            pieces = self._checkpoint.pieces(position) if name not in of_name else []
            found[name] = of_name.get(name, of_source.get(pieces[0][0], 0) if pieces else 0)
        return found

    def file_of(self, info: Info) -> int:
        """The index of the file that has a tensor, or its first piece."""
        return self._file_of[info.name]

    def load(self, infos: Sequence[Info]) -> dict[str, Any]:
        """Tensors of torch by name, loaded together."""
        wanted: list[tuple[Info, Part]] = [(info, None) for info in infos]
        _refuse_unfit(self._torch_reader(), wanted)
        return self._torch_reader().load(wanted) if wanted else {}

    def stream(self, infos: Sequence[Info], ahead: int, most: int | None = None) -> PrefetchLoader:
        """Begins to load tensors of torch in this order, batch by batch. At most `ahead` batches are loaded before they
        are requested. `most` is the most bytes of a batch; a longer tensor forms a batch of its own."""
        wanted: list[tuple[Info, Part]] = [(info, None) for info in infos]
        _refuse_unfit(self._torch_reader(), wanted)
        return _background(self._torch_reader(), _batches(wanted, most), ahead)

    def _torch_reader(self) -> Reader:
        if self._reader is None:
            framework = _frameworks.find("pt", self._gpu)
            self._reader = Reader(self._checkpoint, framework, self._loader, False)
        return self._reader
