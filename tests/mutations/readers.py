"""The tensors that torch reads of a checkpoint. A process of its own gets a question in JSON on each line, and answers
it.

This module never runs code of a file. `torch.load` gets `weights_only=True`, or an unpickler that knows a few names of
torch, and makes an object without methods for every other name.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import sys
import types
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import _utils, placement_types

MEMORY_MAX = 4 << 30
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
NAMES = {
    "torch._utils": (
        "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter", "_rebuild_parameter_with_state",
    ),
    "collections": ("OrderedDict", "Counter"),
    "builtins": ("set", "frozenset", "complex", "bytearray", "slice", "range"),
    "_codecs": ("encode",),
    "torch": ("Size", "Tensor", "device"),
    "torch.nn.parameter": ("Parameter",),
    "torch.storage": ("UntypedStorage",),
    "pathlib": ("PosixPath", "PurePosixPath"),
}  # fmt: skip


class Thing:
    """An object in place of an unknown class. It accepts every call, and stores its attributes."""

    def __init__(self, *args, **kwargs):
        self.args = args

    def __setstate__(self, state):
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __setitem__(self, key, value):
        pass

    def append(self, value):
        pass

    def extend(self, values):
        pass


def typed(function, kind, args, state):
    """Replaces `_rebuild_from_type_v2`. Plain tensors are returned as they are, and tensors of several ranks as a
    `Thing`."""
    if isinstance(kind, type) and issubclass(kind, Thing):
        made = kind()
        made.whole, made.state = tuple(args[2]), state
        return made
    return function(*args)


class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) in (("torch._tensor", "_rebuild_from_type_v2"), ("torch.tensor", "_rebuild_from_type_v2")):
            return typed
        if (module, name) == ("builtins", "getattr"):
            return lambda *args: Thing
        of_torch = module in ("torch", "torch.cuda") and getattr(torch, name, None)
        is_plain = isinstance(of_torch, torch.dtype) or (isinstance(of_torch, type) and name.endswith("Storage"))
        of_dcp = module.startswith(("torch.distributed.checkpoint.", "torch.distributed._shard.sharded_tensor.metadata"))
        if is_plain or name in NAMES.get(module, ()) or (of_dcp and name[:1].isupper() | name.startswith(("_Sto", "_MEM"))):
            return super().find_class(module, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        return type(name, (Thing,), {"__module__": module})


def load_pickle(file, **_):
    return Unpickler(file).load()


PICKLE = types.SimpleNamespace(
    __name__="pickle", Unpickler=Unpickler, load=load_pickle, loads=lambda data, **_: load_pickle(io.BytesIO(data))
)
# torch reads `.metadata` with a plain `pickle.load`, which would run code of a changed file.
filesystem.pickle = types.SimpleNamespace(load=load_pickle, loads=PICKLE.loads, dumps=pickle.dumps, dump=pickle.dump)


def load(path, safely=False):
    if safely:
        return torch.load(path, map_location="cpu", weights_only=True)
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=PICKLE)


def named(value, path=(), found=None):
    """The tensors of dicts and lists under their full names."""
    found = {} if found is None else found
    if isinstance(value, torch.Tensor) or (isinstance(value, Thing) and hasattr(value, "whole")):
        found[".".join(path)] = value
    elif isinstance(value, dict):
        for key, part in value.items():
            named(part, (*path, str(key)), found)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            named(part, (*path, str(number)), found)
    return found


def of_index(folder):
    names = json.loads((folder / "pytorch_model.bin.index.json").read_text())["weight_map"]
    files = {path.name: named(load(path, True)) for path in sorted(folder.glob("*.bin"))}
    found = {name: tensor for tensors in files.values() for name, tensor in tensors.items()}
    return found | {name: files[file][name] for name, file in names.items()}


def of_dcp(folder):
    metadata = dcp.FileSystemReader(folder).read_metadata()
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensor = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            if tensor.numel():
                tensor.reshape(-1).view(torch.uint8).fill_(0xA5)
            found[name] = tensor
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


def of_ranks(folder):
    """Tensors that are joined of parts, by the rule of torch for the place of each part."""
    files = sorted(folder.glob("model_world_size_*.pt"), key=lambda path: int(path.stem.split("_")[-1]))
    found = {}
    for path in reversed(files):
        for name, value in named(load(path)).items():
            if isinstance(value, torch.Tensor):
                found[name] = value
                continue
            for local, offset in parts(value):
                if not isinstance(found.get(name), torch.Tensor) or tuple(found[name].shape) != value.whole:
                    found[name] = torch.zeros(value.whole, dtype=local.dtype)
                place = tuple(slice(start, start + size) for start, size in zip(offset, local.shape))
                found[name][place] = local
    return found


def parts(value):
    if type(value).__name__ == "ShardedTensor":
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in value.state[0]]
    state = value.state[1] if isinstance(value.state, tuple) else value.state
    spec = state["_spec"]
    placements = [placement(one) for one in spec.placements]
    sizes, at = mesh(spec.mesh)
    shape, offset = _utils._compute_local_shape_and_global_offset(value.whole, sizes, at, placements)
    local = state["_local_tensor"]
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"a part of shape {tuple(local.shape)} in the place of {shape}")
    return [(local, offset)]


def placement(one):
    name = type(one).__name__
    if name == "Shard":
        return placement_types.Shard(one.dim)
    if name == "_StridedShard":
        return placement_types._StridedShard(one.dim, split_factor=one.split_factor)
    if name == "Replicate":
        return placement_types.Replicate()
    raise ValueError(f"placement {name}")


def mesh(mesh):
    if hasattr(mesh, "mesh"):
        return tuple(mesh.mesh.shape), list(mesh._coordinate_on_dim)
    layout = mesh._layout
    sizes = layout.shape if hasattr(layout, "shape") else [size for axis in layout.axes for size in axis.shape]
    return tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,), list(mesh._coordinate_on_dim)


def of_zero(folder, joined):
    """The model in F32, joined from the optimizer states of all ranks, or the module of the model states."""
    tag = folder / (folder / "latest").read_text().strip()
    states = [load(path) for path in ranks(tag, "*_model_states.pt")]
    is_zero3 = not (tag / "mp_rank_00_model_states.pt").exists()
    if not is_zero3 and not joined:
        return dict(states[0]["module"])
    optims = [load(path)["optimizer_state_dict"] for path in ranks(tag, "*_optim_states.pt")]
    groups = [one["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"] for one in optims]
    found = {name: tensor for name, tensor in states[0]["module"].items() if name in states[0]["buffer_names"]}
    if is_zero3:
        of_zero3(states, [torch.cat([part.reshape(-1) for part in one]) for one in groups], found)
    else:
        for number, shapes in enumerate(states[0]["param_shapes"]):
            flat, at = torch.cat([one[number] for one in groups]), 0
            for name, shape in shapes.items():
                found[name] = flat[at : at + shape.numel()].reshape(shape)
                at += shape.numel()
        found |= {name: states[0]["module"][name] for name in states[0].get("frozen_param_shapes") or ()}
    found |= {name: found[other] for name, other in states[0].get("shared_params", {}).items()}
    return {name: found.get(name, tensor) for name, tensor in states[0]["module"].items()}


def of_zero3(states, flats, found):
    at = 0
    for shapes in states[0]["param_shapes"]:
        for name, shape in shapes.items():
            size = -(-shape.numel() // len(flats))
            found[name] = torch.cat([flat[at : at + size] for flat in flats])[: shape.numel()].reshape(shape)
            at += size
    untrained(states, found)


def untrained(states, found):
    """Tensors that are not trained. The ranks of ZeRO-3 have parts of them in their model states."""
    for name, shape in (states[0]["frozen_param_shapes"] or {}).items():
        pieces = torch.cat([state["frozen_param_fragments"][name].reshape(-1) for state in states])
        found[name] = pieces[: shape.numel()].reshape(shape)


def ranks(tag, names):
    return sorted(tag.glob(names), key=lambda path: int(path.name.split("_rank_")[1].split("_")[0]))


def of_universal(folder):
    tag = folder / (folder / "latest_universal").read_text().strip()
    states = [load(path) for path in ranks(tag, "*_model_states.pt")]
    shapes = {name: shape for group in states[0]["param_shapes"] for name, shape in group.items()}
    found = dict(states[0]["module"])
    if len(states) > 1:
        untrained(states, found)
    for name, shape in shapes.items():
        saved = load(tag / "zero" / name / "fp32.pt")
        found[name] = (saved if isinstance(saved, torch.Tensor) else saved["param"]).reshape(shape)
    return found | {name: found[other] for name, other in states[0].get("shared_params", {}).items()}


KINDS = {
    "file": lambda path: named(load(path, True)),
    # This way is for files that `weights_only` refuses because of an unknown name or operation.
    "file, full": lambda path: named(load(path)),
    "index": of_index,
    "dcp": of_dcp,
    "ranks": of_ranks,
    "zero": lambda path: of_zero(path, False),
    "zero, fp32": lambda path: of_zero(path, True),
    "universal": of_universal,
}


def summary(tensor):
    plain = tensor.detach().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [DTYPES.get(plain.dtype, str(plain.dtype)), list(plain.shape), hashlib.sha256(data).hexdigest()]


def answer(kind, path):
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            found = KINDS[kind](Path(path))
            return {"tensors": {name: summary(tensor) for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}}
    except BaseException as error:  # A changed file may cause any exception.
        cause = getattr(error, "failures", None)
        text = next(iter(cause.values()))[0] if cause else error
        return {"refused": f"{type(text).__name__}: {text}"[:600]}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    torch.set_num_threads(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_MAX, taken + MEMORY_MAX))
    for line in sys.stdin:
        answers.write(json.dumps(answer(**json.loads(line))) + "\n")


main()
