"""Files of the source that are replaced in the ways that look alike: each test is an incident."""

import contextlib
import errno
import json
import os
import resource
import shutil
import time
from pathlib import Path

import checkpoints
from checkpoints import SHARD_LEN, numbered_set, overwrite, part_of, shard_name, write_one
from mounts import BIN, Mount, TestCase, pread_all, read_or_none, run, tensorfs, visible_files, wait_until

FILE = "model.safetensors"
MAP = "model.safetensors.index.json"
NOTE = "TENSORFS-ERROR.txt"
NOTICED_SECONDS = 3
PAGE = 4096
NOTED = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [0]}}), "format": "pt"}


def overwrite_and_put_the_time_back(path, content):
    stat = path.stat()
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


class ReplacedFiles(TestCase):
    # A shard removed and written anew often gets the inode number of the old one, and was taken for the old one
    # written to in place: EIO until the next mount.
    def test_a_shard_removed_and_written_anew_is_proved_again(self):
        source = numbered_set(self.tmp / "ck", 1)
        shard = source / shard_name(2, 3)
        with Mount(source) as m:
            (m.path / FILE).read_bytes()
            shard.unlink()
            write_one(shard, "t2", 777)
            new = checkpoints.random_bytes(777, SHARD_LEN)
            wait_until(lambda: new in self.read(m.path / FILE), 20, "the new shard is shown")

    # The time was put back, as tar and `cp -p` do: the name led to the node of the old file, and every open
    # ended in ESTALE until the next mount.
    def test_a_shard_removed_and_written_anew_with_its_time_put_back_is_shown(self):
        source = numbered_set(self.tmp / "ck", 1)
        shard = source / shard_name(2, 3)
        with Mount(source) as m:
            (m.path / FILE).read_bytes()
            before = shard.stat()
            shard.unlink()
            write_one(shard, "t2", 777)
            os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
            new = checkpoints.random_bytes(777, SHARD_LEN)
            wait_until(lambda: new in self.read(m.path / FILE), 20, "the new shard is shown")

    # The same for a single file, which the kernel then served with the old size and unproved.
    def test_a_whole_file_removed_and_written_anew_is_shown_with_its_size(self):
        source = self.tmp / "one"
        source.mkdir()
        for passthrough in ("auto", "never"):
            write_one(source / FILE, "w", 1)
            with self.subTest(passthrough), Mount(source, f"passthrough={passthrough}") as m:
                (m.path / FILE).read_bytes()
                (source / FILE).unlink()
                write_one(source / FILE, "w", 2, length=2 * SHARD_LEN)
                new = (source / FILE).read_bytes()
                wait_until(lambda: self.read(m.path / FILE) == new, 20, "the new file is shown")
                self.assertEqual((m.path / FILE).stat().st_size, len(new))

    # Old pages of a plain file were kept beside new ones when its modification time was put back between two opens.
    def test_a_plain_file_with_its_time_put_back_is_not_mixed(self):
        source = numbered_set(self.tmp / "ck", 1)
        plain = source / "notes.txt"
        plain.write_bytes(b"A" * 4_000_000)
        with Mount(source, "passthrough=never") as m:
            with open(m.path / "notes.txt", "rb") as file:
                file.read(300_000)
            overwrite_and_put_the_time_back(plain, b"B" * 4_000_000)
            self.assertEqual((m.path / "notes.txt").read_bytes(), b"B" * 4_000_000)

    # A reader still had the file open: the next open shared that handle, and failed for ever.
    def test_a_plain_file_written_to_while_it_is_open_is_opened_with_its_new_bytes(self):
        source = numbered_set(self.tmp / "ck", 1)
        plain = source / "notes.txt"
        plain.write_bytes(b"A" * 4_000_000)
        with Mount(source, "passthrough=never") as m, open(m.path / "notes.txt", "rb") as held:
            held.read(300_000)
            overwrite_and_put_the_time_back(plain, b"B" * 4_000_000)
            self.assertEqual((m.path / "notes.txt").read_bytes(), b"B" * 4_000_000)

    # The rest was proved anew and shown as a smaller tensor, without a word.
    def test_the_last_rank_shard_removed_under_a_mount_refuses_the_set_until_it_is_back(self):
        source = self.tmp / "dcp"
        source.mkdir()
        shards = [source / f"shard-{n:05}-model-00001-of-00001.safetensors" for n in (1, 2, 3)]
        for number, shard in enumerate(shards):
            note = {"w": {"saved_offsets": [number * SHARD_LEN]}}
            write_one(shard, "w", number, {**NOTED, "DCP_SHARDING_INFO": json.dumps(note)})
        with Mount(source, f"log={self.tmp / 'log'}") as m:
            whole = (m.path / FILE).read_bytes()
            shards[2].rename(self.tmp / "gone")
            wait_until(lambda: self.read(m.path / FILE) != whole, 20, "the change is seen")
            for _ in range(20):
                self.assertIn(self.read(m.path / FILE), (b"", whole))
            said = "has 2 shard files, it had 3 before"
            wait_until(lambda: said in (self.tmp / "log").read_text(), 20, "it is logged")
            (self.tmp / "gone").rename(shards[2])
            wait_until(lambda: self.read(m.path / FILE) == whole, 20, "the set is shown again")

    def test_so_it_is_with_a_shard_whose_tensors_lie_in_it_alone_though_shapes_are_recorded(self):
        source = self.tmp / "dcp"
        source.mkdir()
        shards = [source / f"shard-{n:05}-model-00001-of-00001.safetensors" for n in (1, 2)]
        for number, shard in enumerate(shards):
            note = {f"w{number}": {"saved_offsets": [0], "global_shape": [SHARD_LEN]}}
            write_one(shard, f"w{number}", number, {**NOTED, "DCP_SHARDING_INFO": json.dumps(note)})
        with Mount(source, f"log={self.tmp / 'log'}") as m:
            whole = (m.path / FILE).read_bytes()
            shards[1].rename(self.tmp / "gone")
            wait_until(lambda: self.read(m.path / FILE) != whole, 20, "the change is seen")
            for _ in range(20):
                self.assertIn(self.read(m.path / FILE), (b"", whole))
            said = "has 1 shard files, it had 2 before"
            wait_until(lambda: said in (self.tmp / "log").read_text(), 20, "it is logged")

    # Every look at a log file that grew proved the whole checkpoint again.
    def test_a_growing_log_file_is_shown_as_it_is_and_proves_nothing(self):
        source = numbered_set(self.tmp / "ck", 1)
        log = source / "train.log"
        log.write_text("step 0\n")
        with Mount(source, f"log={self.tmp / 'log'}", env={**os.environ, "TENSORFS_LOG": "info"}) as m:
            inode = (m.path / FILE).stat().st_ino
            for step in range(1, 6):
                with open(log, "a") as file:
                    file.write(f"step {step}\n")
                wait_until(lambda: self.read(m.path / "train.log") == log.read_bytes(), 20, "the log grows")
            self.assertEqual((m.path / FILE).stat().st_ino, inode)
            log.unlink()
            wait_until(lambda: not (m.path / "train.log").exists(), 20, "the log is gone")
            log.write_text("again\n")
            wait_until(lambda: self.read(m.path / "train.log") == b"again\n", 20, "the log is back")
        self.assertNotIn("proving", (self.tmp / "log").read_text())

    # Files opened again and again were counted as many open files, and one that was held open was closed for them.
    def test_an_open_file_keeps_its_replaced_shard_however_often_others_are_opened(self):
        source = numbered_set(self.tmp / "ck", 1)
        limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))}
        with Mount(source, **limit) as m:
            descriptor = os.open(m.path / FILE, os.O_RDONLY)
            old = pread_all(descriptor, os.fstat(descriptor).st_size, 0)
            write_one(source / "new", "t1", 5)
            os.replace(source / "new", source / shard_name(1, 3))
            for _ in range(150):
                self.read(m.path / FILE)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self.assertEqual(pread_all(descriptor, len(old), 0), old)
            os.close(descriptor)

    def read(self, path):
        try:
            return path.read_bytes()
        except OSError as error:
            self.assertIn(error.errno, (errno.ENOENT, errno.EIO, errno.ESTALE))
            return b""


