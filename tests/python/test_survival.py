"""Faults that a mount has to survive: right bytes or an error, never a hang, and nothing left behind."""

import atexit
import contextlib
import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import checkpoints
import oracle
import soak
from faults import (
    Cgroup, FaultyDisk, FaultyMount, Held, Load, Reading, digest_of, file_system, io_uring_works, open_files, read_ranges,
    status_of, values_of, without_io_uring,
)
from mounts import Child, Mount, TestCase, is_root, needs_root, process_gone, run, wait_until
from reading import raw_summary

FILE = "model.safetensors"
STALLED_SHARD = "model-00002-of-00003.safetensors"
STALLED = f"a/{STALLED_SHARD}"

MIB = 1 << 20
# Memory that a daemon may hold besides its cache.
SLACK = 64 * MIB

LOAD_ALL = """
import sys
sys.path.insert(0, sys.argv[1])
import reading
print(sorted(reading.genuine_summary(sys.argv[2], sys.argv[3]).items()))
"""


@functools.cache
def home():
    folder = Path(tempfile.mkdtemp(prefix="tensorfs-test-"))
    atexit.register(shutil.rmtree, folder)
    return folder


@functools.cache
def tree():
    """A source with two checkpoints: `a` of three shards and `b` of two. Nobody writes to it."""
    folder = home() / "tree"
    checkpoints.hf_set(folder / "a", 3, 24, seed=11)
    checkpoints.hf_set(folder / "b", 2, 4, seed=12)
    return folder


@functools.cache
def whole(name):
    """The bytes that the mount must show for a checkpoint of `tree`."""
    return checkpoints.hf_whole(tree() / name)


@functools.cache
def right_file(name):
    """The same in a file."""
    path = home() / f"{name}.right"
    path.write_bytes(whole(name))
    return path


@functools.cache
def large():
    """A checkpoint of 256 MiB and its contents as soak.py has them."""
    folder = home() / "large"
    return folder, soak.build_hf(folder, 256 * MIB)


