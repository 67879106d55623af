"""A mounted tree as programs see it: read-only, exact, stable, and only what lies inside the source."""

import contextlib
import errno
import json
import os
import re
import stat
import time

import checkpoints
import oracle
from manifest import by_id
from mounts import (
    BIN, Mount, MountFailed, TestCase, find_mount, is_regular, needs_root, run, tensorfs, visible_files, wait_until,
)

FILE = "model.safetensors"
MAP = "model.safetensors.index.json"


class Semantics(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.copy(by_id("hf_gpt2_tiny").source, "model")
        self.shards = sorted(self.source.glob("model-*.safetensors"))

    def mounted(self, *options):
        return self.enter(Mount(self.source, *options))

    def assert_errno(self, number, call, *args):
        with self.assertRaises(OSError) as caught:
            call(*args)
        self.assertEqual(caught.exception.errno, number, caught.exception)


class ReadOnly(Semantics):
    def test_nothing_can_be_written(self):
        path = self.mounted().path
        calls = [
            (os.open, path / "new", os.O_CREAT | os.O_WRONLY),
            (os.open, path / FILE, os.O_WRONLY),
            (os.open, path / "config.json", os.O_RDWR),
            (os.unlink, path / FILE),
            (os.rename, path / FILE, path / "other"),
            (os.mkdir, path / "folder"),
            (os.rmdir, path / "missing"),
            (os.truncate, path / FILE, 0),
            (os.symlink, "x", path / "link"),
            (os.chmod, path / FILE, 0o600),
            (os.utime, path / FILE, (0, 0)),
        ]
        for call, *args in calls:
            with self.subTest(call=call.__name__):
                self.assert_errno(errno.EROFS, call, *args)

    def test_missing_names_are_not_found(self):
        path = self.mounted().path
        self.assert_errno(errno.ENOENT, os.stat, path / "missing")
        self.assert_errno(errno.ENOENT, os.stat, path / self.shards[0].name)
        self.assert_errno(errno.ENAMETOOLONG, os.stat, path / ("x" * 5000))
        self.assert_errno(errno.ENOTDIR, os.stat, path / FILE / "below")

    def test_modes_are_read_only(self):
        path = self.mounted().path
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o755)
        for name in (FILE, MAP, "config.json"):
            self.assertTrue(is_regular(path / name))
            self.assertEqual(stat.S_IMODE((path / name).stat().st_mode), 0o444, name)

    def test_umask_narrows_the_modes(self):
        path = self.mounted("umask=077").path
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o700)
        self.assertEqual(stat.S_IMODE((path / FILE).stat().st_mode), 0o400)

    def test_files_belong_to_the_user_who_mounts(self):
        found = (self.mounted().path / FILE).stat()
        self.assertEqual((found.st_uid, found.st_gid), (os.geteuid(), os.getegid()))

    @needs_root
    def test_uid_and_gid_say_to_whom_files_belong(self):
        path = self.mounted("uid=12345,gid=23456").path
        for name in (FILE, "config.json", "."):
            found = (path / name).stat()
            self.assertEqual((found.st_uid, found.st_gid), (12345, 23456), name)

    def test_statfs_answers(self):
        found = os.statvfs(self.mounted().path)
        self.assertGreater(found.f_bsize, 0)
        self.assertGreaterEqual(found.f_namemax, 255)
        self.assertTrue(found.f_flag & os.ST_RDONLY)


