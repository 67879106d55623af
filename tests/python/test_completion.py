"""`tensorfs completions`: what a shell offers behind `-o` and for mounts, asked of real shells."""

import os
import shlex
import shutil
import subprocess
import unittest

from manifest import by_id
from mounts import BIN, Mount, TestCase, tensorfs

# As readline calls it: words are split at = and : too, and only the part behind the last one is replaced.
ASK = r"""
source "$SCRIPT"
spec=$(complete -p tensorfs)
[[ $spec =~ \ -F\ ([^ ]+) ]]
IFS=$'\x1f' read -ra COMP_WORDS <<< "$WORDS"
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$LINE COMP_POINT=${#LINE} COMP_TYPE=9 COMP_KEY=9
[[ $WORDS == *$'\x1f' ]] && { COMP_WORDS+=(""); COMP_CWORD=$((COMP_CWORD + 1)); }
"${BASH_REMATCH[1]}" tensorfs "$CUR" "$PREV"
printf '%s\n' "${COMPREPLY[@]}"
"""


@unittest.skipUnless(shutil.which("bash"), "bash is not installed")
class Bash(TestCase):
    def setUp(self):
        super().setUp()
        self.script = self.tmp / "script"
        self.script.write_text(tensorfs("completions", "bash").stdout)

    def offered(self, line):
        """The words that bash would show for `line`, each as the user would see the whole last word."""
        word = line.rpartition(" ")[2]
        cur = word[max(word.rfind("="), word.rfind(":")) + 1 :]
        words = [part for w in line.split(" ") for part in w.replace("=", "\0=\0").replace(":", "\0:\0").split("\0") if part or not w]
        if word and not cur:
            words.append("")
        env = {
            **os.environ, "PATH": f"{BIN.parent}:{os.environ['PATH']}", "SCRIPT": str(self.script), "LINE": line, "CUR": cur,
            "PREV": words[-2] if len(words) > 1 else "", "WORDS": "\x1f".join(words),
        }
        outcome = subprocess.run(["bash", "--norc", "-c", ASK], env=env, cwd=self.tmp, capture_output=True, text=True, timeout=20)
        self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))
        start = word[: len(word) - len(cur)]
        return [start + reply for reply in outcome.stdout.splitlines() if reply]

    def test_the_options_behind_o_are_offered_one_by_one(self):
        self.assertEqual(self.offered("tensorfs mount a b -o lay"), ["layout="])
        self.assertEqual(self.offered("tensorfs mount a b -oallow"), ["-oallow_other"])
        every = self.offered("tensorfs mount a b -o ")
        for option in ("layout=", "allow_other", "cache=", "watch="):
            self.assertEqual(every.count(option), 1, every)
        self.assertEqual(self.offered("tensorfs mount a b -o ro,dtype=bf16,wat"), [
            f"ro,dtype=bf16,{key}=" for key in ("watch", "watch-interval", "watch-grace")])

    def test_the_values_of_an_option_are_offered(self):
        self.assertEqual(self.offered("tensorfs mount a b -o layout="), [
            f"layout={value}" for value in ("single", "original", "shards=", "map=", "hub")])
        self.assertEqual(self.offered("tensorfs mount a b -o ro,io=ur"), ["ro,io=uring"])
        self.assertEqual(self.offered("tensorfs mount a b -o cache="), [])

    def test_a_value_that_is_a_path_is_completed_as_one(self):
        (self.tmp / "views.toml").touch()
        for option in ("views=vi", "ro,views=vi", "dtype=like:vi", "layout=map=vi"):
            with self.subTest(option):
                self.assertEqual(self.offered(f"tensorfs mount a b -o {option}"), [f"{option}ews.toml"])

    def test_a_command_offers_the_options_that_it_takes(self):
        self.assertEqual(self.offered("tensorfs verify a -o io"), ["io-timeout="])
        self.assertEqual(self.offered("tensorfs load a -o io"), ["io-timeout=", "io="])
        self.assertEqual(self.offered("tensorfs ls a -o layout="), ["layout=hub"])

    def test_mounts_are_offered_where_a_command_takes_one(self):
        with Mount(by_id("hf_three_shards").source, at=self.mount_with_a_space()) as m:
            for command in ("umount", "umount --lazy", "status", "top", "heat", "heat -n 3", "warm", "umount x"):
                with self.subTest(command):
                    self.assertIn(shlex.quote(str(m.path)), [shlex.quote(word.replace("\\ ", " ")) for word in self.offered(
                        f"tensorfs {command} {self.tmp}")])
            self.assertIn("--lazy", self.offered("tensorfs umount --"))

    def mount_with_a_space(self):
        place = self.tmp / "a b"
        place.mkdir()
        return place

    def test_commands_and_flags_are_completed_as_before(self):
        self.assertEqual(self.offered("tensorfs verif"), ["verify"])
        self.assertEqual(self.offered("tensorfs ls --js"), ["--json"])


class OtherShells(TestCase):
    def test_fish_offers_options_and_mounts(self):
        if not shutil.which("fish"):
            self.skipTest("fish is not installed")
        script = self.tmp / "tensorfs.fish"
        script.write_text(tensorfs("completions", "fish").stdout)
        with Mount(by_id("hf_three_shards").source) as m:
            for line, offered in (("mount a b -o ro,layout=si", "ro,layout=single"), ("umount ", str(m.path))):
                words = ["fish", "--no-config", "-c", f"source {script}; complete -C 'tensorfs {line}'"]
                outcome = subprocess.run(words, capture_output=True, text=True, timeout=20)
                self.assertIn(offered, [line.split("\t")[0] for line in outcome.stdout.splitlines()])

    def test_the_script_of_zsh_offers_options_and_mounts(self):
        text = tensorfs("completions", "zsh").stdout
        for part in (
            "'*layout[]:value:(single original shards= map= hub)'", ":OPTIONS:_tensorfs_options'",
            "'*::targets -- Folders that are mounted on:_tensorfs_mounts'",
        ):
            self.assertTrue(part in text, part)
        if shutil.which("zsh"):
            outcome = subprocess.run(["zsh", "-n"], input=text, capture_output=True, text=True, timeout=20)
            self.assertEqual((outcome.returncode, outcome.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
