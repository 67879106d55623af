"""Loads a sharded Hugging Face checkpoint through a tensorfs mount with plain transformers.

The example saves a small Llama in several shards, and mounts the folder. `from_pretrained` reads the
mount with its default settings, and finds one `model.safetensors`. The example compares every
weight, bit for bit, with the saved model. It removes the mount, then all files that it made.

Run:   python examples/transformers_mount.py [--tensorfs PATH]
Needs: Linux with FUSE, the `tensorfs` binary, and `pip install torch transformers`.
       No network, no GPU.
"""

import argparse
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# The example loads only local files, so a request to the hub would be a bug. transformers reads this variable at its
# import.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


def parse_args(description):
    """Returns the arguments, with `tensorfs` as the full path of a binary that exists."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tensorfs", default="tensorfs", metavar="PATH",
                        help="the tensorfs binary (default: found on PATH)")
    args = parser.parse_args()
    binary = shutil.which(args.tensorfs)
    if binary is None:
        parser.error(f"{args.tensorfs}: no such program; build it with "
                     "`cargo build --release` and pass --tensorfs target/release/tensorfs")
    args.tensorfs = os.path.abspath(binary)
    # Python skips `finally` on SIGTERM unless it becomes an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return args


def small_llama():
    """Returns a Llama of about a million BF16 weights, which are the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


@contextlib.contextmanager
def mounted(tensorfs, source, target, *options):
    """Mounts `source` on the new folder `target` with `options` while the block runs."""
    target.mkdir()
    # `mount` returns when the mount answers. The daemon runs in the background.
    words = [word for option in options for word in ("-o", option)]
    if subprocess.run([tensorfs, "mount", source, target, *words]).returncode != 0:
        sys.exit("not mounted: the line above says why")
    try:
        yield target
    finally:
        # Loaded tensors may still map the file, and the unmount would fail with EBUSY.
        gc.collect()
        plain = subprocess.run([tensorfs, "umount", target])
        if plain.returncode != 0:
            subprocess.run([tensorfs, "umount", "--lazy", target], check=True)


def show(title, folder):
    """Prints the files of `folder` with their sizes."""
    print(f"{title} ({folder}):")
    for entry in sorted(folder.iterdir()):
        print(f"  {entry.stat().st_size:>10}  {entry.name}")


def bits(tensor):
    """Returns the bytes of `tensor`, to compare them. As floats, two NaNs would differ, and -0.0 would equal 0.0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def check_weights(original, folder):
    """Loads `folder` with default settings and compares every weight with `original`.

    Exits with status 1 and the names that differ. The loaded model is freed on return.
    """
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    wanted = original.state_dict()
    wrong = sorted(wanted.keys() ^ loaded.keys())
    for name in wanted.keys() & loaded.keys():
        a, b = wanted[name], loaded[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b)):
            wrong.append(name)
    if wrong:
        sys.exit("differ from what was saved: " + ", ".join(wrong))
    n_bytes = sum(bits(tensor).numel() for tensor in wanted.values())
    print(f"{len(wanted)} weights, {n_bytes} bytes: every bit as it was saved")


def main():
    args = parse_args(__doc__.splitlines()[0])
    model = small_llama()
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        shards = Path(work, "checkpoint")
        model.save_pretrained(shards, max_shard_size="200KB")
        show("saved", shards)
        with mounted(args.tensorfs, shards, Path(work, "mnt")) as mount:
            show("mounted", mount)
            check_weights(model, mount)


if __name__ == "__main__":
    main()
