"""`load_into`: memory that is there already."""

import array

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from checkpoints import column_wise, random_bytes, write_shard
from package import TestCase, needs_torch


class LoadInto(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        rng = np.random.default_rng(7)
        self.tensors = {
            "long": np.frombuffer(random_bytes(1, 9_000_000), np.uint8).view(np.float32),
            "matrix": rng.standard_normal((33, 17)).astype(np.float32),
            "numbers": rng.integers(0, 99, (5,)),
            "empty": np.zeros((0, 3), np.float16),
        }
        save_file(self.tensors, self.file)

    def check(self, mapping, names=None):
        for name in names or self.tensors:
            self.assertEqual(bytes(memoryview(mapping[name]).cast("B")) if len(mapping[name]) else b"", self.tensors[name].tobytes())

    def test_arrays_and_buffers_of_any_kind_are_filled(self):
        mapping = {
            "long": bytearray(9_000_000),
            "matrix": np.zeros((33, 17), np.float32),
            "numbers": array.array("q", [0] * 5),
            "empty": np.zeros((0, 3), np.float16),
        }
        self.assertEqual(tensorfs.load_into(mapping, self.file), ([], []))
        self.check(mapping)

    def test_memory_at_any_address_is_filled_and_nothing_around_it(self):
        length = self.tensors["long"].nbytes
        for skip in (0, 1, 64, 4095, 4096):
            around = np.full(length + 3 * 4096, 7, np.uint8)
            start = -around.__array_interface__["data"][0] % 4096 + skip
            into = around[start : start + length].view(np.uint8)
            tensorfs.load_into({"long": memoryview(into)}, self.file, strict=False)
            self.assertEqual(into.tobytes(), self.tensors["long"].tobytes())
            self.assertTrue((around[:start] == 7).all() and (around[start + length :] == 7).all())

    def test_what_speaks_dlpack_is_filled(self):
        with tensorfs.safe_open(self.file, "dlpack") as f:
            mapping = {name: f.get_tensor(name) for name in f.keys()}
        for tensor in mapping.values():
            np.from_dlpack(tensor)[...] = 0
        tensorfs.load_into(mapping, self.file)
        for name, tensor in mapping.items():
            self.assertEqual(tensor.tobytes(), self.tensors[name].tobytes())

        class Older:
            """Knows no versions."""

            def __init__(self, of):
                self.of = of

            def __dlpack__(self, stream=None):
                return self.of.__dlpack__()

            def __dlpack_device__(self):
                return self.of.__dlpack_device__()

        into = np.zeros((33, 17), np.float32)
        tensorfs.load_into({"matrix": Older(into)}, self.file, strict=False)
        np.testing.assert_array_equal(into, self.tensors["matrix"])

    def test_pieces_are_put_together_in_place(self):
        folder = column_wise(self.tmp / "dcp")
        right = tensorfs.load_file(folder, "dlpack")
        mapping = {name: bytearray(tensor.nbytes) for name, tensor in right.items()}
        tensorfs.load_into(mapping, folder)
        for name, tensor in right.items():
            self.assertEqual(bytes(mapping[name]), tensor.tobytes())

    def test_names_have_to_be_the_same_unless_it_is_said_otherwise(self):
        mapping = {"matrix": np.zeros((33, 17), np.float32), "other": np.zeros(3)}
        with self.assertRaisesRegex(tensorfs.MismatchError, "not in the checkpoint: other; only in the .*: empty") as e:
            tensorfs.load_into(mapping, self.file)
        self.assertIsInstance(e.exception, RuntimeError)
        self.assertTrue((mapping["matrix"] == 0).all())
        result = tensorfs.load_into(mapping, self.file, strict=False)
        self.assertEqual(result.missing_keys, ["other"])
        self.assertEqual(result.unexpected_keys, ["empty", "long", "numbers"])
        np.testing.assert_array_equal(mapping["matrix"], self.tensors["matrix"])

    def test_what_does_not_fit_is_refused_before_anything_is_written(self):
        frozen = np.zeros((33, 17), np.float32)
        frozen.flags.writeable = False
        long = np.zeros(9_000_000 // 4, np.float32)
        for name, into, why in (
            ("matrix", np.zeros((17, 33), np.float32), r"`matrix`.*\[33, 17\].*\[17, 33\]"),
            ("matrix", np.zeros((33, 17), np.float64), "`matrix`.*F32.*F64.*cast=True"),
            ("matrix", np.zeros((33, 34), np.float32)[:, ::2], "contiguous"),
            ("matrix", frozen, "written to"),
            ("matrix", bytearray(7), "`matrix`.*2244.*7"),
            ("matrix", b"x" * 2244, "written to"),
            ("matrix", 7, "`matrix`.*int"),
            ("matrix", np.zeros((33, 17), ">f4"), "`matrix`"),
            ("numbers", np.zeros(5, np.float64), "I64.*F64"),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(tensorfs.MismatchError, why):
                tensorfs.load_into({"long": long, name: into}, self.file, strict=False)
        self.assertTrue((long == 0).all())
        with self.assertRaisesRegex(tensorfs.MismatchError, "share memory"):
            tensorfs.load_into({"matrix": long[: 33 * 17].reshape(33, 17), "long": long}, self.file, strict=False)

    def test_elements_are_cast_where_that_is_asked_for(self):
        half = np.zeros((33, 17), np.float16)
        tensorfs.load_into({"matrix": half}, self.file, strict=False, cast=True)
        np.testing.assert_array_equal(half, self.tensors["matrix"].astype(np.float16))
        write_shard(self.tmp / "bf16.safetensors", [("w", "BF16", [2], b"\x80?\x00\xc0")])
        single = np.zeros(2, np.float32)
        tensorfs.load_into({"w": single}, self.tmp / "bf16.safetensors", cast=True)
        self.assertEqual(single.tolist(), [1.0, -2.0])
        with self.assertRaisesRegex(tensorfs.SafetensorError, "`numbers`"):
            tensorfs.load_into({"numbers": np.zeros(5, np.float32)}, self.file, strict=False, cast=True)

    @needs_torch
    def test_the_parameters_of_a_model_are_filled_in_place(self):
        import torch
        from safetensors.torch import save_file as save_torch

        model, other = (torch.nn.Sequential(torch.nn.Linear(70, 80), torch.nn.LayerNorm(80)) for _ in "ab")
        save_torch(model.state_dict(), self.file)
        before = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
        result = tensorfs.load_into(other.state_dict(), self.file)
        self.assertEqual(result, ([], []))
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(other.state_dict()[name], tensor))
            self.assertEqual(other.state_dict()[name].data_ptr(), before[name])
        half = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
        tensorfs.load_into(half, self.file, cast=True)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(half[name], tensor.to(torch.bfloat16)))
        for bad in (torch.zeros(80, 70).t(), torch.zeros(80, 70, device="meta"), torch.zeros(80, 70).to_sparse()):
            with self.assertRaises(tensorfs.MismatchError):
                tensorfs.load_into({"0.weight": bad}, self.file, strict=False)
