"""`serialize`, `serialize_file` and `TensorSpec`, compared with those of safetensors."""

import os
import random
import stat

import numpy as np
import safetensors

import oracle
import tensorfs
from package import TestCase

DTYPES = {
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8, "float32": 4, "uint32": 4, "int32": 4, "bfloat16": 2, "float16": 2,
    "uint16": 2, "int16": 2, "float8_e5m2fnuz": 1, "float8_e4m3fnuz": 1, "float8_e8m0fnu": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "int8": 1, "uint8": 1, "float4_e2m1fn_x2": 1, "bool": 1,
}
BYTES = np.arange(4096, dtype=np.uint8) % 251


def spec(package, dtype, shape, address=BYTES.ctypes.data, length=None):
    given = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype] if length is None else length
    return package.TensorSpec(dtype=dtype, shape=shape, data_ptr=address, data_len=given)


class Serialize(TestCase):
    def test_the_bytes_are_those_of_safetensors(self):
        choose = random.Random(11)
        letters = 'az.0_ "\\\n\x01\x7f\xe4\xfc\u4e16\u2028\U0001f642'
        for round in range(200):
            drawn = {
                "".join(choose.choices(letters, k=choose.randrange(8))): (
                    choose.choice(list(DTYPES)),
                    # A shape has at least one dimension: a single F4 element would be half a byte, which safetensors
                    # refuses.
                    [choose.randrange(6) for _ in range(choose.randrange(1, 4))],
                    choose.randrange(64),
                )
                for _ in range(choose.randrange(12))
            }
            # The metadata has at most one entry, because safetensors writes several entries in no fixed order. If there
            # are no tensors, safetensors writes empty metadata as invalid JSON.
            metadata = choose.choice([None, {choose.choice(letters): choose.choice(letters)}, *[{}] * bool(drawn)])
            made = [
                package.serialize({n: spec(package, d, s, BYTES.ctypes.data + at) for n, (d, s, at) in drawn.items()}, metadata)
                for package in (tensorfs, safetensors)
            ]
            with self.subTest(round=round, drawn=drawn, metadata=metadata):
                self.assertIs(type(made[0]), bytes)
                self.assertEqual(*made)

    def test_metadata_is_kept(self):
        metadata = {str(number): "x" * number for number in range(20)}
        data = tensorfs.serialize({"a": spec(tensorfs, "int8", [3])}, metadata)
        (self.tmp / "a.safetensors").write_bytes(data)
        with safetensors.safe_open(self.tmp / "a.safetensors", "np") as f:
            self.assertEqual((f.metadata(), f.get_tensor("a").tolist()), (metadata, [0, 1, 2]))

    def test_a_spec_has_the_facts_of_a_header_and_is_not_changed(self):
        for dtype in DTYPES:
            for shape in ([], [4], (2, 3)):
                ours, genuine = (spec(package, dtype, shape) for package in (tensorfs, safetensors))
                for word in ("dtype", "shape", "data_ptr", "data_len"):
                    self.assertEqual(getattr(ours, word), getattr(genuine, word))
                    with self.assertRaises(AttributeError):
                        setattr(ours, word, 1)
                self.assertEqual(repr(ours), repr(genuine))

    def test_what_is_refused_is_refused_as_by_safetensors(self):
        def outcome(work):
            try:
                return work()
            except Exception as e:
                return safetensors.SafetensorError if isinstance(e, safetensors.SafetensorError) else type(e)

        right = {"dtype": "float32", "shape": [2], "data_ptr": BYTES.ctypes.data, "data_len": 8}
        wrong = [
            {"dtype": "F32"}, {"dtype": "str"}, {"shape": [-1]}, {"shape": 3}, {"shape": [1.5]}, {"data_ptr": -1},
            {"data_len": -1}, {"data_len": 7}, {"data_len": 0}, {"shape": [1 << 62, 8]}, {"dtype": "complex128"},
        ]
        for change in wrong:
            found = [outcome(lambda: p.serialize({"a": p.TensorSpec(**{**right, **change})})) for p in (tensorfs, safetensors)]
            self.assertEqual(*found, change)
            self.assertNotIsInstance(found[0], bytes, change)
        for tensors in ([], {1: "spec"}, {"a": {"dtype": "float32", "shape": [1], "data": b"abcd"}}):
            for package in (tensorfs, safetensors):
                # The class of the error may differ, because our package accepts any mapping.
                self.assertIn(outcome(lambda: package.serialize(tensors)), (TypeError, AttributeError), tensors)
        for metadata in (3, {"a": 1}, {1: "a"}):
            for package in (tensorfs, safetensors):
                self.assertIn(outcome(lambda: package.serialize({}, metadata)), (TypeError, AttributeError), metadata)
        # safetensors would write a file that no reader accepts.
        with self.assertRaisesRegex(tensorfs.SafetensorError, "cannot have the name `__metadata__`"):
            tensorfs.serialize({"__metadata__": spec(tensorfs, "int8", [1])})

    def test_a_file_takes_its_name_once_it_is_whole(self):
        file = self.tmp / "a.safetensors"
        tensors = {"b": spec(tensorfs, "int16", [5]), "a": spec(tensorfs, "float32", [2, 2])}
        before = os.umask(0o027)
        try:
            tensorfs.serialize_file(tensors, file, {"k": "v"})
        finally:
            os.umask(before)
        self.assertEqual(file.read_bytes(), tensorfs.serialize(tensors, {"k": "v"}))
        self.assertEqual(stat.S_IMODE(file.stat().st_mode), 0o640)
        self.assertEqual(set(oracle.tensor_bytes(file)), {"a", "b"})
        right = file.read_bytes()
        for bad in ({"b": spec(tensorfs, "int16", [5], length=9)}, {**tensors, "c": spec(tensorfs, "int8", [9], length=1)}):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "Error while serializing: tensor `[bc]`"):
                tensorfs.serialize_file(bad, file)
        for path in (self.tmp / "absent/a", self.tmp):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "Error while serializing: ") as caught:
                tensorfs.serialize_file(tensors, path)
            self.assertEqual(caught.exception.path, str(path))
        self.assertEqual((file.read_bytes(), list(self.tmp.iterdir())), (right, [file]))
