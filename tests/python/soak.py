"""A long run under load: every byte that any of many readers gets is checked, then the daemon is killed under them.

    python tests/python/soak.py --seconds 60 --threads 64 --gb 2
    python tests/python/soak.py --seconds 3600 --gb 8 --storm 400 --faults --options cache=64M,io-timeout=2

Builds a Hugging Face set and a column-sharded DCP set. Their bytes are computed from their place, so that no second
copy is needed to check them. The exit status is not 0 after a wrong byte, an error that no fault explains, or a reader
that hangs, and if the daemon has more descriptors or threads after the load than before it, or more memory than
allowed. As root, the daemon has the capabilities and the system calls of its unit.
"""

import argparse
import collections
import dataclasses
import errno
import functools
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
from confinement import confined_by
from faults import FaultyMount, Held, status_of
from mounts import Mount, is_root, pread_all

FILE = "model.safetensors"
RANKS = 4
ROW_BYTES = 2048
HF_SHARDS = 4
LAYERS_PER_SHARD = 7
WINDOW_MAX = 1 << 20
BLOCK = 32 << 20
READERS_PER_PROCESS = 8
# A read without an answer hangs for ever. The time until many readers run again depends on the machine.
ERROR_SECONDS = 10
HANG_SECONDS = 15
PAGE = 4096
STORM_FAULTS = 200
STORM_SECONDS = 300
# Number of pages that a thread faults in one batch.
STORM_BATCH = 20
# Seconds for which threads without work may stay.
SETTLE_SECONDS = 20
WARM_UP_SECONDS = 2
# Bytes of memory that a daemon may use beside its cache, and the default size of the cache. Up to 26 MiB of them are the
# code of a build of the profile `release`, which is hardly optimized.
SLACK = 72 << 20
DEFAULT_CACHE = 256 << 20
RUNNING, PAUSED, ENDING = range(3)


def pattern(seed, start, end):
    """Bytes `start..end` of the tensor number `seed`. Each word of 8 bytes is a hash of its place."""
    words = np.arange(start // 8, -(-end // 8), dtype=np.uint64)
    words = (words + np.uint64(seed << 40)) * np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[start % 8 :][: end - start]


def blocks(length, step=BLOCK):
    return ((start, min(start + step, length)) for start in range(0, length, step))


def write_header(file, tensors, metadata):
    """Writes a header. `tensors` maps names to (shape, length in bytes), in the order of the data. All tensors are
    F32."""
    entries, end = {"__metadata__": metadata}, 0
    for name, (shape, length) in tensors.items():
        entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + length]}
        end += length
    header = json.dumps(entries).encode()
    file.write(len(header).to_bytes(8, "little") + header)


