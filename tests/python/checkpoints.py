"""Makes checkpoints for the tests: Hugging Face sets, and DCP sets that are cut in every way in which ranks cut
tensors."""

import itertools
import json
import math
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import oracle

FORMAT = {"format": "pt"}
SHARD_LEN = 1_000_000
WIDTHS = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}


def write_shard(path, tensors, metadata=FORMAT):
    """Writes a safetensors file without the package. `tensors` is a list of (name, dtype, shape, bytes) in the order of
    the data."""
    entries, end = {}, 0
    if metadata:
        entries["__metadata__"] = metadata
    for name, dtype, shape, data in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.writelines(data for *_, data in tensors)


def write_weight_map(folder, shards, stem="model"):
    """Writes a weight map. `shards` maps each file name to the names of the tensors in the file."""
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    content = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    Path(folder, f"{stem}.safetensors.index.json").write_text(json.dumps(content))


def random_bytes(seed, length):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes()


def hf_set(folder, n_shards=3, megabytes=4, seed=1):
    """Writes a Hugging Face set by the genuine writer. Each shard has odd shapes, an empty tensor and a scalar."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    shards = {}
    for number in range(1, n_shards + 1):
        name = f"model-{number:05}-of-{n_shards:05}.safetensors"
        tensors = _hf_tensors(rng, number, megabytes * 1_000_000 // n_shards)
        save_file(tensors, folder / name, metadata=FORMAT)
        (folder / name).chmod(0o644)
        shards[name] = list(tensors)
    write_weight_map(folder, shards)
    (folder / "config.json").write_text('{"model_type": "test"}\n')
    return folder


def _hf_tensors(rng, shard, length):
    parts = {"F32": (np.float32, 4), "F16": (np.float16, 3), "U8": (np.uint8, 2), "I64": (np.int64, 1)}
    tensors = {}
    for dtype, (numpy_dtype, share) in parts.items():
        count = max(length * share // 10 // np.dtype(numpy_dtype).itemsize - shard, 3)
        data = rng.integers(0, 256, count * np.dtype(numpy_dtype).itemsize, np.uint8)
        tensors[f"layers.{shard}.{dtype}"] = data.view(numpy_dtype)
    tensors[f"layers.{shard}.rows"] = rng.standard_normal((7, 33, 5)).astype(np.float32)
    tensors[f"layers.{shard}.scalar"] = np.array(shard, np.float64)
    tensors[f"layers.{shard}.empty"] = np.zeros((0, 5), np.float32)
    return tensors


def hf_whole(folder):
    return oracle.from_weight_map(Path(folder, "model.safetensors.index.json"))


def boxes(shape, counts):
    """(offset, shape) of the piece of each rank, on a mesh with `counts` ranks in each dimension. Tensors are cut as
    torch.chunk cuts them."""
    per_dimension = []
    for size, count in zip(shape, counts):
        step = -(-size // count)
        starts = [min(i * step, size) for i in range(count)]
        per_dimension.append([(start, min(step, size - start)) for start in starts])
    for cell in itertools.product(*per_dimension):
        yield [start for start, _ in cell], [length for _, length in cell]


class DcpSet:
    """Collects the pieces of a DCP checkpoint for each rank. Call `cut` for each tensor, and then `save`."""

    def __init__(self, seed=1):
        self._rng = np.random.default_rng(seed)
        self._ranks = {}
        self.tensors = {}

    def cut(self, name, shape, counts, width=4):
        """Adds a tensor of random bytes, which is cut over a mesh. `width` is the size of an element in bytes."""
        data = self._rng.integers(0, 256, math.prod(shape) * width, np.uint8).reshape(*shape, width)
        self.tensors[name] = data
        self.place(name, data, boxes(shape, counts), width)
        return self

    def place(self, name, data, pieces, width):
        for rank, (offset, shape) in enumerate(pieces, 1):
            where = tuple(slice(o, o + n) for o, n in zip(offset, shape))
            entry = (name, WIDTHS[width], shape, np.ascontiguousarray(data[where]).tobytes(), offset)
            self._ranks.setdefault(rank, []).append(entry)

    def save(self, folder):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for rank, entries in self._ranks.items():
            entries.sort(key=lambda e: (-oracle.BITS[e[1]], e[0]))
            info = {name: {"saved_offsets": offset} for name, *_, offset in entries}
            metadata = {**FORMAT, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
            write_shard(folder / dcp_name(rank), [entry[:4] for entry in entries], metadata)
        return folder


def dcp_name(rank):
    return f"shard-{rank:05}-model-00001-of-00001.safetensors"


def row_wise(folder, ranks=4):
    one = DcpSet(2).cut("embed", (4099, 257), (ranks, 1)).cut("norm", (4099,), (ranks,), 2)
    return one.cut("bytes", (1000, 31), (ranks, 1), 1).save(folder)


def column_wise(folder, ranks=4):
    return DcpSet(3).cut("up", (1500, 1026), (1, ranks), 2).cut("down", (333, 77), (1, ranks), 8).save(folder)


def grid_2d(folder):
    return DcpSet(4).cut("a", (1001, 801), (2, 3)).cut("b", (64, 9000), (3, 2), 2).save(folder)


def uneven(folder):
    """Writes a DCP set in which the parts of some ranks are smaller or empty."""
    one = DcpSet(5).cut("five", (5, 70001), (4, 1), 2).cut("three", (3, 5), (4, 1)).cut("one", (1,), (4,), 8)
    return one.cut("wide", (100, 10), (1, 7), 4).save(folder)


def cube_3d(folder):
    return DcpSet(6).cut("cube", (48, 51, 130), (2, 2, 2)).cut("thin", (9, 300, 7), (2, 2, 2), 2).save(folder)


def rows_of_one(folder, ranks=4):
    """Writes a matrix with one row for each rank, so that the other shards do not show that the last shard is lost."""
    return DcpSet(7).cut("w", (ranks, 6), (ranks, 1)).cut("replicated", (5,), (1,), 8).save(folder)


def shard_name(number, total, stem="model"):
    return f"{stem}-{number:05}-of-{total:05}.safetensors"


def write_one(path, tensor, seed, metadata=FORMAT, length=SHARD_LEN):
    """Writes a shard with one tensor of random bytes."""
    data = random_bytes(seed, length)
    write_shard(path, [(tensor, "U8", [length], data)], metadata)


def numbered_set(folder, seed, total=3, stem="model", with_map=True):
    """Writes numbered shards with one tensor each: `t1`, `t2` and so on."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    names = [shard_name(n, total, stem) for n in range(1, total + 1)]
    for number, name in enumerate(names, 1):
        write_one(folder / name, f"t{number}", seed * 100 + number)
    if with_map:
        write_weight_map(folder, {name: [f"t{n}"] for n, name in enumerate(names, 1)}, stem)
    (folder / "config.json").write_text("{}")
    return folder