class Names(TestCase):
    # Two files that each hold a whole checkpoint, with a sharding note, were shown as one.
    def test_two_whole_checkpoints_with_sharding_notes_are_not_merged(self):
        source = self.tmp / "two"
        source.mkdir()
        write_one(source / FILE, "w", 1, NOTED)
        write_one(source / "ema.safetensors", "w", 2, NOTED)
        outcome = tensorfs("verify", source, "--json")
        self.assertEqual(outcome.code, 1)
        self.assertEqual(outcome.json()["class"], "duplicate_tensor")

    # A file with a sharding note that begins at 0 may lack what comes after it: that is not proven.
    def test_a_numbered_file_with_a_sharding_note_has_an_unproven_tail(self):
        source = self.tmp / "noted"
        source.mkdir()
        write_one(source / shard_name(1, 1), "w", 1, NOTED)
        self.assertEqual(tensorfs("verify", source, "--json").json()["sets"][0]["tail"], "unproven")

    # A lock file beside a download was taken for a shard.
    def test_a_lock_file_is_no_shard(self):
        source = numbered_set(self.tmp / "ck", 1)
        (source / "model.safetensors-00001-of-00002.lock").write_text("")
        self.assertEqual(tensorfs("ls", source, "--json").json()["refused"], [])

    # Paths that are not UTF-8 ended every --json command with a panic.
    def test_a_path_that_is_not_utf8_is_no_panic(self):
        folder = os.path.join(os.fsencode(self.tmp), b"bad\xff")
        os.mkdir(folder)
        write_one(os.path.join(folder, os.fsencode(FILE)), "w", 1)
        for command in ("ls", "inspect", "verify"):
            outcome = run(BIN, command, "--json", os.fsdecode(folder))
            self.assertEqual(outcome.code, 0, outcome.stderr)
            self.assertEqual(len(outcome.json()["sets"]), 1)
            self.assertEqual(run(BIN, command, "--json", os.fsdecode(folder + b"/none")).code, 1)
        with Mount(os.fsdecode(folder)) as m:
            self.assertNotIn("user.tensorfs.source", os.listxattr(m.path / FILE))

    # Commands on a mount opened a FIFO of the source that is named like weights, and waited for its writer.
    def test_a_fifo_in_the_source_keeps_no_command_on_the_mount(self):
        source = numbered_set(self.tmp / "ck", 1)
        os.mkfifo(source / "pipe.safetensors")
        with Mount(source) as m:
            outcome = run(BIN, "ls", "--json", m.path, timeout=10)
            self.assertEqual(outcome.code, 0, outcome.stderr)
            self.assertEqual([found["name"] for found in outcome.json()["sets"]], [FILE])

    # `inspect` of a tensor said that there is none, where its checkpoint was refused.
    def test_inspect_says_the_refusal_and_not_that_there_is_no_tensor(self):
        source = numbered_set(self.tmp / "ck", 1)
        (source / shard_name(3, 3)).unlink()
        outcome = tensorfs("inspect", source, "t1", "--json")
        self.assertEqual(outcome.json()["class"], "shard_missing")


class Replaced(TestCase):
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


class Descriptors(TestCase):
    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "tree/ck", 1)
        numbered_set(self.tmp / "tree/other", 3)

    def held(self, m, deleted=True):
        """Files of the checkpoint that the daemon holds open; `deleted`: only those that are gone."""
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
