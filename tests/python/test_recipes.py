"""The recipes of docs/formats/frameworks.md, from the output of a trainer to names and bytes of transformers."""

import json
import re
import sys

import numpy as np

import checkpoints
import oracle
from mounts import ROOT, Mount, TestCase, run

PAGE = ROOT / "docs/formats/frameworks.md"
HEADS, GROUPS, SIZE, WIDTH, LAYERS = 4, 2, 8, 16, 3

# Names of torchtitan and of transformers, without the layer, and the shape.
ATTENTION = {
    "attention.qkv_linear.wq.weight": ("self_attn.q_proj.weight", (HEADS * SIZE, WIDTH)),
    "attention.qkv_linear.wk.weight": ("self_attn.k_proj.weight", (GROUPS * SIZE, WIDTH)),
    "attention.qkv_linear.wv.weight": ("self_attn.v_proj.weight", (GROUPS * SIZE, WIDTH)),
    "attention.wo.weight": ("self_attn.o_proj.weight", (WIDTH, HEADS * SIZE)),
    "feed_forward.w1.weight": ("mlp.gate_proj.weight", (24, WIDTH)),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", (WIDTH, 24)),
    "feed_forward.w3.weight": ("mlp.up_proj.weight", (24, WIDTH)),
    "attention_norm.weight": ("input_layernorm.weight", (WIDTH,)),
    "ffn_norm.weight": ("post_attention_layernorm.weight", (WIDTH,)),
}
NORMS = {
    "attention.q_norm.weight": ("self_attn.q_norm.weight", (SIZE,)),
    "attention.k_norm.weight": ("self_attn.k_norm.weight", (SIZE,)),
}
OTHERS = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", (40, WIDTH)),
    "norm.weight": ("model.norm.weight", (WIDTH,)),
    "lm_head.weight": ("lm_head.weight", (40, WIDTH)),
}


def rules_of_the_page():
    blocks = re.findall(r"(?m)^```toml\n(.*?)^```", PAGE.read_text(), re.DOTALL)
    return next(block for block in blocks if "tok_embeddings" in block)


def transposed(weight, heads):
    """Rows of q or k as the conversion of torchtitan orders them for transformers."""
    return weight.reshape(heads, SIZE // 2, 2, WIDTH).swapaxes(1, 2).reshape(weight.shape)


class Torchtitan(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "step-2"
        self.source.mkdir()
        self.rules = self.tmp / "rules.toml"

    def save(self, layer_names):
        """Saves weights under torchtitan's names. Returns them under those of transformers."""
        rng, saved, wanted = np.random.default_rng(1), {}, {}
        names = dict(OTHERS)
        for layer in range(LAYERS):
            for before, (after, shape) in layer_names.items():
                names[f"layers.{layer}.{before}"] = (f"model.layers.{layer}.{after}", shape)
        for before, (after, shape) in names.items():
            saved[before] = wanted[after] = rng.random(shape, np.float32)
        tensors = [(name, "F32", list(one.shape), one.tobytes()) for name, one in saved.items()]
        checkpoints.write_shard(self.source / "model.safetensors", tensors)
        return wanted

    def assert_shown(self, wanted):
        with Mount(self.source, f"rename={self.rules}") as m:
            shown = oracle.tensor_bytes(m.path / "model.safetensors")
        self.assertEqual(shown, {name: ("F32", list(one.shape), one.tobytes()) for name, one in wanted.items()})

    def test_the_rules_of_the_page_are_those_of_the_example(self):
        self.assertEqual((ROOT / "examples/torchtitan_qwen3.toml").read_text(), rules_of_the_page())

    def test_the_rules_of_the_page_give_a_qwen3_the_names_of_transformers(self):
        wanted = self.save(ATTENTION | NORMS)
        self.rules.write_text(rules_of_the_page())
        self.assert_shown(wanted)

    def test_the_rules_for_a_llama_give_it_the_names_and_the_rows_of_transformers(self):
        wanted = self.save(ATTENTION)
        for layer in range(LAYERS):
            for letter, heads in ("q", HEADS), ("k", GROUPS):
                name = f"model.layers.{layer}.self_attn.{letter}_proj.weight"
                wanted[name] = transposed(wanted[name], heads)
        config = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
        (self.tmp / "config.json").write_text(json.dumps(config | {"head_dim": SIZE, "hidden_size": WIDTH}))
        made = run(sys.executable, ROOT / "examples/torchtitan_llama_rules.py", self.tmp / "config.json")
        self.assert_done(made)
        self.rules.write_text(made.stdout)
        self.assert_shown(wanted)


class Verl(TestCase):
    def test_masters_in_f32_are_shown_in_bf16_as_the_merger_of_verl_writes_them(self):
        source = ROOT / "tests/fixtures/torch/rank_verl_ws4"
        with Mount(source) as m:
            masters = oracle.tensor_bytes(m.path / "model.safetensors")
        with Mount(source, "dtype=bf16") as m:
            shown = oracle.tensor_bytes(m.path / "model.safetensors")
        self.assertEqual(set(shown), set(masters))
        self.assertIn("F32", {dtype for dtype, _, _ in masters.values()})
        for name, (dtype, shape, data) in masters.items():
            if dtype == "F32":
                bits = np.frombuffer(data, np.uint32)
                # To the nearest, ties to even. The fixture has no NaN.
                data = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
                dtype = "BF16"
            self.assertEqual(shown[name], (dtype, shape, data), name)
