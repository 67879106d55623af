"""What the load format reads while an engine loads a model."""

from unittest import mock

from tensorfs.engines import _lazy, _weights


class Recorded:
    """A block in which every tensor is lazy if the option says so, however short, and opened checkpoints are counted.
    Models of tests are small."""

    def __init__(self):
        self._opened, self._lazy = [], []
        safe_open, lazy_tensor = _weights.safe_open, _weights.lazy_tensor
        self._patches = [
            mock.patch.object(_weights, "_LAZY_MIN", 0),
            mock.patch.object(_weights, "safe_open", lambda *given, **how: self._kept(self._opened, safe_open(*given, **how))),
            mock.patch.object(_weights, "lazy_tensor", lambda *given: self._kept(self._lazy, lazy_tensor(*given))),
        ]

    def _kept(self, several, made):
        several.append(made)
        return made

    def __enter__(self):
        for one in self._patches:
            one.start()
        return self

    def __exit__(self, *_):
        for one in self._patches:
            one.stop()

    def answer(self):
        """The number of lazy tensors, those of them that were read whole, and the bytes that were read of all checkpoints."""
        whole = sum(isinstance(made, _lazy.LazyTensor) and made._value is not None for made in self._lazy)
        return {"lazy": len(self._lazy), "whole": whole, "read": sum(one.stats["bytes"] for one in self._opened)}
