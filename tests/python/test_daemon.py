"""The daemon as a process: what it takes over from its caller, what its log and signals do to it, and how it ends."""

import contextlib
import ctypes
import errno
import fcntl
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

import checkpoints
from faults import FaultFs, FaultyMount, Reading, status_of
from manifest import by_id
from mounts import (
    BIN, Mount, TestCase, daemon_of, detach, find_mount, kill_daemon_of, mount_table, needs_root, process_gone, run,
    tensorfs, wait_until,
)
from test_survival import STALLED, inside, tree

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source
# Only to notice that something hangs.
HANGS = 60


def fill(descriptor):
    """Writes to a pipe until it takes no more."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(descriptor, b"." * 512)
    os.set_blocking(descriptor, True)


def drain(descriptor):
    """Everything that a pipe holds now."""
    os.set_blocking(descriptor, False)
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return b"".join(parts).decode()


def descriptors_of(pid):
    """Number -> what it leads to, of a process."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found[int(entry.name)] = os.readlink(entry)
    return found


class DaemonCase(TestCase):
    def setUp(self):
        super().setUp()
        self.place = self.tmp / "mnt"
        self.place.mkdir()
        self.addCleanup(detach, self.place)
        # Removes what a failed test leaves behind, also in a mount namespace of its own.
        self.addCleanup(kill_daemon_of, self.place)

    def full_pipe(self):
        """Both ends of a pipe that takes nothing more."""
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        self.addCleanup(os.close, writer)
        fill(writer)
        return reader, writer

    def mount_words(self, *options, at=None):
        words = [word for option in options for word in ("-o", option)]
        return [str(word) for word in (BIN, "mount", SOURCE, at or self.place, *words)]

    def daemon(self, at=None):
        pid = daemon_of(at or self.place)
        self.assertIsNotNone(pid, "no daemon serves the mount")
        return pid

    def assert_serves(self, place=None):
        self.assertTrue(((place or self.place) / FILE).read_bytes() == checkpoints.hf_whole(SOURCE))

    def assert_ends_at_sigterm(self, at=None):
        pid = self.daemon(at)
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: process_gone(pid), HANGS, "the daemon ends")
        self.assertIsNone(find_mount(at or self.place))

    def assert_nothing_left(self):
        self.assertIsNone(find_mount(self.place))
        self.assertIsNone(daemon_of(self.place))


class BlockedLog(DaemonCase):
    """A log that takes nothing: a pager that nobody scrolls, an ssh that is stuck."""

    def assert_deadlines_hold(self, m):
        m.faults.tell("stall", STALLED)
        with m.faults.lifted(), Reading(m.path / "a" / FILE, inside(2, 1 << 14, 64), "direct") as reading:
            found = reading.finished(HANGS)
        self.assertEqual({got.errno for got in found}, {errno.EIO})

    def assert_ends(self, m):
        m.kill(signal.SIGTERM)
        m.wait_for_exit(HANGS)
        self.assert_not_mounted(m.path)

    def test_64_readers_of_a_stalled_source_are_answered_while_standard_error_is_a_full_pipe(self):
        _, writer = self.full_pipe()
        for level in ("error", "debug"):
            with self.subTest(level=level):
                env = {**os.environ, "TENSORFS_LOG": level}
                with FaultyMount(tree(), "io-timeout=2", "io=pread", stderr=writer, env=env) as m:
                    self.assert_deadlines_hold(m)
                    self.assert_ends(m)

    def test_a_file_that_cannot_be_opened_fails_its_readers_while_standard_error_is_a_full_pipe(self):
        _, writer = self.full_pipe()
        for command in ("stall-open", "stall-getattr"):
            with self.subTest(command=command), FaultyMount(tree(), "io-timeout=1", stderr=writer) as m:
                m.faults.tell(command, STALLED)
                with m.faults.lifted(), Reading(m.path / "a" / FILE, inside(2, n=16), "random") as reading:
                    self.assertEqual({got.errno for got in reading.finished(HANGS)}, {errno.EIO})

    def test_64_readers_of_a_stalled_source_are_answered_while_the_log_file_is_a_full_pipe(self):
        log = self.tmp / "log"
        os.mkfifo(log)
        reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        writer = os.open(log, os.O_WRONLY)
        self.addCleanup(os.close, writer)
        fill(writer)
        env = {**os.environ, "TENSORFS_LOG": "debug"}
        with FaultyMount(tree(), "io-timeout=2", f"log={log}", background=True, env=env) as m:
            self.assert_deadlines_hold(m)
            self.assert_ends(m)

    # The command returned before the daemon had written what it had to say of the mount.
    def test_a_mount_in_the_background_waits_for_its_log_before_the_command_returns(self):
        log = self.tmp / "log"
        os.mkfifo(log)
        descriptor = os.open(log, os.O_RDWR)
        self.addCleanup(os.close, descriptor)
        fill(descriptor)
        env = {**os.environ, "TENSORFS_LOG": "debug"}
        outcome = run(*self.mount_words(f"log={log}"), env=env)
        self.assert_done(outcome)
        # For a second at most, for a log that takes nothing.
        self.assertGreater(outcome.seconds, 1)
        self.assert_serves()
        self.assert_ends_at_sigterm()

    def test_dropped_lines_are_counted_and_the_log_says_so_once_it_takes_lines_again(self):
        reader, writer = self.full_pipe()
        with Mount(SOURCE, stderr=writer, env={**os.environ, "TENSORFS_LOG": "debug"}) as m:
            def dropped():
                for _ in range(200):
                    with contextlib.suppress(FileNotFoundError):
                        os.stat(m.path / "no-such-file")
                return status_of(m)[0]["log_lines_dropped"]

            wait_until(dropped, HANGS, "lines are dropped")
            wait_until(lambda: "lines of the log were dropped" in drain(reader), HANGS, "the log says so")

    def test_a_standard_error_that_nobody_reads_any_more_ends_nothing(self):
        reader, writer = os.pipe()
        self.addCleanup(os.close, writer)
        with Mount(SOURCE, stderr=writer, env={**os.environ, "TENSORFS_LOG": "debug"}) as m:
            os.close(reader)
            self.assert_serves(m.path)
            self.assert_ends(m)

    def test_a_failure_ends_the_command_while_standard_error_is_a_full_pipe(self):
        _, writer = self.full_pipe()
        words = [*self.mount_words(), "--foreground"]
        words[2] = str(self.tmp / "no-such-source")
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=writer)
        self.addCleanup(process.kill)
        self.assertEqual(process.wait(HANGS), 1)


    def test_mounting_in_the_background_waits_for_no_full_pipe(self):
        _, writer = self.full_pipe()
        helper = [str(word) for word in (BIN.with_name("mount.tensorfs"), self.tmp / "no-such-source", self.place)]
        failing = self.mount_words()
        failing[2] = str(self.tmp / "no-such-source")
        for words, code in (
            (failing, 1), (helper, 32), (self.mount_words("no-such-option"), 2), (helper[:1], 1), (self.mount_words("rw"), 0)
        ):
            with self.subTest(words=words):
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=writer)
                self.addCleanup(process.kill)
                self.assertEqual(process.wait(10), code)
        self.assert_serves()
        self.assert_ends_at_sigterm()


