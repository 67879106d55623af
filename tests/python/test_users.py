"""Mounts by a user without rights, through fusermount3."""

import os
import pwd
import shutil
import signal
import stat
import sys
import unittest
from pathlib import Path

import checkpoints
from manifest import by_id
from mounts import BIN, Mount, MountFailed, TestCase, find_mount, needs_root, run

FILE = "model.safetensors"
USER = "nobody"
DEVICE = Path("/dev/fuse")
FUSE_CONF = Path("/etc/fuse.conf")
# It runs this module again, so that a failure before that has to end it.
NAMESPACE = """set -e
mknod -m 666 $0 c 10 229
mount --bind $0 /dev/fuse
echo user_allow_other > $0.conf
mount --bind $0.conf /etc/fuse.conf
exec $1 $2 -k WithoutRights -k test_users.Strangers"""


def device_is_for_everybody():
    return DEVICE.exists() and stat.S_IMODE(DEVICE.stat().st_mode) & 0o006 == 0o006


@needs_root
@unittest.skipUnless(device_is_for_everybody(), f"{DEVICE} is for root only; done again in a namespace below")
class UserMounts(TestCase):
    """Copies binary and checkpoint to where `nobody` can read them."""

    def setUp(self):
        super().setUp()
        if not shutil.which("fusermount3"):
            self.skipTest("fusermount3 is not installed")
        self.binary = self.tmp / "tensorfs"
        shutil.copy(BIN, self.binary)
        self.binary.chmod(0o755)
        self.source = self.copy(by_id("hf_three_shards").source, "model")
        account = pwd.getpwnam(USER)
        self.home = self.place("home")
        self.popen = {
            "user": account.pw_uid, "group": account.pw_gid, "extra_groups": [],
            "env": {**os.environ, "HOME": str(self.home)}, "cwd": "/",
        }

    def place(self, name):
        path = self.tmp / name
        path.mkdir()
        shutil.chown(path, USER)
        return path

    def mount(self, name, *options, **more):
        return Mount(self.source, *options, at=self.place(name), binary=self.binary, **self.popen, **more)

    def as_user(self, *words):
        return run(*words, **self.popen)

    def assert_right(self, m):
        outcome = self.as_user("cat", m.path / FILE)
        self.assert_done(outcome)
        copied = self.as_user("cmp", m.path / FILE, self.whole())
        self.assert_done(copied)

    def whole(self):
        path = self.tmp / "whole"
        path.write_bytes(checkpoints.hf_whole(self.source))
        path.chmod(0o644)
        return path


class WithoutRights(UserMounts):
    def test_a_user_mounts_twice_and_unmounts(self):
        with self.mount("one") as first, self.mount("two") as second:
            self.assert_right(first)
            self.assert_right(second)
        self.assert_not_mounted(first.path)
        self.assert_not_mounted(second.path)

    def test_a_user_mounts_in_the_background(self):
        with self.mount("one", background=True) as m:
            self.assert_right(m)
        self.assert_not_mounted(m.path)

    def test_only_the_user_who_mounted_gets_in(self):
        with self.mount("one") as m:
            with self.assertRaises(PermissionError):
                (m.path / FILE).stat()

    def test_files_belong_to_the_user(self):
        with self.mount("one") as m:
            outcome = self.as_user("stat", "-c", "%U %a", m.path / FILE)
        self.assertEqual(outcome.stdout.split(), [USER, "444"])

    def test_a_file_that_the_user_may_not_read_refuses_the_set(self):
        shard = sorted(self.source.glob("model-*"))[1]
        shard.chmod(0o600)
        with self.assertRaises(MountFailed) as caught, self.mount("one"):
            pass
        self.assertIn(shard.name, caught.exception.stderr)

    def test_sigterm_takes_off_a_mount_of_a_user_whose_folder_was_renamed(self):
        above = self.place("above")
        with self.mount("above/mnt") as m:
            above.rename(self.tmp / "renamed")
            self.assertIsNotNone(find_mount(self.tmp / "renamed/mnt"))
            m.kill(signal.SIGTERM)
            m.wait_for_exit(20)
            self.assertIsNone(find_mount(self.tmp / "renamed/mnt"))

    def test_sigterm_leaves_alone_what_root_has_mounted_on_top_of_a_mount_of_a_user(self):
        with self.mount("one") as m:
            self.assert_done(run("mount", "-t", "tmpfs", "other", m.path))
            try:
                m.kill(signal.SIGTERM)
                m.wait_for_exit(20)
                self.assertEqual(find_mount(m.path).type, "tmpfs")
                m.wait_for_log("cannot unmount")
            finally:
                run("umount", m.path)
            # The rest can be taken off now.
            self.assert_done(self.as_user(self.binary, "umount", m.path))

    def test_a_killed_mount_of_a_user_can_be_cleaned_up(self):
        with self.mount("one", background=True) as m:
            m.kill()
            m.wait_for_exit()
            self.assert_done(m.umount())
            self.assert_not_mounted(m.path)


