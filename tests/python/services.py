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

# Seconds to wait for the service: a loaded machine starts many processes slowly.
PATIENCE = 60

# Name of the service's unit.
UNIT = "tensorfs-test.service"


# Renumbers descriptors from 3 on, in order, as a service manager passes them, and runs the program.
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
    """A service manager. It records every message to its socket, in order, and stores the descriptors that it gets."""

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
                    # The service waits for a barrier until its descriptor is closed.
                    [os.close(fd) for fd in fds]
        return self.messages

    def _drop(self, is_dropped):
        for pair in [pair for pair in self.stored if is_dropped(*pair)]:
            self.stored.remove(pair)
            os.close(pair[1])

    def passed(self):
        """Name and number of each stored descriptor, beginning with the last one, as systemd passes them.

        A descriptor stays stored until the service removes it by name, or its other end is closed.
        """
        self.heard()
        self._drop(lambda _, fd: has_ended(fd))
        return self.stored[::-1]

    def count(self, message):
        return self.heard().count(message)

    def status(self):
        """The last status that the service has sent. Empty if there is none."""
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

    A service of root has only the capabilities and the system calls of its unit, unless `confined` is False.

    The watchdog of `mounts.Mount` is not needed: the end of the block kills the workers, and this ends reads that hang.
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
        """Starts the process, with the descriptors that earlier processes have stored. `more` are further environment
        variables."""
        stored = self.manager.passed()
        env = {**os.environ, "NOTIFY_SOCKET": str(self.manager.path), **self.env, **more}
        words = [str(word) for word in (self.binary, "serve", "--config", self.file, *self.args)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
        if stored:
            env["LISTEN_FDS"] = str(len(stored))
            env["LISTEN_FDNAMES"] = ":".join(name for name, _ in stored)
            # High numbers, which the renumbered descriptors cannot overwrite.
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for _, fd in stored]
            words = [sys.executable, "-c", PASS, str(len(high)), *map(str, high), *words]
            streams["pass_fds"] = high
        self.process = subprocess.Popen(words, env=env, **{**streams, **self.popen})
        if stored:
            [os.close(fd) for fd in high]

    def restart(self, **more):
        """Restarts the service as a service manager does. The fake `systemctl` tells it the reason of the stop."""
        with SystemCtl(self.folder, "restart") as path:
            self.process.terminate()
            self._wait()
        assert path
        self.start(**more)

    def _wait(self):
        """Waits for the end of the process, and receives its messages during the wait."""

        def has_ended():
            self.manager.heard()
            return self.process.poll() is not None

        wait_until(has_ended, PATIENCE, "the service ends")

    def __exit__(self, *_):
        # Kills the workers first: without a supervisor a worker would unmount, but a stopped worker would not.
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
        """The running workers: name of the mount -> pid."""
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
        """Ends the service as a service manager does. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


def mount_config(name, source, target, options="", rest=""):
    options = f'options = "{options}"\n' if options else ""
    return f'[[mount]]\nname = "{name}"\nsource = "{source}"\ntarget = "{target}"\n{options}{rest}\n'


class ServiceCase(TestCase):
    """A test with a service and mount points in its temporary folder."""

    def target(self, name):
        """A mount point. The end of the test removes every mount from it."""
        path = self.tmp / "srv" / name
        path.mkdir(parents=True)
        self.addCleanup(detach, path)
        return path

    def serve(self, config, *args, **popen):
        return self.enter(Service(self.tmp, config, *args, **popen))

    def assert_mounted(self, path):
        entry = find_mount(path)
        self.assertTrue(entry is not None and entry.type == "fuse.tensorfs", entry)
