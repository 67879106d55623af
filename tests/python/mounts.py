"""Mounts for the tests. They are always in a temporary folder, are always removed again, and every wait for them has a
limit.

Python cannot interrupt a read that hangs in the kernel. So every mount has a watchdog: a process of its own that kills
the daemon after a while. The kernel then ends every request with an error.
"""

import atexit
import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("TENSORFS_BIN", ROOT / "target/debug/tensorfs")).resolve()
HELPER = BIN.with_name("mount.tensorfs")
FIXTURES = Path(os.environ.get("TENSORFS_FIXTURES", ROOT / "tests/fixtures")).resolve()

# The tests must not use the indexes of the user who runs them.
INDEX_DIR = tempfile.mkdtemp(prefix="tensorfs-test-index-")
atexit.register(shutil.rmtree, INDEX_DIR, ignore_errors=True)
os.environ["TENSORFS_INDEX_DIR"] = INDEX_DIR
# Tests of the disk cache set a folder of their own.
os.environ["TENSORFS_CACHE_DIR"] = "none"

COMMAND_TIMEOUT = 30
MOUNT_TIMEOUT = 20
WATCHDOG_SECONDS = 120
# Seconds after which something counts as hanging. This is less than the eleven seconds for which a daemon serves open
# files after a signal.
HANGS = 10

is_root = os.geteuid() == 0
needs_root = unittest.skipUnless(is_root, "needs root")


# The peak memory of a process includes the memory of its parent at the fork, so a small process starts the command.
MEASURE = """
import os, sys
pid = os.fork()
if pid == 0:
    os.execv(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(pid, 0)
os.write(int(sys.argv[1]), str(usage.ru_maxrss).encode())
code = os.waitstatus_to_exitcode(status)
os._exit(code if code >= 0 else 128 - code)
"""


