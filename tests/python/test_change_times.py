"""Changes that backups, orchestrators and administrators make to shards without touching a byte of them.

None of it may take a checkpoint down: what is open goes on where the kernel shows that nothing was written, and a new
open always works. A write that hides behind the same change of times is never mixed with what was read before it.
"""

import concurrent.futures
import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import checkpoints
from checkpoints import SHARD_LEN, numbered_set, shard_name
from faults import FaultFs, status_of, without_inotify, without_statx
from mounts import BIN, Mount, TestCase, detach, needs_root, pread_all, tensorfs, wait_until

FILE = "model.safetensors"
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_NODUMP_FL = 0x80086601, 0x40086602, 0x40


def link_and_unlink(shard):
    other = shard.with_name("link")
    os.link(shard, other)
    other.unlink()


def move_away_and_back(shard):
    shard.rename(shard.with_name("away"))
    shard.with_name("away").rename(shard)


def copy_with_links_and_remove(shard):
    copy = shard.parent.with_name(shard.parent.name + "-copy")
    subprocess.run(["cp", "-al", shard.parent, copy], check=True)
    shutil.rmtree(copy)


@contextlib.contextmanager
def where_the_file_system_can():
    """An older tmpfs has neither attributes nor flags."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise


def set_an_attribute(shard):
    with where_the_file_system_can():
        os.setxattr(shard, "user.tensorfs.test", b"1")


def set_an_inode_flag(shard):
    with where_the_file_system_can(), open(shard, "rb") as file:
        flags = struct.unpack("i", fcntl.ioctl(file, FS_IOC_GETFLAGS, b"\0" * 4))[0]
        fcntl.ioctl(file, FS_IOC_SETFLAGS, struct.pack("i", flags ^ FS_NODUMP_FL))


def set_the_same_mode(shard):
    shard.chmod(shard.stat().st_mode & 0o7777)


def set_the_same_owner(shard):
    os.chown(shard, shard.stat().st_uid, shard.stat().st_gid)


def set_the_access_time(shard):
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns))


def all_of_it(shard):
    for change in (copy_with_links_and_remove, set_the_same_owner, set_an_attribute, move_away_and_back):
        change(shard)


CHANGES = [
    link_and_unlink,
    move_away_and_back,
    copy_with_links_and_remove,
    set_an_attribute,
    set_an_inode_flag,
    set_the_same_mode,
    set_the_same_owner,
    set_the_access_time,
    all_of_it,
]


def write_in_place(shard, path=None):
    """New bytes at the end, and the modification time put back."""
    before = shard.stat()
    with open(path or shard, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(b"N" * 1000)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_under_another_name(shard):
    other = shard.parent.with_name("elsewhere")
    os.link(shard, other)
    write_in_place(shard, other)
    other.unlink()


def write_through_a_mapping(shard):
    before = shard.stat()
    with open(shard, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[-1000:] = b"N" * 1000
        mapped.flush()
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        time.sleep(0.1)


HIDDEN_WRITES = [write_in_place, write_under_another_name, write_through_a_mapping]


def reads_fail(test, file, whole):
    """True when `file` is refused with EIO; what it reads has to be `whole`."""
    try:
        test.assertEqual(pread_all(file.fileno(), len(whole), 0), whole)
    except OSError as error:
        test.assertEqual(error.errno, errno.EIO)
        return True


class ChangeTimes(TestCase):
    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "ck", 1)
        self.shard = self.source / shard_name(2, 3)
        self.whole = checkpoints.hf_whole(self.source)
        # The kernel's time of a change stays the same for some milliseconds.
        time.sleep(0.02)

    def read(self, path):
        try:
            return path.read_bytes()
        except OSError as error:
            self.assertIn(error.errno, (errno.EIO, errno.ESTALE, errno.ENOENT))
            return None

    def assert_opens(self, path, whole, what):
        wait_until(lambda: self.read(path) == whole, 20, f"a new open reads all bytes after {what}")
        for _ in range(3):
            self.assertEqual(self.read(path), whole, what)

    def test_a_change_of_attributes_while_nobody_reads_takes_nothing_down(self):
        with Mount(self.source) as m:
            for change in CHANGES:
                with self.subTest(change.__name__):
                    self.assert_opens(m.path / FILE, self.whole, "nothing")
                    change(self.shard)
                    self.assert_opens(m.path / FILE, self.whole, change.__name__)

    def test_files_that_stand_as_they_are_and_those_behind_checksums_stay_up_too(self):
        one = numbered_set(self.tmp / "one", 1, total=1, with_map=False)
        (one / shard_name(1, 1)).rename(one / FILE)
        self.assertEqual(tensorfs("verify", self.source).code, 0)
        self.assertEqual(tensorfs("verify", one).code, 0)
        for source, shown, shard, *options in (
            (one, FILE, one / FILE),
            (one, FILE, one / FILE, "passthrough=never"),
            (one, FILE, one / FILE, "verify=read"),
            (self.source, self.shard.name, self.shard, "layout=original"),
            (self.source, self.shard.name, self.shard, "layout=original", "passthrough=never"),
            (self.source, FILE, self.shard, "verify=read"),
            (self.source, FILE, self.shard, "index-dir=none"),
        ):
            with Mount(source, *options) as m:
                whole = (m.path / shown).read_bytes()
                for change in CHANGES:
                    with self.subTest(change.__name__, options=options, shown=shown):
                        with open(m.path / shown, "rb") as file:
                            file.read(100_000)
                            change(shard)
                            self.assertEqual(pread_all(file.fileno(), len(whole), 0), whole)
                        change(shard)
                        self.assert_opens(m.path / shown, whole, change.__name__)

    def open_while_attributes_change(self, goes_on, **popen):
        with Mount(self.source, **popen) as m:
            for change in CHANGES:
                with self.subTest(change.__name__), open(m.path / FILE, "rb") as file:
                    pread_all(file.fileno(), 100_000, 0)
                    change(self.shard)
                    time.sleep(0.05)
                    try:
                        read = pread_all(file.fileno(), len(self.whole), 0)
                    except OSError as error:
                        self.assertFalse(goes_on, f"{change.__name__}: {error}")
                        self.assertEqual(error.errno, errno.EIO)
                    else:
                        self.assertEqual(read, self.whole)
                    self.assert_opens(m.path / FILE, self.whole, change.__name__)

    def test_an_open_file_goes_on_after_a_change_of_attributes(self):
        self.open_while_attributes_change(goes_on=True)

    # The kernel does not tell such a daemon whether somebody has the shard open for writing.
    @needs_root
    def test_a_daemon_that_may_not_ask_for_writers_opens_shards_again_after_a_change_of_attributes(self):
        for shard in self.source.iterdir():
            os.chown(shard, 65534, 65534)
        self.open_while_attributes_change(goes_on=False, binary=self.without_leases())

    def without_leases(self):
        """A daemon that may take no leases on the files of others."""
        binary = self.tmp / "tensorfs"
        binary.write_text(f'#!/bin/sh\nexec setpriv --bounding-set -lease "{BIN}" "$@"\n')
        binary.chmod(0o755)
        return binary

    def test_a_daemon_without_inotify_opens_shards_again_after_a_change_of_attributes(self):
        self.open_while_attributes_change(goes_on=False, preexec_fn=without_inotify)

    def test_a_mapping_goes_on_after_a_backup_with_hard_links(self):
        with Mount(self.source) as m, open(m.path / FILE, "rb") as file:
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                self.assertEqual(mapped[:1000], self.whole[:1000])
                all_of_it(self.shard)
                time.sleep(1.5)
                self.assertEqual(mapped[:], self.whole)
            self.assertNotIn("while it was in use", m.log())

    def test_a_write_that_hides_behind_its_times_is_not_mixed_and_a_new_open_shows_it(self):
        for number, write in enumerate(HIDDEN_WRITES):
            with self.subTest(write.__name__):
                source = numbered_set(self.tmp / f"ck{number}", 1)
                shard = source / shard_name(2, 3)
                with Mount(source) as m, open(m.path / FILE, "rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    self.assertEqual(pread_all(file.fileno(), len(self.whole), 0), self.whole)
                    time.sleep(0.02)
                    write(shard)
                    new = checkpoints.hf_whole(source)
                    self.assertNotEqual(new, self.whole)

                    def refused(file=file):
                        return reads_fail(self, file, self.whole)

                    wait_until(refused, 20, "what is open fails")
                    self.assert_opens(m.path / FILE, new, write.__name__)
                    self.assertNotEqual((m.path / FILE).stat().st_ino, inode)
                    self.assertTrue(refused(), "what was open before never comes back")

    def test_a_hidden_write_between_two_opens_leaves_no_old_page(self):
        for number, write in enumerate(HIDDEN_WRITES):
            with self.subTest(write.__name__):
                source = numbered_set(self.tmp / f"ck{number}", 1)
                with Mount(source) as m:
                    self.assertEqual((m.path / FILE).read_bytes(), self.whole)
                    time.sleep(0.02)
                    write(source / shard_name(2, 3))
                    new = checkpoints.hf_whole(source)
                    wait_until(lambda: self.read(m.path / FILE) == new, 20, "the new bytes")

    # The kernel notes no time for a store to a page that is dirty already. tmpfs never does.
    def test_stores_to_pages_that_were_dirty_before_the_mount_are_not_mixed(self):
        self.skip_on_tmpfs()
        with open(self.shard, "r+b") as shard, mmap.mmap(shard.fileno(), 0) as mapped:
            mapped[-1:] = b"1"
            whole = checkpoints.hf_whole(self.source)
            with Mount(self.source) as m, open(m.path / FILE, "rb") as file:
                self.assertEqual(pread_all(file.fileno(), 100_000, 0), whole[:100_000])
                mapped[-1:] = b"2"

                def refused(file=file):
                    return reads_fail(self, file, whole)

                wait_until(refused, 20, "what is open fails")

    # Kernels that do not tell whether there is a writer, and kernels that tell of no event.
    @needs_root
    def test_stores_to_dirty_pages_are_noted_without_leases_and_without_inotify(self):
        self.skip_on_tmpfs()
        for number, popen in enumerate(({"binary": self.without_leases()}, {"preexec_fn": without_inotify})):
            with self.subTest(*popen):
                source = numbered_set(self.tmp / f"ck{number}", 1)
                shard = source / shard_name(2, 3)
                os.chown(shard, 65534, 65534)
                with open(shard, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
                    mapped[-1:] = b"1"
                    with Mount(source, **popen) as m:
                        (m.path / FILE).read_bytes()
                        mapped[-1:] = b"2"
                        new = checkpoints.hf_whole(source)
                        wait_until(lambda m=m, new=new: self.read(m.path / FILE) == new, 20, "the new byte")

    # Nobody was there to see the write, and the attribute seemed to explain the change time.
    def test_a_hidden_write_beside_a_change_of_attributes_leaves_no_old_page(self):
        def chmod(shard):
            shard.chmod(0o600)

        def link(shard):
            os.link(shard, shard.parent.with_name(shard.parent.name + "-link"))

        for change in (chmod, link):
            with self.subTest(change.__name__):
                source = numbered_set(self.tmp / change.__name__, 1)
                shard = source / shard_name(2, 3)
                with Mount(source) as m:
                    with open(m.path / FILE, "rb") as file:
                        file.read(100_000)
                    time.sleep(0.02)
                    write_in_place(shard)
                    change(shard)
                    new = checkpoints.hf_whole(source)
                    for _ in range(3):
                        self.assertEqual((m.path / FILE).read_bytes(), new)

    # A set whose shard changed while it was proved was refused, and nothing asked again.
    def test_a_change_of_attributes_during_the_proof_refuses_nothing(self):
        tree = self.tmp / "tree"
        shards = [numbered_set(tree / name, 1) / shard_name(2, 3) for name in ("a", "b")]
        with FaultFs(tree) as faults, Mount(faults.path) as m, faults.lifted():
            (m.path / "a" / FILE).read_bytes()
            relative = shards[1].relative_to(tree)
            faults.tell("stall", relative)
            looked = subprocess.Popen(["ls", m.path / "b"], stdout=subprocess.PIPE)
            wait_until(lambda: faults.parked(relative), 20, "the proof waits")
            link_and_unlink(shards[1])
            faults.tell("resume")
            self.assertIn(FILE.encode(), looked.communicate()[0].split())
            self.assertEqual((m.path / "b" / FILE).read_bytes(), self.whole)

    def test_new_opens_work_while_attributes_change_all_the_time(self):
        with Mount(self.source) as m:
            for number in range(100):
                self.shard.chmod(0o600 if number % 2 else 0o644)
                set_the_same_owner(self.shard)
                self.assertEqual((m.path / FILE).read_bytes(), self.whole)

    def test_a_program_that_opens_a_shard_for_writing_and_writes_nothing_is_no_writer(self):
        self.skip_on_tmpfs()
        with Mount(self.source) as m, open(m.path / FILE, "rb") as file:
            pread_all(file.fileno(), 100_000, 0)
            for _ in range(3):
                open(self.shard, "r+b").close()
                time.sleep(1.2)
                set_an_attribute(self.shard)
                self.assertEqual(pread_all(file.fileno(), len(self.whole), 0), self.whole)

    def test_nothing_is_watched_any_more_once_changed_files_are_closed(self):
        with Mount(self.source) as m:
            for seed in range(5):
                with open(m.path / FILE, "rb") as file:
                    file.read(1000)
                    for number in (1, 2, 3):
                        shard = self.source / shard_name(number, 3)
                        data = checkpoints.random_bytes(seed, SHARD_LEN)
                        checkpoints.write_shard(shard, [(f"t{number}", "U8", [SHARD_LEN], data)])
                    time.sleep(0.1)
            wait_until(lambda: self.watches(m.pid) == 0, 20, "no watch is left")

    def skip_on_tmpfs(self):
        """There the kernel notes no time for a store through a mapping."""
        kind = subprocess.run(["stat", "-f", "-c", "%T", self.tmp], capture_output=True, text=True, check=True).stdout
        if "tmpfs" in kind:
            self.skipTest("the temporary folder is a tmpfs")

    def watches(self, pid):
        count = 0
        for info in Path(f"/proc/{pid}/fdinfo").iterdir():
            # The daemon closes descriptors while they are listed.
            with contextlib.suppress(FileNotFoundError):
                count += info.read_text().count("inotify wd:")
        return count

    def test_a_shard_saved_anew_in_place_is_a_new_version_without_a_new_mount(self):
        with Mount(self.source) as m, open(m.path / FILE, "rb") as file:
            versions = {os.getxattr(m.path / FILE, "user.tensorfs.version")}
            for seed in (5, 6, 7):
                data = checkpoints.random_bytes(seed, SHARD_LEN + seed * 100)
                checkpoints.write_shard(self.shard, [("t2", "U8", [len(data)], data)])
                self.assert_opens(m.path / FILE, checkpoints.hf_whole(self.source), "a save in place")
                versions.add(os.getxattr(m.path / FILE, "user.tensorfs.version"))
                self.assertEqual((m.path / FILE).stat().st_size, len(checkpoints.hf_whole(self.source)))
            self.assertEqual(len(versions), 4)
            with self.assertRaises(OSError) as caught:
                pread_all(file.fileno(), len(self.whole), 0)
            self.assertEqual(caught.exception.errno, errno.EIO)
            # One that is cut short is refused, and comes back with its bytes.
            whole = self.shard.read_bytes()
            self.shard.write_bytes(whole[:-1])
            wait_until(lambda: self.read(m.path / FILE) is None, 20, "it is refused")
            wait_until(lambda: (m.path / "TENSORFS-ERROR.txt").exists(), 20, "the refusal is told")
            self.shard.write_bytes(whole)
            self.assert_opens(m.path / FILE, checkpoints.hf_whole(self.source), "the shard is whole again")


class RemoteSources(TestCase):
    """Sources that something else than this kernel answers for."""

    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "ck", 1)
        self.shard = self.source / shard_name(2, 3)
        self.whole = checkpoints.hf_whole(self.source)

    # An NFS client may take a minute to see that a file has changed, unless it is told to ask.
    def test_a_change_is_seen_soon_although_the_kernel_remembers_what_the_file_was(self):
        with FaultFs(self.source, remembers=3600) as faults, Mount(faults.path) as m:
            with open(m.path / FILE, "rb") as file:
                self.assertEqual(pread_all(file.fileno(), len(self.whole), 0), self.whole)
                write_in_place(self.shard)

                def refused(file=file):
                    return reads_fail(self, file, self.whole)

                wait_until(refused, 20, "what is open fails")

    def test_a_change_of_attributes_takes_nothing_down(self):
        with FaultFs(self.source) as faults, Mount(faults.path) as m:
            for change in CHANGES:
                with self.subTest(change.__name__):
                    self.assertEqual((m.path / FILE).read_bytes(), self.whole)
                    change(self.shard)

                    def same():
                        try:
                            return (m.path / FILE).read_bytes() == self.whole
                        except OSError as error:
                            self.assertIn(error.errno, (errno.EIO, errno.ESTALE, errno.ENOENT))

                    wait_until(same, 20, "a new open reads all bytes")

    def test_a_plain_file_shows_its_size_although_the_kernel_remembers_what_it_was(self):
        log = self.source / "train.log"
        log.write_text("step 0\n")
        with FaultFs(self.source, remembers=3600) as faults, Mount(faults.path) as m:
            self.assertEqual((m.path / "train.log").read_text(), "step 0\n")
            log.write_text("step 0\nstep 1\n")
            wait_until(lambda: (m.path / "train.log").stat().st_size == 14, 20, "its size")

    # Each look took a thread that the stalled source held, until nothing else could be opened.
    def test_plain_files_of_a_stalled_source_keep_nobody_from_the_weights(self):
        for number in range(100):
            (self.source / f"plain{number:02}.txt").write_text("x")
        with FaultFs(self.source) as faults, Mount(faults.path, "io-timeout=2") as m, faults.lifted():
            plain = [os.open(path, os.O_RDONLY) for path in m.path.glob("plain*")]
            time.sleep(1.1)
            faults.tell("stall-getattr", "plain*")
            with concurrent.futures.ThreadPoolExecutor(100) as threads:
                sizes = list(threads.map(lambda file: os.fstat(file).st_size, plain))
            self.assertEqual(sizes, [1] * 100)
            self.assertEqual((m.path / FILE).read_bytes(), self.whole)
            faults.tell("resume")
            for file in plain:
                os.close(file)

    def test_where_statx_is_refused_a_remote_source_is_read_and_a_change_is_seen(self):
        with FaultFs(self.source) as faults, Mount(faults.path, preexec_fn=without_statx) as m:
            self.assertEqual((m.path / FILE).read_bytes(), self.whole)
            write_in_place(self.shard)
            new = checkpoints.hf_whole(self.source)
            wait_until(lambda: (m.path / FILE).read_bytes() == new, 20, "the new bytes")

    # The layers of an overlay decide how it is read: reads by io_uring and looks without a deadline are for
    # local file systems only.
    @needs_root
    def test_an_overlay_over_a_remote_file_system_is_no_local_one(self):
        with FaultFs(self.source) as faults:
            for lower, local in ((faults.path, False), (self.source, True)):
                with self.subTest(local=local), contextlib.ExitStack() as stack:
                    overlay = self.tmp / f"overlay-{local}"
                    overlay.mkdir()
                    options = f"lowerdir={lower}:{self.tmp / 'empty'}"
                    (self.tmp / "empty").mkdir(exist_ok=True)
                    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, overlay], check=True)
                    stack.callback(detach, overlay)
                    above = self.tmp / f"above-{local}"
                    above.mkdir()
                    options = f"lowerdir={overlay}:{self.tmp / 'empty'}"
                    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, above], check=True)
                    stack.callback(detach, above)
                    for source in (overlay, above):
                        with Mount(source) as m:
                            self.assertEqual((m.path / FILE).read_bytes(), self.whole)
                            queues = status_of(m)[0]["engine"]["device_queues"]
                            self.assertEqual([queue["local"] for queue in queues], [local], source)


class PlainFiles(TestCase):
    """Files that no checkpoint depends on show what they are now, also to those who have them open."""

    def setUp(self):
        super().setUp()
        self.source = numbered_set(self.tmp / "ck", 1)
        self.log = self.source / "train.log"
        self.log.write_bytes(b"step 0\n" * 3000)

    def in_each_way(self, check):
        for option in ("passthrough=auto", "passthrough=never"):
            with self.subTest(option), Mount(self.source, option) as m:
                check(m.path / "train.log")

    def test_a_log_that_grows_is_followed_by_whoever_has_it_open(self):
        def check(path):
            with open(path, "rb") as file:
                self.assertEqual(file.read(), self.log.read_bytes())
                inode = path.stat().st_ino
                for step in range(1, 4):
                    with open(self.log, "ab") as log:
                        log.write(b"step %d\n" % step)
                    self.assertEqual(wait_until(file.read, 20, "the line that was added"), b"step %d\n" % step)
                    size = self.log.stat().st_size
                    wait_until(lambda size=size: os.fstat(file.fileno()).st_size == size, 20, "its size")
                self.assertEqual(path.stat().st_ino, inode)

        self.in_each_way(check)

    def test_tail_follows_a_log(self):
        def check(path):
            with subprocess.Popen(["tail", "-n", "1", "-s", "0.1", "-f", path], stdout=subprocess.PIPE) as tail:
                try:
                    self.assertEqual(tail.stdout.readline(), self.log.read_bytes().splitlines(True)[-1])
                    with open(self.log, "ab") as log:
                        log.write(b"the end\n")
                    self.assertEqual(tail.stdout.readline(), b"the end\n")
                finally:
                    tail.kill()

        self.in_each_way(check)

    def test_a_plain_file_written_in_place_shows_its_new_bytes_to_whoever_has_it_open(self):
        def check(path):
            self.log.write_bytes(b"A" * 1_000_000)
            wait_until(lambda: path.read_bytes() == b"A" * 1_000_000, 20, "the first bytes")
            with open(path, "rb", buffering=0) as file:
                self.assertEqual(os.pread(file.fileno(), 100, 500_000), b"A" * 100)
                with open(self.log, "r+b") as log:
                    log.write(b"B" * 1_000_000)
                wait_until(lambda: os.pread(file.fileno(), 100, 500_000) == b"B" * 100, 20, "the new bytes")
                self.log.write_bytes(b"short")
                wait_until(lambda: os.pread(file.fileno(), 100, 0) == b"short", 20, "it is cut short")

        self.in_each_way(check)

    # The one that had followed the file held the only watch.
    def test_who_has_a_plain_file_open_follows_it_after_another_has_closed_it(self):
        def check(path):
            self.log.write_bytes(b"A" * 8192)
            with open(path, "rb", buffering=0) as held:
                for byte in (b"B", b"C", b"D"):
                    time.sleep(0.02)
                    with open(self.log, "r+b") as log:
                        log.write(byte * 8192)
                    wait_until(lambda byte=byte: path.read_bytes() == byte * 8192, 20, "a new open sees it")
                    wait_until(lambda byte=byte: os.pread(held.fileno(), 4, 0) == byte * 4, 20, "it is followed")

        self.in_each_way(check)

    def test_a_log_that_grows_is_no_error_in_the_log_of_the_mount(self):
        with Mount(self.source, "passthrough=never") as m, open(m.path / "train.log", "rb") as file:
            for step in range(3):
                file.read()
                with open(self.log, "ab") as log:
                    log.write(b"step %d\n" % step)
                wait_until(file.read, 20, "the line that was added")
            self.assertNotIn("train.log", m.log())

    def test_a_plain_file_that_is_replaced_keeps_its_bytes_for_whoever_has_it_open(self):
        def check(path):
            old = self.log.read_bytes()
            with open(path, "rb") as file:
                new = self.source / "new"
                new.write_bytes(b"new")
                os.replace(new, self.log)
                wait_until(lambda: path.read_bytes() == b"new", 20, "a new open sees the new file")
                self.assertEqual(os.pread(file.fileno(), len(old), 0), old)
            self.log.write_bytes(old)

        self.in_each_way(check)

    def test_a_file_that_is_written_all_the_time_can_be_read(self):
        writer = "import sys, time\nwhile True:\n open(sys.argv[1], 'ab').write(b'x' * 100)\n time.sleep(0.001)"

        def check(path):
            with subprocess.Popen([sys.executable, "-c", writer, self.log]) as process:
                try:
                    for _ in range(20):
                        with open(path, "rb") as file:
                            while file.read(4096):
                                pass
                finally:
                    process.kill()

        self.in_each_way(check)
