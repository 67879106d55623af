"""Loads shards into a model of FSDP2: each rank reads the rows that it holds, and no rank has the whole model.

The example saves a small Llama in several shards. Four processes make the model without memory, shard it, and fill
their parts by `tensorfs.load_into`. They join the parts, and compare every weight, bit for bit, with the saved model.

Run:   python examples/fsdp2_load.py
Needs: Linux, tensorfs, and `pip install torch transformers`. No network, no GPU, no FUSE.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lazy_transformers import differing
from transformers_mount import LlamaForCausalLM, small_llama

import tensorfs

RANKS = 4


def load_rank(rank, shards, rendezvous):
    """Loads the part of one rank. Runs in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        original = small_llama()
        mesh = init_device_mesh("cpu", (RANKS,))
        with torch.device("meta"):
            model = LlamaForCausalLM(original.config).to(torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        # A checkpoint does not have these buffers, so they are computed again.
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
        tensorfs.load_into(model.state_dict(), shards)
        if wrong := differing(model, original):
            sys.exit(f"rank {rank}: differ from what was saved: {', '.join(wrong)}")
        local = sum(p.to_local().nbytes for p in model.parameters())
        print(f"rank {rank} of {RANKS}: every bit as it was saved; {local} bytes of weights", flush=True)
    finally:
        dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        shards = Path(work, "checkpoint")
        small_llama().save_pretrained(shards, max_shard_size="200KB")
        mp.spawn(load_rank, args=(str(shards), str(Path(work, "rendezvous"))), nprocs=RANKS)


if __name__ == "__main__":
    main()
