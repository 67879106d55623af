"""Checkpoints whose last rank shard may be lost: the warning, the error in its place, and the proofs that no shard is
lost."""

import os
import pickle
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import safetensors.numpy

import tensorfs
import tensorfs.numpy
from checkpoints import DcpSet, dcp_name, hf_set
from mounts import tensorfs as command
from package import FIXTURES, Mount, TestCase, environment, needs_torch, python
from tensorfs import UnprovenTailWarning

RANKS = 3
MESSAGE = (
    r": tail: unproven: 2 shards found, and nothing tells whether there were more: a lost last one would only make tensors "
    r"smaller; give expect_shards= or reference=, or a manifest \(tensorfs verify --write-manifest\)$"
)


def line():
    """The line of the caller."""
    return sys._getframe(1).f_lineno


class Tails(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = DcpSet(8).cut("w", (RANKS, 6), (RANKS, 1)).cut("b", (6 * RANKS,), (RANKS,), 8).save(self.tmp / "run")
        self.whole = tensorfs.load_file(self.folder, "np", expect_shards=RANKS)
        self.manifest = self.folder / "model.tensorfs-manifest.json"
        command("verify", self.folder, "--write-manifest")
        # The manifest is moved away: beside the shards, every way of opening them would find it.
        self.kept = self.tmp / "kept.json"
        os.replace(self.manifest, self.kept)
        self.lost = self.folder / dcp_name(RANKS)
        os.replace(self.lost, self.tmp / "lost")
        self.files = sorted(self.folder.iterdir())

    def restore(self):
        os.replace(self.tmp / "lost", self.lost)

    def ways(self):
        """Every way of opening the folder, with further arguments."""
        numbers = {"w": 1, "b": 2}

        def out():
            return self.tmp / f"out-{len(list(self.tmp.iterdir()))}"

        def into():
            ranks = len(list(self.folder.glob("*.safetensors")))
            return {"w": np.zeros((ranks, 6), np.float32), "b": np.zeros(6 * ranks)}

        return {
            "safe_open": lambda **how: tensorfs.safe_open(self.folder, "np", **how),
            "load_file": lambda **how: tensorfs.load_file(self.folder, "np", **how),
            "numpy": lambda **how: tensorfs.numpy.load_file(self.folder, **how),
            "dlpack": lambda **how: tensorfs.load_file(self.folder, "dlpack", copy=False, **how),
            "load_into": lambda **how: tensorfs.load_into(into(), self.folder, **how),
            "files": lambda **how: tensorfs.load_file(sorted(self.folder.iterdir()), "np", **how),
            "view": lambda **how: tensorfs.load_file(self.folder, "np", include="w", dtype="f32", **how),
            "consolidate": lambda **how: tensorfs.consolidate(self.folder, out(), **how),
            "one file": lambda **how: tensorfs.consolidate(self.folder, f"{out()}.safetensors", **how),
            "numbers": lambda **how: tensorfs.consolidate(self.folder, out(), numbers=numbers, **how),
        }

    def test_every_way_of_opening_warns_at_the_line_of_its_caller(self):
        for way, call in self.ways().items():
            with self.subTest(way=way):
                with self.assertWarnsRegex(UnprovenTailWarning, f"^{self.folder}{MESSAGE}") as told:
                    call()
                self.assertEqual(Path(told.filename), Path(__file__))
        with self.assertWarns(UnprovenTailWarning) as told:
            expected = line() + 1
            opened = tensorfs.safe_open(self.folder, "np")
        self.assertEqual(told.lineno, expected)
        with self.assertWarns(UnprovenTailWarning):
            pickle.loads(pickle.dumps(opened))
        mapping = {"w": self.files[0], "b": self.files[1]}
        with self.assertWarns(UnprovenTailWarning):
            tensorfs.safe_open(mapping, "np")

    def test_what_is_read_is_right_as_far_as_it_is_there(self):
        with self.assertWarns(UnprovenTailWarning):
            found = tensorfs.load_file(self.folder, "np")
        np.testing.assert_array_equal(found["w"], self.whole["w"][: RANKS - 1])

    def test_a_loop_warns_once_and_filters_say_otherwise(self):
        code = f"""
import sys, tensorfs
for _ in range(3):
    with tensorfs.safe_open(sys.argv[1], "np") as f:
        f.get_tensors()
        f.get_tensor("w"), f.get_slice("b")[:2]
    tensorfs.load_file(sys.argv[1], "np")
tensorfs.load_file([*sys.argv[2:]], "np")
print("loaded")
"""
        program = self.tmp / "program.py"
        program.write_text(code)
        run = f"""
import subprocess, sys
for flags in ([], ["-W", "ignore"], ["-W", "always"], ["-W", "error"]):
    done = subprocess.run([sys.executable, *flags, *sys.argv[1:]], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    print(done.returncode, done.stderr.count("{self.folder}: tail: unproven"), done.stderr.count("program.py:4"), done.stdout.strip())
"""
        # The location of the first warning is a line of the program. With the filter `error`, the first warning ends
        # the program.
        lines = python(run, program, self.folder, *self.files).splitlines()
        self.assertEqual(lines, ["0 1 1 loaded", "0 0 0 loaded", "0 7 3 loaded", "1 1 0 "])

    def test_a_warning_that_is_an_error_is_one_each_time(self):
        for way, call in self.ways().items():
            with self.subTest(way=way):
                with self.assertWarns(UnprovenTailWarning):
                    call()
                for _ in range(2):
                    with warnings.catch_warnings(), self.assertRaises(UnprovenTailWarning):
                        warnings.simplefilter("error")
                        before = sorted(self.tmp.iterdir())
                        call()
                    self.assertEqual(sorted(self.tmp.iterdir()), before)

    def test_another_save_into_the_same_folder_is_another_checkpoint(self):
        def told():
            with warnings.catch_warnings(record=True) as caught:
                for _ in range(2):
                    tensorfs.load_file(self.folder, "np")
            return len(caught)

        with warnings.catch_warnings():
            warnings.simplefilter("default")
            self.assertEqual(told(), 1)
            shutil.copy(self.files[0], self.tmp / "again")
            os.replace(self.tmp / "again", self.files[0])
            self.assertEqual(told(), 1)

    def test_the_number_of_shards_a_reference_or_a_manifest_proves_it(self):
        self.restore()
        for way, call in self.ways().items():
            with self.subTest(way=way), warnings.catch_warnings():
                warnings.simplefilter("error")
                call(expect_shards=RANKS)
                call(expect_shards=np.int64(RANKS), unproven_tail="error")
                call(reference=self.kept)
                call(reference=os.fsencode(self.kept), unproven_tail="error")
                # For an explicit list of files, other files beside them do not count.
                if way != "files":
                    shutil.copy(self.kept, self.manifest)
                    call(unproven_tail="error")
                    self.manifest.unlink()

    def test_a_lost_shard_is_refused_by_each_of_these(self):
        for way, call in self.ways().items():
            with self.subTest(way=way):
                with self.assertRaisesRegex(tensorfs.SafetensorError, "2 shard files found, 3 expected") as e:
                    call(expect_shards=RANKS)
                self.assertEqual((e.exception.kind, e.exception.path), ("shard_missing", str(self.folder)))
                with self.assertRaisesRegex(tensorfs.SafetensorError, "reference: .*kept.json"):
                    call(reference=self.kept)
                if way != "files":
                    shutil.copy(self.kept, self.manifest)
                    with self.assertRaisesRegex(tensorfs.SafetensorError, "reference: .*model.tensorfs-manifest.json"):
                        call()
                    self.manifest.unlink()

    def test_a_setting_makes_it_an_error_before_anything_is_written(self):
        for way, call in self.ways().items():
            for how, variable in (({"unproven_tail": "error"}, ""), ({}, "error")):
                with self.subTest(way=way, how=how), environment(TENSORFS_UNPROVEN_TAIL=variable):
                    before = sorted(self.tmp.iterdir())
                    with self.assertRaisesRegex(tensorfs.SafetensorError, MESSAGE) as e:
                        call(**how)
                    self.assertEqual((e.exception.kind, e.exception.path), ("unproven_tail", str(self.folder)))
                    self.assertEqual(sorted(self.tmp.iterdir()), before)
        with environment(TENSORFS_UNPROVEN_TAIL="error"), self.assertWarns(UnprovenTailWarning):
            tensorfs.load_file(self.folder, "np", unproven_tail="warn")

    def test_bad_arguments_are_refused_with_what_they_may_be(self):
        for call in self.ways().values():
            for number in (0, -1, True):
                with self.assertRaisesRegex(ValueError, f"expect_shards={number}: expected a number from 1 on"):
                    call(expect_shards=number)
            with self.assertRaises(TypeError):
                call(expect_shards="3")
            with self.assertRaises(FileNotFoundError):
                call(reference=self.tmp / "absent")
            with self.assertRaisesRegex(ValueError, "unproven_tail=ignore: expected warn or error"):
                call(unproven_tail="ignore")
        with environment(TENSORFS_UNPROVEN_TAIL="x"), self.assertRaisesRegex(ValueError, "TENSORFS_UNPROVEN_TAIL=x: "):
            tensorfs.load_file(self.folder, "np")

    def test_consolidate_returns_what_nothing_proves(self):
        with self.assertWarns(UnprovenTailWarning):
            written = tensorfs.consolidate(self.folder, self.tmp / "a")
        self.assertEqual((written.unproven_tails, pickle.loads(pickle.dumps(written)).unproven_tails), ([str(self.folder)],) * 2)
        files, nbytes = written
        self.assertEqual((files, nbytes), (written.files, sum(path.stat().st_size for path in (self.tmp / "a").iterdir())))
        self.assertEqual(tensorfs.consolidate(self.folder, self.tmp / "b", expect_shards=2).unproven_tails, [])
        shutil.copytree(self.folder, self.folder / "other")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            written = tensorfs.consolidate(self.folder, self.tmp / "c")
        self.assertEqual(written.unproven_tails, [str(self.folder), str(self.folder / "other")])
        self.assertEqual([warning.category for warning in caught], [UnprovenTailWarning] * 2)

    def test_what_lies_behind_a_mount_is_warned_of_also_where_safetensors_opens_it(self):
        with Mount(self.folder) as m:
            with self.assertWarnsRegex(UnprovenTailWarning, f"^{self.folder}: "):
                tensorfs.load_file(m.path, "np")
            with self.assertRaisesRegex(tensorfs.SafetensorError, "2 shard files found, 3 expected"):
                tensorfs.load_file(m.path / "model.safetensors", "np", expect_shards=3)
            with tensorfs.patched(), self.assertWarnsRegex(UnprovenTailWarning, f"^{self.folder}: ") as told:
                expected = line() + 1
                safetensors.numpy.load_file(m.path / "model.safetensors")
            self.assertEqual((Path(told.filename), told.lineno), (Path(__file__), expected))

    def test_the_number_of_shards_that_a_mount_was_given_counts_behind_it(self):
        with Mount(self.folder, "expect-shards=2") as m, environment(TENSORFS_UNPROVEN_TAIL="error"):
            tensorfs.load_file(m.path, "np")
            tensorfs.consolidate(m.path, self.tmp / "out")
            tensorfs.consolidate(m.path, self.tmp / "half", include="w")
            with Mount(self.folder, "expect-shards=2", "layout=original") as original:
                tensorfs.load_file(original.path / self.files[0].name, "np")
                tensorfs.load_file(original.path, "np")
            self.files[1].unlink()
            with self.assertRaisesRegex(tensorfs.SafetensorError, "1 shard files found, 2 expected"):
                tensorfs.load_file(m.path, "np")

    def test_checkpoints_that_prove_themselves_are_opened_without_a_warning(self):
        with warnings.catch_warnings(), environment(TENSORFS_UNPROVEN_TAIL="error"):
            warnings.simplefilter("error")
            tensorfs.load_file(hf_set(self.tmp / "hf", megabytes=1), "np")
            tensorfs.load_file(self.files[0], "np")
            tensorfs.load_file(FIXTURES / "dcp/global_shapes/shards", "dlpack")

    @needs_torch
    def test_loads_into_models_warn(self):
        import torch
        import tensorfs.torch

        model = torch.nn.Module()
        model.w, model.b = torch.nn.Parameter(torch.zeros(2, 6)), torch.nn.Parameter(torch.zeros(12).double())
        with self.assertWarns(UnprovenTailWarning) as told:
            tensorfs.torch.load_model(model, self.folder)
        self.assertEqual(Path(told.filename), Path(__file__))
        with self.assertRaisesRegex(tensorfs.SafetensorError, "2 shard files found, 3 expected"):
            tensorfs.torch.load_model(model, self.folder, expect_shards=3)
