"""A dict of tensors that are read when they are indexed. transformers accepts such a dict as `state_dict=`."""

from __future__ import annotations

from typing import Any

from ._names import Names
from ._open import Slice, Source, safe_open


class LazyTensor(Slice):
    """A tensor that is read when it is indexed. Its attributes, such as `dtype` and `shape`, need no read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._opened, self._info.name)

    @property
    def dtype(self) -> Any:
        """The dtype, as an object of the framework."""
        return self._reader.framework.dtype(self._info.dtype, self._info.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self._info.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self._info.shape)

    @property
    def nbytes(self) -> int:
        """The length of the whole tensor in bytes."""
        return self._info.nbytes

    def is_floating_point(self) -> bool:
        """Whether its elements are floating point numbers."""
        return self._info.dtype.startswith(("F", "BF"))


def _again(opened: safe_open, name: str) -> LazyTensor:
    return LazyTensor(opened, opened._info(name))


class LazyTensors(dict[str, LazyTensor]):
    """The tensors of a checkpoint by name. Each is read when it is indexed."""

    def __init__(self, opened: safe_open, names: Names = None) -> None:
        super().__init__((info.name, LazyTensor(opened, info)) for info in opened._infos(names))
        self._opened = opened

    @property
    def stats(self) -> dict[str, Any]:
        """The cost of all loads so far, as in `safe_open.stats`."""
        return self._opened.stats

    def close(self) -> None:
        """Frees the memory of tensors that were loaded ahead. All tensors can still be read."""
        reader = self._opened._open
        if reader is not None:
            reader.close()

    def __enter__(self) -> LazyTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lazy(
    filename: Source, framework: str = "pt", device: Any = "cpu", *, names: Names = None, **how: Any
) -> LazyTensors:
    """A dict with the tensors of a checkpoint, or those that `names` selects, in file order. A tensor is read when it
    is indexed, and only the indexed part of it. `how` are further arguments of `safe_open`.

        config = AutoConfig.from_pretrained("llama")
        model = AutoModelForCausalLM.from_pretrained(
            None, config=config, state_dict=tensorfs.lazy("run7"), dtype="auto"
        )
    """
    return LazyTensors(safe_open(filename, framework, device, **how), names)
