"""Compares pickled checkpoints of torch with safetensors of ranks, and tensorfs with the loaders and scripts of other
packages.

Run: `python tests/bench/pickled.py --dir /scratch/bench [--size 4.5G] [--runs 5]` (needs torch, as root for cold reads).

It makes the same weights as `.distcp` files of 4 ranks, as FSDP files of 4 ranks, as `.bin` files with an index, as
files of DeepSpeed ZeRO-2, and as safetensors of 4 ranks. Then it measures these cases. Each figure is the median of the
runs, with the slowest and the fastest run:

- `read`: a mounted file read from start to end, with an empty page cache;
- `load`: `load_file`, with an empty and a full page cache, beside `torch.load` with and without mmap, and `dcp.load`;
- `merge`: `tensorfs consolidate`, beside the scripts of torch, accelerate, DeepSpeed and verl that are installed;
- `open`: a checkpoint of 100,000 tensors in 64 files, opened from scratch and from its index.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("TENSORFS_BIN", ROOT / "target/release/tensorfs"))
RANKS = 4
COLUMNS = 4096
ROWS = 4096
KINDS = ("distcp", "ranks", "bin", "zero2")
MEASURES = ("read", "load", "merge", "open")

# The peak memory of a process includes the memory of its parent at the fork, so a small process starts the command.
MEASURE = """
import os, sys, time
start = time.perf_counter()
pid = os.fork()
if pid == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(pid, 0)
seconds = time.perf_counter() - start
os.write(int(sys.argv[1]), f"{seconds} {usage.ru_maxrss * 1024}".encode())
os._exit(0 if status == 0 else 1)
"""

# Each program prints its seconds. It touches all bytes, because mapped files are read only when they are touched.
LOADS = {
    "tensorfs.load_file": """
import sys, time, torch, tensorfs
start = time.perf_counter()
tensors = tensorfs.load_file(sys.argv[1])
touch(tensors.values())
print(time.perf_counter() - start)
""",
    "tensorfs.load_file, copy=None": """
import sys, time, torch, tensorfs
start = time.perf_counter()
tensors = tensorfs.load_file(sys.argv[1], copy=None)
touch(tensors.values())
print(time.perf_counter() - start)
""",
    "torch.load": """
import sys, time, torch
start = time.perf_counter()
kept = []
for path in sys.argv[2:]:
    kept.append(torch.load(path, map_location="cpu", mmap=sys.argv[1] == "mmap", weights_only=False))
    touch(tensors_in(kept[-1]))
print(time.perf_counter() - start)
""",
    "dcp.load": """
import sys, time, torch
import torch.distributed.checkpoint as dcp
reader = dcp.FileSystemReader(sys.argv[1])
start = time.perf_counter()
known = reader.read_metadata().state_dict_metadata
state = {name: torch.empty(it.size, dtype=it.properties.dtype) for name, it in known.items()}
dcp.load(state, storage_reader=reader, no_dist=True)
touch(state.values())
print(time.perf_counter() - start)
""",
}
TOUCH = """
def touch(tensors):
    for tensor in tensors:
        tensor.view(-1).view(__import__("torch").uint8)[::4096].sum()

def tensors_in(value):
    import torch
    if isinstance(value, torch.Tensor):
        yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
"""


def names_of(length):
    """Names of tensors of ROWS x COLUMNS in BF16 that have about `length` bytes together."""
    return [f"layers.{number}.weight" for number in range(max(1, round(length / (ROWS * COLUMNS * 2))))]


def weight(number):
    """The tensor of this number, the same in every process."""
    import torch

    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(number)).bfloat16()


def save_rank(rank, kind, folder, length, rendezvous):
    """Saves the part of one rank. Runs in a process of its own."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        part = ROWS // RANKS
        state = {}
        for number, name in enumerate(names_of(length)):
            own = weight(number)[rank * part : (rank + 1) * part].clone()
            state[name] = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        if kind == "distcp":
            dcp.save(state, checkpoint_id=folder)
        else:
            torch.save(state, Path(folder, f"model_world_size_{RANKS}_rank_{rank}.pt"))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def save_by_ranks(kind, folder, length):
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as work:
        mp.spawn(save_rank, args=(kind, str(folder), length, str(Path(work, "rendezvous"))), nprocs=RANKS)


