"""`tensorfs serve`: many mounts, each in a process of its own, that come, fail, change and go without the others."""

import os
import signal
import time
import unittest
from pathlib import Path

import checkpoints
from faults import FaultFs
from manifest import by_id
from mounts import HANGS, find_mount, needs_root, process_gone, run, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source


@needs_root
class Serving(ServiceCase):
    def setUp(self):
        super().setUp()
        self.right = checkpoints.hf_whole(SOURCE)
        self.a, self.b = self.target("a"), self.target("b")

    def two(self, **options):
        return mount_config("a", SOURCE, self.a, **options) + mount_config("b", SOURCE, self.b)

    def assert_serves(self, target):
        self.assert_mounted(target)
        self.assert_same((target / FILE).read_bytes(), self.right, target)

    def test_all_mounts_answer_when_the_service_is_ready_and_are_gone_when_it_stops(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        self.assert_serves(self.a)
        self.assert_serves(self.b)
        self.assertEqual(set(service.workers()), {"a", "b"})
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_done(tensorfs("status", self.a, self.b))
        workers = service.workers().values()
        self.assertEqual(service.stop(), 0, service.log())
        self.assert_not_mounted(self.a)
        self.assert_not_mounted(self.b)
        self.assertTrue(all(process_gone(pid) for pid in workers))
        self.assertEqual(service.manager.count("STOPPING=1"), 1)

    def test_a_mount_that_is_refused_is_named_and_does_not_stop_the_others(self):
        bad = mount_config("bad", self.tmp / "nothing", self.b)
        service = self.serve(mount_config("a", SOURCE, self.a) + bad)
        service.wait_until_ready()
        self.assert_serves(self.a)
        self.assert_not_mounted(self.b)
        service.wait_for_status("serving 1 of 2 mounts; bad failed: ")
        self.assertIn(f"{self.tmp}/nothing", service.manager.status())
        # It is mounted once its source is there.
        (self.tmp / "nothing").symlink_to(SOURCE)
        wait_until(lambda: find_mount(self.b), PATIENCE, "the mount comes")
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_serves(self.b)

    def test_a_service_without_a_mount_that_works_fails(self):
        service = self.serve(mount_config("a", self.tmp / "nothing", self.a))
        self.assertEqual(service.process.wait(PATIENCE), 1)
        self.assertEqual(service.manager.count("READY=1"), 0)
        self.assertIn("a failed: ", service.manager.status())
        self.assertIn("no mount of ", service.log())

    def test_a_service_without_mounts_waits_for_a_reload(self):
        service = self.serve("# nothing yet\n")
        service.wait_until_ready()
        self.assertIn("no mounts in ", service.manager.status())
        service.reload(self.two())
        service.wait_until_ready(2)
        self.assert_serves(self.b)

    def test_a_killed_worker_comes_back_and_the_others_do_not_notice(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        before = service.workers()
        held = self.open(self.b / FILE)
        os.kill(before["a"], signal.SIGKILL)
        wait_until(lambda: service.workers().get("a") not in (None, before["a"]), PATIENCE, "another worker")
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_serves(self.a)
        self.assertEqual(service.workers()["b"], before["b"])
        self.assert_same(os.pread(held, len(self.right), 0), self.right)
        self.assertEqual(service.log().count("was killed by SIGKILL"), 1)


if __name__ == "__main__":
    unittest.main()
