"""Loading ahead: while a program takes one tensor after the other, the next tensors are loaded already."""

import contextlib
import gc
import json
import os
import random
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from checkpoints import random_bytes, write_shard
from faults import FaultFs
from package import TestCase, needs_torch, python, threads, wait_until
from test_workers import in_child

ROWS = 320
LENGTH = ROWS * 1024 * 4
"""Bytes of a tensor: long enough to be loaded ahead even if the page cache has it."""


def natural(name):
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def is_loading():
    return any(name.startswith("tensorfs-ahead") for name in threads())


class Ahead(TestCase):
    def setUp(self):
        super().setUp()
        # In the file q comes before k, and layer 2 before layer 10.
        self.names = ["embed"] + [f"layers.{n}.{part}" for n in range(12) for part in "qkv"]
        self.seeds = {name: seed for seed, name in enumerate(self.names)}
        self.file = self.tmp / "model.safetensors"
        write_shard(
            self.file,
            [(name, "F32", [ROWS, 1024], random_bytes(seed, LENGTH)) for name, seed in self.seeds.items()],
        )

    def right(self, name):
        return np.frombuffer(random_bytes(self.seeds[name], LENGTH), np.float32).reshape(ROWS, 1024)

    def check(self, name, found):
        self.assertEqual(found.tobytes(), self.right(name).tobytes(), name)

    def large(self):
        """A file that is longer than the limit of loading ahead, and the length of its tensors in bytes."""
        large = self.tmp / "large.safetensors"
        # The data is a hole in the file.
        length, count = 60 << 20, 12
        header = {
            f"t{n:02}": {"dtype": "U8", "shape": [length], "data_offsets": [n * length, (n + 1) * length]}
            for n in range(count)
        }
        text = json.dumps(header).encode()
        large.write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(large, 8 + len(text) + count * length)
        return large, length

    def orders(self):
        return {"files": self.names, "names": sorted(self.names), "natural": sorted(self.names, key=natural)}

    def test_a_loop_in_a_usual_order_has_the_next_tensors_on_their_way(self):
        for how, names in self.orders().items():
            for take in (lambda f, name: f.get_tensor(name), lambda f, name: f.get_slice(name)[...]):
                with self.subTest(order=how), tensorfs.safe_open(self.file, "np") as opened:
                    ahead = []
                    for name in names:
                        self.check(name, take(opened, name))
                        ahead.append(opened.stats["bytes_ahead"])
                    # From the third tensor to the last but one.
                    self.assertEqual([n for n in ahead[2:-1] if n == 0], [], ahead)
                    self.assertEqual(ahead[-1], 0)

    def test_nothing_is_loaded_twice_in_an_order_that_is_known(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for name in self.names:
                opened.get_tensor(name)
            # Tensors that the calling thread copied from the page cache are not counted.
            self.assertLessEqual(opened.stats["bytes"], len(self.names) * LENGTH)
            self.assertEqual(opened.stats["bytes_ahead_unused"], 0)

    def test_every_framework_gets_what_a_direct_load_gives(self):
        for framework in ("np", "dlpack"):
            with tensorfs.safe_open(self.file, framework) as opened:
                walked = {name: opened.get_tensor(name) for name in self.names}
            for name in self.names[::5]:
                with tensorfs.safe_open(self.file, framework) as opened:
                    direct = opened.get_tensor(name)
                self.assertEqual(type(walked[name]), type(direct))
                self.assertEqual((walked[name].dtype, walked[name].shape), (direct.dtype, direct.shape))
                self.assertEqual(walked[name].tobytes(), direct.tobytes())
                if framework == "np":
                    self.assertTrue(walked[name].flags.writeable and walked[name].flags.aligned)
                    walked[name][:] = 0
        for before, after in zip(self.names, self.names[1:]):
            self.assertFalse(np.shares_memory(np.from_dlpack(walked[before]), np.from_dlpack(walked[after])))

    @needs_torch
    def test_torch_tensors_of_inference_mode_stay_there(self):
        import torch

        with tensorfs.safe_open(self.file, "pt") as opened:
            with torch.inference_mode():
                for name in self.names[:6]:
                    self.assertTrue(opened.get_tensor(name).is_inference())
            for name in self.names[6:]:
                tensor = opened.get_tensor(name)
                self.assertFalse(tensor.is_inference())
                self.check(name, tensor.numpy())

    def test_four_threads_share_an_order(self):
        for names in self.orders().values():
            with tensorfs.safe_open(self.file, "np") as opened, ThreadPoolExecutor(4) as pool:
                for name, tensor in zip(names, pool.map(lambda name: opened.get_slice(name)[...], names)):
                    self.check(name, tensor)
                self.assertEqual(opened.stats["bytes_ahead"], 0)

    def test_four_threads_go_through_a_part_each(self):
        with tensorfs.safe_open(self.file, "np") as opened, ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda part: [(name, opened.get_tensor(name)) for name in self.names[part::4]], range(4))
            for name, tensor in (pair for part in found for pair in part):
                self.check(name, tensor)

    def test_random_accesses_load_nothing_ahead(self):
        orders = self.orders().values()
        follow = {pair for order in orders for pair in zip(order, order[1:])}
        names = None
        for seed in range(10_000):
            names = random.Random(seed).sample(self.names, len(self.names))
            near = {*zip(names, names[1:]), *zip(names, names[2:])}
            if names[0] != "embed" and not follow & near:
                break
        with tensorfs.safe_open(self.file, "np") as opened:
            for name in names:
                self.check(name, opened.get_tensor(name))
                self.assertEqual(opened.stats["bytes_ahead"], 0)
            self.assertEqual(opened.stats["bytes_ahead_unused"], 0)

    def test_memory_is_given_back_when_a_walk_turns_random(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for name in self.names[:5]:
                opened.get_tensor(name)
            held = opened.stats["bytes_ahead"]
            self.assertGreater(held, 0)
            for at in (36, 6, 30, 20, 33, 26):
                self.check(self.names[at], opened.get_tensor(self.names[at]))
            self.assertEqual(opened.stats["bytes_ahead"], 0)
            self.assertGreater(opened.stats["bytes_ahead_unused"], 0)

    def test_memory_is_bounded_also_by_all_handles_together(self):
        large, length = self.large()
        handles = [tensorfs.safe_open(large, "dlpack") for _ in range(3)]
        for opened in handles:
            for n in range(3):
                opened.get_tensor(f"t{n:02}")
        held = [opened.stats["bytes_ahead"] for opened in handles]
        self.assertEqual(held, [4 * length, 4 * length, 0])
        for opened in handles:
            opened.__exit__()
        # When the checkpoint is closed, its memory may be used to load ahead for others.
        with tensorfs.safe_open(large, "dlpack") as opened:
            for n in range(3):
                opened.get_tensor(f"t{n:02}")
            self.assertEqual(opened.stats["bytes_ahead"], 4 * length)

    def test_small_tensors_are_loaded_ahead_where_the_page_cache_lacks_them(self):
        small = self.tmp / "small.safetensors"
        right = {f"t{n:04}": np.full(5 + n % 7, n, np.int64) for n in range(1500)}
        save_file(right, small)

        def read(source):
            """The most bytes that were loaded ahead, and the number of reads."""
            small.read_bytes()
            with tensorfs.safe_open(small, "np", source=source) as opened:
                held = []
                for name, tensor in right.items():
                    np.testing.assert_array_equal(opened.get_tensor(name), tensor)
                    held.append(opened.stats["bytes_ahead"])
                return max(held[4:]), opened.stats.get("reads", 0)

        ahead, reads = read("direct")
        self.assertGreater(ahead, 0)
        self.assertLess(reads, len(right) // 10)
        # The kernel may drop pages at any time.
        self.assertTrue(any(read("buffered")[0] == 0 for _ in range(10)))

    def test_a_handle_that_is_closed_midway_lets_go_and_its_slices_go_on(self):
        opened = tensorfs.safe_open(self.file, "np")
        for name in self.names[:6]:
            opened.get_tensor(name)
        slices = {name: opened.get_slice(name) for name in self.names[6:]}
        reader = opened._reader()
        self.assertGreater(reader.ahead[0], 0)
        opened.__exit__()
        self.assertEqual(reader.ahead[0], 0)
        for name, part in slices.items():
            self.check(name, part[...])
        self.assertEqual(reader.ahead[0], 0)
        wait_until(lambda: not is_loading(), 20, "threads that load ahead end")

    def test_a_handle_that_is_forgotten_midway_leaves_no_thread(self):
        def loop():
            opened = tensorfs.safe_open(self.file, "np")
            for n, name in enumerate(self.names):
                yield opened.get_tensor(name)
                if n == 9:
                    raise ZeroDivisionError

        with contextlib.suppress(ZeroDivisionError):
            list(loop())
        abandoned = loop()
        for _ in range(5):
            next(abandoned)
        del abandoned
        gc.collect()
        wait_until(lambda: not is_loading(), 20, "threads that load ahead end")

    def test_threads_that_end_midway_leave_their_order_to_others(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for first in range(0, 36, 4):
                some = self.names[first : first + 4]
                thread = threading.Thread(target=lambda some=some: [opened.get_tensor(name) for name in some])
                thread.start()
                thread.join()
            self.check("layers.11.v", opened.get_tensor("layers.11.v"))

    def test_what_was_loaded_ahead_of_a_file_that_changed_since_is_not_handed_out(self):
        for how in ("written", "shortened"):
            with self.subTest(how=how), tensorfs.safe_open(self.file, "np") as opened:
                for name in self.names[:5]:
                    opened.get_tensor(name)
                wait_until(lambda: not is_loading(), 20, "all is loaded")
                with open(self.file, "r+b") as file:
                    if how == "written":
                        file.seek(-1, os.SEEK_END)
                        file.write(b"x")
                    else:
                        file.truncate(os.path.getsize(self.file) - 1)
                for name in self.names[5:8]:
                    with self.assertRaises(tensorfs.SafetensorError) as caught:
                        opened.get_tensor(name)
                    self.assertEqual(caught.exception.kind, "changed")
            if how == "written":
                self.setUp()

    def test_a_file_that_is_deleted_midway_is_read_to_its_end(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for n, name in enumerate(self.names):
                if n == 7:
                    self.file.unlink()
                self.check(name, opened.get_tensor(name))

    def test_a_child_made_midway_loads_nothing_ahead_and_everything_right(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for name in self.names[:5]:
                opened.get_tensor(name)

            def work():
                right = all(opened.get_tensor(name).tobytes() == self.right(name).tobytes() for name in self.names[5:])
                ahead = opened.stats["bytes_ahead"]
                opened.__exit__()
                return right, ahead

            for _ in range(5):
                self.assertEqual(in_child(work), "(True, 0)")
                name = self.names.pop(5)
                opened.get_tensor(name)

    def test_the_interpreter_may_end_midway(self):
        code = """
import sys, threading, tensorfs
opened = tensorfs.safe_open(sys.argv[1], "dlpack")
names = opened.keys()
def walk():
    for name in names: opened.get_tensor(name)
if sys.argv[2] == "thread":
    threading.Thread(target=walk, daemon=True).start()
for name in names[:4]: opened.get_tensor(name)
if sys.argv[2] == "kept": sys.modules["kept"] = opened
"""
        for how in ("kept", "dropped", "thread"):
            for _ in range(5):
                python(code, self.file, how)

    def test_many_handles_are_walked_at_once_and_the_lock_of_the_interpreter_is_free(self):
        names = list(self.names)

        def walk(seed):
            with tensorfs.safe_open(self.file, "np") as opened:
                generator = random.Random(seed)
                for name in names:
                    self.check(name, opened.get_tensor(name))
                    if generator.random() < 0.1:
                        self.check(names[seed], opened.get_tensor(names[seed]))

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(walk, range(12)))

    def test_a_second_handle_begins_with_the_order_of_the_first(self):
        with tensorfs.safe_open(self.file, "np") as opened:
            for name in sorted(self.names):
                opened.get_tensor(name)
        with tensorfs.safe_open(self.file, "np") as opened:
            opened.get_tensor("embed")
            self.assertGreater(opened.stats["bytes_ahead"], 0)

    def test_a_read_that_fails_is_said_by_the_tensor_that_was_asked_for(self):
        large, length = self.large()
        with FaultFs(self.tmp) as source, source.lifted():
            with tensorfs.safe_open(source.path / large.name, "dlpack", io_timeout=5) as opened:
                names = opened.keys()
                for name in names[:3]:
                    opened.get_tensor(name)
                source.tell("eio", "*.safetensors")
                with self.assertRaises(OSError) as caught:
                    for name in names[3:]:
                        opened.get_tensor(name)
                self.assertIn(name, str(caught.exception))
                self.assertEqual(opened.stats["bytes_ahead"], 0)
                source.tell("ok")
                for name in names[-2:]:
                    self.assertEqual(opened.get_tensor(name).nbytes, length)

    def test_a_source_that_stalls_is_a_timeout_and_not_waited_for_at_the_end(self):
        large, _ = self.large()
        with FaultFs(self.tmp) as source, source.lifted():
            with tensorfs.safe_open(source.path / large.name, "dlpack", io_timeout=2) as opened:
                for name in opened.keys()[:3]:
                    opened.get_tensor(name)
                source.tell("stall", "*.safetensors")
                with self.assertRaises(TimeoutError):
                    for name in opened.keys()[3:]:
                        opened.get_tensor(name)
                source.tell("ok")


if __name__ == "__main__":
    unittest.main()
