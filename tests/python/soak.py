"""A long run under load: every byte that any of many readers gets is checked, then the daemon is killed under them.

    python tests/python/soak.py --seconds 60 --threads 64 --gb 2

Builds a Hugging Face set and a column-sharded DCP set whose bytes follow from their place, so that no second copy is
needed to check them. Ends non-zero on a wrong byte, an error before the kill, or a reader that hangs after it.
"""

import argparse
import dataclasses
import json
import mmap
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from multiprocessing import connection
from pathlib import Path

import numpy as np

import oracle
from checkpoints import FORMAT, dcp_name, write_weight_map
from mounts import Mount, is_root, pread_all

FILE = "model.safetensors"
RANKS = 4
ROW_BYTES = 2048
HF_SHARDS = 4
WINDOW_MAX = 1 << 20
BLOCK = 32 << 20
READERS_PER_PROCESS = 8
ERROR_SECONDS = 1
HANG_SECONDS = 15


def pattern(seed, start, end):
    """Bytes `start..end` of the tensor number `seed`: a hash of the place of each 8-byte word."""
    words = np.arange(start // 8, -(-end // 8), dtype=np.uint64)
    words = (words + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[start % 8 :][: end - start]


def blocks(length, step=BLOCK):
    return ((start, min(start + step, length)) for start in range(0, length, step))


def write_header(file, tensors, metadata):
    """`tensors`: name -> (shape, length in bytes), all F32, in the order of the data."""
    entries, end = {"__metadata__": metadata}, 0
    for name, (shape, length) in tensors.items():
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + length]}
        end += length
    header = json.dumps(entries).encode()
    file.write(len(header).to_bytes(8, "little") + header)


