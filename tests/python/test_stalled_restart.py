"""Restart and upgrade of `tensorfs serve` while a source does not answer: nobody waits for it longer than a bound."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import checkpoints
from faults import FaultFs, FaultyMount
from manifest import by_id
from mounts import BIN, Child, detach, needs_root, process_gone, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model/model.safetensors"
SOURCE = by_id("hf_three_shards").source

# Longest wait of a reader: the shortest limit of a takeover, and the time of a busy machine.
BOUND = 25

# Requests of the kernel that a source may leave without an answer.
REQUESTS = ("stall-lookup", "stall-getattr", "stall-readdir", "stall-open", "stall", "stall-statfs", "stall-flush")

# Reads 100 bytes of an open file all the time. Answers each line of its input with the numbers of answers and errors so
# far, and the longest time of a read.
LOOP = """
import json, os, sys, threading, time
path, offset = sys.argv[1], int(sys.argv[2])
descriptor = os.open(path, os.O_RDONLY)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
figures = {"right": 0, "errors": 0, "wrong": 0}
right = bytes.fromhex(sys.argv[3])
began = longest = 0

def read():
    global began, longest
    while True:
        began = time.monotonic()
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            same = os.pread(descriptor, 100, offset) == right
            figures["right" if same else "wrong"] += 1
        except OSError:
            figures["errors"] += 1
        longest = max(longest, time.monotonic() - began)
        time.sleep(0.01)

threading.Thread(target=read, daemon=True).start()
print("open", flush=True)
for line in sys.stdin:
    print(json.dumps([figures, max(longest, time.monotonic() - began)]), flush=True)
os._exit(0)
"""

# Lists a folder, with or without success.
LIST = """
import os, sys
try:
    os.listdir(sys.argv[1])
except OSError:
    pass
