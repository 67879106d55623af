"""Output that fits a terminal: `tensorfs top`, `status --short` and `ls --short`, on terminals of several sizes."""

import contextlib
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import termios
import time
import unittest

from manifest import by_id
from mounts import BIN, Mount, TestCase, tensorfs

SIZES = ((24, 80), (10, 40), (50, 200))
MARKS = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


class Terminal:
    """A program on a terminal of some size."""

    def __init__(self, size, *words, **env):
        self.master, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, size)
        self.process = subprocess.Popen(
            [str(word) for word in words], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm", **env}, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.shown = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def read(self, until, limit=20):
        """Reads until `until` says so of what was shown."""
        deadline = time.monotonic() + limit
        while not until(self.shown):
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing of that kind in {self.shown!r}")
            if select.select([self.master], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.shown += os.read(self.master, 65536).decode()
                    continue
                break
        return self.shown

    def resize(self, size):
        self.shown = ""
        termios.tcsetwinsize(self.master, size)

    def frame(self):
        """The lines of the last whole frame."""
        frames = re.split(r"\x1b\[H", self.shown)
        return [MARKS.sub("", line).strip("\r") for line in frames[-2].split("\n")]

    def wait_for_frames(self, count=3):
        self.read(lambda shown: shown.count("\x1b[H") > count)
        return self.frame()


def on_terminal(size, *words):
    """The lines that a program prints on a terminal."""
    with Terminal(size, BIN, *words) as terminal:
        while True:
            if select.select([terminal.master], [], [], 20)[0]:
                try:
                    terminal.shown += os.read(terminal.master, 65536).decode()
                except OSError:
                    break
        return terminal.process.wait(10), terminal.shown.replace("\r\n", "\n").splitlines()


class Several(TestCase):
    def mounts(self, count):
        stack = self.enter(contextlib.ExitStack())
        source = by_id("hf_three_shards").source
        made = []
        for number in range(count):
            place = self.tmp / "a folder of mounts with a long name" / f"model-{number}"
            place.mkdir(parents=True)
            made.append(stack.enter_context(Mount(source, at=place)))
        return made


class Top(Several):
    def test_the_names_of_mounts_are_shown_at_every_size(self):
        made = self.mounts(3)
        for size in SIZES:
            with self.subTest(size), Terminal(size, BIN, "top", *[m.path for m in made], "--interval", "0.1") as terminal:
                lines = terminal.wait_for_frames()
                self.assertLessEqual(len(lines), size[0])
                self.assertLessEqual(max(map(len, lines)), size[1])
                self.assertRegex(lines[0], r"^MOUNT +GB/s ")
                for number in range(3):
                    self.assertEqual(sum(f"/model-{number} " in line for line in lines), 1, lines)

    def test_rows_that_do_not_fit_are_counted(self):
        made = self.mounts(5)
        with Terminal((4, 40), BIN, "top", *[m.path for m in made], "--interval", "0.1") as terminal:
            lines = terminal.wait_for_frames()
            self.assertEqual((len(lines), lines[-1]), (4, "3 more"))

    def test_another_size_of_the_terminal_is_followed_at_once(self):
        (m,) = self.mounts(1)
        with Terminal((10, 40), BIN, "top", m.path, "--interval", "30") as terminal:
            terminal.read(lambda shown: "MOUNT" in shown and shown.endswith("\x1b[J"))
            self.assertNotIn("CACHE", terminal.shown)
            terminal.resize((50, 200))
            terminal.read(lambda shown: "CACHE" in shown and str(m.path) in shown)

    def test_the_mount_that_is_read_comes_first(self):
        made = self.mounts(3)
        busy = made[2]
        reader = subprocess.Popen(
            ["sh", "-c", f"while dd if='{busy.path}/model.safetensors' of=/dev/null iflag=direct bs=1M 2>/dev/null; do :; done"],
            start_new_session=True,
        )
        self.addCleanup(reader.wait)
        self.addCleanup(os.killpg, reader.pid, signal.SIGKILL)
        with Terminal((24, 80), BIN, "top", *[m.path for m in made], "--interval", "0.3") as terminal:
            first = lambda shown: shown.count("\x1b[H") > 3 and "/model-2 " in MARKS.sub("", terminal.frame()[1])
            terminal.read(first)

    def test_one_table_fits_the_terminal_too(self):
        made = self.mounts(2)
        code, lines = on_terminal((24, 80), "top", "--once", "--interval", "0.1", *[m.path for m in made])
        self.assertEqual(code, 0)
        self.assertLessEqual(max(map(len, lines)), 80)
        self.assertEqual([f"/model-{number} " in line for number, line in enumerate(lines[1:3])], [True, True])


class ShortStatus(Several):
    def test_a_terminal_gets_one_aligned_line_a_mount(self):
        made = self.mounts(3)
        for size in SIZES:
            with self.subTest(size):
                code, lines = on_terminal(size, "status", "--short", *[m.path for m in made])
                self.assertEqual((code, len(lines)), (0, 4))
                self.assertLessEqual(max(map(len, lines)), size[1])
                place = lines[0].index("STATE")
                for number, line in enumerate(lines[1:]):
                    self.assertIn(f"/model-{number} ", line)
                    self.assertTrue(line[place:].startswith("running"), lines)
        self.assertRegex(lines[0], "^MOUNT +STATE +FLIGHT +HITS +MEMORY +ERRORS +SOURCE$")

    def test_a_pipe_gets_tabs_and_bytes(self):
        (m,) = self.mounts(1)
        (m.path / "model.safetensors").read_bytes()
        outcome = tensorfs("status", "--short", m.path)
        self.assert_done(outcome)
        titles, line = outcome.stdout.splitlines()
        row = dict(zip(titles.split("\t"), line.split("\t"), strict=True))
        self.assertEqual((row["MOUNT"], row["STATE"], row["ERRORS"], row["SOURCE"]), (str(m.path), "running", "0", str(m.source)))
        self.assertGreater(int(row["MEMORY"]), 1 << 20)
        self.assertRegex(row["HITS"], r"^(-|\d+%)$")

    def test_a_dead_mount_is_a_line_and_a_failure(self):
        (m,) = self.mounts(1)
        m.kill()
        m.wait_for_exit()
        outcome = tensorfs("status", "--short", m.path)
        self.assertEqual(outcome.code, 1)
        self.assertEqual(outcome.stdout.splitlines()[1].split("\t")[:3], [str(m.path), "dead", "-"])


class ShortList(TestCase):
    def setUp(self):
        super().setUp()
        self.tree = self.tmp / "tree"
        self.tree.mkdir()
        for name, case in (("a", "hf_three_shards"), ("b", "dcp_global_shapes")):
            shutil.copytree(by_id(case).source, self.tree / name)

    def rows(self, *words):
        outcome = tensorfs("ls", *words)
        self.assert_done(outcome)
        return outcome.stdout.splitlines()

    def test_a_tree_is_listed_by_checkpoint(self):
        shutil.copytree(self.tree / "a", self.tree / "c", dirs_exist_ok=True)
        whole = {f"{one['directory']}/{one['name']}": one for one in tensorfs("ls", self.tree, "--json").json()["sets"]}
        lines = self.rows(self.tree)
        self.assertEqual(lines, self.rows(self.tree, "--short"))
        self.assertEqual(lines[0].split("\t"), ["CHECKPOINT", "TENSORS", "BYTES", "DTYPES", "SHARDS", "TAIL"])
        self.assertEqual(len(lines) - 1, len(whole))
        for line in lines[1:]:
            path, tensors, size, dtypes, shards, tail = line.split("\t")
            one = whole[path]
            self.assertEqual((int(tensors), int(size), int(shards), tail), (
                len(one["tensors"]), one["bytes"], len(one["shards"]), one["tail"]))
            self.assertEqual(set(dtypes.split(",")), {tensor["dtype"] for tensor in one["tensors"]})

    def test_one_checkpoint_and_long_list_all_tensors(self):
        (one,) = tensorfs("ls", self.tree / "a", "--json").json()["sets"]
        for words in ([self.tree / "a"], [self.tree / "a", "--long"]):
            self.assertEqual(len(self.rows(*words)), 1 + len(one["tensors"]))
        self.assertEqual(len(self.rows(self.tree / "a", "--short")), 2)
        shutil.copytree(self.tree / "a", self.tree / "c")
        self.assertGreater(len(self.rows(self.tree, "--long")), 2 * len(one["tensors"]))

    def test_a_refused_checkpoint_is_a_line_of_the_list(self):
        shutil.copytree(self.tree / "a", self.tree / "c")
        next((self.tree / "c").glob("*-00001-*.safetensors")).unlink()
        outcome = tensorfs("ls", self.tree)
        self.assertEqual(outcome.code, 1)
        (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("c/")]
        self.assertEqual(line.split("\t")[1:], ["-", "-", "-", "-", "refused"])

    def test_a_terminal_gets_an_aligned_table_that_fits(self):
        shutil.copytree(self.tree / "a", self.tree / "a folder with a name that is rather long")
        for size in SIZES:
            with self.subTest(size):
                code, lines = on_terminal(size, "ls", self.tree)
                self.assertEqual(code, 0)
                self.assertLessEqual(max(map(len, lines)), size[1])
                self.assertRegex(lines[0], "^CHECKPOINT +")
                self.assertTrue(any("model.safetensors " in line for line in lines), lines)


if __name__ == "__main__":
    unittest.main()
