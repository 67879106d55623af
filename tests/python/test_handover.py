"""Restart and upgrade of `tensorfs serve` under readers: their maps and open files go on."""

import fcntl
import json
import mmap
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import checkpoints
from faults import FaultFs
from manifest import by_id
from mounts import BIN, Child, detach, find_mount, needs_root, process_gone, run, wait_until
from services import PATIENCE, ServiceCase, SystemCtl, mount_config
from tensorizer_files import Stored, encrypted_file_of

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source

# Restarts under readers. Each takes less than a second.
ROUNDS = int(os.environ.get("TENSORFS_HANDOVER_ROUNDS", "12"))

# Numbers of linux/fcntl.h, which Python does not have.
F_ADD_SEALS, F_SEAL_WRITE = 1033, 8

# No reader may wait longer, however busy the machine is.
BOUND = 30


# Reads a file in several ways, each on a thread, and compares every byte. Answers each line of its input with its
# figures as JSON. It is a process of its own: a page fault that waits for the mount stops all threads of Python.
READERS = """
import json, mmap, os, sys, threading, time
path, right, ways = sys.argv[1], open(sys.argv[2], "rb").read(), sys.argv[3].split(",")
failures, counts, longest = [], [0] * len(ways), [0.0] * len(ways)

def read(index, way):
    descriptor = os.open(path, os.O_RDONLY)
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    offset = 0
    try:
        while True:
            began = time.monotonic()
            length = min(100_000, len(right) - offset)
            if way == "open":
                os.stat(path), os.listdir(os.path.dirname(path))
                with open(path, "rb") as file:
                    file.seek(offset)
                    data = file.read(length)
            elif way == "mmap":
                mapped.madvise(mmap.MADV_DONTNEED)
                data = mapped[offset : offset + length]
            else:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                data = os.pread(descriptor, length, offset)
            longest[index] = max(longest[index], time.monotonic() - began)
            if data != right[offset : offset + length]:
                raise ValueError(f"wrong bytes at {offset}")
            counts[index] += 1
            offset = (offset + length) % len(right)
    except Exception as error:
        failures.append(f"{way}: {error!r}")

for pair in enumerate(ways):
    threading.Thread(target=read, args=pair, daemon=True).start()
for line in sys.stdin:
    print(json.dumps([failures, counts, longest]), flush=True)
os._exit(0)
"""


# Reads 100 bytes, and prints them.
ONE_READ = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
try:
    print(os.pread(descriptor, 100, int(sys.argv[2])).hex(), flush=True)
except OSError:
    print("error", flush=True)
"""


# Opens a file, and reads 100 bytes of it each time a line comes. A process that starts while nobody serves the mount
# would wait for it, because it closes inherited files.
LATE_READ = """
import os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY)
os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
print("open", flush=True)
for line in sys.stdin:
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        print(os.pread(descriptor, 100, int(sys.argv[2])).hex(), flush=True)
    except OSError:
        print("error", flush=True)
