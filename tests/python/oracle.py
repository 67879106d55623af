"""The virtual file that a folder of shards must become, built by plain and slow code.

This module shares no code with tensorfs. It reads the shards, places the pieces and writes the header by the documented
rules, so that a mounted file can be compared with its result byte for byte.
"""

import collections
import dataclasses
import hashlib
import io
import json
import math
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}
# The names of dtypes, by their number in a file.
BINTENSORS_DTYPES = [
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "F64", "I64", "U64",
]
# The names of dtypes, by their text in a file: a code of numpy, or a name of torch after a NUL.
TENSORIZER_DTYPES = {
    "|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<i2": "I16", "<u2": "U16", "<f2": "F16", "<i4": "I32", "<u4": "U32",
    "<f4": "F32", "<f8": "F64", "<i8": "I64", "<u8": "U64", "<c8": "C64", "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ", "torch.float8_e8m0fnu": "F8_E8M0", "torch.float4_e2m1fn_x2": "F4",
}
DATA_ALIGNMENT = 4096
DCP_KEYS = {"DCP_VERSION", "DCP_SHARDING_INFO"}


@dataclasses.dataclass
class Header:
    """The header of a safetensors file. `data_start` is the first byte after the header."""

    metadata: dict
    tensors: dict
    data_start: int


@dataclasses.dataclass
class Piece:
    """The part of a tensor that one shard has. `box` is (offset in each dimension, shape), in elements."""

    shard: str
    start: int
    data: bytes
    box: tuple


@dataclasses.dataclass
class Tensor:
    name: str
    dtype: str
    shape: list
    data: bytes
    first: tuple


def read_header(data):
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    metadata = entries.pop("__metadata__", None) or {}
    return Header(metadata, {name: _entry(value) for name, value in entries.items()}, 8 + length)


def _entry(value):
    """The genuine reader happens to accept an entry that is written as an array."""
    return dict(zip(("dtype", "shape", "data_offsets"), value)) if isinstance(value, list) else value


def read_header_of(path):
    with open(path, "rb") as file:
        start = file.read(8)
        return read_header(start + file.read(int.from_bytes(start, "little")))


def tensor_bytes(path):
    """Name -> (dtype, shape, bytes) of each tensor of a safetensors file, by the offsets in its header. Works for any
    dtype."""
    data = Path(path).read_bytes()
    header = read_header(data)
    return {
        name: (entry["dtype"], entry["shape"], _slice(data, header, entry)) for name, entry in header.tensors.items()
    }


def _slice(data, header, entry):
    start, end = entry["data_offsets"]
    return data[header.data_start + start : header.data_start + end]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def numeric(name):
    """A sort key that puts `x-2` before `x-10`."""
    parts = re.split(r"(\d+)", name)
    return [int(p) if i % 2 else p for i, p in enumerate(parts)], name


def from_weight_map(path):
    """The virtual file of the Hugging Face set that the weight map at `path` describes."""
    return write(*_of_weight_map(Path(path)))


def _of_weight_map(path):
    names = set(json.loads(path.read_text())["weight_map"].values())
    return _whole_tensors([path.with_name(name) for name in names])


def tensors_of(folder):
    """The tensors and the metadata of a folder with one set of shards: rank shards, or shards of whole tensors."""
    if list(folder.glob("shard-*.safetensors")):
        return _dcp_tensors(folder)
    maps = list(folder.glob("*.safetensors.index.json"))
    return _of_weight_map(maps[0]) if maps else _whole_tensors(list(folder.glob("*.safetensors")))


def whole_tensors(paths):
    """The virtual file of shards that hold whole tensors."""
    return write(*_whole_tensors(paths))


def _whole_tensors(paths):
    tensors, metadata = [], {}
    for path in sorted(paths, key=lambda p: numeric(p.name)):
        data = path.read_bytes()
        header = read_header(data)
        _merge(metadata, header.metadata)
        for name, entry in header.tensors.items():
            first = (numeric(path.name), entry["data_offsets"][0])
            tensors.append(Tensor(name, entry["dtype"], entry["shape"], _slice(data, header, entry), first))
    return tensors, metadata