print("listed", flush=True)
"""


@needs_root
class StalledRestarts(ServiceCase):
    def setUp(self):
        super().setUp()
        self.right = checkpoints.hf_whole(SOURCE)
        self.store = self.copy(SOURCE, "store/model").parent
        self.faults = self.enter(FaultFs(self.store))
        self.a, self.b = self.target("a"), self.target("b")

    def serve_two(self, options="io-timeout=1,index-dir=none", **popen):
        config = mount_config("a", self.faults.path, self.a, options) + mount_config("b", self.store, self.b)
        service = self.serve(config, **popen)
        service.wait_until_ready()
        wait_until((self.a / FILE).exists, PATIENCE, "the checkpoint is shown")
        return service

    def reader(self, path):
        half = len(self.right) // 2
        child = self.enter(Child(LOOP, path, half, self.right[half:][:100].hex()))
        self.assertEqual(child.line(BOUND), "open")
        self.moves(child)
        return child

    def look(self, reader):
        reader.tell()
        return json.loads(reader.line(BOUND))

    def moves(self, reader, reads=2):
        """Waits until `reads` more reads have ended. The second one begins from now on."""
        before = self.look(reader)[0]

        def has_moved():
            now, longest = self.look(reader)
            return sum(now.values()) >= sum(before.values()) + reads

        wait_until(has_moved, BOUND, "the reader has an answer or an error")

    def restart(self, service):
        service.restart()

    def upgrade(self, service):
        """Another file takes the place of the program, and a reload runs it."""
        shutil.copy(BIN, self.tmp / "newer")
        os.replace(self.tmp / "newer", service.binary)
        service.reload()
        service.wait_for_log("goes on")

    def stop_answering(self):
        """Nothing is answered any more, not even the close of a file."""
        os.kill(self.faults.pid, signal.SIGSTOP)
        self.addCleanup(os.kill, self.faults.pid, signal.SIGCONT)

    def answer_again(self):
        os.kill(self.faults.pid, signal.SIGCONT)
        self.faults.tell("ok")

    def stall(self, *requests, glob="*"):
        for request in requests:
            self.faults.tell(request, glob)

    def check_lost(self, stall, replace, *, options="io-timeout=1,index-dir=none"):
        """Readers of a source that does not answer get errors after `replace`, and others notice nothing."""
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        service = self.serve_two(options, binary=binary)
        stalled, other = self.reader(self.a / FILE), self.reader(self.b / FILE)
        stall()
        Path("/proc/sys/vm/drop_caches").write_text("1")
        began = time.monotonic()
        replace(service)
        lists = [self.enter(Child(LIST, folder)) for folder in (self.a, self.b)]
        # One that began before, and one after it.
        self.moves(stalled)
        self.moves(other)
        self.assertEqual([child.line(BOUND) for child in lists], ["listed"] * 2)
        self.assertLess(time.monotonic() - began, BOUND)
        self.assertGreater(self.look(stalled)[0]["errors"], 0)
        self.assertEqual(self.look(other)[0]["errors"], 0, service.log())
        service.wait_for_log("its readers get errors, and it is mounted anew")
        # Neither stalled the supervisor.
        service.wait_for_status("serving 1 of 2 mounts; a failed: ")
        self.assert_done(tensorfs("serve", "--check", "--config", service.file))
        # It ends in time. Mounts of others may be dead.
        tensorfs("status")
        self.answer_again()
        service.wait_for_status("serving 2 of 2")
        self.assert_same((self.a / FILE).read_bytes(), self.right)
        for reader in (stalled, other):
            self.assertEqual(self.look(reader)[0]["wrong"], 0)

    def test_after_a_restart_readers_of_a_source_that_does_not_answer_get_errors_and_others_go_on(self):
        self.check_lost(lambda: self.stall(*REQUESTS), self.restart)

    def test_a_restart_does_not_wait_for_a_file_system_that_has_stopped(self):
        self.check_lost(self.stop_answering, self.restart)

    def test_an_upgrade_does_not_wait_for_a_file_system_that_has_stopped(self):
        self.check_lost(self.stop_answering, self.upgrade)

    def test_a_worker_that_has_failed_and_cannot_end_does_not_hold_up_its_readers(self):
        # The source answers, and a folder in it does not: a thread of the worker waits for it.
        self.check_lost(lambda: self.stall("stall-readdir", glob="model"), self.restart)

    def test_a_service_whose_only_source_does_not_answer_goes_on_over_a_restart(self):
        service = self.serve(mount_config("a", self.faults.path, self.a, "io-timeout=1,index-dir=none"))
        service.wait_until_ready()
        wait_until((self.a / FILE).exists, PATIENCE, "the checkpoint is shown")
        self.stop_answering()
        service.restart()
        # The second time not for a takeover.
        service.wait_for_log("no answer within 1 seconds (io-timeout=); not mounted; next try in ")
        service.wait_for_status("serving 0 of 1 mount; a failed: ")
        self.answer_again()
        service.wait_for_status("serving 1 of 1")
        self.assertIsNone(service.process.poll())
        self.assert_same((self.a / FILE).read_bytes(), self.right)

    def test_mounts_on_mounts_are_taken_over_while_only_reads_stall_and_their_open_files_go_on(self):
        options = "io-timeout=1,index-dir=none"
        config = mount_config("a", self.faults.path / "model", self.a, options) + mount_config("b", self.a, self.b, options)
        service = self.serve(config)
        service.wait_until_ready()
        name = Path(FILE).name
        files = [path / name for path in (self.a, self.b)]
        wait_until(lambda: all(file.exists() for file in files), PATIENCE, "the checkpoint is shown on both")
        readers = [self.reader(path / name) for path in (self.a, self.b, self.b)]
        self.stall("stall")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        service.restart()
        [self.moves(reader, 1) for reader in readers]
        service.wait_for_status("serving 2 of 2")
        self.answer_again()

        def have_more():
            return all(self.look(reader)[0]["right"] > then for reader, then in zip(readers, before, strict=True))

        before = [self.look(reader)[0]["right"] for reader in readers]
        wait_until(have_more, PATIENCE, "open files are read again")
        for reader in readers:
            figures, longest = self.look(reader)
            self.assertEqual(figures["wrong"], 0)
            self.assertLess(longest, BOUND)

    def test_readers_of_a_killed_worker_get_errors_although_a_thread_of_it_waits_for_its_source(self):
        service = self.serve_two("io-timeout=0,index-dir=none,io=pread")
        stalled = self.reader(self.a / FILE)
        self.stall("stall")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        wait_until(self.faults.parked, PATIENCE, "a read waits for the source")
        os.kill(service.workers()["a"], signal.SIGKILL)
        service.wait_for_log("has ended, but a thread of it waits for a file system")
        self.moves(stalled)
        self.answer_again()
        service.wait_for_status("serving 2 of 2")

    def test_readers_of_a_mount_that_ends_get_errors_although_a_thread_of_it_waits_for_its_source(self):
        with FaultyMount(self.store, "io-timeout=0", "io=pread") as m:
            wait_until((m.path / FILE).exists, PATIENCE, "the checkpoint is shown")
            reader = self.reader(m.path / FILE)
            m.faults.tell("stall", "*")
            Path("/proc/sys/vm/drop_caches").write_text("1")
            wait_until(m.faults.parked, PATIENCE, "a read waits for the source")
            m.kill(signal.SIGTERM)
            wait_until(lambda: not m.mounted(), PATIENCE, "the mount is off")
            m.kill(signal.SIGTERM)
            self.moves(reader)

    def wait_for_stuck_thread(self, faults, reader):
        """Waits until a thread of the daemon waits for the source, although the reader has an error already."""
        Path("/proc/sys/vm/drop_caches").write_text("1")
        wait_until(faults.parked, PATIENCE, "a request waits for the source")
        wait_until(lambda: self.look(reader)[0]["errors"], PATIENCE, "the reader gets an error")

    def test_a_start_after_all_was_killed_ends_a_connection_that_a_thread_of_a_killed_worker_keeps(self):
        service = self.serve_two()
        stalled = self.reader(self.a / FILE)
        self.stall(*REQUESTS)
        self.wait_for_stuck_thread(self.faults, stalled)
        # As by `systemctl kill -s KILL`.
        pids = [*service.workers().values(), service.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: all(map(process_gone, pids)), PATIENCE, "killed processes end")
        service.process.wait(PATIENCE)
        service.start()
        self.moves(stalled)
        self.assertEqual(self.enter(Child(LIST, self.a)).line(BOUND), "listed")
        service.wait_for_status("serving 1 of 2 mounts; a failed: ")
        self.answer_again()
        service.wait_for_status("serving 2 of 2")
        self.assert_same((self.a / FILE).read_bytes(), self.right)

    def test_a_killed_daemon_is_dead_although_a_thread_of_it_waits_for_its_source(self):
        # As after the kernel has killed it for memory: by the unit, and by a mount of the same target.
        for clean in (lambda m: tensorfs("umount", "--dead", m.path), lambda m: tensorfs("mount", self.store, m.path)):
            with self.subTest(), FaultyMount(self.store, "io-timeout=1", "index-dir=none") as m:
                wait_until((m.path / FILE).exists, PATIENCE, "the checkpoint is shown")
                reader = self.reader(m.path / FILE)
                m.faults.tell("stall", "*")
                self.wait_for_stuck_thread(m.faults, reader)
                # An alive one stays, also if its source does not answer.
                self.assert_done(tensorfs("umount", "--dead", m.path))
                self.assertTrue(m.mounted())
                m.kill()
                wait_until(lambda pid=m.pid: process_gone(pid), PATIENCE, "the killed daemon ends")
                self.assert_done(clean(m))
                self.moves(reader)
                m.faults.tell("ok")
                detach(m.path)


if __name__ == "__main__":
    import unittest

    unittest.main()
