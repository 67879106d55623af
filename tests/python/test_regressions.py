"""Incidents that happened once: each test plays one again, and says above itself what went wrong."""

import contextlib
import errno
import json
import mmap
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

import checkpoints
import oracle
from mounts import (
    BIN, HELPER, Child, Mount, MountFailed, TestCase, daemon_of, detach, find_mount, needs_root, pread_all,
    process_gone, run, run_measured, tensorfs, visible_files, wait_until,
)

FILE = "model.safetensors"
MAP = "model.safetensors.index.json"
NOTE = "TENSORFS-ERROR.txt"
SOURCE = "user.tensorfs.source"
PAGE = 4096
SHARD_LEN = 1_000_000
NOTICED_SECONDS = 3
MEGABYTE = 1 << 20

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


def shard_name(number, total, stem="model"):
    return f"{stem}-{number:05}-of-{total:05}.safetensors"


def write_one(path, tensor, seed, metadata=checkpoints.FORMAT, length=SHARD_LEN):
    """A shard with one tensor of random bytes."""
    data = checkpoints.random_bytes(seed, length)
    checkpoints.write_shard(path, [(tensor, "U8", [length], data)], metadata)


def numbered_set(folder, seed, total=3, stem="model", with_map=True):
    """Shards with one tensor each: `t1`, `t2` and so on."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    names = [shard_name(n, total, stem) for n in range(1, total + 1)]
    for number, name in enumerate(names, 1):
        write_one(folder / name, f"t{number}", seed * 100 + number)
    if with_map:
        checkpoints.write_weight_map(folder, {name: [f"t{n}"] for n, name in enumerate(names, 1)}, stem)
    (folder / "config.json").write_text("{}")
    return folder


def overwrite(path, seed=999, length=SHARD_LEN):
    """New bytes of the same length, written into the same file."""
    with open(path, "r+b") as file:
        file.seek(-length, os.SEEK_END)
        file.write(checkpoints.random_bytes(seed, length))


def part_of(data, tensor):
    """Where the bytes of `tensor` begin and end in the file `data`."""
    header = oracle.read_header(data)
    return [header.data_start + offset for offset in header.tensors[tensor]["data_offsets"]]


def read_or_none(path):
    try:
        return Path(path).read_bytes()
    except OSError:
        return None


def forget_pages(descriptor):
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def attributes_work(folder):
    """Whether the file system keeps attributes of users."""
    try:
        os.setxattr(folder, "user.tensorfs.test", b"1")
        os.removexattr(folder, "user.tensorfs.test")
    except OSError:
        return False
    return True


class Regressions(TestCase):
    def open(self, path):
        descriptor = os.open(path, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        return descriptor

    def place(self, name="mnt"):
        path = self.tmp / name
        path.mkdir()
        self.addCleanup(detach, path)
        return path

    def verify(self, source, *words):
        """The outcome of verify and what it says of the only set."""
        outcome = tensorfs("verify", source, "--json", *words)
        return outcome, outcome.json()["sets"][0]

    def assert_refused_as(self, source, fault, *words):
        outcome, found = self.verify(source, *words)
        self.assert_refused(outcome)
        self.assertEqual(found["class"], fault, outcome.stdout)

    def assert_one_line(self, outcome):
        self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
        self.assertRegex(outcome.stderr, r"\A(tensorfs|mount\.tensorfs): .+\n\Z")

    def assert_same(self, data, expected, what=""):
        self.assertTrue(data == expected, f"{what}: {data and len(data)} other bytes")

    def reads_fail(self, descriptor, start, expected, length=100_000):
        """True when the read is refused with EIO; bytes that are returned must be the expected ones."""
        try:
            data = pread_all(descriptor, length, start)
        except OSError as error:
            self.assertEqual(error.errno, errno.EIO, error)
            return True
        self.assert_same(data, expected[start : start + length], f"at {start}")
        return False


class Attributes(Regressions):
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

    # The same with a broken folder: what the attribute named was whole, so verify said that all is well.
    # A file with such an attribute is no better than a folder.
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


class SwappedFolders(Regressions):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "source"
        self.folder = numbered_set(self.source / "d", 1)
        self.whole = checkpoints.hf_whole(self.folder)
        self.outside = numbered_set(self.tmp / "outside", 2)
        for name in ("notes.txt", "fresh.txt"):
            (self.folder / name).write_text("inside")
            (self.outside / name).write_text("secret")
        (self.outside / "only.txt").write_text("secret")
        os.utime(self.outside / "notes.txt", ns=(0, (self.folder / "notes.txt").stat().st_mtime_ns))

    def swap(self):
        self.folder.rename(self.source / "d.old")
        self.folder.symlink_to(self.outside)

    def assert_nothing_from_outside(self, path, seconds):
        """Looks again and again, because caches end after a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for name in ("notes.txt", "fresh.txt", "only.txt"):
                self.assertIn(read_or_none(path / "d" / name), (None, b"inside"), name)
            found = read_or_none(path / "d" / FILE)
            self.assertTrue(found in (None, self.whole), "weights from outside")
            with contextlib.suppress(OSError):
                self.assertNotIn("only.txt", os.listdir(path / "d"))
            time.sleep(0.1)

    # A folder was swapped for a link to another one after the mount, and its files were opened by their
    # paths: the mount, often root's, showed files of the same name from anywhere.
    def test_a_folder_swapped_for_a_link_shows_nothing_from_outside(self):
        numbered_set(self.source / "other", 3)
        with Mount(self.source) as m:
            self.assertEqual((m.path / "d/notes.txt").read_text(), "inside")
            self.assert_same((m.path / "d" / FILE).read_bytes(), self.whole)
            self.swap()
            self.assert_nothing_from_outside(m.path, NOTICED_SECONDS)
            self.assertTrue(m.alive(), m.log())

    # The same with a folder that nobody had looked into: its weights were first opened after the swap,
    # when the path led outside.
    def test_a_folder_swapped_before_the_first_look_shows_nothing_from_outside(self):
        numbered_set(self.source / "a", 3)
        with Mount(self.source) as m:
            self.swap()
            self.assert_nothing_from_outside(m.path, 1.5)
            self.assertTrue(m.alive(), m.log())

    # A folder above was swapped, so that the last component of the path was genuine and only one
    # in the middle was the link.
    def test_a_folder_swapped_further_up_shows_nothing_from_outside(self):
        top = self.tmp / "top"
        numbered_set(top / "a", 3)
        (top / "up").mkdir()
        self.source.rename(top / "up/source")
        far = self.tmp / "far"
        (far / "source").mkdir(parents=True)
        self.outside.rename(far / "source/d")
        with Mount(top) as m:
            (top / "up").rename(top / "up.old")
            (top / "up").symlink_to(far)
            self.assert_nothing_from_outside(m.path / "up/source", 1.5)

    # A followed link led to where the mount was to stand, so that the daemon looked into itself
    # and waited for its own answer.
    def test_a_source_that_links_into_the_mount_point_is_refused(self):
        source = numbered_set(self.tmp / "n/src", 1)
        place = self.place("n/mnt")
        (place / "below").mkdir()
        for target in ("../mnt", "../mnt/below"):
            (source / "link").symlink_to(target)
            outcome = tensorfs("mount", source, place, "-o", f"follow={self.tmp / 'n'}")
            self.assert_refused(outcome)
            self.assert_not_mounted(place)
            (source / "link").unlink()


