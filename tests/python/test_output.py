"""Output of commands: one line for an error, one object with --json, and an error where it cannot be written."""

import contextlib
import os
import subprocess
import tempfile
import unittest

import checkpoints
from checkpoints import numbered_set, shard_name
from mounts import BIN, HELPER, TestCase, daemon_of, run, tensorfs, wait_until

FILE = "model.safetensors"


class Answers(TestCase):
    def assert_no_in_json(self, fault, *words):
        outcome = tensorfs(*words, "--json")
        self.assertEqual(outcome.code, 1, f"{words}: {outcome}")
        answer = outcome.json()
        self.assertIs(answer["ok"], False, answer)
        self.assertIsInstance(answer["class"], str, answer)
        self.assertTrue(isinstance(answer["error"], str) and answer["error"], answer)
        self.assertNotIn("\n", answer["error"])
        if fault:
            self.assertEqual(answer["class"], fault, answer)

    # With --json a failure printed nothing on stdout, or half an object, so that scripts met
    # a parse error instead of the reason.
    def test_failures_are_one_json_object_too(self):
        refused = numbered_set(self.tmp / "refused", 1)
        (refused / shard_name(2, 3)).unlink()
        empty, good = self.tmp / "empty", numbered_set(self.tmp / "good", 1)
        empty.mkdir()
        for command in ("ls", "inspect", "verify"):
            for path, fault in ((self.tmp / "missing", None), (empty, None), (refused, "shard_missing")):
                with self.subTest(command=command, path=path.name):
                    self.assert_no_in_json(fault, command, path)
        for command in ("heat", "bench"):
            with self.subTest(command=command):
                self.assert_no_in_json(None, command, "no-such-organisation/no-such-model")
        with self.subTest("no mount"):
            self.assert_no_in_json(None, "heat", empty)
        with self.subTest("an unknown tensor"):
            self.assert_no_in_json(None, "inspect", good, "unknown")

    def odd_folder(self):
        folder = self.tmp / "a\nfolder"
        folder.mkdir()
        (folder / "a\nfile.safetensors").write_bytes(b"\x10" + bytes(7) + b"{}")
        return folder

    # A newline in a file name made two lines of an error, and the second looked like a message
    # of its own.
    def test_errors_are_one_line_whatever_the_file_is_called(self):
        folder, place = self.odd_folder(), self.mount_point()
        for words in (
            ["verify", folder], ["ls", folder], ["inspect", folder], ["mount", folder, place],
            ["verify", folder / "a\nfile.safetensors"], ["ls", self.tmp / "not\nthere"],
            ["mount", self.tmp / "not\nthere", place], ["mount", folder, self.tmp / "no\nplace"],
            ["umount", self.tmp / "not\nthere"],
        ):
            with self.subTest(words=words):
                outcome = tensorfs(*words)
                self.assert_refused(outcome)
                self.assert_one_line(outcome)

    # The child that failed to mount printed its reason, and its parent printed it again.
    # The helper and mount in the foreground must do no worse.
    def test_a_refused_mount_says_why_once(self):
        source, place = numbered_set(self.tmp / "model", 1), self.mount_point()
        (source / shard_name(2, 3)).unlink()
        for words in ([BIN, "mount"], [BIN, "mount", "--foreground"], [HELPER]):
            with self.subTest(words=words):
                outcome = run(*words, source, place)
                self.assertNotEqual(outcome.code, 0)
                self.assert_one_line(outcome)
                self.assertEqual(outcome.stderr.count(shard_name(2, 3)), 1, outcome.stderr)


@contextlib.contextmanager
def full_device():
    with open("/dev/full", "wb") as file:
        yield file


@contextlib.contextmanager
def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


class Streams(TestCase):
    def run_with(self, words, **streams):
        """Like `run`, with standard streams of its own; returns the exit code and stderr."""
        with tempfile.TemporaryFile() as log:
            streams = {"stdout": log, "stderr": log, **streams}
            process = subprocess.Popen([str(w) for w in words], stdin=subprocess.DEVNULL, **streams)
            try:
                code = process.wait(20)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            return code, log.read().decode(errors="replace")

    def mounts_with(self, stream):
        source, place = numbered_set(self.tmp / "model", 1), self.mount_point()
        # Something to warn of, so that there is something to write.
        (source / "passwd").symlink_to("/etc/passwd")
        for words in ([BIN, "mount"], [BIN, "mount", "-v"], [HELPER]):
            with self.subTest(words=words):
                code, out = self.run_with([*words, source, place], stderr=stream)
                self.assertEqual(code, 0, out)
                self.assert_same((place / FILE).read_bytes(), checkpoints.hf_whole(source))
                self.assert_done(tensorfs("umount", place))
                wait_until(lambda: daemon_of(place) is None, 20, "the daemon ends")

    # A warning that could not be written ended the daemon by a panic, because println! panics
    # when its stream is full.
    def test_a_mount_works_with_a_full_stderr(self):
        with full_device() as stream:
            self.mounts_with(stream)

    # The terminal or the pipe of the one who mounts may be gone by the time there is something
    # to say.
    def test_a_mount_works_with_a_closed_stderr(self):
        with closed_pipe() as stream:
            self.mounts_with(stream)

    def printing(self):
        source = numbered_set(self.tmp / "model", 1)
        json_too = [[command, source, "--json"] for command in ("verify", "ls")]
        return [["verify", source], ["completions", "bash"], ["man"], *json_too]

    def test_quiet_leaves_only_failures_on_standard_error(self):
        source, place = numbered_set(self.tmp / "model", 1), self.mount_point()
        (source / "passwd").symlink_to("/etc/passwd")
        for words in (["ls", source], ["mount", source, place], ["run", source, "--", "true"]):
            with self.subTest(words=words):
                self.assertNotEqual(tensorfs(*words).stderr, "")
                if words[0] == "mount":
                    self.assert_done(tensorfs("umount", place))
                for quiet in (["-q", *words], [words[0], "--quiet", *words[1:]]):
                    outcome = tensorfs(*quiet)
                    self.assert_done(outcome)
                    self.assertEqual(outcome.stderr, "")
                    if words[0] == "mount":
                        self.assert_done(tensorfs("umount", place))
        for words in (["ls", self.tmp / "gone"], ["mount", self.tmp / "gone", place], ["run", source, "--", self.tmp / "gone"]):
            with self.subTest(words=words):
                outcome = tensorfs("-q", *words)
                self.assertNotEqual(outcome.code, 0)
                self.assert_one_line(outcome)

    # Output was lost on a full disk, and the exit code was 0, or 101 with a panic.
    # A script that redirects verify must notice.
    def test_output_on_a_full_device_fails_without_a_panic(self):
        for words in self.printing():
            with self.subTest(words=words), full_device() as stream:
                code, err = self.run_with([BIN, *words], stdout=stream)
                self.assertNotIn("panicked", err)
                self.assertEqual(code, 1, err)

    # `tensorfs verify | head -1` ended with a panic.
    # Whether the rest was needed only the reader knows, so that both exit codes are right.
    def test_output_to_a_closed_pipe_ends_without_a_panic(self):
        for words in self.printing():
            with self.subTest(words=words), closed_pipe() as stream:
                code, err = self.run_with([BIN, *words], stdout=stream)
                self.assertNotIn("panicked", err)
                self.assertIn(code, (0, 1), err)


if __name__ == "__main__":
    unittest.main()
