"""`dtype=like:FILE`: each tensor in the dtype that it has in another checkpoint."""

import json
import os

import checkpoints
import oracle
from mounts import Mount, TestCase, tensorfs
from test_view_dtypes import cast, numbers
from test_view_layouts import Refusals

FILE = "model.safetensors"
SHAPES = {"layers.0.norm": (64,), "layers.0.up": (96, 64), "layers.1.down": (64, 96), "layers.1.half": (33, 7), "ids": (5,)}
# The dtypes of a model before it was trained, and those that training saves.
FIRST = {"layers.0.norm": "F32", "layers.0.up": "BF16", "layers.1.down": "BF16", "layers.1.half": "F16", "ids": "I64"}
TRAINED = {"layers.0.norm": "F32", "layers.0.up": "F32", "layers.1.down": "F32", "layers.1.half": "F32", "ids": "I64"}


def count(shape):
    return shape[0] * count(shape[1:]) if shape else 1


def save(folder, dtypes, shards=2, with_map=True):
    """The tensors in files with the names of the hub."""
    folder.mkdir()
    tensors = []
    for seed, (name, dtype) in enumerate(dtypes.items()):
        size = count(SHAPES[name])
        data = checkpoints.random_bytes(seed, 8 * size) if dtype == "I64" else numbers(seed, dtype, size).tobytes()
        tensors.append((name, dtype, list(SHAPES[name]), data))
    names = {}
    for number in range(shards):
        file = checkpoints.shard_name(number + 1, shards) if shards > 1 else FILE
        own = tensors[number::shards]
        checkpoints.write_shard(folder / file, own)
        names.update({name: file for name, *_ in own})
    if with_map:
        (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def like(source, dtypes, keep=()):
    tensors, metadata = oracle.tensors_of(source)
    for tensor in tensors:
        if tensor.dtype != dtypes.get(tensor.name, tensor.dtype) and tensor.name not in keep:
            tensor.data, tensor.dtype = cast(tensor.data, tensor.dtype, dtypes[tensor.name]), dtypes[tensor.name]
    return tensors, metadata


class Like(TestCase):
    def setUp(self):
        super().setUp()
        self.source = save(self.tmp / "trained", TRAINED)
        self.first = save(self.tmp / "first", FIRST, shards=3)
        tensors, self.metadata = like(self.source, FIRST)
        self.expected = {t.name: (t.dtype, t.shape, t.data) for t in tensors}
        self.whole = oracle.write(tensors, self.metadata)

    def test_a_checkpoint_in_any_form_says_the_dtypes(self):
        one = save(self.tmp / "one", FIRST, shards=1, with_map=False)
        bare = save(self.tmp / "bare", FIRST, shards=2, with_map=False)
        self.assert_done(tensorfs("verify", one, "--write-manifest"))
        manifest = next(one.glob("*manifest.json"))
        self.assert_done(tensorfs("convert", one, self.tmp / "one.bt", "--to", "bintensors"))
        named = [self.first, self.first / f"{FILE}.index.json", one, one / FILE, bare, manifest, self.tmp / "one.bt"]
        with Mount(self.first) as m:
            for reference in [*named, m.path, m.path / FILE]:
                with self.subTest(reference), Mount(self.source, f"dtype=like:{reference}") as mounted:
                    self.assert_same((mounted.path / FILE).read_bytes(), self.whole, reference)

    def test_names_are_those_of_the_view_and_kept_tensors_need_none(self):
        rules = self.tmp / "rules.toml"
        rules.write_text("[[rename]]\nregex = '^layers'\nto = 'blocks'\n")
        dtypes = {name.replace("layers", "blocks"): dtype for name, dtype in FIRST.items()}
        SHAPES.update({name.replace("layers", "blocks"): shape for name, shape in SHAPES.items()})
        del dtypes["blocks.0.up"]
        reference = save(self.tmp / "renamed", {**dtypes, "blocks.0.norm": "BF16"})
        tensors, metadata = oracle.tensors_of(self.source)
        left = [tensor for tensor in tensors if tensor.name != "ids"]
        for tensor in left:
            tensor.name = tensor.name.replace("layers", "blocks")
            if tensor.name in ("blocks.1.down", "blocks.1.half"):
                tensor.data, tensor.dtype = cast(tensor.data, "F32", dtypes[tensor.name]), dtypes[tensor.name]
        options = [f"rename={rules}", "exclude=ids", f"dtype=like:{reference}", "keep=*.up", "keep=*.norm"]
        with Mount(self.source, *options) as m:
            self.assert_same((m.path / FILE).read_bytes(), oracle.write(left, metadata))

    def test_commands_and_files_of_views_take_it(self):
        option = f"dtype=like:{self.first}"
        out = self.tmp / "out.safetensors"
        self.assert_done(tensorfs("convert", self.source, out, "--to=safetensors", "-o", option))
        self.assertEqual(oracle.tensor_bytes(out), self.expected)
        loaded = tensorfs("load", self.source, "--json", "-o", option)
        self.assert_done(loaded)
        self.assertEqual(loaded.json()["bytes"], sum(len(data) for *_, data in self.expected.values()))
        self.assert_done(tensorfs("consolidate", self.source, self.tmp / "out", "-o", option))
        self.assert_same((self.tmp / "out" / FILE).read_bytes(), self.whole)
        views = self.tmp / "views.toml"
        views.write_text('[view.first]\ndtype = "like:first"\n[view.plain]\n')
        with Mount(self.source, f"views={views}") as m:
            self.assert_same((m.path / "first" / FILE).read_bytes(), self.whole)
            self.assertEqual(oracle.tensor_bytes(m.path / "plain" / FILE), {t.name: (t.dtype, t.shape, t.data) for t in oracle.tensors_of(self.source)[0]})

    def test_a_mount_whose_reference_has_changed_since_is_read_as_it_is(self):
        with Mount(self.source, f"dtype=like:{self.first}") as m:
            known = json.loads(os.getxattr(m.path, "user.tensorfs.source"))["view"]
            self.assertEqual((known["dtype"], list(known["files"])), (f"like:{self.first}", [str(self.first)]))
            listed = lambda: {t["name"]: t["dtype"] for t in tensorfs("ls", m.path, "--json").json()["sets"][0]["tensors"]}
            self.assertEqual(listed(), FIRST)
            for path in self.first.iterdir():
                path.unlink()
            self.assertEqual(listed(), FIRST)
            self.first.rmdir()
            save(self.first, {**FIRST, "layers.0.up": "F16"})
            self.assertEqual(listed(), FIRST)


class Refused(Refusals):
    def test_a_reference_that_is_none_is_a_usage_error_before_the_source_is_read(self):
        source = self.tmp / "gone"
        (self.tmp / "empty").mkdir()
        first = save(self.tmp / "first", FIRST)
        (first / "other.safetensors").write_bytes((first / checkpoints.shard_name(1, 2)).read_bytes())
        two = save(self.tmp / "two", FIRST)
        checkpoints.write_shard(two / "model.fp16.safetensors", [("layers.0.up", "F16", [1], b"ab")])
        lost = save(self.tmp / "lost", FIRST)
        (lost / checkpoints.shard_name(2, 2)).unlink()
        broken = self.tmp / "broken.safetensors"
        broken.write_bytes(b"\xff" * 100)
        os.mkfifo(self.tmp / "fifo.safetensors")
        for name, said in (
            ("", "bf16, f16, f32, map=FILE or like:FILE"), (self.tmp / "none", "none: No such file"), (self.tmp / "empty", "no weights files in this folder"),
            (two, "tensor `layers.0.up` is F16 here, and BF16 in another file of the folder; name one file"),
            (lost / f"{FILE}.index.json", checkpoints.shard_name(2, 2)), (broken, "broken.safetensors"),
            (self.tmp / "fifo.safetensors", "is not a regular file"),
        ):
            outcome = self.refused(source, f"dtype=like:{name}")
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn(said, outcome.stderr)
        # The same dtypes twice are no contradiction.
        with Mount(save(self.tmp / "trained", TRAINED), f"dtype=like:{first}"):
            pass

    def test_tensors_that_do_not_fit_are_refused_with_their_names(self):
        source = save(self.tmp / "trained", TRAINED)
        some = {name: dtype for name, dtype in FIRST.items() if ".0." not in name}
        for dtypes, said in (
            (some, ("like:", "does not have 2 tensors of the view: layers.0.norm, layers.0.up; keep=GLOB leaves tensors as they are")),
            ({name: dtype for name, dtype in FIRST.items() if name != "layers.0.up"}, ("like:", "does not have 1 tensor of the view: layers.0.up; keep=")),
            ({**FIRST, "ids": "F32"}, ("tensor `ids`", "I64 cannot be cast to F32; keep it")),
            ({**FIRST, "layers.0.up": "I64"}, ("tensor `layers.0.up`", "F32 cannot be cast to I64")),
        ):
            reference = save(self.tmp / f"first-{len(list(self.tmp.iterdir()))}", dtypes)
            outcome = self.refused(source, f"dtype=like:{reference}")
            self.assertEqual(outcome.code, 1, outcome.stderr)
            for word in (*said, str(reference)):
                self.assertIn(word, outcome.stderr)
            outcome = tensorfs("consolidate", source, self.tmp / "out", "-o", f"dtype=like:{reference}")
            self.assert_refused(outcome)
            self.assertFalse((self.tmp / "out").exists())
