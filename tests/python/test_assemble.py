"""`-o assemble=DIR`: hot files are written once into DIR, and later opens are served by the kernel from there."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import unittest
from pathlib import Path

import checkpoints
import oracle
from checkpoints import numbered_set, overwrite, shard_name, write_one
from faults import FaultFs, status_of
from mounts import Child, Mount, MountFailed, TestCase, is_root, needs_root, run, stop_process, tensorfs, wait_until

FILE = "model.safetensors"

# Reads an inherited descriptor to the end and prints the hash of what it read.
HASH = """
import hashlib, os, sys
descriptor, digest, at = int(sys.argv[1]), hashlib.sha256(), 0
while data := os.pread(descriptor, 1 << 20, at):
    digest.update(data)
    at += len(data)
print(digest.hexdigest(), flush=True)
"""


def hash_while_stopped(m, path, seconds=10):
    """Hash of the file read while the daemon cannot answer, or None where that needs the daemon: what the kernel has
    cached is dropped first, so that only a file that it serves by itself can be read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        with Child(HASH, descriptor, pass_fds=[descriptor]) as child:
            stop_process(m.pid)
            try:
                return child.line(seconds)
            except TimeoutError:
                return None
            finally:
                m.kill(signal.SIGCONT)
    finally:
        os.close(descriptor)


class Assembled(TestCase):
    def setUp(self):
        super().setUp()
        self.dir = self.tmp / "copies"

    def names(self):
        return sorted(name for name in os.listdir(self.dir) if not name.startswith("."))

    def copies(self):
        """The copies that are complete: those with a record."""
        return [self.dir / name for name in self.names() if name.endswith(".safetensors") and self.record(name)]

    def record(self, name):
        try:
            return json.loads((self.dir / name).with_suffix(".json").read_text())
        except FileNotFoundError:
            return None

    def mount(self, source, *options):
        if not any(option.startswith("assemble-size=") for option in options):
            # Without a size nothing is assembled on a disk of which nine tenths are full.
            options = (*options, "assemble-size=1G")
        return Mount(source, f"assemble={self.dir}", *options)

    def heat(self, m, name=FILE):
        """Reads the file twice; returns its bytes."""
        first = (m.path / name).read_bytes()
        self.assertEqual((m.path / name).read_bytes(), first)
        return first

    def assemble(self, m, name=FILE):
        """Reads the file until it has one copy more; returns its bytes."""
        before = len(self.copies())
        content = self.heat(m, name)
        with self.explained(m):
            wait_until(lambda: len(self.copies()) > before, 30, "the copy is complete")
        return content

    @contextlib.contextmanager
    def explained(self, m):
        """A failure within the block tells what the mount says of its copies."""
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}; {status_of(m)[0]['assemble']}; {m.log()}") from error

    def wait_for_kernel(self, m, name=FILE):
        """Waits until the kernel serves the file by itself; the hash of what it serves."""

        def look():
            # A daemon that is stopped again and again would not get on with the copy.
            time.sleep(0.2)
            return hash_while_stopped(m, m.path / name, 1)

        with self.explained(m):
            return wait_until(look, 20, "the kernel serves the file")


# Opens a file by many threads, each after its last close, and reads it, until a line comes.
OPENER = """
import os, sys, threading
errors, stop = [], False

def work():
    while not stop:
        try:
            descriptor = os.open(sys.argv[1], os.O_RDONLY)
            os.pread(descriptor, 1 << 20, 0)
            os.close(descriptor)
        except OSError as error:
            errors.append(str(error))
            return

threads = [threading.Thread(target=work) for _ in range(8)]
[thread.start() for thread in threads]
sys.stdin.readline()
stop = True
[thread.join() for thread in threads]
print(errors[0] if errors else "no error", flush=True)
"""


