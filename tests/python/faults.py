"""Faults that a mount has to survive: sources that misbehave on command, readers in processes of their own, and limits
on the daemon. Also figures of the threads, descriptors and memory of a daemon.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from checkpoints import sparse_file
from confinement import load_filter
from mounts import BIN, Child, Mount, detach, run, tensorfs, wait_until

FAULTFS = Path(os.environ.get("TENSORFS_FAULTFS", BIN.with_name("faultfs"))).resolve()

# The longest time in which a source may misbehave, in seconds. During this time a daemon that reads from it cannot be
# killed.
FAULTS_SECONDS = 120

SYS_IO_URING_SETUP = 425
SYS_CACHESTAT = 451
SYS_STATX = {"x86_64": 332, "aarch64": 291}[os.uname().machine]
SYS_INOTIFY_INIT1 = {"x86_64": 294, "aarch64": 26}[os.uname().machine]

# Prints a line for each range as soon as the range is read: number, errno, sha256, seconds.
READER = """
import hashlib, json, mmap, os, sys, threading, time
path, how, ranges = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
lock = threading.Lock()

def read(offset, length):
    flags = os.O_DIRECT if how == "direct" else 0
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        if how == "mmap":
            base = offset // 4096 * 4096
            with mmap.mmap(descriptor, offset + length - base, prot=mmap.PROT_READ, offset=base) as mapped:
                return mapped[offset - base :]
        if how == "random":
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        buffer = mmap.mmap(-1, max(length, 1))
        done = 0
        while done < length:
            count = os.preadv(descriptor, [memoryview(buffer)[done:]], offset + done)
            if not count:
                break
            done += count
        return buffer[:done]
    finally:
        os.close(descriptor)

def work(number):
    begin = time.monotonic()
    try:
        error, digest = 0, hashlib.sha256(read(*ranges[number])).hexdigest()
    except OSError as e:
        error, digest = e.errno, "-"
    with lock:
        print(number, error, digest, time.monotonic() - begin, flush=True)

threads = [threading.Thread(target=work, args=(number,)) for number in range(len(ranges))]
print("started", flush=True)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""

# Reads at random places, and compares the bytes with a file that has the right bytes. Goes on until a line comes on
# stdin or, with `end`, until every thread has met an error. Prints the number of reads, the number of wrong reads, and
# errno -> number of errors, as JSON.
LOAD = """
import collections, json, mmap, os, random, sys, threading, time
path, right, n_threads, how, after_error = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
size = os.stat(right).st_size
whole = mmap.mmap(os.open(right, os.O_RDONLY), size, prot=mmap.PROT_READ)
reads, wrong, errors = [0] * n_threads, [0] * n_threads, collections.Counter()
stop = False

def work(slot):
    rng = random.Random(slot)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "direct" else 0))
    buffer = mmap.mmap(-1, 1 << 18)
    while not stop:
        offset = rng.randrange(size) // 4096 * 4096
        try:
            if how != "direct" and rng.random() < 0.5:
                os.posix_fadvise(descriptor, offset, len(buffer), os.POSIX_FADV_DONTNEED)
            count = os.preadv(descriptor, [buffer], offset)
        except OSError as e:
            errors[e.errno] += 1
            if after_error == "end":
                return
            time.sleep(0.01)
            continue
        reads[slot] += 1
        wrong[slot] += count == 0 or buffer[:count] != whole[offset : offset + count]

threads = [threading.Thread(target=work, args=(slot,)) for slot in range(n_threads)]
for thread in threads:
    thread.start()

def wait_for_stop():
    global stop
    sys.stdin.readline()
    stop = True

while not all(reads) and not errors:
    time.sleep(0.005)
print("ready", flush=True)
threading.Thread(target=wait_for_stop, daemon=True).start()
for thread in threads:
    thread.join()
print(json.dumps({"reads": sum(reads), "wrong": sum(wrong), "errors": errors}), flush=True)
os._exit(0)
"""


