"""Makes files for the tests of `tensorfs.compat.fastsafetensors` and `tensorfs.compat.instanttensor`, and compares
calls of the genuine packages with the same calls of ours."""

import contextlib
import io
import json
import struct
import warnings

from package import FIXTURES, has_torch

if has_torch:
    import torch

WIDTHS = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 0.5,
}
"""Dtypes that both packages know, with the bytes of an element."""


def write(path, tensors, metadata=None, pad=True):
    """Writes a safetensors file. `tensors` has (name, dtype, shape) of each tensor. The bytes differ from tensor to
    tensor."""
    header, data = ({} if metadata is None else {"__metadata__": metadata}), b""
    for number, (name, dtype, shape) in enumerate(tensors):
        count = 1
        for size in shape:
            count *= size
        length = int(count * WIDTHS[dtype])
        made = bytes((7 * number + 3 * index) % (2 if dtype == "BOOL" else 251) for index in range(length))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + length]}
        data += made
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 if pad else 0)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def sorted_files(folder):
    """The safetensors files of a folder of fixtures."""
    return sorted(str(path) for path in (FIXTURES / folder).glob("*.safetensors"))


def plain(value):
    """A value of either package, in a form that can be compared: tensors as dtype, shape and bytes."""
    if has_torch and isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
        return str(value.dtype), list(value.shape), str(value.device), data
    if hasattr(value, "get_raw"):
        return "wrapped", value.device.as_str(), value.dtype.name, value.get_shape(), plain(value.get_raw())
    if hasattr(value, "data_offsets"):
        return value.dtype.name, value.shape, value.data_offsets
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if hasattr(value, "__next__"):
        value = list(value)
    if isinstance(value, (list, tuple)) and not (has_torch and isinstance(value, torch.Size)):
        return [plain(one) for one in value]
    return value


def outcome(call, peer):
    """The value of a call, or its exception."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(call(peer)), None
        except Exception as e:
            return None, e


def compare(test, label, call, genuine, ours):
    """Asserts that a call has the same value with both packages, or that ours raises what the handler of the genuine
    exception catches."""
    with test.subTest(label):
        value, raised = outcome(call, genuine)
        found, ours_raised = outcome(call, ours)
        if raised is None:
            test.assertIsNone(ours_raised, f"only ours raises: {ours_raised!r}")
            test.assertEqual(found, value)
        else:
            test.assertIsNotNone(ours_raised, f"only the genuine package raises: {raised!r}")
            test.assertIsInstance(ours_raised, type(raised), f"genuine: {raised!r}; ours: {ours_raised!r}")


def differs(test, label, call, genuine, ours, expected):
    """Asserts a known difference. `expected` is the class of the exception that only our package raises, or that it
    raises in place of another one. It is "reads" if only the genuine package raises an exception."""
    with test.subTest(label):
        _, raised = outcome(call, genuine)
        _, ours_raised = outcome(call, ours)
        if expected == "reads":
            test.assertIsNotNone(raised)
            test.assertIsNone(ours_raised, f"ours raises: {ours_raised!r}")
        else:
            test.assertIsInstance(ours_raised, expected)
            test.assertNotIsInstance(ours_raised, type(raised)) if raised is not None else None
