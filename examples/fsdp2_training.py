"""Loads the checkpoint of an FSDP2 training through a tensorfs mount with plain transformers.

Four processes train a small Llama for two steps with FSDP2, and save model and optimizer with `dcp.save`, in `.metadata` and
`.distcp` files. The example mounts that folder with the `config.json` of another folder. `from_pretrained` reads the mount
with its default settings, and finds one `model.safetensors`, without the optimizer. The example compares every weight, bit
for bit, with the trained model. It removes the mount, then all files that it made.

Run:   python examples/fsdp2_training.py [--tensorfs PATH]
Needs: Linux with FUSE, the `tensorfs` binary, and `pip install torch transformers`.
       No network, no GPU.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from transformers_mount import check_weights, mounted, parse_args, show, small_llama

RANKS = 4
STEPS = 2


def train_rank(rank, folder, whole, rendezvous):
    """Trains and saves the part of one rank. Runs in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        model = small_llama()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(rank)
        for _ in range(STEPS):
            tokens = torch.randint(model.config.vocab_size, (2, 16))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "step": STEPS}, checkpoint_id=folder)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(full, whole)
    finally:
        dist.destroy_process_group()


def main():
    args = parse_args(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        step, whole = Path(work, "step-2"), Path(work, "whole.pt")
        mp.spawn(train_rank, args=(str(step), str(whole), str(Path(work, "rendezvous"))), nprocs=RANKS)
        model = small_llama()
        model.load_state_dict(torch.load(whole))
        # `dcp.save` saves no `config.json`. The mount shows the one of the folder in its option `config`.
        base = Path(work, "base")
        model.config.save_pretrained(base)
        show("saved", step)
        with mounted(args.tensorfs, step, Path(work, "mnt"), f"config={base}") as mount:
            show("mounted", mount)
            check_weights(model, mount)


if __name__ == "__main__":
    main()
