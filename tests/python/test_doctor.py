"""`tensorfs doctor`: what it finds on this machine, and on one where something is missing."""

import os
import pwd
import shutil
import unittest

from confinement import without_capability
from faults import without_cachestat
from mounts import BIN, TestCase, mount_table, needs_root, run, tensorfs

STATES = {"ok", "degraded", "missing", "unknown"}
CLOSED = "Permission denied"


def states(outcome):
    return {check["name"]: check["state"] for check in outcome.json()["checks"]}


class Doctor(TestCase):
    def setUp(self):
        super().setUp()
        self.binary = self.tmp / "tensorfs"
        shutil.copy(BIN, self.binary)
        self.binary.chmod(0o755)
        self.places = self.tmp / "places"
        self.places.mkdir(mode=0o777)
        self.places.chmod(0o777)
        self.env = {**os.environ, "TMPDIR": str(self.places)}

    def doctor(self, *words, **popen):
        return run(self.binary, "doctor", *words, env=self.env, **popen)

    def within(self, script, *words):
        """Runs the doctor after `script` in a mount namespace of its own; "$0" is a free path."""
        script = f'{script}\nexec "$@"'
        words = ["unshare", "-m", "sh", "-ec", script, self.tmp / "free", *words, self.binary, "doctor", "--json"]
        return run(*words, env=self.env)

    def assert_left_nothing(self):
        self.assertEqual(os.listdir(self.places), [])
        self.assertFalse([m for m in mount_table() if m.path.startswith(str(self.places))])

    @needs_root
    def test_a_machine_that_can_mount_is_found_well(self):
        outcome = self.doctor()
        self.assert_done(outcome)
        self.assertIn("Mounting works here.", outcome.stdout)
        self.assertNotIn("\x1b", outcome.stdout)
        outcome = self.doctor("--json")
        self.assert_done(outcome)
        answer = outcome.json()
        self.assertEqual((answer["ok"], answer["error"], answer["class"]), (True, None, None))
        self.assertEqual(states(outcome)["mount"], "ok")
        # Containers have a /sys that is read-only.
        expected = "ok" if os.access("/sys/class/bdi", os.W_OK) else "degraded"
        self.assertEqual(states(outcome)["readahead"], expected)
        self.assert_left_nothing()

    def test_each_thing_is_named_once_with_its_state_and_what_to_do(self):
        checks = self.doctor("--json").json()["checks"]
        names = [check["name"] for check in checks]
        self.assertEqual(len(names), len(set(names)))
        for check in checks:
            with self.subTest(check["name"]):
                self.assertIn(check["state"], STATES)
                self.assertTrue(check["found"])
                self.assertEqual(check["advice"] is not None, check["state"] in ("degraded", "missing"))
        for name in ("/dev/fuse", "fusermount3", "io_uring", "cachestat", "memory", "open files", "container"):
            self.assertIn(name, names)

    def test_the_lines_are_aligned(self):
        lines = self.doctor().stdout.split("\n\n")[0].splitlines()
        starts = {line.index("->") for line in lines if "->" in line[:40]}
        self.assertLessEqual(len(starts), 1)
        for line in lines:
            self.assertIn(line[:8].strip(), STATES | {""})

    @needs_root
    def test_without_the_device_nothing_can_be_mounted(self):
        outcome = self.within("mount -t tmpfs none /dev")
        self.assert_refused(outcome)
        self.assertEqual(states(outcome)["/dev/fuse"], "missing")
        self.assertEqual(states(outcome)["mount"], "missing")
        self.assertEqual((outcome.json()["ok"], outcome.json()["class"]), (False, "io"))
        self.assertIn(outcome.json()["error"], outcome.stderr)
        self.assert_left_nothing()

    @needs_root
    def test_a_device_that_is_something_else_does_not_deceive_it(self):
        outcome = self.within("mount --bind /dev/null /dev/fuse")
        self.assert_refused(outcome)
        self.assertEqual(states(outcome)["mount"], "missing")
        self.assert_left_nothing()

    def test_a_system_call_that_is_refused_is_found_by_calling_it(self):
        (check,) = [
            check for check in self.doctor("--json", preexec_fn=without_cachestat).json()["checks"]
            if check["name"] == "cachestat"
        ]
        self.assertEqual(check["state"], "missing")
        self.assertIn("refused (Operation not permitted)", check["found"])

    @needs_root
    def test_missing_leases_on_files_of_others_are_found(self):
        self.assertEqual(states(self.doctor("--json"))["leases"], "ok")
        outcome = self.doctor("--json", preexec_fn=without_capability("CAP_LEASE"))
        self.assert_done(outcome)
        (check,) = [check for check in outcome.json()["checks"] if check["name"] == "leases"]
        self.assertEqual(check["state"], "degraded")
        self.assertIn("--cap-add LEASE", check["advice"])

    @needs_root
    def test_kernel_files_that_are_read_only_are_found(self):
        outcome = self.within("mount -o remount,ro,bind /sys")
        self.assert_done(outcome)
        self.assertEqual(states(outcome)["readahead"], "degraded")
        found = {check["name"]: check["found"] for check in outcome.json()["checks"]}
        self.assertIn("128 KiB, not 2 MiB", found["readahead"])

    @needs_root
    @unittest.skipUnless(shutil.which("setpriv"), "setpriv is not installed")
    def test_a_user_is_told_what_only_root_gets(self):
        if not shutil.which("fusermount3"):
            self.skipTest("fusermount3 is not installed")
        user = pwd.getpwnam("nobody")
        become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        outcome = self.within("mknod -m 666 $0 c 10 229; mount --bind $0 /dev/fuse", *become)
        self.assert_done(outcome)
        found = states(outcome)
        self.assertEqual(found["mount"], "ok")
        self.assertIn(found["passthrough"], ("degraded", "missing"))
        self.assertEqual(found["readahead"], "degraded")
        outcome = self.within("rm $0; mknod -m 600 $0 c 10 229; mount --bind $0 /dev/fuse", *become)
        self.assert_refused(outcome)
        self.assertIn(CLOSED, outcome.json()["error"])
        self.assert_left_nothing()

    @needs_root
    def test_a_program_of_another_name_is_no_fusermount(self):
        self.env["PATH"] = str(self.tmp)
        outcome = self.doctor("--json")
        self.assert_done(outcome)
        self.assertEqual(states(outcome)["fusermount3"], "missing")

    def test_a_folder_for_the_trial_that_is_not_there_is_named(self):
        self.env["TMPDIR"] = str(self.tmp / "nowhere")
        outcome = self.doctor()
        self.assert_refused(outcome)
        self.assertIn("TMPDIR", outcome.stderr)

    def test_it_takes_no_operand(self):
        self.assertEqual(tensorfs("doctor", "more").code, 2)
        self.assertIn("Usage", tensorfs("doctor", "--help").stdout)

    @needs_root
    @unittest.skipUnless(shutil.which("script"), "script is not installed")
    def test_colour_is_for_terminals_that_want_it(self):
        def on_terminal(**env):
            command = ["script", "-qec", f"{self.binary} doctor", "/dev/null"]
            return run(*command, env={**self.env, "TERM": "xterm", "NO_COLOR": "", **env}).stdout

        self.assertIn("\x1b[32m", on_terminal())
        self.assertNotIn("\x1b", on_terminal(NO_COLOR="1"))
        self.assertNotIn("\x1b", on_terminal(TERM="dumb"))


if __name__ == "__main__":
    unittest.main()
