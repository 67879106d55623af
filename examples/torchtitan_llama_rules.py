"""Prints rules of `rename=` that give a Llama of torchtitan the names and the rows of transformers.

In each head of the weights q and k, torchtitan rotates neighbouring rows, and transformers rotates rows that are half a
head apart. So new names are not enough: the rules split these weights into rows, and join the rows in the other order.

Run: python examples/torchtitan_llama_rules.py FOLDER/config.json > llama.toml The config is the one of the model in
transformers. `tensorfs mount step-1000 MNT -o rename=llama.toml,config=FOLDER` Needs: Python.
"""

import json
import sys
from pathlib import Path

NAMES = Path(__file__).with_name("torchtitan_qwen3.toml")


def rows_of_transformers(heads, size):
    """The row numbers of torchtitan in the order of transformers: in each head first the even rows, then the odd
    rows."""
    return [size * head + 2 * row + half for head in range(heads) for half in range(2) for row in range(size // 2)]


def permuted(before, after, rows):
    """The rules that make the weight `after` of the rows `rows` of the weight `before`."""
    parts = [f"{before}.{row}" for row in range(len(rows))]
    # A JSON list of plain names is valid TOML too.
    yield f"[[split]]\nfrom = '{before}'\nto = {json.dumps(parts)}\n"
    yield f"[[fuse]]\nfrom = {json.dumps([parts[row] for row in rows])}\nto = '{after}'\n"


def llama_rules(config):
    """The rules for a model with the config `config` of transformers."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    # Llama has no norms of q and k. The rules for them are left out, because a rule that matches no tensor is refused.
    blocks = NAMES.read_text().strip().split("\n\n")
    rules = [f"{block}\n" for block in blocks if "[qk])_norm" not in block and "([qk])" not in block]
    for layer in range(config["num_hidden_layers"]):
        for letter, count in ("q", heads), ("k", config.get("num_key_value_heads") or heads):
            before = f"layers.{layer}.attention.qkv_linear.w{letter}.weight"
            after = f"model.layers.{layer}.self_attn.{letter}_proj.weight"
            rules += permuted(before, after, rows_of_transformers(count, size))
    return "\n".join(rules)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: torchtitan_llama_rules.py CONFIG.JSON")
    print(llama_rules(json.loads(Path(sys.argv[1]).read_text())), end="")
