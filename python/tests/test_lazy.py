"""`tensorfs.lazy`: tensors by name that are read when they are indexed."""

import importlib.util
import os
import pickle
import re
import subprocess
import sys
import unittest

import numpy as np

import tensorfs
from checkpoints import hf_set, row_wise
from package import ROOT, TestCase, needs_torch


def needs(*packages):
    return unittest.skipUnless(all(map(importlib.util.find_spec, packages)), f"needs {' and '.join(packages)}")


def forget(folder):
    """Drops the shards from the page cache."""
    for shard in folder.glob("*.safetensors"):
        with open(shard, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Lazy(TestCase):
    def test_it_has_the_names_and_facts_of_all_tensors_and_reads_none(self):
        for make in (hf_set, row_wise):
            folder = make(self.tmp / make.__name__)
            with tensorfs.safe_open(folder, "np") as f, tensorfs.lazy(folder, "np") as weights:
                self.assertEqual(list(weights), f.offset_keys())
                for name, weight in weights.items():
                    facts = f.get_tensor_metadata(name)
                    self.assertEqual((weight.shape, weight.nbytes, weight.get_dtype()), (tuple(facts.shape), facts.nbytes, facts.dtype))
                    self.assertEqual(weight.ndim, len(weight.get_shape()))
                self.assertEqual(weights.stats.get("bytes", 0), 0)

    def test_an_index_reads_that_part_and_no_more(self):
        folder = row_wise(self.tmp / "rows")
        with tensorfs.safe_open(folder, "np") as f:
            whole = f.get_tensor("embed")
        forget(folder)
        weights = tensorfs.lazy(folder, "np")
        part = weights["embed"][1024:2048]
        np.testing.assert_array_equal(part.view(np.uint8), whole[1024:2048].view(np.uint8))
        # The page cache may still hold the bytes, for example in a file system in memory. Then they are not counted.
        self.assertIn(weights.stats.get("bytes", 0), (0, part.nbytes))
        np.testing.assert_array_equal(weights["embed"][...].view(np.uint8), whole.view(np.uint8))

    def test_names_and_views_choose_as_those_of_an_open_checkpoint(self):
        folder = hf_set(self.tmp / "hf")
        with tensorfs.safe_open(folder, "np") as f:
            some = f.keys()[:2]
        self.assertEqual(sorted(tensorfs.lazy(folder, "np", names=some)), some)
        self.assertEqual(sorted(tensorfs.lazy(folder, "np", include=some)), some)
        with self.assertRaisesRegex(tensorfs.SafetensorError, "absent"):
            tensorfs.lazy(folder, "np", names=["absent"])

    def test_tensors_are_read_after_the_block_and_after_a_pickle(self):
        folder = hf_set(self.tmp / "hf")
        with tensorfs.lazy(folder, "np") as weights:
            name = next(iter(weights))
        right = weights[name][...]
        again = pickle.loads(pickle.dumps(weights))
        self.assertIs(type(again[name]), tensorfs.LazyTensor)
        np.testing.assert_array_equal(again[name][...].view(np.uint8), right.view(np.uint8))
        self.assertEqual(list(again), list(weights))

    @needs_torch
    def test_the_dtype_is_that_of_torch_and_tells_floating_point_numbers(self):
        import torch

        from package import FIXTURES

        for name, weight in tensorfs.lazy(FIXTURES / "safetensors/all_dtypes.safetensors").items():
            found = weight[...]
            self.assertEqual((weight.dtype, weight.is_floating_point()), (found.dtype, found.dtype.is_floating_point), name)
            self.assertIsInstance(weight.dtype, torch.dtype)


class Examples(TestCase):
    def said(self, name):
        done = subprocess.run(
            [sys.executable, ROOT / "examples" / name],
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(self.tmp)},
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        # Torch leaves a folder of its own.
        self.assertEqual([path for path in self.tmp.iterdir() if not path.name.startswith("torchinductor_")], [])
        return done.stdout

    @needs("torch", "transformers")
    def test_transformers_takes_lazy_tensors_and_a_rank_reads_its_part_only(self):
        said = self.said("lazy_transformers.py")
        found = [
            re.search(rf"(?m)^{title}: every bit as it was saved; (\d+) bytes of weights, (\d+) bytes read$", said)
            for title in ("one process", "rank 0 of 2", "rank 1 of 2")
        ]
        whole, *parts = [tuple(map(int, one.groups())) for one in found]
        # Each rank has whole norms, which may also be loaded ahead.
        for local, read in parts:
            self.assertLess(max(local, read), whole[0] * 3 // 4)

    @needs("torch", "transformers", "accelerate")
    def test_accelerate_places_lazy_tensors(self):
        self.assertIn("every bit as it was saved", self.said("accelerate_dispatch.py"))

    @needs("torch", "transformers")
    def test_fsdp2_fills_the_parts_of_its_ranks(self):
        self.assertEqual(self.said("fsdp2_load.py").count("every bit as it was saved"), 4)
