#!/usr/bin/env python3
"""Times how tensorfs and the tensorizer package write the same tensors, in turns, each run in a process of its own.

    python tests/bench/tensorizer_write.py --dir /dev/shm --runs 5
    python tests/bench/tensorizer_write.py --dir /scratch --kinds encrypted --writers tensorfs,tensorizer

Needs torch, tensorfs (`pip install ./python`) and tensorizer. The time of a run begins with the constructor of the
serializer, and ends with its `close`. `tensorfs` returns when the disk has the file. The tensorizer package does not
wait for the disk. So `tensorizer+fsync` also calls fsync. Memory is the growth of the peak memory of the process. The
first file of each writer is read back, and its hashes and tensors are compared.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

TIME_LIMIT = 300
LAYERS = 32
HIDDEN, INNER, VOCABULARY = 2048, 5632, 48000


def state_dict(size):
    """Tensors of a Llama-like model in F16, about `size` bytes."""
    import torch

    block = torch.randint(-(2**15), 2**15, (16 << 20,), dtype=torch.int16)
    block &= ~0x0400  # Removes infinite numbers and NaNs.

    def tensor(*shape):
        made = torch.empty(shape, dtype=torch.int16)
        flat = made.view(-1)
        for begin in range(0, flat.numel(), block.numel()):
            part = flat[begin : begin + block.numel()]
            part.copy_(block[: part.numel()])
        return made.view(torch.float16)

    hidden, inner = HIDDEN, INNER
    vocabulary = VOCABULARY
    tensors = {"model.embed_tokens.weight": tensor(vocabulary, hidden)}
    shapes = {
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
    layer = 0
    while sum(one.nbytes for one in tensors.values()) < size:
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}"] = tensor(*shape)
        layer += 1
    tensors["model.norm.weight"] = tensor(hidden)
    return tensors


def peak_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    return 0


def names_of(writer):
    """The package that has the names of the tensorizer package, for this writer."""
    if writer == "tensorfs":
        import tensorfs.compat.tensorizer as package
    else:
        import tensorizer as package
    return package


def write(writer, kind, path, size, check):
    """Does one run, and prints its figures."""
    tensors = state_dict(size)
    package = names_of(writer)
    key = package.EncryptionParams.random() if kind == "encrypted" else None
    # Writes a small file first, so that threads, imports and the library of the cipher are ready.
    small = package.TensorSerializer(f"{path}.small", encryption=key)
    small.write_state_dict({"model.norm.weight": tensors["model.norm.weight"]})
    small.close()
    os.unlink(f"{path}.small")
    os.sync()
    # Resets the peak memory.
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = peak_kib(), time.perf_counter()
    serializer = package.TensorSerializer(str(path), encryption=key)
    serializer.write_state_dict(tensors)
    serializer.close()
    if writer.endswith("+fsync"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    grown = peak_kib() - before
    if check:
        import torch
        from tensorfs.compat import tensorizer as reader

        decryption = reader.DecryptionParams.from_key(key.key) if key else None
        with reader.TensorDeserializer(str(path), device="cpu", verify_hash=True, encryption=decryption) as found:
            assert list(found.keys()) == list(tensors)
            assert all(torch.equal(found[name].view(torch.int16), one.view(torch.int16)) for name, one in tensors.items())
    length = sum(one.nbytes for one in tensors.values())
    print(json.dumps({"seconds": seconds, "bytes": length, "count": len(tensors), "grown_kib": grown}))


def run(writer, kind, path, size, check):
    arguments = [sys.executable, __file__, "--one", writer, kind, str(path), str(size), str(int(check))]
    try:
        done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT, check=True)
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        path.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder for one file at a time")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--size", type=float, default=2.4e9, help="bytes of the tensors")
    parser.add_argument("--kinds", default="plain,encrypted")
    parser.add_argument("--writers", default="tensorfs,tensorizer,tensorizer+fsync")
    options = parser.parse_args()
    kinds, writers = options.kinds.split(","), options.writers.split(",")
    path = options.dir / f"tensorizer-write-{os.getpid()}.tensors"
    runs = {(kind, writer): [] for kind in kinds for writer in writers}
    for number in range(options.runs):
        for kind in kinds:
            for turn in range(len(writers)):
                writer = writers[(turn + number) % len(writers)]
                runs[kind, writer].append(run(writer, kind, path, options.size, check=number == 0))
    for kind in kinds:
        medians = {}
        for writer in writers:
            seconds = [one["seconds"] for one in runs[kind, writer]]
            medians[writer] = statistics.median(seconds)
            length, grown = runs[kind, writer][0]["bytes"], max(one["grown_kib"] for one in runs[kind, writer])
            print(
                f"{kind:9} {writer:16} {medians[writer]:6.2f} s ({min(seconds):.2f} to {max(seconds):.2f}),"
                f" {length / medians[writer] / 1e9:5.2f} GB/s, memory +{grown / 1024:.0f} MiB,"
                f" {runs[kind, writer][0]['count']} tensors"
            )
        for writer in writers:
            if writer != "tensorfs" and "tensorfs" in medians:
                print(f"{kind:9} tensorfs is {medians[writer] / medians['tensorfs']:.2f} times as fast as {writer}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        write(sys.argv[2], sys.argv[3], Path(sys.argv[4]), float(sys.argv[5]), sys.argv[6] == "1")
    else:
        main()
