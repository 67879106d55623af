#!/usr/bin/env python3
"""Compares the speed of checkpoint loaders. They load the same files in turns, and each run is a process of its own.

    python tests/bench/loaders.py --dir /scratch --runs 5

Needs torch and tensorfs (`pip install ./python`). Measures every other loader that is installed: safetensors,
fastsafetensors, runai-model-streamer, tensorizer, instanttensor, and torch's own DCP reader. If fio is installed, it
measures the speed of the disk. The time of a run ends when the last tensor is loaded and owns its memory, and, on a
GPU, when the device has finished. After that, the loaded bytes are summed up, the sums of all loaders are compared, and
the time to free the memory is measured separately. The case `hf:warm:untouched` is `hf:warm` with free memory that was
not in use for a while.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata, util
from pathlib import Path

TIME_LIMIT = 600
RANKS = 8

# ---------------------------------------------------------------------------------------------
# Checkpoints


def write_safetensors(path, tensors, extra=None):
    """Writes a safetensors file. `tensors` maps each name to (dtype, shape, data as a bytes-like object)."""
    header, end = {"__metadata__": {"format": "pt", **(extra or {})}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def random_data(rng, length):
    """Random bytes that are finite numbers as bf16, so that their sum is a number too."""
    import numpy as np

    words = rng.integers(0, 1 << 63, (length + 7) // 8, dtype=np.uint64)
    return (words & np.uint64(0xBFFFBFFFBFFFBFFF)).view(np.uint8)[:length].data


def weight_map(folder, files):
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def llama_shapes(size):
    """Names and shapes of a Llama-like model of about `size` bytes in bf16."""
    hidden, inner, vocabulary = (4096, 11008, 32000) if size >= 2e9 else (1024, 2816, 16000)
    layer = {
        "input_layernorm.weight": [hidden],
        "mlp.down_proj.weight": [hidden, inner],
        "mlp.gate_proj.weight": [inner, hidden],
        "mlp.up_proj.weight": [inner, hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.k_proj.weight": [hidden // 4, hidden],
        "self_attn.o_proj.weight": [hidden, hidden],
        "self_attn.q_proj.weight": [hidden, hidden],
        "self_attn.v_proj.weight": [hidden // 4, hidden],
    }
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden]}
    number = 0
    while sum(2 * product(shape) for shape in shapes.values()) < size:
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return shapes


def product(shape):
    result = 1
    for extent in shape:
        result *= extent
    return result


def make_shards(folder, shapes, count):
    """`count` numbered shards of the same size and a weight map."""
    import numpy as np

    rng, total, files = np.random.default_rng(1), sum(2 * product(s) for s in shapes.values()), {}
    part, length = {}, 0
    left = list(shapes.items())
    while left:
        name, shape = left.pop(0)
        part[name] = ("BF16", shape, random_data(rng, 2 * product(shape)))
        length += 2 * product(shape)
        if length >= total / count or not left:
            file = f"model-{len(files) + 1:05}-of-{count:05}.safetensors"
            write_safetensors(folder / file, part)
            files[file], part, length = list(part), {}, 0
    # There may be fewer shards than `count`, so the file names get the real number.
    for number, file in enumerate(list(files), 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / file).rename(folder / name)
        files[name] = files.pop(file)
    weight_map(folder, files)


def make_hf(folder, size):
    make_shards(folder, llama_shapes(size), 4)


def make_small(folder, size):
    del size
    make_shards(folder, {f"layers.{n // 8}.experts.{n % 8}.scale": [2048] for n in range(60_000)}, 60)


def make_dcp_columns(folder, size):
    """Rank shards of torch DCP, every matrix cut along its last dimension."""
    import numpy as np

    rng = np.random.default_rng(2)
    shapes = {name: shape for name, shape in llama_shapes(size / 4).items() if len(shape) == 2}
    for rank in range(RANKS):
        part, places = {}, {}
        for name, (rows, columns) in shapes.items():
            width = columns // RANKS
            part[name] = ("BF16", [rows, width], random_data(rng, 2 * rows * width))
            places[name] = {"saved_offsets": [0, rank * width]}
        extra = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"}
        name = f"shard-{rank + 1:05}-model-00001-of-{RANKS:05}.safetensors"
        write_safetensors(folder / name, part, extra)


CHECKPOINTS = {"hf": make_hf, "small": make_small, "dcp": make_dcp_columns}
# Cases that use the files of another checkpoint.
USES = {"tp0": "hf", "tp1": "hf", "loop": "hf", "pretrained": "hf"}

# ---------------------------------------------------------------------------------------------
# Loaders: each returns name -> tensor. `files` are the shards in order.


def by_tensorfs(folder, files, device):
    import tensorfs.torch

    return tensorfs.torch.load_file(str(folder), device=device)


def by_tensorfs_numpy(folder, files, device):
    import tensorfs.numpy

    return tensorfs.numpy.load_file(str(folder))


def by_safetensors(folder, files, device):
    from safetensors.torch import load_file

    own = (lambda tensor: tensor.clone()) if device == "cpu" else (lambda tensor: tensor)
    return {name: own(tensor) for file in files for name, tensor in load_file(file, device=device).items()}


def by_fastsafetensors(folder, files, device):
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device=device, nogds=True)
    loader.add_filenames({0: files})
    buffer = loader.copy_files_to_device()
    return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}


def by_runai(folder, files, device):
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        own = (lambda tensor: tensor.clone()) if device == "cpu" else (lambda tensor: tensor.to(device))
        return {name: own(tensor) for name, tensor in streamer.get_tensors()}


def by_tensorizer(folder, files, device):
    from tensorizer import TensorDeserializer

    return dict(TensorDeserializer(str(folder / "model.tensors"), device=device).items())


def by_instanttensor(folder, files, device):
    from instanttensor import safe_open

    with safe_open(files, framework="pt", device=device) as file:
        return dict(file.tensors())


def by_torch_dcp(folder, files, device):
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in found.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


def by_consolidation(folder, files, device):
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    names = {name for file in files for name in header_of(file) if name != "__metadata__"}
    with tempfile.TemporaryDirectory(dir=folder) as out:
        consolidate_safetensors_files(str(folder), out, dict.fromkeys(names, 1), num_threads=os.cpu_count())
        merged = [str(path) for path in Path(out).glob("*.safetensors")]
        return {name: tensor.clone() for file in merged for name, tensor in load_file(file).items()}


def header_of(file):
    with open(file, "rb") as opened:
        return json.loads(opened.read(int.from_bytes(opened.read(8), "little")))


# Name of a loader -> its function, the module that it needs, its checkpoints, and whether it loads to the CPU, to GPUs,
# or to both.
LOADERS = {
    "tensorfs": (by_tensorfs, "tensorfs", ("hf", "small", "dcp"), "both"),
    "tensorfs-numpy": (by_tensorfs_numpy, "tensorfs", ("hf", "small", "dcp"), "cpu"),
    "safetensors": (by_safetensors, "safetensors", ("hf", "small"), "both"),
    "fastsafetensors": (by_fastsafetensors, "fastsafetensors", ("hf", "small"), "both"),
    "runai": (by_runai, "runai_model_streamer", ("hf", "small"), "both"),
    "tensorizer": (by_tensorizer, "tensorizer", ("hf", "small"), "both"),
    "instanttensor": (by_instanttensor, "instanttensor", ("hf", "small"), "cuda"),
    "torch-dcp": (by_torch_dcp, "torch.distributed.checkpoint", ("dcp",), "cpu"),
    "consolidate-then-load": (by_consolidation, "torch.distributed.checkpoint", ("dcp",), "cpu"),
}


def one_of_ranks(file, dim):
    """For each matrix: its name, and the part of it that rank 3 of `RANKS` ranks has."""
    for name in file.keys():
        whole = file.get_slice(name)
        shape = whole.get_shape()
        if len(shape) >= 2:
            extent = shape[dim] // RANKS
            part = slice(3 * extent, 4 * extent)
            yield name, whole[part] if dim == 0 else whole[:, part]


def slice_by_tensorfs(folder, dim, device):
    import tensorfs

    with tensorfs.safe_open(str(folder), framework="pt", device=device) as file:
        return dict(one_of_ranks(file, dim))


def slice_by_safetensors(folder, dim, device):
    from safetensors import safe_open

    taken = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt", device=device) as file:
            taken |= {name: part.clone() for name, part in one_of_ranks(file, dim)}
    return taken


SLICERS = {"tensorfs": slice_by_tensorfs, "safetensors": slice_by_safetensors}

# ---------------------------------------------------------------------------------------------
# Loops of users, who take one tensor after the other


def taken_by_one(names, take):
    return {name: take(name) for name in names}


def taken_by_four(names, take):
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(names, pool.map(take, names)))


def loop_by_tensorfs(walk, take):
    def load(folder, files, device):
        import tensorfs

        with tensorfs.safe_open(str(folder), framework="pt", device=device) as file:
            return walk(file.keys(), lambda name: take(file, name))

    return load


def loop_by_safetensors(walk, take):
    """Loops over the shards one after the other, because safetensors opens one file at a time."""

    def load(folder, files, device):
        from safetensors import safe_open

        own = (lambda tensor: tensor.clone()) if device == "cpu" else (lambda tensor: tensor)
        taken = {}
        for path in files:
            with safe_open(path, framework="pt", device=device) as file:
                taken |= walk(file.keys(), lambda name: own(take(file, name)))
        return taken

    return load


def by_get_tensor(file, name):
    return file.get_tensor(name)


def by_get_slice(file, name):
    return file.get_slice(name)[...]


def pretrained(patched):
    """Calls `from_pretrained` of transformers on the shards and looks at each byte of the model."""

    def load(folder, files, device):
        import contextlib

        import tensorfs
        import torch
        from transformers import AutoModel

        with tensorfs.patched() if patched else contextlib.nullcontext():
            model = AutoModel.from_pretrained(str(model_folder(folder)), dtype=torch.bfloat16, device_map=device)
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for tensor in tensors.values():
            tensor.reshape(-1).view(torch.int64).sum()
        return tensors

    return load


def model_folder(folder):
    """A folder beside the checkpoint, with links to its files and with the configuration of its model."""
    beside = folder.with_name(f"{folder.name}-model")
    beside.mkdir(exist_ok=True)
    headers = {}
    for file in folder.glob("*.safetensors"):
        headers |= header_of(file)
    shapes = {name: entry["shape"] for name, entry in headers.items() if name != "__metadata__"}
    vocabulary, hidden = shapes["model.embed_tokens.weight"]
    head = 128
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": shapes["model.layers.0.mlp.up_proj.weight"][0],
        "num_hidden_layers": sum(name.endswith("q_proj.weight") for name in shapes),
        "num_attention_heads": hidden // head,
        "num_key_value_heads": shapes["model.layers.0.self_attn.k_proj.weight"][0] // head,
        "head_dim": head,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (beside / "config.json").write_text(json.dumps(config))
    for path in folder.iterdir():
        if path.name.endswith((".safetensors", ".json")) and not (beside / path.name).exists():
            (beside / path.name).symlink_to(path)
    return beside


# Name of a case -> the programs that take part, each with its function and the module that it needs.
LOOPS = {
    "loop": {
        "tensorfs load_file": (by_tensorfs, "tensorfs"),
        "tensorfs get_tensor": (loop_by_tensorfs(taken_by_one, by_get_tensor), "tensorfs"),
        "tensorfs get_tensor, 4 threads": (loop_by_tensorfs(taken_by_four, by_get_tensor), "tensorfs"),
        "tensorfs get_slice": (loop_by_tensorfs(taken_by_one, by_get_slice), "tensorfs"),
        "safetensors get_tensor": (loop_by_safetensors(taken_by_one, by_get_tensor), "safetensors"),
        "safetensors get_tensor, 4 threads": (loop_by_safetensors(taken_by_four, by_get_tensor), "safetensors"),
        "safetensors get_slice": (loop_by_safetensors(taken_by_one, by_get_slice), "safetensors"),
    },
    "pretrained": {
        "patched": (pretrained(True), "transformers.models.llama.modeling_llama"),
        "unpatched": (pretrained(False), "transformers.models.llama.modeling_llama"),
    },
}

# ---------------------------------------------------------------------------------------------
# One run


def total_of(tensors):
    """A sum over all bytes. It does not depend on the dtypes and the order of the tensors."""
    import numpy as np
    import torch

    total = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = torch.from_numpy(tensor.reshape(-1).view(np.uint8))
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        even = data.numel() // 4 * 4
        if data.storage_offset() % 4 or data.data_ptr() % 4:
            data = data.clone()
        words = data[:even].view(torch.int32)
        part = int(words.sum(dtype=torch.int64)) + int(data[even:].sum(dtype=torch.int64))
        total += part * (1 + sum(name.encode()))
    return total


# From this number of bytes on, the time of a load depends on whether the free memory was in use a moment ago.
TOUCH_MIN = 5e8
TOUCH = """
import ctypes, mmap, sys, threading
facts = dict(line.split(":") for line in open("/proc/meminfo"))
length = min(int(int(facts["MemFree"].split()[0]) * 1024 * 0.75), int(sys.argv[1])) >> 22 << 22
memory = mmap.mmap(-1, length)
memory.madvise(mmap.MADV_HUGEPAGE)
start, half = ctypes.addressof(ctypes.c_char.from_buffer(memory)), length // 2
threads = [threading.Thread(target=ctypes.memset, args=(start + n * half, 1, half)) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def touch_memory(most):
    """Uses most of the free memory once, so that every loader finds memory that was in use a moment ago. Otherwise the
    first loader would be slow: a host takes free memory away from a virtual machine within seconds, and the next use of
    this memory is slow."""
    subprocess.run([sys.executable, "-c", TOUCH, str(int(most))], check=False)


# Seconds after which a host has taken back memory that was freed.
UNTOUCHED_SECONDS = 30


def one_run(task):
    """Does one run, in a process of its own, and prints its time and its other figures."""
    folder, device = Path(task["folder"]), task["device"]
    files = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    import torch

    if task.get("package"):
        __import__(task["package"])
    if device != "cpu":
        torch.ones(1, device=device)
        torch.cuda.synchronize()
    length = sum(os.path.getsize(file) for file in files)
    if task["memory"] == "untouched":
        time.sleep(UNTOUCHED_SECONDS)
    elif length > TOUCH_MIN:
        touch_memory(16e9 + 2 * length)
    before = resource.getrusage(resource.RUSAGE_SELF)
    read_before = bytes_read()
    start = time.perf_counter()
    if "loop" in task:
        tensors = LOOPS[task["loop"]][task["loader"]][0](folder, files, device)
    elif "dim" in task:
        tensors = SLICERS[task["loader"]](folder, task["dim"], device)
    else:
        tensors = LOADERS[task["loader"]][0](folder, files, device)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    length = sum(t.nbytes for t in tensors.values())
    facts = {
        "seconds": seconds,
        "bytes": length,
        "tensors": len(tensors),
        "read": bytes_read() - read_before,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_over_tensors": (after.ru_maxrss - before.ru_maxrss) * 1024 - length if device == "cpu" else None,
        "sum": total_of(tensors),
    }
    start = time.perf_counter()
    del tensors
    facts["free_seconds"] = time.perf_counter() - start
    print(json.dumps(facts))


def bytes_read():
    """Bytes that were read from disks for this process."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return 0


def cool(folder):
    """Drops the files from the page cache. As root, drops the whole page cache."""
    os.sync()
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")


def warm(folder):
    for path in folder.iterdir():
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def run_in_child(task):
    text = json.dumps(task)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--task", text], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {TIME_LIMIT} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[-1])


def run_fio(folder):
    """The speed of the disk on the same files, by fio: io_uring, O_DIRECT, reads of 1 MiB, depth 32."""
    files = ":".join(str(path) for path in sorted(folder.glob("*.safetensors")))
    done = subprocess.run(
        ["fio", "--name=f", f"--filename={files}", "--rw=read", "--bs=1M", "--ioengine=io_uring", "--iodepth=32"]
        + ["--direct=1", "--readonly", "--file_service_type=sequential", "--output-format=json"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        read = json.loads(done.stdout)["jobs"][0]["read"]
        return {"seconds": read["runtime"] / 1000, "bytes": read["io_bytes"], "tensors": 0}
    except (ValueError, KeyError, IndexError):
        return {"failed": done.stderr.strip() or "fio printed nothing to read"}


# ---------------------------------------------------------------------------------------------
# The whole bench


def prepare_tensorizer(folder):
    """Writes the files for tensorizer, which reads a format of its own. The time for that does not count."""
    from safetensors.torch import load_file
    from tensorizer import TensorSerializer

    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    serializer = TensorSerializer(str(folder / "model.tensors"))
    try:
        serializer.write_state_dict(state)
        serializer.close()
    except RuntimeError as error:
        # tensorizer cannot write 60,000 tensors.
        print(f"tensorizer cannot write {folder.name}: {error}", file=sys.stderr)
        (folder / "model.tensors").unlink()


def version_of(package):
    names = {"tensorfs": "tensorfs-loader", "runai_model_streamer": "runai-model-streamer"}
    try:
        return metadata.version(names.get(package, package.split(".")[0]))
    except metadata.PackageNotFoundError:
        return "?"


def runners(case, options):
    """The tasks of all loaders that take part in a case, by name."""
    kind, how, memory = (*case.split(":"), "touched")[:3]
    folder = str(Path(options.dir, USES.get(kind, kind)))
    tasks = {}
    if kind.startswith("tp"):
        for name in SLICERS:
            tasks[name] = {"loader": name, "dim": int(kind[2]), "folder": folder, "package": name}
    elif kind in LOOPS:
        for name, (_, package) in LOOPS[kind].items():
            if util.find_spec(package.split(".")[0]):
                tasks[name] = {"loader": name, "loop": kind, "folder": folder, "package": package}
    else:
        for name, (_, package, kinds, devices) in LOADERS.items():
            fits = kind in kinds and devices in ("both", options.device.split(":")[0])
            if fits and util.find_spec(package.split(".")[0]):
                tasks[name] = {"loader": name, "folder": folder, "package": package}
        if how == "cold" and shutil.which("fio") and options.device == "cpu":
            tasks["fio"] = {"loader": "fio", "folder": folder}
    chosen = options.loaders.split(",") if options.loaders else tasks
    return {name: task | {"device": options.device, "memory": memory} for name, task in tasks.items() if name in chosen}


def measure(case, options):
    tasks = runners(case, options)
    results = {name: [] for name in tasks}
    names = list(tasks)
    for number in range(options.runs):
        # Each run begins with another loader, because the first loader finds the machine in another state than the last
        # one.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            task, folder = tasks[name], Path(tasks[name]["folder"])
            if results[name] and "failed" in results[name][-1]:
                continue
            (cool if case.split(":")[1] == "cold" else warm)(folder)
            results[name].append(run_fio(folder) if name == "fio" else run_in_child(task))
            print(f"{case} {name}: {json.dumps(results[name][-1])}", file=sys.stderr)
    return results


def table(case, results):
    columns = "loader | version | s, median (range) | GB/s | tensors/s | read/wanted | CPU s | free s | over MiB"
    lines = [f"\n{case}", "", f"| {columns} |", "|---|---|---|---|---|---|---|---|---|"]
    sums = set()
    for name, runs in results.items():
        good = [run for run in runs if "failed" not in run]
        version = version_of(LOADERS[name][1]) if name in LOADERS else ""
        if case.partition(":")[0] in LOOPS:
            version = version_of(LOOPS[case.partition(":")[0]][name][1])
        if not good or len(good) < len(runs):
            failed = next((run["failed"] for run in runs if "failed" in run), "not run")
            lines.append(f"| {name} | {version} | failed: {failed} | | | | | | |")
            continue
        seconds = sorted(run["seconds"] for run in good)
        middle = statistics.median(seconds)
        first = good[0]
        spread = f"{middle:.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f})"
        cells = [name, version, spread, f"{first['bytes'] / middle / 1e9:.2f}"]
        if name == "fio":
            cells += ["", "", "", "", ""]
        else:
            sums.add((first["bytes"], first["sum"]))
            cpu = statistics.median(run["cpu_seconds"] for run in good)
            free = statistics.median(run["free_seconds"] for run in good)
            over = max(run["peak_over_tensors"] or 0 for run in good) / (1 << 20)
            read = statistics.median(run["read"] for run in good) / first["bytes"]
            cells += [f"{first['tensors'] / middle:.0f}", f"{read:.2f}", f"{cpu:.2f}", f"{free:.2f}", f"{over:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    if len(sums) > 1:
        lines.append(f"\nTHE LOADERS DO NOT AGREE ON THE BYTES: {sorted(sums)}")
    return "\n".join(lines), len(sums) <= 1


CASES = "hf:cold,hf:warm,hf:cold:untouched,hf:warm:untouched,"
CASES += "small:warm,small:cold,dcp:warm,dcp:cold,tp0:cold,tp1:cold,tp0:warm,tp1:warm,"
CASES += "loop:cold,loop:warm,pretrained:cold,pretrained:warm"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--dir", help="folder for the checkpoints; kept and used again where it has them")
    parser.add_argument("--size", type=float, default=4.5e9, help="bytes of the large checkpoint (default 4.5e9)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", default=CASES, help=f"of {CASES}")
    parser.add_argument("--loaders", help=f"of {','.join(LOADERS)},fio (default: what is installed)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="file for every single run")
    options = parser.parse_args()
    if options.task:
        one_run(json.loads(options.task))
        return 0
    if not options.dir:
        parser.error("--dir is missing")
    cases = options.cases.split(",")
    for kind in dict.fromkeys(USES.get(k, k) for k in (case.split(":")[0] for case in cases)):
        folder = Path(options.dir, kind)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            CHECKPOINTS[kind](folder, options.size)
            if kind != "dcp" and util.find_spec("tensorizer"):
                prepare_tensorizer(folder)
            (folder / "made").touch()
    everything, right = {}, True
    for case in cases:
        everything[case] = measure(case, options)
        text, agree = table(case, everything[case])
        right &= agree
        print(text, flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(everything, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