def users_may_let_others_in():
    return FUSE_CONF.exists() and "user_allow_other" in FUSE_CONF.read_text().splitlines()


@unittest.skipUnless(users_may_let_others_in(), f"{FUSE_CONF} lets no user give others access; done in a namespace below")
class Strangers(UserMounts):
    """Anybody may mount a file system of our type and let others in, with any answers."""

    def shards(self, outcome):
        self.assert_done(outcome)
        return outcome.json()["sets"][0]["shards"]

    # The attribute that names the source was believed on any mount of the type.
    def test_the_source_that_a_mount_of_another_user_names_is_not_read(self):
        own = sorted(path.name for path in self.source.glob("model-*.safetensors"))
        with self.mount("one", "allow_other") as m:
            for path in (m.path, m.path / FILE):
                self.assertEqual(self.shards(run(BIN, "ls", path, "--json")), [FILE])
                self.assertEqual(self.shards(self.as_user(self.binary, "ls", path, "--json")), own)

    def test_the_source_that_a_mount_of_root_names_is_read_by_all(self):
        own = sorted(path.name for path in self.source.glob("model-*.safetensors"))
        with Mount(self.source, "allow_other") as m:
            self.assertEqual(self.shards(run(BIN, "ls", m.path, "--json")), own)
            self.assertEqual(self.shards(self.as_user(self.binary, "ls", m.path, "--json")), own)
            bound = self.place("bound")
            self.assert_done(run("mount", "--bind", m.path, bound))
            try:
                self.assertEqual(self.shards(self.as_user(self.binary, "ls", bound, "--json")), own)
            finally:
                self.assert_done(run("umount", bound))


@needs_root
@unittest.skipIf(device_is_for_everybody() and users_may_let_others_in(), "done above")
@unittest.skipUnless(FUSE_CONF.exists(), f"{FUSE_CONF} is not there: fuse3 is not installed")
class WithoutRightsInANamespace(TestCase):
    def test_a_user_mounts_where_the_device_is_for_everybody(self):
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", NAMESPACE]
        outcome = run(*words, self.tmp / "fuse", sys.executable, Path(__file__).parent, timeout=600)
        self.assert_done(outcome)


@needs_root
class AllowOther(TestCase):
    def test_allow_other_lets_other_users_in(self):
        source = self.copy(by_id("hf_three_shards").source, "model")
        for shard in source.glob("model-*"):
            shard.chmod(0o600)
        account = pwd.getpwnam(USER)
        place = self.tmp / "mnt"
        place.mkdir()
        for options, code in (([], 1), (["allow_other"], 0)):
            with Mount(source, *options, at=place) as m:
                outcome = run("cat", m.path / FILE, user=account.pw_uid, group=account.pw_gid, extra_groups=[])
                self.assertEqual(outcome.code, code, outcome.stderr)
