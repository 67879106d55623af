"""Loads the rank shards of a distributed training job through a tensorfs mount with plain transformers.

Four processes save a small Llama with `torch.distributed.checkpoint`. Each process saves its part of every weight
(rows, columns, or all of it). The example mounts the folder of rank shards without consolidation, together with the
`config.json` of another folder. `from_pretrained` reads the mount with its default settings, and finds one
`model.safetensors`. The example compares every weight, bit for bit, with the saved model. It removes the mount, then
all files that it made.

Run:   python examples/dcp_mount.py [--tensorfs PATH]
Needs: Linux with FUSE, the `tensorfs` binary, and `pip install torch transformers`.
       No network, no GPU.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from transformers_mount import check_weights, mounted, parse_args, show, small_llama

RANKS = 4


def placement(name):
    """Returns the placement of a weight over the ranks: the usual tensor-parallel plan of a Llama."""
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return Shard(1)
    if name.endswith("norm.weight"):
        return Replicate()
    return Shard(0)


def save_rank(rank, folder, rendezvous):
    """Saves the weights of one rank of the training job. Runs in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        state = {
            name: distribute_tensor(tensor, mesh, [placement(name)])
            for name, tensor in small_llama().state_dict().items()
        }
        writer = HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=False)
        dcp.save(state, storage_writer=writer)
    finally:
        dist.destroy_process_group()


def main():
    args = parse_args(__doc__.splitlines()[0])
    model = small_llama()
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        shards = Path(work, "checkpoint")
        mp.spawn(save_rank, args=(str(shards), str(Path(work, "rendezvous"))), nprocs=RANKS)
        # The writer saves only weights. The mount shows the other files of the folder in its option `config`.
        base = Path(work, "base")
        model.config.save_pretrained(base)
        show("saved", shards)
        with mounted(args.tensorfs, shards, Path(work, "mnt"), f"config={base}") as mount:
            show("mounted", mount)
            check_weights(model, mount)


if __name__ == "__main__":
    main()
