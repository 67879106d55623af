"""`copy=False`: tensors that share the memory of the mapped files."""

import gc
import os
import shutil

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from checkpoints import column_wise, hf_set, random_bytes, row_wise, write_shard
from package import Mount, TestCase, dlpack_bytes, needs_torch, python
from test_workers import in_child


def mapped(address):
    """The file that is mapped at this address, and the offset in it. None if there is no such file."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, _, offset, _, inode, *path = line.split(maxsplit=5)
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= address < end:
                return (path[0].strip(), int(offset, 16) + address - start) if inode != "0" else None
    return None


class Mapped(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        rng = np.random.default_rng(5)
        self.right = {
            "a": rng.standard_normal((64, 33)).astype(np.float32),
            "b": rng.integers(0, 256, (7, 5), np.uint8),
            "c": rng.standard_normal(1000).astype(np.float64),
            "empty": np.zeros((0, 4), np.float32),
            "scalar": np.array(7, np.int64),
        }
        save_file(self.right, self.file)

    def assert_shared(self, array, path, shared=True):
        found = mapped(array.ctypes.data)
        self.assertEqual(found is not None and found[0] == str(path), shared, found)

    def test_tensors_share_the_mapped_file_and_are_what_is_loaded_by_default(self):
        for how in ("get_tensor", "get_tensors", "tensors", "load_file"):
            with self.subTest(how=how):
                opened = tensorfs.safe_open(self.file, "np", copy=False)
                found = {
                    "get_tensor": lambda: {name: opened.get_tensor(name) for name in opened.keys()},
                    "get_tensors": lambda: opened.get_tensors(),
                    "tensors": lambda: dict(opened.tensors()),
                    "load_file": lambda: tensorfs.load_file(self.file, "np", copy=False),
                }[how]()
                opened.__exit__()
                self.assertEqual(set(found), set(self.right))
                for name, array in found.items():
                    np.testing.assert_array_equal(array, self.right[name])
                    self.assertEqual((array.dtype, array.shape), (self.right[name].dtype, self.right[name].shape))
                    self.assertTrue(array.flags.writeable and array.flags.aligned)
                    self.assert_shared(array, self.file, shared=array.size > 0)
        with tensorfs.safe_open(self.file, "np") as opened:
            self.assert_shared(opened.get_tensor("a"), self.file, shared=False)

    def test_writing_to_a_tensor_changes_no_file_and_no_other_handle(self):
        before = self.file.read_bytes()
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            opened.get_tensor("a")[:] = 3
        self.assertEqual(self.file.read_bytes(), before)
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            np.testing.assert_array_equal(opened.get_tensor("a"), self.right["a"])

    def test_the_mapping_lives_as_long_as_a_tensor_of_it(self):
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            array = opened.get_tensor("c")
            address = array.ctypes.data
        del opened
        gc.collect()
        np.testing.assert_array_equal(array, self.right["c"])
        del array
        gc.collect()
        self.assertIsNone(mapped(address))

    def test_rows_share_and_other_parts_are_copied(self):
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            part = opened.get_slice("a")
            for index, shared in (
                (np.s_[3:9], True),
                (np.s_[5], True),
                (np.s_[...], True),
                (np.s_[:, 2:4], False),
                (np.s_[2:9:3], False),
                (np.s_[4:4], False),
            ):
                with self.subTest(index=index):
                    array = part[index]
                    np.testing.assert_array_equal(array, self.right["a"][index])
                    self.assert_shared(array, self.file, shared)

    def test_what_is_not_aligned_or_in_pieces_is_copied(self):
        write_shard(self.file, [("a", "U8", [3], b"abc"), ("w", "F32", [2, 5], random_bytes(1, 40))])
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            self.assert_shared(opened.get_tensor("a"), self.file)
            found = opened.get_tensor("w")
            self.assert_shared(found, self.file, shared=False)
            self.assertEqual(found.tobytes(), random_bytes(1, 40))
            self.assertEqual(list(opened.get_tensors()), ["a", "w"])
        for make in (row_wise, column_wise):
            folder = make(self.tmp / make.__name__)
            with tensorfs.safe_open(folder, "dlpack") as opened:
                right = dlpack_bytes(opened)
            with tensorfs.safe_open(folder, "dlpack", copy=False) as opened:
                self.assertEqual(dlpack_bytes(opened), right)

    def test_every_shard_of_a_set_is_mapped_once(self):
        folder = hf_set(self.tmp / "hf")
        right = tensorfs.load_file(folder, "np")
        with tensorfs.safe_open(folder, "np", copy=False) as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}
            self.assertEqual(len(opened._reader()._mapped), 3)
        for name, array in found.items():
            np.testing.assert_array_equal(array, right[name])
            if array.size and array.dtype.itemsize == 1:
                self.assert_shared(array, folder / f"model-{int(name.split('.')[1]):05}-of-00003.safetensors")

    def test_through_a_mount_the_real_shards_are_mapped(self):
        folder = hf_set(self.tmp / "hf")
        right = tensorfs.load_file(folder, "np")
        with Mount(folder) as mount:
            found = tensorfs.load_file(mount.path, "np", copy=False)
        # The arrays stay valid after the unmount.
        for name, array in found.items():
            np.testing.assert_array_equal(array, right[name])

    def test_dlpack_tensors_share_too(self):
        found = tensorfs.load_file(self.file, "dlpack", copy=False)
        array = np.from_dlpack(found["c"])
        self.assertEqual(mapped(found["c"].data_ptr)[0], str(self.file))
        del found
        np.testing.assert_array_equal(array, self.right["c"])

    @needs_torch
    def test_torch_tensors_share_and_may_be_written_to_and_trained(self):
        import torch

        with tensorfs.safe_open(self.file, "pt", copy=False) as opened, torch.inference_mode():
            opened.get_tensor("a")
            with torch.inference_mode(False):
                found = opened.get_tensor("a")
        self.assertFalse(found.is_inference())
        self.assertEqual(mapped(found.data_ptr())[0], str(self.file))
        np.testing.assert_array_equal(found.numpy(), self.right["a"])
        found.requires_grad_().sum().backward()
        found.detach().mul_(2)
        np.testing.assert_array_equal(found.detach().numpy(), self.right["a"] * 2)

    def test_a_file_that_changed_is_refused_before_and_after_it_was_mapped(self):
        for mapped_before in (False, True):
            with self.subTest(mapped_before=mapped_before), tensorfs.safe_open(self.file, "np", copy=False) as opened:
                if mapped_before:
                    opened.get_tensor("b")
                with open(self.file, "ab") as file:
                    file.write(b"x")
                for take in (lambda: opened.get_tensor("a"), lambda: opened.get_slice("a")[1:3]):
                    with self.assertRaises(tensorfs.SafetensorError) as caught:
                        take()
                    self.assertEqual(caught.exception.kind, "changed")
            save_file(self.right, self.file)

    def test_a_file_that_was_replaced_or_deleted_stays_what_it_was(self):
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            array = opened.get_tensor("a")
            shutil.copy(self.file, self.tmp / "other")
            os.replace(self.tmp / "other", self.file)
            self.file.unlink()
            np.testing.assert_array_equal(opened.get_tensor("c"), self.right["c"])
        np.testing.assert_array_equal(array, self.right["a"])

    def test_a_child_has_the_mapping_of_its_parent_and_makes_its_own(self):
        with tensorfs.safe_open(self.file, "np", copy=False) as opened:
            array = opened.get_tensor("a")

            def work():
                array[:] = 1
                again = opened.get_tensor("c")
                return bool((again == self.right["c"]).all())

            self.assertEqual(in_child(work), "True")
            np.testing.assert_array_equal(array, self.right["a"])

    def test_where_nothing_can_be_mapped_tensors_are_copied(self):
        code = """
import resource, sys, tensorfs
opened = tensorfs.safe_open(sys.argv[1], "dlpack", copy=False)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
print(opened.get_tensor("a").tobytes() == b"a" * 16)
"""
        text = b'{"a":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},"b":{"dtype":"U8","shape":[%d],"data_offsets":[16,%d]}}'
        text %= (1 << 40, (1 << 40) + 16)
        self.file.write_bytes(len(text).to_bytes(8, "little") + text + b"a" * 16)
        os.truncate(self.file, 8 + len(text) + 16 + (1 << 40))
        self.assertEqual(python(code, self.file), "True\n")
