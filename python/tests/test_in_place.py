"""`import tensorfs as safetensors`: every public name of the genuine package exists, and does the same."""

import importlib
import inspect

import numpy as np
import safetensors
import safetensors.numpy

import tensorfs
import tensorfs.numpy
from checkpoints import hf_set, write_shard
from package import FIXTURES, TestCase, has_torch, needs_torch, python

MODULES = ["safetensors", "safetensors.numpy", *(["safetensors.torch"] if has_torch else [])]


def public(module):
    """Name -> object, without objects that a module has only imported."""
    for name, found in vars(module).items():
        origin = getattr(found, "__module__", None) or ""
        imported = inspect.ismodule(found) or origin.partition(".")[0] in ("typing", "collections")
        if not name.startswith("_") and not imported:
            yield name, found


def parameters(function):
    return list(inspect.signature(function).parameters.values())


class Names(TestCase):
    def test_every_public_name_is_there_and_takes_the_same(self):
        compared = 0
        for module in MODULES:
            genuine = importlib.import_module(module)
            ours = importlib.import_module(module.replace("safetensors", "tensorfs"))
            for name, right in public(genuine):
                with self.subTest(module=module, name=name):
                    found = getattr(ours, name)
                    if inspect.isfunction(right):
                        mine = {one.name: one for one in parameters(found)}
                        positional = [one.name for one in parameters(right) if one.kind is not one.KEYWORD_ONLY]
                        self.assertEqual([*mine][: len(positional)], positional)
                        for one in parameters(right):
                            self.assertEqual((mine[one.name].kind, mine[one.name].default), (one.kind, one.default))
                    compared += 1
        self.assertGreater(compared, 12)
        with self.assertRaises(AttributeError):
            tensorfs.absent
        # Methods of open files and slices.
        file = FIXTURES / "safetensors/all_dtypes.safetensors"
        ours, genuine = (package.safe_open(file, "np") for package in (tensorfs, safetensors))
        for right, found in ((genuine, ours), (genuine.get_slice("t.i64"), ours.get_slice("t.i64"))):
            self.assertLessEqual(*({name for name in dir(one) if not name.startswith("_")} for one in (right, found)))

    def test_names_of_the_next_version_are_there_as_well(self):
        file = self.tmp / "model.safetensors"
        write_shard(file, [("w", "F32", (3, 2), bytes(24))])
        opened = tensorfs.safe_open(file, "np")
        described = opened.get_tensor_meta("w")
        self.assertIsInstance(described, tensorfs.TensorMeta)
        self.assertEqual((described.dtype, described.shape, described.data_offsets), ("F32", [3, 2], (0, 24)))
        self.assertIsInstance(opened.get_slice("w"), tensorfs.PySafeSlice)
        self.assertIsInstance(opened.prefetch(), tensorfs.PrefetchLoader)