@needs_root
class SystemLog(DaemonCase):
    """A system log of the test's own, in a mount namespace."""

    # Prints `mounted`, and goes on when a line comes.
    SCRIPT = """
import os, socket, subprocess, sys
binary, source, place, log = sys.argv[1:5]
system_log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
system_log.bind(log)
def full():
    other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.connect(log)
    other.setblocking(False)
    try:
        while True:
            other.send(b"full")
    except BlockingIOError:
        pass
full()
subprocess.run([binary, "mount", source, place], check=True, stdin=subprocess.DEVNULL)
for number in range(3000):
    try:
        os.stat(place + "/missing")
    except FileNotFoundError:
        pass
print(len(open(place + "/model.safetensors", "rb").read()), flush=True)
system_log.settimeout(30)
while b"dropped" not in system_log.recv(65536):
    pass
subprocess.run([binary, "umount", place], check=True)
print("dropped", flush=True)
"""

    def test_a_system_log_that_is_full_holds_up_nobody_and_hears_of_it_later(self):
        setup = (
            "mkdir $0/dev && mount -t tmpfs none $0/dev && mknod $0/dev/fuse c 10 229 && mknod $0/dev/null c 1 3 && "
            "mount --move $0/dev /dev && exec \"$@\""
        )
        script = ["unshare", "-m", "sh", "-c", setup, self.tmp]
        env = {**os.environ, "TENSORFS_LOG": "debug"}
        words = [*script, sys.executable, "-c", self.SCRIPT, BIN, SOURCE, self.place, "/dev/log"]
        outcome = run(*words, env=env, timeout=HANGS)
        self.assert_done(outcome)
        self.assertEqual(outcome.stdout.split(), [str((len(checkpoints.hf_whole(SOURCE)))), "dropped"])


