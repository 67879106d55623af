"""The unit files, checked by systemd itself."""

import re
import shutil
import unittest

from mounts import BIN, ROOT, TestCase, run

UNITS = sorted(path for path in (ROOT / "systemd").glob("*") if path.suffix in (".service", ".mount", ".automount"))


@unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
@unittest.skipUnless(UNITS, "no unit files")
class Units(TestCase):
    def test_systemd_accepts_every_unit_file(self):
        for unit in UNITS:
            with self.subTest(unit=unit.name):
                outcome = run("systemd-analyze", "verify", "--man=no", self.installed(unit))
                self.assert_done(outcome)
                self.assertNotIn(unit.name.partition("@")[0], outcome.stderr)

    def test_no_unit_file_says_where_the_program_is(self):
        # Packages install it in /usr/bin, and `sudo install` puts it into /usr/local/bin: systemd finds both.
        for unit in UNITS:
            with self.subTest(unit=unit.name):
                self.assertNotRegex(unit.read_text(), r"bin/tensorfs\b")

    def installed(self, unit):
        """A copy that names the binary under test, as an instance when the unit is a template."""
        name = unit.name.replace("@.", "@test.")
        path = self.tmp / name
        path.write_text(re.sub(r"(?m)^(Exec\w+=[-@:+!|]*)tensorfs ", rf"\g<1>{BIN} ", unit.read_text()))
        return path
