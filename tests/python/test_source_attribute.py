"""The attribute of mounted files that names their source: only that of a mount is believed, and only where it helps."""

import os
import pwd
import shutil
import unittest

import checkpoints
from checkpoints import numbered_set, shard_name
from mounts import BIN, Child, Mount, MountFailed, TestCase, needs_root, run, tensorfs

FILE = "model.safetensors"
SOURCE = "user.tensorfs.source"

# Becomes another user only once the interpreter runs, which may lie where that user may not go.
GETXATTR_AS = """
import errno, os, sys
path, name, uid, gid = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
os.setgroups([])
os.setgid(gid)
os.setuid(uid)
try:
    os.getxattr(path, name)
    print("readable")
except OSError as error:
    print(errno.errorcode[error.errno])
"""


def attributes_work(folder):
    """Whether the file system keeps attributes of users."""
    try:
        os.setxattr(folder, "user.tensorfs.test", b"1")
        os.removexattr(folder, "user.tensorfs.test")
    except OSError:
        return False
    return True


class Attributes(TestCase):
    def setUp(self):
        super().setUp()
        if not attributes_work(self.tmp):
            self.skipTest(f"no user attributes in {self.tmp}")

    def claim(self, path, other):
        """Puts on `path` what a genuine mount of `other` says of itself."""
        with Mount(other) as m:
            value = os.getxattr(m.path if path.is_dir() else m.path / FILE, SOURCE)
        os.setxattr(path, SOURCE, value)

    # An attribute that anybody can set on a folder was taken for that of a mount, and the commands
    # went to the checkpoint that it named instead of the one in front of them.
    def test_an_attribute_on_an_ordinary_folder_is_not_believed(self):
        mine, other = numbered_set(self.tmp / "mine", 1), numbered_set(self.tmp / "other", 2, total=2)
        self.claim(mine, other)
        for command in ("ls", "verify"):
            outcome = tensorfs(command, mine, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["source"], str(mine))
            tensors = outcome.json()["sets"][0]["tensors"]
            self.assertEqual(tensors if command == "verify" else len(tensors), 3)
        with Mount(mine) as m:
            self.assert_same((m.path / FILE).read_bytes(), checkpoints.hf_whole(mine))

    # With a broken folder the attribute named a whole one, so verify said that all is well. A file with such
    # an attribute is no better than a folder.
    def test_an_attribute_does_not_hide_that_a_checkpoint_is_broken(self):
        mine, other = numbered_set(self.tmp / "mine", 1), numbered_set(self.tmp / "other", 2)
        broken = mine / shard_name(2, 3)
        os.truncate(broken, broken.stat().st_size - 1)
        for path in (mine, broken):
            self.claim(path, other)
            self.assertEqual(tensorfs("verify", path).code, 1, path)
        with self.assertRaises(MountFailed), Mount(mine):
            pass

    # `cp -a` copies attributes too, and so the copy was taken for the mount that it came from:
    # verify looked at the good source, and the truncated copy passed.
    def test_a_copy_of_mounted_files_is_verified_itself(self):
        source, copy = numbered_set(self.tmp / "source", 1), self.tmp / "copy"
        with Mount(source) as m:
            self.assert_done(run("cp", "-a", m.path, copy))
            self.assertIn(SOURCE, os.listxattr(copy / FILE))
            copy.chmod(0o755)
            (copy / FILE).chmod(0o644)
            self.assert_same((copy / FILE).read_bytes(), checkpoints.hf_whole(source))
            self.assert_done(tensorfs("verify", copy))
            os.truncate(copy / FILE, (copy / FILE).stat().st_size - 1)
            for path in (copy, copy / FILE):
                self.assert_refused(tensorfs("verify", path))
        self.assert_refused(tensorfs("verify", copy))


@needs_root
class OtherUsers(TestCase):
    # The attribute told users of an allow_other mount where the source is, and the commands went there
    # and failed, although the mount would have let them read.
    def test_a_user_without_rights_to_a_shard_reads_through_the_mount(self):
        source, place = numbered_set(self.tmp / "model", 1), self.mount_point()
        (source / shard_name(2, 3)).chmod(0o600)
        account = pwd.getpwnam("nobody")
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        binary.chmod(0o755)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": "/"}
        with Mount(source, "allow_other", at=place) as m:
            self.assertTrue(os.getxattr(m.path / FILE, SOURCE))
            with Child(GETXATTR_AS, m.path / FILE, SOURCE, account.pw_uid, account.pw_gid) as child:
                self.assertEqual(child.finish(), (0, "ENODATA\n", ""))
            outcome = run(binary, "ls", m.path, "--json", **user)
            self.assert_done(outcome)
            (found,) = outcome.json()["sets"]
            self.assertEqual((found["name"], len(found["tensors"])), (FILE, 3))
            self.assertEqual(found["size"], (m.path / FILE).stat().st_size)
            # A mounted file has no checksums of its own.
            outcome = run(binary, "verify", m.path, **user)
            self.assert_refused(outcome)
            self.assertIn("name the source itself", outcome.stderr)
            self.assertEqual(run(binary, "ls", source, **user).code, 1)


if __name__ == "__main__":
    unittest.main()
