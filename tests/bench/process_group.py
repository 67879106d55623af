#!/usr/bin/env python3
"""Times loads of a process group of gloo on one host, in turns: one rank alone, four ranks that each load everything,
and four ranks that each load a quarter. If fastsafetensors and InstantTensor are installed, their group loads are timed
too.

    python tests/bench/process_group.py --dir /scratch/llama --runs 5
    python tests/bench/process_group.py --dir /scratch/llama --device cuda --ranks 2 --warm

`--dir` is a folder of safetensors shards. Needs torch, tensorfs, and root for a cold page cache. Each run starts new
processes. Its time begins at a barrier, and ends when the last rank has its tensors. `disk` is the number of bytes that
all ranks read from the disk. `beside` is the growth of the peak memory of a rank, minus its own tensors. It is negative
if some tensors are mapped and not touched yet. `touch` is the time to touch each page of the tensors afterwards. With
`--device cuda` the ranks use the GPUs in turn, so that several ranks may share a GPU. InstantTensor loads only to GPUs,
and needs a group of NCCL, which allows one rank for each GPU.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

TIME_LIMIT = 600


def status(word):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(word))
    return int(line.split()[1]) << 10


def disk():
    line = next(line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes"))
    return int(line.split()[1])


def alone(folder, group, size, device):
    import tensorfs

    return tensorfs.load_file(folder, device=device)


def everything(share):
    def load(folder, group, size, device):
        import tensorfs

        return tensorfs.load_file(folder, device=device, process_group=group, share=share)

    return load


def quarter(share, dim):
    def load(folder, group, size, device):
        import tensorfs

        with tensorfs.safe_open(folder, "pt", device, process_group=group, share=share) as f:
            return dict(f.tensors(shard=dim))

    return load


def into(share):
    def load(folder, group, size, device):
        import tensorfs
        import torch

        with tensorfs.safe_open(folder, "pt") as f:
            facts = {name: f.get_slice(name) for name in f.keys()}
            dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
            mapping = {name: torch.empty(one.get_shape(), dtype=dtypes[one.get_dtype()], device=device) for name, one in facts.items()}
        tensorfs.load_into(mapping, folder, process_group=group, share=share)
        return mapping

    return load


def fast(dim):
    def load(folder, group, size, device):
        from fastsafetensors import SafeTensorsFileLoader

        files = sorted(map(str, Path(folder).glob("*.safetensors")))
        loader = SafeTensorsFileLoader(group, device=device, nogds=True)
        loader.add_filenames({number: files[number::size] for number in range(size)})
        buffers = loader.copy_files_to_device()
        if dim is None:
            return {name: buffers.get_tensor(name) for name in loader.get_keys()}, buffers
        shapes = {name: buffers.get_shape(name) for name in loader.get_keys()}
        return {
            name: buffers.get_sharded(name, dim) if len(shape) > dim and shape[dim] % size == 0 else buffers.get_tensor(name)
            for name, shape in shapes.items()
        }, buffers

    return load


def instant(folder, group, size, device):
    from instanttensor import safe_open

    files = sorted(map(str, Path(folder).glob("*.safetensors")))
    with safe_open(files, "pt", device, group) as f:
        return dict(f.tensors())


# Name -> number of ranks, and load. None stands for the number in `--ranks`.
CASES = {
    "alone": (1, alone),
    "everything": (None, everything(None)),
    "everything:network": (None, everything("network")),
    "everything:into": (None, into("host")),
    "everything:into:network": (None, into("network")),
    "everything:fastsafetensors": (None, fast(None)),
    "everything:instanttensor": (None, instant),
    "rows": (None, quarter(None, 0)),
    "rows:fastsafetensors": (None, fast(0)),
    "columns": (None, quarter(None, 1)),
    "columns:network": (None, quarter("network", 1)),
    "columns:fastsafetensors": (None, fast(1)),
}


def why_not(case, device, ranks):
    """The reason why a case cannot be measured here. None if it can."""
    import torch

    package = case.rpartition(":")[2]
    if package in ("fastsafetensors", "instanttensor") and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if package == "instanttensor" and device == "cpu":
        return "it loads to GPUs only"
    if package == "instanttensor" and (CASES[case][0] or ranks) > torch.cuda.device_count():
        return "NCCL takes one rank for each GPU"
    return None


def child(case, folder, device, rank, size, port):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        torch.empty(1, device=device)
    backend = "nccl" if case.endswith(":instanttensor") else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    load = CASES[case][1]
    for package in ("fastsafetensors", "instanttensor"):
        if case.endswith(f":{package}"):
            importlib.import_module(package)
    import tensorfs  # noqa: F401

    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    memory, read, before = status("VmRSS"), disk(), time.monotonic()
    found = load(folder, dist.group.WORLD, size, device)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - before
    memory = status("VmHWM") - memory
    held = found[0] if isinstance(found, tuple) else found
    own = sum(t.numel() * t.element_size() for t in held.values() if t.device.type == "cpu")
    read, before = disk() - read, time.monotonic()
    total = sum(int(t.contiguous().view(-1).view(torch.uint8)[:: 4096].sum()) for t in held.values() if t.numel())
    print(json.dumps([seconds, read, memory, own, time.monotonic() - before, total]), flush=True)
    dist.barrier()
    os._exit(0)


def measured(case, folder, ranks, cold, device):
    size = CASES[case][0] or ranks
    if cold:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    arguments = [sys.executable, __file__, "--child", case, "--dir", folder, "--device", device]
    children = [
        subprocess.Popen([*arguments, "--place", f"{rank},{size},{port}"], stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        lines = [one.communicate(timeout=TIME_LIMIT)[0] for one in children]
        answers = [json.loads(line.splitlines()[-1]) for line in lines]
    except (IndexError, ValueError, subprocess.TimeoutExpired):
        return None
    finally:
        for one in children:
            if one.poll() is None:
                one.kill()
            one.wait()
    seconds, read, memory, own, use, _ = zip(*answers)
    return max(seconds), sum(read), max(map(int.__sub__, memory, own)), max(use)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--warm", action="store_true", help="with the files in the page cache")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.dir, given.device, *map(int, given.place.split(",")))
    total = sum(path.stat().st_size for path in Path(given.dir).glob("*.safetensors"))
    reasons = {case: why_not(case, given.device, given.ranks) for case in given.cases.split(",")}
    for case, reason in reasons.items():
        if reason:
            print(f"{case} is not measured: {reason}")
    found = {case: [] for case, reason in reasons.items() if reason is None}
    for _ in range(given.runs):
        for case, several in found.items():
            several.append(measured(case, given.dir, given.ranks, not given.warm, given.device))
    print(f"{total / 1e9:.2f} GB, {given.ranks} ranks, medians of {given.runs} with the least and the greatest, MiB")
    print(f"{'':30} {'s':>6} {'':15} {'of alone':>8} {'disk':>7} {'beside':>7} {'touch':>6}")
    single = None
    for case, several in found.items():
        done = [one for one in several if one is not None]
        if not done:
            print(f"{case:30} failed")
            continue
        seconds, read, memory, use = (statistics.median(column) for column in zip(*done))
        spread = f"{min(one[0] for one in done):.2f} to {max(one[0] for one in done):.2f}"
        single = seconds if case == "alone" else single
        ratio = f"{seconds / single:.2f}" if single else ""
        print(f"{case:30} {seconds:6.2f} {spread:>15} {ratio:>8} {read / total:6.2f}x {memory / 2**20:7.0f} {use:6.2f}", flush=True)


if __name__ == "__main__":
    main()
