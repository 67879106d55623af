"""The header of a file, and the group of one process."""

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
        """The number of processes, which is 1."""
        return 1

    def rank(self) -> int:
        """The number of this process, which is 0."""
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
        """The metadata in the header. An empty text if there are none."""
        self.tensors = {
            info.name: TensorFrame(DType(info.dtype), list(info.shape), file.data_offsets(info)) for info in file.infos
        }
        self.header_length = file.header_length
        """Length in bytes of all that is before the data of the tensors. None for a file without tensors."""

    @classmethod
    def from_file(cls, filename: str | os.PathLike[str], framework: Any = None) -> SafeTensorsMetadata:
        """The header of a file. It is checked as by `tensorfs.safe_open`. `framework` has no effect."""
        return cls(OneFile.open(os.fspath(filename), _settings.loader()))

    def __repr__(self) -> str:
        return f"<header of {self.src}: {len(self.tensors)} tensors>"
