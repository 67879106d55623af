"""Parts that the rows share: a small model in shards, a mount of it, and the same model as one real file."""

import importlib.metadata
import importlib.util
import json
import sys
import unittest
from functools import cache
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from checkpoints import FORMAT, dcp_name, write_weight_map
from mounts import Mount, TestCase, run, tensorfs

HIDDEN, LAYERS, VOCAB = 64, 3, 288

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama_tensors(seed=1):
    """The tensors of a small Llama, as numpy arrays."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for word, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            shapes[f"{prefix}.{word}.weight"] = shape
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


def write_shards(folder, tensors, count=3, stem="model"):
    """Writes a set of shards in the form of Hugging Face."""
    folder.mkdir(parents=True, exist_ok=True)
    names, shards = list(tensors), {}
    for number in range(count):
        file = f"{stem}-{number + 1:05}-of-{count:05}.safetensors"
        shards[file] = names[number * len(names) // count : (number + 1) * len(names) // count]
        save_file({name: tensors[name] for name in shards[file]}, folder / file, metadata=FORMAT)
        (folder / file).chmod(0o644)
    write_weight_map(folder, shards, stem)


def write_tokenizer(folder):
    """A tokenizer that has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_rank_shards(folder, tensors, ranks=2):
    """Writes files of ranks like the distributed saver of torch. Matrices are cut by columns, and other tensors by
    rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        parts, places = {}, {}
        for name, tensor in tensors.items():
            dim = tensor.ndim - 1
            step = tensor.shape[dim] // ranks
            parts[name] = np.ascontiguousarray(np.take(tensor, range(rank * step, (rank + 1) * step), dim))
            places[name] = {"saved_offsets": [0] * dim + [rank * step]}
        notes = {**FORMAT, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        save_file(parts, folder / dcp_name(rank + 1), metadata=notes)


@cache
def version_of(package):
    return importlib.metadata.version(package)


def needs(*modules):
    """Skips a row whose packages are not installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


class Row(TestCase):
    """The test of one program. `self.real` is a folder with one real file, and `self.mnt` is the mount of shards with
    the same tensors."""

    options = ()

    def setUp(self):
        super().setUp()
        self.tensors = llama_tensors()
        self.shards, self.real = self.tmp / "shards", self.tmp / "real"
        write_shards(self.shards, self.tensors)
        self.real.mkdir()
        for folder in (self.shards, self.real):
            (folder / "config.json").write_text(json.dumps(CONFIG))
        self.mnt = self.enter(Mount(self.shards, *self.options)).path
        # The genuine writer makes the real file, independently of tensorfs.
        save_file(self.tensors, self.real / "model.safetensors", metadata=FORMAT)

    def used(self, name, version):
        """Prints the name and the version of the program that was tested."""
        print(f"ROW {name} {version}", file=sys.stderr)

    def assert_same_tensors(self, found, right):
        self.assertEqual(found.keys(), right.keys())
        for name in right:
            one, other = (np.asarray(t.detach().float() if hasattr(t, "detach") else t) for t in (found[name], right[name]))
            np.testing.assert_array_equal(one, other, name)

    def output(self, *command, **how):
        """Runs a command, which has to succeed, and returns its output."""
        outcome = run(*command, timeout=300, **how)
        self.assert_done(outcome)
        return outcome.stdout


def first_line(*command):
    """The first line that a program prints, for example about its version."""
    outcome = run(*command)
    return (outcome.stdout or outcome.stderr).splitlines()[0]


__all__ = ["CONFIG", "Row", "Mount", "Path", "first_line", "llama_tensors", "load_file", "needs", "tensorfs", "version_of", "write_rank_shards", "write_shards", "write_tokenizer"]
