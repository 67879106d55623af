"""Loading in the background: `prefetch` and `tensors`."""

import contextlib
import gc
import os
import threading
import weakref
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

import tensorfs
import tensorfs._open
from checkpoints import write_shard
from package import TestCase, python, wait_until


class Prefetch(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        self.tensors = {f"t{n:02}": np.full((n + 1, 1000), n, np.int32) for n in range(40)}
        save_file(self.tensors, self.file)
        self.long = self.tmp / "long.safetensors"
        save_file({"a": np.zeros(16 << 20, np.uint8)}, self.long)
        # A small limit makes several batches.
        before = tensorfs._open._BATCH_MAX
        tensorfs._open._BATCH_MAX = 400_000
        self.addCleanup(setattr, tensorfs._open, "_BATCH_MAX", before)
        self.opened = tensorfs.safe_open(self.file, "np")

    def test_each_tensor_is_handed_out_once_by_name_or_in_order(self):
        with self.opened.prefetch() as loader:
            self.assertEqual((loader.names(), len(loader)), (self.opened.offset_keys(), 40))
            np.testing.assert_array_equal(loader.take("t39"), self.tensors["t39"])
            np.testing.assert_array_equal(loader.take("t03"), self.tensors["t03"])
            with self.assertRaisesRegex(tensorfs.SafetensorError, "already delivered"):
                loader.take("t39")
            rest = dict(loader)
            self.assertEqual(set(rest), set(self.tensors) - {"t39", "t03"})
            for name, tensor in rest.items():
                np.testing.assert_array_equal(tensor, self.tensors[name])
            self.assertEqual(list(loader), [])

    def test_a_plan_names_tensors_and_rows(self):
        with self.opened.prefetch({"t20": slice(3, 9), "t07": None, "t08": slice(-2, None)}) as loader:
            self.assertEqual(set(loader.names()), {"t20", "t07", "t08"})
            np.testing.assert_array_equal(loader.take("t20"), self.tensors["t20"][3:9])
            np.testing.assert_array_equal(loader.take("t08"), self.tensors["t08"][-2:])
            np.testing.assert_array_equal(loader.take("t07"), self.tensors["t07"])
            with self.assertRaisesRegex(tensorfs.SafetensorError, "not in the prefetch plan"):
                loader.take("t01")

    def test_a_plan_that_makes_no_sense_is_refused(self):
        save_file({"scalar": np.array(1.0), "w": np.zeros((4, 2))}, self.file)
        opened = tensorfs.safe_open(self.file, "np")
        for plan, why in (
            ({}, "selects no tensors"),
            ({"absent": None}, "does not contain tensor absent"),
            ({"scalar": slice(0, 1)}, "0-d"),
            ({"w": 3}, "None or a slice"),
            ({"w": slice(0, 9)}, "out of range for 4 rows"),
            ({"w": slice(0, 4, 2)}, "step 1"),
            ({"w": slice("a", None)}, "integers or None"),
        ):
            with self.subTest(plan=plan), self.assertRaisesRegex(tensorfs.SafetensorError, why):
                opened.prefetch(plan)
        with self.assertRaises(tensorfs.SafetensorError):
            opened.prefetch(device="cuda:0")

    def test_what_the_framework_cannot_have_is_refused_before_anything_is_loaded(self):
        write_shard(self.file, [("f6", "F6_E2M3", [4], bytes(3)), ("w", "F32", [2], bytes(8))])
        opened = tensorfs.safe_open(self.file, "np")
        for plan in (None, {"f6": None}):
            with self.assertRaisesRegex(tensorfs.DtypeError, "`f6`.*F6_E2M3"):
                opened.prefetch(plan)
        with self.assertRaisesRegex(tensorfs.DtypeError, "`f6`"):
            opened.tensors()
        self.assertEqual(opened.prefetch({"w": None}).names(), ["w"])
        opened = tensorfs.safe_open(self.file, "dlpack")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "`f6`.*begin and end on bytes") as e:
            opened.prefetch({"f6": slice(1, 3)})
        self.assertEqual(e.exception.kind, "misaligned")
        self.assertEqual(opened.prefetch({"f6": slice(0, 4)}).take("f6").tobytes(), bytes(3))

    def test_a_closed_one_hands_out_no_more_and_leaves_no_thread(self):
        loader = self.opened.prefetch()
        first = loader.take("t00")
        loader.close()
        self.assertFalse(loader._thread.is_alive())
        with self.assertRaisesRegex(tensorfs.SafetensorError, "closed"):
            loader.take("t01")
        np.testing.assert_array_equal(first, self.tensors["t00"])

    def test_tensors_come_in_file_order_and_not_all_are_held(self):
        batches = len(tensorfs._open._batches([(info, None) for info in self.opened._infos(None)]))
        self.assertGreater(batches, 5)
        loaded = []
        load = tensorfs._reader.Reader.load

        def counted(reader, wanted, cancel=None):
            tensors = load(reader, wanted, cancel)
            loaded.append([weakref.ref(tensor) for tensor in tensors.values()])
            return tensors

        tensorfs._reader.Reader.load = counted
        self.addCleanup(setattr, tensorfs._reader.Reader, "load", load)
        names = []
        for name, tensor in self.opened.tensors():
            np.testing.assert_array_equal(tensor, self.tensors[name])
            names.append(name)
            del tensor
            gc.collect()
            alive = sum(any(ref() is not None for ref in batch) for batch in list(loaded))
            self.assertLessEqual(alive, 3)
        self.assertEqual(names, self.opened.offset_keys())
        self.assertEqual(len(loaded), batches)

    def test_the_first_batch_is_small_and_batches_grow(self):
        info = tensorfs._reader.Info("t", 0, "U8", [4 << 20], 4 << 20)
        tensorfs._open._BATCH_MAX = 64 << 20
        lengths = [4 * len(batch) for batch in tensorfs._open._batches([(info, None)] * 60)]
        self.assertEqual(lengths, [16, 32, 64, 64, 64])

    def test_an_iterator_that_is_left_ends_its_thread(self):
        tensors = self.opened.tensors()
        next(tensors)
        tensors.close()
        self.assertNotIn("tensorfs-prefetch", {thread.name for thread in threading.enumerate()})

    def test_what_fails_in_the_background_is_raised_where_it_is_asked_for(self):
        opened = tensorfs.safe_open(self.file, "np")
        data = self.file.read_bytes()
        self.file.write_bytes(data[: len(data) // 2])
        with opened.prefetch() as loader, self.assertRaisesRegex(tensorfs.SafetensorError, "model.safetensors"):
            loader.take("t39")
        with self.assertRaises(tensorfs.SafetensorError):
            list(opened.tensors())

    def test_what_failed_holds_no_memory(self):
        before = self.file.stat().st_size
        held = []

        def load():
            loaded = Held()
            held.append(weakref.ref(loaded))
            with self.opened.prefetch() as loader:
                loaded.tensors = dict(loader)

        os.truncate(self.file, before // 2)
        areas = []
        make = tensorfs._frameworks.Numpy.area

        def area(framework, length):
            made = make(framework, length)
            areas.append(weakref.ref(made[0]))
            return made

        gc.disable()
        self.addCleanup(gc.enable)
        with mock.patch.object(tensorfs._frameworks.Numpy, "area", area):
            with contextlib.suppress(tensorfs.SafetensorError):
                load()
        self.assertGreater(len(areas), 0)

        def freed():
            # Memory that reads still held is freed by the next call.
            self.opened.keys()
            return all(made() is None for made in areas)

        wait_until(freed, 30, "memory to be freed")
        self.assertEqual([loaded() for loaded in held], [None])

    def test_the_end_of_the_interpreter_ends_what_goes_on(self):
        code = """
import atexit, sys, threading

@atexit.register
def last():
    # Registered first, so called last.
    print([thread.name for thread in threading.enumerate()])

import tensorfs, tensorfs._open
tensorfs._open._BATCH_MAX = 400_000
opened = tensorfs.safe_open(sys.argv[1], "dlpack")
stream, whole = opened.tensors(), opened.prefetch()
next(stream)
"""
        self.assertEqual(python(code, self.file), "['MainThread']\n")

    def test_a_load_while_the_interpreter_ends_is_a_load(self):
        code = """
import sys
import tensorfs

class Last:
    def __init__(self, path):
        self.opened, self.print = tensorfs.safe_open(path, "dlpack", source="direct", chunk=4096, io_depth=1), print

    def __del__(self):
        self.print(len(self.opened.get_tensors()))

sys.modules["last"] = Last(sys.argv[1])
"""
        self.assertEqual(python(code, self.long), "1\n")


class Held:
    """An object that supports weak references."""
