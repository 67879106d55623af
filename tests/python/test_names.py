"""Names of files and tensors may hold anything; what people read of them is escaped, what programs read is not."""

import json
import os
import sys
import unicodedata
import unittest

import checkpoints
from mounts import Mount, TestCase, tensorfs

NOTE = "TENSORFS-ERROR.txt"
# A line end and a forged line, a terminal's own commands (7 bits and 8 bits wide), another direction of text, an end
# of line that is no newline, and what takes no place.
EVIL = "a\nFORGED: ok\r\t\x1b[2J\x1b]0;title\x07\x9b31m\x7f\u202eb\u2066\u2028\u200b\ufeff"


class Names(TestCase):
    def setUp(self):
        super().setUp()
        self.tree = self.tmp / f"tree {EVIL}"
        self.good = self.tree / f"good {EVIL}"
        self.good.mkdir(parents=True)
        self.file = f"model {EVIL}.safetensors"
        self.tensor = f"weight {EVIL}"
        tensors = [(self.tensor, "U8", (4,), b"abcd"), ("plain", "U8", (4,), b"efgh")]
        checkpoints.write_shard(self.good / self.file, tensors, {f"key {EVIL}": EVIL})
        bad = self.tree / f"bad {EVIL}"
        bad.mkdir()
        (bad / self.file).write_bytes(b"not weights at all, but long enough to look at")
        checkpoints.write_shard(bad / f"other {EVIL}.safetensors", [(self.tensor, "U8", (4,), b"abcd")] * 2)
        self.bad = bad
        missing = self.tree / f"missing {EVIL}"
        missing.mkdir()
        checkpoints.write_weight_map(missing, {f"shard {EVIL}.safetensors": [self.tensor]})
        (self.tree / f"broken {EVIL}").symlink_to(f"nowhere {EVIL}")
        os.mkfifo(self.tree / f"fifo {EVIL}")

    def assert_plain(self, text, what):
        # The lines of a table have a tab between two of their six columns, and none in a name.
        text = "\n".join(" ".join(line.split("\t")) if line.count("\t") == 5 else line for line in text.split("\n"))
        raw = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")}
        self.assertFalse(raw, f"{what}: {text!r}")
        forged = [line for line in text.split("\n") if line.startswith("FORGED")]
        self.assertFalse(forged, f"{what}: {text!r}")

    def test_wrong_usage_shows_arguments_escaped(self):
        for arguments in (["ls", "x", f"y{EVIL}"], ["ls", f"--no{EVIL}"], ["convert", "x", "y", "--to", EVIL]):
            outcome = tensorfs(*arguments)
            self.assertEqual(outcome.code, 2)
            self.assert_plain(outcome.stderr, arguments)

    def test_the_report_of_a_bench_shows_names_escaped(self):
        outcome = tensorfs("bench", self.good, "--runs", "1", "--cases", "read", "--evict", "fadvise", timeout=120)
        self.assertEqual(outcome.code, 0, outcome.stderr)
        self.assert_plain(outcome.stdout, "bench")

    def commands(self):
        for command in ("ls", "inspect", "verify", "index"):
            for source in (self.tree, self.good, self.bad, self.good / self.file, self.bad / self.file):
                yield [command, source]
        yield ["inspect", self.good, self.tensor]
        yield ["inspect", self.good, f"no {EVIL}"]
        yield ["load", self.good]
        yield ["load", self.tree]
        yield ["verify", self.good, "--sha256"]
        yield ["verify", self.good, "--progress", "always"]
        yield ["verify", self.tree / f"not there {EVIL}"]
        yield ["convert", self.good, self.tmp / f"out {EVIL}.bt", "--to", "bintensors"]
        yield ["convert", self.good, self.tmp / f"no {EVIL}/out.bt", "--to", "bintensors"]
        yield ["status", self.tree]
        yield ["umount", self.tree]
        yield ["mount", self.bad, self.tmp / f"no {EVIL}"]
        yield ["mount", self.good, self.tmp, "-o", f"option {EVIL}"]

    # Names reached terminals as commands, and log files as lines of their own.
    def test_no_command_writes_a_name_raw(self):
        for words in self.commands():
            with self.subTest(words=[str(word) for word in words]):
                outcome = tensorfs(*words)
                if "--sha256" not in words:
                    self.assert_plain(outcome.stdout, "stdout")
                self.assert_plain(outcome.stderr, "stderr")
                self.assertTrue(outcome.stdout + outcome.stderr)

    def test_verbose_log_lines_are_plain(self):
        outcome = tensorfs("verify", "-vvv", self.tree)
        self.assert_plain(outcome.stderr, "stderr")

    def test_json_has_the_real_names_and_nothing_that_a_terminal_obeys(self):
        for command in ("ls", "inspect", "verify", "index"):
            outcome = tensorfs(command, self.tree, "--json")
            self.assert_plain(outcome.stdout, command)
            said = json.loads(outcome.stdout)
            self.assertEqual(said["source"], str(self.tree))
            found = said["indexes"] if command == "index" else said["sets"] + said.get("refused", [])
            folders = {os.path.basename(entry["directory"]) for entry in found}
            self.assertLessEqual({self.good.name, self.bad.name}, folders)
            if command in ("ls", "inspect"):
                self.assertEqual({s["name"] for s in said["sets"]}, {self.file})
                names = {t["name"] for s in said["sets"] for t in s["tensors"]}
                self.assertEqual(names, {self.tensor, "plain"})

    def test_a_mount_keeps_names_and_tells_of_them_plainly(self):
        log = self.tmp / "log"
        # The mount table is everybody's: no ends of lines that others may not expect there.
        place = self.tmp / ("mnt " + EVIL.replace("\r", "").replace("\u2028", ""))
        place.mkdir()
        with Mount(self.tree, "fsname=evil", at=place) as m:
            self.assertEqual((m.path / self.good.name / self.file).read_bytes(), (self.good / self.file).read_bytes())
            for folder in (self.bad.name, f"missing {EVIL}"):
                note = (m.path / folder / NOTE).read_text()
                self.assertIn("is not shown", note)
                self.assert_plain(note, NOTE)
            with open(m.path / self.good.name / self.file, "rb") as reader:
                reader.read(8)
                for words in (["status"], ["status", m.path], ["top", "--once"], ["ls", m.path]):
                    outcome = tensorfs(*words)
                    self.assert_plain(outcome.stdout, words)
                    self.assert_plain(outcome.stderr, words)
                said = tensorfs("status", m.path, "--json")
                self.assert_plain(said.stdout, "status --json")
                self.assertEqual(said.json()[0]["source"], str(self.tree))
                self.assertEqual(said.json()[0]["target"], str(m.path))
            os.rename(self.good / self.file, self.tmp / "gone")
            self.assertFalse((m.path / self.good.name / self.file).exists())
            self.assert_plain(m.log(), "stderr of the daemon")
        os.rename(self.tmp / "gone", self.good / self.file)
        place = self.tmp / "plain"
        place.mkdir()
        with Mount(self.tree, f"log={log}", "fsname=evil", at=place, background=True) as m:
            (m.path / self.bad.name / NOTE).read_text()
        self.assertIn("is not shown", log.read_text())
        self.assert_plain(log.read_text(), "log file")


if __name__ == "__main__":
    sys.exit(unittest.main())
