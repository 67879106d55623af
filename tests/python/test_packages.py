"""The files of the Debian package and of the container examples, as far as that needs no package and no cluster."""

import json
import re
import shutil
import textwrap
import unittest

from mounts import ROOT, TestCase, run, tensorfs

SCRIPTS = [*sorted((ROOT / "mount/packaging/deb/scripts").iterdir()), ROOT / "mount/packaging/deb/build"]
PAGES = sorted((ROOT / "mount/packaging").glob("*.[1-8]"))


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
        # The same pattern as in postinst, which starts the service if it finds one.
        postinst = (ROOT / "mount/packaging/deb/scripts/postinst").read_text()
        pattern = re.search(r"grep -q '([^']*)'", postinst)[1]
        config = self.tmp / "config.toml"
        for file in (ROOT / "systemd/config.toml.example", ROOT / "mount/packaging/deb/config.toml"):
            self.assertIn("0 mounts", self.checked(file))
            self.assertEqual(run("grep", "-q", pattern, file).code, 1)
            # Without the marks, its example is correct too.
            example = re.sub(r"(?m)^#(?= *\[| *[\w-]+ = )", "", file.read_text())
            config.write_text(example.replace('group = "team-a"', 'group = "root"'))
            self.assertIn('target = "/srv/models"\n', example)
            self.assertIn("correct, 1 mount\n", self.checked(config))
        config.write_text("# mounts\n [[ mount ]]\nname = 'a'\nsource = '/a'\ntarget = '/b'\n")
        self.assert_done(tensorfs("serve", "--check", "--config", config))
        self.assert_done(run("grep", "-q", pattern, config))

    def checked(self, config):
        outcome = tensorfs("serve", "--check", "--config", config)
        self.assert_done(outcome)
        return outcome.stdout

    def test_the_configuration_of_the_daemon_set_is_correct(self):
        text = (ROOT / "examples/kubernetes/tensorfs.yaml").read_text()
        config = self.tmp / "config.toml"
        config.write_text(textwrap.dedent(re.search(r"config\.toml: \|\n((?:    .*\n|\n)+)", text)[1]))
        outcome = tensorfs("serve", "--check", "--config", config)
        self.assert_done(outcome)
        self.assertIn("correct, 1 mount\n", outcome.stdout)

    def test_an_image_is_healthy_if_there_are_mounts_and_all_of_them_answer(self):
        text = (ROOT / "examples/Containerfile").read_text()
        command = json.loads(re.search(r"(?m)^HEALTHCHECK (?:.*\\\n)* *CMD (.*)$", text)[1])
        program = self.tmp / "tensorfs"
        for output, code, healthy in (
            ("no tensorfs mounts", 0, False),
            ("/srv/a b\n  state     running, pid 7", 0, True),
            ("/srv/a\n  state     its daemon does not answer", 1, False),
        ):
            program.write_text(f"#!/bin/sh\ncat <<END\n{output}\nEND\nexit {code}\n")
            program.chmod(0o755)
            outcome = run(*command, env={"PATH": f"{self.tmp}:/usr/bin:/bin"})
            self.assertEqual(outcome.code == 0, healthy, output)
        self.assertIn("no tensorfs mounts", (ROOT / "mount/src/cli/status.rs").read_text())

    def test_every_example_of_a_mount_is_below_the_folder_that_the_daemon_set_shares(self):
        text = (ROOT / "examples/kubernetes/tensorfs.yaml").read_text()
        for target in re.findall(r'target = "(.*)"', text):
            self.assertTrue(target.startswith("/srv/tensorfs/"), target)
            self.assertIn(f"mkdir -p {target}", text)

    @unittest.skipUnless(shutil.which("man"), "man is not installed")
    def test_every_written_page_is_formatted_without_a_warning(self):
        for page in PAGES:
            with self.subTest(page=page.name):
                outcome = run("man", "--warnings", "-l", page)
                self.assert_done(outcome)
                self.assertEqual(outcome.stderr, "")

    def test_the_package_has_every_written_page(self):
        build = (ROOT / "mount/packaging/deb/build").read_text()
        for page in PAGES:
            self.assertIn(f'cp mount/packaging/{page.name} "$share/man/man{page.suffix[1:]}/"', build)


class ConfigPage(TestCase):
    """tensorfs.toml(5) against the program."""

    TEXT = (ROOT / "mount/packaging/tensorfs.toml.5").read_text()

    def check(self, text):
        file = self.tmp / "config.toml"
        file.write_text(text)
        return tensorfs("serve", "--check", "--config", file)

    def known_keys(self, table):
        """The keys that the program names after an unknown one."""
        error = self.check(f"{table}\n{'z' * 40} = 1\n").stderr
        return re.findall(r"`([\w-]+)`", error.partition("; expected ")[2])

    def test_it_has_every_table_and_every_key_of_the_program(self):
        mount = "[[mount]]\nname = 'a'\nsource = '/a'\ntarget = '/b'\noptions = 'allow_other'"
        tables = {
            "[service]": "[service]",
            "[defaults]": "[defaults]",
            "[[mount]]": "[[mount]]",
            "[[mount.access]]": f"{mount}\n[[mount.access]]\npath = 'a'",
        }
        self.assertEqual(self.known_keys(""), ["service", "defaults", "mount"])
        self.assertEqual(re.findall(r"(?m)^\.SH (\[.*)$", self.TEXT), [*tables])
        for table, begin in tables.items():
            with self.subTest(table=table):
                section = self.TEXT.partition(f"\n.SH {table}\n")[2].partition("\n.SH ")[0]
                shown = [key.replace("\\-", "-") for key in re.findall(r"(?m)^\.TP\n\.B (.*)$", section)]
                # `access` has a section of its own.
                known = [key for key in self.known_keys(begin) if key != "access"]
                self.assertEqual(sorted(shown), sorted(known))
                self.assertNotEqual(known, [])

    def test_its_example_is_correct(self):
        example = self.TEXT.partition(".EX\n")[2].partition(".EE\n")[0].replace("\\-", "-")
        outcome = self.check(example)
        self.assert_done(outcome)
        self.assertIn("2 mounts", outcome.stdout)

    def test_its_limits_and_words_are_those_of_the_program(self):
        for line, accepted in {
            "watchdog = 86400": True,
            "watchdog = 86401": False,
            "metrics = '127.0.0.1:9469'": True,
            "metrics = 'unix:/run/tensorfs/metrics.sock'": True,
            "metrics = '0.0.0.0:9469'": False,
            "metrics = '0.0.0.0:9469'\nmetrics-public = true": True,
            **{f"log-format = '{word}'": True for word in ("auto", "human", "json", "journal")},
        }.items():
            with self.subTest(line=line):
                self.assertEqual(self.check(f"[service]\n{line}\n").code, 0 if accepted else 2)