class Attributes(Semantics):
    def test_sizes_are_exact(self):
        path = self.mounted().path
        self.assertEqual((path / FILE).stat().st_size, len(checkpoints.hf_whole(self.source)))
        for name in visible_files(path):
            self.assertEqual((path / name).stat().st_size, len((path / name).read_bytes()), name)

    def test_inode_numbers_are_unique_and_stable_over_remounts(self):
        found = []
        for _ in range(2):
            with Mount(self.source) as m:
                names = [".", *visible_files(m.path)]
                found.append({name: os.stat(m.path / name).st_ino for name in names})
                listed = {entry.name: entry.inode() for entry in os.scandir(m.path)}
                self.assertEqual(listed, {n: i for n, i in found[-1].items() if n in listed})
        self.assertEqual(found[0], found[1])
        self.assertEqual(len(set(found[0].values())), len(found[0]))

    def test_mtime_is_that_of_the_newest_shard(self):
        for number, shard in enumerate(self.shards):
            os.utime(shard, ns=(0, 1_500_000_000_123_456_789 + (number % 2) * 10**9))
        found = (self.mounted().path / FILE).stat().st_mtime_ns
        self.assertEqual(found, 1_500_000_001_123_456_789)

    def test_the_mtime_of_the_folder_changes_when_a_shard_does(self):
        before = self.folder_mtime()
        self.assertEqual(self.folder_mtime(), before, "nothing changed")
        with open(self.shards[1], "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        os.utime(self.shards[1], ns=(0, time.time_ns() + 10**9))
        self.assertNotEqual(self.folder_mtime(), before)

    def folder_mtime(self):
        with Mount(self.source) as m:
            return m.path.stat().st_mtime_ns

    def test_the_mount_table_shows_the_type_and_the_source(self):
        entry = find_mount(self.mounted().path)
        self.assertEqual((entry.type, entry.device), ("fuse.tensorfs", str(self.source)))
        self.assertIn("ro", entry.options.split(","))

    def test_fsname_says_what_the_mount_table_shows(self):
        entry = find_mount(self.mounted(r"fsname=a name\, with a comma").path)
        self.assertEqual((entry.type, entry.device), ("fuse.tensorfs", "a name, with a comma"))

    def test_a_source_with_odd_characters_is_shown_as_it_is(self):
        odd = self.source.rename(self.tmp / "a b,c\\d\n\u00e9")
        with Mount(odd) as m:
            self.assertEqual(find_mount(m.path).device, str(odd))
            self.assertTrue((m.path / FILE).exists())

    def test_the_source_is_an_attribute_of_the_virtual_file(self):
        path = self.mounted().path / FILE
        self.assertEqual(json.loads(os.getxattr(path, "user.tensorfs.source"))["source"], str(self.source))
        self.assertLessEqual({"user.tensorfs.source", "user.tensorfs.version"}, set(os.listxattr(path)))
        self.assert_errno(errno.ENODATA, os.getxattr, path, "user.other")

    def test_the_version_attribute_follows_the_content(self):
        before = self.version()
        self.assertTrue(before)
        self.assertEqual(self.version(), before)
        with open(self.shards[0], "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        self.assertNotEqual(self.version(), before)

    def version(self):
        with Mount(self.source) as m:
            return os.getxattr(m.path / FILE, "user.tensorfs.version")


class Views(Semantics):
    def test_index_hide_hides_the_weight_map(self):
        path = self.mounted("weight-map=hide").path
        self.assertFalse((path / MAP).exists())
        self.assertTrue((path / FILE).exists())

    def test_the_original_layout_shows_shards_and_map_byte_for_byte(self):
        path = self.mounted("layout=original").path
        self.assertEqual(visible_files(path), visible_files(self.source))
        for name in visible_files(self.source):
            self.assertEqual((path / name).read_bytes(), (self.source / name).read_bytes(), name)

    def test_prefer_chooses_between_a_whole_file_and_an_index(self):
        source = by_id("hf_single_and_index_single").source
        single = (source / FILE).read_bytes()
        merged = checkpoints.hf_whole(source)
        for options, expected in (([], single), (["prefer=file"], single), (["prefer=shards"], merged)):
            with Mount(source, *options) as m:
                self.assertEqual(oracle.tensor_bytes(m.path / FILE), tensors_of(expected), options)

    def test_commands_find_the_source_behind_a_mount(self):
        m = self.mounted()
        outcome = tensorfs("ls", m.path, "--json")
        self.assert_done(outcome)
        found = outcome.json()["sets"][0]
        self.assertEqual(found["name"], FILE)
        self.assertEqual(found["size"], (m.path / FILE).stat().st_size)


def tensors_of(data):
    header = oracle.read_header(data)
    return {
        name: (entry["dtype"], entry["shape"], data[header.data_start :][slice(*entry["data_offsets"])])
        for name, entry in header.tensors.items()
    }


class Links(Semantics):
    def test_links_inside_the_source_become_regular_files(self):
        (self.source / "sub").mkdir()
        (self.source / "sub/link.json").symlink_to("../config.json")
        (self.source / "absolute.json").symlink_to(self.source / "config.json")
        path = self.mounted().path
        for name in ("sub/link.json", "absolute.json"):
            self.assertTrue(is_regular(path / name), name)
            self.assertEqual((path / name).read_bytes(), (self.source / "config.json").read_bytes())

    def test_links_to_shards_inside_the_source_are_followed(self):
        store = self.source / "store"
        store.mkdir()
        for shard in self.shards:
            shard.rename(store / f"{shard.name}.blob")
            shard.symlink_to(store / f"{shard.name}.blob")
        expected = checkpoints.hf_whole(self.source)
        self.assertTrue((self.mounted().path / FILE).read_bytes() == expected)

    def test_links_out_of_the_source_are_not_shown(self):
        (self.tmp / "secret").write_text("secret")
        (self.source / "passwd").symlink_to("/etc/passwd")
        (self.source / "secret").symlink_to("../secret")
        (self.source / "etc").symlink_to("/etc")
        (self.source / "dangling").symlink_to("nowhere")
        path = self.mounted().path
        for name in ("passwd", "secret", "etc", "dangling"):
            self.assertNotIn(name, os.listdir(path))
            self.assertFalse(os.path.lexists(path / name), name)

    def test_follow_lets_links_into_a_folder(self):
        for name in ("outside", "elsewhere"):
            (self.tmp / name).mkdir()
            (self.tmp / name / "file").write_text(name)
            (self.source / name).symlink_to(self.tmp / name / "file")
        path = self.mounted(f"follow={self.tmp / 'outside'}").path
        self.assertEqual((path / "outside").read_text(), "outside")
        self.assertFalse(os.path.lexists(path / "elsewhere"))

    def test_cycles_of_links_are_not_followed(self):
        (self.source / "loop").symlink_to("loop")
        (self.source / "self").symlink_to(".")
        (self.source / "sub").mkdir()
        (self.source / "sub/up").symlink_to("..")
        path = self.mounted().path
        names = visible_files(path)
        self.assertLess(len(names), 40, names[:60])
        self.assertFalse(os.path.lexists(path / "loop"))
        self.assertFalse((path / "sub/up/sub/up/sub").exists())

    def test_fifos_sockets_and_devices_are_not_shown(self):
        os.mkfifo(self.source / "fifo")
        os.mkfifo(self.source / "fifo.safetensors")
        with contextlib.suppress(PermissionError):
            os.mknod(self.source / "device", 0o600 | stat.S_IFCHR, os.makedev(1, 5))
        names = os.listdir(self.mounted().path)
        for name in ("fifo", "fifo.safetensors", "device"):
            self.assertNotIn(name, names)

    def test_a_shard_that_is_a_link_out_of_the_source_refuses_the_set(self):
        self.shards[0].rename(self.tmp / "outside.safetensors")
        self.shards[0].symlink_to("../outside.safetensors")
        with self.assertRaises(MountFailed) as caught, Mount(self.source):
            pass
        self.assertIn(self.shards[0].name, caught.exception.stderr)
        with Mount(self.source, f"follow={self.tmp}") as m:
            self.assertTrue((m.path / FILE).exists())


class Refusals(Semantics):
    def refused(self, source, path, *more):
        outcome = run(BIN, "mount", source, path, *more)
        self.assert_refused(outcome)
        return outcome

    def test_a_mount_inside_its_own_source_is_refused(self):
        inside = self.source / "mnt"
        inside.mkdir()
        self.refused(self.source, inside)
        self.assert_not_mounted(inside)

    def test_a_source_that_lies_on_its_own_mount_is_refused(self):
        for path in (self.source, self.tmp):
            self.refused(self.source, path)
            self.assert_not_mounted(path)

    def test_a_second_mount_on_the_same_place_is_refused(self):
        m = self.mounted()
        self.refused(self.source, m.path)
        self.refused(by_id("hf_adapter").source, m.path)
        self.assertTrue((m.path / FILE).exists())
        self.assertTrue(m.alive())

    def test_a_source_or_a_place_that_is_not_there_is_refused(self):
        (self.tmp / "mnt").mkdir()
        self.assertIn("missing", self.refused(self.tmp / "missing", self.tmp / "mnt").stderr)
        self.assertIn("nowhere", self.refused(self.source, self.tmp / "nowhere").stderr)
        self.refused(self.source, self.source / "config.json")

    def test_unknown_options_and_values_are_refused(self):
        (self.tmp / "mnt").mkdir()
        for option in ("nonsense", "layout=sideways", "umask=9", "uid=nobody-of-that-name", "expect-shards=many"):
            outcome = run(BIN, "mount", self.source, self.tmp / "mnt", "-o", option)
            with self.subTest(option=option):
                self.assertIn(outcome.code, (1, 2))
                self.assertIn(option.partition("=")[0], outcome.stderr)
                self.assert_not_mounted(self.tmp / "mnt")

    def test_usage_errors_exit_with_2(self):
        for words in ([], ["nonsense"], ["mount"], ["mount", self.source], ["ls"], ["ls", self.source, "--nonsense"]):
            self.assertEqual(tensorfs(*words).code, 2, words)

    def test_every_command_has_help(self):
        for command in ("mount", "umount", "ls", "inspect", "verify", "demo", "completions", "man"):
            outcome = tensorfs(command, "--help")
            self.assert_done(outcome)
            self.assertIn("Usage", outcome.stdout)

    def test_the_help_of_a_command_names_the_options_that_it_takes(self):
        source = {"prefer", "zero", "state", "cache-dir", "cache-dir-size", "follow", "expect-shards", "reference", "key-file", "passphrase-file", "key-command", "index-dir", "io-timeout", "credentials-file", "profile", "endpoint", "region", "ca-file"}
        view = {"include", "exclude", "tp", "rank", "tp-rules", "rename", "dtype", "keep"}
        reads, files = {"io", "direct"}, {"layout", "format", "weight-map", "config", "views"}
        expected = {
            "ls": source | view | {"format", "layout=hub", "views"}, "inspect": source | view | {"format", "layout=hub", "views"},
            "load": source | view | reads, "diff": source | view | reads, "warm": source | view | {"format", "layout"},
            "report": source | view | {"format", "layout"}, "convert": source | view | reads | {"layout"},
            "consolidate": source | view | reads | files, "index": source | {"format"}, "verify": source,
        }
        for command, names in expected.items():
            text = " ".join(tensorfs(command, "--help").stdout.split())
            listed = re.search(r"Options as for mount: ((?:[a-z-]+=(?:hub)?(?:, )?)+)", text)[1]
            with self.subTest(command):
                self.assertEqual({name.removesuffix("=") for name in listed.split(", ")}, names)

    # They had no effect.
    def test_a_command_refuses_the_options_of_mounts_that_it_does_not_take(self):
        options = (
            "layout=shards=1", "layout=hub", "format=bintensors", "weight-map=hide", "include=*", "dtype=f32",
            "io-timeout=5", "direct=never", "verify=read", "cache=1G", "uid=0", "watch=off", "allow_other",
            f"assemble={self.tmp}", "log=x", "ro", "nofail", "noexec", "x-systemd.automount", "context=a", "index-dir=none",
        )
        own = {"index-dir=none", "io-timeout=5"}
        view, reads, layout = {"include=*", "dtype=f32"}, {"direct=never"}, {"layout=shards=1"}
        listed = own | view | {"format=bintensors", "layout=hub"}
        out = self.tmp / "out"
        commands = (
            (("ls", self.source), listed), (("inspect", self.source), listed), (("load", self.source), own | view | reads),
            (("diff", self.source, self.source), own | view | reads), (("warm", self.source), own | view),
            (("report", self.source, "--html", out / "page.html"), own | view | layout | {"format=bintensors"}),
            (("convert", self.source, out / "x.tensors"), own | view | reads | layout),
            (("consolidate", self.source, out / "folder"), own | set(options[:8])),
            (("index", self.source), own | {"format=bintensors"}), (("verify", self.source), own),
        )
        for words, taken in commands:
            self.assertLessEqual(taken, set(options))
            for option in options:
                if option in taken:
                    continue
                with self.subTest(words[0], option=option):
                    outcome = tensorfs(*words, "-o", option)
                    self.assert_refused(outcome, 2)
                    self.assert_one_line(outcome)
                    self.assertIn(f"option {option}: ", outcome.stderr)
                    self.assertIn("leave it out", outcome.stderr)
        # The options of a mount are not those of the user.
        with Mount(self.source, "layout=shards=2,weight-map=hide,io-timeout=30,umask=022") as m:
            for command in ("ls", "inspect", "load", "warm", "index", "verify"):
                self.assert_done(tensorfs(command, m.path, *(["--index-dir", self.tmp / "index"] if command == "index" else [])))

    def test_the_demo_runs(self):
        outcome = tensorfs("demo", timeout=60)
        self.assert_done(outcome)
        self.assertTrue(outcome.stdout)

    def test_completions_and_man_pages_are_written(self):
        self.assertIn("tensorfs", tensorfs("completions", "bash").stdout)
        self.assert_done(tensorfs("man", self.tmp))
        self.assertTrue(list(self.tmp.glob("tensorfs*.1")))


class Handles(Semantics):
    def test_many_opens_leak_no_file_descriptors(self):
        m = self.mounted()
        names = visible_files(m.path)
        self.open_all(m.path, names)
        before = self.descriptors(m)
        for _ in range(300):
            self.open_all(m.path, names)
        # The kernel releases handles after close returns.
        wait_until(lambda: self.descriptors(m) <= before, 20, "all descriptors are given back")

    def open_all(self, path, names):
        for name in names:
            with open(path / name, "rb") as file:
                file.read(10)

    def descriptors(self, m):
        return len(os.listdir(f"/proc/{m.pid}/fd"))

    def test_reading_a_folder_while_it_is_listed_again_is_stable(self):
        path = self.mounted().path
        names = sorted(os.listdir(path))
        with os.scandir(path) as first:
            next(first)
            self.assertEqual(sorted(os.listdir(path)), names)
            self.assertEqual(len(list(first)), len(names) - 1)

    def test_a_folder_of_2000_files_is_listed_completely(self):
        many = self.source / "many"
        many.mkdir()
        expected = [f"file-{n:04}-{'x' * 40}" for n in range(2000)]
        for name in expected:
            (many / name).touch()
        self.assertEqual(sorted(os.listdir(self.mounted().path / "many")), expected)
