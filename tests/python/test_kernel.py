"""The kernel's side of a mount: the readahead window and the size of requests, where they may be set and where not."""

import os
import pwd
import shutil
import unittest
from pathlib import Path

from manifest import by_id
from mounts import BIN, Mount, MountFailed, TestCase, needs_root, run

DEFAULT_KIB = 2048
UNASKED_KIB = 128
WARNING = "slower than it could be"

# Containers have a /sys that is read-only.
writable = unittest.skipUnless(os.access("/sys/class/bdi", os.W_OK), "/sys is read-only")

# Mounts, prints the window, and unmounts: all in a mount namespace of its own, made by what is put before it.
MOUNT = """
"$@" mount "$SOURCE" "$TARGET" -o "log=$LOG"
device=$(awk -v target="$TARGET" '$5 == target { print $3 }' /proc/self/mountinfo)
cat "/sys/class/bdi/$device/read_ahead_kb"
"$@" umount "$TARGET"
"""


def window(path):
    """The readahead window of the mount on `path` in KiB, found without a look at the mount itself."""
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    device = next(fields[2] for fields in reversed(lines) if fields[4] == str(path))
    return int(Path(f"/sys/class/bdi/{device}/read_ahead_kb").read_text())


class Kernel(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.copy(by_id("hf_three_shards").source, "model")

    @needs_root
    @writable
    def test_the_window_is_larger_than_what_fuse_has_unasked(self):
        with Mount(self.source) as m:
            self.assertEqual(window(m.path), DEFAULT_KIB)
            self.assertNotIn("readahead", m.log())

    @needs_root
    @writable
    def test_the_window_is_what_the_option_says(self):
        for option, kib in (("readahead=1M", 1024), ("readahead=16MiB", 16384), ("readahead=0", 0)):
            with self.subTest(option), Mount(self.source, option) as m:
                self.assertEqual(window(m.path), kib)
                self.assertNotIn("readahead", m.log())

    @needs_root
    @writable
    def test_the_window_is_set_before_a_mount_in_the_background_returns(self):
        with Mount(self.source, "readahead=2M", background=True) as m:
            self.assertEqual(window(m.path), 2048)

    def within(self, script, *become):
        """Mounts after `script` in a namespace of its own, and returns the window and the log."""
        binary, target, log = self.tmp / "tensorfs", self.tmp / "mnt", self.tmp / "logs" / "log"
        for folder in (target, log.parent):
            folder.mkdir()
            shutil.chown(folder, "nobody" if become else None, None if become else "root")
        shutil.copy(BIN, binary)
        env = {"SOURCE": str(self.source), "TARGET": str(target), "LOG": str(log), "FREE": str(self.tmp / "free")}
        env["PATH"] = "/usr/sbin:/usr/bin:/sbin:/bin"
        outcome = run("unshare", "-m", "sh", "-ec", script + MOUNT, "sh", *become, binary, env=env)
        self.assert_done(outcome)
        return int(outcome.stdout), log.read_text() if log.exists() else ""

    @needs_root
    def test_where_the_kernel_files_are_read_only_one_line_says_so(self):
        kib, log = self.within("mount -o remount,ro,bind /sys\n")
        self.assertEqual(kib, UNASKED_KIB)
        self.assertEqual(log.count(WARNING), 1, log)
        self.assertIn("readahead is 128 KiB, not 2 MiB", log)
        self.assertIn("Read-only file system", log)

    @needs_root
    def test_a_user_mounts_with_the_window_that_fuse_has_and_is_told_once(self):
        if not shutil.which("fusermount3") or not shutil.which("setpriv"):
            self.skipTest("fusermount3 or setpriv is not installed")
        user = pwd.getpwnam("nobody")
        become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        kib, log = self.within('mknod -m 666 "$FREE" c 10 229\nmount --bind "$FREE" /dev/fuse\n', *become)
        self.assertEqual(kib, UNASKED_KIB)
        self.assertEqual(log.count(WARNING), 1, log)
        self.assertIn("readahead is 128 KiB, not 2 MiB", log)
        self.assertIn("Permission denied", log)
        # The line is short: this user can mend nothing.
        self.assertLess(len(log.partition("WARN ")[2]), 200, log)


class Options(TestCase):
    def test_an_option_that_makes_no_sense_is_refused_with_what_it_may_be(self):
        place = self.tmp / "mnt"
        place.mkdir()
        source = by_id("hf_three_shards").source
        for option, expected in {
            "cache=1": "from 16M", "cache=lots": "from 16M", "readahead=2G": "up to 1G", "readahead=": "up to 1G",
            "io=epoll": "uring",
            "direct=maybe": "always", "io-timeout=soon": "seconds", "assemble-size=1G": "needs assemble=DIR",
            "assemble=": "a folder", "io": "needs a value", "cache=16M,cache=32M": "given twice",
        }.items():
            with self.subTest(option), self.assertRaises(MountFailed) as failed:
                self.enter(Mount(source, option, at=place))
            self.assertEqual(failed.exception.code, 2)
            self.assertIn(expected, failed.exception.stderr)
            self.assert_not_mounted(place)

    def test_the_helper_takes_the_options_of_an_fstab_line(self):
        place = self.tmp / "mnt"
        place.mkdir()
        options = "ro,cache=64M,io=pread,direct=never,io-timeout=0,readahead=1M"
        with_folder = f"{options},assemble={self.tmp / 'files'},assemble-size=1G"
        for text in (options, with_folder):
            outcome = run(BIN.with_name("mount.tensorfs"), by_id("hf_three_shards").source, place, "-f", "-o", text)
            self.assert_done(outcome)

    def test_an_error_names_the_option_that_was_meant(self):
        place = self.tmp / "mnt"
        place.mkdir()
        source = by_id("hf_three_shards").source
        for words in ([BIN, "mount"], [BIN.with_name("mount.tensorfs")], [BIN, "ls"]):
            words += [source] if words[-1] == "ls" else [source, place]
            for option, expected in (("layuot=hub", "; did you mean `layout`?"), ("dtype=f23", "; did you mean `f32`?")):
                with self.subTest(words=words, option=option):
                    outcome = run(*words, "-o", option)
                    self.assertIn(expected, outcome.stderr)
                    self.assert_one_line(outcome)

    def test_the_help_lists_the_options_in_groups(self):
        shown = run(BIN, "mount", "--help").stdout
        titles = [line.partition(": ")[2] for line in shown.splitlines() if line.startswith("Mount options: ")]
        self.assertEqual(titles[:3], ["Files", "Tensors", "Source"])
        page = (Path(__file__).resolve().parents[2] / "docs/reference/options.md").read_text()
        self.assertEqual([line[3:] for line in page.splitlines() if line.startswith("## ")], [*titles, "Values"])
        self.assertLessEqual(max(map(len, shown.partition("Mount options: ")[2].splitlines())), 80)


if __name__ == "__main__":
    unittest.main()
