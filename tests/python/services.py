"""`tensorfs serve` under test: a config, the service with its workers, and the service manager's side of sd_notify."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from mounts import BIN, HANGS, TestCase, detach, find_mount, process_gone, wait_until

# A loaded machine starts many processes slowly.
PATIENCE = 60


class Manager:
    """The service manager: keeps every message to its socket, in order."""

    def __init__(self, path):
        self.path = path
        self.messages = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(path))

    def heard(self):
        with contextlib.suppress(BlockingIOError):
            while True:
                self.messages += self._socket.recv(1 << 16).decode().splitlines()
        return self.messages

    def count(self, message):
        return self.heard().count(message)

    def status(self):
        """The last status, or ''."""
        return next((m[7:] for m in reversed(self.heard()) if m.startswith("STATUS=")), "")

    def close(self):
        self._socket.close()


class Service:
    """`with Service(folder, config) as service:` runs the service until the block ends.

    The watchdog of `mounts.Mount` is not needed: the end of the block kills the workers, which ends what hangs.
    """

    def __init__(self, folder, config, *args, **popen):
        self.folder = Path(folder)
        self.file = self.folder / "config.toml"
        self.file.write_text(config)
        self.args = args
        self.popen = popen
        self.process = None
        self.targets = set()
        self._pids = set()
        self._log = tempfile.TemporaryFile()
        self.manager = Manager(self.folder / "notify")

    def __enter__(self):
        env = {**os.environ, "NOTIFY_SOCKET": str(self.manager.path), **self.popen.pop("env", {})}
        words = [str(word) for word in (BIN, "serve", "--config", self.file, *self.args)]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log}
        self.process = subprocess.Popen(words, env=env, **{**streams, **self.popen})
        return self

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
        return [path for path in mounted_paths() if path.startswith(f"{self.folder}/")]

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


def mounted_paths():
    from mounts import mount_table

    return [entry.path for entry in mount_table()]


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
