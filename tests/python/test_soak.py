"""The soak run in small: see soak.py, which is run by hand for longer."""

import subprocess
import sys
from pathlib import Path

from mounts import TestCase


class Soak(TestCase):
    def test_16_threads_see_no_wrong_byte_and_a_killed_daemon_lets_them_all_go(self):
        words = ["--seconds", "5", "--threads", "16", "--gb", "0.064", "--folder", str(self.tmp)]
        outcome = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("soak.py")), *words],
            capture_output=True, text=True, timeout=90,
        )
        self.assertEqual(outcome.returncode, 0, outcome.stdout + outcome.stderr)
