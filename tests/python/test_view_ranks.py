"""`tp=`, `rank=` and `tp-rules=`: the slices of one rank of a tensor-parallel group."""

import json
import os
import re

import checkpoints
import oracle
import views
from mounts import HANGS, Mount, TestCase, tensorfs, wait_until
from test_view_layouts import Refusals
from test_view_parts import rule

FILE = "model.safetensors"
HIDDEN, HEAD, HEADS, KV, INNER, VOCAB = 64, 8, 8, 4, 88, 51

# Naive: the dimension in which a tensor is cut, by the end of its name. All others are repeated.
DENSE = {
    "embed_tokens.weight": 0, "lm_head.weight": 0, "q_proj.weight": 0, "q_proj.bias": 0, "k_proj.weight": 0,
    "k_proj.bias": 0, "v_proj.weight": 0, "v_proj.bias": 0, "o_proj.weight": 1, "gate_proj.weight": 0,
    "up_proj.weight": 0, "down_proj.weight": 1, "w1.weight": 0, "w3.weight": 0, "w2.weight": 1,
}
NEOX = {
    "embed_in.weight": 0, "embed_out.weight": 0, "query_key_value.weight": 0, "query_key_value.bias": 0,
    "attention.dense.weight": 1, "dense_h_to_4h.weight": 0, "dense_h_to_4h.bias": 0, "dense_4h_to_h.weight": 1,
}


def attention(prefix, bias, norms=False):
    shapes = {"q": (HEADS * HEAD, HIDDEN), "k": (KV * HEAD, HIDDEN), "v": (KV * HEAD, HIDDEN), "o": (HIDDEN, HEADS * HEAD)}
    tensors = {f"{prefix}.self_attn.{name}_proj.weight": shape for name, shape in shapes.items()}
    if bias:
        tensors.update({f"{prefix}.self_attn.{name}_proj.bias": (shapes[name][0],) for name in "qkv"})
    if norms:
        tensors.update({f"{prefix}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"})
    return tensors


def mlp(prefix, inner=INNER):
    return {f"{prefix}.gate_proj.weight": (inner, HIDDEN), f"{prefix}.up_proj.weight": (inner, HIDDEN),
            f"{prefix}.down_proj.weight": (HIDDEN, inner)}