class Replaced(Regressions):
    # A checkpoint folder was replaced by one of the same name, and only the old folder was watched:
    # overwriting a shard of the new one went unnoticed and cached pages stayed.
    def test_a_replaced_checkpoint_folder_is_watched_too(self):
        ck = numbered_set(self.tmp / "tree/ck", 1)
        numbered_set(self.tmp / "tree/other", 3)
        new = numbered_set(self.tmp / "new", 2)
        path = self.enter(Mount(self.tmp / "tree")).path / "ck" / FILE
        self.assert_same(path.read_bytes(), checkpoints.hf_whole(ck))
        ck.rename(self.tmp / "old")
        new.rename(ck)
        whole = checkpoints.hf_whole(ck)
        wait_until(lambda: read_or_none(path) == whole, NOTICED_SECONDS, "the new bytes")
        descriptor = self.open(path)
        self.assert_same(pread_all(descriptor, len(whole), 0), whole)
        overwrite(ck / shard_name(2, 3))
        start = part_of(whole, "t2")[0] + PAGE
        wait_until(lambda: self.reads_fail(descriptor, start, whole), NOTICED_SECONDS, "EIO for cached pages")

    # A write through a mapping tells nobody: no event came, and the kernel's cached pages of the old
    # bytes were served beside new ones.
    def test_a_shard_changed_through_a_mapping_gives_eio_soon(self):
        source = numbered_set(self.tmp / "model", 1)
        whole = checkpoints.hf_whole(source)
        path = self.enter(Mount(source)).path / FILE
        descriptor = self.open(path)
        self.assert_same(pread_all(descriptor, len(whole), 0), whole)
        self.change_through_a_mapping(source / shard_name(2, 3))
        start = part_of(whole, "t2")[0] + 10 * PAGE
        deadline = time.monotonic() + 4
        wait_until(lambda: self.reads_fail(descriptor, start, whole), 4, "EIO by the open handle")
        left = max(deadline - time.monotonic(), 0.1)
        new = checkpoints.hf_whole(source)
        wait_until(lambda: self.whole_or_none(path) == new, left, "the new bytes by a new open")
        for tensor in ("t1", "t3"):
            first, last = part_of(whole, tensor)
            first, last = -(-first // PAGE) * PAGE, last // PAGE * PAGE
            self.assert_same(pread_all(descriptor, last - first, first), whole[first:last], tensor)

    def change_through_a_mapping(self, path):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            middle = len(mapped) // 2
            mapped[middle : middle + 64] = bytes(64)
            mapped.flush()

    def whole_or_none(self, path):
        try:
            return path.read_bytes()
        except OSError as error:
            self.assertIn(error.errno, (errno.EIO, errno.ESTALE), error)

    def comes_back(self, source, folder):
        """`folder` is the checkpoint's, below `source` or the same."""
        whole, shard = checkpoints.hf_whole(folder), folder / shard_name(2, 3)
        bad, good = self.tmp / "bad", self.tmp / "good"
        shutil.copy2(shard, bad)
        os.truncate(bad, shard.stat().st_size - 1000)
        with Mount(source) as m:
            shown = m.path / folder.relative_to(source)
            self.assert_same((shown / FILE).read_bytes(), whole)
            os.link(shard, good)
            bad.rename(shard)
            wait_until(lambda: not (shown / FILE).exists(), NOTICED_SECONDS, "the virtual file is gone")
            wait_until(lambda: (shown / NOTE).exists(), NOTICED_SECONDS, "the note is there")
            good.rename(shard)
            wait_until(lambda: read_or_none(shown / FILE) == whole, NOTICED_SECONDS, "the file is back")
            wait_until(lambda: not (shown / NOTE).exists(), NOTICED_SECONDS, "the note is gone")
            self.assertEqual(visible_files(shown), sorted(["config.json", FILE, MAP]))

    # A look at the wrong moment, between two renames, refused a checkpoint for good: only a new mount
    # brought it back.
    def test_a_checkpoint_refused_while_it_is_replaced_comes_back(self):
        source = numbered_set(self.tmp / "model", 1)
        self.comes_back(source, source)

    # The same in a tree, where the note of the refusal stood beside the file that had come back.
    # Both have to change together.
    def test_a_checkpoint_of_a_tree_refused_while_it_is_replaced_comes_back(self):
        numbered_set(self.tmp / "tree/a", 2)
        self.comes_back(self.tmp / "tree", numbered_set(self.tmp / "tree/b", 1))


class Descriptors(Regressions):
    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "tree/ck", 1)
        numbered_set(self.tmp / "tree/other", 3)

    def held(self, m, deleted=True):
        """What the daemon holds open of the checkpoint; `deleted`: only what is not there any more."""
        found = []
        for entry in Path(f"/proc/{m.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry))
        prefixes = (str(self.source), str(self.tmp / "next"))
        return [f for f in found if f.startswith(prefixes) and (f.endswith(" (deleted)") or not deleted)]

    def replace_and_read(self, m, name, write, shown):
        for number in range(30):
            write(self.tmp / "next", number)
            os.replace(self.tmp / "next", self.source / name)
            read_or_none(m.path / "ck" / shown)

    # Each replacement of a file left a descriptor of the old one behind, until the table was full
    # and the disk too, because deleted shards kept their blocks.
    def test_replaced_files_leave_no_descriptors(self):
        with Mount(self.tmp / "tree") as m:
            self.replace_and_read(m, "config.json", lambda p, n: p.write_text(str(n)), "config.json")
            self.replace_and_read(m, shard_name(2, 3), lambda p, n: write_one(p, "t2", 1000 + n), FILE)
            wait_until(lambda: not self.held(m), 20, "no replaced file is held")
            whole = checkpoints.hf_whole(self.source)
            wait_until(lambda: read_or_none(m.path / "ck" / FILE) == whole, NOTICED_SECONDS, "the last bytes")
            wait_until(lambda: read_or_none(m.path / "ck/config.json") == b"29", NOTICED_SECONDS, "the last bytes")

    # A whole checkpoint was deleted to make room, and no room came: the daemon still held
    # every shard of it.
    def test_a_deleted_checkpoint_is_let_go(self):
        with Mount(self.tmp / "tree") as m:
            for name in (FILE, "config.json", MAP):
                (m.path / "ck" / name).read_bytes()
            shutil.rmtree(self.source)
            wait_until(lambda: not self.held(m, deleted=False), 20, "nothing of it is held")


class Pieces(Regressions):
    # Two weight maps each named some shards of one DCP checkpoint; the set went to the first, and what
    # the second named was shown as whole tensors although it was pieces.
    def test_two_weight_maps_of_one_dcp_set_refuse_it(self):
        folder = checkpoints.row_wise(self.tmp / "tree/ck")
        tensors = ["embed", "norm", "bytes"]
        checkpoints.write_weight_map(folder, {checkpoints.dcp_name(1): tensors}, "model")
        checkpoints.write_weight_map(folder, {checkpoints.dcp_name(2): tensors}, "other")
        numbered_set(self.tmp / "tree/good", 3)
        self.assert_refused(tensorfs("verify", folder))
        with self.assertRaises(MountFailed), Mount(folder):
            pass
        for options in ([], ["prefer=index"]):
            with Mount(self.tmp / "tree", *options) as m:
                self.assertEqual(visible_files(m.path / "ck"), [NOTE])
        for words in (["ls", folder], ["inspect", folder]):
            self.assert_no_pieces(tensorfs(*words, "--json").json())

    def assert_no_pieces(self, listed):
        for found in listed.get("sets") or []:
            for tensor in found.get("tensors") or []:
                self.assertIn(tensor["shape"][0], (4099, 1000), tensor)

    # Files that one rank wrote whole carry a sharding note with zero offsets; that note made a numbered
    # set a DCP one, where gaps in the numbers are normal, and a lost file went unnoticed.
    def test_a_numbered_set_with_sharding_notes_misses_its_lost_file(self):
        folder = self.tmp / "model"
        folder.mkdir()
        for number in (1, 2, 3):
            info = json.dumps({f"t{number}": {"saved_offsets": [0]}})
            metadata = {**checkpoints.FORMAT, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
            write_one(folder / shard_name(number, 3), f"t{number}", number, metadata)
        outcome, found = self.verify(folder)
        self.assert_done(outcome)
        self.assertEqual((found["kind"], found["tensors"]), ("numbered", 3))
        with Mount(folder) as m:
            self.assertEqual(set(oracle.tensor_bytes(m.path / FILE)), {"t1", "t2", "t3"})
        for number in (3, 1):
            away = (folder / shard_name(number, 3)).rename(self.tmp / "away")
            self.assert_refused_as(folder, "shard_missing")
            away.rename(folder / shard_name(number, 3))

    # A set named consolidated-*-of-* was shown as consolidated.safetensors, which some tools load
    # beside model.safetensors.
    def test_a_set_named_consolidated_is_shown_as_the_model(self):
        for with_map in (False, True):
            folder = numbered_set(self.tmp / f"map-{with_map}", 1, 2, "consolidated", with_map)
            with Mount(folder) as m:
                names = visible_files(m.path)
                self.assertIn(FILE, names)
                self.assertFalse([n for n in names if re.match(r"consolidated.*\.safetensors$", n)], names)
                expected = oracle.whole_tensors(sorted(folder.glob("*.safetensors")))
                self.assert_same((m.path / FILE).read_bytes(), expected)


class BadMaps(Regressions):
    def setUp(self):
        super().setUp()
        numbered_set(self.tmp / "tree/good", 3)
        self.folder = self.tmp / "tree/ck"
        self.folder.mkdir()

    def assert_hidden(self, text):
        """With `text` as weight map nothing but the note is left of the folder."""
        (self.folder / MAP).write_text(text)
        self.assert_refused(tensorfs("verify", self.folder))
        with Mount(self.tmp / "tree") as m:
            self.assertEqual(visible_files(m.path / "ck"), [NOTE])
            self.assertIn(MAP, (m.path / "ck" / NOTE).read_text())
            for entry in self.folder.iterdir():
                self.assertFalse((m.path / "ck" / entry.name).exists(), entry.name)

    # A weight map that does not parse was shown beside the note, and its shards were taken for
    # checkpoints of their own, so that tools loaded half a model.
    def test_a_weight_map_that_does_not_parse_hides_what_it_names(self):
        for name in ("one", "two"):
            write_one(self.folder / f"{name}.safetensors", name, 1)
        named = '"one": "one.safetensors", "two": "two.safetensors"'
        for text in (
            f'{{"weight_map": {{{named}}}',
            f'{{"weight_map": {{{named}, "three": 3}}}}',
            f'{{"metadata": {{}}, "weight_map": {{{named}}}}} trailing',
        ):
            with self.subTest(text=text):
                self.assert_hidden(text)

    # A name that stands twice ended the parse at its second place: the shards read before it were
    # forgotten and shown.
    def test_a_doubled_name_hides_the_shards_of_both_places(self):
        for name in ("one", "two", "three"):
            write_one(self.folder / f"{name}.safetensors", name, 1)
        pairs = '"t": "one.safetensors", "t": "two.safetensors", "u": "three.safetensors"'
        self.assert_hidden(f'{{"weight_map": {{{pairs}}}}}')

    # A map of DCP shards named one more file; the map was refused with the set, and the extra file
    # was shown as a checkpoint of its own.
    def test_a_bad_map_of_dcp_shards_hides_the_extra_file_that_it_names(self):
        checkpoints.rows_of_one(self.folder)
        write_one(self.folder / "extra.safetensors", "extra", 1)
        pairs = f'"w": "{checkpoints.dcp_name(1)}", "extra": "extra.safetensors"'
        self.assert_hidden(f'{{"weight_map": {{{pairs}, "w": "{checkpoints.dcp_name(2)}"}}}}')
        self.assert_hidden(f'{{"weight_map": {{{pairs}')


class Answers(Regressions):
    def assert_no_in_json(self, fault, *words):
        outcome = tensorfs(*words, "--json")
        self.assertEqual(outcome.code, 1, f"{words}: {outcome}")
        answer = outcome.json()
        self.assertIs(answer["ok"], False, answer)
        self.assertIsInstance(answer["class"], str, answer)
        self.assertTrue(isinstance(answer["error"], str) and answer["error"], answer)
        self.assertNotIn("\n", answer["error"])
        if fault:
            self.assertEqual(answer["class"], fault, answer)

    # With --json a failure printed nothing on stdout, or half an object, so that scripts met
    # a parse error instead of the reason.
    def test_failures_are_one_json_object_too(self):
        refused = numbered_set(self.tmp / "refused", 1)
        (refused / shard_name(2, 3)).unlink()
        empty, good = self.tmp / "empty", numbered_set(self.tmp / "good", 1)
        empty.mkdir()
        for command in ("ls", "inspect", "verify"):
            for path, fault in ((self.tmp / "missing", None), (empty, None), (refused, "shard_missing")):
                with self.subTest(command=command, path=path.name):
                    self.assert_no_in_json(fault, command, path)
        with self.subTest("an unknown tensor"):
            self.assert_no_in_json(None, "inspect", good, "unknown")

    def odd_folder(self):
        folder = self.tmp / "a\nfolder"
        folder.mkdir()
        (folder / "a\nfile.safetensors").write_bytes(b"\x10" + bytes(7) + b"{}")
        return folder

    # A newline in a file name made two lines of an error, and the second looked like a message
    # of its own.
    def test_errors_are_one_line_whatever_the_file_is_called(self):
        folder, place = self.odd_folder(), self.place()
        for words in (
            ["verify", folder], ["ls", folder], ["inspect", folder], ["mount", folder, place],
            ["verify", folder / "a\nfile.safetensors"], ["ls", self.tmp / "not\nthere"],
            ["mount", self.tmp / "not\nthere", place], ["mount", folder, self.tmp / "no\nplace"],
            ["umount", self.tmp / "not\nthere"],
        ):
            with self.subTest(words=words):
                outcome = tensorfs(*words)
                self.assert_refused(outcome)
                self.assert_one_line(outcome)

    # The child that failed to mount printed its reason, and its parent printed it again.
    # The helper and mount in the foreground must do no worse.
    def test_a_refused_mount_says_why_once(self):
        source, place = numbered_set(self.tmp / "model", 1), self.place()
        (source / shard_name(2, 3)).unlink()
        for words in ([BIN, "mount"], [BIN, "mount", "--foreground"], [HELPER]):
            with self.subTest(words=words):
                outcome = run(*words, source, place)
                self.assertNotEqual(outcome.code, 0)
                self.assert_one_line(outcome)
                self.assertEqual(outcome.stderr.count(shard_name(2, 3)), 1, outcome.stderr)


class References(Regressions):
    """`full` is a DCP set with one row per rank, `cut` the same without its last shard."""

    RANKS = 4

    def setUp(self):
        super().setUp()
        self.full = checkpoints.rows_of_one(self.tmp / "full", self.RANKS)
        self.whole = oracle.from_dcp(self.full)
        self.cut = self.copy(self.full, "cut")
        (self.cut / checkpoints.dcp_name(self.RANKS)).unlink()

    def weight_map(self, metadata):
        path = self.tmp / "reference.safetensors.index.json"
        names = oracle.read_header(self.whole).tensors
        path.write_text(json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(names, "x.safetensors")}))
        return path

    def total_size(self):
        ends = [e["data_offsets"][1] for e in oracle.read_header(self.whole).tensors.values()]
        return max(ends)

    # A weight map knows names only, yet as a reference it was said to prove the tail, also of a set
    # whose last shard was lost.
    def test_a_weight_map_proves_the_tail_only_by_its_size(self):
        for metadata, tail in (({}, "unproven"), ({"total_size": self.total_size()}, "proven")):
            outcome, found = self.verify(self.full, "--reference", self.weight_map(metadata))
            self.assert_done(outcome)
            self.assertEqual((found["ok"], found["tail"]), (True, tail), metadata)

    # The last shard was lost; the map's total_size is larger than what the shards hold, and nobody
    # compared the two.
    def test_a_weight_map_with_a_larger_size_refuses_the_cut_set(self):
        size = self.total_size()
        self.assertEqual(self.verify(self.cut, "--reference", self.weight_map({"total_size": size}))[0].code, 1)
        self.assertEqual(self.verify(self.full, "--reference", self.weight_map({"total_size": size + 1}))[0].code, 1)
        option = f"reference={self.weight_map({'total_size': size})}"
        with self.assertRaises(MountFailed), Mount(self.cut, option):
            pass

    # After a shard was lost, --write-manifest wrote a new manifest without it: the only witness
    # of the loss was overwritten.
    def test_a_manifest_that_lists_a_lost_shard_is_not_overwritten(self):
        before = set(self.full.iterdir())
        self.assert_done(tensorfs("verify", self.full, "--write-manifest"))
        (manifest,) = set(self.full.iterdir()) - before
        content = manifest.read_bytes()
        (self.full / checkpoints.dcp_name(self.RANKS)).unlink()
        left = set(self.full.iterdir())
        for _ in range(2):
            self.assert_refused(tensorfs("verify", self.full, "--write-manifest"))
            self.assertEqual(manifest.read_bytes(), content)
            self.assertEqual(set(self.full.iterdir()), left)

    # The header is all that a reference is for, but a file cut after it was refused as truncated.
    # People publish just that: a few kilobytes instead of the weights.
    def test_a_file_that_is_only_a_header_is_a_reference(self):
        path = self.tmp / "header.safetensors"
        path.write_bytes(self.whole[: 8 + int.from_bytes(self.whole[:8], "little")])
        outcome, found = self.verify(self.full, "--reference", path)
        self.assert_done(outcome)
        self.assertEqual((found["ok"], found["tail"]), (True, "proven"))
        outcome, found = self.verify(self.cut, "--reference", path)
        self.assert_refused(outcome)
        self.assertEqual(found["tensor"], "w")
        with Mount(self.full, f"reference={path}") as m:
            self.assert_same((m.path / FILE).read_bytes(), self.whole)
        with self.assertRaises(MountFailed), Mount(self.cut, f"reference={path}"):
            pass


