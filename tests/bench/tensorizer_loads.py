"""Compares loads of tensorizer files with those of the tensorizer package, and reads of a mounted file with reads of
the file itself.

    python tests/bench/tensorizer_loads.py --dir /scratch --runs 5

Needs torch, tensorizer and tensorfs (`pip install ./python`), and twice `--size` of disk space. The tensorizer package
writes a state dict to a plain and to an encrypted file. All ways load these files to the CPU, in turns. Each run is a
process of its own that does nothing else. The sums of the loaded bytes are compared. The mount needs `tensorfs`, or
TENSORFS_BIN.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loaders import bytes_read, cool, product, total_of, touch_memory, warm

ROOT = Path(__file__).resolve().parents[2]
BIN = os.environ.get("TENSORFS_BIN", str(ROOT / "target/release/tensorfs"))
KEY = bytes(range(32))
TIME_LIMIT = 300


def shapes(size):
    """Names and shapes of a Llama-like model of about `size` bytes in F16, of 9 tensors a layer."""
    hidden, inner, vocabulary = 2048, 5632, 32000
    layer = {"input_layernorm": [hidden], "post_attention_layernorm": [hidden]}
    layer |= {"mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden], "mlp.down_proj": [hidden, inner]}
    layer |= {"self_attn.q_proj": [hidden, hidden], "self_attn.o_proj": [hidden, hidden]}
    layer |= {"self_attn.k_proj": [hidden // 8, hidden], "self_attn.v_proj": [hidden // 8, hidden]}
    found = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden]}
    number = 0
    while 2 * sum(map(product, found.values())) < size:
        found |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        number += 1
    return found


def make(folder, kind, size):
    """Writes a file with the tensorizer package. It runs in a process of its own, whose end frees the memory."""
    import torch
    from tensorizer import EncryptionParams, TensorSerializer

    generator = torch.Generator().manual_seed(1)
    state = {}
    for name, shape in shapes(size).items():
        state[name] = torch.randint(-0x7C00, 0x7C00, shape, dtype=torch.int16, generator=generator).view(torch.float16)
    encryption = EncryptionParams(KEY) if kind == "encrypted" else None
    serializer = TensorSerializer(str(folder / "model.tensors"), encryption=encryption)
    serializer.write_state_dict(state)
    serializer.close()


# ---------------------------------------------------------------------------------------------
# Loads: name -> function of the path and of the key, which is None for a plain file


def by_package(**how):
    def load(path, key):
        from tensorizer import DecryptionParams, TensorDeserializer

        encryption = key and DecryptionParams.from_key(key)
        return dict(TensorDeserializer(path, device="cpu", encryption=encryption, **how).items())

    return load


def by_compat(path, key):
    from tensorfs.compat.tensorizer import DecryptionParams, TensorDeserializer

    encryption = key and DecryptionParams.from_key(key)
    return dict(TensorDeserializer(path, device="cpu", encryption=encryption).items())


def by_load_file(path, key):
    import tensorfs.torch

    return tensorfs.torch.load_file(path, key=key)


# The other loads are compared with the first one.
LOADS = {
    "tensorizer": (by_package(), "tensorizer"),
    "tensorizer, num_readers=1": (by_package(num_readers=1), "tensorizer"),
    "tensorizer, num_readers=2": (by_package(num_readers=2), "tensorizer"),
    "tensorizer, num_readers=4": (by_package(num_readers=4), "tensorizer"),
    "tensorizer, plaid_mode": (by_package(plaid_mode=True), "tensorizer"),
    "tensorfs TensorDeserializer": (by_compat, "tensorfs.compat.tensorizer"),
    "tensorfs load_file": (by_load_file, "tensorfs.torch"),
}


def one_load(task):
    """Does one load, in a process of its own, and prints its time and its other figures."""
    import importlib
    import resource
    import warnings

    import torch

    warnings.simplefilter("ignore")
    load, package = LOADS[task["load"]]
    importlib.import_module(package)
    torch.ones(1)
    key = KEY if task["kind"] == "encrypted" else None
    # Brings the free memory and the page cache into the state that the case needs: see loaders.py.
    touch_memory(1.5 * os.path.getsize(task["path"]))
    if task["how"] == "cold":
        cool(Path(task["path"]).parent)
    else:
        # Another process reads the file: this one might keep memory of the read, and use it for tensors.
        cat(task["path"])
    resident_before = reset_peak()
    before, read_before = resource.getrusage(resource.RUSAGE_SELF), bytes_read()
    start = time.perf_counter()
    tensors = load(task["path"], key)
    seconds = time.perf_counter() - start
    after, peak = resource.getrusage(resource.RUSAGE_SELF), status("VmHWM")
    length = sum(tensor.nbytes for tensor in tensors.values())
    facts = {
        "seconds": seconds,
        "bytes": length,
        "read": bytes_read() - read_before,
        "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "over": peak - resident_before - length,
        "sum": total_of(tensors),
    }
    print(json.dumps(facts))


def status(key):
    """Bytes of memory of this process. `key` is the name of the line in its status."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def reset_peak():
    """Resets the peak of the resident memory, and returns the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def in_child(*words):
    done = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, timeout=TIME_LIMIT, check=False
    )
    if done.returncode:
        raise SystemExit(f"{words}: {done.stderr.strip()}")
    return done.stdout


def timed_loads(folder, kind, how, runs, names):
    results = {name: [] for name in names}
    for number in range(runs):
        # Each run begins with another load.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            task = {"load": name, "kind": kind, "how": how, "path": str(folder / "model.tensors")}
            results[name].append(json.loads(in_child("--task", json.dumps(task)).strip().splitlines()[-1]))
            print(f"{kind}:{how} {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


# ---------------------------------------------------------------------------------------------
# Reads of a mount


def cat(path):
    """Seconds that `cat` takes for a file."""
    start = time.perf_counter()
    subprocess.run(["cat", path], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def timed_reads(folder, how, runs):
    """Times reads of the file, and of a new mount of it as safetensors. For `reread`, the mounted file is in the page
    cache too."""
    path = folder / "model.tensors"
    results = {"file": [], "mount": []}
    with tempfile.TemporaryDirectory(prefix="tensorfs-bench-") as place:
        for number in range(runs):
            for side in ("file", "mount") if number % 2 else ("mount", "file"):
                words = [BIN, "mount", path, place, "--index-dir", "none"]
                if side == "mount":
                    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
                try:
                    (cool if how == "cold" else warm)(folder)
                    (file,) = Path(place).glob("*.safetensors") if side == "mount" else [path]
                    if how == "reread":
                        cat(file)
                    results[side].append({"seconds": cat(file), "bytes": file.stat().st_size})
                finally:
                    if side == "mount":
                        subprocess.run([BIN, "umount", place], check=True)
                print(f"mount:{how} {side}: {results[side][-1]}", file=sys.stderr, flush=True)
    return results


# ---------------------------------------------------------------------------------------------
# The whole bench


def table(case, results):
    lines = [f"\n{case}", "", "| | s, median (range) | GB/s | ratio | CPU s | memory over the tensors, MiB |"]
    lines.append("|---|---|---|---|---|---|")
    base = statistics.median(run["seconds"] for run in next(iter(results.values())))
    for name, runs in results.items():
        seconds = sorted(run["seconds"] for run in runs)
        middle = statistics.median(seconds)
        cells = [name, f"{middle:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f})"]
        cells += [f"{runs[0]['bytes'] / middle / 1e9:.2f}", f"{base / middle:.2f}"]
        if "cpu_seconds" in runs[0]:
            cells.append(f"{statistics.median(run['cpu_seconds'] for run in runs):.2f}")
            cells.append(f"{max(run['over'] for run in runs) / (1 << 20):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


CASES = "plain:cold,plain:cached,encrypted:cold,encrypted:cached,mount:cold,mount:source-cached,mount:reread"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--dir", help="folder for the files; kept and used again where it has them")
    parser.add_argument("--size", type=float, default=2.4e9, help="bytes of each file (default 2.4e9)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", default=CASES, help=f"of {CASES}")
    parser.add_argument("--loads", help=f"separated by semicolons, of {';'.join(LOADS)}")
    parser.add_argument("--json", help="file for every single run")
    options = parser.parse_args()
    if options.task:
        one_load(json.loads(options.task))
        return 0
    if options.make:
        make(Path(options.make[0]), options.make[1], options.size)
        return 0
    if not options.dir:
        parser.error("--dir is missing")
    names = options.loads.split(";") if options.loads else list(LOADS)
    everything, agree = {}, True
    for case in options.cases.split(","):
        kind, how = case.split(":")
        folder = Path(options.dir, "encrypted" if kind == "encrypted" else "plain")
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "made").exists():
            in_child("--make", str(folder), folder.name, "--size", str(options.size))
            (folder / "made").touch()
        if kind == "mount":
            everything[case] = timed_reads(folder, how, options.runs)
        else:
            everything[case] = timed_loads(folder, kind, how, options.runs, names)
            sums = {(run["bytes"], run["sum"]) for runs in everything[case].values() for run in runs}
            agree &= len(sums) == 1
        print(table(case, everything[case]), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(everything, indent=1))
    if not agree:
        print("\nTHE LOADS DO NOT AGREE ON THE BYTES")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
