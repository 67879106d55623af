"""`-o verify=read`: a mount hands out bytes of a tensor only once all of it was compared with its checksums."""

import contextlib
import errno
import os
import shutil
import signal

import checkpoints
import oracle
from faults import FaultFs, Reading, digest_of, read_ranges, status_of
from mounts import Child, Mount, MountFailed, needs_root, pread_all, tensorfs, wait_until
from test_checksums import VerifyCase, bintensors, flip, places, shards_of, single

FILE = "model.safetensors"
PAGE = 4096

# Touches one byte of a mapped file.
TOUCH = """
import mmap, os, sys
with mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ) as mapped:
    print(mapped[int(sys.argv[2])], flush=True)
"""


def inner_pages(start, end):
    """The part of a range that no page shares with what stands beside it."""
    return -(-start // PAGE) * PAGE, end // PAGE * PAGE


def counters(m):
    return status_of(m)[0]["counters"]


def log_lines(path, text):
    return [line for line in path.read_text().splitlines() if text in line] if path.exists() else []


def logged_lines(path, text):
    """Waits for the line: a daemon answers first and logs then."""
    return wait_until(lambda: log_lines(path, text), 20, f"a line with {text!r} in the log")


class VerifyRead(VerifyCase):
    def mount(self, source, *options, **kwargs):
        self.log = self.tmp / "log"
        return Mount(source, "verify=read", f"log={self.log}", *options, background=True, **kwargs)

    def read(self, path, start, end):
        """Bytes of a file, or the errno."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return pread_all(descriptor, end - start, start)
        except OSError as error:
            return error.errno
        finally:
            os.close(descriptor)

    def right(self, source):
        """The content that a mount without `verify=read` shows."""
        with Mount(source) as m:
            return (m.path / FILE).read_bytes()

    def assert_only(self, path, right, damaged, names=None):
        """Every page of a file reads right that is in none of the tensors `damaged`; pages of these fail. In between,
        where two tensors share a page, either may be."""
        ranges = places_of(right)
        for name, (start, end) in ranges.items():
            start, end = inner_pages(start, end)
            if start < end and (names is None or name in names):
                for at in {start, (start + end) // 2 // PAGE * PAGE, end - PAGE}:
                    found = self.read(path, at, at + PAGE)
                    self.assertEqual(found, errno.EIO if name in damaged else right[at : at + PAGE], (name, at))

    def test_without_checksums_a_mount_is_refused_with_what_to_do(self):
        folder = single(self.tmp / "ck")
        with self.assertRaises(MountFailed) as failed, Mount(folder, "verify=read"):
            pass
        self.assertIn(f"run `tensorfs verify {folder / FILE}` with the same options first", failed.exception.stderr)
        self.assertIn(os.environ["TENSORFS_INDEX_DIR"], failed.exception.stderr)
        with self.assertRaises(MountFailed) as failed, Mount(folder, "verify=read", "index-dir=none"):
            pass
        self.assertIn("there is no folder of checksums", failed.exception.stderr)
        self.verify(folder / FILE)
        with Mount(folder, "verify=read"):
            pass

    def test_a_file_saved_anew_has_to_be_verified_first(self):
        folder = single(self.tmp / "ck")
        self.verify(folder)
        os.replace(single(self.tmp / "new", seed=4) / FILE, folder / FILE)
        with self.assertRaises(MountFailed) as failed, Mount(folder, "verify=read"):
            pass
        self.assertIn("no checksums of it as it is now are recorded", failed.exception.stderr)

    def test_in_a_tree_only_what_has_checksums_is_shown(self):
        tree = self.tmp / "tree"
        good, other = checkpoints.hf_set(tree / "good", 2, 1), checkpoints.hf_set(tree / "other", 2, 1)
        self.verify(good)
        with self.mount(tree) as m:
            self.assertEqual(len((m.path / "good" / FILE).read_bytes()), (m.path / "good" / FILE).stat().st_size)
            self.assertFalse((m.path / "other" / FILE).exists())
            self.assertIn("not_recorded", (m.path / "other" / "TENSORFS-ERROR.txt").read_text())
            self.assertEqual((m.path / "other" / "config.json").read_bytes(), (other / "config.json").read_bytes())

    def test_a_header_that_differs_refuses_the_set(self):
        folder = checkpoints.hf_set(self.tmp / "ck", 2, 1)
        self.verify(folder)
        shard = shards_of(folder)[1]
        flip(shard, shard.read_bytes().index(b'"pt"') + 1, 0)
        with self.assertRaises(MountFailed) as failed, Mount(folder, "verify=read"):
            pass
        self.assertRegex(failed.exception.stderr, rf"{shard.name}: bytes 0\.\.\d+, its header, have the checksum")

    def test_whole_files_and_merged_ones_have_the_right_bytes(self):
        folders = {
            "hf": checkpoints.hf_set(self.tmp / "hf", 3, 6),
            "dcp": checkpoints.grid_2d(self.tmp / "dcp"),
            "uneven": checkpoints.uneven(self.tmp / "uneven"),
            "single": single(self.tmp / "single"),
        }
        for kind, folder in folders.items():
            right = self.right(folder)
            self.verify(folder)
            data = sum(end - start for s in shards_of(folder) for start, end in places(s).values())
            for options in ((), ("io=pread",), ("direct=always",), ("passthrough=never", "cache=16M")):
                with self.subTest(kind, options=options), self.mount(folder, *options) as m:
                    self.assertEqual((m.path / FILE).read_bytes(), right)
                    # Once, however often it is read: all tensors, and the header where that is read, too.
                    for how in ("random", "mmap", "direct"):
                        [got] = read_ranges(m.path / FILE, [(0, len(right) if how != "direct" else PAGE)], how)
                        self.assertEqual(got.errno, 0)
                    now = counters(m)
                    header = 0 if kind != "single" else oracle.read_header(right).data_start
                    self.assertEqual(now["checked_bytes"], data + header)
                    self.assertEqual((now["checksum_mismatches"], now["read_errors"]), (0, 0))

    def test_the_shards_of_the_original_layout_are_compared(self):
        folder = checkpoints.hf_set(self.tmp / "ck", 2, 3)
        self.verify(folder)
        first, last = shards_of(folder)
        flip(last, places(last)["layers.2.F16"][0] + 3 * PAGE)
        with self.mount(folder, "layout=original") as m:
            self.assertEqual((m.path / first.name).read_bytes(), first.read_bytes())
            self.assert_only(m.path / last.name, last.read_bytes(), {"layers.2.F16"})

    def test_only_the_tensor_that_differs_fails_and_that_wherever_it_is_touched(self):
        folders = {
            "layers.1.F16": checkpoints.hf_set(self.tmp / "hf", 3, 3),
            "b": checkpoints.grid_2d(self.tmp / "dcp"),
            "big": single(self.tmp / "single"),
        }
        for tensor, folder in folders.items():
            right = self.right(folder)
            self.verify(folder)
            shard = next(s for s in shards_of(folder) if tensor in places(s))
            flip(shard, places(shard)[tensor][1] - 1)
            for options in ((), ("io=pread",), ("direct=always", "io=uring"), ("passthrough=auto",)):
                with self.subTest(tensor, options=options), self.mount(folder, *options) as m:
                    self.assert_only(m.path / FILE, right, {tensor})
                    self.assertEqual(counters(m)["checksum_mismatches"], 1)
                    [line] = logged_lines(self.log, "have the checksum")
                    self.assertIn(f"{shard}: tensor `{tensor}`: bytes ", line)
                    self.assertIn("reads of it through the mount fail", line)
                self.log.unlink()

    def test_bintensors_files_and_views_are_compared(self):
        folder = bintensors(self.tmp / "bt")
        right = self.right(folder)
        self.verify(folder)
        file = folder / "model.bt"
        with self.mount(folder) as m, self.mount(folder, "format=bintensors") as raw:
            self.assertEqual((m.path / FILE).read_bytes(), right)
            self.assertEqual((raw.path / file.name).read_bytes(), file.read_bytes())
        flip(file, file.read_bytes().index(checkpoints.random_bytes(1, 5000)) + 9000)
        with self.mount(folder) as m, self.mount(folder, "format=bintensors") as raw:
            self.assert_only(m.path / FILE, right, {"big"})
            self.assertEqual(self.read(raw.path / file.name, 5 * PAGE, 6 * PAGE), errno.EIO)

    def test_a_mapping_of_a_tensor_that_differs_ends_in_sigbus_and_of_others_does_not(self):
        folder = checkpoints.hf_set(self.tmp / "ck", 2, 3)
        right = self.right(folder)
        self.verify(folder)
        shard = shards_of(folder)[0]
        flip(shard, places(shard)["layers.1.F32"][0])
        ranges = places_of(right)
        with self.mount(folder) as m:
            for name, expected in (("layers.1.F32", -signal.SIGBUS), ("layers.2.F32", 0), ("layers.1.U8", 0)):
                at = sum(ranges[name]) // 2
                with Child(TOUCH, m.path / FILE, at) as child:
                    code, out, _ = child.finish()
                self.assertEqual(code, expected, name)
                self.assertEqual(out.strip(), "" if expected else str(right[at]))

    def test_a_page_that_a_damaged_tensor_shares_is_refused_with_it(self):
        folder = single(self.tmp / "ck")
        right = self.right(folder)
        self.verify(folder)
        flip(folder / FILE, places(folder / FILE)["small"][0])
        start, end = places(folder / FILE)["small"]
        with self.mount(folder) as m:
            self.assertEqual(self.read(m.path / FILE, start, end), errno.EIO)
            self.assertEqual(self.read(m.path / FILE, 0, PAGE), right[:PAGE])
            self.assert_only(m.path / FILE, right, set(), {"big"})

    def test_sixty_four_threads_share_one_comparison(self):
        folder = checkpoints.hf_set(self.tmp / "ck", 2, 12)
        right = self.right(folder)
        self.verify(folder)
        shard = shards_of(folder)[1]
        flip(shard, places(shard)["layers.2.U8"][0])
        good, bad = inner_pages(*places_of(right)["layers.1.F32"]), inner_pages(*places_of(right)["layers.2.U8"])
        step = lambda start, end: (end - start) // 32 // PAGE * PAGE
        ranges = [(start + step(start, end) * n, PAGE) for start, end in (good, bad) for n in range(32)]
        with self.mount(folder) as m:
            found = read_ranges(m.path / FILE, ranges, "random", 60)
            for (at, length), got in zip(ranges, found):
                wrong = bad[0] <= at < bad[1]
                self.assertEqual(got.errno, errno.EIO if wrong else 0)
                self.assertEqual(got.sha256, "-" if wrong else digest_of(right, at, length))
            tensors = [end - start for start, end in (places_of(right)[n] for n in ("layers.1.F32", "layers.2.U8"))]
            # The read of the file that differs may end before all of it is read.
            self.assertLessEqual(counters(m)["checked_bytes"], sum(tensors))
            self.assertEqual(len(logged_lines(self.log, "have the checksum")), 1)

    def test_a_mount_that_is_made_again_compares_again(self):
        folder = single(self.tmp / "ck")
        self.verify(folder)
        right = self.right(folder)
        for _ in range(2):
            with self.mount(folder) as m:
                self.assertEqual((m.path / FILE).read_bytes(), right)
                self.assertEqual(counters(m)["checked_bytes"], len(right))
        flip(folder / FILE, places(folder / FILE)["big"][0] + 9000)
        with self.mount(folder) as m:
            self.assert_only(m.path / FILE, right, {"big"})
        # Once it is recorded on purpose it is what is right.
        self.assertEqual(self.verify(folder, "--record")["checksums"], "recorded")
        with self.mount(folder) as m:
            self.assertEqual((m.path / FILE).read_bytes(), (folder / FILE).read_bytes())

    def test_a_tensor_that_was_compared_fails_once_its_shard_is_written_to(self):
        folder = checkpoints.hf_set(self.tmp / "ck", 2, 3)
        right = self.right(folder)
        self.verify(folder)
        shard = shards_of(folder)[0]
        start, _ = inner_pages(*places_of(right)["layers.1.F32"])
        with self.mount(folder) as m:
            self.assertEqual(self.read(m.path / FILE, start, start + PAGE), right[start : start + PAGE])
            flip(shard, places(shard)["layers.1.F32"][0] + 2 * PAGE)
            wait_until(lambda: self.read(m.path / FILE, start, start + PAGE) == errno.EIO, 20, "the change is seen")

    @needs_root
    def test_nothing_is_assembled_and_no_whole_file_is_left_to_the_kernel(self):
        folder = single(self.tmp / "ck")
        self.verify(folder)
        (folder / "notes.txt").write_bytes(b"plain" * 4000)
        with self.mount(folder, f"assemble={self.tmp / 'copies'}") as m:
            for _ in range(3):
                self.assertEqual((m.path / FILE).read_bytes(), (folder / FILE).read_bytes())
            self.assertEqual((m.path / "notes.txt").read_bytes(), b"plain" * 4000)
            self.assertGreater(counters(m)["bytes_served"], 0)
            self.assertEqual(len(log_lines(self.log, "with verify=read no copies are used")), 1)
        self.assertFalse((self.tmp / "copies").exists())


class Stalls(VerifyCase):
    """Sources that do not answer: needs the bytes to be out of the page cache of the source."""

    def setUp(self):
        super().setUp()
        self.folder = checkpoints.hf_set(self.tmp / "ck", 2, 6)
        self.right = VerifyRead.right(self, self.folder)

    def at(self, name):
        start, end = inner_pages(*places_of(self.right)[name])
        return (start + end) // 2 // PAGE * PAGE

    def mounted(self, *options):
        """A mount of a source that misbehaves on command, verified before."""
        faults = self.enter(FaultFs(self.folder))
        self.verify(faults.path)
        m = self.enter(Mount(faults.path, "verify=read", "io-timeout=2", f"log={self.tmp / 'log'}", *options))
        for shard in shards_of(self.folder):
            descriptor = os.open(faults.path / shard.name, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
        self.enter(faults.lifted())
        return faults, m

    def test_a_shard_that_stalls_fails_its_readers_at_the_deadline_and_no_others(self):
        faults, m = self.mounted()
        stalled = shards_of(self.folder)[0].name
        faults.tell("stall", stalled)
        names = [f"layers.1.{dtype}" for dtype in ("F32", "F16", "U8", "I64")]
        with Reading(m.path / FILE, [(self.at(name), PAGE) for name in names * 4], "random") as late:
            wait_until(lambda: faults.parked() > 0, 20, "the source stalls")
            at = self.at("layers.2.F32")
            [got] = read_ranges(m.path / FILE, [(at, PAGE)], "random")
            self.assertEqual((got.errno, got.sha256), (0, digest_of(self.right, at, PAGE)))
            # The kernel asks again for single pages.
            for got in late.finished(30):
                self.assertEqual(got.errno, errno.EIO)
        self.assertGreater(counters(m)["source_timeouts"], 0)
        self.assertEqual(counters(m)["checksum_mismatches"], 0)
        faults.tell("resume")
        wait_until(lambda: faults.parked() == 0, 20, "the source answers")
        for name in names:
            at = self.at(name)
            wait_until(lambda: self.reads(m, at), 20, f"{name} is read again")

    # Steps of shards that stalled took every turn there is: the others' readers met the deadline too.
    def test_many_shards_that_stall_fail_no_others(self):
        models = self.tmp / "models"
        names = ["good", *(f"stalled-{number}" for number in range(7))]
        for name in names:
            shutil.copytree(self.folder, models / name)
        with FaultFs(models) as faults, faults.lifted():
            outcome = tensorfs("verify", faults.path)
            self.assertEqual(outcome.code, 0, outcome.stderr)
            with Mount(faults.path, "verify=read", "io-timeout=10", f"log={self.tmp / 'log'}") as m:
                for shard in faults.path.glob("*/*.safetensors"):
                    descriptor = os.open(shard, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
                at = self.at("layers.1.F32")
                for name in names:
                    (m.path / name / FILE).stat()
                faults.tell("stall", "stalled-*")
                with contextlib.ExitStack() as stack:
                    tensors = [f"layers.{layer}.{dtype}" for layer in (1, 2) for dtype in ("F32", "F16", "U8")]
                    ranges = [(self.at(tensor), PAGE) for tensor in tensors]
                    late = [Reading(m.path / name / FILE, ranges, "random") for name in names[1:]]
                    late = [stack.enter_context(reading) for reading in late]
                    wait_until(lambda: faults.parked() >= 6, 20, "the source stalls")
                    [got] = read_ranges(m.path / "good" / FILE, [(at, PAGE)], "random")
                    self.assertEqual((got.errno, got.sha256), (0, digest_of(self.right, at, PAGE)))
                    self.assertLess(got.seconds, 8)
                    faults.tell("ok")
                    for reading in late:
                        reading.finished(60)

    def reads(self, m, at):
        [got] = read_ranges(m.path / FILE, [(at, PAGE)], "random", 40)
        return got.errno == 0 and got.sha256 == digest_of(self.right, at, PAGE)

    def test_reads_that_fail_are_tried_again_and_are_no_mismatch(self):
        faults, m = self.mounted("io=pread")
        faults.tell("eio", "*")
        at = self.at("layers.1.F32")
        [got] = read_ranges(m.path / FILE, [(at, PAGE)], "random")
        self.assertEqual(got.errno, errno.EIO)
        faults.tell("ok")
        wait_until(lambda: self.reads(m, at), 20, "it is read again")
        self.assertEqual(counters(m)["checksum_mismatches"], 0)


def places_of(data):
    """Name -> (first byte, end) of the tensors in the bytes of a file."""
    header = oracle.read_header(data)
    ranges = {name: entry["data_offsets"] for name, entry in header.tensors.items()}
    return {name: (header.data_start + start, header.data_start + end) for name, (start, end) in ranges.items()}
