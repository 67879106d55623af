"""The installed wheel: it also has the command and the helper of mount(8)."""

import importlib.metadata
import os
import unittest
from pathlib import Path

import oracle
from manifest import by_id
from mounts import detach, find_mount, needs_root, run
from package import TestCase, dlpack_bytes, python

import tensorfs

SOURCE = by_id("hf_three_shards").source
MOUNTS = os.access("/dev/fuse", os.R_OK | os.W_OK)


def installed():
    """Name -> path of the programs that the wheel put beside the interpreter."""
    files = importlib.metadata.files("tensorfs-loader")
    return {file.name: Path(file.locate()).resolve() for file in files if file.parent.name == "bin"}


class Wheel(TestCase):
    def test_it_installs_the_command_and_the_helper_of_mount_8_in_its_own_version(self):
        programs = installed()
        self.assertEqual(set(programs), {"tensorfs", "mount.tensorfs"})
        for name, program in programs.items():
            done = run(program, "--version")
            self.assert_done(done)
            self.assertEqual(done.stdout, f"{name} {tensorfs.__version__}\n")

    def test_the_helper_is_small_and_takes_its_arguments_as_mount_8_gives_them(self):
        helper = installed()["mount.tensorfs"]
        self.assertLess(helper.stat().st_size, 1000)
        link = self.tmp / "mount.tensorfs"
        link.symlink_to(helper)
        self.assertIn("Usage: mount.tensorfs SOURCE TARGET", run(link, "-h").stdout)
        self.assertEqual(run(link, SOURCE).code, 1)
        target = self.tmp / "mnt"
        target.mkdir()
        # Options are before, between and after the paths, and one path is not absolute.
        for words in (("-f", SOURCE.name, target, "-o", "ro"), (SOURCE.name, "-o", "ro", target, "-f"), ("-f", "--", SOURCE.name, target)):
            self.assert_done(run(link, *words, cwd=SOURCE.parent))

    @unittest.skipUnless(MOUNTS, "needs /dev/fuse")
    @needs_root
    def test_the_helper_mounts_through_a_link_in_another_folder(self):
        link, target = self.tmp / "mount.tensorfs", self.tmp / "mnt"
        link.symlink_to(installed()["mount.tensorfs"])
        target.mkdir()
        self.addCleanup(detach, target)
        self.assert_done(run(link, SOURCE.name, target, "-o", "ro,nofail", cwd=SOURCE.parent))
        self.assertEqual(find_mount(target).type, "fuse.tensorfs")
        with tensorfs.safe_open(SOURCE, "dlpack") as f:
            self.assertEqual(oracle.tensor_bytes(target / "model.safetensors"), dlpack_bytes(f))

    @unittest.skipUnless(MOUNTS, "needs /dev/fuse")
    def test_mount_finds_the_command_of_its_wheel_in_an_environment_that_is_not_activated(self):
        code = (
            "import sys, tensorfs\n"
            "with tensorfs.mount(sys.argv[1]) as folder:\n"
            "    print(len((folder / 'model.safetensors').read_bytes()))\n"
        )
        said = python(code, SOURCE, PATH="/usr/bin:/bin:/usr/sbin:/sbin", TENSORFS_BIN="")
        with tensorfs.safe_open(SOURCE, "dlpack") as f:
            self.assertGreater(int(said), f.nbytes())
