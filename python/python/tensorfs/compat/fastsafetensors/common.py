"""Headers, and the group of one process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from ... import _settings
from .._files import OneFile
from .st_types import DType


class SingleGroup:
    """The group of one process."""

    def size(self) -> int:
        """The number of its processes."""
        return 1

    def rank(self) -> int:
        """The number of this process."""
        return 0


@dataclass
class TensorFrame:
    """The facts about a tensor that the header of its file states."""

    dtype: DType
    shape: list[int]
    data_offsets: list[int]


class SafeTensorsMetadata:
    """The header of a file."""

    def __init__(self, file: OneFile) -> None:
        self.src = file.path
        found = file.metadata
        self.metadata: Any = "" if found is None else found
        """The metadata in it; an empty text if it has none."""
        self.tensors = {
            info.name: TensorFrame(DType(info.dtype), list(info.shape), file.data_offsets(info)) for info in file.infos
        }
        self.header_length = file.header_length
        """Bytes before the data of tensors. None in a file without tensors."""

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str], framework: Any = None) -> SafeTensorsMetadata:
        """The header of a file, judged as `tensorfs.safe_open` does. `framework` has no effect."""
        return cls(OneFile.open(os.fspath(filename), _settings.loader()))

    def __repr__(self) -> str:
        return f"<header of {self.src}: {len(self.tensors)} tensors>"