def build_hf(folder, length):
    """Writes shards of seven layers each. No tensor has a length of whole pages. Returns name -> (seed, length)."""
    folder.mkdir()
    shards, contents = {}, {}
    share = length // HF_SHARDS // LAYERS_PER_SHARD
    sizes = {"mlp": share // 2 // 4 * 4 + 4, "attention": share // 3 // 4 * 4 + 4, "norm": share // 6 // 4 * 4 + 4}
    for shard in range(1, HF_SHARDS + 1):
        name = f"model-{shard:05}-of-{HF_SHARDS:05}.safetensors"
        layers = range((shard - 1) * LAYERS_PER_SHARD, shard * LAYERS_PER_SHARD)
        tensors = {f"layers.{n}.{part}": ([size // 4], size) for n in layers for part, size in sizes.items()}
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
    """Writes one matrix, of which every rank has 2 KiB of each row. Returns name -> (seed, length)."""
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
    """A mounted file and its expected data: (start, end, seed) of every tensor, in the order of the file.

    `names` has the names of these tensors, in the same order.
    """

    path: str
    data_start: int
    size: int
    parts: list
    names: list

    @classmethod
    def of(cls, path, contents):
        header = oracle.read_header_of(path)
        assert set(header.tensors) == set(contents), "other tensors than were written"
        parts = []
        for name, entry in header.tensors.items():
            start, end = entry["data_offsets"]
            seed, length = contents[name]
            assert end - start == length, f"{name} has {end - start} bytes, not {length}"
            parts.append(((header.data_start + start, header.data_start + end, seed), name))
        parts, names = zip(*sorted(parts))
        return cls(str(path), header.data_start, path.stat().st_size, parts, names)

    def expected(self, start, end):
        """The expected bytes of a range after the header."""
        found = [
            pattern(seed, max(start, a) - a, min(end, b) - a) for a, b, seed in self.parts if a < end and b > start
        ]
        return np.concatenate(found)

    def window(self, rng):
        """A random range after the header, which often crosses the border of two tensors."""
        length = rng.randrange(1, min(WINDOW_MAX, self.size - self.data_start))
        border = rng.choice(self.parts)[0] - rng.randrange(length)
        start = border if rng.random() < 0.2 else rng.randrange(self.data_start, self.size)
        start = max(start, self.data_start)
        return start, min(start + length, self.size)


def by_numbers(name):
    """A key that sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in name.split(".")]


# The orders in which programs take tensors. Each one is a function from a target to the numbers of its parts.
ORDERS = [
    lambda target: range(len(target.parts)),
    lambda target: sorted(range(len(target.parts)), key=lambda i: target.names[i]),
    lambda target: sorted(range(len(target.parts)), key=lambda i: by_numbers(target.names[i])),
    lambda target: random.sample(range(len(target.parts)), len(target.parts)),
]


def ranges_at_random(targets, rng):
    """Yields (target, start, end) of reads at random places."""
    while True:
        target = rng.choice(targets)
        yield target, *target.window(rng)


def ranges_of_tensors(targets, order):
    """Yields (target, start, end) of reads that read one tensor after the other from start to end, again and again."""
    while True:
        for target in targets:
            for part in order(target):
                first, last, _ = target.parts[part]
                for start, end in blocks(last - first, WINDOW_MAX):
                    yield target, first + start, first + end


def read_by_pread(descriptor, start, end):
    return np.frombuffer(pread_all(descriptor, end - start, start), np.uint8)


def read_mapped(descriptor, start, end):
    """Copies bytes through a new mapping, so that no page stays mapped, and so in the page cache, after the read."""
    base = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, end - base, prot=mmap.PROT_READ, offset=base) as mapped:
        return np.frombuffer(mapped[start - base :], np.uint8)


@dataclasses.dataclass
class Shared:
    """State that the readers and the soak share: counts for each thread, and the current faults."""

    counts: multiprocessing.RawArray
    wrong: multiprocessing.RawArray
    errors: multiprocessing.RawArray
    phase: multiprocessing.RawValue

    @classmethod
    def of(cls, n_threads):
        arrays = [multiprocessing.RawArray("Q", n_threads) for _ in range(3)]
        return cls(*arrays, multiprocessing.RawValue("i", PAUSED))


def reader_process(targets, read, slots, shared, faulty):
    """Reads until every thread has got an error. An error that a fault of the source explains is counted, and does not
    end a thread.

    Every second thread reads at random, the others tensor by tensor, in different orders.
    """

    def loop(slot):
        rng = random.Random()
        descriptors = {target.path: os.open(target.path, os.O_RDONLY) for target in targets}
        if slot % 2:
            ranges = ranges_of_tensors(targets, ORDERS[slot // 2 % len(ORDERS)])
        else:
            ranges = ranges_at_random(targets, rng)
        for target, start, end in ranges:
            while shared.phase.value == PAUSED:
                time.sleep(0.02)
            descriptor = descriptors[target.path]
            try:
                if rng.random() < 0.5:
                    os.posix_fadvise(descriptor, start, end - start, os.POSIX_FADV_DONTNEED)
                found = read(descriptor, start, end)
            except OSError as error:
                if shared.phase.value == ENDING or not faulty or error.errno != errno.EIO:
                    return
                shared.errors[slot] += 1
                time.sleep(0.01)
                continue
            shared.wrong[slot] += not np.array_equal(found, target.expected(start, end))
            shared.counts[slot] += end - start

    threads = [threading.Thread(target=loop, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Ends without the cleanup of the interpreter, whose time must not count.
    os._exit(0)


@dataclasses.dataclass
class Storm:
    """The outcome of a storm: the number of page faults, and the errors."""

    faults: int
    problem: str


def storm(target, n_threads, n_faults, seconds):
    """Threads of one process that fault single pages of a mapping at random. Each thread faults `n_faults` pages, in
    batches."""
    done, wrong = (multiprocessing.RawArray("Q", n_threads) for _ in range(2))
    context = multiprocessing.get_context("fork")
    process = context.Process(target=storm_process, args=(target, n_threads, n_faults, done, wrong))
    process.start()
    process.join(seconds)
    problem = ""
    if process.is_alive():
        process.kill()
        process.join(5)
        problem = f"page faults hang: {sum(done)} of {n_threads * n_faults} within {seconds} s"
    elif process.exitcode:
        problem = f"the faulting process ended with {process.exitcode}"
    elif any(wrong):
        problem = f"{sum(wrong)} pages with wrong bytes"
    return Storm(sum(done), problem)


def storm_process(target, n_threads, n_faults, done, wrong):
    # One mapping where the kernel reads pages around a fault, and one where it does not.
    mappings = [np.memmap(target.path, np.uint8, "r") for _ in range(2)]
    mappings[1]._mmap.madvise(mmap.MADV_RANDOM)

    n_pages = target.size // PAGE
    pages = [mapping[: n_pages * PAGE].reshape(n_pages, PAGE) for mapping in mappings]

    def loop(slot):
        rng = random.Random(slot)
        found = np.empty((STORM_BATCH, PAGE), np.uint8)
        for _ in range(n_faults // STORM_BATCH):
            wanted = [rng.randrange(target.data_start // PAGE, n_pages) for _ in range(STORM_BATCH)]
            # numpy releases the GIL while it gathers, so that all threads fault at the same time.
            np.take(pages[slot % 2], wanted, axis=0, out=found, mode="clip")
            for number, page in zip(wanted, found):
                wrong[slot] += not np.array_equal(page, target.expected(number * PAGE, (number + 1) * PAGE))
            done[slot] += STORM_BATCH

    threading.stack_size(1 << 18)
    threads = [threading.Thread(target=loop, args=(slot,)) for slot in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


class Faults(threading.Thread):
    """Makes the source misbehave and kills readers, at random, until it is stopped."""

    def __init__(self, faults, stall_seconds, kill_a_reader, start_the_ended):
        super().__init__()
        self._faults = faults
        self._stall_seconds = stall_seconds
        self._kill_a_reader = kill_a_reader
        self._start_the_ended = start_the_ended
        self._stopped = threading.Event()
        self.counts = collections.Counter()
        self.failure = None

    def run(self):
        try:
            while not self._stopped.wait(random.uniform(0.2, 1)):
                self._one_fault()
            self._faults.tell("ok")
        except Exception as error:
            self.failure = error

    def _one_fault(self):
        kind = random.choice(["stall", "stall", "eio", "delay", "short"])
        glob = random.choice(["hf/*", "dcp/*", f"hf/model-{random.randint(1, HF_SHARDS):05}-*", f"dcp/{dcp_name(1)}"])
        self._faults.tell(kind, glob, *([random.randint(1, 50)] if kind == "delay" else []))
        self.counts[kind] += 1
        self._stopped.wait(random.uniform(0.05, self._stall_seconds if kind == "stall" else 0.5))
        if random.random() < 0.4:
            self.counts["kill"] += 1
            self._kill_a_reader()
        self._faults.tell("ok")
        self._start_the_ended()

    def stop(self):
        self._stopped.set()
        self.join()


class Samples(threading.Thread):
    """The greatest figures of a daemon. They are sampled every second."""

    def __init__(self, m):
        super().__init__()
        self._mount = m
        self._stopped = threading.Event()
        self.most = Held.by(m)

    def run(self):
        while not self._stopped.wait(1) and self._mount.alive():
            now = dataclasses.astuple(Held.by(self._mount))
            self.most = Held(*map(max, now, dataclasses.astuple(self.most)))

    def stop(self):
        self._stopped.set()
        self.join()


class Soak:
    def __init__(self, home, seconds, n_threads, n_bytes, options=(), faults=False, storm_threads=0, unit=None):
        self.home = Path(home)
        self.seconds = seconds
        self.n_threads = n_threads
        self.n_bytes = n_bytes
        self.options = options
        self.faults = faults
        self.storm_threads = storm_threads
        self.popen = {"preexec_fn": confined_by(unit)} if unit else {}
        self.problems = []
        self.shared = Shared.of(n_threads)
        self.readers = []

    def run(self):
        source = self.home / "tree"
        source.mkdir()
        self.contents = {
            "hf": build_hf(source / "hf", self.n_bytes // 2),
            "dcp": build_dcp(source / "dcp", self.n_bytes // 2),
        }
        drop_caches()
        watchdog = int(self.seconds * 2 + 2 * STORM_SECONDS)
        with self.mount(source, watchdog) as m:
            self.check_sequentially(m, "cold")
            self.read_then_kill(m)
            place = m.path
            self.expect(m.umount().code == 0, "umount of the dead mount failed")
            with Mount(source, *self.options, at=place, **self.popen) as again:
                self.check_sequentially(again, "after the kill")
        return not self.problems

    def mount(self, source, watchdog):
        if self.faults:
            return FaultyMount(source, *self.options, watchdog=watchdog, **self.popen)
        return Mount(source, *self.options, watchdog=watchdog, **self.popen)

    def option(self, name):
        """The value of a mount option, or None."""
        values = [option.partition("=")[2] for option in self.options if option.startswith(f"{name}=")]
        return values[-1] if values else None

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

    def storm(self, targets):
        """Runs a storm of page faults of many threads, while the readers read."""
        for target in targets:
            drop_caches()
            begin = time.monotonic()
            outcome = storm(target, self.storm_threads, STORM_FAULTS, STORM_SECONDS)
            seconds = time.monotonic() - begin
            self.expect(not outcome.problem, outcome.problem)
            name = Path(target.path).parent.name
            print(f"{name}, cold: {self.storm_threads} threads, {outcome.faults} page faults in {seconds:.1f} s")

    def read_then_kill(self, m):
        targets = self.targets(m)
        self.start_readers(targets)
        # Threads and memory that are made at the first use are no leak.
        self.shared.phase.value = RUNNING
        time.sleep(WARM_UP_SECONDS)
        self.shared.phase.value = PAUSED
        time.sleep(1)
        before, samples = Held.by(m), Samples(m)
        samples.start()
        self.shared.phase.value = RUNNING
        if self.storm_threads:
            self.storm(targets)
        begin = time.monotonic()
        faults = self.start_faults(m, targets)
        while time.monotonic() < begin + self.seconds and m.alive() and not self.ended_early():
            time.sleep(0.2)
        if faults:
            faults.stop()
            self.expect(faults.failure is None, f"injecting faults failed: {faults.failure}")
        self.expect(m.alive(), "the daemon died")
        self.expect(not self.ended_early(), f"{len(self.ended_early())} reader processes ended before the kill")
        total, seconds, errors = sum(self.shared.counts), time.monotonic() - begin, sum(self.shared.errors)
        samples.stop()
        print(f"{self.n_threads} readers: {total / 1e9:.2f} GB in {seconds:.1f} s, {sum(self.shared.wrong)} wrong reads")
        if faults:
            print(f"faults: {dict(faults.counts)}; reads that failed for them: {errors}")
        self.check_held(m, before, samples.most)
        self.kill_under_load(m)

    def start_faults(self, m, targets):
        if not self.faults:
            return None
        timeout = float(self.option("io-timeout") or 0)
        start_the_ended = functools.partial(self.start_the_ended, targets)
        faults = Faults(m.faults, max(timeout, 1) * 1.5, self.kill_a_reader, start_the_ended)
        faults.start()
        return faults

    def check_held(self, m, before, most):
        """Compares the figures of the idle daemon after the load with those before the load."""
        self.shared.phase.value = PAUSED
        deadline = time.monotonic() + SETTLE_SECONDS
        after = Held.by(m)
        while after.grown(before) and time.monotonic() < deadline:
            time.sleep(0.2)
            after = Held.by(m)
        for name in ("descriptors", "threads"):
            print(f"{name}: {getattr(before, name)} before, {getattr(most, name)} at most, {getattr(after, name)} after")
        resident = [held.resident >> 20 for held in (before, most, after)]
        print("resident: {} MiB before, {} at most, {} after; peak {}".format(*resident, after.peak >> 20))
        self.expect(not after.grown(before), f"the daemon holds more than before: {after.grown(before)}")
        budget = size_of(self.option("cache")) or DEFAULT_CACHE
        self.expect(after.peak <= budget + SLACK, f"the daemon took {after.peak >> 20} MiB")
        status = status_of(m)
        if status is not None:
            print(f"status: {json.dumps(status)}")

    def kill_under_load(self, m):
        self.shared.phase.value = RUNNING
        time.sleep(0.5)
        self.shared.phase.value = ENDING
        killed = time.monotonic()
        m.kill()
        slowest = self.wait_for_end(killed)
        self.expect(not any(self.shared.wrong), f"{sum(self.shared.wrong)} reads with wrong bytes")
        self.expect(min(self.shared.counts) > 0, "a reader that read nothing")
        print(f"killed: the last reader had its error after {slowest:.3f} s")

    def start_readers(self, targets):
        for first in range(0, self.n_threads, READERS_PER_PROCESS):
            self.readers.append(None)
            self.start_reader(targets, len(self.readers) - 1)

    def start_reader(self, targets, number):
        """Starts a reader. Every second process reads through mappings, where a dead daemon or a bad source causes a
        SIGBUS."""
        first = number * READERS_PER_PROCESS
        slots = range(first, min(first + READERS_PER_PROCESS, self.n_threads))
        read = read_mapped if number % 2 else read_by_pread
        process = multiprocessing.get_context("fork").Process(
            target=reader_process, args=(targets, read, slots, self.shared, self.faults)
        )
        process.start()
        self.readers[number] = process

    def kill_a_reader(self):
        """Kills a reader during its reads. It may end only when the source no longer stalls."""
        random.choice(self.readers).kill()

    def start_the_ended(self, targets):
        """Starts readers again that were killed, or that ended by a fault of the source in a mapping."""
        for number, process in enumerate(self.readers):
            if process.exitcode is not None:
                self.start_reader(targets, number)

    def ended_early(self):
        """Readers that ended without a reason. A reader with mappings may be ended by a fault of the source."""
        return [p for p in self.readers if not p.is_alive() and not (self.faults and p.exitcode < 0)]

    def wait_for_end(self, killed):
        waiting = {process.sentinel: process for process in self.readers}
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


def size_of(text):
    """Number of bytes of a size like `64M`. 0 for None."""
    factor = "KMGT".find(text[-1:].upper()) + 1 if text else 0
    return int(text[:-1] if factor else text) << (10 * factor) if text else 0


def drop_caches():
    if is_root:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def soak(folder, *arguments):
    """Runs a soak in a temporary folder below `folder`. Returns True if nothing was wrong."""
    home = tempfile.mkdtemp(prefix="tensorfs-test-", dir=folder)
    try:
        return Soak(home, *arguments).run()
    finally:
        shutil.rmtree(home)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--threads", type=int, default=64)
    parser.add_argument("--gb", type=float, default=2, help="size of both checkpoints together")
    parser.add_argument("--folder", help="where to build them (default: the temporary folder)")
    parser.add_argument("--options", default="", help="options of the mount, like cache=64M,io-timeout=2")
    parser.add_argument("--faults", action="store_true", help="let the source stall and fail, and kill readers")
    parser.add_argument("--storm", type=int, default=0, metavar="THREADS", help="page faults beside the readers, at first")
    unit = "tensorfs@.service" if is_root else None
    parser.add_argument("--full-root", dest="unit", action="store_const", const=None, default=unit,
                        help="give the daemon all of root's rights, not only those of its unit")
    given = parser.parse_args()
    options = [option for option in given.options.split(",") if option]
    size = int(given.gb * 1e9)
    good = soak(given.folder, given.seconds, given.threads, size, options, given.faults, given.storm, given.unit)
    print("nothing wrong" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
