"""Larger checkpoints, read in every way that a program can read a file, compared with the oracle byte for byte."""

import concurrent.futures
import errno
import mmap
import os
import random
import shutil
import tempfile
from pathlib import Path

import checkpoints
import oracle
from mounts import Mount, TestCase, tensorfs
from reading import genuine_summary, raw_summary

PAGE = 4096
CHUNK_MAX = 3_000_000

MAKERS = {
    "three_hf_shards": lambda folder: checkpoints.hf_set(folder, 3, 4),
    "eight_hf_shards": lambda folder: checkpoints.hf_set(folder, 8, 50),
    "row_wise_dcp": checkpoints.row_wise,
    "column_wise_dcp": checkpoints.column_wise,
    "dcp_on_a_2d_grid": checkpoints.grid_2d,
    "uneven_dcp": checkpoints.uneven,
    "dcp_on_a_3d_grid": checkpoints.cube_3d,
}


class Fixed:
    """One generated checkpoint with its oracle, made once for all tests of the module."""

    def __init__(self, folder, maker):
        self.folder = maker(folder)
        is_dcp = any(self.folder.glob("shard-*"))
        self.expected = oracle.from_dcp(self.folder) if is_dcp else checkpoints.hf_whole(self.folder)
        self.edges = self._edges()

    def _edges(self):
        header = oracle.read_header(self.expected)
        ends = {header.data_start + offset for t in header.tensors.values() for offset in t["data_offsets"]}
        return sorted(ends | {0, 8, header.data_start, len(self.expected)})


made = {}
home = None


def setUpModule():
    global home
    home = Path(tempfile.mkdtemp(prefix="tensorfs-test-"))


def tearDownModule():
    made.clear()
    shutil.rmtree(home)


def checkpoint(name):
    if name not in made:
        made[name] = Fixed(home / name, MAKERS[name])
    return made[name]


def spans(fixed, count, seed):
    """(offset, length) pairs: anywhere, across tensor and shard boundaries, at the end and past it."""
    rng = random.Random(seed)
    size = len(fixed.expected)
    for _ in range(count):
        small, large = rng.randrange(1, 300_000), rng.randrange(1, CHUNK_MAX)
        length = rng.choice([1, 2, 7, 511, PAGE, PAGE + 1, 65_536, small, large])
        edge = rng.choice(fixed.edges) - rng.randrange(0, min(length, 20_000) + 1)
        yield max(0, rng.choice([rng.randrange(size), edge])), length
    yield from [(size - 1, 1), (size - 1, 100), (size, 1), (size + 1, 10), (size + 10 * PAGE, PAGE)]


class RandomReads(TestCase):
    def mount(self, name):
        fixed = checkpoint(name)
        return fixed, self.enter(Mount(fixed.folder)).path / "model.safetensors"

    def check(self, fixed, offset, data, length):
        # assertEqual would print megabytes.
        self.assertTrue(data == fixed.expected[offset : offset + length], f"wrong bytes in {length} at {offset}")

    def check_whole_file(self, name):
        fixed, path = self.mount(name)
        self.assertEqual(path.stat().st_size, len(fixed.expected))
        self.assertEqual(oracle.sha256(path.read_bytes()), oracle.sha256(fixed.expected))
        self.assertEqual(genuine_summary(path, "mmap"), raw_summary(path))
        report = tensorfs("verify", fixed.folder, "--json")
        self.assert_done(report)

    def check_positioned_reads(self, name):
        fixed, path = self.mount(name)
        descriptor = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        for offset, length in spans(fixed, 120, name):
            self.check(fixed, offset, os.pread(descriptor, length, offset), length)
            buffer = bytearray(length)
            halves = [memoryview(buffer)[: length // 2], memoryview(buffer)[length // 2 :]]
            count = os.preadv(descriptor, halves, offset)
            self.check(fixed, offset, buffer[:count], length)

    def check_mapped_reads(self, name):
        fixed, path = self.mount(name)
        for flags in (mmap.MAP_PRIVATE, mmap.MAP_SHARED):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ) as mapped:
                self.assertEqual(len(mapped), len(fixed.expected))
                for offset, length in spans(fixed, 60, flags):
                    self.check(fixed, offset, mapped[offset : offset + length], length)

    def check_direct_reads(self, name):
        """O_DIRECT wants an aligned buffer, offset and length, which an anonymous mapping has."""
        fixed, path = self.mount(name)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.addCleanup(os.close, descriptor)
        with mmap.mmap(-1, CHUNK_MAX // PAGE * PAGE + PAGE) as buffer:
            for offset, length in spans(fixed, 40, name):
                offset, length = offset // PAGE * PAGE, -(-length // PAGE) * PAGE
                with memoryview(buffer)[:length] as part:
                    count = os.preadv(descriptor, [part], offset)
                self.check(fixed, offset, buffer[:count], length)

    def check_kernel_copies(self, name):
        """Kernels since 5.19 refuse copy_file_range between file systems (EXDEV); programs then do without."""
        fixed, path = self.mount(name)
        for copy in (os.sendfile, _copy_file_range):
            with open(path, "rb") as source, open(self.tmp / "copy", "w+b") as target:
                for offset, length in spans(fixed, 12, copy.__name__):
                    target.seek(0)
                    target.truncate(0)
                    _copy_all(copy, target.fileno(), source.fileno(), offset, length)
                    self.check(fixed, offset, (self.tmp / "copy").read_bytes(), length)

    def check_readinto_and_seek(self, name):
        fixed, path = self.mount(name)
        with open(path, "rb", buffering=0) as file:
            for offset, length in spans(fixed, 30, "seek"):
                buffer = bytearray(length)
                file.seek(offset)
                self.check(fixed, offset, buffer[: file.readinto(buffer)], length)
            self.assertEqual(file.seek(0, os.SEEK_END), len(fixed.expected))

    def check_threads(self, name):
        fixed, path = self.mount(name)

        def work(number):
            with open(path, "rb") as file:
                for offset, length in spans(fixed, 40, f"{name} {number}"):
                    self.check(fixed, offset, os.pread(file.fileno(), length, offset), length)

        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for done in [pool.submit(work, number) for number in range(16)]:
                done.result()


def _copy_file_range(target, source, offset, length):
    try:
        return os.copy_file_range(source, target, length, offset)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return os.sendfile(target, source, offset, length)


def _copy_all(copy, target, source, offset, length):
    """Repeats until everything, or the end of the file, is copied: the kernel may copy less than asked."""
    while length > 0:
        count = copy(target, source, offset, length)
        if count == 0:
            return
        offset, length = offset + count, length - count


def for_each_checkpoint():
    claims = {
        "is_right_as_a_whole_file": RandomReads.check_whole_file,
        "is_right_by_pread": RandomReads.check_positioned_reads,
        "is_right_through_a_mapping": RandomReads.check_mapped_reads,
        "is_right_with_o_direct": RandomReads.check_direct_reads,
        "is_right_by_readinto": RandomReads.check_readinto_and_seek,
        "is_right_by_sendfile_and_copy_file_range": RandomReads.check_kernel_copies,
        "is_right_for_16_threads_at_once": RandomReads.check_threads,
    }
    for name in MAKERS:
        for claim, check in claims.items():
            setattr(RandomReads, f"test_{name}_{claim}", lambda self, n=name, c=check: c(self, n))


for_each_checkpoint()
