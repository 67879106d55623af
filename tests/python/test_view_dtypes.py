"""`dtype=` and `keep=`: tensors that are cast while they are read."""

import json
import random

import numpy as np
from safetensors import safe_open

import checkpoints
import oracle
from checkpoints import DcpSet, boxes
from mounts import Mount, TestCase, tensorfs
from test_view_layouts import Refusals

FILE = "model.safetensors"
WORDS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}
UINT = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
EXPONENT = {"F64": 0x7FF << 52, "F32": 0xFF << 23, "F16": 0x1F << 10, "BF16": 0xFF << 7}
FRACTION = {"F64": (1 << 52) - 1, "F32": (1 << 23) - 1, "F16": (1 << 10) - 1, "BF16": (1 << 7) - 1}


def numbers(seed, dtype, count):
    """Random bits of all exponents, subnormals and infinities among them, but no NaN: its bits depend on processors."""
    kind = np.dtype(UINT[dtype])
    bits = np.frombuffer(checkpoints.random_bytes(seed, count * kind.itemsize), kind).copy()
    special = bits & kind.type(EXPONENT[dtype]) == EXPONENT[dtype]
    bits[special] &= kind.type(~FRACTION[dtype] & ((1 << 8 * kind.itemsize) - 1))
    # Some of them are ties of a narrower type.
    bits[: min(8, count)] = bits[: min(8, count)] & kind.type(~0x7FF & ((1 << 8 * kind.itemsize) - 1))
    return bits