@dataclasses.dataclass
class Outcome:
    """The result of a finished command."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    def json(self):
        return json.loads(self.stdout)


def run(*args, timeout=COMMAND_TIMEOUT, **popen):
    """Runs a command, and returns its `Outcome`. Kills the command if it takes longer than `timeout` seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        # The output goes to files and not to pipes: a daemon that keeps a pipe open would make this wait.
        process = subprocess.Popen(
            [str(a) for a in args], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True, **popen
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise TimeoutError(f"{process.args} did not finish within {timeout} s") from None
        return Outcome(code, _content(out), _content(err), time.monotonic() - start)


def run_measured(*args):
    """Does the same as `run`. Returns the outcome, and the peak resident size of the command in bytes."""
    with tempfile.TemporaryFile() as peak:
        words = [sys.executable, "-S", "-E", "-c", MEASURE, peak.fileno(), *args]
        outcome = run(*words, pass_fds=[peak.fileno()])
        return outcome, int(_content(peak)) * 1024


def _content(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def tensorfs(*args, **kwargs):
    return run(BIN, *args, **kwargs)


def wait_until(condition, seconds, what):
    """Polls `condition`, and returns its first true value. Fails with the text `what` if there is no such value in
    time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.01)


@dataclasses.dataclass(frozen=True)
class MountEntry:
    device: str
    path: str
    type: str
    options: str


def mount_table():
    # `splitlines` is not used: the kernel escapes only blanks, and names may contain other line ends.
    table = Path("/proc/mounts").read_bytes().decode(errors="surrogateescape")
    return [_mount_entry(line) for line in table.split("\n") if line]


def _mount_entry(line):
    fields = [re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in line.split(" ")]
    return MountEntry(*fields[:4])


def find_mount(path):
    """The topmost mount on `path`, or None."""
    path = os.path.abspath(path)
    return next((m for m in reversed(mount_table()) if m.path == path), None)


def process_gone(pid):
    """True for a process that has ended, even if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def stop_process(pid):
    """Sends SIGSTOP, and waits until no thread runs any more. A thread that is in a system call may still answer until
    then."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")

    def stopped():
        # A thread may end while the list of threads is read.
        stats = [read_or_none(task / "stat") for task in tasks.iterdir()]
        return all(stat is None or stat.rpartition(b")")[2].split()[0] == b"T" for stat in stats)

    wait_until(stopped, 20, f"process {pid} stops")


def daemon_of(path):
    """The pid of the daemon that serves `path`, or None. It is found by its command line."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0")
            # A command that mounts in the background also names the path, but does not serve it.
            serves = b"--foreground" in argv or argv[1:3] == [b"internal", b"daemon"]
            if b"tensorfs" in os.path.basename(argv[0]) and serves and os.fsencode(path) in argv:
                if not process_gone(int(entry.name)):
                    return int(entry.name)
    return None


def waits_of(pid):
    """A line for each thread of a process: its name, and the kernel function in which it waits."""
    threads = sorted(Path(f"/proc/{pid}/task").glob("*"))
    names = [[(read_or_none(thread / file) or b"").decode().strip() for file in ("comm", "wchan")] for thread in threads]
    return "\n".join(f"    {name}: {wait}" for name, wait in names)


def kill_daemon_of(path):
    """Kills the daemon that serves `path`, if there is one. The daemon may end by itself at the same time."""
    pid = daemon_of(path)
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class MountFailed(Exception):
    """`tensorfs mount` ended before it served. Has its exit code and its output."""

    def __init__(self, code, stderr):
        super().__init__(f"mount ended with {code}: {stderr.strip()}")
        self.code = code
        self.stderr = stderr


class Notified:
    """The side of the service manager in sd_notify. A foreground mount sends `READY=1` once it answers."""

    def __init__(self, path):
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))
        path.chmod(0o777)

    def ready(self):
        with contextlib.suppress(BlockingIOError):
            return b"READY=1" in self._socket.recv(4096).splitlines()
        return False

    def close(self):
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Mount:
    """`with Mount(source, "prefer=shards") as m:` serves `source` at `m.path` until the block ends.

    The daemon runs in the foreground as a child of the test, unless `background` is set. `popen` has arguments for
    `subprocess.Popen`, for tests that need another user or other limits.
    """

    def __init__(self, source, *options, at=None, background=False, binary=BIN, watchdog=WATCHDOG_SECONDS, **popen):
        # Only a URL contains `://`.
        self.source = source if "://" in str(source) else Path(source)
        self.options = options
        self.background = background
        self.binary = binary
        self.popen = popen
        self.pid = None
        self._home = Path(tempfile.mkdtemp(prefix="tensorfs-test-"))
        self._home.chmod(0o755)
        self.path = Path(at) if at else self._home / "mnt"
        self._log = tempfile.TemporaryFile()
        self._process = None
        self._watchdog_seconds = watchdog
        self._watchdog = None
        if not at:
            self.path.mkdir()
        self._notified = Notified(self._home / "notify")

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self._stop_by_force()
            self._remove_folder()
            raise
        return self

    def __exit__(self, kind, _value, _traceback):
        problem = self.stop()
        if problem and kind is None:
            raise AssertionError(problem)

    def _start(self):
        env = {**self.popen.get("env", os.environ), "NOTIFY_SOCKET": str(self._notified.path)}
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
        self._process = subprocess.Popen(self.command(), **{**streams, **self.popen, "env": env})
        if not self.background:
            self.pid = self._process.pid
            self._watch()
        deadline = time.monotonic() + MOUNT_TIMEOUT
        while not (self._process.poll() == 0 if self.background else self._notified.ready()):
            code = self._process.poll()
            if code or (code == 0 and not self.background):
                raise MountFailed(code, self.log())
            if time.monotonic() > deadline:
                raise TimeoutError(f"no mount within {MOUNT_TIMEOUT} s: {self.log()}")
            time.sleep(0.002)
        if self.background:
            self.pid = daemon_of(self.path)
            if self.pid is None:
                raise AssertionError(f"no daemon serves {self.path}: {self.log()}")
            self._watch()

    def command(self):
        options = [word for option in self.options for word in ("-o", option)]
        last = [] if self.background else ["--foreground"]
        return [str(word) for word in (self.binary, "mount", self.source, self.path, *options, *last)]

    def _watch(self):
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {self._watchdog_seconds}; kill -9 {self.pid}"], start_new_session=True
        )

    def mounted(self):
        entry = find_mount(self.path)
        return entry is not None and entry.type == "fuse.tensorfs"

    def alive(self):
        return self.pid is not None and not process_gone(self.pid)

    def log(self):
        return _content(self._log)

    def wait_for_log(self, text, seconds=HANGS):
        """Waits until the log contains `text`, because a daemon answers first, and writes to the log after that."""
        wait_until(lambda: text in self.log(), seconds, f"{text!r} in the log")

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def wait_for_exit(self, seconds=HANGS):
        """Waits for the end of the daemon. Returns its exit code if it is a child of the test."""
        if self._process and self._process.pid == self.pid:
            return self._process.wait(seconds)
        wait_until(lambda: not self.alive(), seconds, "the daemon ends")
        return None

    def umount(self, *args):
        return run(self.binary, "umount", self.path, *args, timeout=10, **self._as_user())

    def _as_user(self):
        return {k: v for k, v in self.popen.items() if k in ("user", "group", "extra_groups", "env")}

    def stop(self):
        """Unmounts, and waits for the end of the daemon. If something goes wrong, cleans up by force and returns what
        went wrong."""
        problem = None
        try:
            if self.mounted():
                outcome = self.umount()
                end = time.monotonic() + 10
                # The kernel may close the files of a process a moment after its end.
                while "target is busy" in outcome.stderr and time.monotonic() < end:
                    time.sleep(0.1)
                    outcome = self.umount()
                if outcome.code:
                    problem = f"umount ended with {outcome.code}: {outcome.stderr.strip()}"
            if not problem and self.alive():
                self.wait_for_exit(10)
        except (TimeoutError, AssertionError, subprocess.TimeoutExpired) as error:
            problem = f"unmounting did not finish: {error}\n{waits_of(self.pid)}"
        finally:
            self._stop_by_force()
            self._remove_folder()
        return problem

    def _stop_by_force(self):
        if self._watchdog:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._watchdog.pid, signal.SIGKILL)
            self._watchdog.wait()
        pid = self.pid or daemon_of(self.path)
        if pid and not process_gone(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        detach(self.path)

    def _remove_folder(self):
        self._log.close()
        self._notified.close()
        # The folder is never deleted recursively, because it could still be a mount.
        with contextlib.suppress(OSError):
            (self._home / "mnt").rmdir()
        with contextlib.suppress(OSError):
            self._home.rmdir()


def detach(path):
    """Lazily unmounts everything on `path`, in a way that this user is allowed to."""
    for _ in range(4):
        if find_mount(path) is None:
            return
        command = ["umount", "-l"] if is_root else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, str(path)], stderr=subprocess.DEVNULL, timeout=10, check=False)


