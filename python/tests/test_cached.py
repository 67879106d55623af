"""`copy=None`, as in `patched()`: tensors that the page cache holds are mapped, and all others are loaded into memory
of their own."""

import contextlib
import mmap
import os
import platform
import signal
import subprocess
import sys
import unittest

import numpy as np
import safetensors
import safetensors.numpy

import tensorfs
from checkpoints import random_bytes, write_shard
from package import Mount, TestCase
from test_mapped import mapped

ROWS = 320
LENGTH = ROWS * 1024 * 4
"""Bytes of a tensor: long enough to be loaded ahead."""

REFUSE = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def refuse(*numbers):
    # Allows all other system calls of this thread; these ones are unknown to the kernel.
    jumps = b"".join(struct.pack("HBBI", 0x15, len(numbers) - 1 - at, 1 if at == len(numbers) - 1 else 0, number) for at, number in enumerate(numbers))
    program = struct.pack("HBBI", 0x20, 0, 0, 0) + jumps
    program += struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | 38) + struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    code = ctypes.create_string_buffer(program)
    filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
"""
"""Python code of a function that makes system calls fail with ENOSYS, by a filter."""

CACHESTAT = 451
MINCORE = {"x86_64": 27, "aarch64": 232}.get(platform.machine())


def in_child(code, *words):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        check=False,
    )


class Cached(TestCase):
    def setUp(self):
        super().setUp()
        self.names = [f"layers.{number}.weight" for number in range(12)]
        self.seeds = {name: seed for seed, name in enumerate(self.names)}
        self.file = self.tmp / "model.safetensors"
        write_shard(
            self.file,
            [(name, "F32", [ROWS, 1024], random_bytes(seed, LENGTH)) for name, seed in self.seeds.items()],
        )
        with tensorfs.safe_open(self.file, "np") as opened:
            self.places = {name: opened.get_tensor_metadata(name).pieces[0][1:] for name in self.names}
            self.cool()
            reader, (start, end) = opened._reader(), self.places[self.names[0]]
            if reader.loader.is_better_mapped(reader.checkpoint, 0, start, end - start):
                self.skipTest("files stay in the page cache here, as those of tmpfs do")

    @contextlib.contextmanager
    def cached(self, *names):
        """A block in which the page cache holds these tensors, and no other ones. They stay there because they are
        mapped."""
        with open(self.file, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as kept:
            self.cool()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            kept.madvise(mmap.MADV_RANDOM)
            for start, end in (self.places[name] for name in names):
                for page in range(start // 4096, -(-end // 4096)):
                    kept[page * 4096]
            self.touch = lambda page: kept[page * 4096]
            yield

    def cool(self):
        """Drops the file from the page cache, except pages that are mapped."""
        with open(self.file, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def check(self, found, in_cache):
        for name, array in found.items():
            self.assertEqual(array.tobytes(), random_bytes(self.seeds[name], LENGTH), name)
            place = mapped(array.ctypes.data)
            self.assertEqual(place is not None and place[0] == str(self.file), name in in_cache, (name, place))

    def test_what_the_page_cache_holds_is_mapped_and_the_rest_is_owned(self):
        def by_slice(opened):
            return {name: opened.get_slice(name)[...] for name in self.names}

        ways = {
            "get_tensor": lambda opened: {name: opened.get_tensor(name) for name in opened.keys()},
            "get_slice": by_slice,
            "rows": lambda opened: {name: opened.get_slice(name)[0:ROWS] for name in self.names},
            "get_tensors": lambda opened: opened.get_tensors(),
            "tensors": lambda opened: dict(opened.tensors()),
        }
        for in_cache in (self.names, [], self.names[::2], self.names[5:7]):
            for how, take in ways.items():
                with self.subTest(how=how, in_cache=in_cache), self.cached(*in_cache):
                    with tensorfs.safe_open(self.file, "np", copy=None) as opened:
                        self.check(take(opened), in_cache)

    def test_patched_decides_so_by_default_and_copies_or_maps_all_if_told(self):
        half = self.names[::2]
        for arguments, in_cache in (({}, half), ({"copy": None}, half), ({"copy": True}, []), ({"copy": False}, self.names)):
            with self.subTest(arguments=arguments), tensorfs.patched(**arguments), self.cached(*half):
                self.check(safetensors.numpy.load_file(self.file), in_cache)
                self.cool()
                with safetensors.safe_open(self.file, "np") as opened:
                    self.check({name: opened.get_slice(name)[:] for name in self.names}, in_cache)

    def test_a_tensor_of_which_few_pages_are_missing_is_mapped_too(self):
        for missing, in_cache in ((40, self.names), (41, [])):
            with self.cached(), tensorfs.safe_open(self.file, "np", copy=None) as opened:
                start, end = self.places[self.names[2]]
                first, last = start // 4096, -(-end // 4096)
                self.assertEqual(last - first, 321)
                for page in range(first, last - missing):
                    self.touch(page)
                self.check({self.names[2]: opened.get_tensor(self.names[2])}, in_cache)

    def test_small_tensors_are_mapped_in_every_state_of_the_page_cache(self):
        for length, in_cache in ((32 << 10, True), (128 << 10, False)):
            file = self.tmp / f"{length}.safetensors"
            write_shard(file, [(f"t{number:03}", "U8", [length], random_bytes(number, length)) for number in range(300)])
            with open(file, "rb") as shard:
                os.fsync(shard.fileno())
                os.posix_fadvise(shard.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with self.subTest(length), tensorfs.safe_open(file, "np", copy=None) as opened:
                # The kernel may read ahead pages that are not mapped yet.
                found = opened.get_tensor("t150")
                self.assertEqual(found.tobytes(), random_bytes(150, length))
                place = mapped(found.ctypes.data)
                self.assertEqual(place is not None and place[0] == str(file), in_cache)

    def test_only_what_is_missing_is_read_and_loaded_ahead(self):
        middle = self.names[3:6]
        with self.cached(*middle), tensorfs.safe_open(self.file, "np", copy=None) as opened:
            found, ahead = {}, []
            for name in sorted(self.names, key=lambda name: int(name.split(".")[1])):
                found[name] = opened.get_tensor(name)
                ahead.append(opened.stats["bytes_ahead"])
            self.check(found, middle)
            self.assertEqual(opened.stats["bytes"], (len(self.names) - len(middle)) * LENGTH)
            self.assertEqual(opened.stats["bytes_ahead_unused"], 0)
            # From the third tensor to the last but one, also while mapped ones are taken.
            self.assertEqual([number for number in ahead[2:-1] if number == 0], [], ahead)

    def test_a_file_that_changes_between_the_open_and_a_request_is_refused_in_every_state(self):
        def grow():
            with open(self.file, "ab") as file:
                file.write(b"x")

        def write():
            with open(self.file, "r+b") as file:
                file.seek(self.places[self.names[1]][0])
                file.write(b"other")

        def truncate():
            os.truncate(self.file, self.places[self.names[-1]][0])

        whole = self.file.read_bytes()
        for change in (grow, write, truncate):
            for in_cache in ([], self.names, self.names[:1]):
                for taken in ([], self.names[:1]):
                    self.file.write_bytes(whole)
                    with self.subTest(change=change.__name__, in_cache=len(in_cache), taken=taken), self.cached(*in_cache):
                        with tensorfs.safe_open(self.file, "np", copy=None) as opened:
                            for name in taken:
                                opened.get_tensor(name)
                            change()
                            for name in self.names:
                                with self.assertRaises(tensorfs.SafetensorError) as caught:
                                    opened.get_tensor(name)
                                self.assertEqual(caught.exception.kind, "changed")

    def test_a_change_after_the_request_shows_in_mapped_tensors_alone(self):
        with self.cached(self.names[0]), tensorfs.safe_open(self.file, "np", copy=None) as opened:
            first, second = (opened.get_tensor(name) for name in self.names[:2])
        with open(self.file, "r+b") as file:
            for name in self.names[:2]:
                file.seek(self.places[name][0])
                file.write(bytes(8))
        self.assertEqual(first.tobytes()[:8], bytes(8))
        self.assertEqual(second.tobytes(), random_bytes(self.seeds[self.names[1]], LENGTH))

    def test_a_file_that_is_truncated_after_the_request_ends_the_process_only_where_it_was_mapped(self):
        code = """
