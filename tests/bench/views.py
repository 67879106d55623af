"""Compares mounts with a view and the same mounts without a view: listing, casts, and files that are read at once.

Run as root: `python tests/bench/views.py --dir /dev/shm/bench` (in memory) or with a folder on a disk. Each figure is
the median of the runs, which take turns, with the lowest and the highest figure.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(os.environ.get("TENSORFS_BIN", ROOT / "target/release/tensorfs"))

RULES = {
    "rename": "[[rename]]\nregex = '^model\\.layers\\.(\\d+)\\.'\nto = 'blk.$1.'\n",
    "split": "[[split]]\nregex = '^(.*)\\.gate_proj\\.weight$'\nto = ['$1.a.weight', '$1.b.weight']\n",
    "fuse": "[[fuse]]\nregex = ['^(.*)\\.gate_proj\\.weight$', '^(.*)\\.up_proj\\.weight$']\nto = '$1.gate_up.weight'\n",
    "tp": "[[rule]]\nregex = 'weight$'\ncut = 0\n",
}


def write(folder, shards, tensors, dtype="BF16", length=4096):
    """Numbered shards of `tensors` tensors each, of `length` bytes."""
    folder.mkdir(parents=True)
    width = {"BF16": 2, "F16": 2, "F32": 4}[dtype]
    # In all of these dtypes, elements of bytes below 64 are finite numbers.
    data = bytes(byte & 63 for byte in os.urandom(min(length, 1 << 20))) * max(1, length >> 20)
    for shard in range(shards):
        header = {}
        for number in range(shard * tensors, (shard + 1) * tensors):
            part, kind = ("gate_proj", "up_proj", "down_proj")[number // 2 % 3], ("weight", "bias")[number % 2]
            name = f"model.layers.{number // 6 // 256}.mlp.experts.{number // 6 % 256}.{part}.{kind}"
            start = len(header) * length
            shape = [32, length // width // 32]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + length]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in range(tensors):
                file.write(data)
    return shards * tensors * length


class Mount:
    def __init__(self, source, index, options):
        self.place = source.parent / "mnt"
        self.place.mkdir(exist_ok=True)
        words = [BIN, "mount", source, self.place, "--index-dir", index]
        for option in [*options, f"log={source.parent / 'log'}"]:
            words += ["-o", option]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)

    def __enter__(self):
        return self.place

    def __exit__(self, *_):
        subprocess.run([BIN, "umount", self.place], check=True)


def show(name, values, unit, base=None):
    low, high, middle = min(values), max(values), statistics.median(values)
    share = f"  {middle / statistics.median(base):.2f} of the first" if base else ""
    print(f"{name:36} {middle:8.1f} {unit} ({low:.1f} to {high:.1f}){share}", flush=True)


def in_turns(runs, ways):
    """The results of each way. The ways take turns, and the first call of each does not count."""
    results = {name: [] for name in ways}
    for run in range(runs + 1):
        for name, way in ways.items():
            result = way()
            if run:
                results[name].append(result)
    return results


def listing(folder, runs):
    source = folder / "many"
    write(source, 60, 1000)
    rules = {}
    for name, text in RULES.items():
        rules[name] = folder / f"{name}.toml"
        rules[name].write_text(text)
    views = {
        "no view": [],
        "dtype=f32": ["dtype=f32"],
        "include=": ["include=model.layers.1*"],
        "exclude=": ["exclude=*.bias"],
        **{f"rename= ({name})": [f"rename={rules[name]}"] for name in ("rename", "split", "fuse")},
        "tp=8": ["tp=8", "rank=3", f"tp-rules={rules['tp']}"],
        "layout=shards=8": ["layout=shards=8"],
        "layout=shards=8, dtype=f32": ["layout=shards=8", "dtype=f32"],
    }

    def list_once(options, index):
        start = time.perf_counter()
        mount = Mount(source, index, options)
        for entry in os.scandir(mount.place):
            entry.stat()
        elapsed = time.perf_counter() - start
        mount.__exit__()
        return elapsed * 1e3

    for index in ("none", folder / "index"):
        print(f"mount and ls of 60,000 tensors, {'without' if index == 'none' else 'with'} an index", flush=True)
        ways = {name: (lambda o=options, i=index: list_once(o, i)) for name, options in views.items()}
        results = in_turns(runs, ways)
        for name, values in results.items():
            show(name, values, "ms", None if name == "no view" else results["no view"])


def drop(paths):
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


READ = """
import os, sys
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        memory = memoryview(bytearray(8 << 20))
        while file.readinto(memory):
            pass
"""


def read_at_once(paths):
    """Seconds to read all files at once, with one process for each file."""
    start = time.perf_counter()
    readers = [subprocess.Popen([sys.executable, "-I", "-S", "-c", READ, path]) for path in paths]
    if any(reader.wait() for reader in readers):
        sys.exit("a reader failed")
    return time.perf_counter() - start


def shards_of(folder):
    return sorted(folder.glob("*.safetensors"))


def casts(folder, runs, megabytes):
    for dtype, target in (("BF16", "f32"), ("F16", "f32"), ("F32", "f16"), ("F16", "bf16")):
        source = folder / dtype.lower()
        if not source.exists():
            length = write(source, 4, max(1, megabytes // 64), dtype, 16 << 20)

        def read_once(options, source=source, length=length):
            with Mount(source, "none", options) as place:
                return length / read_at_once(shards_of(place)) / 1e6

        ways = {
            f"{dtype}": lambda: read_once([]),
            f"{dtype} to {target}": lambda: read_once([f"dtype={target}"]),
        }
        results = in_turns(runs, ways)
        for name, values in results.items():
            show(name, values, "MB/s of the source", None if name == dtype else results[dtype])


def shards(folder, runs, megabytes):
    source = folder / "eight"
    length = write(source, 8, max(1, megabytes // 128), "BF16", 16 << 20)
    originals = shards_of(source)

    def direct():
        return length / read_at_once(originals) / 1e6

    def mounted(options, cold):
        if cold:
            drop(originals)
        with Mount(source, "none", options) as place:
            return length / read_at_once(shards_of(place)) / 1e6

    def cold_direct():
        drop(originals)
        return direct()

    for cold in (False, True):
        print(f"8 readers, {'page cache dropped' if cold else 'cached'}", flush=True)
        ways = {
            "the shards themselves": cold_direct if cold else direct,
            "layout=original": lambda cold=cold: mounted(["layout=original"], cold),
            "layout=shards=8": lambda cold=cold: mounted(["layout=shards=8"], cold),
        }
        results = in_turns(runs, ways)
        for name, values in results.items():
            show(name, values, "MB/s", None if name.startswith("the") else results["the shards themselves"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="folder to make and remove")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=["list", "cast", "shards"], default=["list", "cast", "shards"])
    args = parser.parse_args()
    if args.dir.exists():
        parser.error(f"{args.dir} is there already")
    args.dir.mkdir()
    try:
        if "list" in args.cases:
            listing(args.dir, args.runs)
        if "cast" in args.cases:
            casts(args.dir, args.runs, args.megabytes)
        if "shards" in args.cases:
            shards(args.dir, args.runs, args.megabytes)
    finally:
        shutil.rmtree(args.dir)


if __name__ == "__main__":
    main()
