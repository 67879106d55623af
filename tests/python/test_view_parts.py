"""`[[split]]` and `[[fuse]]` in the rules of `rename=`: tensors that are cut into parts, and tensors that are joined."""

import os
import random

from safetensors import safe_open

import checkpoints
import oracle
import views
from mounts import Mount, TestCase, tensorfs
from test_view_dtypes import cast_all, dcp
from test_view_layouts import Refusals

FILE = "model.safetensors"
QKV = """
[[fuse]]
regex = ['^(.*)\\.q_proj\\.(weight|bias)$', '^(.*)\\.k_proj\\.(weight|bias)$', '^(.*)\\.v_proj\\.(weight|bias)$']
to = '$1.qkv_proj.$2'
[[rename]]
regex = '^model\\.'
to = ''
"""


def rule(kind, source, to, **more):
    values = {"from": source, "to": to, **more}
    return f"[[{kind}]]\n" + "".join(f"{key} = {value!r}\n" for key, value in values.items()) + "\n"


def sizes_of(rng, size, count):
    cuts = sorted(rng.sample(range(1, size), count - 1))
    return [end - start for start, end in zip([0, *cuts], [*cuts, size])]


def rules_for(rng, tensors):
    """Random rules, and the tensors that they make: each tensor of two rows or more is split, and some are joined anew."""
    text, made = "", []
    for number, tensor in enumerate(tensors):
        dims = [dim for dim, size in enumerate(tensor.shape) if size > 3]
        if not dims or 0 in tensor.shape:
            made.append(tensor)
            continue
        dim, count = rng.choice(dims), rng.choice([2, 3, 4])
        sizes = sizes_of(rng, tensor.shape[dim], count)
        names = [f"part.{number}.{part}" for part in range(count)]
        text += rule("split", tensor.name, names, dim=dim, sizes=sizes)
        parts = views.split(tensor, names, dim, sizes)
        joined = rng.sample(parts, rng.randrange(2, count + 1))
        text += rule("fuse", [part.name for part in joined], f"joined.{number}", dim=dim - len(tensor.shape))
        made += [part for part in parts if part not in joined] + [views.fuse(joined, f"joined.{number}", dim)]
    return text, made


def attention(folder, layers=2):
    """Two shards with the projections of a small attention, as the hub keeps them."""
    folder.mkdir()
    for layer in range(layers):
        prefix, tensors = f"model.layers.{layer}", []
        for name, rows in (("q", 768), ("k", 256), ("v", 256)):
            seed = 10 * layer + rows + ord(name)
            tensors.append((f"{prefix}.self_attn.{name}_proj.weight", "BF16", [rows, 768],
                            checkpoints.random_bytes(seed, rows * 768 * 2)))
            tensors.append((f"{prefix}.self_attn.{name}_proj.bias", "BF16", [rows], checkpoints.random_bytes(seed, rows * 2)))
        tensors.append((f"{prefix}.norm.weight", "F32", [768], checkpoints.random_bytes(layer, 768 * 4)))
        checkpoints.write_shard(folder / checkpoints.shard_name(layer + 1, layers), tensors)
    return folder