import os, sys, tensorfs
opened = tensorfs.safe_open(sys.argv[1], "np", copy=None)
tensor = opened.get_tensor(sys.argv[2])
os.truncate(sys.argv[1], 4096)
print(len(tensor.tobytes()), flush=True)
"""
        whole = self.file.read_bytes()
        for in_cache, status in ((self.names, -signal.SIGBUS), ([], 0)):
            self.file.write_bytes(whole)
            with self.cached(*in_cache):
                done = in_child(code, self.file, self.names[-1])
            self.assertEqual(done.returncode, status, done)

    @unittest.skipUnless(MINCORE, "the number of mincore is not known for this processor")
    def test_without_cachestat_mincore_says_what_is_cached_and_without_both_a_sample_of_pages_does(self):
        code = REFUSE + """
import tensorfs
refuse(*map(int, sys.argv[3].split(",")))
opened = tensorfs.safe_open(sys.argv[1], "np", copy=None)
tensor = opened.get_tensor(sys.argv[2])
address, maps = tensor.ctypes.data, open("/proc/self/maps").read().splitlines()
found = [line for line in maps if (lambda a, b: int(a, 16) <= address < int(b, 16))(*line.split()[0].split("-"))]
print(found[0].endswith(sys.argv[1]), hash(tensor.tobytes()) == hash(open(sys.argv[1], "rb").read()[int(sys.argv[4]):][:tensor.nbytes]))
"""
        for numbers in ((CACHESTAT,), (CACHESTAT, MINCORE)):
            for name in self.names[:2]:
                with self.cached(self.names[0]):
                    done = in_child(code, self.file, name, ",".join(map(str, numbers)), self.places[name][0])
                self.assertEqual(done.stdout, f"{name == self.names[0]} True\n", done)

    @unittest.skipIf(os.geteuid(), "only root can become another user")
    def test_a_user_who_may_only_read_the_file_gets_its_cached_tensors_mapped_too(self):
        # All modules are imported before, because other users may not be able to read folders of root. The kernel hides
        # the /proc of a process that was root.
        code = """
import ctypes, os, sys, tensorfs
with tensorfs.safe_open(sys.argv[1], "np") as opened:
    opened.get_tensor("layers.11.weight")
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0
opened = tensorfs.safe_open(sys.argv[1], "np", copy=None)
tensor = opened.get_tensor(sys.argv[2])
address, maps = tensor.ctypes.data, open("/proc/self/maps").read().splitlines()
found = [line for line in maps if (lambda a, b: int(a, 16) <= address < int(b, 16))(*line.split()[0].split("-"))]
print(found[0].endswith(sys.argv[1]))
"""
        self.tmp.chmod(0o755)
        self.file.chmod(0o644)
        for name in self.names[:2]:
            with self.cached(self.names[0]):
                done = in_child(code, self.file, name)
            self.assertEqual(done.stdout, f"{name == self.names[0]}\n", done)

    def test_through_a_mount_the_cached_tensors_of_the_real_shard_are_mapped(self):
        with self.cached(*self.names[:2]), Mount(self.tmp) as mount, tensorfs.patched():
            with safetensors.safe_open(next(mount.path.glob("*.safetensors")), "np") as opened:
                self.check({name: opened.get_tensor(name) for name in self.names}, self.names[:2])
