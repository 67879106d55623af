"""Mounts of `tensorfs serve` that are not on their targets: taken off with files open, covered, or moved."""

import contextlib
import os

import checkpoints
from manifest import by_id
from mounts import detach, find_mount, needs_root, process_gone, run, wait_until
from services import PATIENCE, ServiceCase, mount_config
from test_metrics import UnixConnection

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source
ALL = "serving 2 of 2 mounts"


@needs_root
class Places(ServiceCase):
    def setUp(self):
        super().setUp()
        self.right = checkpoints.hf_whole(SOURCE)
        self.a, self.b = self.target("above/a"), self.target("b")
        mounts = mount_config("a", SOURCE, self.a) + mount_config("b", SOURCE, self.b)
        self.socket = self.tmp / "metrics.sock"
        self.service = self.serve(f'[service]\nmetrics = "unix:{self.socket}"\n{mounts}')
        self.service.wait_until_ready()
        self.service.wait_for_status(ALL)

    def assert_serves(self, target):
        self.assert_mounted(target)
        self.assert_same((target / FILE).read_bytes(), self.right, target)

    def assert_reads(self, descriptor):
        self.assert_same(os.pread(descriptor, len(self.right), 0), self.right, "the open file")

    def readiness(self):
        with contextlib.closing(UnixConnection(self.socket)) as connection:
            connection.request("GET", "/readyz")
            reply = connection.getresponse()
            return reply.status, reply.read().decode()

    def umount_with_an_open_file(self):
        """Returns the open file, and the process that serves it."""
        held, worker = self.open(self.a / FILE), self.service.workers()["a"]
        self.assert_done(run("umount", "-l", self.a))
        self.service.wait_for_status("serving 1 of 2 mounts; a unmounted")
        self.service.wait_for_log(f"{self.a} was unmounted; it stays off until a reload")
        self.assertEqual(self.readiness(), (503, "a: unmounted\n"))
        return held, worker

    def cover(self, folder):
        self.assert_done(run("mount", "-t", "tmpfs", "tmpfs", folder))
        self.addCleanup(run, "umount", "-l", folder)

    def test_a_mount_that_was_taken_off_with_a_file_open_comes_back_at_a_reload_and_the_reader_goes_on(self):
        held, worker = self.umount_with_an_open_file()
        self.service.reload()
        self.service.wait_until_ready(2)
        self.service.wait_for_status(ALL)
        self.assert_serves(self.a)
        self.assertNotEqual(os.stat(self.a).st_dev, os.fstat(held).st_dev)
        self.assertEqual(self.readiness(), (200, "ok\n"))
        self.assert_reads(held)
        self.assertFalse(process_gone(worker))

    def test_a_restart_brings_a_mount_back_that_was_taken_off_with_a_file_open(self):
        self.umount_with_an_open_file()
        self.service.restart()
        self.service.wait_until_ready(2)
        self.service.wait_for_status(ALL)
        self.assert_serves(self.a)
        self.assert_serves(self.b)

    def test_the_process_of_a_mount_that_was_taken_off_ends_with_the_last_open_file(self):
        held, worker = self.umount_with_an_open_file()
        self.assert_reads(held)
        os.dup2(os.open("/dev/null", os.O_RDONLY), held)
        wait_until(lambda: process_gone(worker), PATIENCE, "the old process ends")
        self.service.wait_for_status("a unmounted")

    def test_a_stop_ends_the_process_of_a_mount_that_was_taken_off(self):
        _, worker = self.umount_with_an_open_file()
        self.service.process.terminate()
        # A second signal: open files have no more time.
        self.service.manager.heard()
        wait_until(lambda: self.service.manager.count("STOPPING=1"), PATIENCE, "it stops")
        self.service.process.terminate()
        self.assertEqual(self.service.process.wait(PATIENCE), 0, self.service.log())
        self.assertTrue(process_gone(worker))

    # It was taken for the renamed target, and a reload emptied it.
    def test_a_bind_of_a_mount_stays_when_its_target_is_unmounted_and_mounted_anew(self):
        bind = self.target("bind")
        self.addCleanup(detach, bind)
        self.assert_done(run("mount", "--bind", self.a, bind))
        self.service.reload()
        self.service.wait_until_ready(2)
        self.service.wait_for_status(ALL)
        held = self.open(bind / FILE)
        self.assert_done(run("umount", self.a))
        self.service.wait_for_status("serving 1 of 2 mounts; a unmounted")
        self.service.reload()
        self.service.wait_until_ready(3)
        self.service.wait_for_status(ALL)
        for folder in (self.a, bind):
            self.assert_serves(folder)
        self.assertNotEqual(os.stat(self.a).st_dev, os.stat(bind).st_dev)
        self.assert_reads(held)

    def test_a_mount_under_another_one_is_told_until_that_one_is_gone(self):
        for folder in (self.a, self.a.parent):
            with self.subTest(folder.name):
                self.cover(folder)
                self.service.wait_for_status(f"a covered: tmpfs is mounted on {folder}, on top of it")
                self.assertEqual(self.readiness(), (503, "a: covered\n"))
                self.assert_done(run("umount", folder))
                self.service.wait_for_status(ALL)
                self.assert_serves(self.a)

    def rename(self):
        """Renames the folder above the target. Returns the target's new path."""
        moved = self.a.parent.with_name("moved")
        self.a.parent.rename(moved)
        self.addCleanup(detach, moved / "a")
        self.service.wait_for_status(f"a moved: its folder was renamed to {moved}/a; rename it back, or reload to mount")
        return moved / "a"

    def test_a_mount_whose_folder_was_renamed_is_told_and_comes_back_with_its_name_or_a_reload(self):
        self.rename().parent.rename(self.a.parent)
        self.service.wait_for_status(ALL)
        moved = self.rename()
        self.a.mkdir(parents=True)
        self.service.reload()
        self.service.wait_until_ready(2)
        self.service.wait_for_status(ALL)
        self.assert_serves(self.a)
        wait_until(lambda: find_mount(moved) is None, PATIENCE, "the old mount is gone")

    def test_a_restart_mounts_a_target_anew_whose_folder_was_renamed(self):
        moved = self.rename()
        self.a.mkdir(parents=True)
        self.service.restart()
        self.service.wait_until_ready(2)
        self.service.wait_for_status(ALL)
        self.assert_serves(self.a)
        wait_until(lambda: find_mount(moved) is None, PATIENCE, "the old mount is gone")