@contextlib.contextmanager
def full_device():
    with open("/dev/full", "wb") as file:
        yield file


@contextlib.contextmanager
def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        yield writing
    finally:
        os.close(writing)


class Streams(Regressions):
    def run_with(self, words, **streams):
        """Like `run`, with standard streams of its own; returns the exit code and stderr."""
        with tempfile.TemporaryFile() as log:
            streams = {"stdout": log, "stderr": log, **streams}
            process = subprocess.Popen([str(w) for w in words], stdin=subprocess.DEVNULL, **streams)
            try:
                code = process.wait(20)
            finally:
                process.kill()
                process.wait()
            log.seek(0)
            return code, log.read().decode(errors="replace")

    def mounts_with(self, stream):
        source, place = numbered_set(self.tmp / "model", 1), self.place()
        # Something to warn of, so that there is something to write.
        (source / "passwd").symlink_to("/etc/passwd")
        for words in ([BIN, "mount"], [BIN, "mount", "-v"], [HELPER]):
            with self.subTest(words=words):
                code, out = self.run_with([*words, source, place], stderr=stream)
                self.assertEqual(code, 0, out)
                self.assert_same((place / FILE).read_bytes(), checkpoints.hf_whole(source))
                self.assert_done(tensorfs("umount", place))
                wait_until(lambda: daemon_of(place) is None, 5, "the daemon ends")

    # A warning that could not be written ended the daemon by a panic, because println! panics
    # when its stream is full.
    def test_a_mount_works_with_a_full_stderr(self):
        with full_device() as stream:
            self.mounts_with(stream)

    # The terminal or the pipe of the one who mounts may be gone by the time there is something
    # to say.
    def test_a_mount_works_with_a_closed_stderr(self):
        with closed_pipe() as stream:
            self.mounts_with(stream)

    def printing(self):
        source = numbered_set(self.tmp / "model", 1)
        json_too = [[command, source, "--json"] for command in ("verify", "ls")]
        return [["verify", source], ["completions", "bash"], ["man"], *json_too]

    # Output was lost on a full disk, and the exit code was 0, or 101 with a panic.
    # A script that redirects verify must notice.
    def test_output_on_a_full_device_fails_without_a_panic(self):
        for words in self.printing():
            with self.subTest(words=words), full_device() as stream:
                code, err = self.run_with([BIN, *words], stdout=stream)
                self.assertNotIn("panicked", err)
                self.assertEqual(code, 1, err)

    # `tensorfs verify | head -1` ended with a panic.
    # Whether the rest was needed only the reader knows, so that both exit codes are right.
    def test_output_to_a_closed_pipe_ends_without_a_panic(self):
        for words in self.printing():
            with self.subTest(words=words), closed_pipe() as stream:
                code, err = self.run_with([BIN, *words], stdout=stream)
                self.assertNotIn("panicked", err)
                self.assertIn(code, (0, 1), err)


