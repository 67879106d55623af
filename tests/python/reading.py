"""Reads a file with a genuine reader, safetensors' own `safe_open`, and checks the result."""

import numpy as np
from safetensors import safe_open

import oracle

# Dtypes that numpy can hold; the rest is compared as the bytes that the header points at.
NUMPY_DTYPES = {"BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"}
NUMPY_MAX_DIMS = 64
NUMPY_MAX_SIZE = 2**40


def summary(tensors):
    """Name -> (dtype, shape, sha256) of the manifest's form."""
    return {name: (t["dtype"], tuple(t["shape"]), t["sha256"]) for name, t in tensors.items()}


def raw_summary(path):
    """The same of a file, from its header and bytes."""
    tensors = oracle.tensor_bytes(path).items()
    return {name: (dtype, tuple(shape), oracle.sha256(data)) for name, (dtype, shape, data) in tensors}


def genuine_summary(path, backend):
    """Checks through `safe_open`; tensors that numpy cannot hold are left to their raw bytes."""
    raw = oracle.tensor_bytes(path)
    found = {}
    with safe_open(path, framework="np", backend=backend) as file:
        for name in file.keys():
            part = file.get_slice(name)
            dtype, shape = part.get_dtype(), tuple(part.get_shape())
            data = file.get_tensor(name) if fits_numpy(dtype, shape) else raw[name][2]
            found[name] = (dtype, shape, oracle.sha256(data.tobytes() if isinstance(data, np.ndarray) else data))
    return found


def fits_numpy(dtype, shape):
    return dtype in NUMPY_DTYPES and len(shape) <= NUMPY_MAX_DIMS and max(shape, default=0) < NUMPY_MAX_SIZE
