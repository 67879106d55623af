"""Shards that change under a mount: never short, never new bytes mixed with old ones, and nothing else suffers."""

import errno
import mmap
import os
import signal
import time

import checkpoints
import oracle
from mounts import Child, Mount, TestCase, pread_all, wait_until

PAGE = 4096
SHARD_LEN = 3_000_000
NOTICED_SECONDS = 3

MAPPED_READER = """
import mmap, sys
path, far, near = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
file = open(path, "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
if near:
    print(mapped[near:near + 64].hex(), flush=True)
else:
    print("mapped", flush=True)
sys.stdin.readline()
print(mapped[far:far + 64].hex(), flush=True)
"""

LOOPING_READER = """
import hashlib, os, sys
path, start, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen = set()
fd = os.open(path, os.O_RDONLY)
print("ready", flush=True)
os.set_blocking(0, False)
while sys.stdin.readline() == "":
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        # All of it: the kernel returns what it has when an error comes after it.
        data = b""
        while len(data) < length and (part := os.pread(fd, length - len(data), start + len(data))):
            data += part
        seen.add(hashlib.sha256(data).hexdigest())
    except OSError as error:
        if error.errno not in seen:
            print("refused", flush=True)
        seen.add(error.errno)
print(*seen, flush=True)
"""


class LiveChanges(TestCase):
    """A set of three shards with one tensor each; the tests change the second one."""

    def setUp(self):
        super().setUp()
        self.source = self.tmp / "model"
        self.source.mkdir()
        names = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
        for number, name in enumerate(names, 1):
            self.write(self.source / name, number, number)
        checkpoints.write_weight_map(self.source, {name: [f"t{n}"] for n, name in enumerate(names, 1)})
        (self.source / "config.json").write_text("{}")
        self.shard = self.source / names[1]
        self.old = checkpoints.hf_whole(self.source)
        header = oracle.read_header(self.old)
        self.parts = {
            name: [header.data_start + offset for offset in entry["data_offsets"]]
            for name, entry in header.tensors.items()
        }

    def write(self, path, number, seed):
        data = checkpoints.random_bytes(seed, SHARD_LEN)
        checkpoints.write_shard(path, [(f"t{number}", "U8", [SHARD_LEN], data)])

    def mounted(self):
        m = self.enter(Mount(self.source))
        return m, m.path / "model.safetensors"

    def overwrite(self):
        """New bytes of the same length, written into the same file."""
        with open(self.shard, "r+b") as file:
            file.seek(-SHARD_LEN, os.SEEK_END)
            file.write(checkpoints.random_bytes(99, SHARD_LEN))

    def overwrite_and_restore_mtime(self):
        before = self.shard.stat()
        time.sleep(0.02)
        self.overwrite()
        os.utime(self.shard, ns=(before.st_atime_ns, before.st_mtime_ns))

    def truncate(self):
        os.truncate(self.shard, self.shard.stat().st_size - 1000)

    def truncate_to_nothing(self):
        os.truncate(self.shard, 0)

    def grow(self):
        with open(self.shard, "ab") as file:
            file.write(b"more")

    def replacement(self):
        path = self.tmp / "replacement"
        self.write(path, 2, 99)
        return path

    def whole_with_replacement(self):
        return oracle.whole_tensors([*sorted(self.source.glob("model-*"))])

    def read(self, descriptor, name, skip=0, length=200_000):
        start = self.parts[name][0] + skip
        return pread_all(descriptor, length, start), self.old[start : start + length]

    def assert_old(self, descriptor, name, skip=0, length=SHARD_LEN):
        data, expected = self.read(descriptor, name, skip, length)
        self.assertTrue(data == expected, f"{len(data)} other bytes of {name}")

    def refused_read(self, descriptor, name, skip=0):
        """True when the read is refused with EIO; bytes that are returned must be the old ones."""
        try:
            self.assert_old(descriptor, name, skip, 100_000)
        except OSError as error:
            self.assertEqual(error.errno, errno.EIO, error)
            return True
        return False

    def assert_others_stay_right(self, m, descriptor):
        """All pages but the two that hold bytes of the changed shard too: the kernel reads whole pages."""
        for name in ("t1", "t3"):
            start, end = self.parts[name]
            first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
            data = pread_all(descriptor, last - first, first)
            self.assertTrue(data == self.old[first:last], f"other bytes of {name}")
        fresh = self.open(m.path / "config.json")
        self.assertEqual(os.pread(fresh, 100, 0), b"{}")
        self.assertTrue(m.alive(), m.log())

    def changed_before_it_was_read(self, change):
        m, path = self.mounted()
        descriptor = self.open(path)
        change(self)
        for skip in (0, 1_000_000, SHARD_LEN - 100_000):
            self.assertTrue(self.refused_read(descriptor, "t2", skip), f"no EIO at {skip}")
        self.assert_others_stay_right(m, descriptor)
        self.assertTrue(self.refused_read(descriptor, "t2"), "EIO must last")

    def changed_after_it_was_read(self, change):
        m, path = self.mounted()
        descriptor = self.open(path)
        self.assertTrue(pread_all(descriptor, len(self.old), 0) == self.old)
        self.assert_old(descriptor, "t2")
        change(self)
        for skip in (0, 1_000_000, SHARD_LEN - 100_000):
            wait_until(lambda: self.refused_read(descriptor, "t2", skip), NOTICED_SECONDS, "EIO for cached pages")
        self.assert_others_stay_right(m, descriptor)

    def opened_after_the_change(self, change):
        m, path = self.mounted()
        self.assertTrue(path.read_bytes() == self.old)
        change(self)
        valid = change in (LiveChanges.overwrite, LiveChanges.overwrite_and_restore_mtime)
        new = self.whole_with_replacement() if valid else None

        def settled():
            data = self.whole(path)
            self.assertTrue(data in (None, self.old, new), "a mix of old and new bytes")
            return data == new

        wait_until(settled, NOTICED_SECONDS, "a new reader gets the new bytes, or none where the set is not whole")
        self.assertTrue(m.alive())

    def test_a_change_is_logged_with_the_name_of_the_shard(self):
        m, path = self.mounted()
        descriptor = self.open(path)
        self.truncate()
        for _ in range(3):
            self.assertTrue(self.refused_read(descriptor, "t2"))
        m.wait_for_log(self.shard.name)

    def test_a_truncated_column_shard_gives_eio_for_the_rows_it_takes_part_in(self):
        source = checkpoints.column_wise(self.tmp / "dcp")
        expected = oracle.from_dcp(source)
        with Mount(source) as m, open(m.path / "model.safetensors", "rb") as file:
            os.truncate(source / checkpoints.dcp_name(3), 2000)
            with self.assertRaises(OSError) as caught:
                pread_all(file.fileno(), 100_000, 500_000)
            self.assertEqual(caught.exception.errno, errno.EIO)
            self.assertEqual(os.pread(file.fileno(), 4096, 0), expected[:4096])

    def test_an_unlinked_shard_is_still_there_for_open_handles_and_not_for_new_ones(self):
        m, path = self.mounted()
        descriptor = self.open(path)
        self.shard.unlink()
        self.assert_old(descriptor, "t2")
        self.assert_others_stay_right(m, descriptor)
        wait_until(lambda: self.whole(path) is None, NOTICED_SECONDS, "a new open is refused")
        self.assert_old(descriptor, "t2")

    def whole(self, path):
        """The file's bytes by a new open, or None when that is refused."""
        try:
            return path.read_bytes()
        except OSError:
            return None

    def assert_new_opens_see_the_new_shard(self, path):
        new = self.whole_with_replacement()

        def settled():
            data = self.whole(path)
            self.assertTrue(data is None or data in (self.old, new), "a mix of old and new bytes")
            return data != self.old

        wait_until(settled, NOTICED_SECONDS, "new opens stop seeing the old file")

    def replaced(self, replace, read_before):
        m, path = self.mounted()
        descriptor = self.open(path)
        if read_before:
            self.assertTrue(path.read_bytes() == self.old)
        replace()
        self.assert_old(descriptor, "t2")
        self.assert_new_opens_see_the_new_shard(path)
        self.assert_old(descriptor, "t2")
        self.assert_others_stay_right(m, descriptor)

    def test_a_replaced_shard_stays_old_for_open_handles_and_is_new_or_refused_for_new_ones(self):
        self.replaced(lambda: os.replace(self.replacement(), self.shard), read_before=False)

    def test_a_replaced_shard_that_was_read_before_is_never_mixed(self):
        self.replaced(lambda: os.replace(self.replacement(), self.shard), read_before=True)

    def test_a_shard_renamed_away_and_made_again_is_never_mixed(self):
        def replace():
            self.shard.rename(self.tmp / "away")
            self.write(self.shard, 2, 99)

        self.replaced(replace, read_before=False)

    def test_chmod_of_a_shard_does_not_break_reads(self):
        m, path = self.mounted()
        descriptor = self.open(path)
        self.assert_old(descriptor, "t2", 0, 4096)
        time.sleep(0.02)
        self.shard.chmod(0o600)
        self.assert_old(descriptor, "t2", 1_000_000)
        self.shard.chmod(0o644)
        self.assert_old(descriptor, "t2")
        self.assertTrue(self.whole(path) == self.old)
        self.assert_others_stay_right(m, descriptor)

    def test_reading_a_shard_by_others_does_not_break_reads(self):
        _, path = self.mounted()
        descriptor = self.open(path)
        self.shard.read_bytes()
        self.assert_old(descriptor, "t2")

    def mapped_reader(self, change, touched):
        """A mapping made before the change, of which one page was touched or none, and then another."""
        m, path = self.mounted()
        descriptor = self.open(path)
        near = self.parts["t2"][0] if touched else 0
        far = self.parts["t2"][1] - 64
        with Child(MAPPED_READER, path, far, near) as child:
            first = child.line()
            self.assertIn(first, ("mapped", self.old[near : near + 64].hex()))
            change(self)
            child.tell()
            code, out, err = child.finish()
        if code != -signal.SIGBUS:
            self.assertEqual((code, out.strip()), (0, self.old[far : far + 64].hex()), err)
        self.assert_others_stay_right(m, descriptor)

    def test_a_new_mapping_of_a_truncated_shard_is_refused(self):
        m, path = self.mounted()
        self.assertTrue(path.read_bytes() == self.old)
        self.truncate_to_nothing()
        start = self.parts["t2"][0]

        def refused():
            with Child(MAPPED_READER, path, start, start) as child:
                child.tell()
                code, out, err = child.finish()
            if code == 0:
                self.assertEqual(set(out.split()), {self.old[start : start + 64].hex()})
            return code in (-signal.SIGBUS, 1)

        wait_until(refused, NOTICED_SECONDS, "SIGBUS or a refused open")
        self.assertTrue(m.alive())

    def test_a_reader_in_a_loop_sees_old_bytes_or_eio_and_nothing_else(self):
        _, path = self.mounted()
        start, length = self.parts["t2"][0], 500_000
        with Child(LOOPING_READER, path, start, length) as child:
            self.assertEqual(child.line(), "ready")
            time.sleep(0.2)
            self.overwrite()
            self.assertEqual(child.line(), "refused")
            # It goes on for some rounds, which must not get other bytes either.
            time.sleep(0.3)
            child.tell("stop")
            code, out, err = child.finish()
        self.assertEqual(code, 0, err)
        old = oracle.sha256(self.old[start : start + length])
        self.assertLessEqual(set(out.split()), {old, str(errno.EIO)})
        self.assertIn(str(errno.EIO), out.split())

    # A write through a mapping tells nobody: no event came, and the kernel's cached pages of the old
    # bytes were served beside new ones.
    def test_a_shard_changed_through_a_mapping_gives_eio_soon(self):
        whole, path = self.old, self.mounted()[1]
        descriptor = self.open(path)
        self.assert_same(pread_all(descriptor, len(whole), 0), whole)
        self.change_through_a_mapping(self.shard)
        start = self.parts["t2"][0] + 10 * PAGE
        deadline = time.monotonic() + 4
        wait_until(lambda: self.reads_fail(descriptor, start, whole), 20, "EIO by the open handle")
        left = max(deadline - time.monotonic(), 0.1)
        new = checkpoints.hf_whole(self.source)
        wait_until(lambda: self.whole_or_none(path) == new, left, "the new bytes by a new open")
        for tensor in ("t1", "t3"):
            first, last = self.parts[tensor]
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


def for_each_change():
    changes = {
        "a_truncated_shard": LiveChanges.truncate,
        "a_shard_truncated_to_nothing": LiveChanges.truncate_to_nothing,
        "a_grown_shard": LiveChanges.grow,
        "a_shard_overwritten_in_place": LiveChanges.overwrite,
        "a_shard_overwritten_with_its_mtime_restored": LiveChanges.overwrite_and_restore_mtime,
    }
    claims = {
        "gives_eio_and_the_rest_stays_right": LiveChanges.changed_before_it_was_read,
        "gives_eio_soon_when_it_was_read_before": LiveChanges.changed_after_it_was_read,
        "is_new_or_refused_to_new_readers": LiveChanges.opened_after_the_change,
    }
    for what, change in changes.items():
        for claim, check in claims.items():
            setattr(LiveChanges, f"test_{what}_{claim}", lambda self, h=change, c=check: c(self, h))
        for touched in (False, True):
            name = f"test_{what}_gives_a_mapping_{'that_was_touched_' if touched else ''}sigbus_or_old_bytes"
            setattr(LiveChanges, name, lambda self, h=change, t=touched: self.mapped_reader(h, t))


for_each_change()
