"""mount(8): the helper by itself, `mount -t tensorfs`, and lines of an fstab."""

import contextlib
import os
import shutil
from pathlib import Path

import checkpoints
from manifest import by_id
from mounts import BIN, HELPER, TestCase, daemon_of, detach, find_mount, needs_root, run, tensorfs, wait_until

FILE = "model.safetensors"
INSTALLED = Path("/sbin/mount.tensorfs")
# Options that /etc/fstab, systemd, SELinux and mount(8) itself put beside our own.
FOREIGN = (
    "ro,nofail,_netdev,user,noauto,x-systemd.automount,x-systemd.requires-mounts-for=/tmp,"
    "context=system_u:object_r:tmp_t:s0,comment=weights"
)


class HelperCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.place = self.tmp / "mnt"
        self.place.mkdir()
        self.addCleanup(detach, self.place)

    def helper(self, *words):
        return run(HELPER, self.source, self.place, *words)

    def assert_served_then_unmount(self):
        entry = find_mount(self.place)
        self.assertEqual((entry.type, entry.device), ("fuse.tensorfs", str(self.source)))
        self.assertTrue((self.place / FILE).read_bytes() == checkpoints.hf_whole(self.source))
        self.assert_done(run(shutil.which("umount"), self.place))
        wait_until(lambda: daemon_of(self.place) is None, 20, "the daemon ends")


class Words(TestCase):
    def test_help_and_version_are_told(self):
        for word in ("-h", "--help"):
            self.assertIn("Usage: mount.tensorfs SOURCE TARGET", run(HELPER, word).stdout)
        for word in ("-V", "--version"):
            self.assertRegex(run(HELPER, word).stdout, r"\Amount\.tensorfs \d+\.\d+\.\d+\n\Z")


@needs_root
class Helper(HelperCase):
    def test_the_helper_mounts_with_everything_that_fstab_may_hold(self):
        for options in ("rw", FOREIGN, "defaults", f"{FOREIGN},weight-map=hide,umask=022", "rw,dev,suid,exec,relatime"):
            with self.subTest(options=options):
                self.assert_done(self.helper("-o", options))
                self.assert_served_then_unmount()

    def test_every_option_of_mount_8_for_all_file_systems_is_taken(self):
        options = (
            "async,atime,auto,noauto,defaults,dev,nodev,diratime,nodiratime,dirsync,exec,group,nogroup,iversion,"
            "noiversion,mand,nomand,_netdev,nofail,relatime,norelatime,strictatime,nostrictatime,lazytime,nolazytime,"
            "suid,nosuid,silent,loud,owner,noowner,ro,rw,sync,user,nouser,users,nousers,X-mount.mkdir=0755,x-gvfs-hide,"
            "comment=a,nosymfollow"
        )
        self.assert_done(self.helper("-o", options))
        release = tuple(int(part) for part in os.uname().release.split(".")[:2])
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        flags = next(fields[5] for fields in lines if fields[4] == str(self.place))
        self.assertEqual("nosymfollow" in flags.split(","), release >= (5, 10), flags)
        self.assert_served_then_unmount()

    def test_the_helper_takes_its_flags_anywhere(self):
        for words in (["-n", "-v", "-o", "ro"], ["-nv"], ["-sn", "-o", "ro", "-o", "weight-map=hide"]):
            with self.subTest(words=words):
                self.assert_done(self.helper(*words))
                self.assert_served_then_unmount()

    def test_an_unknown_option_is_a_usage_error_unless_sloppy(self):
        self.assert_refused(self.helper("-o", "ro,nonsense=1"), 1)
        self.assert_not_mounted(self.place)
        self.assert_done(self.helper("-s", "-o", "ro,nonsense=1"))
        self.assert_served_then_unmount()

    def test_fake_validates_and_mounts_nothing(self):
        self.assert_done(self.helper("-f", "-o", FOREIGN))
        self.assert_not_mounted(self.place)
        self.assert_refused(self.helper("-f", "-o", "nonsense=1"), 1)

    def test_missing_words_are_a_usage_error(self):
        for words in ([], [self.source], ["--nonsense"]):
            self.assertEqual(run(HELPER, *words).code, 1, words)

    def test_a_broken_checkpoint_is_a_mount_failure(self):
        outcome = run(HELPER, by_id("bad_dcp_hole_middle").source, self.place)
        self.assert_refused(outcome, 32)
        self.assert_not_mounted(self.place)

    def test_a_missing_source_is_a_mount_failure(self):
        self.assert_refused(run(HELPER, self.tmp / "missing", self.place), 32)


@needs_root
class SystemMount(HelperCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if not os.path.lexists(INSTALLED):
            INSTALLED.symlink_to(HELPER)
            cls.addClassCleanup(INSTALLED.unlink)

    def setUp(self):
        super().setUp()
        if INSTALLED.resolve() != HELPER.resolve():
            self.skipTest(f"{INSTALLED} is another one")

    def test_mount_finds_the_helper_by_the_type(self):
        self.assert_done(run("mount", "-t", "tensorfs", self.source, self.place))
        self.assert_served_then_unmount()

    def test_mount_passes_options_of_all_kinds(self):
        self.assert_done(run("mount", "-t", "tensorfs", "-o", f"{FOREIGN},weight-map=hide", self.source, self.place))
        self.assert_served_then_unmount()

    def test_mount_reports_a_broken_checkpoint_with_32_and_the_reason(self):
        outcome = run("mount", "-t", "tensorfs", by_id("bad_hf_missing_shard").source, self.place)
        self.assertEqual(outcome.code, 32, outcome.stderr)
        self.assertIn("model-00002-of-00002.safetensors", outcome.stderr)
        self.assert_not_mounted(self.place)

    def test_a_sloppy_mount_takes_unknown_options(self):
        outcome = run("mount", "-t", "tensorfs", "-o", "nonsense", self.source, self.place)
        self.assertNotEqual(outcome.code, 0)
        self.assert_not_mounted(self.place)
        self.assert_done(run("mount", "-s", "-t", "tensorfs", "-o", "nonsense", self.source, self.place))
        self.assert_served_then_unmount()

    def test_a_line_of_fstab_mounts(self):
        fstab = self.tmp / "fstab"
        fstab.write_text(f"{self.source} {self.place} tensorfs {FOREIGN} 0 0\n")
        self.assert_done(run("mount", "-T", fstab, self.place))
        self.assert_served_then_unmount()

    def test_a_fake_mount_mounts_nothing(self):
        self.assert_done(run("mount", "-f", "-t", "tensorfs", self.source, self.place))
        with contextlib.suppress(AttributeError):
            self.assertNotEqual(find_mount(self.place).type, "fuse.tensorfs")


class ByItsOwnName(HelperCase):
    # mount(8) and fuse's own helper call the program with source, place and options, and no command;
    # that was a usage error.
    def test_the_program_called_as_a_helper_mounts(self):
        for words in ([self.source, self.place, "-o", "ro"], [self.source, self.place, "-o", "ro,nofail,dev,suid"]):
            with self.subTest(words=words):
                self.assert_done(run(BIN, *words))
                entry = find_mount(self.place)
                self.assertEqual((entry.type, entry.device), ("fuse.tensorfs", str(self.source)))
                self.assert_same((self.place / FILE).read_bytes(), checkpoints.hf_whole(self.source))
                self.assert_done(tensorfs("umount", self.place))
                wait_until(lambda: daemon_of(self.place) is None, 20, "the daemon ends")