def from_dcp(folder):
    """The virtual file of a folder of DCP shards."""
    return write(*_dcp_tensors(folder))


def _dcp_tensors(folder):
    pieces, metadata = {}, {}
    for path in sorted(Path(folder).glob("shard-*.safetensors"), key=lambda p: numeric(p.name)):
        data = path.read_bytes()
        header = read_header(data)
        info = json.loads(header.metadata["DCP_SHARDING_INFO"])
        _merge(metadata, header.metadata)
        for name, entry in header.tensors.items():
            note = info[name]
            name = note.get("logical_fqn", name)
            offsets = list(note["saved_offsets"])
            if entry["dtype"] == "F4" and offsets:
                offsets[-1] *= 2
            piece = Piece(
                path.name, entry["data_offsets"][0], _slice(data, header, entry), (offsets, entry["shape"])
            )
            pieces.setdefault((name, entry["dtype"]), []).append(piece)
    return [_assemble(name, dtype, found) for (name, dtype), found in pieces.items()], metadata


def from_bintensors(path, older=False):
    """The virtual file of a bintensors file. `older` selects the older layout, because the file does not say which
    layout it has."""
    data = Path(path).read_bytes()
    metadata, entries = _Bincode(data[8:]).header(older)
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = [
        Tensor(name, BINTENSORS_DTYPES[dtype], shape, data[start + begin : start + end], (0, begin))
        for name, dtype, shape, begin, end in entries
    ]
    return write(tensors, metadata)


class _Bincode:
    """Reads bincode 2 in its standard configuration."""

    def __init__(self, data):
        self.data = data

    def header(self, older):
        metadata = dict(self.many(lambda: (self.text(), self.text()))) if self.take(1) == b"\1" else {}
        if not older:
            return metadata, self.many(lambda: (self.text(), *self.tensor()))
        tensors = self.many(self.tensor)
        positions = self.many(lambda: (self.text(), self.number()))
        return metadata, [(name, *tensors[at]) for name, at in positions]

    def tensor(self):
        return self.number(), self.many(self.number), self.number(), self.number()

    def many(self, item):
        return [item() for _ in range(self.number())]

    def text(self):
        return self.take(self.number()).decode()

    def number(self):
        first = self.take(1)[0]
        return first if first < 251 else int.from_bytes(self.take({251: 2, 252: 4, 253: 8}[first]), "little")

    def take(self, length):
        taken, self.data = self.data[:length], self.data[length:]
        return taken


