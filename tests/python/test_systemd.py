"""The unit files, checked by systemd itself."""

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

    def installed(self, unit):
        """A copy that names the binary under test, as an instance when the unit is a template."""
        name = unit.name.replace("@.", "@test.")
        text = unit.read_text()
        for place in ("/usr/local/bin/tensorfs", "/usr/bin/tensorfs"):
            text = text.replace(place, str(BIN))
        path = self.tmp / name
        path.write_text(text)
        return path
