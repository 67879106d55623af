"""`tensorfs run`: a mount for one command."""

import contextlib
import fcntl
import os
import pty
import pwd
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
import unittest
from pathlib import Path

from manifest import by_id
from mounts import BIN, Mount, TestCase, needs_root, run, tensorfs, wait_until
from test_users import NAMESPACE, device_is_for_everybody

FILE = "model.safetensors"


class Running(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.place = self.tmp / "temporary"
        self.place.mkdir()
        self.env = {**os.environ, "TMPDIR": str(self.place)}
        self.addCleanup(self.assert_clean)

    def assert_clean(self):
        wait_until(lambda: not self.left(), 20, "nothing is left")

    def left(self):
        """Folders and mounts of `run` that are there."""
        table = Path("/proc/self/mountinfo").read_text()
        return list(self.place.glob("tensorfs-run-*")) or [line for line in table.splitlines() if str(self.place) in line]

    def run_with(self, *command, options=(), **kwargs):
        return tensorfs("run", *options, self.source, "--", *command, env=self.env, **kwargs)

    def start(self, *command, options=(), **popen):
        words = [str(word) for word in (BIN, "run", *options, self.source, "--", *command)]
        popen = {"env": self.env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **popen}
        # Not for a session of its own, in which nobody could continue what is stopped.
        if "preexec_fn" not in popen:
            popen["process_group"] = 0
        process = subprocess.Popen(words, **popen)
        self.addCleanup(self.end, process)
        return process

    def end(self, process):
        # The command may have outlived `run`.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Commands(Running):
    def test_the_placeholder_and_the_variable_name_the_mount(self):
        outcome = self.run_with("sh", "-c", 'cmp "$0" "$TENSORFS_MOUNT"/model.safetensors && echo "$1" && ls "$2"', f"{{}}/{FILE}", "a={}=b", "{}")
        self.assert_done(outcome)
        first, *files = outcome.stdout.splitlines()
        self.assertRegex(first, f"^a={self.place}/tensorfs-run-[A-Za-z0-9]{{6}}=b$")
        self.assertIn(FILE, files)
        self.assertEqual(outcome.stderr, "")
        self.assertEqual(self.left(), [])

    def test_the_options_are_those_of_mount(self):
        outcome = self.run_with("ls", "{}", options=["-o", "format=bintensors"])
        self.assertIn("model.bt", outcome.stdout)
        outcome = self.run_with("ls", "{}", options=["-o", "layuot=single"])
        self.assert_refused(outcome, 2)
        self.assertIn("did you mean `layout`?", outcome.stderr)
        self.assertEqual(tensorfs("run", self.source, "--", env=self.env).code, 2)

    def test_input_output_and_exit_status_are_those_of_the_command(self):
        process = self.start("sh", "-c", "cat; echo to stderr >&2; exit 7", stdin=subprocess.PIPE)
        self.assertEqual(process.communicate("given", timeout=20), ("given", "to stderr\n"))
        self.assertEqual(process.returncode, 7)

    def test_a_refused_mount_starts_no_command(self):
        (self.tmp / "bad").mkdir()
        outcome = tensorfs("run", self.tmp / "bad", "--", "touch", self.tmp / "made", env=self.env)
        self.assert_refused(outcome, 1)
        self.assertFalse((self.tmp / "made").exists())
        self.assertEqual(self.left(), [])

    def test_a_command_that_cannot_run_has_the_status_that_shells_give(self):
        plain = self.tmp / "plain"
        plain.write_text("data")
        for command, code in (("no-such-command-anywhere", 127), (self.tmp / "gone", 127), (plain, 126), (self.tmp, 126)):
            with self.subTest(command):
                outcome = self.run_with(command)
                self.assert_refused(outcome, code)
                self.assertIn(str(command), outcome.stderr)
                self.assertEqual(self.left(), [])

    def test_several_run_at_once(self):
        processes = [self.start("sh", "-c", "read go; md5sum < {}/" + FILE, stdin=subprocess.PIPE) for _ in range(4)]
        wait_until(lambda: len(list(self.place.iterdir())) == 4, 20, "all have mounted")
        self.assertEqual(len({process.communicate("go\n", timeout=20)[0] for process in processes}), 1)
        self.assertEqual([process.returncode for process in processes], [0] * 4)

    def test_a_file_that_a_child_holds_is_served_after_the_end(self):
        go, done = self.tmp / "go", self.tmp / "done"
        script = f"exec 3< {{}}/{FILE}; (while [ ! -e {go} ]; do sleep 0.02; done; cmp - /dev/fd/3 < $0 > {done}.part 2>&1; echo $? > {done}) & "
        copy = self.tmp / "whole"
        with Mount(self.source) as m:
            copy.write_bytes((m.path / FILE).read_bytes())
        process = self.start("sh", "-c", script, copy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.assertEqual(process.wait(20), 0)
        self.assertEqual(self.left(), [])
        go.touch()
        wait_until(done.exists, 20, "the child has read")
        wait_until(lambda: done.read_text() == "0\n", 20, "the bytes are right")


class Signals(Running):
    # Says which signals it gets.
    TELLS = (
        "import os, signal, sys\n"
        "taken = set(map(int, sys.argv[1:]))\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, taken)\n"
        "os.write(1, b'ready\\n')\n"
        "while True: os.write(1, b'got %d\\n' % signal.sigwait(taken))\n"
    )

    def tells(self, *numbers, **popen):
        process = self.start(sys.executable, "-c", self.TELLS, *map(int, numbers), **popen)
        self.assertEqual(process.stdout.readline(), "ready\n")
        return process

    def test_a_signal_to_run_reaches_the_command(self):
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
        process = self.tells(*numbers)
        for number in numbers:
            process.send_signal(number)
            self.assertEqual(process.stdout.readline(), f"got {int(number)}\n")
        self.assertTrue(self.left())

    def test_run_dies_of_the_signal_of_which_the_command_dies(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGPIPE, signal.SIGSEGV):
            with self.subTest(number):
                outcome = self.run_with("sh", "-c", f"ulimit -c 0; kill -{int(number)} $$")
                self.assertEqual(outcome.code, -number)
                self.assertEqual(self.left(), [])
        process = self.start("sleep", "60")
        wait_until(lambda: self.children(process.pid, "sleep"), 20, "the command runs")
        process.terminate()
        self.assertEqual(process.wait(20), -signal.SIGTERM)
        self.assertEqual(self.left(), [])

    def children(self, pid, name):
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        found = []
        for child in text.split():
            with contextlib.suppress(OSError):
                found += [int(child)] if Path(f"/proc/{child}/comm").read_text().strip() == name else []
        return found

    def test_the_mount_is_taken_off_when_run_is_killed(self):
        process = self.start("sleep", "60")
        wait_until(lambda: self.children(process.pid, "sleep"), 20, "the command runs")
        (command,) = self.children(process.pid, "sleep")
        self.addCleanup(os.kill, command, signal.SIGKILL)
        self.assertTrue(self.left())
        process.kill()
        process.wait(20)
        self.assert_clean()

    def test_a_stopped_command_stops_run_and_goes_on_with_it(self):
        process = self.tells(signal.SIGUSR1)
        state = lambda pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        (command,) = self.children(process.pid, Path(os.path.realpath(sys.executable)).name[:15]) or self.children(process.pid, "python")
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: (state(process.pid), state(command)) == ("T", "T"), 20, "both are stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "T" not in (state(process.pid), state(command)), 20, "both go on")
        process.send_signal(signal.SIGUSR1)
        self.assertEqual(process.stdout.readline(), f"got {int(signal.SIGUSR1)}\n")

    def test_keys_of_a_terminal_reach_the_command_once(self):
        terminal, theirs = pty.openpty()
        self.addCleanup(os.close, terminal)
        process = self.start(
            sys.executable, "-c", self.TELLS, int(signal.SIGINT), int(signal.SIGQUIT), int(signal.SIGHUP), stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        shown = b""

        def read(until):
            nonlocal shown
            deadline = time.monotonic() + 20
            while until not in shown and time.monotonic() < deadline:
                if select.select([terminal], [], [], 0.1)[0]:
                    shown += os.read(terminal, 4096)
            self.assertIn(until, shown)

        read(b"ready")
        os.write(terminal, b"\x03")
        read(b"got 2\r\n")
        os.write(terminal, b"\x1c")
        read(b"got 3\r\n")
        # One that was passed too would have come by now.
        process.send_signal(signal.SIGHUP)
        read(b"got 1\r\n")
        self.assertEqual((shown.count(b"got 2"), shown.count(b"got 3")), (1, 1), shown)


@needs_root
@unittest.skipUnless(device_is_for_everybody(), "/dev/fuse is for root only; done again in a namespace below")
@unittest.skipUnless(shutil.which("fusermount3"), "fusermount3 is not installed")
class RunOfAUser(Running):
    def test_a_user_runs_a_command_too(self):
        user = pwd.getpwnam("nobody")
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        binary.chmod(0o755)
        source = self.copy(self.source, "model")
        self.place.chmod(0o777)
        outcome = run(
            binary, "run", "--index-dir", "none", source, "--", "ls", "{}", env=self.env, user=user.pw_uid, group=user.pw_gid, extra_groups=[], cwd="/"
        )
        self.assert_done(outcome)
        self.assertIn(FILE, outcome.stdout)
        self.assertEqual(self.left(), [])


@needs_root
@unittest.skipIf(device_is_for_everybody(), "/dev/fuse is for everybody: done above")
class RunInANamespace(TestCase):
    def test_a_user_runs_a_command_where_the_device_is_for_everybody(self):
        command = NAMESPACE.replace("WithoutRights", "RunOfAUser")
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", command]
        self.assert_done(run(*words, self.tmp / "fuse", sys.executable, Path(__file__).parent, timeout=100))


if __name__ == "__main__":
    unittest.main()
