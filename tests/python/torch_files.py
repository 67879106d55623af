"""Writes files like those of torch.save, without torch: numpy arrays as tensors, in stored zip archives."""

import collections
import contextlib
import io
import pickle
import sys
import types
import zipfile

import numpy as np

STORAGES = {"F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage", "I64": "LongStorage", "U8": "ByteStorage"}


class Tensor:
    """A tensor in a storage, which is an array of one dimension. Strides and offset are in elements."""

    def __init__(self, storage, shape=None, dtype="F32", offset=0, strides=None):
        self.storage, self.dtype, self.offset = storage, dtype, offset
        self.shape = tuple(np.shape(storage) if shape is None else shape)
        self.strides = tuple(rows(self.shape) if strides is None else strides)


class Object:
    """An object of a class of another package, with its attributes."""

    def __init__(self, module, name, state=None, args=None):
        self.module, self.name, self.state, self.args = module, name, state, args


def rows(shape):
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return reversed(strides)


def save(path, root, protocol=2, folder="archive"):
    """Writes `root` as torch.save does, with `Tensor` and `Object` in place of tensors and objects."""
    with modules() as named, zipfile.ZipFile(path, "w") as archive:
        def entry(name):
            # The entry has no current time, as in files of torch, so that the same tensors give the same file.
            return zipfile.ZipInfo(f"{folder}/{name}")

        storages = []
        with archive.open(entry("data.pkl"), "w") as file:
            _Pickler(file, protocol, named, storages).dump(root)
        archive.writestr(entry("byteorder"), "little")
        for number, storage in enumerate(storages):
            archive.writestr(entry(f"data/{number}"), np.ascontiguousarray(storage).tobytes())
        archive.writestr(entry("version"), "3\n")


def dtensor(named, local, whole, rank, ranks, dim, axis=None):
    """The part `local` that a rank has of an F32 DTensor, which is cut in the dimension `dim`. `named` is the function
    that `modules` returns.

    `axis` is the number of ranks in the last axis of a mesh, if the tensor is cut over that axis only.
    """
    tensors = "torch.distributed.tensor"
    kind = named(tensors, "DTensor", "class")
    numbers = Tensor(np.arange(ranks), dtype="I64")
    mesh = {"device_type": "cpu", "mesh": numbers, "mesh_dim_names": None, "_coordinate_on_dim": [rank]}
    if axis:
        layout = Object("torch.distributed._mesh_layout", "_MeshLayout", state={"shape": (axis,), "stride": (1,)})
        mesh = {"_rank_map": numbers, "_layout": layout, "_coordinate_on_dim": (rank % axis,), "_rank": rank}
    placement = Object(f"{tensors}.placement_types", "Shard", state={"dim": dim})
    spec = {"mesh": Object("torch.distributed.device_mesh", "DeviceMesh", state=mesh), "placements": (placement,)}
    state = {"_local_tensor": local, "_spec": Object(f"{tensors}._dtensor_spec", "DTensorSpec", state=spec)}
    rebuild = named("torch._utils", "_rebuild_wrapper_subclass", "function")
    call = (kind, named("torch", "float32", "class"), tuple(whole), tuple(rows(whole)))
    return Object("torch._tensor", "_rebuild_from_type_v2", args=(rebuild, kind, call, state))


@contextlib.contextmanager
def modules():
    """Yields a function that makes classes and functions. Pickles can refer to them by name within the block."""
    before = dict(sys.modules)
    try:
        yield _named
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]
        sys.modules.update(before)


def changed(data, change):
    """The pickle `data`, after `change` was called with its root. Objects have the attributes `args`, with the
    arguments of their call, and `state`."""
    with modules() as named:

        class Unpickler(pickle.Unpickler):
            def find_class(self, module, name):
                kind = named(module, name, "class")
                kind.__new__ = _called
                kind.__setstate__ = lambda own, state: setattr(own, "state", state)
                kind.__reduce_ex__ = lambda own, _: (kind, own.args) if own.state is None else (kind, own.args, own.state)
                return kind

        root = Unpickler(io.BytesIO(data)).load()
        change(root)
        return pickle.dumps(root, 4)


def _called(kind, *args):
    made = object.__new__(kind)
    made.args, made.state = args, None
    return made


def _named(module, name, kind):
    """A class or a function of this name, in a module of this name."""
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    if not hasattr(sys.modules[module], name):
        made = type(name, (), {}) if kind == "class" else types.FunctionType((lambda: None).__code__, {}, name)
        made.__module__, made.__qualname__ = module, name
        setattr(sys.modules[module], name, made)
    return getattr(sys.modules[module], name)


class _Pickler(pickle.Pickler):
    def __init__(self, file, protocol, named, storages):
        super().__init__(file, protocol)
        self.named, self.storages, self.numbers = named, storages, {}

    def persistent_id(self, value):
        if not isinstance(value, _Storage):
            return None
        if id(value.array) not in self.numbers:
            self.numbers[id(value.array)] = len(self.storages)
            self.storages.append(value.array)
        kind = self.named("torch", STORAGES[value.dtype], "class")
        return ("storage", kind, str(self.numbers[id(value.array)]), "cpu", value.array.size)

    def reducer_override(self, value):
        if isinstance(value, Tensor):
            rebuild = self.named("torch._utils", "_rebuild_tensor_v2", "function")
            hooks = collections.OrderedDict()
            storage = _Storage(value.storage, value.dtype)
            return rebuild, (storage, value.offset, value.shape, value.strides, False, hooks)
        if isinstance(value, Object):
            kind = self.named(value.module, value.name, "class")
            if value.args is not None:
                return kind, value.args
            return kind, (), value.state
        return NotImplemented


class _Storage:
    def __init__(self, array, dtype):
        self.array, self.dtype = array, dtype
