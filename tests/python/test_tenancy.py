"""Models of one mount for users and groups of their own: files, attributes, control sockets, status and log."""

import contextlib
import json
import os
import socket
import stat
from pathlib import Path

from checkpoints import hf_set
from mounts import Mount, TestCase, find_mount, is_root, needs_root, run, tensorfs
from services import ServiceCase, mount_config

FILE = "model.safetensors"
NOBODY = {"user": 65534, "group": 65534, "extra_groups": []}
TEAM = 54321
MEMBER = {"user": 65533, "group": 65533, "extra_groups": [TEAM]}
RULES = "access=team-a/**:0:54321:0750,access=team-b/**:65534:0:0700,access=secret/**::0:0700"


def runs_as_others():
    """Whether other users can run this build."""
    return is_root and tensorfs("--version", **NOBODY).code == 0


class TenancyCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "source-of-secret-name"
        for name in ("team-a", "team-b", "secret", "open"):
            hf_set(self.source / name)
        # Only root may look into the source.
        self.source.chmod(0o700)

    def may(self, *words, who):
        return run(*words, **who).code == 0


@needs_root
class Access(TenancyCase):
    def test_files_and_folders_are_for_whom_the_rules_name(self):
        with Mount(self.source, f"allow_other,{RULES}") as m:
            for who, allowed in ((NOBODY, {"team-b", "open"}), (MEMBER, {"team-a", "open"})):
                for name in ("team-a", "team-b", "secret", "open"):
                    with self.subTest(name, user=who["user"]):
                        self.assertEqual(self.may("ls", m.path / name, who=who), name in allowed)
                        self.assertEqual(self.may("cat", m.path / name / FILE, who=who), name in allowed)
                        self.assertEqual(self.may("stat", m.path / name / FILE, who=who), name in allowed)
            found = os.stat(m.path / "team-a")
            self.assertEqual((found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)), (0, TEAM, 0o750))
            found = os.stat(m.path / "team-a" / FILE)
            self.assertEqual((found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)), (0, TEAM, 0o440))
            found = os.stat(m.path / "open" / FILE)
            self.assertEqual((found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)), (0, 0, 0o444))

    def test_nobody_is_let_in_without_allow_other(self):
        with Mount(self.source) as m:
            self.assertFalse(self.may("ls", m.path, who=NOBODY))
            self.assertFalse(self.may("cat", m.path / "open" / FILE, who=NOBODY))

    def test_the_source_attribute_is_for_whom_the_source_lets_in(self):
        read = "import os, sys; print(os.listxattr(sys.argv[1])); print(os.getxattr(sys.argv[1], 'user.tensorfs.source'))"
        with Mount(self.source, f"allow_other,{RULES}") as m:
            for path in (m.path / "open" / FILE, m.path / "open", m.path / "team-a" / FILE):
                script = ["/usr/bin/python3", "-c", read, path]
                for who in (NOBODY, MEMBER):
                    outcome = run(*script, **who)
                    self.assertNotEqual(outcome.code, 0)
                    self.assertNotIn("secret-name", outcome.stdout + outcome.stderr)
                    self.assertNotIn("user.tensorfs.source", outcome.stdout)
                self.assertIn("secret-name", run(*script).stdout)
            # A closed model does not even tell its version.
            outcome = run("/usr/bin/python3", "-c", "import os, sys; os.listxattr(sys.argv[1])", m.path / "secret", **NOBODY)
            version = run(
                "/usr/bin/python3", "-c", "import os, sys; os.getxattr(sys.argv[1], 'user.tensorfs.version')",
                m.path / "secret" / FILE, **NOBODY,
            )
            self.assertNotEqual(version.code, 0, outcome)

    def test_rules_without_allow_other_and_bad_rules_are_refused_in_one_line(self):
        for options, part in (
            ("access=a:::0700", "needs allow_other"),
            ("allow_other,access=a", "GLOB:OWNER:GROUP:MODE"),
            ("allow_other,access=a:no-such-user-here::", "a user that exists"),
        ):
            outcome = tensorfs("mount", self.source, self.tmp, "-o", options)
            self.assertEqual((outcome.code, len(outcome.stderr.splitlines())), (2, 1), outcome.stderr)
            self.assertIn(part, outcome.stderr)


