"""Views of checkpoints by plain and slow code, to compare mounted views with: each function takes and gives tensors.

Shares nothing with tensorfs. Sources are read by `oracle.tensors_of`.
"""

import json
import os
from pathlib import Path

import numpy as np

import oracle

MAP = "model.safetensors.index.json"


def in_disk_order(tensors):
    return sorted(tensors, key=lambda t: (t.first, t.name))


def split_by_size(tensors, limit):
    """As `split_torch_state_dict_into_shards` of huggingface_hub goes about it."""
    shards, current, size = [], [], 0
    for tensor in tensors:
        if len(tensor.data) > limit:
            shards.append([tensor])
            continue
        if current and size + len(tensor.data) > limit:
            shards.append(current)
            current, size = [], 0
        current.append(tensor)
        size += len(tensor.data)
    return shards + ([current] if current else [])


def folder_of(groups, total, metadata, stem="model", map_metadata=None):
    """File name -> bytes of the folder: `groups` are the number of each file and its tensors."""
    if total == 1 and [number for number, _ in groups] == [1] and map_metadata is None:
        return {f"{stem}.safetensors": oracle.write(list(groups[0][1]), metadata)}
    files, weight_map, size = {}, {}, 0
    for number, tensors in groups:
        name = f"{stem}-{number:05}-of-{total:05}.safetensors"
        files[name] = oracle.write(list(tensors), metadata)
        weight_map.update({tensor.name: name for tensor in tensors})
        size += sum(len(tensor.data) for tensor in tensors)
    content = {"metadata": {**(map_metadata or {}), "total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    files[f"{stem}.safetensors.index.json"] = (json.dumps(content, indent=2) + "\n").encode()
    return files


def shown(folder):
    """File name -> bytes of the weights and weight maps in a mounted folder."""
    paths = (path for path in Path(folder).iterdir() if ".safetensors" in path.name)
    return {path.name: path.read_bytes() for path in paths}


def array(tensor):
    """The elements of a tensor, each with its bytes as one dimension more."""
    width = oracle.BITS[tensor.dtype] // 8
    return np.frombuffer(tensor.data, np.uint8).reshape(*tensor.shape, width)


def made(name, dtype, elements):
    return oracle.Tensor(name, dtype, list(elements.shape[:-1]), np.ascontiguousarray(elements).tobytes(), ())


def split(tensor, names, dim, sizes):
    """The tensor in parts of these sizes along a dimension."""
    parts = np.split(array(tensor), np.cumsum(sizes)[:-1], axis=dim)
    return [made(name, tensor.dtype, part) for name, part in zip(names, parts)]


def fuse(tensors, name, dim):
    """The tensors one after the other along a dimension."""
    return made(name, tensors[0].dtype, np.concatenate([array(tensor) for tensor in tensors], axis=dim))


def contents(tensors):
    """Name -> dtype, shape and bytes, as `oracle.tensor_bytes` reads them from a file."""
    return {tensor.name: (tensor.dtype, tensor.shape, tensor.data) for tensor in tensors}


def chunk(tensor, dim, ranks, rank, parts=1):
    """The slice of a rank as `torch.chunk` cuts it, from each of the equal parts of the tensor."""
    slices = []
    for part in np.split(array(tensor), parts, axis=dim):
        size = -(-part.shape[dim] // ranks)
        slices.append(np.take(part, range(min(size * rank, part.shape[dim]), min(size * (rank + 1), part.shape[dim])), axis=dim))
    return made(tensor.name, tensor.dtype, np.concatenate(slices, axis=dim))


def version(path):
    return os.getxattr(path, "user.tensorfs.version")
