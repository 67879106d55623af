"""`tensorfs doctor`: what it finds on this machine, on one where something is missing, and in files with pickles."""

import json
import os
import pickle
import pwd
import shutil
import unittest

import numpy as np

import torch_files
from confinement import without_capability
from faults import without_cachestat
from mounts import BIN, FIXTURES, TestCase, mount_table, needs_root, run, tensorfs

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

    def test_it_takes_one_file(self):
        self.assertEqual(tensorfs("doctor", "one", "more").code, 2)
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


class Pickles(TestCase):
    """`tensorfs doctor FILE`."""

    def doctor(self, path):
        outcome = tensorfs("doctor", path, "--json")
        return outcome, json.loads(outcome.stdout)

    def test_a_file_of_torch_is_told_with_its_names_and_that_it_is_shown(self):
        outcome, found = self.doctor(FIXTURES / "torch/ckpt_lightning.ckpt")
        self.assert_done(outcome)
        self.assertEqual((found["ok"], found["form"], found["stopped"]), (True, "torch_zip", None))
        self.assertIn("torch._utils._rebuild_tensor_v2", found["names"]["safe"])
        self.assertEqual(found["names"]["hostile"], [])
        self.assertIn("`state_dict`", found["holds"])
        self.assertEqual((found["shown"]["tensors"], found["refused"]), (3, None))
        self.assertIn("of the file are not shown", found["shown"]["notes"][0])

    def test_the_lines_for_people_say_the_same(self):
        outcome = tensorfs("doctor", FIXTURES / "torch/legacy_dtypes.pth")
        self.assert_done(outcome)
        words = [line.split()[0] for line in outcome.stdout.splitlines()[1:]]
        self.assertEqual(words, ["holds", "safe", "unknown", "hostile", "shown"])
        self.assertIn("in its form before torch 1.6", outcome.stdout)

    def test_a_name_of_a_package_that_is_not_known_is_told_apart(self):
        outcome, found = self.doctor(FIXTURES / "torch/dsmodule_zero2_ws2_bf16.pt")
        self.assert_done(outcome)
        self.assertEqual(found["names"]["hostile"], [])
        outcome, found = self.doctor(FIXTURES / "bad/torch/tensor_in_unknown.pt")
        self.assert_done(outcome)
        self.assertEqual(found["names"]["unknown"], ["mypkg.Box"])
        self.assertEqual(found["shown"], None)
        self.assertIn(found["names"]["unknown"][0], found["refused"]["error"])

    def test_each_item_of_a_distributed_checkpoint_is_scanned_and_its_metadata_is_told(self):
        step = self.copy(FIXTURES / "torch/dcp_torch22", "step")
        for beside in (True, False):
            for path in sorted(step.glob("*.distcp")):
                outcome, found = self.doctor(path)
                self.assert_done(outcome)
                self.assertEqual((found["form"], found["stopped"]), ("distcp", None))
                self.assertEqual(found["pickles"], path.read_bytes().count(b"archive/data.pkl") // 2)
                self.assertEqual(found["holds"], f"{found['pickles']} items")
                self.assertEqual(found["shown"] is not None, beside)
            if beside:
                outcome, found = self.doctor(step / ".metadata")
                self.assert_done(outcome)
                self.assertEqual((found["form"], found["names"]["hostile"]), ("distcp_metadata", []))
                self.assertIn("of a distributed checkpoint of torch", tensorfs("doctor", step / ".metadata").stdout)
                (step / ".metadata").unlink()
        # A name that runs code, in the second item of a file.
        first, second = self.tmp / "first.pt", self.tmp / "second.pt"
        torch_files.save(first, torch_files.Tensor(np.ones(2, np.float32)))
        torch_files.save(second, torch_files.Object("os", "system", args=("true",)))
        (self.tmp / "__0_0.distcp").write_bytes(first.read_bytes() + second.read_bytes())
        outcome, found = self.doctor(self.tmp / "__0_0.distcp")
        self.assert_refused(outcome)
        self.assertEqual((found["pickles"], found["names"]["hostile"]), (2, ["posix.system"]))

    def test_hostile_files_fail_with_their_names(self):
        for fixture, name in [
            ("os_system.pt", "os.system"), ("builtins_eval.pt", "builtins.eval"),
            ("py2_builtin_exec.pt", "builtins.exec"), ("getattr_chain.pt", "builtins.getattr"),
            ("legacy_os_system.bin", "os.system"), ("stack_global.pt", "os.system"),
        ]:
            with self.subTest(fixture):
                outcome, found = self.doctor(FIXTURES / "bad/torch" / fixture)
                self.assert_refused(outcome)
                self.assertEqual(len(outcome.stderr.splitlines()), 1)
                self.assertEqual((found["ok"], found["class"]), (False, "header_decode"))
                named = [own for own in found["names"]["hostile"] if own == name or own.endswith("." + name.split(".")[1])]
                self.assertTrue(named, found)

    def test_a_file_that_runs_code_when_python_loads_it_is_only_read(self):
        mark = self.tmp / "mark"

        class Hostile:
            def __reduce__(self):
                return os.system, (f"touch {mark}",)

        for protocol in range(6):
            path = self.tmp / f"{protocol}.pkl"
            path.write_bytes(pickle.dumps({"weights": Hostile()}, protocol=protocol))
            outcome, found = self.doctor(path)
            self.assert_refused(outcome)
            self.assertEqual((found["form"], found["names"]["hostile"]), ("pickle", ["posix.system"]), protocol)
        self.assertFalse(mark.exists())

    def test_every_file_is_told_about_in_bounded_time(self):
        for path in sorted((FIXTURES / "bad/torch").glob("*.*")):
            if path.is_file():
                with self.subTest(path.name):
                    outcome, found = self.doctor(path)
                    self.assertIn(outcome.code, (0, 1))
                    self.assertEqual(found["ok"], outcome.code == 0)
                    self.assertLessEqual(len(outcome.stderr.splitlines()), 1)

    def test_files_without_pickles_are_told_apart(self):
        outcome, found = self.doctor(FIXTURES / "hf/gpt2_tiny/model-00001-of-00003.safetensors")
        self.assert_done(outcome)
        self.assertEqual((found["form"], found["names"]["hostile"]), (None, []))
        outcome = tensorfs("doctor", FIXTURES)
        self.assertIn("not a regular file", outcome.stderr)


if __name__ == "__main__":
    unittest.main()
