"""`tensorfs.mount`."""

import importlib.metadata
import os
import signal
import subprocess
import sys
import unittest
import warnings
from pathlib import Path
from unittest import mock

import numpy as np

import oracle
from faults import FaultFs
from manifest import by_id
from mounts import BIN
from package import TestCase, wait_until

import tensorfs

DEVICE = Path("/dev/fuse")


def names_of(source):
    with tensorfs.safe_open(source, framework="np") as opened:
        return set(opened.keys())


@unittest.skipUnless(os.access(DEVICE, os.R_OK | os.W_OK) and BIN.exists(), "needs /dev/fuse and the program")
class Mounts(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.place = self.tmp / "temporary"
        self.place.mkdir()
        changed = mock.patch.dict(os.environ, {"TENSORFS_BIN": str(BIN), "TMPDIR": str(self.place)})
        changed.start()
        self.addCleanup(changed.stop)

    def left(self):
        return list(self.place.glob("tensorfs-run-*"))

    def test_the_checkpoint_is_a_file_inside_of_the_block_and_gone_after_it(self):
        with tensorfs.mount(self.source) as folder:
            self.assertIsInstance(folder, Path)
            self.assertEqual(set(oracle.tensor_bytes(folder / "model.safetensors")), names_of(self.source))
        self.assertEqual(self.left(), [])

    def test_an_exception_unmounts_too(self):
        with self.assertRaises(KeyError), tensorfs.mount(self.source):
            raise KeyError
        self.assertEqual(self.left(), [])

    def test_keywords_are_the_options_of_mount(self):
        some = sorted(names_of(self.source))[:2]
        names = [name.replace("[", "[[]") for name in some]
        with tensorfs.mount(self.source, include=names, format="bintensors", expect_shards=3, noexec=True, dtype=None) as folder:
            self.assertTrue((folder / "model.bt").exists())
            self.assertEqual(sorted(names_of(folder)), some)

    def test_config_shows_the_small_files_of_another_folder(self):
        base = self.tmp / "a, base"
        base.mkdir()
        (base / "config.json").write_text("{}")
        for config in (base, str(base), base / "config.json"):
            with tensorfs.mount(by_id("dcp_row_wise").source, config=config) as folder:
                self.assertEqual((folder / "config.json").read_text(), "{}")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "none"), tensorfs.mount(self.source, config=self.tmp / "none"):
            self.fail("it is not mounted")

    def test_values_that_are_no_text_are_taken_as_those_of_safe_open_or_refused(self):
        class Half:
            def __str__(self):
                return "torch.float16"

        with tensorfs.mount(os.fsencode(self.source), dtype=Half(), expect_shards=np.int64(3)) as folder:
            with tensorfs.safe_open(self.source, "np", dtype=Half()) as right, tensorfs.safe_open(folder, "np") as found:
                self.assertEqual([found.get_slice(name).get_dtype() for name in found.keys()], [right.get_slice(name).get_dtype() for name in right.keys()])
        for value in ({"a"}, {"a": 1}, b"a", iter(["a"]), [["a"], b"a"]):
            with self.assertRaisesRegex(TypeError, "include: expected a word, a number, a path or a list of them, not "):
                with tensorfs.mount(self.source, include=value):
                    self.fail("it is not mounted")

    def test_a_refused_mount_is_an_error_with_its_reason(self):
        with self.assertRaisesRegex(tensorfs.SafetensorError, "did you mean `layout`"), tensorfs.mount(self.source, layuot="hub"):
            self.fail("it is not mounted")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "3 shard files found, 4 expected"), tensorfs.mount(self.source, expect_shards=4):
            self.fail("it is not mounted")
        self.assertEqual(self.left(), [])

    def test_without_the_program_the_error_says_how_to_get_it(self):
        no_wheel = mock.patch("importlib.metadata.files", side_effect=importlib.metadata.PackageNotFoundError)
        with no_wheel, mock.patch.dict(os.environ, {"PATH": str(self.tmp), "TENSORFS_BIN": ""}):
            with self.assertRaisesRegex(FileNotFoundError, "install it .* or name it in TENSORFS_BIN"), tensorfs.mount(self.source):
                self.fail("it is not mounted")

    def test_the_death_of_the_interpreter_unmounts(self):
        script = "import sys, tensorfs\nwith tensorfs.mount(sys.argv[1]) as folder:\n    print(folder, flush=True)\n    sys.stdin.read()\n"
        for end in (signal.SIGKILL, signal.SIGINT):
            with self.subTest(end):
                words = [sys.executable, "-c", script, str(self.source)]
                process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
                self.assertTrue(Path(process.stdout.readline().strip(), "model.safetensors").exists())
                process.send_signal(end)
                process.wait(20)
                process.stdin.close()
                process.stdout.close()
                wait_until(lambda: not self.left(), 20, "it is unmounted")

    def test_ctrl_c_ends_a_start_that_waits_for_its_source(self):
        script = """
import sys, tensorfs
print("ready", flush=True)
try:
    with tensorfs.mount(sys.argv[1], io_timeout=600):
        pass
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
        with FaultFs(self.source) as source, source.lifted():
            source.tell("stall", "*")
            words = [sys.executable, "-c", script, str(source.path)]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
                self.assertEqual(process.stdout.readline(), "ready\n")
                wait_until(source.parked, 30, "a read that stalls")
                process.send_signal(signal.SIGINT)
                self.assertEqual(process.stdout.readline(), "interrupted\n")
        wait_until(lambda: not self.left(), 20, "the folder is removed")

    def test_a_fork_that_lives_on_does_not_keep_the_mount(self):
        read, write = os.pipe()
        with tensorfs.mount(self.source):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
        self.assertEqual(self.left(), [])
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)

    def test_two_mounts_at_once_are_two(self):
        with tensorfs.mount(self.source) as one, tensorfs.mount(self.source) as two:
            self.assertNotEqual(one, two)
            self.assertEqual(oracle.tensor_bytes(one / "model.safetensors"), oracle.tensor_bytes(two / "model.safetensors"))
        self.assertEqual(self.left(), [])


if __name__ == "__main__":
    unittest.main()
