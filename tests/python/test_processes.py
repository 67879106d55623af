"""Daemons that end, are killed or are unmounted under their readers: nothing hangs and the place can be used again."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import checkpoints
from checkpoints import numbered_set
from manifest import by_id
from mounts import (
    BIN, Child, Mount, TestCase, daemon_of, detach, find_mount, is_root, mount_table, needs_root, pread_all, process_gone,
    run, tensorfs, wait_until,
)

FILE = "model.safetensors"

READERS = """
import mmap, os, random, sys, threading
path, n_threads, size = sys.argv[1], int(sys.argv[2]), os.stat(sys.argv[1]).st_size
started = threading.Barrier(n_threads + 1)
errors = []

def read():
    # O_DIRECT goes past the page cache, so that every read needs the daemon.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 18)
    try:
        os.preadv(fd, [buffer], 0)
        started.wait()
        while True:
            os.preadv(fd, [buffer], random.randrange(size) // 4096 * 4096)
    except OSError as error:
        errors.append(error.errno)

threads = [threading.Thread(target=read) for _ in range(n_threads)]
for thread in threads:
    thread.start()
started.wait()
print("ready", flush=True)
for thread in threads:
    thread.join()
print(len(errors), flush=True)
"""


@contextlib.contextmanager
def held_open(path):
    """An open descriptor; closing it may fail, as the daemon may be gone by then."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class Processes(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source

    def assert_daemon_ends(self, m):
        m.wait_for_exit()
        self.assertTrue(not m.alive())

    def assert_killed_readers_end(self, n_threads):
        """Kills the daemon under readers; each must get an error. Returns the dead mount."""
        source = checkpoints.hf_set(self.tmp / "large", 3, 30)
        m = self.enter(Mount(source, background=True))
        with Child(READERS, m.path / FILE, n_threads) as child:
            self.assertEqual(child.line(), "ready")
            time.sleep(0.3)
            m.kill()
            # A read that nobody answers hangs for ever; how soon readers run again depends on the machine.
            self.assertEqual(child.line(), str(n_threads))
        return m


class Ends(Processes):
    def test_sigterm_unmounts_and_the_daemon_exits(self):
        with Mount(self.source) as m:
            m.kill(signal.SIGTERM)
            self.assertEqual(m.wait_for_exit(), 0)
            self.assert_not_mounted(m.path)

    def test_sigterm_ends_a_background_daemon_too(self):
        with Mount(self.source, background=True) as m:
            (m.path / FILE).read_bytes()
            m.kill(signal.SIGTERM)
            self.assert_daemon_ends(m)
            self.assert_not_mounted(m.path)

    def test_sigterm_lets_open_files_be_read_to_the_end(self):
        with Mount(self.source) as m:
            with held_open(m.path / FILE) as descriptor:
                m.kill(signal.SIGTERM)
                wait_until(lambda: not m.mounted(), 20, "the mount is gone")
                self.assertEqual(os.pread(descriptor, 1 << 20, 0), checkpoints.hf_whole(self.source))
            self.assert_daemon_ends(m)

    def test_a_second_sigterm_does_not_wait_for_open_files(self):
        with Mount(self.source) as m, held_open(m.path / FILE):
            m.kill(signal.SIGTERM)
            wait_until(lambda: not m.mounted(), 20, "the mount is gone")
            m.kill(signal.SIGTERM)
            self.assert_daemon_ends(m)

    def test_sigint_ends_a_foreground_mount(self):
        with Mount(self.source) as m:
            m.kill(signal.SIGINT)
            self.assert_daemon_ends(m)
            self.assert_not_mounted(m.path)

    def test_a_background_mount_answers_as_soon_as_the_command_returns(self):
        for _ in range(5):
            with Mount(self.source, background=True) as m:
                self.assertTrue((m.path / FILE).exists())

    def test_a_background_daemon_keeps_no_terminal_and_no_pipe_open(self):
        mount_point = self.tmp / "mnt"
        mount_point.mkdir()
        # A pipe as stderr must reach its end although the daemon lives on.
        with Child(
            "import subprocess, sys; print(subprocess.run(sys.argv[1:], capture_output=True, timeout=20).returncode)",
            BIN, "mount", self.source, mount_point,
        ) as child:
            code, out, err = child.finish(25)
        self.assertEqual((code, out.strip()), (0, "0"), err)
        self.assert_done(tensorfs("umount", mount_point))

    def test_a_daemon_logs_to_the_file_it_is_given(self):
        log = self.tmp / "daemon.log"
        source = checkpoints.hf_set(self.tmp / "model", 3, 1)
        shard = sorted(source.glob("model-*"))[1]
        with Mount(source, f"log={log}", background=True) as m:
            os.truncate(shard, shard.stat().st_size - 1)
            with contextlib.suppress(OSError):
                (m.path / FILE).read_bytes()
            wait_until(lambda: log.exists() and shard.name in log.read_text(), 20, "the change is logged")


CLOSE = """
import os, sys
print("ready", flush=True)
input()
os.close(int(sys.argv[1]))
print("closed", flush=True)
"""


class Stopped(Processes):
    def test_a_file_is_closed_without_the_daemon(self):
        release = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
        if release < (5, 16):
            self.skipTest("before Linux 5.16 the daemon is asked at the first close")
        with Mount(self.source) as m, held_open(m.path / FILE) as descriptor:
            os.pread(descriptor, 1, 0)
            with Child(CLOSE, descriptor, pass_fds=[descriptor]) as child:
                self.assertEqual(child.line(), "ready")
                m.kill(signal.SIGSTOP)
                try:
                    state = Path(f"/proc/{m.pid}/stat")
                    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", 20, "the daemon stops")
                    # The first close of a file of this mount.
                    child.tell()
                    self.assertEqual(child.line(10), "closed")
                finally:
                    m.kill(signal.SIGCONT)


class Killed(Processes):
    def test_readers_of_a_killed_daemon_get_an_error_and_umount_cleans_up(self):
        m = self.assert_killed_readers_end(1)
        self.assertIsNotNone(find_mount(m.path))
        self.assert_done(m.umount())
        self.assert_not_mounted(m.path)

    def test_sixteen_threads_reading_from_a_killed_daemon_do_not_hang(self):
        m = self.assert_killed_readers_end(16)
        self.assert_done(m.umount())

    def test_a_dead_mount_is_mounted_again_without_umount(self):
        m = self.assert_killed_readers_end(1)
        with Mount(self.source, at=m.path) as again:
            self.assertEqual([e.path for e in mount_table()].count(str(again.path)), 1)
            self.assertTrue((again.path / FILE).read_bytes() == checkpoints.hf_whole(self.source))
        self.assert_not_mounted(m.path)


class Unmounting(Processes):
    def test_umount_of_a_busy_mount_fails_and_lazily_succeeds(self):
        with Mount(self.source) as m:
            with held_open(m.path / FILE) as descriptor:
                outcome = m.umount()
                self.assert_refused(outcome)
                self.assertIn("busy", outcome.stderr.lower())
                self.assertTrue(m.mounted())
                self.assert_done(m.umount("--lazy"))
                self.assert_not_mounted(m.path)
                self.assertEqual(os.pread(descriptor, 1 << 20, 0), checkpoints.hf_whole(self.source))
            self.assert_daemon_ends(m)

    def test_umount_by_force_ends_a_busy_mount(self):
        with Mount(self.source) as m, held_open(m.path / FILE):
            self.assert_done(m.umount("--force"))
            self.assert_not_mounted(m.path)
            # Others may not end the connection, only take the mount off.
            if is_root:
                self.assert_daemon_ends(m)

    def test_the_system_umount_ends_the_daemon(self):
        with Mount(self.source) as m:
            self.assert_done(run(*(["umount"] if is_root else ["fusermount3", "-u"]), m.path))
            self.assert_daemon_ends(m)

    @needs_root
    def test_a_lazy_system_umount_ends_the_daemon(self):
        with Mount(self.source) as m:
            self.assert_done(run("umount", "-l", m.path))
            self.assert_daemon_ends(m)

    def test_umount_of_what_is_not_mounted_is_refused(self):
        for path in (self.tmp, self.tmp / "missing", "/"):
            self.assert_refused(tensorfs("umount", path))

    @needs_root
    def test_umount_leaves_other_file_systems_alone(self):
        place = self.tmp / "tmpfs"
        place.mkdir()
        self.assert_done(run("mount", "-t", "tmpfs", "none", place))
        try:
            self.assert_refused(tensorfs("umount", place))
            self.assertEqual(find_mount(place).type, "tmpfs")
        finally:
            detach(place)

    def test_mounting_and_unmounting_20_times_leaves_nothing(self):
        place = self.tmp / "mnt"
        place.mkdir()
        for _ in range(20):
            with Mount(self.source, at=place) as m:
                (m.path / FILE).stat()
            self.assert_not_mounted(place)


def forget_pages(descriptor):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class StartAndEnd(TestCase):
    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "model", 1)
        self.whole = checkpoints.hf_whole(self.source)

    def still_right(self, descriptor, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            forget_pages(descriptor)
            self.assert_same(pread_all(descriptor, len(self.whole), 0), self.whole)
            time.sleep(0.05)

    def read_fails(self, descriptor):
        forget_pages(descriptor)
        try:
            pread_all(descriptor, len(self.whole), 0)
        except OSError:
            return True
        return False

    # SIGTERM waited for open files without end, so that a service never stopped; when it did not wait,
    # programs in the middle of loading failed.
    def test_sigterm_serves_an_open_file_for_a_while_and_not_for_ever(self):
        with Mount(self.source, watchdog=40) as m:
            descriptor = os.open(m.path / FILE, os.O_RDONLY)
            try:
                started = time.monotonic()
                m.kill(signal.SIGTERM)
                # The daemon goes on for eleven seconds after the signal.
                wait_until(lambda: not m.mounted(), 20, "the mount is gone")
                self.still_right(descriptor, 2)
                m.wait_for_exit(30)
                self.assertGreater(time.monotonic() - started, 10)
                wait_until(lambda: self.read_fails(descriptor), 20, "reads fail")
            finally:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    # The daemon looked at its own mount to see whether it answers; killed in that moment it waited
    # for an answer that only itself could give, and could not be killed at all.
    def test_a_daemon_killed_right_after_the_start_is_gone(self):
        place = self.mount_point()
        for number in range(10):
            words = [str(w) for w in (BIN, "mount", "--foreground", self.source, place)]
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                wait_until(lambda: find_mount(place) or process.poll() is not None, 20, "the mount is in the table")
                self.assertIsNone(process.poll())
                process.kill()
                wait_until(lambda: process_gone(process.pid), 20, f"it is gone, round {number}")
                wait_until(lambda: daemon_of(place) is None, 20, "and so is all that it started")
            finally:
                process.kill()
                detach(place)
                process.wait(10)