def save_verl_config(folder):
    """Adds a small model and a tokenizer, which verl's merger reads and writes too."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    text = folder / "huggingface"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    LlamaConfig(architectures=["LlamaForCausalLM"], **sizes).save_pretrained(text)
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(text)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))


def save_bin(folder, length):
    import torch

    names = names_of(length)
    each = -(-len(names) // RANKS)
    map_of = {}
    for file in range(RANKS):
        mine = names[file * each : (file + 1) * each]
        title = f"pytorch_model-{file + 1:05}-of-{RANKS:05}.bin"
        torch.save({name: weight(names.index(name)) for name in mine}, folder / title)
        map_of.update(dict.fromkeys(mine, title))
    index = {"metadata": {"total_size": len(names) * ROWS * COLUMNS * 2}, "weight_map": map_of}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def save_zero2(folder, length):
    """Writes the files of DeepSpeed ZeRO-2 that are read: those of the model and of the F32 partitions."""
    from collections import OrderedDict

    import torch

    names = names_of(length)
    module = OrderedDict((name, weight(number)) for number, name in enumerate(names))
    shapes = [OrderedDict((name, torch.Size([ROWS, COLUMNS])) for name in names)]
    model = {"module": module, "buffer_names": [], "param_shapes": shapes, "frozen_param_shapes": None}
    model |= {"shared_params": {}, "frozen_param_fragments": None, "dp_world_size": RANKS, "mp_world_size": 1}
    torch.save({**model, "ds_version": "0.19.8", "ds_config": {}}, folder / "mp_rank_00_model_states.pt")
    flat = torch.cat([tensor.flatten().float() for tensor in module.values()])
    for rank, part in enumerate(flat.chunk(RANKS)):
        state = {"zero_stage": 2, "partition_count": RANKS, "single_partition_of_fp32_groups": [part.clone()]}
        path = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8", "ds_config": {}}, path)


def save_reference(folder, length):
    """Writes the same weights as safetensors of 4 ranks."""
    import torch

    names, part = names_of(length), ROWS // RANKS
    for rank in range(RANKS):
        info = {name: {"saved_offsets": [rank * part, 0]} for name in names}
        header = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}}
        size = part * COLUMNS * 2
        for number, name in enumerate(names):
            header[name] = {"dtype": "BF16", "shape": [part, COLUMNS], "data_offsets": [number * size, (number + 1) * size]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for number in range(len(names)):
                file.write(weight(number)[rank * part : (rank + 1) * part].contiguous().view(torch.uint8).numpy().tobytes())


def made(folder, kind, length):
    """The folder with the checkpoint of this kind. It is made if it does not exist."""
    out = folder / f"{kind}-{length}"
    if out.is_dir():
        return out
    new = folder / f"{kind}-{length}.new"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    if kind in ("distcp", "ranks"):
        save_by_ranks(kind, new, length)
    else:
        {"bin": save_bin, "zero2": save_zero2, "safetensors": save_reference}[kind](new, length)
    new.rename(out)
    return out


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def run(words):
    """Seconds of a command, its output, and its peak resident size in bytes."""
    source, sink = os.pipe()
    measure = [sys.executable, "-I", "-S", "-c", MEASURE, sink, *words]
    done = subprocess.run([str(word) for word in measure], stdout=subprocess.PIPE, pass_fds=[sink], check=False)
    os.close(sink)
    with open(source) as figures:
        text = figures.read()
    if done.returncode:
        sys.exit(f"{words[0]} failed")
    seconds, peak = text.split()
    return float(seconds), done.stdout.decode(), int(peak)


def measured(title, runs, length, one):
    """Prints and returns the median rate of `runs` calls of `one`. A call returns its seconds and its peak memory."""
    figures = [one() for _ in range(runs)]
    rates = [length / seconds / 1e6 for seconds, _ in figures]
    median, peak = statistics.median(rates), max(peak for _, peak in figures)
    print(f"{title:44} {median:7.0f} MB/s ({min(rates):.0f} to {max(rates):.0f}), peak {peak / 1e6:.0f} MB", flush=True)
    return median


def read_mounted(source):
    """Seconds of a cold read of the mounted file, and the peak memory of this process."""
    with tempfile.TemporaryDirectory() as point:
        subprocess.run([BIN, "mount", source, point], check=True)
        try:
            drop_caches()
            start = time.perf_counter()
            with open(Path(point, "model.safetensors"), "rb", buffering=0) as file:
                buffer = bytearray(8 << 20)
                while file.readinto(buffer):
                    pass
            return time.perf_counter() - start, 0
        finally:
            subprocess.run([BIN, "umount", point], check=True)


def bench_read(sources, reference, length, args):
    best = measured("read safetensors of ranks", args.runs, length, lambda: read_mounted(reference))
    for kind, source in sources.items():
        rate = measured(f"read {kind}", args.runs, length, lambda source=source: read_mounted(source))
        print(f"read {kind}: {rate / best:.2f} of the safetensors", flush=True)


def load_words(kind, source):
    """Loads of a source by other packages: for each load its title, and the words of its command."""
    if kind == "distcp":
        return [("dcp.load", [LOADS["dcp.load"], source])]
    files = sorted(path for path in source.iterdir() if path.suffix in (".pt", ".bin"))
    if kind == "zero2":
        files = [source / "mp_rank_00_model_states.pt"]
    return [(f"torch.load, {how}", [LOADS["torch.load"], how, *files]) for how in ("mmap", "no mmap")]


def bench_load(sources, length, args):
    for kind, source in sources.items():
        for state in ("cold", "cached"):

            def one(code, *words, state=state):
                if state == "cold":
                    drop_caches()
                _, out, peak = run([sys.executable, "-c", TOUCH + code, *words])
                return float(out.splitlines()[-1]), peak

            if state == "cached":
                one(LOADS["tensorfs.load_file"], source)
            ours = {}
            for name in ("load_file", "load_file, copy=None"):
                code = LOADS[f"tensorfs.{name}"]
                title = f"load {kind} {state}: {name}"
                ours[name] = measured(title, args.runs, length, lambda code=code: one(code, source))
            for title, words in load_words(kind, source):
                rate = measured(f"load {kind} {state}: {title}", args.runs, length, lambda words=words: one(*words))
                # A load that maps its files is compared with the load of tensorfs that maps them too.
                name = "load_file, copy=None" if title.endswith(", mmap") else "load_file"
                print(f"load {kind} {state}: {name} {ours[name] / rate:.2f} times {title}", flush=True)


def peers(kind, source, out):
    """The scripts of other packages for a kind: for each script its title, and the words of its command."""
    python = [sys.executable, "-m"]
    found = []
    if kind == "distcp":
        found.append(("dcp_to_torch", [*python, "torch.distributed.checkpoint.format_utils", "dcp_to_torch", source, out]))
        if find_spec("accelerate"):
            merge = [*python, "accelerate.commands.accelerate_cli", "merge-weights", source, out]
            found.append(("accelerate merge-weights", merge))
    if kind == "zero2" and find_spec("deepspeed"):
        script = "deepspeed.utils.zero_to_fp32"
        found.append(("zero_to_fp32", [*python, script, source.parent, out, "--tag", source.name]))
    if kind == "ranks" and find_spec("verl"):
        save_verl_config(source)
        merge = ["verl.model_merger", "merge", "--backend", "fsdp", "--local_dir", source, "--target_dir", out]
        found.append(("verl model_merger", [*python, *merge]))
    return found


def bench_merge(sources, folder, length, args):
    out = folder / "out"
    for kind, source in sources.items():
        options = ["-o", "zero=fp32"] if kind == "zero2" else []

        def one(*words):
            shutil.rmtree(out, ignore_errors=True)
            out.unlink(missing_ok=True)
            drop_caches()
            seconds, _, peak = run(words)
            return seconds, peak

        best = measured(f"merge {kind}: tensorfs", args.runs, length, lambda: one(BIN, "consolidate", source, out, *options))
        for title, words in peers(kind, source, out):
            rate = measured(f"merge {kind}: {title}", args.runs, length, lambda words=words: one(*words))
            print(f"merge {kind}: {best / rate:.1f} times {title}", flush=True)
    shutil.rmtree(out, ignore_errors=True)


def bench_open(folder, args):
    import torch
    import torch.distributed.checkpoint as dcp

    source = folder / f"many-{args.tensors}"
    if not source.is_dir():
        state = {f"layers.{number}.weight": torch.zeros(8, 8) for number in range(args.tensors)}
        writer = dcp.FileSystemWriter(source, single_file_per_rank=True, thread_count=64, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)
    files = len(list(source.glob("*.distcp")))
    index = folder / "index"
    shutil.rmtree(index, ignore_errors=True)
    run([BIN, "index", source, "--index-dir", index])
    for title, place in (("from scratch", "none"), ("from its index", index)):
        figures = [run([BIN, "ls", "--short", source, "--index-dir", place]) for _ in range(args.runs)]
        seconds = [seconds for seconds, *_ in figures]
        peak = max(peak for *_, peak in figures)
        median = statistics.median(seconds)
        print(f"open {args.tensors} tensors in {files} files {title}: {median:.2f} s ({min(seconds):.2f} to "
              f"{max(seconds):.2f}), peak {peak / 1e6:.0f} MB", flush=True)


def size(text):
    units = {"M": 10**6, "G": 10**9}
    return int(float(text[:-1]) * units[text[-1]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--size", type=size, default=size("4.5G"), help="bytes of the weights, as 500M or 4.5G")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the checkpoint that is opened")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    length = len(names_of(args.size)) * ROWS * COLUMNS * 2
    needed = set(args.measures) - {"open"}
    sources = {kind: made(args.dir, kind, args.size) for kind in args.kinds if needed}
    if "read" in needed:
        bench_read(sources, made(args.dir, "safetensors", args.size), length, args)
    if "load" in needed:
        bench_load(sources, length, args)
    if "merge" in needed:
        bench_merge(sources, args.dir, length, args)
    if "open" in args.measures:
        bench_open(args.dir, args)


if __name__ == "__main__":
    main()
