"""jax, tensorflow, mlx and paddle, if they are installed: their tensors are compared with those of safetensors."""

import importlib
import importlib.util
import unittest

import numpy as np
import safetensors
import safetensors.numpy

import tensorfs
from checkpoints import hf_set, row_wise
from package import FIXTURES, TestCase

# Word of `framework=`, module, package.
OTHERS = [("flax", "flax", "jax"), ("tf", "tensorflow", "tensorflow"), ("mlx", "mlx", "mlx"), ("paddle", "paddle", "paddle")]
HERE = [other for other in OTHERS if importlib.util.find_spec(other[2])]
EVERY_DTYPE = FIXTURES / "safetensors/all_dtypes.safetensors"


def facts(tensor):
    """Class, dtype, shape and elements of a tensor of any framework."""
    try:
        data = np.asarray(tensor).tobytes()
    except Exception:
        # numpy lacks the dtype.
        data = repr(tensor.astype("float32").tolist())
    return type(tensor), str(tensor.dtype), tuple(tensor.shape), data


def outcome(work):
    try:
        return facts(work())
    except Exception:
        return None


class WithoutThem(TestCase):
    def test_the_words_and_the_modules_are_there_and_a_missing_package_is_named(self):
        for word, module, package in OTHERS:
            self.assertEqual(importlib.import_module(f"tensorfs.{module}").__name__, f"tensorfs.{module}")
            if not importlib.util.find_spec(package):
                with self.assertRaisesRegex(ImportError, package):
                    tensorfs.safe_open(EVERY_DTYPE, word)
                if package == "paddle":
                    ours = importlib.import_module("tensorfs.paddle")
                    self.assertFalse(hasattr(ours, "NPDTYPES"))
                    with self.assertRaisesRegex(AttributeError, package):
                        ours.NPDTYPES
                    exec("from tensorfs.paddle import *", {})

    def test_other_words_are_refused(self):
        for word in ("onnx", "jaxx", ""):
            with self.assertRaisesRegex(tensorfs.SafetensorError, f"framework {word} is invalid"):
                tensorfs.safe_open(EVERY_DTYPE, word)


@unittest.skipUnless(HERE, "needs jax, tensorflow, mlx or paddle")
class Frameworks(TestCase):
    def test_every_dtype_is_what_safetensors_gives(self):
        compared = 0
        for word, _, _ in HERE:
            with tensorfs.safe_open(EVERY_DTYPE, word) as f, safetensors.safe_open(EVERY_DTYPE, word) as g:
                for name in g.keys():
                    right = outcome(lambda: g.get_tensor(name))
                    # safetensors loads U16 as bfloat16 of paddle.
                    if right is None or (word, g.get_slice(name).get_dtype()) == ("paddle", "U16"):
                        continue
                    with self.subTest(framework=word, name=name):
                        for found in (f.get_tensor(name), f.get_slice(name)[...], f.get_tensors([name])[name], dict(f.tensors([name]))[name]):
                            self.assertEqual(facts(found), right)
                        compared += 1
        self.assertGreater(compared, 8 * len(HERE))

    @unittest.skipUnless(importlib.util.find_spec("paddle"), "needs paddle")
    def test_types_of_numpy_for_paddle_are_those_of_safetensors(self):
        ours, genuine = (importlib.import_module(f"{package}.paddle") for package in ("tensorfs", "safetensors"))
        self.assertEqual(ours.NPDTYPES, genuine.NPDTYPES)

    def test_slices_are_what_safetensors_gives(self):
        file = self.tmp / "model.safetensors"
        safetensors.numpy.save_file({"a": np.arange(210, dtype=np.float32).reshape(6, 5, 7)}, file)
        for word, _, _ in HERE:
            with tensorfs.safe_open(file, word) as f, safetensors.safe_open(file, word) as g:
                for index in (np.s_[2], np.s_[1:4], np.s_[:, 2:4], np.s_[..., 3], np.s_[0, 1, 2], np.s_[3:, :, ::2], np.s_[...]):
                    with self.subTest(framework=word, index=index):
                        right = outcome(lambda: g.get_slice("a")[index])
                        if right is not None:
                            self.assertEqual(facts(f.get_slice("a")[index]), right)

    def test_files_are_loaded_and_saved_as_by_the_module_of_safetensors(self):
        arrays = {"b": np.arange(12, dtype=np.float32).reshape(3, 4), "a": np.arange(5, dtype=np.int32), "none": np.zeros((0, 2), np.float32)}
        file, copy = self.tmp / "model.safetensors", self.tmp / "copy.safetensors"
        for word, module, _ in HERE:
            if word == "paddle":
                # safetensors cannot load an empty tensor for paddle.
                del arrays["none"]
            safetensors.numpy.save_file(arrays, file)
            ours, genuine = (importlib.import_module(f"{package}.{module}") for package in ("tensorfs", "safetensors"))
            with self.subTest(framework=word):
                right = {name: facts(tensor) for name, tensor in genuine.load_file(file).items()}
                for found in (ours.load_file(file), ours.load(file.read_bytes()), tensorfs.load_file(file, word, copy=False)):
                    self.assertEqual({name: facts(tensor) for name, tensor in found.items()}, right)
                self.assertEqual(set(ours.load_file(file, names="a")), {"a"})
                # The dict is loaded twice, because `save` may change it.
                self.assertEqual(ours.save(genuine.load_file(file)), genuine.save(genuine.load_file(file)))
                ours.save_file(genuine.load_file(file), copy, {"k": "v"})
                with safetensors.safe_open(copy, "np") as f:
                    self.assertEqual(f.metadata(), {"k": "v"})
                    for name, array in arrays.items():
                        np.testing.assert_array_equal(f.get_tensor(name), array)

    def test_shards_and_pieces_of_ranks_are_put_together(self):
        for make in (hf_set, row_wise):
            folder = make(self.tmp / make.__name__)
            with tensorfs.safe_open(folder, "dlpack") as f:
                right = {name: (tensor.dtype, list(tensor.shape), tensor.tobytes()) for name, tensor in f.get_tensors().items()}
            for word, _, _ in HERE:
                with tensorfs.safe_open(folder, word) as f:
                    for name, tensor in f.tensors():
                        dtype, shape, data = right[name]
                        self.assertEqual(list(tensor.shape), shape)
                        # jax converts other dtypes to shorter ones.
                        if dtype in ("F32", "F16", "I32"):
                            self.assertTrue(np.asarray(tensor).tobytes() == data, name)
                    with f.prefetch() as loader:
                        self.assertEqual({name for name, _ in loader}, set(right))
                with self.assertRaisesRegex(tensorfs.SafetensorError, "has no loads of a process group"):
                    tensorfs.load_file(folder, word, process_group=FakeGroup())


class FakeGroup:
    """Replaces a group of torch. It is refused before any of its methods is called."""
