"""Compares `tensorfs consolidate` with torch's `consolidate_safetensors_files`, or with fio.

Run: `python tests/bench/consolidate.py --dir /dev/shm/bench` (needs torch), or with `--fio` on a disk (needs fio).
Each figure is the median of the runs, with the slowest and the fastest.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("TENSORFS_BIN", ROOT / "target/release/tensorfs"))

TORCH = """
import sys, time
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
source, out, threads, *names = sys.argv[1:]
start = time.perf_counter()
consolidate_safetensors_files(source, out, dict.fromkeys(names, 1), num_threads=int(threads))
print(time.perf_counter() - start)
"""

# Name -> shape of each tensor, bytes of an element, and the dimension that is cut into the parts of the ranks.
CASES = {
    "rows": ((8192, 8192), 2, 0),
    "columns": ((8192, 8192), 2, 1),
    "experts": ((64, 1024, 1024), 2, 2),
}


def make(folder, case, megabytes, ranks=8):
    """Writes rank shards with bf16 tensors of random bytes, and returns the names of the tensors."""
    shape, width, dimension = CASES[case]
    folder.mkdir(parents=True)
    length = int(np.prod(shape)) * width
    names = [f"layers.{number}.weight" for number in range(max(1, megabytes * 1_000_000 // length))]
    part = list(shape)
    part[dimension] //= ranks
    part_len = length // ranks
    rng = np.random.default_rng(1)
    for rank in range(ranks):
        offset = [0] * len(shape)
        offset[dimension] = rank * part[dimension]
        info = {name: {"saved_offsets": offset} for name in names}
        header = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}}
        for number, name in enumerate(names):
            begin = number * part_len
            header[name] = {"dtype": "BF16", "shape": part, "data_offsets": [begin, begin + part_len]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in names:
                # Some of the random bytes are NaNs. That does not matter, because no program looks at values.
                file.write(rng.bytes(part_len))
    return names


def sync_and_drop(cold):
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")


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
    return float(seconds), done.stdout, int(peak)


def measured(runs, length, one):
    """Median, lowest and highest rate of `runs` calls of `one`, and the highest peak."""
    rates, peaks = [], []
    for _ in range(runs):
        seconds, peak = one()
        rates.append(length / seconds / 1e6)
        peaks.append(peak)
    return statistics.median(rates), min(rates), max(rates), max(peaks)


def show(name, figures):
    median, low, high, peak = figures
    print(f"{name:24} {median:7.0f} MB/s ({low:.0f} to {high:.0f}), peak {peak / 1e6:.0f} MB", flush=True)


def against_torch(folder, args):
    for case in args.cases:
        shutil.rmtree(folder, ignore_errors=True)
        names = make(folder / "src", case, args.megabytes)
        length = sum(path.stat().st_size for path in (folder / "src").iterdir())

        def by_tensorfs():
            shutil.rmtree(folder / "out", ignore_errors=True)
            seconds, _, peak = run([BIN, "consolidate", folder / "src", folder / "out"])
            return seconds, peak

        def by_torch(threads):
            shutil.rmtree(folder / "out", ignore_errors=True)
            (folder / "out").mkdir()
            _, out, peak = run([sys.executable, "-c", TORCH, folder / "src", folder / "out", threads, *names])
            return float(out.splitlines()[-1]), peak

        ours = measured(args.runs, length, by_tensorfs)
        show(f"{case}: tensorfs", ours)
        if not args.no_torch:
            theirs = measured(args.runs, length, lambda: by_torch(1))
            show(f"{case}: torch", theirs)
            print(f"{case}: {ours[0] / theirs[0]:.1f} times", flush=True)
    shutil.rmtree(folder, ignore_errors=True)


def against_fio(folder, args):
    """Disk to disk: fio reads one file and writes another at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
    make(folder / "src", "rows", args.megabytes)
    length = sum(path.stat().st_size for path in (folder / "src").iterdir())
    size = f"{args.megabytes}M"

    def by_fio():
        sync_and_drop(True)
        for name in ("w.0.0",):
            (folder / name).unlink(missing_ok=True)
        jobs = ["--ioengine=libaio", "--direct=1", "--bs=4M", "--iodepth=8", f"--size={size}", "--end_fsync=1"]
        words = ["fio", "--output-format=json", f"--directory={folder}", *jobs, "--name=r", "--rw=read"]
        start, out, peak = run([*words, "--name=w", "--rw=write", "--fallocate=native"])
        runtimes = [job[kind]["runtime"] for job in json.loads(out)["jobs"] for kind in ("read", "write")]
        return max(runtimes) / 1000, peak

    def by_tensorfs():
        sync_and_drop(True)
        (folder / "x.safetensors").unlink(missing_ok=True)
        seconds, _, peak = run([BIN, "consolidate", folder / "src", folder / "x.safetensors"])
        return seconds, peak

    by_fio()
    theirs = measured(args.runs, length, by_fio)
    show("fio", theirs)
    ours = measured(args.runs, length, by_tensorfs)
    show("tensorfs", ours)
    print(f"{ours[0] / theirs[0]:.2f} of fio")
    shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder to make and remove")
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--fio", action="store_true", help="disk to disk, against fio")
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if args.dir.exists():
        parser.error(f"{args.dir} is there already")
    (against_fio if args.fio else against_torch)(args.dir, args)


if __name__ == "__main__":
    main()