@needs_root
class OtherUsers(Regressions):
    # The attribute told users of an allow_other mount where the source is, and the commands went there
    # and failed, although the mount would have let them read.
    def test_a_user_without_rights_to_a_shard_reads_through_the_mount(self):
        source, place = numbered_set(self.tmp / "model", 1), self.place()
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
            self.assert_done(run(binary, "verify", m.path, **user))
            self.assertEqual(run(binary, "ls", source, **user).code, 1)


class Processes(Regressions):
    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "model", 1)
        self.whole = checkpoints.hf_whole(self.source)

    def still_right(self, descriptor, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            forget_pages(descriptor)
            self.assert_same(pread_all(descriptor, len(self.whole), 0), self.whole)
            time.sleep(0.05)

    def read_fails(self, descriptor):
        forget_pages(descriptor)
        try:
            pread_all(descriptor, len(self.whole), 0)
        except OSError:
            return True
        return False

    # SIGTERM waited for open files without end, so that a service never stopped; when it did not wait,
    # programs in the middle of loading failed.
    def test_sigterm_serves_an_open_file_for_a_while_and_not_for_ever(self):
        with Mount(self.source, watchdog=40) as m:
            descriptor = os.open(m.path / FILE, os.O_RDONLY)
            try:
                started = time.monotonic()
                m.kill(signal.SIGTERM)
                # The daemon goes on for eleven seconds after the signal.
                wait_until(lambda: not m.mounted(), 5, "the mount is gone")
                self.still_right(descriptor, 2)
                m.wait_for_exit(30)
                self.assertGreater(time.monotonic() - started, 10)
                wait_until(lambda: self.read_fails(descriptor), 20, "reads fail")
            finally:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    # The daemon looked at its own mount to see whether it answers; killed in that moment it waited
    # for an answer that only itself could give, and could not be killed at all.
    def test_a_daemon_killed_right_after_the_start_is_gone(self):
        place = self.place()
        for number in range(10):
            words = [str(w) for w in (BIN, "mount", "--foreground", self.source, place)]
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                wait_until(lambda: find_mount(place) or process.poll() is not None, 10, "the mount is in the table")
                self.assertIsNone(process.poll())
                process.kill()
                wait_until(lambda: process_gone(process.pid), 20, f"it is gone, round {number}")
                wait_until(lambda: daemon_of(place) is None, 20, "and so is all that it started")
            finally:
                process.kill()
                detach(place)
                process.wait(10)

    # mount(8) and fuse's own helper call the program with source, place and options, and no command;
    # that was a usage error.
    def test_the_program_called_as_a_helper_mounts(self):
        place = self.place()
        for words in ([self.source, place, "-o", "ro"], [self.source, place, "-o", "ro,nofail,dev,suid"]):
            with self.subTest(words=words):
                self.assert_done(run(BIN, *words))
                entry = find_mount(place)
                self.assertEqual((entry.type, entry.device), ("fuse.tensorfs", str(self.source)))
                self.assert_same((place / FILE).read_bytes(), self.whole)
                self.assert_done(tensorfs("umount", place))
                wait_until(lambda: daemon_of(place) is None, 5, "the daemon ends")


class ManyLinks(Regressions):
    LEVELS, WIDTH = 17, 12

    def tree(self):
        """Each folder links to two of the next level: 200 folders, and 2^17 paths from each of the first level."""
        source = numbered_set(self.tmp / "tree/model", 1).parent
        for level in range(self.LEVELS):
            for number in range(self.WIDTH):
                folder = source / f"n{level:02}-{number:02}"
                folder.mkdir()
                (folder / "notes.txt").write_text("x")
                for link in (0, 1) if level + 1 < self.LEVELS else ():
                    (folder / f"l{link}").symlink_to(f"../n{level + 1:02}-{(number + link) % self.WIDTH:02}")
        return source

    # A few folders that link to each other have as many paths as leaves have a tree: the scan took
    # minutes and all memory.
    def test_folders_linked_to_each_other_are_scanned_soon_or_refused(self):
        source = self.tree()
        for command in ("verify", "ls"):
            outcome, peak = run_measured(BIN, command, source)
            self.assertIn(outcome.code, (0, 1), outcome.stderr)
            self.assertLess(outcome.seconds, 5, command)
            self.assertLess(peak, 300 * MEGABYTE, command)

    # The same for a mount, which keeps what it has scanned.
    # It may refuse the tree, but not hang.
    def test_folders_linked_to_each_other_are_mounted_soon_or_refused(self):
        source, place = self.tree(), self.place()
        outcome = tensorfs("mount", source, place)
        self.assertIn(outcome.code, (0, 1), outcome.stderr)
        self.assertLess(outcome.seconds, 5)
        if outcome.code == 0:
            status = Path(f"/proc/{daemon_of(place)}/status").read_text()
            peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
            self.assertLess(peak, 300 * MEGABYTE)
            self.assertTrue((place / "model" / FILE).exists())
            self.assert_done(tensorfs("umount", place))


if __name__ == "__main__":
    sys.exit(unittest.main())