class Arrays(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        self.arrays = {
            "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
            "scalar": np.array(2.5),
            "empty": np.zeros((0, 3), np.float16),
            "flags": np.array([True, False]),
        }

    def same(self, found):
        self.assertEqual(set(found), set(self.arrays))
        for name, right in self.arrays.items():
            self.assertEqual((found[name].dtype, found[name].shape), (right.dtype, right.shape))
            np.testing.assert_array_equal(found[name], right)

    def test_what_is_saved_is_what_safetensors_saves(self):
        data = tensorfs.numpy.save(self.arrays, {"k": "v"})
        self.assertEqual(data, safetensors.numpy.save(self.arrays, {"k": "v"}))
        tensorfs.numpy.save_file(self.arrays, self.file, metadata={"k": "v"})
        self.assertEqual(self.file.read_bytes(), data)
        self.same(tensorfs.numpy.load_file(self.file))

    def test_bytes_are_loaded_and_shared_with_nobody(self):
        data = safetensors.numpy.save(self.arrays)
        found = tensorfs.numpy.load(data)
        self.same(found)
        for array in found.values():
            array[...] = 0
        self.same(tensorfs.numpy.load(data))
        described = {name: (one["dtype"], one["shape"], one["data"]) for name, one in tensorfs.deserialize(data)}
        right = {name: (one["dtype"], one["shape"], one["data"]) for name, one in safetensors.deserialize(data)}
        self.assertEqual(described, right)

    def test_bytes_that_are_no_whole_file_are_refused(self):
        data = safetensors.numpy.save(self.arrays)
        for bad in (b"", data[:7], data[:40], data[:-1], data + b"x", bytes(100), b"\xff" * 100):
            with self.subTest(length=len(bad)), self.assertRaises(safetensors.SafetensorError) as e:
                tensorfs.numpy.load(bad)
            self.assertIsInstance(e.exception, tensorfs.SafetensorError)
        for bad in (bytearray(data), "text", None):
            with self.assertRaises(TypeError):
                tensorfs.numpy.load(bad)

    def test_without_safetensors_all_but_saving_works_and_that_says_what_is_missing(self):
        folder = hf_set(self.tmp / "hf")
        code = """
import sys
sys.modules["safetensors"] = None
import numpy, tensorfs as safetensors, tensorfs.numpy
from pathlib import Path
names = tensorfs.numpy.load_file(sys.argv[1])
data = next(Path(sys.argv[1]).glob("*.safetensors")).read_bytes()
assert set(tensorfs.numpy.load(data)) < set(names)
arrays = {"a": numpy.zeros(3)}
a = numpy.arange(3.0)
spec = safetensors.TensorSpec(dtype="float64", shape=[3], data_ptr=a.ctypes.data, data_len=24)
assert tensorfs.numpy.load(safetensors.serialize({"a": spec}))["a"].tolist() == [0, 1, 2]
for save in (lambda: tensorfs.numpy.save(arrays), lambda: tensorfs.numpy.save_file(arrays, sys.argv[2])):
    try:
        save()
    except ImportError as e:
        print(e)
"""
        said = python(code, folder, self.file).splitlines()
        self.assertEqual(len(said), 2)
        for line in said:
            self.assertRegex(line, "not installed: pip install safetensors")
        self.assertFalse(self.file.exists())


class Models(TestCase):
    @needs_torch
    def test_models_with_tied_weights_are_saved_and_loaded_as_by_safetensors(self):
        import safetensors.torch
        import torch

        import tensorfs.torch

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
                self.head.weight = self.embed.weight
                self.register_buffer("first", self.embed.weight.data[:3])
                self.norm = torch.nn.LayerNorm(8)

        file, other = self.tmp / "a.safetensors", self.tmp / "b.safetensors"
        model = Model()
        tensorfs.torch.save_model(model, str(file))
        safetensors.torch.save_model(model, str(other))
        saved, right = (safetensors.safe_open(path, "pt") for path in (file, other))
        self.assertEqual((saved.keys(), saved.metadata()), (right.keys(), right.metadata()))
        for name in right.keys():
            self.assertTrue(torch.equal(saved.get_tensor(name), right.get_tensor(name)), name)
        loaded = Model()
        self.assertEqual(tensorfs.torch.load_model(loaded, file), (set(), []))
        for name, right in model.state_dict().items():
            self.assertTrue(torch.equal(loaded.state_dict()[name], right), name)

        # The names differ from those of the model. Both packages report that in the same words.
        tensorfs.torch.save_file({"norm.bias": torch.zeros(8), "other": torch.zeros(1)}, file)
        answers, words = [], []
        for package in (tensorfs.torch, safetensors.torch):
            answers.append(package.load_model(Model(), file, strict=False))
            with self.assertRaises(RuntimeError) as e:
                package.load_model(Model(), file)
            words.append(str(e.exception))
        self.assertEqual(*answers)
        self.assertEqual(*words)

        # The file has both names of tied weights.
        both = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensorfs.torch.save_file(both, file)
        self.assertEqual(tensorfs.torch.load_model(Model(), file), (set(), []))
        both["head.weight"] += 1
        tensorfs.torch.save_file(both, file)
        with self.assertRaisesRegex(tensorfs.MismatchError, "`embed.weight` and `head.weight`"):
            tensorfs.torch.load_model(Model(), file)

    @needs_torch
    def test_memory_that_names_of_a_model_share_in_part_is_loaded_if_all_of_them_keep_their_bytes(self):
        import torch

        import tensorfs.torch

        low = torch.arange(16.0).reshape(4, 4)
        high, block, half = low + 100, torch.arange(24.0).reshape(6, 4), (low + 0.001).half()

        def shared(make, *shape):
            return lambda: make(torch.zeros(*shape))

        rows = shared(lambda b: {"full": b, "part": b[:2]}, 4, 4)
        overlap = shared(lambda b: {"x": b[:4], "y": b[2:]}, 6, 4)
        transposed = shared(lambda b: {"a": b, "at": b.t()}, 4, 4)
        columns = shared(lambda b: {"even": b[:, ::2], "odd": b[:, 1::2]}, 4, 4)
        typed = shared(lambda b: {"a": b, "i": b.view(torch.int32)}, 4, 4)
        twins = shared(lambda b: {"a": b, "b": b}, 4, 4)
        flat = shared(lambda b: {"a": b, "b": b.view(-1)}, 4, 4)
        conjugated = shared(lambda b: {"a": torch.view_as_complex(b), "c": torch.view_as_complex(b).conj()}, 4, 2)
        turned = torch.view_as_complex(low.reshape(8, 2)[:4].clone())
        nan = torch.full((4, 4), float("nan"))
        cases = [
            (rows, {"full": low, "part": low[:2]}, {"full": low, "part": high[:2]}),
            (overlap, {"x": block[:4], "y": block[2:]}, {"x": low, "y": high}),
            (transposed, {"a": low, "at": low.t()}, {"a": low, "at": low}),
            (columns, {"even": low[:, ::2], "odd": high[:, 1::2]}, None),
            (typed, {"a": low, "i": low.view(torch.int32)}, {"a": low, "i": low.to(torch.int32)}),
            (twins, {"a": low, "b": low.half()}, {"a": low, "b": half}),
            (twins, {"a": nan, "b": nan}, {"a": torch.zeros(4, 4), "b": -torch.zeros(4, 4)}),
            (conjugated, {"a": turned, "c": turned.conj().resolve_conj()}, {"a": turned, "c": turned}),
            (flat, {"a": low, "b": low.view(-1)}, {"a": low, "b": high.view(-1)}),
        ]
        file = self.tmp / "model.safetensors"
        for number, (make, right, wrong) in enumerate(cases):
            for tensors in filter(None, (right, wrong)):
                for order in (list, reversed):
                    with self.subTest(case=number, right=tensors is right, order=order.__name__):
                        model, found = torch.nn.Module(), make()
                        for name in order(list(found)):
                            model.register_buffer(name, found[name])
                        saved = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
                        tensorfs.torch.save_file(saved, file)
                        if tensors is right:
                            self.assertEqual(tensorfs.torch.load_model(model, file), (set(), []))
                            for name, tensor in tensors.items():
                                same = torch.equal(*(t.to(found[name].dtype).nan_to_num(7) for t in (found[name], tensor)))
                                self.assertTrue(same, name)
                            continue
                        pair = "(`.*` and `.*`) share memory.*different bytes"
                        with self.assertRaisesRegex(tensorfs.MismatchError, pair) as e:
                            tensorfs.torch.load_model(model, file)
                        self.assertTrue(all(f"`{name}`" in str(e.exception) for name in tensors))
                        self.assertFalse(any(tensor.any() for tensor in found.values()))

    @needs_torch
    def test_bytes_are_loaded_with_every_dtype_of_torch(self):
        import torch

        import tensorfs.torch

        file = FIXTURES / "safetensors/all_dtypes.safetensors"
        found, right = tensorfs.torch.load(file.read_bytes()), tensorfs.torch.load_file(file)
        self.assertEqual(set(found), set(right))
        for name, tensor in right.items():
            self.assertEqual((found[name].dtype, found[name].shape), (tensor.dtype, tensor.shape), name)
            self.assertTrue(torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (found[name], tensor))))