class Child:
    """Python code in a process of its own, for code that may hang or crash: `with Child(code, args...) as child:`.

    The code prints lines on stdout. A SIGBUS or a hang ends this process, and not the test.
    """

    def __init__(self, code, *args, **popen):
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *(str(a) for a in args)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, **popen,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def line(self, seconds=20):
        """The next line that the process prints. Empty if the process has ended."""
        out = self.process.stdout.fileno()
        os.set_blocking(out, True)
        line, byte = b"", None
        with _alarm(seconds, "no line from the child"):
            # Reads byte by byte: a buffer would read beyond the line, and `communicate` does not return bytes in a
            # buffer.
            while byte not in (b"", b"\n"):
                byte = os.read(out, 1)
                line += byte
        return line.decode().strip()

    def tell(self, text=""):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def finish(self, seconds=20):
        """Waits for the end of the process. Returns its exit code (negative for a signal), its stdout and its
        stderr."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@contextlib.contextmanager
def _alarm(seconds, what):
    def expired(*_):
        raise TimeoutError(what)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class TestCase(unittest.TestCase):
    """A test with its own temporary folder (`self.tmp`). It cleans up what a failing test leaves behind."""

    maxDiff = 2000

    @classmethod
    def setUpClass(cls):
        if not BIN.exists():
            raise AssertionError(f"{BIN} is not there: build it, or set TENSORFS_BIN")

    def setUp(self):
        self.tmp = Path(tempfile.mkdtemp(prefix="tensorfs-test-"))
        self.tmp.chmod(0o755)
        self.addCleanup(self._remove_tmp)

    def _remove_tmp(self):
        for entry in mount_table():
            if f"{entry.path}/".startswith(f"{self.tmp}/"):
                kill_daemon_of(entry.path)
                detach(entry.path)
        shutil.rmtree(self.tmp, onerror=lambda *_: None)

    def enter(self, manager):
        """Enters a context manager for the rest of the test."""
        value = manager.__enter__()
        self.addCleanup(manager.__exit__, None, None, None)
        return value

    def open(self, path):
        """Opens `path`, and returns a descriptor, which the end of the test closes."""
        descriptor = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def mount_point(self, name="mnt"):
        """A folder to mount on. The end of the test removes every mount from it."""
        path = self.tmp / name
        path.mkdir()
        self.addCleanup(detach, path)
        return path

    def copy(self, source, name=None):
        """A writable copy of a file or a folder, with its links, in the temporary folder."""
        source = Path(source)
        target = self.tmp / (name or source.name)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy(source, target)
        return target

    def assert_refused(self, outcome, code=1):
        self.assertEqual(outcome.code, code, f"stdout: {outcome.stdout}\nstderr: {outcome.stderr}")
        self.assertRegex(outcome.stderr, r"(?m)^(tensorfs|mount\.tensorfs): .")

    def assert_done(self, outcome):
        self.assertEqual(outcome.code, 0, f"stdout: {outcome.stdout}\nstderr: {outcome.stderr}")

    def assert_one_line(self, outcome):
        self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
        self.assertRegex(outcome.stderr, r"\A(tensorfs|mount\.tensorfs): .+\n\Z")

    def assert_same(self, data, expected, name=""):
        self.assertTrue(data == expected, f"{name}: {data and len(data)} other bytes")

    def reads_fail(self, descriptor, start, expected, length=100_000):
        """True if the read fails with EIO. If it returns bytes, they must be the expected ones."""
        try:
            data = pread_all(descriptor, length, start)
        except OSError as error:
            self.assertEqual(error.errno, errno.EIO, error)
            return True
        self.assert_same(data, expected[start : start + length], f"at {start}")
        return False

    def assert_not_mounted(self, path):
        self.assertIsNone(find_mount(path))


def pread_all(descriptor, length, offset):
    """All bytes up to the end of the file. Repeats the read, because the kernel returns fewer bytes if an error follows
    them."""
    parts = []
    while length > 0:
        part = os.pread(descriptor, length, offset)
        if not part:
            break
        parts.append(part)
        offset, length = offset + len(part), length - len(part)
    return b"".join(parts)


def visible_files(folder):
    """Relative paths of everything below `folder` that is not a folder."""
    folder = Path(folder)
    return sorted(
        str(Path(at, name).relative_to(folder)) for at, _, names in os.walk(folder, onerror=_raise) for name in names
    )


def _raise(error):
    raise error


def is_regular(path):
    return stat.S_ISREG(os.lstat(path).st_mode)


def read_or_none(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return None