class FaultFs:
    """`faultfs` over a folder, mounted at `path`. `tell` sends commands to it: see tests/faultfs/src/main.rs.

    `remembers` is the number of seconds for which the kernel caches the attributes of a file, as a client of NFS does.
    """

    def __init__(self, source, seconds=FAULTS_SECONDS, remembers=0):
        self.source = Path(source)
        self._seconds = seconds
        self._remembers = remembers
        self._home = Path(tempfile.mkdtemp(prefix="tensorfs-test-"))
        self.path = self._home / "source"
        self.path.mkdir()
        self._process = None
        self._watchdog = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self):
        if not FAULTFS.exists():
            raise AssertionError(f"{FAULTFS} is not there: cargo build -p tensorfs-faultfs, or set TENSORFS_FAULTFS")
        self._process = subprocess.Popen(
            [FAULTFS, self.source, self.path, str(self._remembers)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        # The end of `faultfs` fails the requests that it holds back, so that no process waits for it any more.
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {self._seconds}; kill {self._process.pid}"], start_new_session=True
        )
        line = self._line(10)
        if line != "ready":
            self.stop()
            raise AssertionError(f"faultfs did not start: {line!r}")

    def tell(self, *words):
        """Carries out a command, and returns its answer."""
        self._process.stdin.write(" ".join(str(word) for word in words) + "\n")
        answer = self._line(10)
        if not answer or answer.startswith("error"):
            raise AssertionError(f"faultfs answered {answer!r} to {words}")
        return answer

    def _line(self, seconds):
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise AssertionError(f"no answer from faultfs within {seconds} s")
        return self._process.stdout.readline().strip()

    def parked(self, glob="*"):
        """Number of requests that are held back."""
        return int(self.tell("parked", glob))

    def counts(self, glob="*"):
        """Path -> numbers of requests for this path."""
        return json.loads(self.tell("counts", glob))

    def ranges(self, glob="*"):
        """Path -> [offset, size] of its last reads."""
        return json.loads(self.tell("ranges", glob))

    @contextlib.contextmanager
    def lifted(self):
        """Ends all faults at the end of the block. Before that, a process that waits for the source cannot be
        killed."""
        try:
            yield self
        finally:
            if self.running():
                self.tell("ok")

    @property
    def pid(self):
        return self._process.pid

    def running(self):
        return self._process is not None and self._process.poll() is None

    def stop(self):
        if self._process:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            # A forked process may have kept the other end of the pipe.
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
        if self._watchdog:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watchdog.pid, signal.SIGKILL)
            self._watchdog.wait()
        detach(self.path)
        with contextlib.suppress(OSError):
            self.path.rmdir()
            self._home.rmdir()


@contextlib.contextmanager
def slow_file(folder, name="large.safetensors"):
    """A file of one tensor in the new folder `folder`, behind a `FaultFs` that answers each read late, so that a
    command which reads the whole file takes seconds. The file consists of holes. A copy of it takes 60 MB."""
    folder.mkdir()
    sparse_file(folder / name, 60)
    with FaultFs(folder) as faults:
        faults.tell("delay", "*", 200)
        yield faults.path / name


class FaultyMount(Mount):
    """A mount whose source is `m.faults`, a `FaultFs` over a folder."""

    def __init__(self, source, *options, watchdog=FAULTS_SECONDS, **kwargs):
        self.faults = FaultFs(source, watchdog)
        super().__init__(self.faults.path, *options, watchdog=watchdog, **kwargs)

    def __enter__(self):
        self.faults.start()
        try:
            return super().__enter__()
        except BaseException:
            self.faults.stop()
            raise

    def stop(self):
        try:
            # A daemon cannot end while one of its threads waits for the source.
            if self.faults.running():
                self.faults.tell("ok")
            return super().stop()
        finally:
            self.faults.stop()


class FaultyDisk:
    """A disk with ext4 that has a copy of `folder`, mounted on the new folder `place`. Its blocks are in a file on
    `faults`, so the disk misbehaves as `faults` does. Commands for `faults` use the glob `*`. Needs root.
    """

    def __init__(self, folder, place):
        self._folder = Path(folder)
        self._place = Path(place)
        self._home = tempfile.mkdtemp(prefix="tensorfs-test-")
        self.faults = FaultFs(self._home)

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self):
        self._place.mkdir()
        size = sum(path.stat().st_size for path in self._folder.rglob("*")) * 5 // 4 + (8 << 20)
        image = Path(self._home, "image")
        with open(image, "wb") as file:
            file.truncate(size)
        made = run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", "-d", self._folder, image)
        self.faults.start()
        mounted = run("mount", "-o", "loop,ro", self.faults.path / "image", self._place)
        if made.code or mounted.code:
            raise unittest.SkipTest(f"no loop device with ext4 here: {made.stderr}{mounted.stderr}".strip())

    def __exit__(self, *_):
        with self.faults.lifted():
            pass
        if run("umount", self._place).code:
            detach(self._place)
        self.faults.stop()
        shutil.rmtree(self._home)


