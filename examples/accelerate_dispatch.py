"""Loads shards into a model of accelerate, weight by weight, so that never more than one weight is in memory twice.

The example saves a small Llama in several shards, makes the same model without memory, and places each weight on the
device that the device map of accelerate names. It compares every weight, bit for bit, with the saved model.

Run:   python examples/accelerate_dispatch.py
Needs: Linux, tensorfs, and `pip install torch transformers accelerate`. No network, no GPU, no FUSE.
"""

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import set_module_tensor_to_device

from transformers_mount import LlamaForCausalLM, bits, small_llama

import tensorfs


def device_of(name, device_map):
    """The device of a weight: the device of the module in the map that has the longest name and contains the weight."""
    holders = [module for module in device_map if module == "" or name == module or name.startswith(f"{module}.")]
    return device_map[max(holders, key=len)]


def main():
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        shards = Path(work, "checkpoint")
        original = small_llama()
        original.save_pretrained(shards, max_shard_size="200KB")
        with init_empty_weights(include_buffers=False):
            model = LlamaForCausalLM(original.config).to(torch.bfloat16)
        device_map = infer_auto_device_map(model, no_split_module_classes=["LlamaDecoderLayer"])
        with tensorfs.lazy(shards) as weights:
            for name, weight in weights.items():
                set_module_tensor_to_device(model, name, device_of(name, device_map), value=weight[...])
        model.tie_weights()
        model = dispatch_model(model, device_map)
        wanted, found = original.state_dict(), model.state_dict()
        same = {name for name in wanted.keys() & found.keys() if torch.equal(bits(wanted[name]), bits(found[name].cpu()))}
        if wrong := sorted((wanted.keys() | found.keys()) - same):
            sys.exit("differ from what was saved: " + ", ".join(wrong))
        tokens = torch.arange(8)[None]
        with torch.no_grad():
            if not torch.equal(model(tokens).logits.cpu(), original(tokens).logits):
                sys.exit("the model answers otherwise than the saved one")
        print(f"{len(same)} weights on {sorted(set(map(str, device_map.values())))}: every bit as it was saved")


if __name__ == "__main__":
    main()