class NoLog(DaemonCase):
    """Where there is no system log, and the usual files cannot be written."""

    def mount_without_log(self, *setup, verbose=True, **env):
        """Mounts and unmounts where `/var/log` is read-only; what the command said, with `-v` or without."""
        script = ["set -e", "mount -t tmpfs -o ro none /var/log", "rm -f /dev/log 2>/dev/null || true", *setup]
        script.append(f'"$1" mount {"-v" if verbose else ""} "$2" "$3" -o io-timeout=1; cmp "$3/model.safetensors" "$4"; "$1" umount "$3"')
        whole = self.tmp / "whole"
        whole.write_bytes(checkpoints.hf_whole(SOURCE))
        words = ["unshare", "-m", "sh", "-c", "\n".join(script), "sh", BIN, SOURCE, self.place, whole]
        outcome = run(*words, env={**os.environ, **env})
        self.assert_done(outcome)
        return outcome.stderr

    def setUp(self):
        super().setUp()
        if os.geteuid() or os.path.exists("/dev/log"):
            self.skipTest("needs root, and a machine without a system log")

    def test_a_mount_goes_on_and_says_which_log_cannot_be_written_and_what_to_do(self):
        read_only = self.tmp / "ro"
        read_only.mkdir()
        said = self.mount_without_log(f"mount -t tmpfs -o ro none {read_only}", verbose=False, TMPDIR=str(read_only))
        for part in ("/var/log/tensorfs.log: Read-only file system", f"{read_only}/tensorfs-0", "-o log=FILE"):
            self.assertIn(part, said)
        self.assertEqual(len(said.splitlines()), 1, said)

    def test_the_folder_for_temporary_files_holds_the_log_where_nothing_else_does(self):
        said = self.mount_without_log(TMPDIR=str(self.tmp))
        log = self.tmp / "tensorfs-0/tensorfs.log"
        self.assertIn(f"logging to {log}", said)
        self.assertEqual((log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777), (0o600, 0o700))

    # In a container every mount printed a line about the file that it logs to.
    def test_a_mount_says_nothing_of_a_log_that_can_be_written(self):
        said = self.mount_without_log(verbose=False, TMPDIR=str(self.tmp))
        self.assertEqual(said, "")
        self.assertTrue((self.tmp / "tensorfs-0/tensorfs.log").exists())

    def test_a_log_folder_that_does_not_answer_costs_that_log_and_keeps_nobody(self):
        with FaultFs(self.tmp) as faults, faults.lifted():
            faults.tell("stall-lookup", "tensorfs.log")
            said = self.mount_without_log(f"mount --bind {faults.path} /var/log", TMPDIR=str(self.tmp))
            self.assertIn("cannot log to /var/log/tensorfs.log: no answer within 1 seconds", said)
            self.assertIn(f"logging to {self.tmp}/tensorfs-0/tensorfs.log", said)

    def test_a_link_that_another_user_has_planted_gets_no_log(self):
        victim = self.tmp / "victim"
        victim.mkdir()
        for plant in (self.plant_link, self.plant_folder):
            with self.subTest(plant=plant.__name__):
                temp = self.tmp / plant.__name__
                temp.mkdir()
                plant(temp / "tensorfs-0", victim)
                said = self.mount_without_log(verbose=False, TMPDIR=str(temp))
                self.assertIn("-o log=FILE", said)
                self.assertEqual(os.listdir(victim), [])

    def plant_link(self, folder, victim):
        folder.symlink_to(victim)

    def plant_folder(self, folder, victim):
        folder.mkdir()
        os.chown(folder, 65534, 65534)
        (folder / "tensorfs.log").symlink_to(victim / "tensorfs.log")


