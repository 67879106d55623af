"""The interface of TensorRT-LLM for which a weight loader is written.

The package of TensorRT-LLM can only be installed on machines with a GPU. So the modules below are imported from a
checkout of its sources, if the variable TENSORRT_LLM_SOURCES names one. Everything else that these modules import is
replaced by a class without code. Without sources, this module has replacements with the methods of the published
classes.
"""

import ast
import enum
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import sys
import threading
import types
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Optional, Union

import torch

SOURCES = os.environ.get("TENSORRT_LLM_SOURCES")
CHECKPOINTS = "tensorrt_llm._torch.models.checkpoints"
GENUINE = [f"{CHECKPOINTS}.{name}" for name in ("base_weight_loader", "base_checkpoint_loader", "hf.checkpoint_loader")]


class _Nothing(type):
    """The metaclass of replacements for names that a genuine module imports, but a weight loader never uses. They can
    be called, and have every attribute."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None


def _nothing(name):
    # If it is used as a decorator with an argument, it returns the class that it decorates.
    body = {"__init__": lambda self, *_, **__: None, "__call__": lambda self, made: made}
    return _Nothing(name, (), body)


class BaseWeightLoader(ABC):
    @abstractmethod
    def load_weights(self, checkpoint_dir, mapping, **kwargs):
        """The weights of a folder by name."""

    def cleanup(self):
        """Does nothing."""


class ConsumableWeightsDict:
    """A mapping from which modules remove what they have loaded."""

    def __init__(self, weights):
        self._weights, self._lock = weights, threading.Lock()

    def __getitem__(self, name):
        return self._weights[name]

    def __len__(self):
        return len(self._weights)

    def keys(self):
        with self._lock:
            return list(self._weights)

    def items(self):
        with self._lock:
            return list(self._weights.items())

    def mark_consumed(self, prefix):
        with self._lock:
            gone = [name for name in self._weights if name.startswith(f"{prefix}.")]
            for name in gone:
                del self._weights[name]
        return len(gone)


class HfCheckpointLoader:
    def __init__(self, *, weight_loader):
        self.weight_loader = weight_loader

    def load_weights(self, checkpoint_dir, mapping, **kwargs):
        return self.weight_loader.load_weights(checkpoint_dir, mapping=mapping, **kwargs)

    def cleanup(self):
        self.weight_loader.cleanup()


class TensorParallelMode:
    COLUMN, ROW = 0, 1


def load_weight_shard(weight, tensor_parallel_size, tensor_parallel_rank, tensor_parallel_mode):
    """The part of a weight for a rank. A column-parallel layer is cut by rows of the weight, and a row-parallel layer
    by columns."""
    dim = tensor_parallel_mode
    if dim is None or tensor_parallel_size <= 1 or len(weight.shape) <= dim:
        return weight.to("cpu")
    length = math.ceil(weight.shape[dim] / tensor_parallel_size)
    index = [slice(size) for size in weight.shape]
    index[dim] = slice(tensor_parallel_rank * length, min((tensor_parallel_rank + 1) * length, weight.shape[dim]))
    return weight[tuple(index)].to("cpu")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of the package, in the sources or as a module of replacements."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "tensorrt_llm":
            return None
        if SOURCES and name in GENUINE:
            return importlib.util.spec_from_file_location(name, _file_of(name))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: _attribute(module, name)
        if not SOURCES and spec.name == GENUINE[0]:
            module.BaseWeightLoader, module.ConsumableWeightsDict = BaseWeightLoader, ConsumableWeightsDict
        return module

    def exec_module(self, module):
        pass


def _attribute(module, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{module.__name__}.{name}" in GENUINE:
        return importlib.import_module(f"{module.__name__}.{name}")
    made = _nothing(name)
    setattr(module, name, made)
    return made


def _file_of(module):
    return Path(SOURCES, *module.split(".")).with_suffix(".py")


def _published_slicing():
    """The function of the sources that cuts a weight for a rank, and the enumeration of its modes. Only these two are
    run, because their module imports kernels."""
    file = _file_of("tensorrt_llm._torch.modules.linear")
    wanted = ("TensorParallelMode", "load_weight_shard")
    parts = [part for part in ast.parse(file.read_text()).body if getattr(part, "name", None) in wanted]
    names = {"enum": enum, "math": math, "torch": torch, "Optional": Optional, "Union": Union}
    names.update(is_device_integrated=lambda: False, logger=_nothing("logger"))
    exec(compile(ast.Module(parts, []), str(file), "exec"), names)
    return names["load_weight_shard"], names["TensorParallelMode"]


if importlib.util.find_spec("tensorrt_llm") is None:
    sys.meta_path.append(_Finder())
    if SOURCES:
        load_weight_shard, TensorParallelMode = _published_slicing()
else:
    from tensorrt_llm._torch.modules.linear import TensorParallelMode, load_weight_shard  # noqa: F401

if SOURCES or "tensorrt_llm" in sys.modules:
    from tensorrt_llm._torch.models.checkpoints.base_weight_loader import BaseWeightLoader, ConsumableWeightsDict  # noqa: F401
    from tensorrt_llm._torch.models.checkpoints.hf.checkpoint_loader import HfCheckpointLoader  # noqa: F401