def hub(family):
    """Names and shapes of a small model of a family, as transformers saves them."""
    if family == "gpt_neox":
        tensors = {"gpt_neox.embed_in.weight": (VOCAB, HIDDEN), "embed_out.weight": (VOCAB, HIDDEN),
                   "gpt_neox.final_layer_norm.weight": (HIDDEN,)}
        for layer in range(2):
            prefix = f"gpt_neox.layers.{layer}"
            tensors.update({
                f"{prefix}.attention.query_key_value.weight": (3 * HIDDEN, HIDDEN),
                f"{prefix}.attention.query_key_value.bias": (3 * HIDDEN,), f"{prefix}.attention.bias": (1, 1, 4, 4),
                f"{prefix}.attention.dense.weight": (HIDDEN, HIDDEN), f"{prefix}.attention.dense.bias": (HIDDEN,),
                f"{prefix}.attention.rotary_emb.inv_freq": (4,), f"{prefix}.input_layernorm.bias": (HIDDEN,),
                f"{prefix}.mlp.dense_h_to_4h.weight": (4 * HIDDEN, HIDDEN), f"{prefix}.mlp.dense_h_to_4h.bias": (4 * HIDDEN,),
                f"{prefix}.mlp.dense_4h_to_h.weight": (HIDDEN, 4 * HIDDEN), f"{prefix}.mlp.dense_4h_to_h.bias": (HIDDEN,),
            })
        return tensors
    tensors = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if family != "qwen3":  # with tied embeddings
        tensors["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        tensors.update(attention(prefix, bias=family in ("qwen2", "qwen2_moe"), norms=family.startswith("qwen3")))
        tensors[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        if family == "mixtral":
            tensors[f"{prefix}.block_sparse_moe.gate.weight"] = (3, HIDDEN)
            for expert in range(3):
                shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
                tensors.update({f"{prefix}.block_sparse_moe.experts.{expert}.{w}.weight": s for w, s in shapes.items()})
        elif family.endswith("_moe"):
            tensors[f"{prefix}.mlp.gate.weight"] = (3, HIDDEN)
            for expert in range(3):
                tensors.update(mlp(f"{prefix}.mlp.experts.{expert}", 20))
            if family == "qwen2_moe":
                tensors.update(mlp(f"{prefix}.mlp.shared_expert"))
                tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = (1, HIDDEN)
        else:
            tensors.update(mlp(f"{prefix}.mlp"))
    return tensors


def model(folder, family, more=(), **config):
    folder.mkdir()
    names = {**hub(family), **dict(more)}
    data = [(name, "BF16", list(shape), checkpoints.random_bytes(number, 2 * count(shape)))
            for number, (name, shape) in enumerate(names.items())]
    half = len(data) // 2
    checkpoints.write_shard(folder / checkpoints.shard_name(1, 2), data[:half])
    checkpoints.write_shard(folder / checkpoints.shard_name(2, 2), data[half:])
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV}
    (folder / "config.json").write_text(json.dumps({"model_type": family, **heads, **config}))
    return folder


def count(shape):
    return shape[0] * count(shape[1:]) if shape else 1


def slices(tensors, dims, ranks, rank):
    dim_of = lambda name: next((dim for end, dim in dims.items() if name.endswith(end)), None)
    return [t if dim_of(t.name) is None else views.chunk(t, dim_of(t.name), ranks, rank) for t in tensors]


class Ranks(TestCase):
    def assert_shows(self, source, options, made):
        expected = views.contents(made)
        with Mount(source, *options) as m:
            found = {}
            for path in m.path.glob("*.safetensors"):
                found.update(oracle.tensor_bytes(path))
        self.assertEqual({name: tensor[:2] for name, tensor in found.items()}, {n: t[:2] for n, t in expected.items()})
        for name, tensor in expected.items():
            self.assert_same(found[name][2], tensor[2], name)

    def rules(self, text, name="rules.toml"):
        file = self.tmp / name
        file.write_text(text)
        return file

    def test_every_family_is_cut_as_its_layers_need(self):
        for family in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_neox"):
            source = model(self.tmp / family, family)
            tensors, _ = oracle.tensors_of(source)
            dims = NEOX if family == "gpt_neox" else DENSE
            for ranks in (1, 2, 4):
                for rank in {0, ranks - 1}:
                    with self.subTest(family=family, ranks=ranks, rank=rank):
                        self.assert_shows(source, [f"tp={ranks}", f"rank={rank}"], slices(tensors, dims, ranks, rank))
                        with Mount(source, f"tp={ranks}", f"rank={rank}") as m:
                            self.assertEqual((m.path / "config.json").read_text(), (source / "config.json").read_text())

    def test_all_ranks_together_hold_every_element_once(self):
        source = model(self.tmp / "llama", "llama")
        tensors, _ = oracle.tensors_of(source)
        held = {}
        for rank in range(4):
            out = self.tmp / f"rank-{rank}.safetensors"
            self.assert_done(tensorfs("convert", source, out, "--to=safetensors", "-o", f"tp=4,rank={rank}"))
            for name, (dtype, shape, data) in oracle.tensor_bytes(out).items():
                held.setdefault(name, []).append(views.array(oracle.Tensor(name, dtype, shape, data, ())))
        for tensor in tensors:
            dim = next((dim for end, dim in DENSE.items() if tensor.name.endswith(end)), None)
            whole = held[tensor.name][0] if dim is None else views.np.concatenate(held[tensor.name], axis=dim)
            self.assertEqual(whole.tobytes(), tensor.data, tensor.name)

    def test_a_rank_combines_with_other_views(self):
        source = model(self.tmp / "qwen2", "qwen2")
        tensors, _ = oracle.tensors_of(source)
        own = {t.name: t for t in slices(tensors, DENSE, 2, 1) if "layers.1" not in t.name}
        made = [t for name, t in own.items() if not re.search("[qkv]_proj", name)]
        for kind in ("weight", "bias"):
            parts = [own[f"model.layers.0.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            made.append(views.fuse(parts, f"model.layers.0.self_attn.qkv_proj.{kind}", 0))
        file = self.rules("""
            [[fuse]]
            regex = ['q_proj', 'k_proj', 'v_proj']
            to = 'qkv_proj'
        """)
        options = ["exclude=model.layers.1.*", "tp=2", "rank=1", f"rename={file}"]
        self.assert_shows(source, options, made)
        self.assert_shows(source, [*options, "layout=shards=3"], made)
        self.assert_shows(source, [*options, "direct=always"], made)
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", source, out, "-o", ",".join(options)))
        self.assertEqual(oracle.tensor_bytes(out / FILE), views.contents(made))
        loaded = tensorfs("load", source, "--json", "-o", ",".join(options))
        self.assert_done(loaded)
        self.assertEqual(loaded.json()["bytes"], sum(len(t.data) for t in made))

    def test_rank_shards_of_any_cut_are_cut_anew_by_rules(self):
        rows, columns, grid = (make(self.tmp / make.__name__) for make in
                               (checkpoints.row_wise, checkpoints.column_wise, checkpoints.grid_2d))
        for source, dims in ((rows, {"embed": 0, "norm": 0}), (rows, {"embed": 1}), (columns, {"up": 0, "down": 1}), (grid, {"a": 1, "b": 0})):
            file = self.rules("".join(f"[[rule]]\nfrom = '{name}'\ncut = {dim}\n" for name, dim in dims.items()))
            tensors, _ = oracle.tensors_of(source)
            for ranks, rank in ((3, 0), (3, 2), (8, 5)):
                with self.subTest(source=source.name, dims=dims, ranks=ranks, rank=rank):
                    options = [f"tp={ranks}", f"rank={rank}", f"tp-rules={file}"]
                    self.assert_shows(source, options, slices(tensors, dims, ranks, rank))

    def test_the_last_ranks_of_an_uneven_cut_have_less_or_nothing(self):
        source = checkpoints.uneven(self.tmp / "uneven")
        file = self.rules("[[rule]]\nfrom = 'three'\ncut = 0\n[[rule]]\nfrom = 'wide'\ncut = -1\n")
        tensors, _ = oracle.tensors_of(source)
        shapes = []
        for rank in range(4):
            options = ["tp=4", f"rank={rank}", f"tp-rules={file}"]
            self.assert_shows(source, options, slices(tensors, {"three": 0, "wide": 1}, 4, rank))
            with Mount(source, *options) as m:
                shapes.append(oracle.tensor_bytes(m.path / FILE)["three"][1])
        self.assertEqual(shapes, [[1, 5], [1, 5], [1, 5], [0, 5]])

    def test_packed_projections_are_cut_part_by_part_and_heads_may_be_repeated(self):
        source = model(self.tmp / "packed", "llama", {"x.gate_up_proj.weight": (2 * INNER, HIDDEN)}.items())
        tensors = {t.name: t for t in oracle.tensors_of(source)[0]}
        name = "x.gate_up_proj.weight"
        file = self.rules(
            f"[[rule]]\nfrom = '{name}'\ncut = 0\nparts = 2\n"
            "[[rule]]\nregex = '[kv]_proj'\ncut = 0\nunits = 'num_key_value_heads'\nreplicate = true\n"
        )
        options = ["tp=8", "rank=5", f"tp-rules={file}"]
        made = []
        for tensor in tensors.values():
            if tensor.name == name:
                made.append(views.chunk(tensor, 0, 8, 5, parts=2))
            elif re.search("[kv]_proj", tensor.name):
                made.append(views.chunk(tensor, 0, KV, 5 // 2))
            else:
                made.append(tensor)
        self.assert_shows(source, options, made)

    def test_checksums_guard_the_slices(self):
        source = model(self.tmp / "llama", "llama")
        index = self.tmp / "index"
        self.assert_done(tensorfs("verify", source, f"--index-dir={index}"))
        tensors, _ = oracle.tensors_of(source)
        options = [f"index-dir={index}", "verify=read", "tp=2", "rank=1"]
        self.assert_shows(source, options, slices(tensors, DENSE, 2, 1))

    def test_a_watched_model_is_cut_anew_if_its_config_changes(self):
        store = self.tmp / "store"
        store.mkdir()
        source = model(store / "llama", "llama")
        expected = views.contents(slices(oracle.tensors_of(source)[0], DENSE, 2, 1))
        config = (source / "config.json").read_text()
        with Mount(store, "watch=auto", "watch-grace=1", "tp=2", "rank=1") as m:
            weights, error = m.path / "llama" / FILE, m.path / "llama/TENSORFS-ERROR.txt"
            self.assertEqual(oracle.tensor_bytes(weights), expected)
            for text, is_shown in ((config.replace('heads": 4', 'heads": 1'), False), (config, True)):
                (source / "new").write_text(text)
                (source / "new").rename(source / "config.json")
                wait_until(lambda: weights.exists() == is_shown and error.exists() != is_shown, HANGS, text)
                if is_shown:
                    self.assertEqual(oracle.tensor_bytes(weights), expected)
                else:
                    self.assertIn("1 units (num_key_value_heads)", error.read_text())

    def test_a_mount_whose_config_has_changed_since_is_read_as_it_is(self):
        source = model(self.tmp / "llama", "llama")
        config = (source / "config.json").read_text()
        with Mount(source, "tp=2", "rank=1") as m:
            for path in (m.path, m.path / FILE):
                known = json.loads(os.getxattr(path, "user.tensorfs.source"))
                self.assertRegex(known["config"], "^[0-9a-f]+$")
            before = [tensorfs("ls", path).stdout for path in (m.path, m.path / FILE)]
            (source / "config.json").write_text(config.replace('heads": 4', 'heads": 1'))
            for path, expected in zip((m.path, m.path / FILE), before):
                outcome = tensorfs("ls", path)
                self.assert_done(outcome)
                self.assertIn("config.json has changed since the mount", outcome.stderr)
                tensors = lambda text: [line.split()[:3] for line in text.splitlines() if ".weight" in line]
                self.assertEqual(tensors(outcome.stdout), tensors(expected))
        self.assertEqual(tensorfs("ls", source, "-o", "tp=2,rank=1").code, 1)

    def test_the_config_may_have_the_words_that_python_writes_for_numbers(self):
        source = model(self.tmp / "llama", "llama", a=float("nan"), b=[float("inf"), -float("inf")])
        config = source / "config.json"
        self.assertIn("NaN", config.read_text())
        expected = slices(oracle.tensors_of(source)[0], DENSE, 2, 1)
        self.assert_shows(source, ["tp=2", "rank=1"], expected)
        config.write_text(chr(0xFEFF) + config.read_text(), "utf-8")
        self.assert_shows(source, ["tp=2", "rank=1"], expected)

    def test_the_only_rank_may_be_split_in_any_dimension(self):
        source = model(self.tmp / "llama", "llama")
        name = "model.layers.0.mlp.up_proj.weight"
        rules = self.rules(rule("split", name, ["a", "b"]))
        with Mount(source, "tp=1", "rank=0", f"rename={rules}") as m:
            found = oracle.tensor_bytes(m.path / FILE)
        self.assertEqual([found[part][1] for part in "ab"], [[INNER // 2, HIDDEN]] * 2)
        whole = next(tensor.data for tensor in oracle.tensors_of(source)[0] if tensor.name == name)
        self.assertEqual(bytes(found["a"][2]) + bytes(found["b"][2]), whole)

    def test_the_weight_map_of_other_tensors_does_not_count_the_parameters_of_the_source(self):
        source = model(self.tmp / "llama", "llama")
        tensors, _ = oracle.tensors_of(source)
        index = source / f"{FILE}.index.json"
        half = len(tensors) // 2
        shards = [checkpoints.shard_name(number, 2) for number in (1, 2)]
        names = {name: shards[at >= half] for at, name in enumerate(hub("llama"))}
        metadata = {"total_size": sum(len(t.data) for t in tensors), "total_parameters": 7, "other": 1}
        index.write_text(json.dumps({"metadata": metadata, "weight_map": names}))
        for options, counted in ((), True), (("tp=2", "rank=0"), False):
            with Mount(source, *options) as m:
                shown = json.loads((m.path / index.name).read_text())["metadata"]
            self.assertEqual(("total_parameters" in shown, shown["other"]), (counted, 1), options)

    def test_two_ranks_have_different_versions(self):
        source = model(self.tmp / "llama", "llama")
        found = set()
        for rank in range(2):
            with Mount(source, "tp=2", f"rank={rank}") as m:
                found.add(views.version(m.path / FILE))
        self.assertEqual(len(found), 2)


class Refused(Refusals):
    def test_a_cut_that_does_not_fit_names_rule_and_tensor(self):
        plain = model(self.tmp / "llama", "llama")
        scaled = model(self.tmp / "fp8", "llama", {"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}.items())
        other = model(self.tmp / "other", "falcon7")
        bare = model(self.tmp / "bare", "llama")
        (bare / "config.json").unlink()
        broken = model(self.tmp / "broken", "llama")
        (broken / "config.json").write_text("{")
        file = self.tmp / "rules.toml"
        file.write_text("[[rule]]\nregex = 'gone'\ncut = 0\n")
        split = self.tmp / "split.toml"
        split.write_text(rule("split", "model.layers.0.mlp.up_proj.weight", ["a", "b"]))
        heads = self.tmp / "heads.toml"
        heads.write_text("[[rule]]\nregex = 'q_proj'\ncut = 0\nunits = 'heads'\n")
        rows = checkpoints.row_wise(self.tmp / "rows")
        for source, options, said in (
            (plain, "tp=8,rank=0", ("k_proj.weight", "4 units (num_key_value_heads)", "8 ranks", "replicate", "tp-rules=FILE")),
            (plain, "tp=3,rank=0", ("4 units (num_key_value_heads)", "3 ranks", "another number")),
            (scaled, "tp=2,rank=0", ("up_proj.weight_scale_inv", "the rules for llama", "tp-rules=FILE")),
            (other, "tp=2,rank=0", ("`falcon7`", "llama, mistral", "tp-rules=FILE")),
            (bare, "tp=2,rank=0", ("config.json", "tp-rules=FILE")),
            (bare, f"tp=2,rank=0,tp-rules={heads}", ("no config.json beside the shards with the number `heads`; put it there",)),
            (broken, "tp=2,rank=0", ("config.json", "JSON")),
            (rows, f"tp=2,rank=0,tp-rules={file}", (str(file), "rule 1, regex = `gone`", "none of the 3")),
            (plain, f"tp=2,rank=0,rename={split}", (str(split), "split rule 1", "up_proj.weight", "tp= cuts it in dimension 0")),
        ):
            outcome = self.refused(source, options)
            self.assertEqual(outcome.code, 1, outcome.stderr)
            for word in said:
                self.assertIn(word, outcome.stderr)

    def test_options_that_are_none_are_usage_errors(self):
        source = model(self.tmp / "llama", "llama")
        file = self.tmp / "rules.toml"
        file.write_text("[[cut]]\n")
        for options, said in (
            ("rank=1", "tp="), ("tp=2,rank=2", "0 to 1"), ("tp=0,rank=0", "`tp=0`: expected a number from 1 to"), ("tp=x,rank=0", "number"),
            (f"tp-rules={file},tp=2,rank=0", "line 1"), ("tp-rules=,tp=2,rank=0", "rules"), ("tp=2,rank=-1", "number"),
            ("layout=original,tp=2,rank=0", "tp="),
        ):
            outcome = self.refused(source, options)
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn(said, outcome.stderr)
