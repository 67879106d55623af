"""Tensors of torch that do not lie row by row in their storage: transposed, channels_last, sliced and expanded."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import oracle
import torch_files
from mounts import Mount, TestCase, tensorfs
from torch_files import Tensor


def transposed(storage, rows, columns):
    return Tensor(storage, (rows, columns), strides=(1, rows))


def shown(tensor):
    """The array that a tensor stands for."""
    strides = [stride * tensor.storage.itemsize for stride in tensor.strides]
    start = tensor.storage[tensor.offset :]
    return np.lib.stride_tricks.as_strided(start, tensor.shape, strides)


class Strided(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(5)
        small = rng.integers(0, 1 << 16, 4096, np.uint16).astype(np.float32)
        # No window of a mount holds all bytes of the larger ones.
        wide = rng.integers(0, 1 << 24, 3 << 20, np.uint32).astype(np.float32)
        tall = rng.integers(0, 1 << 24, 5 << 20, np.uint32).astype(np.float32)
        self.tensors = {
            "channels": Tensor(small, (4, 3, 5, 7), strides=(105, 1, 21, 3)),
            "columns": Tensor(small, (40, 3), offset=5, strides=(17, 1)),
            "every_other": Tensor(small, (6, 20), offset=1, strides=(100, 2)),
            "expanded": Tensor(small, (300, 2, 50), offset=9, strides=(0, 50, 1)),
            "one_value": Tensor(small, (1000, 700), offset=77, strides=(0, 0)),
            "plain": Tensor(small, (64, 64)),
            "small": transposed(small, 64, 64),
            "swapped": Tensor(small, (3, 8, 5, 2), strides=(2, 30, 6, 1)),
            "tall": transposed(tall, 5, 1 << 20),
            "wide": transposed(wide, 3 << 10, 1 << 10),
        }
        self.arrays = {name: shown(tensor) for name, tensor in self.tensors.items()}
        self.file = self.tmp / "model.pt"
        torch_files.save(self.file, self.tensors)

    def assert_arrays(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for name, (_, shape, data) in found.items():
            self.assertEqual(shape, list(expected[name].shape), name)
            self.assertTrue(data == expected[name].tobytes(), name)

    def test_inspect_says_which_tensors_are_stored_in_the_same_bytes(self):
        values = np.arange(24, dtype=np.float32)
        file = self.tmp / "tied.pt"
        tensors = {"embed": Tensor(values, (6, 4)), "head": Tensor(values, (6, 4)), "rows": Tensor(values, (2, 4), offset=8)}
        torch_files.save(file, tensors)
        lines = tensorfs("inspect", file).stdout.splitlines()
        self.assertIn("  head F32 [6, 4], 96 bytes at 4192, tied to embed", lines)
        self.assertEqual(sum("tied to" in line for line in lines), 1, lines)

    def test_a_mount_shows_them_in_order_and_any_range_of_them(self):
        with Mount(self.file) as m:
            path = m.path / "model.safetensors"
            self.assert_arrays(oracle.tensor_bytes(path), self.arrays)
            whole, choose = path.read_bytes(), random.Random(3)
        # The page cache has nothing of a new mount.
        with Mount(self.file, "cache=64M") as m:
            fd = os.open(m.path / "model.safetensors", os.O_RDONLY)
            try:
                for _ in range(60):
                    start, length = choose.randrange(len(whole)), choose.choice([1, 3, 4096, 70_000, 1 << 20])
                    self.assertTrue(os.pread(fd, length, start) == whole[start : start + length], (start, length))
            finally:
                os.close(fd)

    def test_readers_side_by_side_get_the_bytes_of_their_tensors_with_little_memory(self):
        def read(path, start, length):
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                return b"".join(iter(lambda: file.read(min(1 << 17, start + length - file.tell())), b""))

        with Mount(self.file, "cache=16M") as m:
            path = m.path / "model.safetensors"
            size = path.stat().st_size
            parts = [(start, min(size // 5 + 1, size - start)) for start in range(0, size, size // 5 + 1)]
            with ThreadPoolExecutor(len(parts)) as pool:
                found = b"".join(pool.map(lambda part: read(path, *part), parts))
        out = self.tmp / "one"
        out.write_bytes(found)
        self.assert_arrays(oracle.tensor_bytes(out), self.arrays)

    def test_consolidate_convert_and_verify_read_them(self):
        self.assert_done(tensorfs("verify", self.file))
        out = self.tmp / "one.safetensors"
        self.assert_done(tensorfs("consolidate", self.file, out))
        self.assert_arrays(oracle.tensor_bytes(out), self.arrays)
        self.assert_done(tensorfs("convert", self.file, self.tmp / "two.safetensors", "--verify"))
        self.assert_done(tensorfs("diff", out, self.file))

    def test_views_cut_and_cast_them(self):
        rules = self.tmp / "rules.toml"
        rules.write_text("[[split]]\nfrom = 'wide'\nto = ['low', 'high']\ndim = 1\nsizes = [300, 724]\n")
        with Mount(self.file, "include=wide", "include=channels", f"rename={rules}", "dtype=f16") as m:
            found = oracle.tensor_bytes(m.path / "model.safetensors")
        with np.errstate(over="ignore"):
            half = {name: self.arrays[name].astype(np.float16) for name in ("wide", "channels")}
        low, high = half["wide"][:, :300], half["wide"][:, 300:]
        self.assert_arrays(found, {"low": low, "high": high, "channels": half["channels"]})

    def test_load_and_inspect_know_them(self):
        outcome = tensorfs("load", self.file, "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["bytes"], sum(array.nbytes for array in self.arrays.values()))
        text = tensorfs("inspect", self.file).stdout
        self.assertIn("box [64, 64] at [0, 0] with strides [1, 64], 4096 runs of 4 bytes", text)
        (one,) = tensorfs("inspect", self.file, "channels", "--json").json()["sets"][0]["tensors"]
        self.assertEqual(one["pieces"][0]["strides"], [105, 1, 21, 3])

    def test_overlapping_ones_and_endless_ones_are_refused_by_name(self):
        storage = np.arange(100, dtype=np.float32)
        for tensor, hint in (
            (Tensor(storage, (10, 10), strides=(1, 1)), "by which parts of it overlap; save `tensor.contiguous()`"),
            (Tensor(storage, (1 << 20, 1 << 20), strides=(0, 0)), "by repeating what its storage of 400 bytes holds"),
        ):
            torch_files.save(self.tmp / "bad.pt", {"w": tensor})
            outcome = tensorfs("ls", self.tmp / "bad.pt", "--json")
            self.assertEqual(outcome.code, 1, outcome)
            self.assertIn(hint, json.dumps(outcome.json()["error"]))
            self.assertIn("tensor `w`", outcome.json()["error"])

    def test_parts_of_ranks_are_put_in_order_too(self):
        whole = {"w": np.arange(60, dtype=np.float32).reshape(10, 6), "e": np.tile(np.arange(5, dtype=np.float32), (4, 1))}
        folder = self.tmp / "ranks"
        folder.mkdir()
        for rank in range(2):
            rows = whole["w"][rank * 5 : rank * 5 + 5]
            with torch_files.modules() as named:
                root = {
                    # Column by column, and one row that all of the part repeat.
                    "w": torch_files.dtensor(named, transposed(rows.T.reshape(-1).copy(), 5, 6), (10, 6), rank, 2, 0),
                    "e": torch_files.dtensor(named, Tensor(whole["e"][0].copy(), (2, 5), strides=(0, 1)), (4, 5), rank, 2, 0),
                }
                torch_files.save(folder / f"model_world_size_2_rank_{rank}.pt", root)
        self.assert_done(tensorfs("verify", folder))
        with Mount(folder) as m:
            self.assert_arrays(oracle.tensor_bytes(m.path / "model.safetensors"), whole)
        self.assertIn("with strides [1, 5]", tensorfs("inspect", folder, "w").stdout)
        # An index keeps the strides.
        words = ("--index-dir", self.tmp / "index")
        self.assert_done(tensorfs("index", folder, *words))
        self.assert_done(tensorfs("consolidate", folder, self.tmp / "one.safetensors", *words))
        self.assert_arrays(oracle.tensor_bytes(self.tmp / "one.safetensors"), whole)

    def test_tensors_that_repeat_too_much_together_are_refused(self):
        storage = np.arange(4, dtype=np.float32)
        each = Tensor(storage, (3 << 32, 1), strides=(0, 1))
        torch_files.save(self.tmp / "bad.pt", {"a": each, "b": Tensor(storage, (4,)), "c": each, "d": each})
        outcome = tensorfs("ls", self.tmp / "bad.pt", "--json")
        self.assertEqual(outcome.code, 1, outcome)
        self.assertIn("tensor `c`: with it the tensors that repeat what their storages hold", outcome.json()["error"])
