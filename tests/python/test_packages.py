"""The files of the Debian package and of the container examples, as far as that needs no package and no cluster."""

import re
import shutil
import textwrap
import unittest

from mounts import ROOT, TestCase, run, tensorfs

SCRIPTS = [*sorted((ROOT / "mount/packaging/deb/scripts").iterdir()), ROOT / "mount/packaging/deb/build"]


class Packages(TestCase):
    def test_the_scripts_are_programs_that_their_shell_understands(self):
        for script in SCRIPTS:
            with self.subTest(script=script.name):
                self.assertTrue(script.stat().st_mode & 0o100, "it may not be executed")
                shell = script.read_text().splitlines()[0].removeprefix("#!").split()
                self.assert_done(run(*shell, "-n", script))

    def test_only_a_removal_stops_anything(self):
        for words in (("upgrade", "2"), ("failed-upgrade", "1"), ("deconfigure", "in-favour", "a", "1")):
            with self.subTest(words=words):
                # No program is found, so every step but the test of the first argument would fail.
                script = ROOT / "mount/packaging/deb/scripts/prerm"
                self.assert_done(run("/bin/sh", "-eu", script, *words, env={"PATH": "/nonexistent"}))

    def test_the_configuration_of_the_package_is_correct_and_mounts_nothing(self):
        outcome = tensorfs("serve", "--check", "--config", ROOT / "systemd/config.toml.example")
        self.assert_done(outcome)
        self.assertIn("0 mounts", outcome.stdout)
        # The same pattern as in postinst, which starts the service if it finds one.
        postinst = (ROOT / "mount/packaging/deb/scripts/postinst").read_text()
        pattern = re.search(r"grep -q '([^']*)'", postinst)[1]
        self.assertEqual(run("grep", "-q", pattern, ROOT / "systemd/config.toml.example").code, 1)
        config = self.tmp / "config.toml"
        config.write_text("# mounts\n [[ mount ]]\nname = 'a'\nsource = '/a'\ntarget = '/b'\n")
        self.assert_done(tensorfs("serve", "--check", "--config", config))
        self.assert_done(run("grep", "-q", pattern, config))

    def test_the_configuration_of_the_daemon_set_is_correct(self):
        text = (ROOT / "examples/kubernetes/tensorfs.yaml").read_text()
        config = self.tmp / "config.toml"
        config.write_text(textwrap.dedent(re.search(r"config\.toml: \|\n((?:    .*\n|\n)+)", text)[1]))
        outcome = tensorfs("serve", "--check", "--config", config)
        self.assert_done(outcome)
        self.assertIn("1 mounts", outcome.stdout)

    def test_every_example_of_a_mount_is_below_the_folder_that_the_daemon_set_shares(self):
        text = (ROOT / "examples/kubernetes/tensorfs.yaml").read_text()
        for target in re.findall(r'target = "(.*)"', text):
            self.assertTrue(target.startswith("/srv/tensorfs/"), target)
            self.assertIn(f"mkdir -p {target}", text)

    @unittest.skipUnless(shutil.which("man"), "man is not installed")
    def test_the_page_of_the_helper_is_formatted_without_a_warning(self):
        outcome = run("man", "--warnings", "-l", ROOT / "mount/packaging/mount.tensorfs.8")
        self.assert_done(outcome)
        self.assertEqual(outcome.stderr, "")
