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

    def test_a_restart_does_not_wait_for_a_worker_that_waits_for_its_source(self):
        # With other settings systemd kills all processes of the service before it starts it again, and waits for them.
        self.assertIn("\nKillMode=process\n", (ROOT / "systemd/tensorfs.service").read_text())

    def installed(self, unit):
        """A copy that names the binary under test, as an instance when the unit is a template."""
        name = unit.name.replace("@.", "@test.")
        path = self.tmp / name
        path.write_text(re.sub(r"(?m)^(Exec\w+=[-@:+!|]*)tensorfs ", rf"\g<1>{BIN} ", unit.read_text()))
        return path


class Generator(TestCase):
    """The order that the generator gives to services, from the paths in their configs."""

    def generate(self, **configs):
        """Runs it as systemd does, but for the folder of the configs. Returns its outcome, and what it made."""
        folder, units = self.tmp / "etc", self.tmp / "units"
        folder.mkdir(exist_ok=True)
        units.mkdir(exist_ok=True)
        for name, text in configs.items():
            (folder / name.replace("_", ".")).write_text(text)
        program = self.tmp / "tensorfs-generator"
        if not program.exists():
            program.symlink_to(BIN)
        outcome = run(program, units, self.tmp / "early", self.tmp / "late", folder)
        made = {str(path.relative_to(units)): path.read_text() for path in units.rglob("*.conf")}
        return outcome, {name: re.findall(r"(?m)^After=(.*)$", text) for name, text in made.items()}

    def test_services_start_after_the_file_systems_of_their_sources_and_targets(self):
        config = '[[mount]]\nname = "a"\nsource = "/data/models"\ntarget = "/srv/a"\n'
        outcome, made = self.generate(config_toml=config, llama_conf="SOURCE=/nfs/llama\nTARGET='/srv/b c/d'\n")
        self.assert_done(outcome)
        service = "tensorfs.service.d/50-tensorfs-order.conf"
        instance = "tensorfs@llama.service.d/50-tensorfs-order.conf"
        self.assertEqual(made[service], ["data-models.mount", "data.mount", "srv.mount"])
        self.assertEqual(made[instance], ["nfs-llama.mount", "nfs.mount", r"srv-b\x20c.mount", "srv.mount"])
        self.assertEqual(len(made), 2)

    def test_without_configs_it_makes_nothing(self):
        outcome, made = self.generate(config_toml="", other_toml="[[mount]]\nsource = '/data'\n")
        self.assert_done(outcome)
        self.assertEqual(made, {})
        (self.tmp / "etc/config.toml").unlink()
        (self.tmp / "etc/other.toml").unlink()
        (self.tmp / "etc").rmdir()
        self.assert_done(run(self.tmp / "tensorfs-generator", self.tmp / "units", "early", "late", self.tmp / "etc"))

    def test_a_config_that_cannot_be_read_fails_with_its_name_and_the_others_count(self):
        outcome, made = self.generate(config_toml="[[mount]\n", llama_conf="SOURCE=/nfs/llama\n")
        self.assertEqual(outcome.code, 1)
        self.assertIn(f"tensorfs-generator: {self.tmp}/etc/config.toml: not TOML: ", outcome.stderr)
        self.assertEqual([*made], ["tensorfs@llama.service.d/50-tensorfs-order.conf"])

    @unittest.skipUnless(shutil.which("systemd-escape"), "systemd-escape is not installed")
    def test_names_of_units_are_those_of_systemd(self):
        for path in ("/data/model-7", "/.a/.b", "//x//y/", "/50% \u00fc", "/a:b_c.d", "/~/@"):
            with self.subTest(path=path):
                outcome, made = self.generate(config_toml=f"[[mount]]\nsource = '{path}'\n")
                self.assert_done(outcome)
                [order] = made.values()
                expected = run("systemd-escape", "--path", "--suffix=mount", path).stdout.strip()
                self.assertIn(expected, order)

    @unittest.skipUnless(shutil.which("systemd-analyze"), "systemd-analyze is not installed")
    def test_systemd_accepts_what_it_makes(self):
        self.generate(config_toml="[[mount]]\nsource = '/data/a b/50%-\u00fc'\ntarget = '/srv/a'\n")
        text = (ROOT / "systemd/tensorfs.service").read_text()
        unit = self.tmp / "units/tensorfs.service"
        unit.write_text(re.sub(r"(?m)^(Exec\w+=-?)tensorfs ", rf"\g<1>{BIN} ", text))
        outcome = run("systemd-analyze", "verify", "--man=no", unit)
        self.assert_done(outcome)
        self.assertNotIn("tensorfs", outcome.stderr)


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