"""


class Readers:
    """`with Readers(path, expected) as readers:` reads all the time until the block ends."""

    def __init__(self, folder, path, expected, ways="pread,mmap,pread,open,mmap"):
        (folder / "expected").write_bytes(expected)
        self._child = Child(READERS, path, folder / "expected", ways)

    def __enter__(self):
        self._child.__enter__()
        self.passes()
        return self

    def __exit__(self, *arguments):
        return self._child.__exit__(*arguments)

    def look(self):
        self._child.tell()
        self.failures, self.counts, self.longest = json.loads(self._child.line(BOUND))
        return self.failures or self.counts

    def passes(self):
        """Waits until each thread has read twice more."""
        self.look()
        before = list(self.counts)

        def have_moved():
            self.look()
            return self.failures or all(now > then + 1 for now, then in zip(self.counts, before, strict=True))

        wait_until(have_moved, PATIENCE, "each reader goes on")


@needs_root
class HandedOver(ServiceCase):
    def setUp(self):
        super().setUp()
        self.source = self.copy(SOURCE, "source")
        self.right = checkpoints.hf_whole(self.source)
        self.a = self.target("a")

    def service(self, options="", **popen):
        service = self.serve(mount_config("a", self.source, self.a, options), **popen)
        service.wait_until_ready()
        return service

    def restart(self, service, **more):
        ready = service.manager.count("READY=1")
        service.restart(**more)
        service.wait_until_ready(ready + 1)

    def check_rounds(self, service, rounds):
        ino = (self.a / FILE).stat().st_ino
        with Readers(self.tmp, self.a / FILE, self.right) as readers:
            for _ in range(rounds):
                before = service.workers()["a"]
                self.restart(service)
                readers.passes()
                self.assertNotEqual(service.workers()["a"], before)
        self.assertEqual(readers.failures, [], service.log())
        self.assertLess(max(readers.longest), BOUND)
        print(f"\n{rounds} restarts: longest wait of a reader {max(readers.longest) * 1000:.0f} ms, {sum(readers.counts)} reads")
        self.assertEqual((self.a / FILE).stat().st_ino, ino)
        self.assertNotIn("lost their content", service.log())
        self.assertNotIn("panicked", service.log())

    def test_readers_go_on_over_restarts_of_the_service(self):
        self.check_rounds(self.service(), ROUNDS)

    def test_readers_go_on_over_restarts_on_a_kernel_that_sends_nothing_twice(self):
        self.check_rounds(self.service(env={"TENSORFS_NO_RESEND": "1"}), ROUNDS // 3)

    def read_afresh(self, held):
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(held, len(self.right), 0)

    def test_an_encrypted_checkpoint_goes_on_with_the_key_read_anew(self):
        key, folder = self.tmp / "key", self.tmp / "encrypted"
        key.write_bytes(bytes(32))
        folder.mkdir()
        data = checkpoints.random_bytes(5, 300_000)
        stored = Stored.of("w", "U8", [len(data)], data)
        (folder / "model.tensors").write_bytes(encrypted_file_of([stored], bytes(32), 1 << 16))
        service = self.serve(mount_config("a", folder, self.a, f"key-file={key}"))
        service.wait_until_ready()
        held = self.open(self.a / FILE)
        self.right = (self.a / FILE).read_bytes()
        self.assertTrue(self.right.endswith(data))
        for _ in range(2):
            self.restart(service)
            self.assert_same(self.read_afresh(held), self.right)
        self.assertNotIn("lost their content", service.log())

    def test_each_restart_takes_the_last_state(self):
        (self.source / "config.json").write_text('{"other": 1}')
        service = self.service()
        held = [self.open(self.a / FILE)]
        for _ in range(3):
            self.restart(service)
            self.assertEqual(service.manager.passed(), [])
            # A worker with an older state would not know this handle, or take it for another one.
            held.append(self.open(self.a / FILE))
            others = [self.open(self.a / "config.json") for _ in range(2)]
            for descriptor in held:
                self.assert_same(self.read_afresh(descriptor), self.right)
            self.assertEqual([os.pread(other, 100, 0) for other in others], [b'{"other": 1}'] * 2)

    def test_a_worker_that_is_killed_after_a_restart_hangs_nobody(self):
        service = self.service()
        held = self.open(self.a / FILE)
        self.restart(service)
        before = service.workers()["a"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: service.workers().get("a", before) != before, PATIENCE, "another worker")
        wait_until(self._reads_new, PATIENCE, "a new mount")
        with self.assertRaises(OSError):
            self.read_afresh(held)

    def test_a_restart_right_after_a_restart_keeps_open_files(self):
        service = self.service()
        held = self.open(self.a / FILE)
        for round_ in range(6):
            service.restart()
            if round_ % 2:
                wait_until(lambda: service.manager.heard() and service.workers(), PATIENCE, "a worker that takes over")
            service.restart()
            wait_until(lambda: service.manager.heard() and service.workers(), PATIENCE, "a worker")
            self.assert_same(self.read_afresh(held), self.right)
        self.restart(service)
        self.assert_same(self.read_afresh(held), self.right)

    def test_a_stop_during_an_upgrade_unmounts(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        service = self.service(binary=binary)
        shutil.copy(BIN, self.tmp / "newer")
        os.replace(self.tmp / "newer", binary)
        service.reload()
        service.wait_for_log("handing over to this version")
        with SystemCtl(service.folder, "stop"):
            self.assertEqual(service.stop(), 0, service.log())
        self.assert_not_mounted(self.a)

    def test_files_that_the_kernel_serves_by_itself_go_on(self):
        one = self.source / "model-00001-of-00003.safetensors"
        shard = one.read_bytes()
        service = self.service("layout=original")
        held = self.open(self.a / one.name)
        self.assert_same(os.pread(held, len(shard), 0), shard)
        for _ in range(2):
            self.restart(service)
            self.assert_same(os.pread(held, len(shard), 0), shard)
            # Another open of the same file joins the mode of the first.
            self.assert_same((self.a / one.name).read_bytes(), shard)

    def test_open_files_keep_their_content_when_the_source_is_replaced_or_deleted(self):
        (self.source / "config.json").write_text('{"old": 1}')
        service = self.service()
        held, text = self.open(self.a / FILE), self.open(self.a / "config.json")
        mapped = mmap.mmap(held, 0, prot=mmap.PROT_READ)
        self.assert_same(mapped[:100], self.right[:100])
        self.assertEqual(os.pread(text, 100, 0), b'{"old": 1}')
        newer = self.copy(SOURCE, "newer")
        for shard in newer.glob("*.safetensors"):
            os.replace(shard, self.source / shard.name)
        (self.source / "config.json").unlink()
        for _ in range(2):
            self.restart(service)
            Path("/proc/sys/vm/drop_caches").write_text("1")
            self.assert_same(os.pread(held, len(self.right), 0), self.right)
            self.assert_same(mapped[:], self.right)
            self.assertEqual(os.pread(text, 100, 0), b'{"old": 1}')
            self.assert_same((self.a / FILE).read_bytes(), checkpoints.hf_whole(self.source))
            wait_until(lambda: not (self.a / "config.json").exists(), PATIENCE, "the deleted file goes")

    def test_open_files_of_views_keep_their_content_when_the_source_is_replaced_and_deleted(self):
        rules, cuts, views = (self.tmp / name for name in ("rules.toml", "cuts.toml", "views.toml"))
        rules.write_text("[[rename]]\nregex = '^model'\nto = 'first'\n")
        cuts.write_text("[[rule]]\nregex = 'q_proj'\ncut = 0\n[[rule]]\nregex = ''\nrepeat = true\n")
        views.write_text("[view.half]\ndtype = 'bf16'\n[view.plain]\n")
        options = ["dtype=f16", "exclude=*q_proj*", f"tp=2,tp-rules={cuts}", f"rename={rules}"]
        options += ["layout=shards=2,dtype=f16", "format=bintensors,dtype=f32", f"views={views}"]
        targets = {self.target(f"view{number}"): words for number, words in enumerate(options)}
        mounts = [mount_config(target.name, self.source, target, words) for target, words in targets.items()]
        service = self.serve("".join(mounts))
        service.wait_until_ready()
        held = {}
        for target, words in targets.items():
            paths = [path for path in target.rglob("*") if path.suffix in (".safetensors", ".bt")]
            self.assertNotEqual(paths, [], words)
            held.update({path: (self.open(path), path.read_bytes()) for path in paths})

        def check():
            for path, (descriptor, expected) in held.items():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self.assert_same(os.pread(descriptor, len(expected), 0), expected, path)

        newer = self.copy(SOURCE, "newer")
        for shard in newer.glob("*.safetensors"):
            os.replace(shard, self.source / shard.name)
        self.restart(service)
        check()
        shutil.rmtree(self.source)
        self.source.mkdir()
        self.restart(service)
        check()
        self.assertNotIn("lost their content", service.log())

    def test_the_warning_about_lost_files_names_the_mount_and_the_files(self):
        key, folder = self.tmp / "key", self.tmp / "encrypted"
        key.write_bytes(bytes(32))
        folder.mkdir()
        stored = Stored.of("w", "U8", [300_000], checkpoints.random_bytes(5, 300_000))
        (folder / "model.tensors").write_bytes(encrypted_file_of([stored], bytes(32), 1 << 16))
        service = self.serve(mount_config("a", folder, self.a, f"key-file={key}"))
        service.wait_until_ready()
        held = self.open(self.a / FILE)
        (folder / "model.tensors").unlink()
        self.restart(service)
        service.wait_for_log(f"{self.a}: 1 of 1 open handles lost their content: their reads get errors; files: {FILE}")
        with self.assertRaises(OSError):
            self.read_afresh(held)

    def test_a_source_that_was_written_to_between_two_processes_is_not_mixed(self):
        service = self.service()
        held = self.open(self.a / FILE)
        self.assert_same(os.pread(held, 1000, 0), self.right[:1000])
        shard = next(self.source.glob("model-00002*.safetensors"))
        with SystemCtl(service.folder, "restart"):
            service.process.terminate()
            service._wait()
        data = bytearray(shard.read_bytes())
        data[-1] ^= 255
        times = shard.stat()
        shard.write_bytes(data)
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        service.start()
        service.wait_until_ready(2)
        Path("/proc/sys/vm/drop_caches").write_text("1")
        with self.assertRaises(OSError):
            os.pread(held, len(self.right), 0)
        wait_until(lambda: self._reads_new(), PATIENCE, "a new open has the new bytes")

    def test_a_change_of_a_file_that_two_processes_did_not_list_is_seen(self):
        shutil.rmtree(self.source)
        parts = {name: self.copy(SOURCE, f"source/{name}") for name in ("a", "b", "z")}
        notes = parts["b"] / "notes.txt"
        notes.write_text("old notes")
        os.utime(notes, (1_000_000_000,) * 2)
        service = self.service("passthrough=never")
        shown = self.a / "b"
        self.assert_same((shown / FILE).read_bytes(), self.right)
        self.assertEqual((shown / "notes.txt").read_text(), "old notes")
        for _ in range(2):
            self.restart(service)
        shard = sorted(parts["b"].glob("model-*.safetensors"))[-1]
        for path, offset, data in ((shard, shard.stat().st_size - 64, b"\x55" * 64), (notes, 0, b"new")):
            times = path.stat()
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        def reads_new():
            try:
                return (shown / FILE).read_bytes() == checkpoints.hf_whole(parts["b"])
            except OSError:
                return False

        wait_until(reads_new, PATIENCE, "a new open has the new bytes")
        wait_until(lambda: (shown / "notes.txt").read_text() == "new notes", PATIENCE, "a new open has the new text")

    def test_files_that_are_written_stay_listed(self):
        log = self.source / "training.log"
        log.write_text("one\n")
        service = self.service()
        self.assertEqual((self.a / log.name).read_text(), "one\n")
        self.assert_same((self.a / FILE).read_bytes(), self.right)
        shard = next(self.source.glob("model-00002*.safetensors"))
        with open(log, "a") as writer, open(shard, "r+b"):
            for _ in range(2):
                print("more", file=writer, flush=True)
                self.restart(service)
                names = os.listdir(self.a)
                self.assertIn(log.name, names)
                self.assertIn(FILE, names)

    def _reads_new(self):
        try:
            return (self.a / FILE).read_bytes() == checkpoints.hf_whole(self.source)
        except OSError:
            return False

    def test_an_upgrade_takes_over_at_a_reload(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        service = self.service(binary=binary)
        pid = service.process.pid
        with Readers(self.tmp, self.a / FILE, self.right) as readers:
            for round_ in range(max(3, ROUNDS // 5)):
                before = service.workers()["a"]
                shutil.copy(BIN, self.tmp / "newer")
                os.replace(self.tmp / "newer", binary)
                service.reload()
                service.wait_until_ready(round_ + 2)
                readers.passes()
                worker = service.workers()["a"]
                self.assertNotEqual(worker, before)
                self.assertNotIn(b"TENSORFS_HANDED_OVER", Path(f"/proc/{worker}/environ").read_bytes())
                self.assertEqual(os.stat(f"/proc/{pid}/exe").st_ino, binary.stat().st_ino)
                wait_until(lambda before=before: not Path(f"/proc/{before}").exists(), PATIENCE, "the old worker is collected")
        self.assertEqual(readers.failures, [], service.log())
        print(f"\n{round_ + 1} upgrades: longest wait of a reader {max(readers.longest) * 1000:.0f} ms")

    def test_a_version_that_cannot_take_over_leaves_the_old_one_serving(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        service = self.service(binary=binary)
        before = service.workers()
        held = self.open(self.a / FILE)
        (self.tmp / "newer").write_text('#!/bin/sh\nif [ "$2" = state-version ]; then echo 99; fi\n')
        (self.tmp / "newer").chmod(0o755)
        os.replace(self.tmp / "newer", binary)
        service.reload()
        service.wait_for_log("it keeps the state of mounts in version 99, the running one in version 5")
        service.wait_until_ready(2)
        self.assertEqual(service.workers(), before)
        self.assert_same(os.pread(held, len(self.right), 0), self.right)

    def test_a_restart_with_another_version_ends_the_old_mount_and_mounts_anew(self):
        service = self.service()
        held = self.open(self.a / FILE)
        self.restart(service, TENSORFS_STATE_VERSION="99")
        service.wait_for_log("the running version keeps its state in version 5, this one reads version 99")
        wait_until(self._reads_new, PATIENCE, "a new mount")
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        with self.assertRaises(OSError):
            os.pread(held, 100, len(self.right) - 100)

    def test_a_mount_with_other_options_is_not_taken_over(self):
        service = self.service()
        held = self.open(self.a / FILE)
        service.file.write_text(mount_config("a", self.source, self.a, "cache=64M"))
        self.restart(service)
        service.wait_for_log("cannot be taken over: it was a mount of ")
        wait_until(self._reads_new, PATIENCE, "a new mount")
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        with self.assertRaises(OSError):
            os.pread(held, 100, len(self.right) - 100)

    def check_stalled(self, rounds=1, **popen):
        """Readers of a stalled source, each over a restart. Returns their answers, the right one, and the service."""
        faults = self.enter(FaultFs(self.source))
        self.source = faults.path
        service = self.service(**popen)
        # A new checkpoint on such a file system is shown once it has not changed for a while.
        wait_until((self.a / FILE).exists, PATIENCE, "the checkpoint is shown")
        held = self.open(self.a / FILE)
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_RANDOM)
        lines = []
        for round_ in range(rounds):
            faults.tell("stall", "*.safetensors")
            # The source is read again, and not the page cache.
            Path("/proc/sys/vm/drop_caches").write_text("1")
            child = self.enter(Child(ONE_READ, self.a / FILE, len(self.right) // 2))
            wait_until(lambda: faults.parked(), PATIENCE, "a read waits for the source")
            service.restart()
            # The next process may read headers, because the files are new.
            faults.tell("ok")
            service.wait_until_ready(round_ + 2)
            lines.append(child.line(BOUND * 2))
            self.assert_same((self.a / FILE).read_bytes(), self.right)
        return lines, self.right_half(), service

    def test_a_read_that_waits_for_its_source_goes_on_at_the_next_process(self):
        lines, right, service = self.check_stalled(rounds=4)
        self.assertEqual(lines, [right] * 4, service.log())

    def test_a_stalled_source_on_a_kernel_that_sends_nothing_twice_hangs_nobody(self):
        lines, _, service = self.check_stalled(env={"TENSORFS_NO_RESEND": "1"})
        self.assertEqual(lines, ["error"], service.log())
        self.assertIn("cannot hand over, because its source does not answer", service.log())

    def late_reader(self, path):
        child = self.enter(Child(LATE_READ, path, len(self.right) // 2))
        self.assertEqual(child.line(BOUND), "open")
        return child

    def right_half(self):
        return self.right[len(self.right) // 2 :][:100].hex()

    def stop_for_restart(self, service):
        with SystemCtl(service.folder, "restart"):
            service.process.terminate()
            service._wait()
        # If the test fails before the next start, its readers end.
        self.addCleanup(service.manager.let_go)

    def start_again(self, service):
        service.start()
        # The service manager would keep connections open that end.
        wait_until(lambda: service.manager.heard() and not service.manager.stored, PATIENCE, "no descriptor is stored")

    def test_a_takeover_serves_other_files_while_the_source_of_one_stalls(self):
        self.copy(SOURCE, "store/slow")
        self.copy(SOURCE, "store/fast")
        faults = self.enter(FaultFs(self.tmp / "store"))
        self.source = faults.path
        service = self.service("io-timeout=10,index-dir=none")
        paths = {name: self.a / name / FILE for name in ("slow", "fast")}
        wait_until(lambda: all(path.exists() for path in paths.values()), PATIENCE, "both checkpoints are shown")
        slow, fast = (self.late_reader(paths[name]) for name in ("slow", "fast"))
        self.stop_for_restart(service)
        faults.tell("stall", "slow/*.safetensors")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        # Nobody has an answer until the new worker serves.
        slow.tell()
        fast.tell()
        self.start_again(service)
        self.assertEqual(fast.line(BOUND), self.right_half(), service.log())
        worker = service.workers()["a"]
        self.assertGreater(faults.parked("slow/*"), 0)
        self.assertEqual(slow.line(BOUND * 2), "error", service.log())
        faults.tell("ok")

        def reads_right():
            slow.tell()
            return slow.line(BOUND) == self.right_half()

        wait_until(reads_right, PATIENCE, "the file goes on once its source answers")
        self.assertEqual(service.workers()["a"], worker)

    def two_file_systems(self, slow_count):
        """A service on folders of a file system that can stall, with open files, and the folder `fast` on another one.

        Returns the service, a reader of a file of `fast`, the file system, and the open files of the other folders.
        """
        for number in range(slow_count):
            self.copy(SOURCE, f"behind/{number:03}")
        self.copy(SOURCE, "store/fast")
        self.source = self.tmp / "store"
        # Its name comes first.
        slow = self.source / "a"
        slow.mkdir()
        faults = self.enter(FaultFs(self.tmp / "behind"))
        self.addCleanup(detach, slow)
        self.assert_done(run("mount", "--bind", faults.path, slow))
        # Without a limit: a busy machine may be slower than any.
        service = self.service("io-timeout=0,index-dir=none")
        paths = [self.a / "a" / f"{number:03}" / FILE for number in range(slow_count)]
        wait_until(lambda: all(path.exists() for path in paths), PATIENCE, "all checkpoints are shown")
        fast = self.late_reader(self.a / "fast" / FILE)
        return service, fast, faults, [self.open(path) for path in paths]

    def test_a_takeover_proves_other_folders_while_a_source_of_many_stalls(self):
        # More than there are threads.
        service, fast, faults, held = self.two_file_systems(slow_count=70)
        self.stop_for_restart(service)
        faults.tell("stall", "*")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        fast.tell()
        self.start_again(service)
        self.assertEqual(fast.line(BOUND), self.right_half(), service.log())
        wait_until(faults.parked, PATIENCE, "the other folders wait for their source")
        faults.tell("ok")
        for descriptor in held:
            self.assert_same(self.read_afresh(descriptor), self.right)
        self.assertNotIn("lost their content", service.log())

    def test_a_takeover_goes_on_with_a_deleted_file_while_the_sources_of_others_stall(self):
        service, fast, faults, _ = self.two_file_systems(slow_count=12)
        self.stop_for_restart(service)
        for path in (*(self.tmp / "behind").iterdir(), self.source / "fast"):
            shutil.rmtree(path)
        # A process that takes up a deleted file asks for the kind of its file system.
        faults.tell("stall-statfs", "*/*")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        fast.tell()
        self.start_again(service)
        self.assertEqual(fast.line(BOUND), self.right_half(), service.log())
        wait_until(faults.parked, PATIENCE, "the other sources stall")
        faults.tell("ok")

    def test_a_takeover_of_a_source_that_cannot_be_listed_ends_after_a_limit(self):
        faults = self.enter(FaultFs(self.source))
        self.source = faults.path
        service = self.service("io-timeout=0")
        wait_until((self.a / FILE).exists, PATIENCE, "the checkpoint is shown")
        child = self.late_reader(self.a / FILE)
        self.stop_for_restart(service)
        faults.tell("stall-readdir", "*")
        child.tell()
        self.start_again(service)
        self.assertEqual(child.line(BOUND * 3), "error", service.log())
        limit = "the source is large, or does not answer; io-timeout= sets the limit, from 10 to 30 s"
        said = f"has not listed its source within 30 s: {limit}"
        wait_until(lambda: said in service.log(), PATIENCE, "the limit is told")
        faults.tell("ok")
        wait_until(self._reads_new, PATIENCE, "a new mount")

    def test_a_mount_is_served_while_another_one_cannot_hand_over(self):
        other = self.target("b")
        faults = self.enter(FaultFs(self.copy(SOURCE, "behind")))
        mounts = mount_config("a", self.source, self.a) + mount_config("b", faults.path, other)
        service = self.serve(mounts, env={"TENSORFS_NO_RESEND": "1"})
        service.wait_until_ready()
        wait_until((other / FILE).exists, PATIENCE, "the checkpoint is shown")
        child = self.late_reader(self.a / FILE)
        faults.tell("stall", "*.safetensors")
        Path("/proc/sys/vm/drop_caches").write_text("1")
        stalled = self.enter(Child(ONE_READ, other / FILE, len(self.right) // 2))
        wait_until(lambda: faults.parked(), PATIENCE, "a read waits for the source")
        with SystemCtl(service.folder, "restart"):
            service.process.terminate()
            wait_until(lambda: "handing over" in service.manager.status(), PATIENCE, "the handover begins")
            # The next process starts only after this read.
            child.tell()
            self.assertEqual(child.line(BOUND), self.right_half(), service.log())
            service._wait()
        faults.tell("ok")
        self.start_again(service)
        self.assertEqual(stalled.line(BOUND * 2), "error", service.log())
        self.assertIn("mount b: worker", service.log())
        self.assertNotIn("mount a: worker", service.log())
        child.tell()
        self.assertEqual(child.line(BOUND), self.right_half(), service.log())

    def test_an_open_file_without_a_name_must_have_the_header_that_it_had(self):
        service = self.service()
        held = self.open(self.a / FILE)
        self.stop_for_restart(service)
        shutil.rmtree(self.source)
        self.copy(SOURCE, "source")
        index, (name, state) = next(
            (index, pair) for index, pair in enumerate(service.manager.stored) if pair[0].endswith(".1")
        )
        facts = os.pread(state, 1 << 24, 0)
        # Place, name and hash of the header.
        found = re.search(rb'"Virtual":\[\[\d+,\d+\],"model.safetensors","([0-9a-f]{32})"\]', facts)
        self.assertIsNotNone(found)
        changed = os.memfd_create("state", os.MFD_ALLOW_SEALING)
        os.write(changed, facts[: found.start(1)] + b"0" * 32 + facts[found.end(1) :])
        fcntl.fcntl(changed, F_ADD_SEALS, F_SEAL_WRITE)
        service.manager.stored[index] = (name, changed)
        os.close(state)
        service.start()
        service.wait_for_log(f"{FILE}: this version lays out the file in another way (header ")
        with self.assertRaises(OSError):
            self.read_afresh(held)
        wait_until(self._reads_new, PATIENCE, "a new open has the new bytes")

    def test_a_restart_is_one_also_if_the_service_manager_answers_slowly(self):
        service = self.service()
        held = self.open(self.a / FILE)
        with SystemCtl(service.folder, "restart", seconds=7):
            service.process.terminate()
            # The mount is served until the answer comes.
            self.assert_same(self.read_afresh(held), self.right)
            service._wait()
        service.start()
        service.wait_until_ready(2)
        self.assert_same(self.read_afresh(held), self.right)

    def test_a_worker_that_cannot_write_its_state_serves_open_files_until_it_ends(self):
        service = self.service()
        held = self.open(self.a / FILE)
        # The state is larger, and the log is not.
        resource.prlimit(service.workers()["a"], resource.RLIMIT_FSIZE, (2048, 2048))
        with SystemCtl(service.folder, "restart"):
            service.process.terminate()
            service.wait_for_log("cannot be handed over: File too large")
            self.assert_same(self.read_afresh(held), self.right)
            service._wait()
        service.start()
        service.wait_until_ready(2)
        wait_until(self._reads_new, PATIENCE, "a new mount")

    def test_a_stop_unmounts(self):
        service = self.service()
        with SystemCtl(service.folder, "stop"):
            self.assertEqual(service.stop(), 0)
        self.assert_not_mounted(self.a)
        self.assertEqual(service.manager.passed(), [])

    def test_a_worker_that_is_killed_at_the_wrong_moment_hangs_nobody(self):
        service = self.service()
        for _ in range(6):
            ready = service.manager.count("READY=1")
            pid = service.workers()["a"]
            with SystemCtl(service.folder, "restart"):
                service.process.terminate()
                os.kill(pid, signal.SIGKILL)
                service._wait()
            service.start()
            # The new one, as early as it is seen.
            wait_until(lambda: service.workers() or service.process.poll() is not None, PATIENCE, "a worker")
            for worker in service.workers().values():
                os.kill(worker, signal.SIGKILL)
            # A service whose only mount fails at once ends, and a service manager starts it again.
            wait_until(
                lambda: service.manager.count("READY=1") > ready or service.process.poll() is not None,
                PATIENCE,
                "ready, or ended",
            )
            if service.process.poll() is not None:
                service.start()
                service.wait_until_ready(ready + 1)
            wait_until(self._reads_new, PATIENCE, "a mount that works")
        self.assertIsNotNone(find_mount(self.a))
        self.assertTrue(process_gone(pid))


if __name__ == "__main__":
    import unittest

    unittest.main()
