"""Ownership: tensors outlive all other objects, share no byte, and can be written to."""

import gc

import numpy as np
import safetensors
from safetensors.numpy import save_file

import tensorfs
from checkpoints import hf_set, random_bytes
from package import TestCase, needs_torch
from tensorfs import _open, _settings


class Arrays(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        sizes = [0, 1, 3, 100, 4096, 70_000, 1 << 20, (1 << 20) + 5, 3_000_001, 9_000_000]
        self.tensors = {f"t{n}": np.frombuffer(random_bytes(n, n), np.uint8) for n in sizes}
        save_file(self.tensors, self.file)

    def test_arrays_outlive_the_handle_and_the_file(self):
        f = tensorfs.safe_open(self.file, "np")
        found = [f.get_tensors(), {name: f.get_tensor(name) for name in f.keys()}, dict(f.tensors())]
        with f:
            pass
        del f
        self.file.unlink()
        gc.collect()
        for tensors in found:
            for name, right in self.tensors.items():
                np.testing.assert_array_equal(tensors[name], right)

    def test_stats_say_in_which_pages_the_memory_of_long_loads_came(self):
        length = 65 << 20
        save_file({"a": np.zeros(length, np.uint8)}, self.file)
        with tensorfs.safe_open(self.file, "np") as f:
            f.get_tensors()
            taken = f.stats["huge_bytes"] + f.stats["small_bytes"]
            seconds = f.stats["huge_thread_seconds"] + f.stats["small_thread_seconds"]
        # Linux before 5.14 cannot populate memory on request.
        self.assertTrue(taken == 0 or length <= taken <= length + (2 << 20), taken)
        self.assertEqual(taken > 0, seconds > 0)

    def test_no_two_arrays_share_a_byte_and_each_may_be_written_to(self):
        with tensorfs.safe_open(self.file, "np") as f:
            tensors = f.get_tensors()
        for array in tensors.values():
            array[...] = 0
        for number, array in enumerate(tensors.values()):
            array[...] = number + 1
        for number, array in enumerate(tensors.values()):
            self.assertTrue((array == number + 1).all())
        with tensorfs.safe_open(self.file, "np") as f:
            np.testing.assert_array_equal(f.get_tensor("t4096"), self.tensors["t4096"], "the file is as it was")

    def test_a_long_array_has_memory_of_its_own(self):
        lengths = {"a": 17 << 20, "b": 1000, "c": (18 << 20) + 1, "d": 2000}
        save_file({name: np.full(length, 7, np.uint8) for name, length in lengths.items()}, self.file)
        tensors = tensorfs.load_file(self.file, "np")

        def owner(array):
            return array if array.base is None else owner(array.base)

        owners = {name: owner(array) for name, array in tensors.items()}
        self.assertEqual(len({id(one) for name, one in owners.items() if name in "ac"} - {id(owners["b"])}), 2)
        for name in "ac":
            self.assertLess(owners[name].nbytes, lengths[name] + 3 * 4096)
            self.assertTrue((tensors[name] == 7).all())

    def test_a_part_keeps_no_more_than_itself(self):
        with tensorfs.safe_open(self.file, "np") as f:
            part = f.get_slice("t9000000")[100:200]
            stepped = f.get_slice("t9000000")[0:1000:10]
        for array in (part, stepped):
            self.assertEqual((array if array.base is None else array.base).nbytes, 100)

    def test_every_source_and_engine_gives_the_same(self):
        for source in ("auto", "direct", "buffered"):
            for engine in ("auto", "uring", "threads"):
                with self.subTest(source=source, engine=engine):
                    how = {"source": source, "engine": engine, "chunk": "64K", "io_depth": 3, "pinned_max": "1M"}
                    tensors = tensorfs.load_file(self.file, "np", **how)
                    for name, right in self.tensors.items():
                        np.testing.assert_array_equal(tensors[name], right)

    @needs_torch
    def test_torch_tensors_lie_in_memory_of_torch(self):
        import torch

        with torch.device("meta"), tensorfs.safe_open(self.file, "pt") as f:
            tensors = f.get_tensors()
            single = {name: f.get_tensor(name) for name in f.keys()}
        for name, right in self.tensors.items():
            for found in (tensors[name], single[name]):
                self.assertEqual(found.device, torch.device("cpu"))
                np.testing.assert_array_equal(found.numpy(), right)
                found.zero_()
        self.assertFalse(single["t9000000"].untyped_storage().data_ptr() == tensors["t9000000"].untyped_storage().data_ptr())

    @needs_torch
    def test_what_was_loaded_is_saved_again(self):
        from safetensors.torch import save_file as save_torch

        tensors = tensorfs.load_file(self.file, "pt")
        save_torch(tensors, self.tmp / "again.safetensors")
        self.assertEqual((self.tmp / "again.safetensors").read_bytes(), self.file.read_bytes())


class Native(TestCase):
    def test_memory_at_address_0_is_refused(self):
        save_file({"long": np.ones(3 << 20, np.uint8), "empty": np.zeros(0, np.uint8)}, self.tmp / "model.safetensors")
        loader = _settings.loader()
        checkpoint = _open.open_checkpoint(self.tmp / "model.safetensors", loader)
        empty, long = checkpoint.tensor("empty")[1], checkpoint.tensor("long")[1]
        for address in (None, 0):
            plan = loader.plan(checkpoint, [(long, None, None, address)])
            with self.subTest(address=address), self.assertRaisesRegex(ValueError, "address 0"):
                loader.fill(checkpoint, plan, [(0, 4 << 20, self)])
        with self.assertRaisesRegex(ValueError, "address 0"):
            loader.copy_from_page_cache(checkpoint, long, None, 0, 3 << 20)
        # Zero bytes need no memory.
        loader.fill(checkpoint, loader.plan(checkpoint, [(empty, None, None, 0)]), [(0, 0, self)])


class DLPack(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = hf_set(self.tmp / "hf")

    def test_numpy_takes_a_tensor_without_a_copy_and_keeps_it(self):
        with tensorfs.safe_open(self.folder, "dlpack") as f, tensorfs.safe_open(self.folder, "np") as g:
            for name in f.keys():
                tensor, right = f.get_tensor(name), g.get_tensor(name)
                taken = np.from_dlpack(tensor)
                self.assertEqual(taken.__array_interface__["data"][0], tensor.data_ptr)
                del tensor
                gc.collect()
                self.assertEqual((taken.dtype, taken.shape), (right.dtype, right.shape))
                self.assertEqual(taken.tobytes(), right.tobytes())

    @needs_torch
    def test_torch_takes_a_tensor_of_any_dtype(self):
        import torch

        from package import FIXTURES

        with tensorfs.safe_open(FIXTURES / "safetensors/all_dtypes.safetensors", "dlpack") as f:
            for name, tensor in f.get_tensors().items():
                taken = torch.from_dlpack(tensor)
                found = taken.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                self.assertEqual(found, tensor.tobytes(), name)
                if tensor.dtype.startswith("F8"):
                    self.assertEqual((taken.dtype, tuple(taken.shape)), (torch.uint8, tensor.shape))
                if tensor.dtype == "F4":
                    self.assertEqual(tuple(taken.shape), (*tensor.shape[:-1], tensor.shape[-1] // 2))

    def test_a_capsule_that_nobody_takes_frees_the_tensor(self):
        with tensorfs.safe_open(self.folder, "dlpack") as f:
            name = f.keys()[0]
            for version in (None, (1, 0), (1, 2)):
                capsule = f.get_tensor(name).__dlpack__(max_version=version)
                self.assertIn("dltensor_versioned" if version else '"dltensor"', repr(capsule))
                del capsule
            self.assertEqual(f.get_tensor(name).__dlpack_device__(), (1, 0))
            with self.assertRaises(BufferError):
                f.get_tensor(name).__dlpack__(dl_device=(2, 0))

    def test_the_genuine_package_agrees(self):
        whole = {}
        for shard in self.folder.glob("*.safetensors"):
            with safetensors.safe_open(shard, "np") as g:
                whole.update(g.get_tensors())
        for name, tensor in tensorfs.load_file(self.folder, "dlpack").items():
            self.assertEqual(tensor.tobytes(), whole[name].tobytes())
