"""Signals that end a command, and standard output that takes nothing."""

import os
import random
import resource
import signal
import subprocess

import checkpoints
from faults import slow_file
from mounts import BIN, TestCase, mount_table, run, wait_until

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Signals(TestCase):
    def start(self, *words, **popen):
        def take_signals():
            # nohup(1) has SIGHUP ignored, and the commands keep to that.
            for number in ENDING:
                signal.signal(number, signal.SIG_DFL)
            # SIGQUIT would leave a core.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        # Ctrl-C reaches the whole group of a command.
        how = {"stdin": subprocess.DEVNULL, "process_group": 0, "preexec_fn": take_signals}
        return subprocess.Popen([BIN, *words], **how, **popen)

    def assert_ended_by(self, process, number):
        self.assertEqual(process.wait(60), -number)

    def test_a_demo_that_is_stopped_at_any_moment_leaves_no_folder_no_mount_and_no_daemon(self):
        place = self.tmp / "tmp"
        place.mkdir()
        environment = {**os.environ, "TMPDIR": str(place)}
        rng = random.Random(12)
        steps = (b"Four", b"dcp-grid", b"tensorfs mount", b"ls -l", b"columns", b"tensorfs umount")
        for step in steps:
            for number in {*rng.sample(ENDING, 1), signal.SIGQUIT}:
                process = self.start("demo", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
                read = b""
                while step not in read and (more := process.stdout.read1()):
                    read += more
                os.killpg(process.pid, number)
                self.assert_ended_by(process, number)
                process.stdout.close()
                self.assertEqual(os.listdir(place), [])
                self.assertFalse([entry for entry in mount_table() if str(place) in str(entry)])
                with self.assertRaises(ProcessLookupError):
                    os.killpg(process.pid, 0)

    def test_a_copy_that_is_stopped_cleans_up_and_ends_by_the_signal(self):
        with slow_file(self.tmp / "below") as source:
            for command, out in (("consolidate", "x.safetensors"), ("consolidate", "folder"), ("convert", "y.bt")):
                for number in ENDING:
                    process = self.start(command, source, self.tmp / out, "--progress=always", stderr=subprocess.PIPE)
                    self.assertTrue(process.stderr.read(1), "no progress")
                    process.send_signal(number)
                    _, error = process.communicate(timeout=60)
                    self.assert_ended_by(process, number)
                    self.assertIn(b"stopped; nothing is left of the new files", error)
                    self.assertEqual(os.listdir(self.tmp), ["below"])

    def test_a_bench_that_is_stopped_cleans_up_and_ends_by_the_signal(self):
        for number in ENDING:
            words = ("--make", "hf", "--size", "64M", "--dir", self.tmp)
            process = self.start("bench", *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(lambda: list(self.tmp.glob("tensorfs-bench-*/*")), 60, "the checkpoint")
            process.send_signal(number)
            self.assert_ended_by(process, number)
            self.assertEqual(os.listdir(self.tmp), [])

    def test_commands_that_only_read_end_by_the_signal_at_once(self):
        with slow_file(self.tmp / "below") as source, slow_file(self.tmp / "other") as other:
            for words in (("verify", source), ("diff", source, other, "--bytes"), ("load", source)):
                for number in ENDING:
                    process = self.start(*words, "--progress=always", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                    self.assertTrue(process.stderr.read(1), "no progress")
                    process.send_signal(number)
                    process.stderr.close()
                    self.assert_ended_by(process, number)

    def test_a_loop_of_a_shell_ends_with_the_command_that_ctrl_c_stops(self):
        script = 'for i in 1 2 3; do "$0" consolidate "$1" "$2" --progress=always; done; echo went on'
        with slow_file(self.tmp / "below") as source:
            process = subprocess.Popen(
                ["bash", "-c", script, BIN, source, self.tmp / "x.safetensors"], process_group=0,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            self.assertTrue(process.stderr.read(1), "no progress")
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        self.assertNotIn(b"went on", output)
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_a_signal_that_was_ignored_at_the_start_ends_nothing(self):
        source = checkpoints.hf_set(self.tmp / "set", megabytes=8)
        words = ["nohup", BIN, "consolidate", source, self.tmp / "x.safetensors", "--progress=always"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.assertTrue(process.stderr.read(1), "no progress")
        process.send_signal(signal.SIGHUP)
        _, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, error)

    def test_two_signals_of_timeout_are_one(self):
        with slow_file(self.tmp / "below") as source:
            outcome = run("timeout", "0.3", BIN, "consolidate", source, self.tmp / "x.safetensors")
        self.assertEqual(outcome.code, 124)
        self.assertEqual(os.listdir(self.tmp), ["below"])


class FullOutput(TestCase):
    def test_a_command_whose_output_cannot_be_written_fails_in_one_line(self):
        source = checkpoints.hf_set(self.tmp / "set")
        indexes = ("-o", f"index-dir={self.tmp / 'index'}")
        for words in (
            ("--help",), ("--version",), ("mount", "--help"), ("ls", source), ("ls", source, "--json"), ("inspect", source),
            ("verify", source), ("doctor",), ("status",), ("top", "--once"), ("warm", source), ("load", source),
            ("index", source, *indexes), ("completions", "bash"), ("man",), ("demo",),
            ("report", source, "--html", self.tmp / "page.html"), ("consolidate", source, self.tmp / "out"),
            ("consolidate", source, self.tmp / "out.safetensors", "--json"), ("convert", source, self.tmp / "out.bt"),
        ):
            with self.subTest(words[0]), open("/dev/full", "wb") as full:
                process = subprocess.run([BIN, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual(process.returncode, 1)
                self.assertRegex(process.stderr, r"\Atensorfs: .*No space left on device \(os error 28\)\n\Z")
                if words[-1] == self.tmp / "out" or words[0] in ("convert", "report"):
                    # The file is there, and the line names it.
                    self.assertIn(f"{words[-1]}: is written", process.stderr)
        self.assertTrue((self.tmp / "out/model.safetensors").exists() and (self.tmp / "out.bt").exists())

    # All of it was lost, and the exit status was 0.
    def test_a_command_without_standard_output_fails_in_one_line(self):
        source = checkpoints.hf_set(self.tmp / "set")
        for words in (
            ("--help",), ("--version",), ("ls", source), ("ls", source, "--json"), ("cat", source, "t0"), ("cat", source, "t0", "--npy"),
            ("verify", source), ("doctor",), ("status",), ("top", "--once"), ("warm", source), ("load", source), ("completions", "bash"),
            ("man",), ("demo",), ("diff", source, source, "--json"), ("report", source, "--html", self.tmp / "page.html"),
            ("consolidate", source, self.tmp / "out"), ("convert", source, self.tmp / "out.bt", "--json"),
        ):
            with self.subTest(words[0]):
                outcome = run("sh", "-c", '"$@" >&-', "sh", BIN, *words)
                self.assertEqual(outcome.code, 2 if words[0] == "diff" else 1, outcome)
                self.assertRegex(outcome.stderr, r"\Atensorfs: .*cannot write to standard output: it is closed\n\Z")
        target = self.tmp / "mnt"
        target.mkdir()
        self.assert_done(run("sh", "-c", '"$@" >&-', "sh", BIN, "mount", source, target))
        self.assert_done(run(BIN, "umount", target))

    def test_a_closed_pipe_is_no_failure(self):
        source = checkpoints.hf_set(self.tmp / "set")
        for words in (("--help",), ("ls", source), ("ls", source, "--json"), ("man",)):
            read, write = os.pipe()
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                process = subprocess.run([BIN, *words], stdout=pipe, stderr=subprocess.PIPE, timeout=60)
            self.assertEqual((process.returncode, process.stderr), (0, b""))
