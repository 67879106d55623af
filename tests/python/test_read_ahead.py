"""Bytes that a mount reads ahead, and bytes that it puts into the kernel's page cache unasked."""

import mmap
import os
import random
import struct
import unittest

import checkpoints
from mounts import Mount, TestCase, tensorfs, wait_until

FILE = "model.safetensors"
TENSOR_LEN = 24 << 20


def drop_from_page_cache(folder):
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class ReadAhead(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "ck"
        self.source.mkdir()
        shards = {}
        for number in (1, 2):
            data = checkpoints.random_bytes(number, TENSOR_LEN)
            name = f"model-{number:05}-of-00002.safetensors"
            checkpoints.write_shard(self.source / name, [(f"t{number}", "U8", [TENSOR_LEN], data)])
            shards[name] = [f"t{number}"]
        checkpoints.write_weight_map(self.source, shards)
        self.expected = checkpoints.hf_whole(self.source)

    def counters(self, m):
        return tensorfs("status", m.path, "--json").json()[0]["counters"]

    def test_a_cold_file_read_in_order_is_read_ahead_of_and_read_once(self):
        drop_from_page_cache(self.source)
        with Mount(self.source) as m, open(m.path / FILE, "rb", buffering=0) as file:
            read = b"".join(iter(lambda: file.read(1 << 20), b""))
            self.assertTrue(read == self.expected)
            counters = self.counters(m)
            # A thread that has just answered may hold its block still, and one that was held up may read a block
            # ahead that was asked for meanwhile. It goes soon.
            wait_until(lambda: self.counters(m)["cache_bytes_now"] == 0, 20, "nothing is kept")
        self.assertGreater(counters["prefetch_used_bytes"], len(self.expected) // 2)
        self.assertLess(counters["source_bytes"], len(self.expected) * 5 // 4)
        self.assertLess(counters["cache_bytes_now"], len(self.expected) // 4)

    # Each touch of a page would be a request of its own.
    @unittest.skipUnless(hasattr(mmap, "MADV_RANDOM"), "no madvise here")
    def test_a_tensor_touched_page_by_page_is_put_into_the_page_cache_once(self):
        with Mount(self.source) as m, open(m.path / FILE, "rb") as file:
            start = 8 + struct.unpack("<Q", file.read(8))[0]
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(mmap.MADV_RANDOM)
                pages = [start + at for at in range(0, TENSOR_LEN, 4096)]
                random.Random(3).shuffle(pages)
                first, rest = pages[: len(pages) // 3], pages[len(pages) // 3 :]
                self.touch(mapped, first)
                # How many pages are touched meanwhile depends on the machine.
                wait_until(lambda: self.counters(m)["stored_bytes"] >= TENSOR_LEN, 20, "the tensor is stored")
                reads = self.counters(m)["reads"]
                self.touch(mapped, rest)
            self.assertLess(self.counters(m)["reads"] - reads, len(rest) // 10)
            self.assertEqual(self.counters(m)["stored_bytes"], TENSOR_LEN, "it is stored once")

    def touch(self, mapped, pages):
        for at in pages:
            self.assertEqual(mapped[at], self.expected[at])
