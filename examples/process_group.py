"""Four ranks load a checkpoint together. Each rank reads a part of the checkpoint, and gets the tensors or slices that
it asks for.

    torchrun --nproc-per-node 4 examples/process_group.py FOLDER

Needs torch and tensorfs.
"""

import sys

import torch
import torch.distributed as dist

import tensorfs

dist.init_process_group("gloo")
group, rank = dist.group.WORLD, dist.get_rank()

with tensorfs.safe_open(sys.argv[1], framework="pt", process_group=group) as f:
    slices = dict(f.tensors(shard=0))
    name = f.keys()[0]
    first = f.push_tensor(name, rank=0)
    read = torch.tensor([f.stats.get("bytes_read", 0), sum(t.nbytes for t in slices.values())])

print(f"rank {rank}: {len(slices)} slices of {read[1] / 2**20:.1f} MiB, {read[0] / 2**20:.1f} MiB read", flush=True)
if first is not None:
    print(f"rank {rank}: {name} {list(first.shape)}")
dist.destroy_process_group()