@needs_root
class Told(Assembled):
    def test_status_answers_while_the_folder_does_not(self):
        # The way to the folder leads through a file system that stalls on command.
        (self.tmp / "behind/copies").mkdir(parents=True)
        faults = self.enter(FaultFs(self.tmp / "behind"))
        self.dir = faults.path / "copies"
        self.assert_done(run("mount", "-t", "tmpfs", "-o", "mode=0700", "copies", self.dir))
        self.addCleanup(run, "umount", self.dir)
        with self.mount(numbered_set(self.tmp / "ck", 1)) as m, faults.lifted():
            before = status_of(m)[0]["assemble"]
            self.assertEqual((before["stalled"], before["dir"]), (False, str(self.dir)))
            faults.tell("stall-lookup", "copies")
            for _ in range(3):
                one = status_of(m)[0]
                self.assertEqual((one["state"], one["assemble"]["stalled"]), ("running", True))
                self.assertEqual(one["assemble"]["budget"], before["budget"])
            faults.tell("ok")
            wait_until(lambda: not status_of(m)[0]["assemble"]["stalled"], 20, "the folder answers again")


@needs_root
class ByTheKernel(Assembled):
    def test_a_hot_file_is_served_by_the_kernel_with_the_same_bytes(self):
        sources = {"hf": checkpoints.hf_set, "columns": checkpoints.column_wise, "grid": checkpoints.grid_2d}
        for name, make in sources.items():
            source = self.tmp / name
            make(source)
            with self.subTest(name), self.mount(source) as m:
                self.assertIsNone(hash_while_stopped(m, m.path / FILE, 0.5), "nothing is assembled yet")
                content = self.assemble(m)
                self.assertEqual(self.wait_for_kernel(m), oracle.sha256(content))
                self.assertEqual((m.path / FILE).read_bytes(), content)
                self.assertEqual((m.path / FILE).stat().st_size, len(content))

    def test_a_remount_uses_the_copy_and_does_not_write_it_again(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            content = self.assemble(m)
        [copy] = self.copies()
        before = copy.stat()
        with self.mount(source) as m:
            self.assertEqual(hash_while_stopped(m, m.path / FILE), oracle.sha256(content))
            self.assertEqual(self.copies(), [copy])
        after = copy.stat()
        self.assertEqual((before.st_ino, before.st_mtime_ns), (after.st_ino, after.st_mtime_ns))

    def test_files_open_before_and_after_the_copy_was_made_give_the_same_bytes(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            with open(m.path / FILE, "rb") as early:
                content = self.assemble(m)
                # The kernel takes one way at a time: an open that mixed them would fail.
                with open(m.path / FILE, "rb") as late:
                    self.assertEqual(late.read(), content)
                    self.assertEqual(early.read(), content)
            self.assertEqual(self.wait_for_kernel(m), oracle.sha256(content))

    def test_a_replaced_source_is_shown_and_never_the_old_copy(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            old = self.assemble(m)
            self.wait_for_kernel(m)
            with open(m.path / FILE, "rb") as held:
                write_one(source / "new", "t1", 5)
                os.replace(source / "new", source / shard_name(1, 3))
                new = wait_until(lambda: self.other_than(old, m), 20, "the new content is shown")
                self.assertEqual(held.read(), old)
            self.assertIn(checkpoints.random_bytes(5, 1000), new)
            self.assertEqual(self.assemble(m), new)
            self.assertEqual(self.wait_for_kernel(m), oracle.sha256(new))

    def other_than(self, old, m):
        try:
            content = (m.path / FILE).read_bytes()
        except OSError:
            return None
        return content if content != old else None

    def test_a_source_replaced_between_two_mounts_is_shown_and_never_the_old_copy(self):
        for how in ("in place", "renamed", "times set back"):
            source = numbered_set(self.tmp / how, 1)
            shard = source / shard_name(2, 3)
            with self.subTest(how):
                with self.mount(source) as m:
                    old = self.assemble(m)
                stat = shard.stat()
                if how == "renamed":
                    write_one(source / "new", "t2", 7)
                    os.replace(source / "new", shard)
                else:
                    overwrite(shard)
                if how == "times set back":
                    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                with self.mount(source) as m:
                    new = self.heat(m)
                    self.assertNotEqual(new, old)
                    self.assertEqual(self.wait_for_kernel(m), oracle.sha256(new))

    def test_a_corrupted_copy_is_not_served(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            content = self.assemble(m)
            self.wait_for_kernel(m)
            [copy] = self.copies()
            self.flip(copy)
            # Until the kernel has let go of the handle before, an open is refused.
            found = wait_until(lambda: self.bytes_or_none(m), 20, "the file can be opened")
            self.assertEqual(found, content)
            wait_until(lambda: not copy.exists(), 20, "the corrupted copy is removed")

    # An open that looked for the copy just before another one found it got EIO.
    def test_opens_while_the_copy_becomes_ready_all_succeed(self):
        source = numbered_set(self.tmp / "ck", 1)
        for _ in range(5):
            with self.mount(source) as m, Child(OPENER, m.path / FILE) as opener:
                wait_until(self.copies, 30, "the copy is complete")
                time.sleep(0.2)
                code, out, err = opener.finish(30)
                self.assertEqual((code, out.splitlines()[-1:]), (0, ["no error"]), err + m.log())
            for path in self.dir.iterdir():
                path.unlink()

    # An open while another reader had it open got the corrupted bytes.
    def test_a_copy_corrupted_while_it_is_open_is_opened_by_nobody_else(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            content = self.assemble(m)
            self.wait_for_kernel(m)
            with open(m.path / FILE, "rb") as held:
                held.read(1)
                [copy] = self.copies()
                self.flip(copy)
                with self.assertRaises(OSError):
                    (m.path / FILE).read_bytes()
            wait_until(lambda: self.bytes_or_none(m) == content, 20, "the sources are read again")

    def bytes_or_none(self, m):
        try:
            return (m.path / FILE).read_bytes()
        except OSError:
            return None

    def test_a_copy_corrupted_between_two_mounts_is_not_served(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            content = self.assemble(m)
        [copy] = self.copies()
        self.flip(copy)
        with self.mount(source) as m:
            self.assertEqual(self.heat(m), content)
            wait_until(lambda: not copy.exists(), 20, "the corrupted copy is removed")

    def flip(self, path):
        """Changes one byte and sets the modification time back."""
        stat = path.stat()
        with open(path, "r+b") as file:
            file.seek(stat.st_size // 2)
            byte = file.read(1)[0]
            file.seek(stat.st_size // 2)
            file.write(bytes([byte ^ 1]))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def test_two_mounts_share_the_folder_and_its_copies(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as first, self.mount(source) as second:
            content = self.assemble(first)
            self.heat(second)
            for m in (first, second):
                self.assertEqual(self.wait_for_kernel(m), oracle.sha256(content))
        self.assertEqual(len(self.names()), 2)

    def test_a_copy_that_is_open_is_not_evicted(self):
        sources = [numbered_set(self.tmp / f"ck{seed}", seed) for seed in (1, 2)]
        with self.mount(sources[0]) as m:
            length = len(self.assemble(m))
            self.wait_for_kernel(m)
            size = f"assemble-size={length * 3 // 2}"
            with open(m.path / FILE, "rb") as held:
                [kept] = self.copies()
                with self.mount(sources[1], size) as other:
                    self.heat(other)
                    wait_until(lambda: "not assembled" in other.log(), 20, "it is said that there is no room")
                    self.assertEqual(self.copies(), [kept])
                self.assertEqual(len(held.read()), length)
            with self.mount(sources[1], size) as other:
                self.heat(other)
                wait_until(lambda: self.copies() and kept not in self.copies(), 20, "the old copy made room")


class NeverInTheWay(Assembled):
    def test_a_folder_that_is_no_place_for_copies_is_refused(self):
        source = numbered_set(self.tmp / "ck", 1)
        full = self.tmp / "full"
        full.mkdir()
        (full / "thesis.tex").write_text("")
        shared = self.tmp / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        for folder in (full, shared, source / "copies", self.tmp / "none" / "copies", source / "config.json"):
            with self.subTest(folder), self.assertRaises(MountFailed) as failed:
                with Mount(source, f"assemble={folder}"):
                    pass
            self.assertEqual(len(failed.exception.stderr.strip().splitlines()), 1, failed.exception.stderr)
        self.assertFalse((source / "copies").exists())
        self.assertEqual(os.listdir(full), ["thesis.tex"])
        inside = self.tmp / "mnt"
        (inside / "copies").mkdir(parents=True)
        outcome = tensorfs("mount", source, inside, "-o", f"assemble={inside / 'copies'}")
        self.assert_refused(outcome)
        self.assert_not_mounted(inside)

    def test_a_folder_in_one_that_is_not_there_is_refused_with_what_to_do(self):
        source, parent = numbered_set(self.tmp / "ck", 1), self.tmp / "none"
        with self.assertRaises(MountFailed) as failed, Mount(source, f"assemble={parent}/copies"):
            pass
        self.assertIn(f"assemble={parent}/copies: {parent}: No such file or directory", failed.exception.stderr)
        self.assertIn("make those before it", failed.exception.stderr)

    def test_a_file_larger_than_the_budget_is_served_as_before(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source, "assemble-size=4K") as m:
            content = self.heat(m)
            self.assertEqual(self.heat(m), content)
            self.assertEqual(self.names(), [])

    def test_a_folder_that_goes_away_fails_no_reader(self):
        source = numbered_set(self.tmp / "ck", 1)
        with self.mount(source) as m:
            shutil.rmtree(self.dir)
            content = self.heat(m)
            self.assertEqual(self.heat(m), content)

    @needs_root
    def test_a_full_folder_fails_no_reader_and_nothing_half_stays(self):
        source = checkpoints.hf_set(self.tmp / "ck", megabytes=24)
        self.dir.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(self.dir)]
        subprocess.run(command, check=True, timeout=10)
        try:
            with self.mount(source, "assemble-size=1G") as m:
                content = self.heat(m)
                wait_until(lambda: "not assembled" in m.log(), 20, "it is said that there is no room")
                self.assertEqual(self.heat(m), content)
                self.assertEqual(self.names(), [])
                self.assertEqual(m.log().count("not assembled"), 1, m.log())
        finally:
            subprocess.run(["umount", "-l", str(self.dir)], check=True, timeout=10)

    def test_a_killed_daemon_leaves_nothing_half_after_the_next_mount(self):
        source = checkpoints.hf_set(self.tmp / "ck", megabytes=120)
        for _ in range(20):
            with self.mount(source) as m:
                self.wait_for_partial(m)
                m.kill(signal.SIGKILL)
                m.wait_for_exit()
            if self.partials():
                break
            # The copy was complete before the signal came.
            self.remove_copies()
        self.assertTrue(self.partials())
        with self.mount(source):
            self.assertEqual(self.partials(), [])

    def test_a_daemon_that_is_ended_leaves_nothing_half(self):
        source = checkpoints.hf_set(self.tmp / "ck", megabytes=120)
        for how in ("umount", "SIGTERM"):
            self.remove_copies()
            with self.subTest(how), self.mount(source) as m:
                self.wait_for_partial(m)
                if how == "SIGTERM":
                    m.kill(signal.SIGTERM)
                    m.wait_for_exit(15)
                else:
                    self.assert_done(m.umount())
                    m.wait_for_exit(15)
                self.assertEqual(self.partials(), [])

    def partials(self):
        return [name for name in self.names() if ".partial" in name]

    def remove_copies(self):
        for copy in self.dir.glob("*"):
            copy.unlink()

    def wait_for_partial(self, m):
        if not is_root:
            raise unittest.SkipTest("the kernel takes no files from users, so nothing is assembled")
        with open(m.path / FILE, "rb") as file:
            while file.read(1 << 20):
                pass
        with open(m.path / FILE, "rb"):
            # One that is complete already counts, too: it may not take long.
            wait_until(self.names, 20, "a copy is being written")