@np.errstate(all="ignore")
def cast(data, dtype, to):
    """As torch casts on the CPU: wide types by way of F32, to the nearest, ties to even."""
    if dtype == to:
        return data
    bits = np.frombuffer(data, UINT[dtype])
    if dtype == "BF16":
        single = (bits.astype(np.uint32) << 16).view(np.float32)
    else:
        single = bits.view({"F64": np.float64, "F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)
    if to == "F32":
        return single.tobytes()
    if to == "F16":
        return single.astype(np.float16).tobytes()
    wide = single.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def shape_of(tensor):
    return tensor.shape


def cast_all(tensors, to, keep=()):
    for tensor in tensors:
        if tensor.dtype in UINT and tensor.name not in keep:
            tensor.data, tensor.dtype = cast(tensor.data, tensor.dtype, to), to
    return tensors


def dcp(folder):
    """Tensors of every floating type in boxes of every form."""
    one, seed = DcpSet(), 11
    for name, dtype, shape, counts in (
        ("rows", "F32", (1001, 301), (4, 1)), ("columns", "F32", (333, 1027), (1, 3)), ("grid", "F64", (201, 77), (2, 3)),
        ("half", "BF16", (999, 129), (3, 2)), ("cube", "F32", (11, 31, 57), (2, 2, 2)), ("norm", "BF16", (4099,), (3,)),
        ("one", "F64", (1,), (3,)),
    ):
        seed += 1
        data = numbers(seed, dtype, int(np.prod(shape)))
        width = data.itemsize
        one.place(name, data.view(np.uint8).reshape(*shape, width), boxes(shape, counts), width)
    one.cut("bytes", (1000, 31), (3, 1), 1)
    return one.save(folder)


def hf(folder):
    """Two shards with every floating type, integers, a scalar and an empty tensor."""
    folder.mkdir()
    for shard in (1, 2):
        tensors = [
            (f"s{shard}.{dtype}", dtype, [7, 3 * shard, 501], numbers(shard, dtype, 7 * 3 * shard * 501).tobytes())
            for dtype in ("F64", "F32", "F16", "BF16")
        ]
        tensors += [(f"s{shard}.ints", "I32", [9], checkpoints.random_bytes(shard, 36)),
                    (f"s{shard}.scalar", "F32", [], numbers(shard, "F32", 1).tobytes()),
                    (f"s{shard}.empty", "F32", [0, 5], b""), (f"s{shard}.flags", "BOOL", [3], b"\0\1\0"),
                    (f"s{shard}.odd", "U8", [5], b"12345")]
        checkpoints.write_shard(folder / checkpoints.shard_name(shard, 2), tensors)
    return folder


class Casts(TestCase):
    def test_every_file_is_the_one_that_numpy_makes(self):
        for source in (dcp(self.tmp / "dcp"), hf(self.tmp / "hf")):
            for word, to in WORDS.items():
                tensors, metadata = oracle.tensors_of(source)
                expected = oracle.write(cast_all(tensors, to), metadata)
                with self.subTest(source=source.name, to=to), Mount(source, f"dtype={word}") as m:
                    self.assert_same((m.path / FILE).read_bytes(), expected, to)
                    with safe_open(m.path / FILE, "np") as file:
                        self.assertEqual(set(file.keys()), {tensor.name for tensor in tensors})
                    rng = random.Random(word)
                    with open(m.path / FILE, "rb", buffering=0) as file:
                        for _ in range(40):
                            start, length = rng.randrange(len(expected)), rng.choice([1, 3, 4095, 70_001, 3_000_000])
                            file.seek(start)
                            self.assert_same(file.read(length), expected[start : start + length], f"{start}+{length}")

    def test_past_the_page_cache_and_by_threads_the_bytes_are_the_same(self):
        source = dcp(self.tmp / "dcp")
        tensors, metadata = oracle.tensors_of(source)
        expected = oracle.write(cast_all(tensors, "BF16"), metadata)
        for options in (("direct=always", "io=pread"), ("direct=always",), ("cache=16M", "direct=never")):
            with Mount(source, "dtype=bf16", *options) as m:
                self.assert_same((m.path / FILE).read_bytes(), expected, options)

    def test_casts_combine_with_other_views(self):
        source = dcp(self.tmp / "dcp")
        rules = self.tmp / "rules.toml"
        rules.write_text("[[rename]]\nfrom = 'norm'\nto = 'final_norm'\n")
        tensors, metadata = oracle.tensors_of(source)
        left = [t for t in tensors if t.name != "cube"]
        for tensor in left:
            tensor.name = {"norm": "final_norm"}.get(tensor.name, tensor.name)
        expected = oracle.write(cast_all(left, "F16", keep=("final_norm", "grid")), metadata)
        options = ["exclude=cube", f"rename={rules}", "dtype=f16", "keep=*norm", "keep=gr?d"]
        with Mount(source, *options) as m:
            self.assert_same((m.path / FILE).read_bytes(), expected)
        with Mount(source, *options, "layout=shards=3") as m:
            found = {}
            for path in m.path.glob("*.safetensors"):
                found.update(oracle.tensor_bytes(path))
            self.assertEqual(found, {t.name: (t.dtype, t.shape, t.data) for t in left})
            weight_map = json.loads((m.path / f"{FILE}.index.json").read_text())
            self.assertEqual(weight_map["metadata"]["total_size"], sum(len(t.data) for t in left))

    def test_a_list_of_dtypes_is_followed_as_that_of_nemo(self):
        source = hf(self.tmp / "hf")
        wanted = {"s1.F32": "torch.bfloat16", "s1.F64": "F32", "s2.BF16": "torch.float32", "s1.ints": "torch.int32"}
        names = {"torch.bfloat16": "BF16", "torch.float32": "F32"}
        mapping = self.tmp / "dtypes.json"
        mapping.write_text(json.dumps(wanted))
        tensors, metadata = oracle.tensors_of(source)
        for tensor in tensors:
            to = names.get(wanted.get(tensor.name), wanted.get(tensor.name))
            if to in UINT:
                tensor.data, tensor.dtype = cast(tensor.data, tensor.dtype, to), to
        with Mount(source, f"dtype=map={mapping}") as m:
            self.assert_same((m.path / FILE).read_bytes(), oracle.write(tensors, metadata))

    def test_quantized_tensors_and_their_scales_stay(self):
        folder = self.tmp / "fp8"
        folder.mkdir()
        number = numbers(1, "F32", 6).tobytes()
        stay = [
            ("l.q.weight", "F8_E4M3", [6], b"123456"), ("l.q.weight_scale_inv", "F32", [6], number),
            ("l.q.input_scale", "F32", [6], number), ("l.k_scale", "F32", [6], number),
            ("l.u.weight", "U8", [6], b"123456"), ("l.u.weight.absmax", "F32", [6], number),
            ("l.ids", "I64", [1], b"12345678"), ("l.four", "F4", [4], b"12"),
        ]
        go = [("l.norm.weight", "F32", [6], number), ("l.u.bias", "F32", [6], number)]
        checkpoints.write_shard(folder / FILE, stay + go)
        with Mount(folder, "dtype=bf16") as m:
            found = oracle.tensor_bytes(m.path / FILE)
        self.assertEqual({n: f for n, f in found.items() if n in {s[0] for s in stay}}, {s[0]: s[1:] for s in stay})
        for name, dtype, shape, data in go:
            self.assertEqual(found[name], ("BF16", shape, cast(data, dtype, "BF16")))

    def test_commands_cast_as_mounts_do(self):
        source = dcp(self.tmp / "dcp")
        tensors, _ = oracle.tensors_of(source)
        expected = {t.name: (t.dtype, t.shape, t.data) for t in cast_all(tensors, "BF16", keep=("norm",))}
        options = ["-o", "dtype=bf16", "-o", "keep=norm"]
        for form in ("safetensors", "bintensors"):
            out = self.tmp / f"out.{form}"
            self.assert_done(tensorfs("convert", source, out, f"--to={form}", *options))
            if form == "bintensors":
                back = self.tmp / "back.safetensors"
                self.assert_done(tensorfs("convert", out.rename(self.tmp / "out.bt"), back, "--to=safetensors"))
                out = back
            self.assertEqual(oracle.tensor_bytes(out), expected)
        loaded = tensorfs("load", source, "--json", *options)
        self.assert_done(loaded)
        self.assertEqual(loaded.json()["bytes"], sum(len(data) for *_, data in expected.values()))

    def test_checksums_are_compared_before_the_cast(self):
        source = dcp(self.tmp / "dcp")
        index = self.tmp / "index"
        self.assert_done(tensorfs("verify", source, f"--index-dir={index}"))
        tensors, metadata = oracle.tensors_of(source)
        expected = oracle.write(cast_all(tensors, "BF16"), metadata)
        with Mount(source, f"index-dir={index}", "verify=read", "dtype=bf16") as m:
            self.assert_same((m.path / FILE).read_bytes(), expected)


class Refused(Refusals):
    def test_words_and_lists_that_are_none_are_usage_errors(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        mapping = self.tmp / "dtypes.json"
        mapping.write_text('{"embed": "F33"}')
        for option, said in (
            ("dtype=f8", "bf16, f16, f32"), ("dtype=", "bf16"), ("dtype=map=", "bf16"), ("keep=norm", "keep needs dtype="),
            ("dtype=bf16,keep=[", "glob"), (f"dtype=map={mapping}", "F33"), ("layout=original,dtype=bf16", "dtype="),
            (f"dtype=map={self.tmp}/none", "none"),
        ):
            outcome = self.refused(source, option)
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn(said, outcome.stderr)

    def test_casts_that_there_are_not_are_refused_with_the_tensor(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        mapping = self.tmp / "dtypes.json"
        for wanted, said in (
            ({"bytes": "BF16"}, "tensor `bytes`: U8 cannot be cast to BF16"), ({"embed": "I32"}, "F32 cannot be cast to I32"),
            ({"gone": "F16"}, "gone"),
        ):
            mapping.write_text(json.dumps(wanted))
            outcome = self.refused(source, f"dtype=map={mapping}")
            self.assertEqual(outcome.code, 1)
            self.assertIn(said, outcome.stderr)
        outcome = self.refused(source, "dtype=bf16,keep=nothing*")
        self.assertIn("keep=`nothing*` matches none", outcome.stderr)
