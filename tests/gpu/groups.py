"""Tests of loads of process groups: compares the bytes that each rank gets, on GPUs if there are any, and else on the
CPU.

    TENSORFS_BIN=tensorfs python tests/gpu/groups.py

Several ranks share a GPU if there are fewer GPUs than ranks. A group of NCCL has one rank for each GPU.
"""

import json
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from safetensors.torch import save_file

N_GPUS = torch.cuda.device_count()

RANK = """
import os, sys
import torch, torch.distributed as dist
import tensorfs, tensorfs.torch
backend, rank, size, port, folder = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
n_gpus = torch.cuda.device_count()
device = f"cuda:{rank % n_gpus}" if n_gpus else "cpu"
if n_gpus:
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
world = dist.group.WORLD
right = torch.load(os.path.join(folder, "right.pt"))

def same(found, right):
    assert found.keys() == right.keys(), (found.keys(), right.keys())
    for name, tensor in right.items():
        got = found[name]
        assert (got.dtype, got.shape, got.device) == (tensor.dtype, tensor.shape, torch.device(device)), name
        bits = [t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, tensor)]
        assert torch.equal(*bits), f"{name}: the bytes differ"

def part(tensor, dim):
    chunks = tensor.chunk(size, dim) if tensor.ndim > dim else [tensor] * size
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
"""

LOADS = """
for share in (None, "host", "network"):
    with tensorfs.safe_open(folder, "pt", device, process_group=world, share=share) as f:
        same(f.get_tensors(), right)
        for dim in (0, 1):
            same(dict(f.tensors(shard=dim)), {name: part(tensor, dim) for name, tensor in right.items()})
        same({"long": f.get_sharded("long", 1)}, {"long": part(right["long"], 1)})
        pushed = f.push_tensor("uneven", size - 1)
        assert (pushed is None) == (rank != size - 1)
        if pushed is not None:
            same({"uneven": pushed}, {"uneven": right["uneven"]})
        # Each rank another one.
        name = sorted(right)[rank % len(right)]
        same(f.get_tensors([name]), {name: right[name]})
    into = {name: torch.empty_like(tensor, device=device) for name, tensor in right.items()}
    tensorfs.load_into(into, folder, process_group=world, share=share)
    same(into, right)
"""

DTENSORS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
mesh = init_device_mesh(torch.device(device).type, (size,))
for placement in (Shard(0), Shard(1), Replicate()):
    tensor = right["long"]
    local = tensor if isinstance(placement, Replicate) else part(tensor, placement.dim)
    into = DTensor.from_local(torch.zeros_like(local, device=device), mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride())
    tensorfs.load_into({"long": into}, folder, strict=False, process_group=world)
    same({"long": into.to_local()}, {"long": local})
"""

FAULT = """
import json
path = os.path.join(folder, "model-00002-of-00002.safetensors")
with tensorfs.safe_open(folder, "pt", device, process_group=world, io_timeout=20) as f:
    dist.barrier()
    if rank == 0:
        os.truncate(path, 4096)
    dist.barrier()
    try:
        f.get_tensors()
        said = None
    except Exception as failed:
        said = [type(failed).__name__, str(failed)]
print(json.dumps(said))
"""


class Groups(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tensorfs-test-")
        self.addCleanup(folder.cleanup)
        self.tmp = Path(folder.name)
        right = {
            "long": torch.randn(4096, 1030).bfloat16(),
            "uneven": torch.randn(1001, 37),
            "few": torch.randn(2, 5, dtype=torch.float64),
            "flags": torch.rand(77) > 0.5,
            "small": torch.randn(64, 33).to(torch.float8_e4m3fn),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(3.0),
        }
        names = list(right)
        weight_map = {}
        for number, mine in enumerate((names[:3], names[3:]), 1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({name: right[name] for name in mine}, self.tmp / file)
            weight_map |= dict.fromkeys(mine, file)
        (self.tmp / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        torch.save(right, self.tmp / "right.pt")

    def ranks(self, code, size, backend="gloo"):
        """Runs the ranks, which have to succeed, and returns their outputs."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        started = [
            subprocess.Popen(
                [sys.executable, "-c", RANK + code, backend, str(rank), str(size), str(port), self.tmp],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        found = []
        try:
            for rank, one in enumerate(started):
                out, err = one.communicate(timeout=180)
                self.assertEqual(one.returncode, 0, f"rank {rank}: {err[-2000:]}")
                found.append(out)
        finally:
            for one in started:
                one.kill()
                one.communicate()
        return found

    def test_one_two_and_four_ranks_of_gloo_get_what_they_ask_for(self):
        for size in (1, 2, 4):
            with self.subTest(size=size):
                self.ranks(LOADS, size)

    @unittest.skipUnless(N_GPUS, "NCCL needs a GPU")
    def test_ranks_of_nccl_get_what_they_ask_for_and_a_world_of_one_too(self):
        for size in sorted({1, N_GPUS}):
            with self.subTest(size=size):
                self.ranks(LOADS, size, "nccl")

    def test_dtensors_get_the_part_of_their_rank(self):
        self.ranks(DTENSORS, 2)

    def test_a_shard_cut_short_is_the_same_error_on_all_ranks(self):
        said = [json.loads(out.splitlines()[-1]) for out in self.ranks(FAULT, 2)]
        self.assertEqual(said[0], said[1])
        self.assertIn("model-00002-of-00002.safetensors", said[0][1])


if __name__ == "__main__":
    print(f"{N_GPUS} GPUs: {'ranks take them in turn' if N_GPUS else 'everything is on the CPU'}", file=sys.stderr)
    unittest.main(verbosity=2)