class Inherited(DaemonCase):
    """Attributes that a daemon in the background inherits from the process that mounts."""

    def test_no_descriptor_of_the_caller_stays_open(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        other = self.tmp / "other"
        other.mkdir()
        folder = os.open(other, os.O_RDONLY)
        self.addCleanup(os.close, folder)
        far = fcntl.fcntl(writer, fcntl.F_DUPFD, soft - 1)
        passed = [writer, folder, far]
        words = self.mount_words(f"log={self.tmp / 'log'}")
        self.assert_done(run(*words, pass_fds=passed))
        os.close(writer), os.close(far)
        held = descriptors_of(self.daemon())
        self.assertEqual([held[number] for number in range(3)], ["/dev/null"] * 3)
        self.assertNotIn(str(other), held.values())
        self.assertEqual(os.read(reader, 1), b"", "the daemon holds the pipe")
        self.assert_serves()
        self.assert_ends_at_sigterm()

    def test_a_lock_that_flock_holds_for_the_command_is_given_back(self):
        lock = self.tmp / "lock"
        outcome = run("flock", "-n", lock, *self.mount_words())
        self.assert_done(outcome)
        self.assert_done(run("flock", "-n", lock, "true"))
        self.assert_ends_at_sigterm()

    def test_a_pipe_from_any_descriptor_ends_with_the_command(self):
        for redirection in ("3>&1", "2>&1", "3>&1 2>&1 9>&1"):
            with self.subTest(redirection=redirection):
                script = f'"$@" {redirection} | cat'
                self.assert_done(run("sh", "-c", script, "sh", *self.mount_words()))
                self.assert_ends_at_sigterm()

    def test_an_option_may_name_a_descriptor_of_the_caller(self):
        index = self.tmp / "index"
        index.mkdir()
        folder = os.open(index, os.O_RDONLY)
        self.addCleanup(os.close, folder)
        reference = os.open(SOURCE / "model.safetensors.index.json", os.O_RDONLY)
        self.addCleanup(os.close, reference)
        options = f"reference=/dev/fd/{reference},index-dir=/proc/self/fd/{folder}"
        self.assert_done(run(*self.mount_words(options), pass_fds=[reference, folder]))
        self.assertEqual(status_of_place(self.place)["index"]["folder"], str(index))
        self.assert_ends_at_sigterm()

    def test_a_caller_without_standard_streams_can_mount(self):
        script = 'exec "$@" <&- >&- 2>&-'
        for closed in (script, 'exec "$@" <&-', 'exec "$@" >&-', 'exec "$@" 2>&-'):
            with self.subTest(closed=closed):
                self.assert_done(run("sh", "-c", closed, "sh", *self.mount_words()))
                self.assert_serves()
                self.assert_ends_at_sigterm()

    def test_nohup_and_setsid_can_mount(self):
        for wrapper in (["nohup"], ["setsid"], ["setsid", "-w", "nohup"]):
            with self.subTest(wrapper=wrapper):
                self.assert_done(run(*wrapper, *self.mount_words()))
                wait_until(lambda: find_mount(self.place) and daemon_of(self.place), HANGS, "it is mounted")
                self.assert_serves()
                self.assert_ends_at_sigterm()

    def test_a_caller_that_ignores_signals_can_mount_and_the_daemon_ends_at_sigterm(self):
        for names in (["SIGCHLD"], ["SIGCHLD", "SIGINT", "SIGTERM", "SIGHUP"]):
            def ignore(names=names):
                for name in names:
                    signal.signal(getattr(signal, name), signal.SIG_IGN)

            with self.subTest(names=names):
                self.assert_done(run(*self.mount_words(), preexec_fn=ignore))
                self.assert_serves()
                self.assert_ends_at_sigterm()
        with self.subTest("in the foreground"):
            with Mount(SOURCE, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN)) as m:
                self.assert_serves(m.path)

    def test_a_caller_that_blocks_signals_can_mount_and_the_daemon_ends_at_sigterm(self):
        everything = signal.valid_signals()
        block = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, everything)
        self.assert_done(run(*self.mount_words(), preexec_fn=block))
        self.assert_serves()
        blocked = numbers_in(self.daemon(), "SigBlk")
        self.assertEqual(blocked, {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP})
        self.assert_ends_at_sigterm()
        with Mount(SOURCE, preexec_fn=block) as m:
            m.kill(signal.SIGTERM)
            m.wait_for_exit(HANGS)
            self.assert_not_mounted(m.path)

    # It left a dead mount.
    def test_a_mount_that_ctrl_backslash_ends_is_taken_off(self):
        with Mount(SOURCE) as m:
            m.kill(signal.SIGQUIT)
            m.wait_for_exit(HANGS)
            self.assert_not_mounted(m.path)


def status_of_place(place):
    return tensorfs("status", "--json", place).json()[0]


