"""Tensorizer files in the package: single files, numbered files, lists of files, parts of tensors, mapped files, and
files on a mount."""

import dataclasses

import numpy as np

import tensorfs
import tensorfs.numpy
from package import Mount, TestCase
from tensorizer_files import Stored, file_of, write_long

DTYPES = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "U8": np.uint8}


class Tensorizer(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(7)
        self.arrays = {
            # Names of odd lengths, so that the data begins at odd places.
            "w" * (number + 1): rng.integers(0, 100, shape).astype(DTYPES[dtype])
            for number, (dtype, shape) in enumerate([
                ("F32", (700, 300)), ("F16", (33, 5, 2)), ("I64", ()), ("U8", (3,)), ("F32", (0, 4)), ("F16", (100_000,)),
            ])
        }
        self.folder = self.tmp / "set"
        self.folder.mkdir()
        self.stored = [
            Stored.of(name, next(d for d, t in DTYPES.items() if t == array.dtype), array.shape, array.tobytes())
            for name, array in self.arrays.items()
        ]
        self.file = self.tmp / "one.tensors"
        self.file.write_bytes(file_of(self.stored))
        self.parts = [self.folder / f"model-{number:05}-of-00003.tensors" for number in (1, 2, 3)]
        for number, part in enumerate(self.parts):
            part.write_bytes(file_of(self.stored[number::3]))

    def check(self, found):
        self.assertEqual(set(found), set(self.arrays))
        for name, array in self.arrays.items():
            self.assertEqual((found[name].dtype, found[name].shape), (array.dtype, array.shape))
            np.testing.assert_array_equal(found[name], array)

    def test_files_are_loaded_alone_numbered_in_a_list_and_by_a_mapping(self):
        where = {tensor.name.decode(): self.parts[number % 3] for number, tensor in enumerate(self.stored)}
        for source in (self.file, self.folder, self.parts, where):
            with self.subTest(source=type(source)):
                self.check(tensorfs.numpy.load_file(source))
                with tensorfs.safe_open(source, "np") as f:
                    self.check({name: f.get_tensor(name) for name in f.keys()})
                    self.check(dict(f.tensors()))
                with tensorfs.safe_open(source, "np", copy=False) as f:
                    self.check(f.get_tensors())

    def test_a_file_is_loaded_through_a_mount(self):
        with Mount(self.file) as m:
            self.check(tensorfs.numpy.load_file(m.path / "one.safetensors"))

    def test_parts_are_read_and_tensors_are_cast(self):
        for source in (self.file, self.folder):
            with tensorfs.safe_open(source, "np") as f:
                np.testing.assert_array_equal(f.get_slice("w")[3:400:7, 11:200], self.arrays["w"][3:400:7, 11:200])
                np.testing.assert_array_equal(f.get_slice("wwwwww")[99_000:], self.arrays["wwwwww"][99_000:])
            with tensorfs.safe_open(source, "np", dtype="f32", include="ww") as f:
                self.assertEqual(f.keys(), ["ww"])
                np.testing.assert_array_equal(f.get_tensor("ww"), self.arrays["ww"].astype(np.float32))

    def test_the_place_of_a_tensor_is_that_in_its_file_and_not_in_a_block_of_data(self):
        with tensorfs.safe_open(self.file, "np") as f:
            data = self.file.read_bytes()
            for name, array in self.arrays.items():
                meta = f.get_tensor_metadata(name)
                ((path, begin, end),) = meta.pieces
                self.assertEqual((meta.data_offsets, path), (None, str(self.file)))
                self.assertEqual(data[begin:end], array.tobytes())

    def test_parts_behind_the_first_4_gib_are_read(self):
        path = self.tmp / "long.tensors"
        last = write_long(path, 2**32 + 9)
        with tensorfs.safe_open(path, "np") as f:
            self.assertEqual(f.get_tensor("last").tobytes(), last)
            np.testing.assert_array_equal(f.get_slice("long")[2**32 - 3 :], np.zeros(12, np.uint8))

    def test_tensors_of_which_the_file_has_the_shape_only_are_zeros(self):
        arrays = {name: array if len(name) % 2 else np.zeros_like(array) for name, array in self.arrays.items()}
        path = self.tmp / "meta.tensors"
        stored = [
            dataclasses.replace(one, data=one.data if arrays[one.name.decode()].any() else b"") for one in self.stored
        ]
        path.write_bytes(file_of(stored, version=4))
        self.arrays = arrays
        self.check(tensorfs.numpy.load_file(path))
        with tensorfs.safe_open(path, "np") as f:
            self.check({name: f.get_tensor(name) for name in f.keys()})
            self.check(dict(f.tensors()))
            np.testing.assert_array_equal(f.get_slice("wwwwww")[99_000:], arrays["wwwwww"][99_000:])
            np.testing.assert_array_equal(f.get_slice("ww")[3:30:7, 1:4], arrays["ww"][3:30:7, 1:4])
            meta = f.get_tensor_metadata("ww")
            self.assertEqual((meta.pieces, meta.data_offsets, meta.nbytes), ([], None, 660))
        with tensorfs.safe_open(path, "np", copy=False) as f:
            self.check(f.get_tensors())
            np.testing.assert_array_equal(f.get_slice("wwwwww")[99_000:], arrays["wwwwww"][99_000:])
            # Each tensor has memory of its own.
            zeros = f.get_tensors(["ww", "wwwwww"])
            zeros["ww"][:] = 1
            self.assertFalse(zeros["wwwwww"].any())
        with tensorfs.safe_open(path, "np", dtype="f32", include="ww") as f:
            np.testing.assert_array_equal(f.get_tensor("ww"), arrays["ww"].astype(np.float32))
        target = {name: np.ones_like(array) for name, array in arrays.items()}
        tensorfs.load_into(target, path)
        self.check(target)

    def test_a_file_that_is_cut_is_refused(self):
        data = self.file.read_bytes()
        self.file.write_bytes(data[:-200])
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            tensorfs.numpy.load_file(self.file)
        self.assertEqual(caught.exception.kind, "data_truncated")