def build_hf(folder, length):
    """Shards of three tensors each, none of which fills pages exactly. Returns name -> (seed, length)."""
    folder.mkdir()
    shards, contents = {}, {}
    for shard in range(1, HF_SHARDS + 1):
        name = f"model-{shard:05}-of-{HF_SHARDS:05}.safetensors"
        share = length // HF_SHARDS
        sizes = [share // 2 // 4 * 4 + 4, share // 3 // 4 * 4 + 4, share // 6 // 4 * 4 + 4]
        tensors = {f"layer.{shard}.{i}": ([size // 4], size) for i, size in enumerate(sizes)}
        shards[name] = list(tensors)
        with open(folder / name, "wb") as file:
            write_header(file, tensors, FORMAT)
            for tensor, (_, size) in tensors.items():
                contents[tensor] = (len(contents) + 1, size)
                for start, end in blocks(size):
                    pattern(contents[tensor][0], start, end).tofile(file)
    write_weight_map(folder, shards)
    return contents


def build_dcp(folder, length):
    """One matrix of which every rank holds 2 KiB of each row. Returns name -> (seed, length)."""
    folder.mkdir()
    rows = max(length // (RANKS * ROW_BYTES), 1)
    columns = ROW_BYTES // 4
    files = []
    for rank in range(RANKS):
        files.append(open(folder / dcp_name(rank + 1), "wb"))
        info = json.dumps({"w": {"saved_offsets": [0, rank * columns]}})
        metadata = {**FORMAT, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
        write_header(files[-1], {"w": ([rows, columns], rows * ROW_BYTES)}, metadata)
    whole = rows * RANKS * ROW_BYTES
    for start, end in blocks(whole):
        block = pattern(100, start, end).reshape(-1, RANKS, ROW_BYTES)
        for rank, file in enumerate(files):
            np.ascontiguousarray(block[:, rank]).tofile(file)
    for file in files:
        file.close()
    return {"w": (100, whole)}


@dataclasses.dataclass
class Target:
    """A mounted file and what its data must be: (start, end, seed) of every tensor, in the order of the file."""

    path: str
    data_start: int
    size: int
    parts: list

    @classmethod
    def of(cls, path, contents):
        header = oracle.read_header_of(path)
        assert set(header.tensors) == set(contents), "other tensors than were written"
        parts = []
        for name, entry in header.tensors.items():
            start, end = entry["data_offsets"]
            seed, length = contents[name]
            assert end - start == length, f"{name} has {end - start} bytes, not {length}"
            parts.append((header.data_start + start, header.data_start + end, seed))
        return cls(str(path), header.data_start, path.stat().st_size, sorted(parts))

    def expected(self, start, end):
        """The right bytes of a range behind the header."""
        found = [
            pattern(seed, max(start, a) - a, min(end, b) - a) for a, b, seed in self.parts if a < end and b > start
        ]
        return np.concatenate(found)

    def window(self, rng):
        """A range behind the header, often across the border of two tensors."""
        length = rng.randrange(1, min(WINDOW_MAX, self.size - self.data_start))
        border = rng.choice(self.parts)[0] - rng.randrange(length)
        start = border if rng.random() < 0.2 else rng.randrange(self.data_start, self.size)
        start = max(start, self.data_start)
        return start, min(start + length, self.size)


def read_by_pread(descriptor, start, end):
    return np.frombuffer(pread_all(descriptor, end - start, start), np.uint8)


def read_mapped(descriptor, start, end):
    """A copy through a mapping of its own, so that no page stays mapped and with that cached."""
    base = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, end - base, prot=mmap.PROT_READ, offset=base) as mapped:
        return np.frombuffer(mapped[start - base :], np.uint8)


def reader_process(targets, read, n_threads, first, counts, wrong):
    """Reads until every thread got an error; counts bytes and wrong windows in shared memory."""

    def loop(slot):
        rng = random.Random(slot)
        files = [(target, os.open(target.path, os.O_RDONLY)) for target in targets]
        try:
            while True:
                target, descriptor = rng.choice(files)
                start, end = target.window(rng)
                if rng.random() < 0.5:
                    os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
                found = read(descriptor, start, end)
                wrong[slot] += not np.array_equal(found, target.expected(start, end))
                counts[slot] += end - start
        except OSError:
            return

    threads = [threading.Thread(target=loop, args=(first + i,)) for i in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Without the interpreter's tidying up, which is not what is timed.
    os._exit(0)


class Soak:
    def __init__(self, home, seconds, n_threads, n_bytes):
        self.home = Path(home)
        self.seconds = seconds
        self.n_threads = n_threads
        self.n_bytes = n_bytes
        self.problems = []
        self.counts = multiprocessing.RawArray("Q", n_threads)
        self.wrong = multiprocessing.RawArray("Q", n_threads)

    def run(self):
        source = self.home / "tree"
        source.mkdir()
        self.contents = {
            "hf": build_hf(source / "hf", self.n_bytes // 2),
            "dcp": build_dcp(source / "dcp", self.n_bytes // 2),
        }
        drop_caches()
        with Mount(source, watchdog=self.seconds * 2 + 120) as m:
            self.check_sequentially(m, "cold")
            self.read_then_kill(m)
            place = m.path
            self.expect(m.umount().code == 0, "umount of the dead mount failed")
            with Mount(source, at=place) as again:
                self.check_sequentially(again, "after the kill")
        return not self.problems

    def expect(self, condition, problem):
        if not condition:
            self.problems.append(problem)
            print(f"PROBLEM: {problem}")

    def targets(self, m):
        return [Target.of(m.path / name / FILE, contents) for name, contents in self.contents.items()]

    def check_sequentially(self, m, when):
        for target in self.targets(m):
            begin = time.monotonic()
            with open(target.path, "rb") as file:
                file.seek(target.data_start)
                for start, end in blocks(target.size - target.data_start, 4 << 20):
                    data = np.frombuffer(file.read(end - start), np.uint8)
                    right = target.expected(target.data_start + start, target.data_start + end)
                    self.expect(np.array_equal(data, right), f"wrong bytes at {start} of {target.path}")
            seconds = time.monotonic() - begin
            rate = (target.size - target.data_start) / seconds / 1e9
            print(f"{Path(target.path).parent.name}, {when}: read and compared at {rate:.2f} GB/s")

    def read_then_kill(self, m):
        processes = self.start_readers(self.targets(m))
        begin = time.monotonic()
        early = connection.wait([p.sentinel for p in processes], timeout=self.seconds)
        self.expect(not early, f"{len(early)} reader processes ended before the kill")
        total, seconds = sum(self.counts), time.monotonic() - begin
        killed = time.monotonic()
        m.kill()
        slowest = self.wait_for_end(processes, killed)
        self.expect(not any(self.wrong), f"{sum(self.wrong)} reads with wrong bytes")
        self.expect(min(self.counts) > 0, "a reader that read nothing")
        print(f"{self.n_threads} readers: {total / 1e9:.2f} GB in {seconds:.1f} s, {sum(self.wrong)} wrong reads")
        print(f"killed: the last reader had its error after {slowest:.3f} s")

    def start_readers(self, targets):
        """Every second process reads through mappings; there a dead daemon is a SIGBUS."""
        context = multiprocessing.get_context("fork")
        processes = []
        for number, first in enumerate(range(0, self.n_threads, READERS_PER_PROCESS)):
            read = read_mapped if number % 2 else read_by_pread
            count = min(READERS_PER_PROCESS, self.n_threads - first)
            process = context.Process(
                target=reader_process, args=(targets, read, count, first, self.counts, self.wrong)
            )
            process.start()
            processes.append(process)
        return processes

    def wait_for_end(self, processes, killed):
        waiting = {process.sentinel: process for process in processes}
        slowest = 0
        while waiting and time.monotonic() < killed + HANG_SECONDS:
            for sentinel in connection.wait(list(waiting), timeout=1):
                waiting.pop(sentinel).join()
                slowest = time.monotonic() - killed
        self.expect(not waiting, f"{len(waiting)} reader processes hang")
        self.expect(slowest <= ERROR_SECONDS, f"the last error came after {slowest:.2f} s")
        for process in waiting.values():
            process.kill()
            process.join()
        return slowest


def drop_caches():
    if is_root:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def soak(seconds, n_threads, n_bytes, folder=None):
    """Runs in a temporary folder below `folder`; True when nothing was wrong."""
    home = tempfile.mkdtemp(prefix="tensorfs-test-", dir=folder)
    try:
        return Soak(home, seconds, n_threads, n_bytes).run()
    finally:
        shutil.rmtree(home)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--gb", type=float, default=2, help="size of both checkpoints together")
    parser.add_argument("--folder", help="where to build them (default: the temporary folder)")
    options = parser.parse_args()
    good = soak(options.seconds, options.threads, int(options.gb * 1e9), options.folder)
    print("nothing wrong" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