class HangUp(DaemonCase):
    """SIGHUP."""

    def test_a_log_file_is_opened_anew_after_its_rotation(self):
        log, old = self.tmp / "log", self.tmp / "log.1"
        env = {**os.environ, "TENSORFS_LOG": "info"}
        for background in (True, False):
            with self.subTest(background=background):
                with Mount(SOURCE, f"log={log}", background=background, env=env) as m:
                    log.rename(old)
                    m.kill(signal.SIGHUP)
                    wait_until(log.exists, HANGS, "the log file is there again")
                    wait_until(lambda: "opened anew" in log.read_text() + old.read_text(), HANGS, "it is logged")
                    self.assert_serves(m.path)
                    m.kill(signal.SIGTERM)
                    m.wait_for_exit(HANGS)
                    self.assertIn("unmounting", log.read_text())
                    self.assertNotIn("unmounting", old.read_text())
                log.unlink(), old.unlink()

    def test_without_a_log_file_it_does_nothing(self):
        for background in (True, False):
            with self.subTest(background=background), Mount(SOURCE, background=background) as m:
                for _ in range(3):
                    m.kill(signal.SIGHUP)
                    wait_until(lambda: not is_pending(m.pid, signal.SIGHUP), HANGS, "the signal is taken")
                self.assert_serves(m.path)
                self.assertTrue(m.alive() and m.mounted())
                m.kill(signal.SIGTERM)
                m.wait_for_exit(HANGS)

    def test_a_log_file_that_cannot_be_opened_anew_stays(self):
        folder, env = self.tmp / "folder", {**os.environ, "TENSORFS_LOG": "info"}
        folder.mkdir()
        with Mount(SOURCE, f"log={folder / 'log'}", env=env) as m:
            gone = folder.rename(self.tmp / "gone")
            m.kill(signal.SIGHUP)
            wait_until(lambda: "cannot be opened anew" in (gone / "log").read_text(), HANGS, "the old log says so")
            self.assertNotIn("is opened anew", (gone / "log").read_text())
            self.assert_serves(m.path)

    def test_a_mount_in_the_foreground_ends_with_its_terminal(self):
        pid, terminal = pty.fork()
        if pid == 0:
            # Under nohup SIGHUP is ignored, and then it ends nothing.
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            os.execv(BIN, [*self.mount_words(), "--foreground"])
        self.addCleanup(self.end, pid)
        wait_until(lambda: find_mount(self.place), HANGS, "it is mounted")
        wait_until(lambda: waits_for_signals(pid), HANGS, "it waits for signals")
        os.close(terminal)
        wait_until(lambda: process_gone(pid), HANGS, "it ends")
        self.assertIsNone(find_mount(self.place))

    def end(self, pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def numbers_in(pid, mask):
    """The signals in a mask of a process, as /proc tells it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    bits = next(int(line.split()[1], 16) for line in lines if line.startswith(f"{mask}:"))
    return {number + 1 for number in range(64) if bits >> number & 1}


def is_pending(pid, number):
    return number in numbers_in(pid, "ShdPnd")


def waits_for_signals(pid):
    """Whether a thread of a process waits for signals."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if "sigtimedwait" in (task / "wchan").read_text():
                return True
    return False


@needs_root
class Ends(DaemonCase):
    """SIGTERM wherever the mount is by now."""

    def mounts_below(self):
        return [(m.type, m.path) for m in mount_table() if f"{m.path}/".startswith(f"{self.tmp}/")]

    def serve(self, place):
        m = self.enter(Mount(SOURCE, at=place))
        self.assert_serves(m.path)
        return m

    def end(self, m):
        m.kill(signal.SIGTERM)
        m.wait_for_exit(HANGS)

    def tmpfs(self, place, name="other"):
        self.assert_done(run("mount", "-t", "tmpfs", name, place))
        self.addCleanup(detach, place)
        (place / "file").write_text(name)

    def test_a_mount_whose_folder_was_renamed_is_taken_off(self):
        place = self.tmp / "a/b/mnt"
        place.mkdir(parents=True)
        m = self.serve(place)
        (self.tmp / "a").rename(self.tmp / "renamed")
        # Another folder stands where it was.
        place.mkdir(parents=True)
        self.end(m)
        self.assertEqual(self.mounts_below(), [])

    def test_a_mount_with_others_on_top_is_taken_off_and_they_stay(self):
        m = self.serve(self.place)
        self.tmpfs(self.place, "one"), self.tmpfs(self.place, "two")
        with open(self.place / "file") as held:
            self.end(m)
            self.assertEqual(self.mounts_below(), [("tmpfs", str(self.place))] * 2)
            self.assertEqual((self.place / "file").read_text(), "two")
            self.assertEqual(held.read(), "two")
        self.assert_done(run("umount", self.place))
        self.assertEqual((self.place / "file").read_text(), "one")
        self.assert_done(run("umount", self.place))
        self.assertEqual(self.mounts_below(), [])
        self.assertEqual(os.listdir(self.place), [])

    def test_a_mount_with_others_on_top_is_taken_off_where_mounts_are_shared_too(self):
        script = (
            'set -e; "$1" mount "$2" "$3"; pid=$("$1" status --json "$3" | sed "s/.*.pid.:\\([0-9]*\\).*/\\1/"); '
            'mount -t tmpfs one "$3"; touch "$3/one"; mount -t tmpfs two "$3"; touch "$3/two"; '
            'kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done; '
            'grep "$3" /proc/self/mountinfo; ls "$3"; umount "$3"; ls "$3"; umount "$3"; ls "$3"'
        )
        words = ["sh", "-c", script, "sh", BIN, SOURCE, self.place]
        outcome = run("unshare", "-m", "--propagation", "shared", *words, timeout=HANGS)
        self.assert_done(outcome)
        lines = outcome.stdout.splitlines()
        self.assertEqual([line.split(" - ")[1].split()[:2] for line in lines[:2]], [["tmpfs", "one"], ["tmpfs", "two"]])
        self.assertEqual(lines[2:], ["two", "one"], outcome.stdout)

    def test_a_mount_in_a_root_that_is_a_plain_folder_is_taken_off(self):
        # The mount table in there does not have the mount of the root.
        script = (
            'set -e; cd "$0"; mkdir root; cd root; mkdir proc dev tmp mnt; cp -r "$2" source; cp "$1" tensorfs; '
            'mount --rbind /proc proc; mount --rbind /dev dev; '
            'for name in usr bin sbin lib lib64; do '
            'if [ -L /$name ]; then cp -P /$name $name; '
            'elif [ -d /$name ]; then mkdir $name; mount --rbind /$name $name; fi; done; '
            'chroot . sh -c \'if grep -q " / / " /proc/self/mountinfo; then exit 9; fi; '
            '/tensorfs mount --foreground -o index-dir=none /source /mnt >/log 2>&1 & pid=$!; '
            'until grep -q " /mnt .*fuse.tensorfs" /proc/self/mountinfo; do kill -0 $pid; sleep 0.1; done; '
            'kill $pid; wait $pid; echo $?; cat /log; grep -c fuse.tensorfs /proc/self/mountinfo || true\''
        )
        outcome = run("unshare", "-m", "--propagation", "private", "sh", "-c", script, self.tmp, BIN, SOURCE, timeout=HANGS)
        self.assert_done(outcome)
        self.assertNotIn("cannot unmount", outcome.stdout)
        lines = outcome.stdout.splitlines()
        self.assertEqual((lines[0], lines[-1]), ("0", "0"), outcome.stdout)

    # The daemon went on, and nothing said why.
    def test_umount_names_the_bind_or_the_namespace_that_keeps_the_daemon(self):
        second = self.tmp / "second"
        second.mkdir()
        m = self.serve(self.place)
        self.assert_done(run("mount", "--bind", self.place, second))
        self.addCleanup(detach, second)
        outcome = tensorfs("umount", self.place)
        self.assert_done(outcome)
        said = f"tensorfs: {self.place}: unmounted; its daemon goes on, because it serves {second}"
        self.assertEqual(outcome.stderr, f"{said}\n")
        self.assert_serves(second)
        words = ["unshare", "-m", "--propagation", "private", "sh", "-c", "echo in; read line; cat $1 | wc -c", "sh"]
        with subprocess.Popen([*words, str(second / FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
            self.assertEqual(held.stdout.readline(), b"in\n")
            outcome = tensorfs("umount", second)
            self.assert_done(outcome)
            said = f"it serves {second} in the mount namespace of process {held.pid}, until that one ends"
            self.assertIn(said, outcome.stderr)
            self.assertTrue(m.alive())
            # It is served there.
            out, _ = held.communicate(b"\n", timeout=HANGS)
            self.assertGreater(int(out), 0)
        m.wait_for_exit()
        self.assertEqual(self.mounts_below(), [])

    # A mount that another program made at that moment got the device number, and was said to keep the daemon.
    def test_umount_names_no_mount_that_only_got_its_device_number(self):
        script = 'set -e; for i in $(seq 30); do "$1" mount "$2" "$3" -o index-dir=none; "$1" umount "$3"; done'
        places = [self.tmp / f"place{number}" for number in range(4)]
        for place in places:
            place.mkdir()
        words = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", BIN, SOURCE]
        with contextlib.ExitStack() as stack:
            piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "stdin": subprocess.DEVNULL}
            started = [stack.enter_context(subprocess.Popen([*words, place], **piped)) for place in places]
            said = [process.communicate(timeout=HANGS)[0] for process in started]
        self.assertEqual(([process.returncode for process in started], said), ([0] * 4, [""] * 4))

    def test_a_mount_that_was_moved_or_is_seen_in_two_places_is_taken_off(self):
        moved, second = self.tmp / "moved", self.tmp / "second"
        moved.mkdir(), second.mkdir()
        m = self.serve(self.place)
        self.assert_done(run("mount", "--move", self.place, moved))
        self.addCleanup(detach, moved)
        self.assert_done(run("mount", "--bind", moved, second))
        self.addCleanup(detach, second)
        self.assert_serves(second)
        self.end(m)
        self.assertEqual(self.mounts_below(), [])

    def test_a_mount_in_a_folder_that_something_is_mounted_on_is_taken_off(self):
        parent = self.tmp / "parent"
        place = parent / "mnt"
        place.mkdir(parents=True)
        m = self.serve(place)
        self.tmpfs(parent)
        self.end(m)
        self.assertEqual(self.mounts_below(), [("tmpfs", str(parent))])
        self.assertEqual((parent / "file").read_text(), "other")

    def test_a_mount_is_not_kept_busy_by_its_daemon(self):
        m = self.serve(self.place)
        self.assert_done(run("umount", self.place))
        m.wait_for_exit(HANGS)

    def test_a_file_system_that_holds_the_mount_is_not_kept_busy_by_its_daemon(self):
        parent = self.tmp / "parent"
        parent.mkdir()
        self.addCleanup(detach, parent)
        for end in ("recursively", "lazily", "by a signal"):
            # The first case looks for a race.
            for _ in range(10 if end == "recursively" else 1):
                with self.subTest(end=end):
                    self.assert_done(run("mount", "-t", "tmpfs", "other", parent))
                    place = parent / "mnt"
                    place.mkdir()
                    m = self.serve(place)
                    if end == "recursively":
                        self.assert_done(run("umount", "-R", parent))
                        m.wait_for_exit(HANGS)
                        continue
                    with open(place / FILE, "rb") as held:
                        self.assert_done(run("umount", "-l", place)) if end == "lazily" else m.kill(signal.SIGTERM)
                        wait_until(lambda: find_mount(place) is None, HANGS, "it is taken off")
                        self.assert_done(run("umount", parent))
                        self.assertTrue(m.alive())
                        self.assertEqual(held.read(), checkpoints.hf_whole(SOURCE))
                    m.wait_for_exit(HANGS)
            detach(parent)

    def test_a_mount_that_is_hidden_many_times_is_taken_off_and_what_hides_it_stays(self):
        place = self.tmp / "a/b/mnt"
        place.mkdir(parents=True)
        m = self.serve(place)
        on_top = [place] * 20 + [place.parent, self.tmp / "a"]
        for number, covered in enumerate(on_top):
            self.tmpfs(covered, f"other{number}")
        self.end(m)
        self.assertEqual(self.mounts_below(), [("tmpfs", str(covered)) for covered in on_top])
        for number, covered in reversed(list(enumerate(on_top))):
            self.assertEqual((covered / "file").read_text(), f"other{number}")
            self.assert_done(run("umount", covered))
        self.assertEqual(self.mounts_below(), [])

    def test_a_mount_and_its_parent_that_are_covered_where_mounts_are_shared_are_uncovered_and_taken_off(self):
        script = (
            'set -e; mkdir -p "$3/a/m"; "$1" mount "$2" "$3/a/m"; '
            'pid=$("$1" status --json "$3/a/m" | sed "s/.*.pid.:\\([0-9]*\\).*/\\1/"); '
            'mount -t tmpfs one "$3/a/m"; mount -t tmpfs two "$3/a"; '
            'kill $pid; while kill -0 $pid 2>/dev/null; do sleep 0.1; done; '
            'grep "$3" /proc/self/mountinfo; umount "$3/a"; umount "$3/a/m"'
        )
        words = ["sh", "-c", script, "sh", BIN, SOURCE, self.place]
        outcome = run("unshare", "-m", "--propagation", "shared", *words, timeout=HANGS)
        self.assert_done(outcome)
        found = [line.split(" - ")[1].split()[:2] for line in outcome.stdout.splitlines()]
        self.assertEqual(found, [["tmpfs", "one"], ["tmpfs", "two"]], outcome.stdout)

    def test_a_daemon_whose_mount_is_gone_leaves_another_of_the_same_number_alone(self):
        def number(path):
            with open("/proc/self/mountinfo") as table:
                return next(line.split()[2] for line in table if line.split()[4] == str(path))

        stale = self.serve(self.place)
        before = number(self.place)
        stale.kill(signal.SIGSTOP)
        # umount(8) would ask the mount first.
        self.assertEqual(ctypes.CDLL(None).umount2(os.fsencode(self.place), 0), 0)
        other = self.enter(Mount(SOURCE))
        for _ in range(20):
            if number(other.path) == before:
                break
            # A file system that was mounted meanwhile has it.
            self.assertIsNone(other.stop())
            time.sleep(0.5)
            other = self.enter(Mount(SOURCE))
        taken = number(other.path)
        stale.kill(signal.SIGTERM), stale.kill(signal.SIGCONT)
        stale.wait_for_exit(HANGS)
        self.assertTrue(other.mounted())
        self.assert_serves(other.path)
        if taken != before:
            self.skipTest("another file system was mounted meanwhile")


class StalledStart(DaemonCase):
    """A source that does not answer when it is to be mounted."""

    def mount(self, faults, *options, **more):
        words = [BIN, "mount", faults.path, self.place, *[w for o in options for w in ("-o", o)]]
        return run(*words, timeout=HANGS, **more)

    def test_mounting_a_source_that_does_not_answer_fails_and_leaves_nothing(self):
        for command in ("stall-lookup", "stall-getattr", "stall-open", "stall"):
            with self.subTest(command=command), FaultFs(SOURCE) as faults:
                faults.tell(command, "*")
                reader, writer = os.pipe()
                with faults.lifted():
                    outcome = self.mount(faults, "io-timeout=1", "index-dir=none", pass_fds=[writer])
                    self.assert_refused(outcome)
                    self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
                    self.assertIn("no answer within 1 seconds (io-timeout=)", outcome.stderr)
                    self.assert_nothing_left()
                    os.close(writer)
                    self.assertEqual(os.read(reader, 1), b"", "what is left holds descriptors of its caller")
                    os.close(reader)

    def test_the_helper_fails_as_well(self):
        with FaultFs(SOURCE) as faults:
            faults.tell("stall", "*")
            with faults.lifted():
                helper = BIN.with_name("mount.tensorfs")
                outcome = run(helper, faults.path, self.place, "-o", "io-timeout=1,index-dir=none", timeout=HANGS)
                self.assert_refused(outcome, 32)
                self.assert_nothing_left()

    def test_mounting_in_the_foreground_fails_as_well(self):
        for command in ("stall-lookup", "stall-getattr", "stall-open", "stall"):
            with self.subTest(command=command), FaultFs(SOURCE) as faults:
                faults.tell(command, "*")
                with faults.lifted():
                    words = [BIN, "mount", faults.path, self.place, "--foreground"]
                    outcome = run(*words, "-o", "io-timeout=1,index-dir=none", timeout=HANGS)
                    self.assert_refused(outcome)
                    self.assertIn("no answer within 1 seconds", outcome.stderr)
                    self.assert_nothing_left()

    def test_a_source_that_stops_answering_while_it_is_proved_ends_the_mount_in_the_foreground(self):
        tree = self.tmp / "tree"
        shutil.copytree(SOURCE, tree / "below")
        with FaultFs(tree) as faults:
            faults.tell("stall", "below/*")
            with faults.lifted():
                words = [BIN, "mount", faults.path, self.place, "--foreground", "-o", "io-timeout=1,index-dir=none"]
                process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
                self.addCleanup(process.kill)
                self.assertIn("no answer within 1 seconds", process.stderr.readline())
                # Until the source answers the kernel holds what is left of the process.
                wait_until(lambda: process_gone(process.pid), HANGS, "it ends")
                self.assert_not_mounted(self.place)
            self.assertEqual(process.wait(HANGS), 1)
            process.stderr.close()

    def test_a_slow_source_of_many_other_files_that_goes_on_answering_is_mounted(self):
        tree = self.tmp / "tree"
        shutil.copytree(SOURCE, tree)
        for number in range(1500):
            (tree / f"{number:0100}.txt").touch()
        with FaultFs(tree) as faults:
            self.assert_slow_source_is_mounted(faults, ("delay-readdir", "*", 700))

    def assert_slow_source_is_mounted(self, faults, *commands):
        """Mounts a source whose answers take long all together, but come far within the deadline each: a busy machine
        delays them further."""
        for command in commands:
            faults.tell(*command)
        outcome = self.mount(faults, "io-timeout=3", "index-dir=none")
        self.assert_done(outcome)
        self.assertGreater(outcome.seconds, 3)
        faults.tell("ok")
        self.assert_ends_at_sigterm()

    def assert_says_what_stalls(self, faults, option, *more, **env):
        """Fails to mount a good source because of `option`; no process is held by it."""
        with faults.lifted():
            words = self.mount_words("io-timeout=1", option, *more)
            outcome = run(*words, timeout=HANGS, env={**os.environ, **env})
            self.assert_refused(outcome)
            self.assertIn(f"{option}: no answer within 1 seconds (io-timeout=); not mounted", outcome.stderr)
            self.assert_nothing_left()

    def test_what_an_option_names_and_does_not_answer_is_named(self):
        weights = "model.safetensors.index.json"
        for option, path, more in (
            ("reference", weights, []), ("follow", "", []), ("assemble", "below/copies", []), ("index-dir", "below", ["verify=read"])
        ):
            with self.subTest(option=option), FaultFs(SOURCE) as faults:
                for request in ("lookup", "getattr", "open", "readdir"):
                    faults.tell(f"stall-{request}", "*")
                option = f"{option}={faults.path / path}".rstrip("/")
                if not more:
                    self.assert_says_what_stalls(faults, option)
                    continue
                with faults.lifted():
                    outcome = run(*self.mount_words("io-timeout=1", option, *more), timeout=HANGS)
                    self.assert_refused(outcome)
                    self.assertIn(f"{faults.path / path}: no answer within 1 seconds", outcome.stderr)
                    self.assert_nothing_left()

    def test_an_index_folder_that_does_not_answer_costs_the_index_and_not_the_mount(self):
        for how in ("option", "XDG_CACHE_HOME"):
            with self.subTest(how=how), FaultFs(SOURCE) as faults, faults.lifted():
                faults.tell("stall-lookup", "*")
                env = {name: value for name, value in os.environ.items() if name != "TENSORFS_INDEX_DIR"}
                env["XDG_CACHE_HOME"] = str(faults.path)
                more = [f"index-dir={faults.path / 'index'}"] if how == "option" else []
                outcome = run(*self.mount_words("io-timeout=1", *more), timeout=HANGS, env=env)
                self.assert_done(outcome)
                folder = faults.path / ("index" if more else "tensorfs")
                self.assertIn(f"{folder}: no answer within 1 seconds (io-timeout=); no index is kept", outcome.stderr)
                self.assert_serves()
                self.assert_ends_at_sigterm()

    def test_a_slow_source_that_goes_on_answering_is_mounted(self):
        with FaultFs(SOURCE) as faults:
            self.assert_slow_source_is_mounted(faults, ("delay", "*", 400), ("delay-lookup", "*", 400))


if __name__ == "__main__":
    unittest.main()
