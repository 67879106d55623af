"""`tensorfs serve` under test: a config, the service with its workers, and the service manager's side of sd_notify."""

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from confinement import confined_by
from mounts import BIN, HANGS, TestCase, detach, find_mount, is_root, mount_table, process_gone, wait_until

# A loaded machine starts many processes slowly.
PATIENCE = 60

# Name of the service's unit.
UNIT = "tensorfs-test.service"


# Puts descriptors in order from number 3 on, as a service manager passes them, and runs the program.
PASS = """
import os, sys
count = int(sys.argv[1])
for index, descriptor in enumerate(sys.argv[2 : 2 + count]):
    os.dup2(int(descriptor), 3 + index, inheritable=True)
    os.set_inheritable(int(descriptor), False)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""


def has_ended(fd):
    poll = select.poll()
    poll.register(fd, 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


class Manager:
    """The service manager: keeps every message to its socket, in order, and the descriptors to store."""

    def __init__(self, path):
        self.path = path
        self.messages = []
        self.stored = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def heard(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                text, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 8)
                lines = text.decode().splitlines()
                self.messages += lines
                name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "")
                if "FDSTORE=1" in lines:
                    self.stored += [(name, fd) for fd in fds]
                else:
                    if "FDSTOREREMOVE=1" in lines:
                        self._drop(lambda stored, _, name=name: stored == name)
                    # A barrier ends when its descriptor is closed.
                    [os.close(fd) for fd in fds]
        return self.messages

    def _drop(self, is_dropped):
        for pair in [pair for pair in self.stored if is_dropped(*pair)]:
            self.stored.remove(pair)
            os.close(pair[1])

    def passed(self):
        """Name and number of the stored descriptors, the last one first, as systemd passes them.

        They stay stored until the service removes them by name, or the other end of one is gone.
        """
        self.heard()
        self._drop(lambda _, fd: has_ended(fd))
        return self.stored[::-1]

    def count(self, message):
        return self.heard().count(message)

    def status(self):
        """The last status, or ''."""
        return next((m[7:] for m in reversed(self.heard()) if m.startswith("STATUS=")), "")

    def let_go(self):
        """Drops the stored descriptors."""
        self._drop(lambda *_: True)

    def close(self):
        self.let_go()
        self._socket.close()


class SystemCtl:
    """`with SystemCtl(folder, "restart"):` makes `systemctl list-jobs` show that job of the unit, after `seconds`."""

    def __init__(self, folder, job, seconds=0):
        self.path = Path(folder) / "bin" / "systemctl"
        self.job = job
        self.seconds = seconds

    def __enter__(self):
        self.path.parent.mkdir(exist_ok=True)
        lines = f"1 other.service stop running\n2 {UNIT} {self.job} running\n"
        self.path.write_text(f"#!/bin/sh\nsleep {self.seconds}\ncat <<'END'\n{lines}END\n")
        self.path.chmod(0o755)
        return self.path

    def __exit__(self, *_):
        self.path.unlink()


class Service:
    """`with Service(folder, config) as service:` runs the service until the block ends.

    A service of root has the capabilities and the system calls of its unit, without `confined=False`.

    The watchdog of `mounts.Mount` is not needed: the end of the block kills the workers, which ends what hangs.
    """

    def __init__(self, folder, config, *args, **popen):
        self.folder = Path(folder)
        self.file = self.folder / "config.toml"
        self.file.write_text(config)
        self.args = args
        # The program finds `systemctl` in the folder `bin`, if a test puts one there.
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        self.env = {"TENSORFS_UNIT": UNIT, "PATH": path, **popen.pop("env", {})}
        self.binary = popen.pop("binary", BIN)
        if popen.pop("confined", is_root and "user" not in popen):
            popen.setdefault("preexec_fn", confined_by("tensorfs.service"))
        self.popen = popen
        self.process = None
        self.targets = set()
        self._pids = set()
        self._log = tempfile.TemporaryFile()
        self.manager = Manager(self.folder / "notify")

    def __enter__(self):
        self.start()
        return self

    def start(self, **more):
        """Starts the process, with the descriptors that earlier ones stored, and `more` variables."""
        stored = self.manager.passed()
        env = {**os.environ, "NOTIFY_SOCKET": str(self.manager.path), **self.env, **more}
        words = [str(word) for word in (self.binary, "serve", "--config", self.file, *self.args)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
        if stored:
            env["LISTEN_FDS"] = str(len(stored))
            env["LISTEN_FDNAMES"] = ":".join(name for name, _ in stored)
            # Numbers that the new ones cannot overwrite.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for _, fd in stored]
            words = [sys.executable, "-c", PASS, str(len(high)), *map(str, high), *words]
            streams["pass_fds"] = high
        self.process = subprocess.Popen(words, env=env, **{**streams, **self.popen})
        if stored:
            [os.close(fd) for fd in high]

    def restart(self, **more):
        """Restarts it as a service manager does. The fake `systemctl` tells the reason of the stop."""
        with SystemCtl(self.folder, "restart") as path:
            self.process.terminate()
            self._wait()
        assert path
        self.start(**more)

    def _wait(self):
        """Waits for the end of the process, and takes its messages meanwhile."""

        def has_ended():
            self.manager.heard()
            return self.process.poll() is not None

        wait_until(has_ended, PATIENCE, "the service ends")

    def __exit__(self, *_):
        # The workers first: without a supervisor they unmount, which a stopped one does not.
        pids = self.workers().values()
        self._kill(self.process.pid)
        self.process.wait(HANGS)
        for pid in {*pids, *self._pids}:
            self._kill(pid)
        for entry in self._mounts_below():
            detach(entry)
        self.manager.close()
        self._log.close()

    def _kill(self, pid):
        if not process_gone(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _mounts_below(self):
        below = f"{self.folder}/"
        return [entry.path for entry in mount_table() if entry.type == "fuse.tensorfs" and entry.path.startswith(below)]

    def log(self):
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def wait_for_log(self, text, times=1):
        wait_until(lambda: self.log().count(text) >= times, PATIENCE, f"{text!r} {times} times in: {self.log()}")

    def wait_until_ready(self, times=1):
        def is_ready():
            if self.process.poll() is not None:
                raise AssertionError(f"the service ended with {self.process.returncode}: {self.log()}")
            return self.manager.count("READY=1") >= times

        wait_until(is_ready, PATIENCE, f"ready {times} times")

    def wait_for_status(self, text):
        wait_until(lambda: text in self.manager.status(), PATIENCE, f"the status {text!r}")

    def workers(self):
        """Name of the mount -> pid, of the workers that run."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                argv = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if argv[1:3] == [b"internal", b"worker"] and parent == self.process.pid and not process_gone(pid):
                    found[argv[3].decode()] = pid
        self._pids |= set(found.values())
        return found

    def reload(self, config=None):
        if config is not None:
            self.file.write_text(config)
        self.process.send_signal(signal.SIGHUP)

    def stop(self):
        """Ends it as a service manager does; returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def mount_config(name, source, target, options="", rest=""):
    options = f'options = "{options}"\n' if options else ""
    return f'[[mount]]\nname = "{name}"\nsource = "{source}"\ntarget = "{target}"\n{options}{rest}\n'


class ServiceCase(TestCase):
    """A test with a service and mount points in its temporary folder."""

    def target(self, name):
        """A mount point, from which the end of the test takes every mount off."""
        path = self.tmp / "srv" / name
        path.mkdir(parents=True)
        self.addCleanup(detach, path)
        return path

    def serve(self, config, *args, **popen):
        return self.enter(Service(self.tmp, config, *args, **popen))

    def assert_mounted(self, path):
        entry = find_mount(path)
        self.assertTrue(entry is not None and entry.type == "fuse.tensorfs", entry)
