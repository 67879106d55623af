"""The files for systemd, checked by systemd itself."""

import re
import shutil
import unittest

from mounts import BIN, ROOT, TestCase, run

UNITS = sorted(path for path in (ROOT / "systemd").glob("*") if path.suffix in (".service", ".mount", ".automount"))

# In tenths: 4.5 of 10, where 10 is no protection at all.
EXPOSURE_MAX = 45

# Settings that give a service a mount namespace of its own, in which nobody else sees its mounts.
NAMESPACES = r"(?m)^(Private(Tmp|Devices|Mounts|Users|IPC)|Protect(System|Home|Kernel\w+|ControlGroups|Proc)|ProcSubset|Root\w+|BindPaths|\w+Paths|TemporaryFileSystem|DynamicUser|MountAPIVFS)="


@unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
@unittest.skipUnless(UNITS, "no unit files")
class Units(TestCase):
    def test_systemd_accepts_every_unit_file(self):
        for unit in UNITS:
            with self.subTest(unit=unit.name):
                # All of them: an automount unit needs its mount.
                [*_, installed] = [self.installed(other) for other in [*UNITS, unit]]
                outcome = run("systemd-analyze", "verify", "--man=no", installed)
                self.assert_done(outcome)
                self.assertNotIn(unit.name.partition("@")[0], outcome.stderr)

    def test_no_unit_file_says_where_the_program_is(self):
        # Packages install it in /usr/bin, and `sudo install` puts it into /usr/local/bin: systemd finds both.
        for unit in UNITS:
            with self.subTest(unit=unit.name):
                self.assertNotRegex(unit.read_text(), r"bin/tensorfs\b")

    def test_services_are_hardened_and_their_mounts_visible(self):
        for unit in UNITS:
            if unit.suffix == ".service":
                with self.subTest(unit=unit.name):
                    self.assertEqual(re.findall(NAMESPACES, unit.read_text()), [])
                    limit = f"--threshold={EXPOSURE_MAX}"
                    outcome = run("systemd-analyze", "security", "--offline=yes", limit, self.installed(unit))
                    self.assert_done(outcome)

    def installed(self, unit):
        """A copy that names the binary under test, as an instance when the unit is a template."""
        name = unit.name.replace("@.", "@test.")
        path = self.tmp / name
        path.write_text(re.sub(r"(?m)^(Exec\w+=[-@:+!|]*)tensorfs ", rf"\g<1>{BIN} ", unit.read_text()))
        return path


class Folders(TestCase):
    """The user, group and folders that a package makes."""

    def make(self, program, *args):
        if not shutil.which(program):
            self.skipTest(f"{program} is not installed")
        return run(program, *args)

    def test_systemd_makes_the_group_and_the_folders(self):
        (self.tmp / "etc").mkdir()
        for name in ("passwd", "group", "shadow", "gshadow"):
            (self.tmp / "etc" / name).write_text("root:x:0:0::/:/bin/sh\n" if name == "passwd" else "")
        group = self.make("systemd-sysusers", f"--root={self.tmp}", ROOT / "systemd/tensorfs.sysusers")
        self.assert_done(group)
        self.assertIn("tensorfs:", (self.tmp / "etc/group").read_text())
        (self.tmp / "etc/group").write_text("root:x:0:\n")
        folders = self.make("systemd-tmpfiles", "--create", f"--root={self.tmp}", ROOT / "systemd/tensorfs.tmpfiles")
        self.assert_done(folders)
        for folder in ("run/tensorfs", "var/cache/tensorfs"):
            self.assertEqual((self.tmp / folder).stat().st_mode & 0o777, 0o700)