@needs_root
class Control(TenancyCase):
    def ask(self, m, question, who):
        """The answer of the control socket, as another user gets it."""
        script = (
            "import json, socket, sys\n"
            "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(sys.argv[1])\n"
            "s.sendall((json.dumps({'do': sys.argv[2]}) + chr(10)).encode())\n"
            "print(s.makefile().readline())"
        )
        (path,) = Path("/run/tensorfs").glob(f"*-{m.pid}.sock")
        return run("/usr/bin/python3", "-c", script, path, question, **who)

    def test_others_hear_the_names_of_the_models_that_they_may_list_and_nothing_else(self):
        with Mount(self.source, f"allow_other,{RULES}") as m:
            for who, models in ((NOBODY, ["open", "team-b"]), (MEMBER, ["open", "team-a"])):
                outcome = self.ask(m, "status", who)
                answer = json.loads(outcome.stdout)
                self.assertEqual(sorted(answer["models"]), models)
                self.assertEqual(set(answer), {"models"})
                self.assertNotIn("secret", outcome.stdout)
                heat = self.ask(m, "heat", who)
                self.assertEqual(set(json.loads(heat.stdout)), {"error"})
            self.assertIn("source", json.loads(self.ask(m, "status", {}).stdout))

    def test_a_mount_that_is_not_for_others_does_not_answer_them(self):
        with Mount(self.source, f"allow_other,{RULES}"), Mount(self.source) as closed:
            self.assertIn("PermissionError", self.ask(closed, "status", NOBODY).stderr)

    def test_others_who_are_silent_keep_the_owner_out_of_nothing(self):
        with Mount(self.source, "allow_other") as m:
            (path,) = Path("/run/tensorfs").glob(f"*-{m.pid}.sock")
            with contextlib.ExitStack() as stack:
                os.seteuid(65534)
                try:
                    for _ in range(50):
                        s = stack.enter_context(socket.socket(socket.AF_UNIX))
                        s.connect(str(path))
                finally:
                    os.seteuid(0)
                for _ in range(3):
                    (one,) = tensorfs("status", "--json", m.path).json()
                    self.assertEqual(one["state"], "running")

    def test_status_of_others_has_no_source(self):
        if not runs_as_others():
            self.skipTest("other users cannot run this build")
        with Mount(self.source, f"allow_other,fsname=models,{RULES}") as m:
            outcome = tensorfs("status", "--json", m.path, **NOBODY)
            (one,) = outcome.json()
            self.assertEqual((one["state"], one["source"]), ("not-yours", None))
            self.assertEqual(sorted(one["models"]), ["open", "team-b"])
            text = tensorfs("status", m.path, **NOBODY).stdout
            self.assertNotIn("secret", text)
            self.assertIn("open", text)
            outcome = tensorfs("heat", m.path, **NOBODY)
            self.assertEqual((outcome.code, len(outcome.stderr.splitlines())), (1, 1))
            self.assertIn("only the owner", outcome.stderr)


@needs_root
class Node(ServiceCase, TenancyCase):
    def test_a_config_gives_models_to_teams_and_hides_the_source(self):
        target = self.target("models")
        rules = "".join(
            f'[[mount.access]]\npath = "{path}"\n{line}\n'
            for path, line in (
                ("team-a/**", f'group = "{TEAM}"\nmode = "0750"'),
                ("team-b/**", 'owner = "65534"\nmode = "0700"'),
                ("secret/**", 'mode = "0700"'),
            )
        )
        service = self.serve(mount_config("models", self.source, target, options="allow_other", rest=rules))
        service.wait_until_ready()
        self.assertTrue(self.may("cat", target / "team-a" / FILE, who=MEMBER))
        self.assertFalse(self.may("cat", target / "team-a" / FILE, who=NOBODY))
        self.assertTrue(self.may("cat", target / "team-b" / FILE, who=NOBODY))
        self.assertFalse(self.may("ls", target / "secret", who=MEMBER))
        self.assertEqual(find_mount(target).device, "models")
        self.assertNotIn("secret-name", Path("/proc/mounts").read_text())

    def test_bad_rules_are_refused_with_file_line_and_key(self):
        for rule, part in (
            ('path = "a"\nmode = "0999"', "octal"),
            ('path = "a"\nmod = "0700"', "did you mean `mode`?"),
            ('mode = "0700"', "mount.access.path: the key is missing"),
        ):
            config = mount_config("a", self.source, self.tmp, options="allow_other", rest=f"[[mount.access]]\n{rule}\n")
            file = self.tmp / "config.toml"
            file.write_text(config)
            outcome = tensorfs("serve", "--check", "--config", file)
            self.assertEqual((outcome.code, len(outcome.stderr.splitlines())), (2, 1), outcome.stderr)
            self.assertRegex(outcome.stderr, rf"config\.toml:\d+: .*{part.replace('?', '.')}")
