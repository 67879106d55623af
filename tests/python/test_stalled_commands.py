"""Commands without a mount whose source does not answer: each ends by itself, and by Ctrl-C."""

import os
import re
import shutil
import signal
import subprocess

from checkpoints import hf_set, write_shard
from faults import FaultFs
from mounts import BIN, TestCase, run, tensorfs, wait_until

# Long enough for a busy machine, and far below the time that a stall lasts.
ENDS = 60


class StalledSource(TestCase):
    def setUp(self):
        super().setUp()
        self.source = hf_set(self.tmp / "source")
        self.faults = self.enter(FaultFs(self.source))
        self.enter(self.faults.lifted())
        self.out = self.tmp / "out"

    def commands(self, source):
        return [
            ["ls", source], ["ls", source, "--json"], ["inspect", source], ["cat", source, "t0"], ["warm", source], ["load", source],
            ["index", source], ["verify", source], ["report", source, "--html", self.out], ["diff", source, source],
            ["consolidate", source, self.out], ["convert", source, self.out, "--to", "safetensors"],
        ]

    def assert_fails_in_time(self, words, path):
        outcome = run(BIN, *words, "-o", "io-timeout=1", timeout=ENDS)
        self.assertEqual(outcome.code, 2 if words[0] == "diff" else 1, outcome)
        self.assertEqual(outcome.stderr, f"tensorfs: {path}: no answer within 1 seconds (io-timeout=)\n", words)
        if "--json" in words:
            self.assertEqual((outcome.json()["ok"], outcome.json()["class"]), (False, "io"))
        self.assertFalse(self.out.exists())

    # They waited for ever.
    def test_every_command_fails_in_one_line_when_its_source_does_not_answer(self):
        for request in ("lookup", "getattr", "open", "readdir", None):
            self.faults.tell("ok")
            self.faults.tell(f"stall-{request}" if request else "stall", "*")
            path = self.faults.path if request == "readdir" else self.faults.path / "model-00001-of-00003.safetensors"
            all_commands = self.commands(path)
            for words in all_commands if request == "open" else all_commands[:2]:
                with self.subTest(request=request, words=words[0]):
                    self.assert_fails_in_time(words, path)

    def test_the_second_source_of_diff_has_the_deadline_too(self):
        self.faults.tell("stall-readdir", "*")
        self.assert_fails_in_time(["diff", self.source, self.faults.path], self.faults.path)

    def test_ctrl_c_ends_a_command_that_waits_for_its_source(self):
        for words in self.commands(self.faults.path):
            with self.subTest(words[0]):
                self.faults.tell("ok")
                self.faults.tell("stall-readdir", "*")
                process = subprocess.Popen([BIN, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
                wait_until(lambda: self.faults.parked("*"), ENDS, "it asks the source")
                os.killpg(process.pid, signal.SIGINT)
                self.assertEqual(process.wait(ENDS), -signal.SIGINT)

    def test_a_stall_below_the_source_ends_a_command_too(self):
        tree = self.tmp / "tree"
        shutil.copytree(self.source, tree / "a/b")
        faults = self.enter(FaultFs(tree))
        self.enter(faults.lifted())
        for command in ("ls", "verify", "warm"):
            faults.tell("stall-readdir", "a/b")
            process = subprocess.Popen([BIN, command, faults.path, "-o", "io-timeout=1"], stderr=subprocess.PIPE, text=True)
            self.assertEqual(process.stderr.readline(), f"tensorfs: {faults.path}: no answer within 1 seconds (io-timeout=)\n")
            process.stderr.close()
            # Until the source answers the kernel holds what is left of the process.
            faults.tell("ok")
            self.assertEqual(process.wait(ENDS), 1)

    # `verify` waited until the whole command was found idle, and named no bytes.
    def test_each_read_of_a_command_has_its_deadline(self):
        one = self.tmp / "one"
        one.mkdir()
        write_shard(one / "model.safetensors", [("t", "U8", [32 << 20], bytes(32 << 20))])
        faults = self.enter(FaultFs(one))
        self.enter(faults.lifted())
        for command in ("verify", "cat"):
            faults.tell("stall", "*", str(16 << 20))
            words = [BIN, command, faults.path, *(["t"] if command == "cat" else []), "-o", "io-timeout=1"]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            failed = f"tensorfs: {faults.path}/model.safetensors: cannot read: the bytes at [0-9]+ did not come within 1 s\n"
            # The log names the stalled source as well.
            self.assertTrue(any(re.fullmatch(failed, line) for line in process.stderr), command)
            process.stderr.close()
            faults.tell("ok")
            self.assertEqual(process.wait(ENDS), 1, command)

    def test_a_reader_of_the_output_may_take_its_time(self):
        many = self.tmp / "many"
        for number in range(40):
            shutil.copytree(self.source, many / str(number))
        process = subprocess.Popen([BIN, "ls", many, "--json", "-o", "io-timeout=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(1)
        with self.assertRaises(subprocess.TimeoutExpired):
            process.wait(4)
        output, error = process.communicate(timeout=ENDS)
        self.assertEqual((process.returncode, error), (0, b""))
        self.assertGreater(len(output), 1 << 16)

    def test_a_slow_source_that_goes_on_answering_is_read(self):
        self.faults.tell("delay-open", "*", "700")
        outcome = tensorfs("verify", self.faults.path, "-o", "io-timeout=2")
        self.assert_done(outcome)
        self.assertGreater(outcome.seconds, 2)