def overwrite(path, seed=999, length=SHARD_LEN):
    """Writes new bytes of the same length into the same file."""
    with open(path, "r+b") as file:
        file.seek(-length, os.SEEK_END)
        file.write(random_bytes(seed, length))


def part_of(data, tensor):
    """First byte and end of `tensor` in the file content `data`."""
    header = oracle.read_header(data)
    return [header.data_start + offset for offset in header.tensors[tensor]["data_offsets"]]


def hub_cache(folder, checkpoint):
    """Makes the folder of a model in a hub cache: a snapshot of links to the blobs beside it. Returns the snapshot."""
    folder, revision = Path(folder), "a" * 40
    snapshot = folder / "snapshots" / revision
    for made in (snapshot, folder / "blobs", folder / "refs"):
        made.mkdir(parents=True)
    (folder / "refs/main").write_text(revision)
    for file in sorted(Path(checkpoint).iterdir()):
        content = file.read_bytes()
        # The names of large files are their sha256. Other files have their git hash as their name.
        name = oracle.sha256(content) if file.suffix == ".safetensors" else oracle.sha256(content)[:40]
        (folder / "blobs" / name).write_bytes(content)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def sparse_file(path, megabytes):
    """Writes a file of one tensor that consists of holes: the file is long, but takes no disk space."""
    shape = [megabytes * 1_000_000]
    header = json.dumps({"t": {"dtype": "U8", "shape": shape, "data_offsets": [0, shape[0]]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + shape[0])
    return path
