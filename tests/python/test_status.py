"""`tensorfs status`, `tensorfs top` and the control sockets behind them."""

import contextlib
import json
import os
import pty
import pwd
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
import unittest
from pathlib import Path

from manifest import by_id
from mounts import BIN, Mount, TestCase, needs_root, run, stop_process, tensorfs, wait_until
from test_processes import held_open
from test_users import NAMESPACE, device_is_for_everybody

FILE = "model.safetensors"
FOLDER = Path("/run/tensorfs")
USER = "nobody"
# Escapes that restore a terminal: the cursor is shown, and the other screen.
PUT_BACK = b"\x1b[?25h\x1b[?1049l"

# Takes the user on by itself, who may not be able to run this Python.
CONNECT = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as s:
    s.settimeout(5)
    try:
        s.connect(sys.argv[1])
        s.sendall(b'{"do":"status"}\\n')
        print("reply", len(s.recv(100)))
    except OSError as error:
        print(type(error).__name__)
"""


def sockets_of(m):
    return list(FOLDER.glob(f"*-{m.pid}.sock"))


def status_of(path, **kwargs):
    outcome = tensorfs("status", "--json", path, **kwargs)
    (one,) = outcome.json()
    return one, outcome


@contextlib.contextmanager
def stopped(m):
    stop_process(m.pid)
    try:
        yield
    finally:
        m.kill(signal.SIGCONT)


class Status(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source

    def assert_state(self, path, state, code):
        for _ in range(3):
            one, outcome = status_of(path)
            # On a busy machine a daemon, or a probe of its mount, may answer too late once.
            if one["state"] != "no-answer" or state == "no-answer":
                break
        self.assertEqual((one["state"], outcome.code), (state, code))
        return one, outcome


class Running(Status):
    def test_a_mount_tells_what_it_is(self):
        with Mount(self.source, "prefer=shards", background=True) as m:
            (m.path / FILE).read_bytes()
            one, _ = self.assert_state(m.path, "running", 0)
            self.assertEqual((one["target"], one["pid"]), (str(m.path), m.pid))
            self.assertEqual(one["source"], str(self.source))
            self.assertEqual(one["options"]["prefer"], "shards")
            self.assertLess(abs(time.time() - one["started_unix"]), 30)
            self.assertIn("bytes_served", one["counters"])
            self.assertGreater(one["memory"]["rss"], 1 << 20)

    def test_people_get_a_block_for_each_mount(self):
        with Mount(self.source) as one, Mount(self.source) as two:
            outcome = tensorfs("status", one.path, two.path)
            self.assert_done(outcome)
            for m in (one, two):
                self.assertIn(f"{m.path}\n  state     running, pid {m.pid}", outcome.stdout)

    def test_without_a_name_all_mounts_are_told(self):
        with Mount(self.source) as one, Mount(self.source) as two:
            told = {m["target"]: m["state"] for m in tensorfs("status", "--json").json()}
            self.assertEqual((told[str(one.path)], told[str(two.path)]), ("running", "running"))
            text = tensorfs("status").stdout
            self.assertIn(f"{one.path}\n", text)

    def test_the_name_may_be_a_link_or_end_in_a_slash(self):
        with Mount(self.source) as m:
            link = self.tmp / "link"
            link.symlink_to(m.path)
            for name in (link, f"{m.path}/", f"{m.path.parent}/./{m.path.name}"):
                one, _ = self.assert_state(name, "running", 0)
                self.assertEqual(one["pid"], m.pid)

    def test_what_is_no_mount_is_said_and_the_others_are_told(self):
        with Mount(self.source) as m:
            outcome = tensorfs("status", "--json", self.tmp, m.path, self.tmp / "missing")
            self.assert_refused(outcome)
            self.assertEqual([one["state"] for one in outcome.json()], ["running", "not-mounted", "not-mounted"])
            self.assertIn(f"{self.tmp}: not a tensorfs mount", outcome.stderr)

    def test_a_wrong_flag_is_a_usage_error(self):
        self.assertEqual(tensorfs("status", "--jsn").code, 2)
        self.assertEqual(tensorfs("top", "--interval", "0").code, 2)

    def test_a_mount_that_was_taken_off_with_files_open_is_told_as_detached(self):
        with Mount(self.source) as m:
            with held_open(m.path / FILE):
                self.assert_done(m.umount("--lazy"))

                # A mount that does not answer in time, on a busy machine, has no facts.
                def states():
                    return [one["state"] for one in tensorfs("status", "--json").json() if one.get("pid") == m.pid]

                wait_until(lambda: states() == ["detached"], 30, "the state `detached`")


@needs_root
class Sockets(Status):
    def test_folder_and_socket_are_for_the_owner_only(self):
        with Mount(self.source) as m:
            (path,) = sockets_of(m)
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
            # A mount for others opens the folder, so that they find its socket.
            self.assertIn((stat.S_IMODE(FOLDER.stat().st_mode), FOLDER.stat().st_uid), ((0o700, 0), (0o755, 0)))

    def test_another_user_cannot_connect_even_where_the_modes_would_allow_it(self):
        with Mount(self.source) as m:
            (path,) = sockets_of(m)
            user = pwd.getpwnam(USER).pw_uid
            self.assertEqual(run(sys.executable, "-c", CONNECT, path, user).stdout.strip(), "PermissionError")
            # A descriptor leads past the folder, and a mode for everybody past that of the socket.
            descriptor = os.open(path, os.O_PATH)
            self.addCleanup(os.close, descriptor)
            words = (sys.executable, "-c", CONNECT, f"/proc/self/fd/{descriptor}")
            self.assertEqual(run(*words, user, pass_fds=[descriptor]).stdout.strip(), "PermissionError")
            path.chmod(0o666)
            said = run(*words, user, pass_fds=[descriptor]).stdout.strip()
            self.assertIn(said, ("reply 0", "BrokenPipeError", "ConnectionResetError"))
            self.assertEqual(run(*words, 0, pass_fds=[descriptor]).stdout.strip(), "reply 100")

    def test_another_user_is_told_that_a_mount_is_not_theirs(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        binary.chmod(0o755)
        with Mount(self.source, "allow_other") as m:
            account = pwd.getpwnam(USER)
            user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
            outcome = run(binary, "status", "--json", m.path, cwd="/", **user)
            self.assertEqual([one["state"] for one in outcome.json()], ["not-yours"])
            self.assertEqual(outcome.code, 0)

    def test_programs_that_the_daemon_starts_do_not_get_the_socket(self):
        with Mount(self.source) as m:
            flags = []
            for entry in Path(f"/proc/{m.pid}/fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(entry).startswith("socket:"):
                        info = Path(f"/proc/{m.pid}/fdinfo/{entry.name}").read_text()
                        flags.append(int(info.split("flags:")[1].split()[0], 8))
            self.assertTrue(flags)
            for flag in flags:
                self.assertTrue(flag & os.O_CLOEXEC)

    def test_clients_that_say_nothing_hold_up_nobody(self):
        with Mount(self.source) as m, contextlib.ExitStack() as stack:
            (path,) = sockets_of(m)
            silent = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(50)]
            for client in silent:
                client.connect(str(path))
            _, outcome = self.assert_state(m.path, "running", 0)
            self.assertLess(outcome.seconds, 1.5)
            self.assertEqual(len((m.path / FILE).read_bytes()), (m.path / FILE).stat().st_size)
            for client in silent:
                client.settimeout(10)
                self.assertEqual(client.recv(1), b"")

    def test_a_client_that_does_not_read_holds_up_nobody(self):
        with Mount(self.source) as m, socket.socket(socket.AF_UNIX) as client:
            client.connect(str(sockets_of(m)[0]))
            client.sendall(b'{"do":"status"}\n')
            _, outcome = self.assert_state(m.path, "running", 0)
            self.assertLess(outcome.seconds, 1.5)

    def test_many_ask_at_once_and_each_is_answered(self):
        with Mount(self.source) as m:
            words = [BIN, "status", "--json", m.path]
            asking = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(40)]
            for process in asking:
                out, _ = process.communicate(timeout=20)
                self.assertEqual((process.returncode, json.loads(out)[0]["state"]), (0, "running"))

    def test_the_socket_goes_with_the_mount(self):
        with Mount(self.source) as m:
            self.assertEqual(len(sockets_of(m)), 1)
            self.assert_done(m.umount())
            m.wait_for_exit()
            self.assertEqual(sockets_of(m), [])

    def test_the_socket_goes_at_sigterm(self):
        with Mount(self.source, background=True) as m:
            m.kill(signal.SIGTERM)
            m.wait_for_exit()
            self.assertEqual(sockets_of(m), [])

    def test_the_socket_goes_at_a_second_sigterm_too(self):
        with Mount(self.source) as m:
            with held_open(m.path / FILE):
                m.kill(signal.SIGTERM)
                wait_until(lambda: not m.mounted(), 20, "the mount is gone")
                self.assertEqual(len(sockets_of(m)), 1)
                m.kill(signal.SIGTERM)
                m.wait_for_exit()
                self.assertEqual(sockets_of(m), [])


class Dead(Status):
    def test_a_killed_daemon_leaves_a_mount_that_is_told_as_dead(self):
        with Mount(self.source, background=True) as m:
            m.kill()
            m.wait_for_exit()
            for _ in range(2):
                one, outcome = self.assert_state(m.path, "dead", 1)
                self.assertNotIn("pid", one)
                self.assertLess(outcome.seconds, 3)
            self.assertIn("tensorfs umount", tensorfs("status", m.path).stdout)

    def kill_and_leave_a_socket(self, m):
        # Younger ones are left alone. Any mount of the machine removes an older one, so that this one may be gone as
        # soon as the daemon is.
        time.sleep(1.1)
        self.assertEqual(len(sockets_of(m)), 1)
        m.kill()
        m.wait_for_exit()

    @needs_root
    def test_a_socket_that_a_killed_daemon_left_is_removed_by_status(self):
        with Mount(self.source, background=True) as m:
            self.kill_and_leave_a_socket(m)
            for _ in range(2):
                self.assert_state(m.path, "dead", 1)
                self.assertEqual(sockets_of(m), [])

    @needs_root
    def test_a_socket_that_a_killed_daemon_left_is_removed_by_the_next_mount(self):
        with Mount(self.source, background=True) as m:
            self.kill_and_leave_a_socket(m)
            self.assert_done(m.umount())
            with Mount(self.source) as other:
                self.assertEqual(sockets_of(m), [])
                self.assert_state(other.path, "running", 0)

    def test_a_daemon_that_is_stopped_is_told_in_time(self):
        with Mount(self.source) as m:
            with stopped(m):
                one, outcome = self.assert_state(m.path, "no-answer", 1)
                self.assertEqual(one.get("pid"), m.pid)
                self.assertLess(outcome.seconds, 4)
            self.assert_state(m.path, "running", 0)

    @needs_root
    def test_a_stopped_daemon_without_a_socket_is_told_in_time(self):
        with Mount(self.source) as m:
            sockets_of(m)[0].unlink()
            self.assert_state(m.path, "no-socket", 0)
            with stopped(m):
                _, outcome = self.assert_state(m.path, "no-answer", 1)
                self.assertLess(outcome.seconds, 4)

    @needs_root
    def test_a_socket_with_more_callers_than_it_takes_is_told_in_time(self):
        with Mount(self.source) as m, contextlib.ExitStack() as stack, stopped(m):
            with contextlib.suppress(BlockingIOError):
                for _ in range(10000):
                    client = stack.enter_context(socket.socket(socket.AF_UNIX))
                    client.setblocking(False)
                    client.connect(str(sockets_of(m)[0]))
            _, outcome = self.assert_state(m.path, "no-answer", 1)
            self.assertLess(outcome.seconds, 4)


class Top(Status):
    def test_one_table_is_printed_where_nobody_watches(self):
        with Mount(self.source) as m:
            for flags in ([], ["--once"]):
                outcome = tensorfs("top", "--interval", "0.2", *flags)
                self.assert_done(outcome)
                title, *lines = outcome.stdout.splitlines()
                self.assertIn("GB/s", title)
                (line,) = [line for line in lines if line.startswith(f"{m.path}  ")]
                self.assertRegex(line, r"  \d\.\d{3} ")
                self.assertNotIn("\x1b", outcome.stdout)

    def test_a_stopped_daemon_is_named_and_the_others_are_shown_in_time(self):
        with Mount(self.source) as m, Mount(self.source) as other, stopped(m):
            outcome = tensorfs("top", "--once")
            self.assert_done(outcome)
            lines = outcome.stdout.splitlines()
            # The first column is as wide as the longest name, also of mounts that are not ours.
            words = [line.split(maxsplit=1) for line in lines]
            self.assertIn([str(m.path), "its daemon does not answer"], words)
            (line,) = [line for line in lines if line.startswith(f"{other.path} ")]
            # It has rates, so that both looks have seen it.
            self.assertRegex(line, r"  \d\.\d{3} ")
            self.assertLess(outcome.seconds, 20)

    def test_the_table_is_shown_again_and_again_until_a_key(self):
        with Mount(self.source) as m:
            for key in (b"q", b"\x03"):
                shown = self.watch(lambda terminal, _, key=key: os.write(terminal, key), str(m.path))
                self.assertIn(b"\x1b[?1049h", shown)
                self.assertTrue(shown.endswith(PUT_BACK), shown[-40:])

    def test_a_signal_puts_the_terminal_back_too(self):
        with Mount(self.source) as m:
            shown = self.watch(lambda _, process: process.terminate(), str(m.path))
            self.assertTrue(shown.endswith(PUT_BACK), shown[-40:])

    def watch(self, end, expected):
        """Runs `top` in a terminal until it has drawn `expected` three times; then `end` is to end it."""
        terminal, theirs = pty.openpty()
        self.addCleanup(os.close, terminal)
        termios.tcsetwinsize(theirs, (40, 300))
        before = termios.tcgetattr(theirs)
        words = [BIN, "top", "--interval", "0.2"]
        env = {**os.environ, "TERM": "xterm"}
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        self.addCleanup(process.kill)
        shown = b""
        deadline = time.monotonic() + 10
        while shown.count(expected.encode()) < 3:
            self.assertLess(time.monotonic(), deadline, shown)
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
        self.assertNotEqual(termios.tcgetattr(theirs)[3], before[3])
        end(terminal, process)
        self.assertEqual(process.wait(5), 0)
        # The kernel hands over later what was written before the end.
        while not shown.endswith(PUT_BACK) and select.select([terminal], [], [], 10)[0]:
            shown += os.read(terminal, 65536)
        self.assertEqual(termios.tcgetattr(theirs), before)
        os.close(theirs)
        return shown


@needs_root
@unittest.skipUnless(device_is_for_everybody(), "/dev/fuse is for root only; done again in a namespace below")
class StatusOfAUser(TestCase):
    """Copies binary and checkpoint to where `nobody` can read them."""

    def setUp(self):
        super().setUp()
        if not shutil.which("fusermount3"):
            self.skipTest("fusermount3 is not installed")
        self.binary = self.tmp / "tensorfs"
        shutil.copy(BIN, self.binary)
        self.binary.chmod(0o755)
        self.source = self.copy(by_id("hf_three_shards").source, "model")
        self.account = pwd.getpwnam(USER)
        self.env = {**os.environ, "HOME": str(self.place("home"))}
        self.env.pop("XDG_RUNTIME_DIR", None)
        self.fallback = Path(f"/tmp/tensorfs-{self.account.pw_uid}")
        self.remove_fallback()
        if self.fallback.exists():
            self.skipTest(f"{self.fallback} is in use")
        self.addCleanup(self.remove_fallback)

    def remove_fallback(self):
        # Removes the sockets that killed daemons have left.
        run(self.binary, "status", **self.user())
        with contextlib.suppress(OSError):
            self.fallback.rmdir()

    def place(self, name):
        path = self.tmp / name
        path.mkdir(mode=0o700)
        shutil.chown(path, USER)
        return path

    def user(self, **env):
        account = self.account
        return {
            "user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "env": {**self.env, **env}, "cwd": "/",
        }

    def state(self, m, **popen):
        outcome = run(self.binary, "status", "--json", m.path, **popen)
        (one,) = outcome.json()
        return one["state"], outcome.code

    def test_the_socket_of_a_user_lies_in_their_runtime_folder(self):
        runtime = self.place("runtime")
        user = self.user(XDG_RUNTIME_DIR=str(runtime))
        with Mount(self.source, at=self.place("mnt"), binary=self.binary, background=True, **user) as m:
            (path,) = runtime.glob("tensorfs/*.sock")
            self.assertEqual(stat.S_IMODE(path.parent.stat().st_mode), 0o700)
            self.assertEqual(self.state(m, **user), ("running", 0))
        self.assertEqual(list(runtime.glob("tensorfs/*")), [])

    def test_without_a_runtime_folder_user_and_root_find_the_socket_in_tmp(self):
        user = self.user()
        with Mount(self.source, at=self.place("mnt"), binary=self.binary, background=True, **user) as m:
            self.assertEqual(len(list(self.fallback.glob("*.sock"))), 1)
            self.assertEqual(self.state(m, **user), ("running", 0))
            self.assertEqual(self.state(m), ("running", 0))
            m.kill()
            m.wait_for_exit()
            # Root leaves alone files of other users.
            self.assertEqual(self.state(m), ("dead", 1))
            self.assertEqual(self.state(m), ("dead", 1))
            time.sleep(1.1)
            for _ in range(2):
                self.assertEqual(self.state(m, **user), ("dead", 1))
            self.assertEqual(list(self.fallback.glob("*")), [])

    def test_a_mount_without_a_safe_folder_goes_on_without_a_socket(self):
        self.fallback.mkdir(mode=0o777)
        user = self.user()
        with Mount(self.source, at=self.place("mnt"), binary=self.binary, **user) as m:
            self.assertEqual(self.state(m, **user), ("no-socket", 0))
            self.assertEqual(self.state(m), ("no-socket", 0))
            lines = [line for line in m.log().splitlines() if "control socket" in line]
            self.assertEqual(len(lines), 1, m.log())
            self.assertIn("belongs to another user", lines[0])
            self.assertEqual(list(self.fallback.iterdir()), [])
            m.kill()
            m.wait_for_exit()
            self.assertEqual(self.state(m, **user), ("dead", 1))


@needs_root
@unittest.skipIf(device_is_for_everybody(), "/dev/fuse is for everybody: done above")
class StatusInANamespace(TestCase):
    def test_a_user_has_sockets_where_the_device_is_for_everybody(self):
        command = NAMESPACE.replace("WithoutRights", "StatusOfAUser")
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", command]
        outcome = run(*words, self.tmp / "fuse", sys.executable, Path(__file__).parent, timeout=100)
        self.assert_done(outcome)
