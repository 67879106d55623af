"""Small checkpoints of model families, with the same names, dtypes and numbers of dimensions as on the hub."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB, MIDDLE, EXPERTS = 64, 4, 2, 2, 320, 96, 4

_COMMON = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "intermediate_size": MIDDLE,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}


def of(seed, *shape, dtype=torch.bfloat16):
    """A tensor of random bits, as far as its dtype allows."""
    made = np.random.default_rng(seed)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.from_numpy(made.standard_normal(shape, np.float32)).to(dtype)
    raw = made.integers(0, 120, [*shape[:-1], shape[-1] * dtype.itemsize], np.uint8)
    return torch.from_numpy(raw).view(dtype)


class Builder:
    """Collects the tensors of a checkpoint."""

    def __init__(self):
        self.tensors = {}

    def add(self, name, *shape, dtype=torch.bfloat16):
        self.tensors[name] = of(len(self.tensors), *shape, dtype=dtype)

    def attention(self, layer, bias=False):
        width = HIDDEN // HEADS
        for word, rows in (("q", HEADS * width), ("k", KV_HEADS * width), ("v", KV_HEADS * width)):
            self.add(f"model.layers.{layer}.self_attn.{word}_proj.weight", rows, HIDDEN)
            if bias:
                self.add(f"model.layers.{layer}.self_attn.{word}_proj.bias", rows)
        self.add(f"model.layers.{layer}.self_attn.o_proj.weight", HIDDEN, HEADS * width)

    def norms(self, layer, *more):
        for word in ("input_layernorm", "post_attention_layernorm", *more):
            self.add(f"model.layers.{layer}.{word}.weight", HIDDEN)

    def mlp(self, prefix, middle=MIDDLE, words=("gate_proj", "up_proj", "down_proj")):
        for word in words[:2]:
            self.add(f"{prefix}.{word}.weight", middle, HIDDEN)
        self.add(f"{prefix}.{words[2]}.weight", HIDDEN, middle)

    def ends(self, with_head=True):
        self.add("model.embed_tokens.weight", VOCAB, HIDDEN)
        self.add("model.norm.weight", HIDDEN)
        if with_head:
            self.add("lm_head.weight", VOCAB, HIDDEN)


def llama(build):
    for layer in range(LAYERS):
        build.attention(layer)
        build.mlp(f"model.layers.{layer}.mlp")
        build.norms(layer)
    build.ends()
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}


def qwen_moe(build):
    for layer in range(LAYERS):
        build.attention(layer, bias=True)
        build.norms(layer)
        prefix = f"model.layers.{layer}.mlp"
        build.add(f"{prefix}.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            build.mlp(f"{prefix}.experts.{expert}", 32)
        build.mlp(f"{prefix}.shared_expert")
        build.add(f"{prefix}.shared_expert_gate.weight", 1, HIDDEN)
    build.ends()
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    more = {"shared_expert_intermediate_size": MIDDLE, "norm_topk_prob": True, "mlp_only_layers": []}
    return {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **experts, **more, **_COMMON}


def mixtral(build):
    for layer in range(LAYERS):
        build.attention(layer)
        build.norms(layer)
        prefix = f"model.layers.{layer}.block_sparse_moe"
        build.add(f"{prefix}.gate.weight", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            build.mlp(f"{prefix}.experts.{expert}", words=("w1", "w3", "w2"))
    build.ends()
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts, **_COMMON}


def gemma(build):
    for layer in range(LAYERS):
        build.attention(layer)
        build.mlp(f"model.layers.{layer}.mlp")
        build.norms(layer, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    # The head is tied to the embedding, so the checkpoint has no tensor for it.
    build.ends(with_head=False)
    more = {"head_dim": HIDDEN // HEADS, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
    limits = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 64}
    return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **more, **limits, **_COMMON}


def deepseek(build):
    """A model with latent attention. Its experts have blocks of float8, each with a scale."""
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.self_attn"
        for word, shape in {
            "q_a_proj": (24, HIDDEN),
            "q_b_proj": (HEADS * 24, 24),
            "kv_a_proj_with_mqa": (40, HIDDEN),
            "kv_b_proj": (HEADS * 32, 32),
            "o_proj": (HIDDEN, HEADS * 16),
        }.items():
            build.add(f"{prefix}.{word}.weight", *shape, dtype=torch.float8_e4m3fn)
            build.add(f"{prefix}.{word}.weight_scale_inv", 1, 1, dtype=torch.float32)
        build.add(f"{prefix}.q_a_layernorm.weight", 24)
        build.add(f"{prefix}.kv_a_layernorm.weight", 32)
        build.norms(layer)
        build.add(f"model.layers.{layer}.mlp.gate.weight", EXPERTS, HIDDEN)
        build.add(f"model.layers.{layer}.mlp.gate.e_score_correction_bias", EXPERTS, dtype=torch.float32)
        for expert in range(EXPERTS):
            for word, shape in (("gate_proj", (32, HIDDEN)), ("up_proj", (32, HIDDEN)), ("down_proj", (HIDDEN, 32))):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{word}"
                build.add(f"{name}.weight", *shape, dtype=torch.float8_e4m3fn)
                build.add(f"{name}.weight_scale_inv", 1, 1, dtype=torch.float32)
        build.mlp(f"model.layers.{layer}.mlp.shared_experts", 32)
    build.ends()
    return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_COMMON}


def gptq(build):
    """A Llama that is quantized to four bits, in groups."""
    for layer in range(LAYERS):
        build.norms(layer)
        for word, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", HIDDEN, HIDDEN // 2),
            ("self_attn.v_proj", HIDDEN, HIDDEN // 2),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", HIDDEN, MIDDLE),
            ("mlp.up_proj", HIDDEN, MIDDLE),
            ("mlp.down_proj", MIDDLE, HIDDEN),
        ):
            name = f"model.layers.{layer}.{word}"
            build.add(f"{name}.qweight", rows // 8, columns, dtype=torch.int32)
            build.add(f"{name}.qzeros", rows // 32, columns // 8, dtype=torch.int32)
            build.add(f"{name}.scales", rows // 32, columns, dtype=torch.float16)
            build.add(f"{name}.g_idx", rows, dtype=torch.int32)
    build.ends()
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_COMMON}


FAMILIES = {made.__name__: made for made in (llama, qwen_moe, mixtral, gemma, deepseek, gptq)}


def write(folder, family, shards=3):
    """Writes a checkpoint in shards with a weight map, and returns its tensors."""
    build = Builder()
    config = FAMILIES[family](build)
    folder.mkdir(parents=True)
    names = list(build.tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        save_file({name: build.tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {"total_size": sum(made.nbytes for made in build.tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    # Some repositories have the weights twice. The weight map does not name this file.
    save_file({"decoy": torch.zeros(3)}, folder / "consolidated.safetensors")
    return build.tensors


def same(one, other):
    """Whether two tensors are equal bit by bit."""
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    pair = [torch.empty(t.shape, dtype=t.dtype).copy_(t).contiguous().flatten().view(torch.uint8) for t in (one, other)]
    return torch.equal(*pair)


def differences(found, right):
    """The differences between two iterations over weights. Each tensor that differs has one line."""
    found, right = list(found), list(right)
    names = [name for name, _ in found]
    said = [f"{name} comes {names.count(name)} times" for name in set(names) if names.count(name) > 1]
    found, right = dict(found), dict(right)
    said += [f"{name} is missing" for name in right.keys() - found.keys()]
    said += [f"{name} is too much" for name in found.keys() - right.keys()]
    return said + [f"{name} differs" for name in found.keys() & right.keys() if not same(found[name], right[name])]
