"""Loads shards into transformers without a mount, in one process and by tensor parallelism: each rank reads its part only.

The example saves a small Llama in several shards. `tensorfs.lazy` gives `from_pretrained` a dict of tensors that are
read when they are indexed. Two processes load the model again by tensor parallelism. The example compares every weight,
bit for bit, with the saved model, and prints how many bytes each process read.

Run:   python examples/lazy_transformers.py
Needs: Linux, tensorfs, and `pip install torch transformers`. No network, no GPU, no FUSE.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.distributed import DistributedConfig

from transformers_mount import LlamaForCausalLM, bits, small_llama

import tensorfs

RANKS = 2


def differing(model, original):
    """The names of weights that differ between `model` and `original`. `model` may be cut into the parts of ranks."""
    wanted, found = original.state_dict(), {}
    for name, tensor in model.state_dict().items():
        # Each rank has a part of a DTensor. `full_tensor` joins the parts of all ranks.
        found[name] = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    same = {name for name in wanted.keys() & found.keys() if torch.equal(bits(wanted[name]), bits(found[name]))}
    return sorted((wanted.keys() | found.keys()) - same)


def forget(folder):
    """Drops the shards from the page cache, because bytes that are copied from there are not counted as read."""
    for shard in Path(folder).glob("*.safetensors"):
        descriptor = os.open(shard, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load(shards, original, title, **how):
    """Loads the model by lazy tensors, and compares it."""
    with tensorfs.lazy(shards) as weights:
        model = LlamaForCausalLM.from_pretrained(
            None, config=original.config, state_dict=weights, dtype=torch.bfloat16, **how
        )
        read = weights.stats.get("bytes", 0)
    if wrong := differing(model, original):
        sys.exit(f"{title}: differ from what was saved: {', '.join(wrong)}")
    local = sum(getattr(p, "_local_tensor", p).nbytes for p in model.parameters())
    # The text and the end of the line are one write, because the ranks share the output.
    print(f"{title}: every bit as it was saved; {local} bytes of weights, {read} bytes read\n", end="", flush=True)


def load_rank(rank, shards, rendezvous):
    """Loads the part of one rank. Runs in a separate process."""
    torch.set_num_threads(1)
    # transformers reads these variables, which torchrun would set.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        parallel = DistributedConfig(tp_size=RANKS, tp_plan="auto")
        load(shards, small_llama(), f"rank {rank} of {RANKS}", distributed_config=parallel)
    finally:
        dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        shards = Path(work, "checkpoint")
        model = small_llama()
        model.save_pretrained(shards, max_shard_size="200KB")
        forget(shards)
        load(shards, model, "one process")
        mp.spawn(load_rank, args=(str(shards), str(Path(work, "rendezvous"))), nprocs=RANKS)


if __name__ == "__main__":
    main()