def make_cold(folder):
    """Drops the files of a folder from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def inside(shard, length=1 << 16, n=1):
    """`n` aligned ranges of checkpoint `a` that lie in the largest tensor of a shard, far from its borders."""
    header = oracle.read_header(whole("a"))
    start, end = header.tensors[f"layers.{shard}.F32"]["data_offsets"]
    start, end = header.data_start + start + MIB, header.data_start + end - MIB - length
    return [[(start + (end - start) * i // n) // 4096 * 4096, length] for i in range(n)]


class Survival(TestCase):
    def setUp(self):
        super().setUp()
        # Before anything is timed; and what the kernel has cached of the source is served without the engine.
        whole("a"), whole("b")
        make_cold(tree())

    def assert_right(self, path, ranges, name="a", how="random", seconds=20):
        """Every range is read rightly; returns the longest time that one took."""
        found = read_ranges(path, ranges, how, seconds)
        for (offset, length), got in zip(ranges, found):
            self.assertEqual(got.errno, 0, f"{os.strerror(got.errno)} at {offset} of {path}")
            self.assertEqual(got.sha256, digest_of(whole(name), offset, length), f"wrong bytes at {offset} of {path}")
        return max(got.seconds for got in found)

    def assert_whole(self, m, name="a", seconds=30):
        """The whole file is right, through the page cache and past it, read as one range and as many."""
        size = len(whole(name))
        parts = [[start, min(MIB, size - start)] for start in range(0, size, MIB)]
        self.assert_right(m.path / name / FILE, [[0, size]], name, "pread", seconds)
        self.assert_right(m.path / name / FILE, parts, name, "direct", seconds)

    def assert_ends(self, m, seconds=10):
        """The daemon serves nobody any more: it is gone, or only threads that the kernel holds are left."""
        wait_until(lambda: process_gone(m.pid), seconds, "the daemon ends")

    def assert_status(self, m, key, check):
        """The value of `key` in `status`, where the command exists."""
        status = status_of(m)
        if status is not None:
            values = values_of(status, key)
            self.assertTrue(values and check(values), f"{key} of the status: {values}")

    def assert_nothing_grew(self, m, before):
        """The daemon, whose readers are all gone, holds no more than it did, and has no file of the source open."""
        left = grown = None

        def all_closed():
            nonlocal left
            left = open_files(m)
            return not left

        def given_back():
            nonlocal grown
            grown = Held.by(m).grown(before)
            return not grown

        with contextlib.suppress(AssertionError):
            wait_until(all_closed, 20, "the files of the source are closed")
        self.assertEqual(left, [])
        # Threads that have nothing to do end after ten seconds. A look that finds nothing counts: a thread that
        # checks the source now and then may be there at the next one.
        with contextlib.suppress(AssertionError):
            wait_until(given_back, 30, "everything is given back")
        self.assertEqual(grown, "")


class Stalls(Survival):
    """A source of which one shard does not answer."""

    def assert_timed_out(self, found, timeout):
        for got in found:
            self.assertEqual(got.errno, errno.EIO)
            self.assertGreater(got.seconds, timeout * 0.7)
            self.assertLess(got.seconds, timeout * 3 + 6)

    def test_a_read_that_stalls_fails_after_the_deadline_and_works_again_after_it(self):
        with FaultyMount(tree(), "io-timeout=2") as m:
            path = m.path / "a" / FILE
            m.faults.tell("stall", STALLED)
            self.assert_timed_out(read_ranges(path, inside(2), "random", 15), 2)
            m.wait_for_log(STALLED_SHARD)
            self.assert_status(m, "source_timeouts", lambda values: max(values) > 0)
            m.faults.tell("resume")
            self.assert_right(path, inside(2, n=4))
            self.assert_whole(m)
            self.assert_status(m, "source_stuck_now", lambda values: max(values) == 0)

    def test_a_whole_file_on_a_file_system_that_stalls_has_the_deadline_too(self):
        folder = self.tmp / "one"
        folder.mkdir()
        whole_file = folder / "model.safetensors"
        whole_file.write_bytes(whole("a"))
        with FaultyMount(folder, "io-timeout=1") as m:
            path = m.path / "model.safetensors"
            self.assertEqual(path.read_bytes(), whole("a"))
            m.faults.tell("stall", "*")
            Path("/proc/sys/vm/drop_caches").write_text("1")
            self.assert_timed_out(read_ranges(path, [[1 << 20, 4096]], "direct", 15), 1)
            m.faults.tell("resume")
            self.assertEqual(path.read_bytes(), whole("a"))

    def test_a_mapping_of_a_stalled_file_gets_sigbus_and_not_for_ever(self):
        with FaultyMount(tree(), "io-timeout=1") as m:
            m.faults.tell("stall", STALLED)
            with Reading(m.path / "a" / FILE, inside(2), "mmap") as child:
                code, _, err = child.finish(15)
            self.assertEqual(code, -signal.SIGBUS, err)
            m.faults.tell("resume")
            self.assert_right(m.path / "a" / FILE, inside(2), how="mmap")

    def test_everything_else_is_read_while_64_readers_wait_for_a_stalled_shard(self):
        with FaultyMount(tree(), "io-timeout=10") as m:
            path = m.path / "a" / FILE
            m.faults.tell("stall", STALLED)
            with Reading(path, inside(2, 1 << 14, 64), "direct") as stuck:
                wait_until(lambda: m.faults.parked(STALLED), 20, "the source stalls")
                # Less than the deadline, so that nobody has waited for it.
                for shard in (1, 3):
                    self.assertLess(self.assert_right(path, inside(shard, n=4)), 8)
                    self.assertLess(self.assert_right(path, inside(shard, n=4), how="direct"), 8)
                everything = [[0, len(whole("b"))]]
                self.assertLess(self.assert_right(m.path / "b" / FILE, everything, "b", "pread"), 8)
                self.assert_done(run("cat", m.path / "a/config.json", timeout=8))
                self.assert_done(run("ls", "-lR", m.path, timeout=8))
                self.assert_timed_out(stuck.finished(45), 10)
            self.assertGreater(m.faults.parked(STALLED), 0)
            m.faults.tell("resume")
            self.assert_right(path, inside(2, 1 << 14, 64), how="direct")

    def test_reading_on_towards_a_stalled_shard_gives_the_bytes_before_it(self):
        header = oracle.read_header(whole("a"))
        start, border = (header.data_start + header.tensors[f"layers.{n}.F32"]["data_offsets"][0] for n in (1, 2))
        # Bytes in one block with the stalled ones may share their fate.
        end = border - MIB
        with FaultyMount(tree(), "io-timeout=1") as m:
            m.faults.tell("stall", STALLED)
            self.assert_right(m.path / "a" / FILE, [[start, end - start]], how="pread")

    def test_readers_of_a_stalled_file_do_not_pile_up_in_the_daemon(self):
        with FaultyMount(tree(), "io-timeout=1", "cache=16M") as m:
            path = m.path / "a" / FILE
            self.assert_whole(m)
            before = Held.by(m)
            m.faults.tell("stall", STALLED)
            parked = []
            for _ in range(3):
                self.assert_timed_out(read_ranges(path, inside(2, 1 << 16, 64), "direct", 20), 1)
                parked.append(m.faults.parked(STALLED))
            # A lane has 64 reads under way; one source gets half of them, and no more once they are overdue.
            self.assertLessEqual(max(parked), 32, parked)
            self.assertLess(Held.by(m).peak, 16 * MIB + SLACK)
            m.faults.tell("resume")
            wait_until(lambda: not m.faults.parked(), 20, "the source answers")
            self.assert_right(path, inside(2, n=8))
            self.assert_nothing_grew(m, before)

    def test_a_mount_whose_source_stalls_can_be_unmounted(self):
        with FaultyMount(tree(), "io-timeout=1") as m:
            m.faults.tell("stall", STALLED)
            self.assert_timed_out(read_ranges(m.path / "a" / FILE, inside(2, n=4), "direct", 15), 1)
            self.assertGreater(m.faults.parked(STALLED), 0)
            self.assert_done(m.umount())
            self.assert_not_mounted(m.path)
            self.assert_ends(m)

    def test_sigterm_ends_a_mount_whose_source_stalls_under_its_readers(self):
        with FaultyMount(tree(), "io-timeout=2") as m:
            m.faults.tell("stall", STALLED)
            with Reading(m.path / "a" / FILE, inside(2, n=16), "direct") as stuck:
                wait_until(lambda: m.faults.parked(STALLED), 20, "the source stalls")
                m.kill(signal.SIGTERM)
                wait_until(lambda: not m.mounted(), 20, "the mount is gone")
                self.assertTrue(all(got.errno for got in stuck.finished(15)))
            self.assert_ends(m, 15)

    def test_other_files_are_read_while_one_cannot_be_opened_or_looked_at(self):
        for request in ("open", "getattr", "lookup"):
            with self.subTest(request=request), FaultyMount(tree(), "io-timeout=1") as m:
                m.faults.tell(f"stall-{request}", STALLED)
                with Reading(m.path / "a" / FILE, inside(2), "random") as stuck:
                    wait_until(lambda: m.faults.parked(STALLED), 20, "the source stalls")
                    everything = [[0, len(whole("b"))]]
                    self.assertLess(self.assert_right(m.path / "b" / FILE, everything, "b", "pread"), 3)
                    self.assert_done(run("cat", m.path / "a/config.json", timeout=3))
                    m.faults.tell("resume")
                    (got,) = stuck.finished(10)
                self.assertIn(got.errno, (0, errno.EIO, errno.ESTALE, errno.ENOENT))
                self.assert_right(m.path / "a" / FILE, inside(2, n=2))

    def test_a_file_that_cannot_be_opened_or_looked_at_fails_after_the_deadline(self):
        for request in ("open", "getattr", "lookup"):
            with self.subTest(request=request), FaultyMount(tree(), "io-timeout=1") as m:
                m.faults.tell(f"stall-{request}", STALLED)
                (got,) = read_ranges(m.path / "a" / FILE, inside(2), "random", 10)
                self.assertNotEqual(got.errno, 0)
                m.faults.tell("resume")
                self.assert_right(m.path / "a" / FILE, inside(2, n=2))

    def test_readers_that_cannot_open_a_stalled_file_do_not_pile_up_in_the_daemon(self):
        with FaultyMount(tree(), "io-timeout=1") as m:
            path = m.path / "a" / FILE
            before = Held.by(m).threads
            m.faults.tell("stall-open", STALLED)
            self.assert_timed_out(read_ranges(path, inside(2, n=32), "random", 20), 1)
            for _ in range(3):
                # The source holds enough threads now, and nobody has to wait again.
                found = read_ranges(path, inside(2, n=32), "random")
                self.assertEqual({got.errno for got in found}, {errno.EIO})
                self.assertLess(Held.by(m).threads, before + 16)
            m.wait_for_log("the source has not answered")
            self.assertEqual(m.log().count("the source has not answered"), 1)
            m.faults.tell("resume")
            wait_until(lambda: os.path.exists(path), 20, "the file is shown again")
            self.assert_right(path, inside(2, n=2))

    def test_a_change_is_seen_while_another_file_of_the_same_source_stalls(self):
        source = self.tmp / "tree"
        shutil.copytree(tree(), source)
        with FaultyMount(source, "io-timeout=30") as m:
            with open(m.path / "a" / FILE, "rb"), open(m.path / "b" / FILE, "rb") as reader:
                size = len(whole("b"))
                page = os.pread(reader.fileno(), 4096, size - 4096)
                m.faults.tell("stall-getattr", STALLED)
                wait_until(lambda: m.faults.parked(STALLED), 20, "the source stalls")
                shard = source / "b/model-00002-of-00002.safetensors"
                with open(shard, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(bytes([page[-1] ^ 1]))

                def fails():
                    try:
                        return os.pread(reader.fileno(), 4096, size - 4096) != page
                    except OSError as e:
                        return e.errno == errno.EIO

                wait_until(fails, 20, "the change is seen")
                with self.assertRaises(OSError):
                    os.pread(reader.fileno(), 4096, size - 4096)
                m.faults.tell("resume")

    def test_files_that_cannot_be_closed_keep_nobody_from_reading(self):
        with FaultyMount(tree(), "io-timeout=1") as m:
            self.assert_right(m.path / "a" / FILE, inside(2))
            m.faults.tell("stall-flush", "a/*")
            for _ in range(4):
                self.assert_done(run("head", "-c", "4096", m.path / "a" / FILE, timeout=5))
                time.sleep(0.2)
            wait_until(lambda: m.faults.parked("a/*"), 20, "a file is being closed")
            self.assertLess(self.assert_right(m.path / "b" / FILE, [[0, len(whole("b"))]], "b", "pread"), 3)
            m.faults.tell("resume")
            wait_until(lambda: not open_files(m), 20, "the files of the source are closed")

    def test_a_checkpoint_that_stalls_while_it_is_proved_keeps_nobody_from_the_others(self):
        with FaultyMount(tree(), "io-timeout=1") as m:
            m.faults.tell("stall", "b/*")
            with Reading(m.path / "b" / FILE, [[0, 4096]]) as stuck:
                wait_until(lambda: m.faults.parked("b/*"), 20, "the source stalls")
                self.assertLess(self.assert_right(m.path / "a" / FILE, inside(2, n=2)), 3)
                m.faults.tell("resume")
                (got,) = stuck.finished(10)
            self.assertIn(got.errno, (0, errno.EIO, errno.ENOENT))
            wait_until(lambda: (m.path / "b" / FILE).exists(), 20, "the checkpoint is shown")
            self.assert_right(m.path / "b" / FILE, [[0, len(whole("b"))]], "b", "pread")


@needs_root
class Disks(Survival):
    """A local disk, with a lane and perhaps an io_uring of its own, that stalls and fails; another one is well."""

    @contextlib.contextmanager
    def mounted(self, *options):
        """(the faults of the disk with `a`, a mount of `a` on it and of `b` elsewhere)"""
        source = self.tmp / f"source-{time.monotonic_ns()}"
        source.mkdir()
        shutil.copytree(tree() / "b", source / "b")
        disk = FaultyDisk(tree() / "a", source / "a")
        with disk, Mount(source, *options) as m, disk.faults.lifted() as faults:
            # The places of the blocks are known from now on, the bytes are not.
            self.assert_whole(m)
            make_cold(source / "a")
            make_cold(m.path / "a")
            with contextlib.ExitStack() as stack:
                # The names and inodes are not forgotten meanwhile either.
                for path in (source / "a").glob("*.*"):
                    stack.enter_context(open(path, "rb"))
                yield faults, m

    def test_a_local_disk_is_read_by_io_uring_where_the_kernel_has_it(self):
        backend = "io_uring" if io_uring_works() else "pread"
        with self.mounted() as (_, m):
            self.assert_status(m, "backend", lambda values: set(values) == {backend})

    def test_a_disk_that_stalls_fails_reads_after_the_deadline_and_keeps_no_other_disk_waiting(self):
        for io in ("auto", "pread"):
            with self.subTest(io=io), self.mounted(f"io={io}", "io-timeout=5") as (faults, m):
                path = m.path / "a" / FILE
                faults.tell("stall", "*")
                with Reading(path, inside(2, n=16), "direct") as stuck:
                    wait_until(faults.parked, 20, "the disk stalls")
                    everything = [[0, len(whole("b"))]]
                    # Less than the deadline, so that nobody has waited for it.
                    self.assertLess(self.assert_right(m.path / "b" / FILE, everything, "b", "direct"), 4)
                    found = stuck.finished(20)
                self.assertEqual({got.errno for got in found}, {errno.EIO})
                self.assertGreater(min(got.seconds for got in found), 4)
                self.assertGreater(faults.parked(), 0)
                faults.tell("resume")
                self.assert_right(path, inside(2, n=16), how="direct")

    def test_a_disk_that_fails_and_recovers_is_eio_and_then_right(self):
        for io in ("auto", "pread"):
            with self.subTest(io=io), self.mounted(f"io={io}") as (faults, m):
                path = m.path / "a" / FILE
                faults.tell("eio", "*")
                self.assertEqual({got.errno for got in read_ranges(path, inside(2, n=4), "direct")}, {errno.EIO})
                faults.tell("ok")
                self.assert_right(path, inside(2, n=4), how="direct")

    def test_a_mount_whose_disk_stalls_can_be_unmounted_and_ended(self):
        with self.mounted("io-timeout=1") as (faults, m):
            faults.tell("stall", "*")
            self.assertEqual({got.errno for got in read_ranges(m.path / "a" / FILE, inside(2, n=4), "direct")},
                             {errno.EIO})
            self.assert_done(m.umount())
            self.assert_not_mounted(m.path)
            self.assert_ends(m)


class Errors(Survival):
    """A source that fails and recovers."""

    def test_reads_of_a_failing_source_are_eio_and_right_again_once_it_recovers(self):
        with FaultyMount(tree()) as m:
            path = m.path / "a" / FILE
            m.faults.tell("eio", STALLED)
            for how in ("random", "direct"):
                self.assertEqual({got.errno for got in read_ranges(path, inside(2, n=4), how)}, {errno.EIO})
                self.assert_right(path, inside(1, n=2), how=how)
            m.wait_for_log(STALLED_SHARD)
            self.assert_status(m, "source_errors", lambda values: max(values) > 0)
            m.faults.tell("ok")
            self.assert_right(path, inside(2, n=4))
            self.assert_whole(m)

    def test_a_mapping_of_a_failing_source_gets_sigbus_and_the_next_one_the_bytes(self):
        with FaultyMount(tree()) as m:
            m.faults.tell("eio", STALLED)
            with Reading(m.path / "a" / FILE, inside(2), "mmap") as child:
                self.assertEqual(child.finish()[0], -signal.SIGBUS)
            m.faults.tell("ok")
            self.assert_right(m.path / "a" / FILE, inside(2), how="mmap")

    def settled_tree(self):
        """`tree`, which last changed so long ago that a look at its folders alone says that they have the same names."""
        wait_until(lambda: time.time() - (tree() / "a").stat().st_ctime > 5, 20, "the source is settled")
        return tree()

    def test_a_source_that_cannot_be_opened_or_looked_at_for_a_while_is_shown_again(self):
        for request in ("open", "getattr", "lookup"):
            with self.subTest(request=request), FaultyMount(self.settled_tree()) as m:
                path = m.path / "a" / FILE
                m.faults.tell(f"eio-{request}", STALLED)
                (got,) = read_ranges(path, inside(2))
                self.assertIn(got.errno, (0, errno.EIO, errno.ESTALE, errno.ENOENT))
                m.faults.tell("ok")
                wait_until(path.exists, 20, "the file is shown")
                self.assert_right(path, inside(2, n=2))

    def test_a_file_that_could_not_be_looked_at_while_its_folder_was_listed_is_shown_again(self):
        for request in ("getattr", "lookup"):
            with self.subTest(request=request), FaultyMount(self.settled_tree()) as m:
                path = m.path / "a" / FILE
                m.faults.tell(f"eio-{request}", STALLED)
                wait_until(lambda: not path.exists(), 20, "the file is not shown")
                m.faults.tell("ok")
                wait_until(path.exists, 20, "the file is shown")
                self.assert_right(path, inside(2, n=2))

    def test_descriptors_outlive_errors_that_come_and_go_under_16_threads(self):
        with FaultyMount(tree()) as m, Load(m.path / "a" / FILE, right_file("a"), 16) as load:
            for _ in range(6):
                m.faults.tell("eio", "a/*")
                time.sleep(0.05)
                m.faults.tell("ok")
                time.sleep(0.05)
            counts = load.stopped()
            self.assertEqual(counts["wrong"], 0)
            self.assertEqual(set(counts["errors"]), {str(errno.EIO)})
            self.assert_whole(m)

    def test_reads_that_the_source_answers_in_parts_are_put_together(self):
        with FaultyMount(tree()) as m:
            m.faults.tell("short", "*")
            self.assert_whole(m)
            self.assertGreater(m.faults.counts(STALLED)[STALLED]["reads"], 3)

    def test_a_slow_source_is_read_rightly(self):
        with FaultyMount(tree(), "io-timeout=5") as m:
            m.faults.tell("delay", "*", 5)
            self.assert_whole(m)

    def test_a_source_that_goes_away_is_an_error_and_no_hang(self):
        with FaultyMount(tree()) as m, Load(m.path / "a" / FILE, right_file("a"), 16, "direct", "end") as load:
            m.faults.stop()
            counts = load.ended()
            self.assertEqual(counts["wrong"], 0)
            self.assertTrue(m.alive())
            self.assert_done(m.umount())
            self.assert_ends(m)


class Storms(Survival):
    """Many readers at once."""

    def test_400_threads_fault_at_random_in_a_cold_mapping(self):
        folder, contents = large()
        make_cold(folder)
        with FaultyMount(folder) as m:
            target = soak.Target.of(m.path / FILE, contents)
            # Slow enough for all the threads to wait at once.
            m.faults.tell("delay", "*", 1)
            outcome = soak.storm(target, 400, 20, seconds=30)
            self.assertEqual(outcome.problem, "")
            self.assertEqual(outcome.faults, 400 * 20)
            self.assertTrue(m.alive())

    def test_8_processes_load_at_once_with_the_genuine_package(self):
        right = repr(sorted(raw_summary(right_file("a")).items()))
        here = Path(__file__).parent
        make_cold(tree())
        with Mount(tree()) as m, contextlib.ExitStack() as stack:
            loaders = [
                stack.enter_context(Child(LOAD_ALL, here, m.path / "a" / FILE, backend))
                for backend in ("mmap", "pread") * 4
            ]
            for loader in loaders:
                code, out, err = loader.finish(40)
                self.assertEqual(code, 0, err)
                self.assertTrue(out.strip() == right, "other tensors than were saved")

    def test_memory_stays_within_the_cache_and_its_slack_under_64_readers(self):
        folder, contents = large()
        make_cold(folder)
        with Mount(folder, "cache=16M") as m:
            target = soak.Target.of(m.path / FILE, contents)
            step = (target.size - target.data_start) // 64
            ranges = [[target.data_start + i * step, step] for i in range(64)]
            for how in ("direct", "pread"):
                self.assertEqual({got.errno for got in read_ranges(m.path / FILE, ranges, how, 60)}, {0})
            self.assertLess(Held.by(m).peak, 16 * MIB + SLACK)


class Limits(Survival):
    """A daemon that does not get what it would like to have."""

    @needs_root
    def test_a_small_cgroup_slows_the_daemon_at_most(self):
        folder, contents = large()
        make_cold(folder)
        with Cgroup(96 * MIB) as group, Mount(folder, "cache=32M", preexec_fn=group.enter) as m:
            target = soak.Target.of(m.path / FILE, contents)
            step = (target.size - target.data_start) // 32
            ranges = [[target.data_start + i * step, step] for i in range(32)]
            for got, (start, length) in zip(read_ranges(m.path / FILE, ranges, "pread", 60), ranges):
                self.assertEqual(got.sha256, oracle.sha256(target.expected(start, start + length).tobytes()))
            self.assertEqual(group.killed(), 0)
            self.assertTrue(m.alive())

    def test_without_io_uring_by_option_everything_is_right(self):
        with Mount(tree(), "io=pread") as m:
            self.assert_whole(m)
            self.assert_status(m, "backend", lambda values: set(values) == {"pread"})

    @needs_root
    def test_where_the_kernel_refuses_io_uring_everything_is_right(self):
        probe = "import ctypes; c = ctypes.CDLL(None, use_errno=True); c.syscall(425, 1, 0); print(ctypes.get_errno())"
        refused = run(sys.executable, "-c", probe, preexec_fn=without_io_uring)
        self.assertEqual(refused.stdout.strip(), str(errno.EPERM))
        with Mount(tree(), preexec_fn=without_io_uring) as m:
            self.assert_whole(m)
            self.assert_status(m, "backend", lambda values: set(values) == {"pread"})

    def test_every_way_of_reading_gives_the_same_bytes(self):
        for io in ("auto", "pread"):
            for direct in ("auto", "always", "never"):
                with self.subTest(io=io, direct=direct):
                    make_cold(tree() / "b")
                    with Mount(tree(), f"io={io}", f"direct={direct}") as m:
                        self.assert_whole(m, "b")

    @needs_root
    def test_file_systems_in_memory_are_read_whether_or_not_they_take_o_direct(self):
        for kind in ("tmpfs", "ramfs"):
            with file_system(kind, self.tmp / kind) as place:
                shutil.copytree(tree(), place / "tree")
                for direct in ("auto", "always", "never"):
                    with self.subTest(kind=kind, direct=direct), Mount(place / "tree", f"direct={direct}") as m:
                        self.assert_whole(m, "b")

    def test_a_source_that_refuses_o_direct_is_read_without(self):
        for direct in ("auto", "always"):
            with self.subTest(direct=direct), FaultyMount(tree(), f"direct={direct}") as m:
                m.faults.tell("no-direct", "*")
                self.assert_whole(m)

    def test_without_passthrough_whole_files_are_right_under_16_threads(self):
        alone = self.tmp / "alone"
        alone.mkdir()
        shutil.copy(right_file("a"), alone / FILE)
        with Mount(alone, "passthrough=never") as m, Load(m.path / FILE, right_file("a"), 16) as load:
            self.assertTrue((m.path / FILE).read_bytes() == whole("a"))
            time.sleep(0.3)
            counts = load.stopped()
            self.assertEqual((counts["wrong"], counts["errors"]), (0, {}))


class Departures(Survival):
    """Readers that are killed, and mounts that are taken off under theirs."""

    def test_50_readers_killed_in_the_middle_leave_nothing_behind(self):
        rng = random.Random(1)
        with Mount(tree()) as m:
            path = m.path / "a" / FILE
            self.assert_whole(m)
            before = Held.by(m)
            for _ in range(10):
                readers = [
                    subprocess.Popen(
                        ["dd", f"if={path}", "of=/dev/null", "bs=4M", *flags],
                        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    )
                    for flags in (["iflag=direct"],) * 4 + (["iflag=nocache"],)
                ]
                for reader in readers:
                    time.sleep(rng.random() * 0.01)
                    reader.kill()
                for reader in readers:
                    reader.wait(10)
            self.assertTrue(m.alive())
            self.assert_whole(m)
            self.assert_nothing_grew(m, before)

    def test_a_busy_mount_refuses_umount_and_goes_on(self):
        for command in (["umount"], None):
            if command and not is_root:
                command = ["fusermount3", "-u"]
            with self.subTest(command=command), Mount(tree()) as m:
                with Load(m.path / "a" / FILE, right_file("a"), 16, "direct") as load:
                    outcome = run(*command, m.path, timeout=10) if command else m.umount()
                    self.assertNotEqual(outcome.code, 0)
                    counts = load.stopped()
                self.assertEqual((counts["wrong"], counts["errors"]), (0, {}))
                self.assertTrue(m.mounted())

    def test_a_mount_taken_off_lazily_serves_16_threads_to_the_end(self):
        for command in (["umount", "-l"], None):
            if command and not is_root:
                command = ["fusermount3", "-u", "-z"]
            with self.subTest(command=command), Mount(tree()) as m:
                with Load(m.path / "a" / FILE, right_file("a"), 16, "direct") as load:
                    self.assert_done(run(*command, m.path, timeout=10) if command else m.umount("--lazy"))
                    self.assert_not_mounted(m.path)
                    time.sleep(0.2)
                    counts = load.stopped()
                self.assertEqual((counts["wrong"], counts["errors"]), (0, {}))
                self.assert_ends(m)

    @needs_root
    def test_a_mount_taken_off_by_force_fails_16_threads_and_ends(self):
        with Mount(tree()) as m, Load(m.path / "a" / FILE, right_file("a"), 16, "direct", "end") as load:
            self.assert_done(m.umount("--force"))
            self.assertEqual(load.ended(5)["wrong"], 0)
            self.assert_not_mounted(m.path)
            self.assert_ends(m)

    def test_two_signals_end_a_mount_under_16_threads(self):
        with Mount(tree()) as m, Load(m.path / "a" / FILE, right_file("a"), 16, "direct", "end") as load:
            m.kill(signal.SIGTERM)
            wait_until(lambda: not m.mounted(), 20, "the mount is gone")
            m.kill(signal.SIGTERM)
            self.assertEqual(load.ended(5)["wrong"], 0)
            self.assert_ends(m)

    def test_rounds_of_everything_leave_descriptors_threads_and_memory_as_they_were(self):
        with FaultyMount(tree(), "io-timeout=1", "cache=16M") as m:
            path = m.path / "a" / FILE

            def one_round():
                m.faults.tell("eio", STALLED)
                read_ranges(path, inside(2, n=8), "direct")
                m.faults.tell("ok")
                m.faults.tell("delay", "*", 1)
                self.assert_right(path, inside(2, n=16), how="mmap")
                self.assert_right(path, inside(3, n=16), how="direct")
                m.faults.tell("ok")
                self.assert_right(m.path / "b" / FILE, [[0, len(whole("b"))]], "b", "direct")

            one_round()
            before = Held.by(m)
            for _ in range(3):
                one_round()
            self.assert_nothing_grew(m, before)
            self.assertLess(Held.by(m).peak, 16 * MIB + SLACK)