class Parts(TestCase):
    def rules(self, text, name="rules.toml"):
        file = self.tmp / name
        file.write_text(text)
        return file

    def sources(self):
        for make in (checkpoints.hf_set, checkpoints.row_wise, checkpoints.column_wise, checkpoints.grid_2d,
                     checkpoints.cube_3d, checkpoints.uneven):
            yield make(self.tmp / make.__name__)

    def test_random_parts_of_every_kind_of_shards_are_those_that_numpy_makes(self):
        rng = random.Random(9)
        ways = [[], ["direct=always"], ["io=pread", "direct=never"], ["cache=16M", "direct=always"], ["layout=shards=3"]]
        for number, source in enumerate(self.sources()):
            for options in (ways[number % len(ways)], ways[(number + 2) % len(ways)]):
                tensors, _ = oracle.tensors_of(source)
                text, made = rules_for(rng, tensors)
                expected = views.contents(made)
                with self.subTest(source=source.name, options=options, rules=text):
                    with Mount(source, *options, f"rename={self.rules(text)}") as m:
                        found = {}
                        for path in m.path.glob("*.safetensors"):
                            found.update(oracle.tensor_bytes(path))
                        self.assertEqual(set(found), set(expected))
                        for name, tensor in expected.items():
                            self.assertEqual(found[name][:2], tensor[:2], name)
                            self.assert_same(found[name][2], tensor[2], name)

    def test_parts_are_cast_as_whole_tensors_are(self):
        source = dcp(self.tmp / "dcp")
        for word, to in (("bf16", "BF16"), ("f32", "F32")):
            text, made = rules_for(random.Random(word), oracle.tensors_of(source)[0])
            with Mount(source, f"rename={self.rules(text)}", f"dtype={word}") as m:
                found = oracle.tensor_bytes(m.path / FILE)
            for name, tensor in views.contents(cast_all(made, to)).items():
                self.assert_same(found[name][2], tensor[2], name)

    def test_any_bytes_of_the_file_are_those_of_the_whole_file(self):
        rng = random.Random(4)
        for source in (checkpoints.column_wise(self.tmp / "columns"), checkpoints.grid_2d(self.tmp / "grid")):
            text, made = rules_for(rng, oracle.tensors_of(source)[0])
            with Mount(source, f"rename={self.rules(text)}") as m:
                whole = (m.path / FILE).read_bytes()
                self.assertEqual(oracle.tensor_bytes(m.path / FILE), views.contents(made))
            with Mount(source, f"rename={self.rules(text)}", "direct=always") as m:
                with open(m.path / FILE, "rb", buffering=0) as file:
                    for _ in range(60):
                        start, length = rng.randrange(len(whole)), rng.choice([1, 5, 4095, 70_001, 3_000_000])
                        file.seek(start)
                        self.assert_same(file.read(length), whole[start : start + length], f"{start}+{length}")

    def test_q_k_and_v_become_one_tensor_and_come_apart_again(self):
        source = attention(self.tmp / "hub")
        tensors, _ = oracle.tensors_of(source)
        by_name = {tensor.name: tensor for tensor in tensors}
        made = [views.made(t.name.removeprefix("model."), t.dtype, views.array(t)) for t in tensors if "norm" in t.name]
        for layer in range(2):
            for kind in ("weight", "bias"):
                parts = [by_name[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                made.append(views.fuse(parts, f"model.layers.{layer}.self_attn.qkv_proj.{kind}", 0))
        file = self.rules(QKV)
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", source, out, "-o", f"rename={file}"))
        self.assertEqual(oracle.tensor_bytes(out / FILE), views.contents(made))
        with Mount(source, f"rename={file}") as m:
            self.assertEqual(oracle.tensor_bytes(m.path / FILE), views.contents(made))
            with safe_open(m.path / FILE, "np") as opened:
                self.assertEqual(set(opened.keys()), {tensor.name for tensor in made})
        back = self.rules("""
            [[split]]
            regex = '\\.qkv_proj\\.'
            to = ['.q_proj.', '.k_proj.', '.v_proj.']
            sizes = [768, 256, 256]
            [[rename]]
            regex = '^layers'
            to = 'model.layers'
        """, "back.toml")
        copy = self.tmp / "copy.safetensors"
        self.assert_done(tensorfs("convert", out, copy, "--to=safetensors", "-o", f"rename={back}"))
        self.assertEqual(oracle.tensor_bytes(copy), views.contents(tensors))
        inspected = tensorfs("inspect", source, "layers.0.norm.weight", "--json", "-o", f"rename={file}")
        self.assert_done(inspected)

    def test_checksums_guard_the_parts(self):
        source = attention(self.tmp / "hub")
        index = self.tmp / "index"
        self.assert_done(tensorfs("verify", source, f"--index-dir={index}"))
        file = self.rules(QKV + "[[split]]\nfrom = 'model.layers.1.norm.weight'\nto = ['a', 'b']\n")
        with Mount(source, f"index-dir={index}", "verify=read", f"rename={file}") as m:
            found = oracle.tensor_bytes(m.path / FILE)
            self.assertEqual(found["a"][2] + found["b"][2], checkpoints.random_bytes(1, 768 * 4))

    def test_two_orders_of_the_same_parts_have_different_versions(self):
        source = attention(self.tmp / "hub")
        versions = set()
        for order in (["a", "b", "c"], ["a", "c", "b"]):
            text = "[[split]]\nfrom = 'model.layers.0.norm.weight'\nto = ['a', 'b', 'c']\n"
            with Mount(source, f"rename={self.rules(text + rule('fuse', order, 'x'))}") as m:
                versions.add(os.getxattr(m.path / FILE, "user.tensorfs.version"))
        self.assertEqual(len(versions), 2)


class Refused(Refusals):
    def test_rules_that_do_not_fit_name_file_rule_and_tensor(self):
        source = attention(self.tmp / "hub")
        file = self.tmp / "rules.toml"
        name = "model.layers.0.self_attn.q_proj.weight"
        for text, said, code in (
            (rule("split", name, ["a", "b"], sizes=[1, 2]), ("split rule 1", name, "add up to 768"), 1),
            (rule("split", name, ["a", "b", "c", "d", "e"]), ("split rule 1", name, "5 equal parts"), 1),
            (rule("fuse", [name, name.replace("weight", "bias")], "x"), ("fuse rule 1", "`x`", "BF16 [768]"), 1),
            (rule("fuse", [name, "gone"], "x"), ("fuse rule 1", "`x`", "2 of 2 is missing"), 1),
            ("[[fuse]]\nregex = ['none', 'nothing']\nto = 'x'\n", ("fuse rule 1", "joins none"), 1),
            (rule("split", name, ["a"]), ("split rule 1", "two parts"), 2),
            ("[[fuse]]\nregex = ['(', 'a']\nto = 'x'\n", ("fuse rule 1", "not a regex"), 2),
            ("[[melt]]\nfrom = 'a'\n", ("line 1", "melt"), 2),
        ):
            file.write_text(text)
            outcome = self.refused(source, f"rename={file}")
            self.assertEqual(outcome.code, code, outcome.stderr)
            for word in (str(file), *said):
                self.assertIn(word, outcome.stderr)
            out = self.tmp / "out"
            refused = tensorfs("consolidate", source, out, "-o", f"rename={file}")
            self.assert_refused(refused, code)
            self.assertFalse(out.exists())