def from_tensorizer(path):
    """The virtual file of a tensorizer file. Only its list of tensors is used, not the headers of the tensors."""
    data = Path(path).read_bytes()
    rest, versioned, tensors, zeros = data[73:], data[9] & 2, [], 2**63

    def number(width):
        nonlocal rest
        taken, rest = rest[:width], rest[width:]
        return int.from_bytes(taken, "little")

    def text(width):
        nonlocal rest
        length = number(width)
        taken, rest = rest[:length], rest[length:]
        return taken

    for _ in range(int.from_bytes(data[57:65], "little")):
        long = versioned and number(4) == 5
        name = text(2)
        name = ".".join(map(str, json.loads(name[1:]))) if name[:1] == b"\x1e" else name.decode()
        number(1)
        dtype = TENSORIZER_DTYPES[text(1).decode().split("\0")[-1]]
        shape = [number(8 if long else 4) for _ in range(number(1))]
        shape = [*shape[:-1], shape[-1] * 2] if dtype == "F4" else shape
        _, start, length = number(8), number(8), number(8)
        content = data[start : start + length]
        if length == 0 and 0 not in shape:
            # The tensor is a meta tensor. Its zeros count as bytes after the end of the file.
            content, start = bytes(BITS[dtype] * math.prod(shape) // 8), zeros
            zeros += len(content)
        tensors.append(Tensor(name, dtype, shape, content, (0, start)))
    return write(tensors, {})


def from_torch(paths):
    """The virtual file of files of torch.save, by the unpickler and the zip reader of Python."""
    tensors, pieces = [], {}
    for path in sorted(paths, key=lambda p: numeric(p.name)):
        data = path.read_bytes()
        root, starts = _legacy_torch(data) if data.startswith(LEGACY_TORCH) else _zipped_torch(data)
        def stored(tensor):
            storage, offset, shape, dtype = tensor
            size = BITS[dtype] // 8
            start = starts[storage[1]] + (offset * size if math.prod(shape) else 0)
            return start, _gathered(data[start:], tensor, size)

        named = _torch_names(root)
        of_rank = any(isinstance(value, _OfRanks) for value in named.values())
        for name, value in named.items():
            if not of_rank:
                start, content = stored(value)
                tensors.append(Tensor(name, value[3], list(value[2]), content, (numeric(path.name), start)))
                continue
            held = value.parts() if isinstance(value, _OfRanks) else [(value, [0] * len(value[2]))]
            for tensor, offset in held:
                start, content = stored(tensor)
                piece = Piece(path.name, start, content, (offset, list(tensor[2])))
                pieces.setdefault((name, tensor[3]), []).append(piece)
    tensors += [_assemble(name, dtype, found) for (name, dtype), found in pieces.items()]
    return write(tensors, {"format": "pt"})


def from_deepspeed(run, fp32):
    """The virtual file of the last checkpoint of a run of DeepSpeed: the weights of `module`, or those of `fp32`."""
    folder = run / (run / "latest").read_text().strip()
    paths = sorted(folder.glob("*_states.pt"), key=lambda p: numeric(p.name))
    models = [path for path in paths if path.name.endswith("model_states.pt")]
    if not fp32 and len(models) == 1:
        return from_torch(models)
    roots = {path.name: (path.read_bytes(), *_zipped_torch(path.read_bytes())) for path in paths}

    def run_of(name, tensor):
        """A run of elements in a file: file, first byte, bytes of an element, and bytes of the run."""
        data, _, starts = roots[name]
        (kind, key), offset, shape, dtype = tensor
        size = BITS[dtype] // 8
        start = starts[key] + offset * size
        return name, start, size, data[start : start + math.prod(shape) * size]

    def joined(name, dtype, shape, parts):
        """A tensor that is joined of parts. Each part has its runs, its first element, and its number of elements."""
        data, places = b"", []
        for runs, at, count in parts:
            for file, start, size, content in runs:
                length = len(content) // size
                first, end = min(at, length), min(at + count, length)
                if first < end:
                    places.append((numeric(file), start + first * size))
                    data += content[first * size : end * size]
                at, count = max(at - length, 0), count - (end - first)
            assert count == 0, name
        return Tensor(name, dtype, list(shape), data, min(places))

    states = [(path.name, roots[path.name][1]["optimizer_state_dict"]) for path in paths if path not in models]
    model = roots[models[0].name][1]
    tensors = {}
    for name, tensor in model["module"].items():
        if len(models) == 1 or tensor[2] != (0,):
            file, start, _, content = run_of(models[0].name, tensor)
            tensors[name] = Tensor(name, tensor[3], list(tensor[2]), content, (numeric(file), start))
    at, ranks = 0, len(states)
    for number, group in enumerate(model["param_shapes"]):
        at = 0 if len(models) == 1 else at
        for name, shape in group.items():
            count = math.prod(shape)
            if len(models) == 1:
                runs = [run_of(file, state["single_partition_of_fp32_groups"][number]) for file, state in states]
                parts, step = [(runs, at, count)], count
            else:
                step, parts = -(-count // ranks), []
                for rank, (file, state) in enumerate(states):
                    runs = [run_of(file, tensor) for tensor in state["fp32_flat_groups"]]
                    parts.append((runs, at, max(min(step, count - rank * step), 0)))
            tensors[name] = joined(name, "F32", shape, parts)
            at += step
    for name, shape in (model.get("frozen_param_shapes") or {}).items() if len(models) > 1 else ():
        count, step = math.prod(shape), -(-math.prod(shape) // ranks)
        fragments = [(path.name, roots[path.name][1]["frozen_param_fragments"][name]) for path in models]
        parts = [
            ([run_of(*fragment)], 0, max(min(step, count - rank * step), 0)) for rank, fragment in enumerate(fragments)
        ]
        tensors[name] = joined(name, fragments[0][1][3], shape, parts)
    for name, source in model["shared_params"].items():
        tensors[name] = dataclasses.replace(tensors[source], name=name)
    return write(list(tensors.values()), {"format": "pt"})


# The first pickle of a file of torch before 1.6.
LEGACY_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")


def _zipped_torch(data):
    """The root of the pickle, and the offset at which the data of each storage begins."""
    archive = zipfile.ZipFile(io.BytesIO(data))
    (pkl,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    # `read` is not used, because it checks CRCs, and torch may write 0 in place of each CRC.
    begin, length = _stored_at(data, archive.getinfo(pkl)), archive.getinfo(pkl).file_size
    root = _TorchUnpickler(io.BytesIO(data[begin : begin + length])).load()
    folder = pkl.removesuffix("data.pkl") + "data/"
    entries = [info for info in archive.infolist() if info.filename.startswith(folder)]
    return root, {info.filename.removeprefix(folder): _stored_at(data, info) for info in entries}


def _legacy_torch(data):
    """The root of the pickle, and the offset at which the data of each storage begins, which is after its number of
    elements."""
    file = io.BytesIO(data)
    unpicklers = [_TorchUnpickler(file) for _ in range(5)]
    *_, root, keys = [unpickler.load() for unpickler in unpicklers]
    kinds, starts, at = unpicklers[3].kinds, {}, file.tell()
    for key in keys:
        starts[key] = at + 8
        at += 8 + int.from_bytes(data[at : at + 8], "little") * BITS[kinds[key]] // 8
    assert at == len(data), (at, len(data))
    return root, starts


def _stored_at(data, info):
    """The offset at which the bytes of a stored entry begin."""
    header = info.header_offset
    return header + 30 + sum(int.from_bytes(data[header + at : header + at + 2], "little") for at in (26, 28))


TORCH_DTYPES = {
    "Double": "F64", "Float": "F32", "Half": "F16", "BFloat16": "BF16", "Long": "I64", "Int": "I32", "Short": "I16",
    "Char": "I8", "Byte": "U8", "Bool": "BOOL", "ComplexFloat": "C64", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}


class _TorchTensor(tuple):
    """A tensor: a tuple of storage, offset, shape and dtype, with the strides as an attribute."""


def _torch_tensor(storage, offset, shape, stride, dtype):
    tensor = _TorchTensor((storage, offset, shape, dtype))
    tensor.stride = stride
    return tensor


class _Unknown(dict):
    """An object of an unknown class, with its attributes."""

    def __init__(self, *args):
        super().__init__()

    def __setstate__(self, state):
        state = state[1] if isinstance(state, tuple) and len(state) == 2 else state
        if isinstance(state, dict):
            self.__dict__.update(state)


class _OfRanks:
    """A DTensor or a ShardedTensor."""

    def __init__(self, args, state):
        self.whole, self.state = list(args[2]), state

    def parts(self):
        """The parts that this file has, each with its offset in the whole tensor."""
        if isinstance(self.state[0], list):
            return [(shard.tensor, list(shard.metadata.shard_offsets)) for shard in self.state[0]]
        local, spec = self.state[1]["_local_tensor"], self.state[1]["_spec"]
        mesh = spec.mesh.__dict__
        sizes = [axis.shape[0] for axis in mesh["_layout"].axes] if "_layout" in mesh else mesh["mesh"][2]
        indices = [np.arange(size) for size in self.whole]
        for placement, size, at in zip(spec.placements, sizes, mesh["_coordinate_on_dim"]):
            kind = type(placement).__name__
            if kind != "Replicate":
                own = [indices[placement.dim]]
                if kind == "_StridedShard":
                    own = _chunks(own[0], placement.split_factor)
                indices[placement.dim] = np.concatenate([_chunks(part, size)[at] for part in own])
        for index, size in zip(indices, local[2]):
            assert len(index) == size and (np.diff(index) == 1).all(), (indices, local)
        return [(local, [int(index[0]) if len(index) else 0 for index in indices])]


def _chunks(indices, count):
    """The parts that torch.chunk makes, followed by empty parts up to `count`."""
    length = -(-len(indices) // count)
    return [indices[at * length : (at + 1) * length] for at in range(count)]


class _TorchUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name.endswith("Storage"):
            return TORCH_DTYPES.get(name.removesuffix("Storage"))
        if name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
            return lambda storage, offset, shape, stride, *_: _torch_tensor(storage, offset, shape, stride, storage[0])
        if name == "_rebuild_tensor_v3":
            return lambda storage, offset, shape, stride, grad, hooks, dtype, *_: _torch_tensor(
                storage, offset, shape, stride, dtype
            )
        if name.startswith("_rebuild_parameter"):
            return lambda tensor, *_: tensor
        if name == "_rebuild_from_type_v2":
            return lambda function, kind, args, state: _OfRanks(args, state) if function is None else function(*args)
        if name == "_rebuild_wrapper_subclass":
            return None
        if name == "getattr":
            return lambda outer, inner: type(inner, (_Unknown,), {})
        if module == "torch" and name == "Size":
            return tuple
        if module == "torch" and name in TORCH_DTYPES:
            return TORCH_DTYPES[name]
        return collections.OrderedDict if name == "OrderedDict" else type(name, (_Unknown,), {})

    def __init__(self, file):
        super().__init__(file)
        self.kinds = {}

    def persistent_load(self, key):
        self.kinds[key[2]] = key[1]
        return key[1:3]


class _Attributes:
    """An object of a class of torch with its attributes."""

    def __init__(self, *args):
        pass

    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _DistcpUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return tuple if name == "Size" else type(name, (_Attributes,), {})


def from_distcp(folder):
    """The virtual file of a distributed checkpoint of torch. If one of its containers is a model, the file has only the
    tensors of this model."""
    with open(folder / ".metadata", "rb") as file:
        plan = _DistcpUnpickler(file).load()
    metadata, pieces = plan.state_dict_metadata, {}
    paths = {fqn: path for fqn, path in (plan.planner_data or {}).items() if hasattr(metadata[fqn], "chunks")}
    models = {path[0] for path in paths.values() if len(path) > 1} & {"model", "state_dict"}
    for index, place in plan.storage_data.items():
        path = paths.get(index.fqn)
        if path is None or (models and path[0] not in models):
            continue
        name = index.fqn.split(".", 1)[1] if models else index.fqn
        data = (folder / place.relative_path).read_bytes()
        if not data.startswith(b"PK"):
            # The item is saved as a safetensors file.
            header = read_header(data)
            entry = header.tensors[index.fqn]
            start = header.data_start + entry["data_offsets"][0]
            piece = Piece(place.relative_path, start, _slice(data, header, entry), (list(index.offset), entry["shape"]))
            pieces.setdefault((name, entry["dtype"]), []).append(piece)
            continue
        tensor, starts = _zipped_torch(data[place.offset : place.offset + place.length])
        storage, offset, shape, dtype = tensor
        start = place.offset + starts[storage[1]] + (offset * BITS[dtype] // 8 if math.prod(shape) else 0)
        content = _gathered(data[start : place.offset + place.length], tensor, BITS[dtype] // 8)
        chunks = [(chunk.offsets, chunk.sizes) for chunk in metadata[index.fqn].chunks]
        assert (index.offset, tuple(shape)) in chunks, (index.fqn, index.offset, shape, chunks)
        piece = Piece(place.relative_path, start, content, (list(index.offset), list(shape)))
        pieces.setdefault((name, dtype), []).append(piece)
    return write([_assemble(name, dtype, found) for (name, dtype), found in pieces.items()], {"format": "pt"})


def _gathered(data, tensor, size):
    """The bytes of a tensor in row-major order. `data` begins with its first element."""
    _, _, shape, _ = tensor
    items = sum(np.arange(length).reshape([-1] + [1] * (len(shape) - dim - 1)) * stride
                for dim, (length, stride) in enumerate(zip(shape, tensor.stride)))
    items = np.broadcast_to(items, shape).reshape(-1)
    return np.frombuffer(data[: len(data) // size * size], np.uint8).reshape(-1, size)[items].tobytes()


def _torch_names(root):
    """The tensors of the root, or of the one dict of a model in it, by name."""
    models = [key for key in ("state_dict", "model", "module") if isinstance(root.get(key), dict)]
    return dict(_torch_paths(root[models[0]] if models else root))


def _torch_paths(value):
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if isinstance(inner, (_TorchTensor, _OfRanks)):
            yield str(key), inner
        elif isinstance(inner, (dict, list, tuple)):
            yield from ((f"{key}.{name}", tensor) for name, tensor in _torch_paths(inner))


def _merge(metadata, more):
    for key, value in more.items():
        if key not in DCP_KEYS:
            metadata.setdefault(key, value)


def _assemble(name, dtype, pieces):
    pieces.sort(key=lambda p: (numeric(p.shard), p.start))
    first = (numeric(pieces[0].shard), pieces[0].start)
    n_dims = len(pieces[0].box[1])
    shape = [max(offsets[i] + sizes[i] for offsets, sizes in (p.box for p in pieces)) for i in range(n_dims)]
    if not shape:
        return Tensor(name, dtype, shape, pieces[0].data, first)
    whole = np.zeros(_in_bytes(shape, dtype, BITS[dtype] // 8), np.uint8)
    placed = np.zeros(whole.shape, bool)
    # The first of several equal boxes counts, so the pieces are placed in reverse order.
    for piece in reversed(pieces):
        sizes = _in_bytes(piece.box[1], dtype, BITS[dtype] // 8)
        where = tuple(slice(o, o + n) for o, n in zip(_in_bytes(piece.box[0], dtype, 0), sizes))
        whole[where] = np.frombuffer(piece.data, np.uint8).reshape(sizes)
        placed[where] = True
    assert placed.all(), f"{name} has a hole"
    return Tensor(name, dtype, shape, whole.tobytes(), first)


def _in_bytes(dims, dtype, last):
    """The same place in an array of bytes. Wide elements get one more dimension, and packed elements get a shorter last
    dimension."""
    if BITS[dtype] >= 8:
        return [*dims, last]
    bits = dims[-1] * BITS[dtype]
    assert bits % 8 == 0, "a row of packed elements does not end on a byte"
    return [*dims[:-1], bits // 8]


def write(tensors, metadata):
    """The bytes of the virtual file: tensors in the documented order, a compact JSON header, and data from a page
    boundary on."""
    tensors.sort(key=lambda t: (-BITS[t.dtype], t.first, t.name))
    entries, end = {}, 0
    if metadata:
        entries["__metadata__"] = dict(sorted(metadata.items()))
    for tensor in tensors:
        assert len(tensor.data) * 8 == math.prod(tensor.shape) * BITS[tensor.dtype], tensor.name
        start, end = end, end + len(tensor.data)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % DATA_ALIGNMENT)
    return len(header).to_bytes(8, "little") + header + b"".join(t.data for t in tensors)
