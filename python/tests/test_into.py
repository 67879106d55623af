"""`load_into`: loads into existing memory."""

import array

import numpy as np
from safetensors.numpy import save_file

import tensorfs
import tensorfs._into
from checkpoints import column_wise, random_bytes, write_shard
from package import TestCase, needs_torch, python


class LoadInto(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        rng = np.random.default_rng(7)
        self.tensors = {
            "long": np.frombuffer(random_bytes(1, 9_000_000), np.uint8).view(np.float32),
            "matrix": rng.standard_normal((33, 17)).astype(np.float32),
            "numbers": rng.integers(0, 99, (5,)),
            "empty": np.zeros((0, 3), np.float16),
        }
        save_file(self.tensors, self.file)

    def check(self, mapping, names=None):
        for name in names or self.tensors:
            self.assertEqual(bytes(memoryview(mapping[name]).cast("B")) if len(mapping[name]) else b"", self.tensors[name].tobytes())

    def test_arrays_and_buffers_of_any_kind_are_filled(self):
        mapping = {
            "long": bytearray(9_000_000),
            "matrix": np.zeros((33, 17), np.float32),
            "numbers": array.array("q", [0] * 5),
            "empty": np.zeros((0, 3), np.float16),
        }
        self.assertEqual(tensorfs.load_into(mapping, self.file), ([], []))
        self.check(mapping)

    def test_memory_at_any_address_is_filled_and_nothing_around_it(self):
        length = self.tensors["long"].nbytes
        for skip in (0, 1, 64, 4095, 4096):
            around = np.full(length + 3 * 4096, 7, np.uint8)
            start = -around.__array_interface__["data"][0] % 4096 + skip
            into = around[start : start + length].view(np.uint8)
            tensorfs.load_into({"long": memoryview(into)}, self.file, strict=False)
            self.assertEqual(into.tobytes(), self.tensors["long"].tobytes())
            self.assertTrue((around[:start] == 7).all() and (around[start + length :] == 7).all())

    def test_what_speaks_dlpack_is_filled(self):
        with tensorfs.safe_open(self.file, "dlpack") as f:
            mapping = {name: f.get_tensor(name) for name in f.keys()}
        for tensor in mapping.values():
            np.from_dlpack(tensor)[...] = 0
        tensorfs.load_into(mapping, self.file)
        for name, tensor in mapping.items():
            self.assertEqual(tensor.tobytes(), self.tensors[name].tobytes())

        class Older:
            """Supports only DLPack without versions."""

            def __init__(self, of):
                self.of = of

            def __dlpack__(self, stream=None):
                return self.of.__dlpack__()

            def __dlpack_device__(self):
                return self.of.__dlpack_device__()

        into = np.zeros((33, 17), np.float32)
        tensorfs.load_into({"matrix": Older(into)}, self.file, strict=False)
        np.testing.assert_array_equal(into, self.tensors["matrix"])

    def test_whatever_dlpack_of_others_raises_is_one_line_with_the_name_of_the_tensor(self):
        text = "no\n\x1b[31m\tluck"
        for raised in (RuntimeError(text), ValueError(text), BufferError(text), TypeError(text)):

            class Fails:
                def __dlpack__(self, raised=raised, **_):
                    raise raised

                def __dlpack_device__(self):
                    return (1, 0)

            with self.subTest(raised=raised), self.assertRaisesRegex(tensorfs.MismatchError, "`matrix`.*no.*luck") as e:
                tensorfs.load_into({"matrix": Fails()}, self.file, strict=False)
            self.assertTrue(str(e.exception).isprintable())
            self.assertEqual(e.exception.tensor, "matrix")

    def test_what_is_no_mapping_is_refused_with_what_to_give(self):
        class Model:
            def state_dict(self):
                return {}

        for wrong, why in ((Model(), r"state_dict\(\), not Model$"), ([], "mapping.*, not list$"), (None, "not NoneType$")):
            with self.assertRaisesRegex(TypeError, why):
                tensorfs.load_into(wrong, self.file)

    def test_a_path_with_a_nul_byte_is_refused_in_one_line(self):
        bad = f"{self.file}\0.safetensors"
        for source in (bad, type(self.file)(bad), [self.file, bad], {"matrix": bad}):
            with self.subTest(source=source), self.assertRaisesRegex(ValueError, "NUL") as e:
                tensorfs.load_into({}, source, strict=False)
            self.assertTrue(str(e.exception).isprintable())

    def test_pieces_are_put_together_in_place(self):
        folder = column_wise(self.tmp / "dcp")
        right = tensorfs.load_file(folder, "dlpack")
        mapping = {name: bytearray(tensor.nbytes) for name, tensor in right.items()}
        tensorfs.load_into(mapping, folder)
        for name, tensor in right.items():
            self.assertEqual(bytes(mapping[name]), tensor.tobytes())

    def test_names_have_to_be_the_same_unless_it_is_said_otherwise(self):
        mapping = {"matrix": np.zeros((33, 17), np.float32), "other": np.zeros(3)}
        with self.assertRaisesRegex(tensorfs.MismatchError, "not in the checkpoint: other; only in the .*: empty") as e:
            tensorfs.load_into(mapping, self.file)
        self.assertIsInstance(e.exception, RuntimeError)
        self.assertTrue((mapping["matrix"] == 0).all())
        result = tensorfs.load_into(mapping, self.file, strict=False)
        self.assertEqual(result.missing_keys, ["other"])
        self.assertEqual(result.unexpected_keys, ["empty", "long", "numbers"])
        np.testing.assert_array_equal(mapping["matrix"], self.tensors["matrix"])

    def test_what_does_not_fit_is_refused_before_anything_is_written(self):
        frozen = np.zeros((33, 17), np.float32)
        frozen.flags.writeable = False
        long = np.zeros(9_000_000 // 4, np.float32)
        for name, into, why in (
            ("matrix", np.zeros((17, 33), np.float32), r"`matrix`.*\[33, 17\].*\[17, 33\]"),
            ("matrix", np.zeros((33, 17), np.float16), "`matrix`.*F32.*F16.*cast=True"),
            ("matrix", np.zeros((33, 17), np.float64), "`matrix`.*F32.*F64; there is no cast"),
            ("matrix", np.zeros((33, 17), np.int32), "`matrix`.*F32.*I32; there is no cast"),
            ("matrix", np.zeros((33, 34), np.float32)[:, ::2], "contiguous"),
            ("matrix", frozen, "written to"),
            ("matrix", bytearray(7), "`matrix`.*2244.*7"),
            ("matrix", b"x" * 2244, "written to"),
            ("matrix", 7, "`matrix`.*int"),
            ("matrix", np.zeros((33, 17), ">f4"), "`matrix`"),
            ("numbers", np.zeros(5, np.float64), "I64.*F64"),
        ):
            with self.subTest(why=why), self.assertRaisesRegex(tensorfs.MismatchError, why):
                tensorfs.load_into({"long": long, name: into}, self.file, strict=False)
        self.assertTrue((long == 0).all())
        with self.assertRaisesRegex(tensorfs.MismatchError, "share memory"):
            tensorfs.load_into({"matrix": long[: 33 * 17].reshape(33, 17), "long": long}, self.file, strict=False)

    def test_the_two_that_share_memory_in_part_are_named(self):
        long = np.zeros(9_000_000 // 4, np.float32)
        mapping = {"numbers": np.zeros(5, np.int64), "matrix": long[: 33 * 17].reshape(33, 17), "long": long}
        with self.assertRaises(tensorfs.MismatchError) as e:
            tensorfs.load_into(mapping, self.file, strict=False)
        self.assertRegex(str(e.exception), "`(matrix|long)` and `(long|matrix)`")
        self.assertNotIn("numbers", str(e.exception))

    def test_tied_memory_is_filled_if_the_checkpoint_has_the_same_bytes_for_all_its_names(self):
        before = tensorfs._into._COMPARED_MAX
        self.addCleanup(setattr, tensorfs._into, "_COMPARED_MAX", before)
        matrix = np.arange(600 * 70, dtype=np.float32).reshape(600, 70)
        names = ["embed", "head", "third"]
        for compared in (before, 1000):
            tensorfs._into._COMPARED_MAX = compared
            save_file({name: matrix.copy() for name in names}, self.file)
            tied = np.zeros_like(matrix)
            self.assertEqual(tensorfs.load_into(dict.fromkeys(names, tied), self.file), ([], []))
            np.testing.assert_array_equal(tied, matrix)
            flat = np.zeros(matrix.size, np.float32)
            save_file({"embed": matrix, "head": matrix.ravel()}, self.file)
            tensorfs.load_into({"embed": flat.reshape(600, 70), "head": memoryview(flat)}, self.file)
            np.testing.assert_array_equal(flat, matrix.ravel())
            other = matrix.copy()
            other[-1, -1] += 1
            save_file({"embed": matrix, "head": other, "alone": np.ones(3)}, self.file)
            mapping = {"alone": np.zeros(3), "embed": np.zeros_like(matrix)}
            mapping["head"] = mapping["embed"]
            with self.assertRaisesRegex(tensorfs.MismatchError, "`embed` and `head`.*different bytes"):
                tensorfs.load_into(mapping, self.file)
            self.assertFalse(any(array.any() for array in mapping.values()))

    def test_of_tied_names_one_in_the_checkpoint_is_enough(self):
        save_file({"embed": self.tensors["matrix"]}, self.file)
        tied = np.zeros((33, 17), np.float32)
        self.assertEqual(tensorfs.load_into({"head": tied, "embed": tied}, self.file), ([], []))
        np.testing.assert_array_equal(tied, self.tensors["matrix"])
        for other in (tied.reshape(-1), tied.reshape(17, 33), memoryview(tied)):
            self.assertEqual(tensorfs.load_into({"head": other, "embed": tied}, self.file), ([], []))
        for other in (np.zeros((33, 17), np.float32), tied.view(np.int32), tied[:32], 7):
            with self.assertRaisesRegex(tensorfs.MismatchError, "not in the checkpoint: head"):
                tensorfs.load_into({"head": other, "embed": tied}, self.file)

    def test_elements_are_cast_where_that_is_asked_for(self):
        half = np.zeros((33, 17), np.float16)
        tensorfs.load_into({"matrix": half}, self.file, strict=False, cast=True)
        np.testing.assert_array_equal(half, self.tensors["matrix"].astype(np.float16))
        write_shard(self.tmp / "bf16.safetensors", [("w", "BF16", [2], b"\x80?\x00\xc0")])
        single = np.zeros(2, np.float32)
        tensorfs.load_into({"w": single}, self.tmp / "bf16.safetensors", cast=True)
        self.assertEqual(single.tolist(), [1.0, -2.0])
        kinds = [("numbers", np.zeros(5, np.float32))]
        kinds += [("matrix", np.zeros((33, 17), dtype)) for dtype in ("i4", "u1", "?", "f8", "c8")]
        for name, into in kinds:
            with self.subTest(dtype=into.dtype), self.assertRaisesRegex(tensorfs.MismatchError, "there is no cast") as e:
                tensorfs.load_into({name: into}, self.file, strict=False, cast=True)
            self.assertEqual(e.exception.tensor, name)
            self.assertFalse(into.any())

    @needs_torch
    def test_the_parameters_of_a_model_are_filled_in_place(self):
        import torch
        from safetensors.torch import save_file as save_torch

        model, other = (torch.nn.Sequential(torch.nn.Linear(70, 80), torch.nn.LayerNorm(80)) for _ in "ab")
        save_torch(model.state_dict(), self.file)
        before = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
        result = tensorfs.load_into(other.state_dict(), self.file)
        self.assertEqual(result, ([], []))
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(other.state_dict()[name], tensor))
            self.assertEqual(other.state_dict()[name].data_ptr(), before[name])
        half = {name: torch.zeros_like(tensor, dtype=torch.bfloat16) for name, tensor in model.state_dict().items()}
        tensorfs.load_into(half, self.file, cast=True)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(half[name], tensor.to(torch.bfloat16)))
        for bad in (torch.zeros(80, 70).t(), torch.zeros(80, 70, device="meta"), torch.zeros(80, 70).to_sparse()):
            with self.assertRaises(tensorfs.MismatchError):
                tensorfs.load_into({"0.weight": bad}, self.file, strict=False)


SETUP = """
import sys
import torch, tensorfs
from safetensors.torch import load_file
right = load_file(sys.argv[1])["w"]

def refused(label, into, why):
    try:
        tensorfs.load_into({"w": into}, sys.argv[1])
    except tensorfs.MismatchError as e:
        assert "`w`" in str(e) and e.tensor == "w", e
        assert why in str(e), f"{label}: {e}"
    else:
        raise AssertionError(f"{label} was not refused")

def filled(into, memory=None):
    assert tensorfs.load_into({"w": into}, sys.argv[1]) == ([], [])
    assert torch.equal(into if memory is None else memory, right)
"""


class OfTorch(TestCase):
    """Each test runs in its own interpreter, because an error here ends the interpreter."""

    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        save_file({"w": np.random.default_rng(7).standard_normal((33, 17)).astype(np.float32)}, self.file)

    def run_torch(self, code):
        self.assertEqual(python(f"{SETUP}{code}\nprint('done')", self.file), "done\n")

    @needs_torch
    def test_a_backward_pass_that_needs_the_weights_of_before_is_refused_as_after_load_state_dict(self):
        self.run_torch("""
file = sys.argv[1]
linear = torch.nn.Linear(17, 33, bias=False)
base, tied, lone = torch.ones(33, 17), torch.ones(33, 17), torch.ones(33, 17)
separate = base.data
mappings = {
    "state dict": (linear.weight, linear.state_dict()),
    "parameter": (linear.weight, dict(linear.named_parameters())),
    "view": (base, {"weight": base.view(-1).view(33, 17)}),
    "base": (base[:], {"weight": base}),
    "data of a tensor": (separate, {"weight": separate}),
    "two names": (tied.data, {"weight": tied, "other": None}),
    "a name that the checkpoint lacks": (lone.data, {"weight": lone, "again": None}),
}
mappings["two names"][1]["other"] = mappings["two names"][0]
mappings["a name that the checkpoint lacks"][1]["again"] = mappings["a name that the checkpoint lacks"][0]

def backward_is_refused(used, load, fails=None):
    x = torch.ones(2, 17, requires_grad=True)
    y = (x @ used.t()).sum()
    try:
        load()
    except Exception as e:
        assert fails is not None and fails in str(e), e
    else:
        assert fails is None
    try:
        y.backward()
    except RuntimeError as e:
        return "modified by an inplace operation" in str(e)
    return False

def check():
    for kind, (used, mapping) in mappings.items():
        strict = kind != "two names"
        source = file if strict else both
        assert backward_is_refused(used, lambda: tensorfs.load_into(mapping, source, strict=strict)), kind
        if "other" in mapping or "again" in mapping:
            continue
        truncated = sys.argv[1] + ".again.safetensors"
        save_file({"weight": torch.ones(33, 17)}, truncated)
        def fail():
            genuine = tensorfs._into.open_checkpoint
            def opened_and_cut(*arguments):
                opened = genuine(*arguments)
                os.truncate(truncated, 1000)
                return opened
            tensorfs._into.open_checkpoint = opened_and_cut
            try:
                tensorfs.load_into(mapping, truncated)
            finally:
                tensorfs._into.open_checkpoint = genuine
        assert backward_is_refused(used, fail, truncated), kind
    # Nothing is written, and nothing counted, if a target does not fit.
    for wrong in ({"weight": torch.ones(3)}, {"weight": torch.ones(33, 17), "more": torch.ones(1)}):
        before = [t._version for t in wrong.values()]
        try:
            tensorfs.load_into(wrong, file)
        except tensorfs.MismatchError:
            assert [t._version for t in wrong.values()] == before
        else:
            raise AssertionError
    with torch.inference_mode():
        inference = torch.zeros(33, 17)
        tensorfs.load_into({"weight": inference}, file)
        tensorfs.load_into({"weight": base}, file)
    tensorfs.load_into({"weight": inference}, file)
    assert (inference == 1).all() and inference.is_inference()
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bfloat16):
        for shape in ((), (3,), (0, 2)):
            small = torch.zeros(shape, dtype=dtype)
            save_file({"s": small}, sys.argv[1] + ".s.safetensors")
            before = small._version
            tensorfs.load_into({"s": small}, sys.argv[1] + ".s.safetensors")
            assert small._version > before, (dtype, shape)

import os
import tensorfs._into
from safetensors.torch import save_file
save_file({"weight": torch.ones(33, 17)}, file)
both = file + ".both.safetensors"
save_file({"weight": torch.ones(33, 17), "other": torch.ones(33, 17)}, both)
assert backward_is_refused(linear.weight, lambda: linear.load_state_dict({"weight": torch.ones(33, 17)}))
check()
# Older versions of torch lack it.
torch.autograd.graph.__dict__.pop("increment_version")
check()
""")

    @needs_torch
    def test_tensors_without_memory_of_their_own_are_refused(self):
        self.run_torch("""
from torch._subclasses.fake_tensor import FakeTensorMode

class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("not called")

with FakeTensorMode():
    fake = torch.empty(33, 17)
resized, short = torch.zeros(33, 17), torch.zeros(33, 17)
resized.untyped_storage().resize_(0)
short.untyped_storage().resize_(33 * 17 * 4 - 1)
refused("wrapper", Wrapper(right), "Wrapper")
refused("fake", fake, "FakeTensor")
refused("fake parameter", torch.nn.Parameter(fake), "FakeTensor")
refused("meta", torch.zeros(33, 17, device="meta"), "meta")
refused("lazy", torch.nn.LazyLinear(33).weight, "not initialized")
refused("freed", resized, "0 bytes of memory")
refused("too short", short, "2243 bytes of memory")
refused("functional", torch._to_functional_tensor(torch.zeros(33, 17)), "memory")
refused("zero", torch._efficientzerotensor(33, 17), "memory")
refused("sparse", torch.zeros(33, 17).to_sparse(), "layout")
refused("quantized", torch.quantize_per_tensor(torch.zeros(33, 17), 1.0, 0, torch.qint8), "quantized")
refused("conjugated", torch.zeros(33, 17, dtype=torch.complex64).conj(), "contiguous")
refused("transposed", torch.zeros(17, 33).t(), "contiguous")
refused("columns", torch.nn.Parameter(torch.zeros(33, 34)[:, ::2]), "contiguous")
refused("expanded", torch.zeros(1, 17).expand(33, 17), "contiguous")
torch.func.vmap(lambda x: (refused("vmap", x, "no memory"), x.sum())[1])(torch.zeros(2, 33, 17))
""")

    @needs_torch
    def test_memory_that_must_not_be_written_to_is_refused_before_anything_is_written(self):
        self.run_torch("""
import numpy as np, warnings
from safetensors.torch import save_file
warnings.simplefilter("ignore")
np.zeros((33, 17), np.float32).tofile(sys.argv[1] + ".bin")
mapped = torch.from_numpy(np.memmap(sys.argv[1] + ".bin", np.float32, "r", shape=(33, 17)))

class Speaks:
    __dlpack_device__ = lambda self: (1, 0)
    __dlpack__ = lambda self, **_: mapped.__dlpack__()

refused("mapped", mapped, "must not be written to")
refused("DLPack", Speaks(), "must not be written to")
save_file({"a": torch.ones(3), "w": right}, sys.argv[1] + ".2")
first = torch.zeros(3)
try:
    tensorfs.load_into({"a": first, "w": mapped}, sys.argv[1] + ".2")
except tensorfs.MismatchError as e:
    assert e.tensor == "w", e
assert (first == 0).all()
# A private mapping accepts writes, and its file does not change.
copied = torch.from_numpy(np.memmap(sys.argv[1] + ".bin", np.float32, "c", shape=(33, 17)))
filled(copied)
assert not np.fromfile(sys.argv[1] + ".bin", np.float32).any()
shared = np.memmap(sys.argv[1] + ".bin", np.float32, "r+", shape=(33, 17))
filled(shared, torch.from_numpy(shared))
# The checks change no target, even if the load is refused because of another one.
kept = torch.full((3,), 7.0)
try:
    tensorfs.load_into({"a": kept, "w": mapped}, sys.argv[1] + ".2")
except tensorfs.MismatchError:
    pass
assert (kept == 7).all()
""")

    @needs_torch
    def test_a_class_cannot_say_where_the_memory_of_its_tensors_lies(self):
        self.run_torch("""
import numpy as np

class Pointer(torch.Tensor):
    def data_ptr(self):
        return 4096

class Shape(torch.Tensor):
    shape = property(lambda self: torch.Size([33, 17]))
    nbytes = property(lambda self: 33 * 17 * 4)
    device = property(lambda self: torch.device("cpu"))
    untyped_storage = lambda self: torch.zeros(33, 17).untyped_storage()

class Array(np.ndarray):
    shape = property(lambda self: (33, 17))
    nbytes = property(lambda self: 33 * 17 * 4)

class Address(np.ndarray):
    __array_interface__ = {"data": (4096, False)}

class Frozen(np.ndarray):
    flags = type("Flags", (), {"c_contiguous": True, "writeable": True})

plain = torch.zeros(33, 17)
filled(plain.as_subclass(Pointer), plain)
refused("shape", torch.zeros(1).as_subclass(Shape), "shape [33, 17], the target [1]")
refused("array", np.zeros(1, np.float32).view(Array), "shape [33, 17], the target [1]")
array = np.zeros((33, 17), np.float32)
filled(array.view(Address), torch.from_numpy(array))
array.flags.writeable = False
refused("frozen", array.view(Frozen), "must not be written to")
""")

    @needs_torch
    def test_what_is_memory_is_filled_whatever_its_class(self):
        self.run_torch("""
class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return 4096

class Weight(torch.nn.Parameter):
    pass

plain = torch.zeros(33, 17)
filled(plain.as_subclass(Subclass), plain)
filled(torch.zeros(33, 17, requires_grad=True))
filled(torch.nn.Parameter(torch.zeros(33, 17)))
filled(Weight(torch.zeros(33, 17)))
around = torch.full((40, 17), 7.0)
filled(around[3:36])
assert (around[:3] == 7).all() and (around[36:] == 7).all()
original = torch.zeros(33, 17)
filled(torch._lazy_clone(original))
assert (original == 0).all()
""")

    @needs_torch
    def test_where_torch_gives_tensors_of_another_dtype_nothing_is_loaded(self):
        self.run_torch("""
genuine = torch.empty

def halved(*given, **named):
    made = genuine(*given, **named)
    return made.to(torch.bfloat16) if made.is_floating_point() else made

with tensorfs.safe_open(sys.argv[1], "pt") as f:
    part = f.get_slice("w")
    torch.empty = halved
    for load in (lambda: f.get_tensor("w"), lambda: part[1:3], lambda: part[:, 2], lambda: part[::2]):
        try:
            load()
        except tensorfs.SafetensorError as e:
            assert "torch.bfloat16" in str(e) and isinstance(e, tensorfs.MismatchError), e
        else:
            raise AssertionError("not refused")
""")

    @needs_torch
    def test_where_torch_gives_tensors_without_memory_nothing_is_loaded(self):
        self.run_torch("""
from torch._subclasses.fake_tensor import FakeTensorMode
with tensorfs.safe_open(sys.argv[1], "pt") as f, FakeTensorMode():
    part = f.get_slice("w")
    for load in (lambda: f.get_tensor("w"), f.get_tensors, lambda: part[1:3], lambda: part[:, 2], lambda: part[::2],
                 lambda: part[[0, 1]], lambda: list(f.tensors())):
        try:
            load()
        except tensorfs.SafetensorError as e:
            assert "without memory" in str(e), e
        else:
            raise AssertionError("not refused")
""")

    @needs_torch
    def test_tied_weights_are_filled_once(self):
        self.run_torch("""
from safetensors.torch import save_file, save_model

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

model = Tied()
both = {name: tensor.clone() for name, tensor in model.state_dict().items()}
for save in (lambda: save_model(model, sys.argv[1]), lambda: save_file(both, sys.argv[1])):
    save()
    for names in (lambda m: m.state_dict(), lambda m: dict(m.named_parameters(remove_duplicate=False))):
        other = Tied()
        assert tensorfs.load_into(names(other), sys.argv[1]) == ([], [])
        assert torch.equal(other.head.weight, model.embed.weight)
        assert other.head.weight.data_ptr() == other.embed.weight.data_ptr()
save_file({"embed.weight": both["embed.weight"]}, sys.argv[1])
weight = torch.zeros(50, 8)
for twin in (weight.view(-1), weight.view(8, 50), weight.numpy()):
    assert tensorfs.load_into({"embed.weight": weight, "head.weight": twin}, sys.argv[1]) == ([], [])
both["head.weight"] += 1
save_file(both, sys.argv[1])
other = Tied()
before = other.embed.weight.clone()
try:
    tensorfs.load_into(other.state_dict(), sys.argv[1])
except tensorfs.MismatchError as e:
    assert "`embed.weight` and `head.weight`" in str(e), e
else:
    raise AssertionError("not refused")
assert torch.equal(other.embed.weight, before)
""")
