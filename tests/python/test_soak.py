"""The soak run in small: see soak.py, which is run by hand for longer."""

import subprocess
import sys
from pathlib import Path

from mounts import TestCase


class Soak(TestCase):
    def soak(self, *words):
        soak = [sys.executable, str(Path(__file__).with_name("soak.py")), "--gb", "0.064", "--folder", str(self.tmp)]
        outcome = subprocess.run([*soak, *words], capture_output=True, text=True, timeout=120)
        self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)

    def test_16_threads_see_no_wrong_byte_and_a_killed_daemon_lets_them_all_go(self):
        self.soak("--seconds", "5", "--threads", "16", "--options", "cache=16M")

    def test_16_threads_see_no_wrong_byte_of_a_source_that_stalls_and_fails_and_nothing_is_leaked(self):
        words = ["--seconds", "6", "--threads", "16", "--faults", "--storm", "50"]
        self.soak(*words, "--options", "cache=16M,io-timeout=1")