@dataclasses.dataclass(frozen=True)
class Got:
    """The outcome of one read."""

    errno: int
    sha256: str
    seconds: float


class Reading(Child):
    """Reads ranges of a file in a process of its own, with a thread for each range.

    `how`: `pread`, `random` (without the kernel's readahead), `direct` (O_DIRECT) or `mmap`.
    """

    def __init__(self, path, ranges, how="pread"):
        self.ranges = list(ranges)
        super().__init__(READER, path, how, json.dumps(self.ranges))
        # Imports may take long on a busy machine.
        self.line()

    def __exit__(self, *_):
        """Unlike its base class, this does not wait for a read that hangs: the fault that the read waits for may end
        only later."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=2)

    def finish(self, seconds=20):
        try:
            return super().finish(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"reads hang: not all back within {seconds} s") from None

    def finished(self, seconds):
        """A `Got` for each range. Fails if a read does not end in time."""
        code, out, err = self.finish(seconds)
        if code:
            raise AssertionError(f"the reader ended with {code}: {err}")
        found = {}
        for line in out.splitlines():
            number, errno, digest, took = line.split()
            found[int(number)] = Got(int(errno), digest, float(took))
        return [found[number] for number in range(len(self.ranges))]


class Load(Child):
    """Threads that read a file at random places, and compare the bytes with `right`: `with Load(path, right, 16) as
    load:`.

    They go on until `stopped` is called. With `after_error="end"`, each thread goes on until its first error.
    """

    def __init__(self, path, right, n_threads, how="pread", after_error="go on"):
        super().__init__(LOAD, path, right, n_threads, how, after_error)
        if self.line() != "ready":
            raise AssertionError(f"the readers did not start: {self.finish()}")

    __exit__ = Reading.__exit__

    def stopped(self, seconds=20):
        """Stops the threads, and returns their counts."""
        with contextlib.suppress(BrokenPipeError):
            self.tell()
        return self.ended(seconds)

    def ended(self, seconds=20):
        """The counts, once all threads have ended."""
        line = self.line(seconds)
        if not line:
            raise AssertionError(f"the readers ended badly: {self.finish()}")
        # Until its end the process has the file open.
        self.process.wait(seconds)
        return json.loads(line)


def read_ranges(path, ranges, how="pread", seconds=20):
    """Reads ranges in parallel in another process. Returns a `Got` for each range."""
    with Reading(path, ranges, how) as child:
        return child.finished(seconds)


def digest_of(data, offset, length):
    return hashlib.sha256(data[offset : offset + length]).hexdigest()


@dataclasses.dataclass(frozen=True)
class Held:
    """Figures of a daemon: the number of threads, the number of descriptors except those of source files, and the
    memory now and at its peak, in bytes.
    """

    descriptors: int
    threads: int
    resident: int
    peak: int

    @classmethod
    def by(cls, m):
        status = Path(f"/proc/{m.pid}/status").read_text()
        fields = dict(re.findall(r"(?m)^(\w+):\s+(\d+)", status))
        n_descriptors = len(os.listdir(f"/proc/{m.pid}/fd")) - len(open_files(m))
        return cls(n_descriptors, int(fields["Threads"]), int(fields["VmRSS"]) << 10, int(fields["VmHWM"]) << 10)

    def grown(self, before):
        """A text that says whether there are more descriptors or threads than in `before`. Empty if there are not."""
        pairs = [(name, getattr(before, name), getattr(self, name)) for name in ("descriptors", "threads")]
        return ", ".join(f"{name}: {then} -> {now}" for name, then, now in pairs if now > then)


def open_files(m):
    """Files of its source that the daemon of a mount has open."""
    found = []
    for entry in Path(f"/proc/{m.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry))
    return [path for path in found if path.startswith(f"{m.source}/")]


def status_of(m):
    """The output of `tensorfs status --json` for a mount. None if the command does not exist."""
    for _ in range(3):
        outcome = tensorfs("status", "--json", m.path)
        # On a busy machine a daemon may answer too late once.
        if outcome.code != 1 or '"no-answer"' not in outcome.stdout:
            break
    if outcome.code == 2 and "unrecognized subcommand" in outcome.stderr:
        return None
    if outcome.code:
        raise AssertionError(f"status ended with {outcome.code}: {outcome.stderr}{outcome.stdout}")
    return outcome.json()


def values_of(status, key):
    """All values of `key`, at any depth of the nested objects."""
    if isinstance(status, list):
        return [value for item in status for value in values_of(item, key)]
    if not isinstance(status, dict):
        return []
    return [value for name, item in status.items() for value in ([item] if name == key else values_of(item, key))]


def without_io_uring():
    """For `preexec_fn`: the kernel answers EPERM if this process or its children try to make an io_uring."""
    _refuse(SYS_IO_URING_SETUP)


def without_statx():
    """For `preexec_fn`: statx(2) is refused, as old sandboxes do."""
    _refuse(SYS_STATX)


def without_inotify():
    """For `preexec_fn`: the process and its children get no inotify instance, as if the limit of the user were
    reached."""
    _refuse(SYS_INOTIFY_INIT1)


def without_cachestat():
    """For `preexec_fn`: cachestat(2) fails, so that the process cannot ask what the page cache holds."""
    _refuse(SYS_CACHESTAT)


def _refuse(call):
    load, equal, give = 0x20, 0x15, 0x06
    program = [
        # The number of the system call, which is the same on all architectures.
        (load, 0, 0, 0),
        (equal, 0, 1, call),
        (give, 0, 0, 0x0005_0000 | 1),
        (give, 0, 0, 0x7FFF_0000),
    ]
    load_filter(b"".join(struct.pack("HBBI", *step) for step in program))


def io_uring_works():
    """Whether the kernel lets this process have an io_uring."""
    libc = ctypes.CDLL(None)
    ring = libc.syscall(SYS_IO_URING_SETUP, 1, ctypes.create_string_buffer(120))
    if ring >= 0:
        os.close(ring)
    return ring >= 0


class Cgroup:
    """A memory cgroup below the root, of the cgroup version that the machine has: `Mount(...,
    preexec_fn=group.enter)`."""

    def __init__(self, limit):
        self.limit = limit
        self.path = None

    def __enter__(self):
        base, limit_file = self._hierarchy()
        self.path = base / f"tensorfs-test-{os.getpid()}-{time.monotonic_ns()}"
        self._limit_file = limit_file
        try:
            self.path.mkdir()
            (self.path / limit_file).write_text(str(self.limit))
        except OSError as error:
            self.__exit__()
            raise unittest.SkipTest(f"no memory cgroup can be made here: {error}") from None
        return self

    def __exit__(self, *_):
        if self.path.exists():
            # A process that has just ended may belong to the cgroup for a moment longer.
            with contextlib.suppress(AssertionError):
                wait_until(lambda: not (self.path / "cgroup.procs").read_text(), 20, "the cgroup is empty")
            with contextlib.suppress(OSError):
                self.path.rmdir()

    @staticmethod
    def _hierarchy():
        for line in Path("/proc/mounts").read_text().splitlines():
            _, path, kind, options, *_ = line.split()
            if kind == "cgroup" and "memory" in options.split(","):
                return Path(path), "memory.limit_in_bytes"
            if kind == "cgroup2" and "memory" in Path(path, "cgroup.controllers").read_text().split():
                with contextlib.suppress(OSError):
                    Path(path, "cgroup.subtree_control").write_text("+memory")
                return Path(path), "memory.max"
        raise unittest.SkipTest("no memory cgroups here")

    def enter(self):
        """Moves the calling process into the cgroup."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def killed(self):
        """Number of processes that the kernel killed because of the memory limit."""
        for name in ("memory.oom_control", "memory.events"):
            if (self.path / name).exists():
                return int(re.search(r"(?m)^oom_kill (\d+)", (self.path / name).read_text())[1])
        raise AssertionError(f"nothing counts kills in {self.path}")

    def pressed(self):
        """Number of times that the memory limit was reached."""
        if (self.path / "memory.failcnt").exists():
            return int((self.path / "memory.failcnt").read_text())
        return int(re.search(r"(?m)^max (\d+)", (self.path / "memory.events").read_text())[1])


@contextlib.contextmanager
def file_system(kind, place, *words):
    """Mounts a file system on the new folder `place`: `file_system("tmpfs", path)`."""
    place.mkdir()
    outcome = run("mount", "-t", kind, *words, "tensorfs-test", place)
    if outcome.code:
        raise unittest.SkipTest(f"no {kind} here: {outcome.stderr.strip()}")
    try:
        yield place
    finally:
        detach(place)
