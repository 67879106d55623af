"""Records the bytes that the load format reads while an engine loads a model."""

from unittest import mock

from tensorfs.engines import _lazy, _weights


class Recorded:
    """A block in which even short tensors are lazy if the option `lazy` is set, because the models of tests are small.
    It counts the opened checkpoints."""

    def __init__(self):
        self._readers, self._lazy = [], []
        safe_open, lazy_tensor = _weights.safe_open, _weights.lazy_tensor

        def opened(*given, **how):
            made = safe_open(*given, **how)
            # The reader is stored, because it outlives the open checkpoint.
            self._readers.append(made._reader())
            return made

        def lazy(*given):
            self._lazy.append(lazy_tensor(*given))
            return self._lazy[-1]

        self._patches = [
            mock.patch.object(_weights, "_LAZY_MIN", 0),
            mock.patch.object(_weights, "safe_open", opened),
            mock.patch.object(_weights, "lazy_tensor", lazy),
        ]

    def __enter__(self):
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_):
        for one in self._patches:
            one.stop()

    def answer(self):
        """The number of lazy tensors, the number of those that were read whole, and the number of bytes that were read
        of all checkpoints."""
        whole = sum(isinstance(made, _lazy.LazyTensor) and made._value is not None for made in self._lazy)
        return {"lazy": len(self._lazy), "whole": whole, "read": sum(one.stats.get("bytes", 0) for one in self._readers)}
