"""Loads of process groups of torch, over gloo: with the group of all ranks, with sub-groups, with DTensors, and with
models."""

import json
import os
import random
import socket
import subprocess
import sys
import time
import unittest

import numpy as np
from safetensors.numpy import save_file

from checkpoints import hf_set
from faults import FaultFs
from package import ROOT, TestCase, needs_torch

# Number of kills. A run by hand can set a greater number.
KILLS = int(os.environ.get("TENSORFS_TEST_KILLS", "0"))

SETUP = """
import json, os, sys, time
sys.path[:0] = json.loads(sys.argv[5])
import torch, tensorfs
import torch.distributed as dist
from safetensors.torch import load_file, save_file

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
dist.init_process_group("gloo", rank=rank, world_size=size)
world, file = dist.group.WORLD, f"{folder}/model.safetensors"

def save(tensors):
    if rank == 0:
        save_file(tensors, f"{folder}/new")
        os.rename(f"{folder}/new", file)
    dist.barrier()

def same(found, right):
    assert set(found) == set(right), (set(found), set(right))
    for name in right:
        assert found[name].dtype == right[name].dtype and torch.equal(found[name], right[name]), name

def failure(work):
    try:
        work()
    except Exception as e:
        return [type(e).__name__, str(e)]
    return None

def say(answer):
    print(json.dumps(answer), flush=True)

torch.manual_seed(1)
"""


@needs_torch
class TorchGroups(TestCase):
    def start(self, code, size=4):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        paths = json.dumps([p for p in sys.path if p])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SETUP + code, str(rank), str(size), str(self.tmp), str(port), paths],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        for one in ranks:
            self.addCleanup(one.wait)
            self.addCleanup(one.kill)
            self.addCleanup(one.stdout.close)
            self.addCleanup(one.stderr.close)
        return ranks

    def finish(self, ranks, seconds=90):
        """The last lines of the output of the ranks, which have to succeed."""
        until, found = time.monotonic() + seconds, []
        for rank, one in enumerate(ranks):
            out, err = one.communicate(timeout=max(until - time.monotonic(), 0.1))
            self.assertEqual(one.returncode, 0, f"rank {rank}: {err[-2000:]}")
            found.append(out.splitlines()[-1] if out else "")
        return found

    def test_all_dtypes_and_shapes_come_whole_and_in_shards_by_host_and_by_gloo(self):
        code = """
right = {"e": torch.empty(0, 4), "s": torch.tensor(3.0), "h": torch.randn(513, 260).bfloat16(), "b": torch.rand(7) > 0.5,
         "i": torch.arange(100_003), "f8": torch.randn(64, 33).to(torch.float8_e4m3fn), "x": torch.randn(3, 5, 1001)}
save(right)
for share in (None, "host", "network"):
    with tensorfs.safe_open(file, "pt", process_group=world, share=share) as f:
        same(f.get_tensors(), right)
        for dim in (0, 1):
            parts = {}
            for name, whole in right.items():
                chunks = whole.chunk(size, dim) if whole.ndim > dim else None
                parts[name] = whole if chunks is None else chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
            same(dict(f.tensors(shard=dim)), parts)
            same({"x": f.get_sharded("x", dim)}, {"x": parts["x"]})
        pushed = f.push_tensor("h", 2)
        assert (pushed is None) == (rank != 2) and (pushed is None or torch.equal(pushed, right["h"]))
    same(tensorfs.load_file(file, process_group=world, share=share, names="[hs]"), {n: right[n] for n in "hs"})
"""
        self.finish(self.start(code))

    def test_dtensors_of_fsdp_of_tensor_parallelism_and_of_both_are_filled(self):
        code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
whole = {"w": torch.randn(130, 67), "v": torch.randn(3, 40), "bias": torch.randn(5)}
save(whole)
flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
for mesh, placements in [(flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]), (grid, [Shard(0), Shard(1)]),
                         (grid, [Replicate(), Shard(1)]), (grid, [Shard(0), Replicate()]), (grid, [Shard(1), Shard(0)])]:
    for share in ("host", "network"):
        def like(name):
            kept = [p if not isinstance(p, Shard) or p.dim < whole[name].ndim else Replicate() for p in placements]
            right = distribute_tensor(whole[name], mesh, kept, src_data_rank=None)
            into = DTensor.from_local(torch.zeros_like(right.to_local()), mesh, kept, run_check=False,
                                      shape=right.shape, stride=right.stride())
            return right, into
        made = {name: like(name) for name in whole}
        tensorfs.load_into({name: into for name, (_, into) in made.items()}, file, process_group=world, share=share)
        for name, (right, into) in made.items():
            assert torch.equal(into.to_local(), right.to_local()), (name, placements, share)
"""
        self.finish(self.start(code))

    def test_a_model_of_fsdp2_with_tied_weights_is_loaded(self):
        code = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(33, 12), torch.nn.Linear(12, 33, bias=False)
        self.norm = torch.nn.LayerNorm(12)
        self.head.weight = self.embed.weight
model = Tied()
whole = {name: t.clone() for name, t in model.state_dict().items() if name != "head.weight"}
save(whole)
right = load_file(file)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
tensorfs.load_into(model.state_dict(), file, process_group=world)
for name, t in model.state_dict().items():
    expected = right["embed.weight" if name == "head.weight" else name]
    chunks = expected.chunk(size)
    local = t.to_local()
    assert torch.equal(local.flatten(), (chunks[rank] if rank < len(chunks) else expected[:0]).flatten()), name
"""
        self.finish(self.start(code))

    def test_sub_groups_load_side_by_side_and_outlive_the_group_that_they_were_made_beside(self):
        code = """
right = {"a": torch.randn(1000, 30), "b": torch.randn(77)}
save(right)
first, pairs = dist.new_group(range(size)), [dist.new_group([0, 2]), dist.new_group([1, 3])]
mine = pairs[rank % 2]
dist.destroy_process_group(first)
for share in ("host", "network"):
    with tensorfs.safe_open(file, "pt", process_group=mine, share=share) as f:
        same(f.get_tensors(), right)
        same({"a": f.get_sharded("a", 0)}, {"a": right["a"].chunk(2)[rank // 2]})
assert failure(lambda: tensorfs.load_file(file, process_group=pairs[1 - rank % 2]))[0] == "TypeError"
"""
        self.finish(self.start(code))

    def test_a_sub_group_outlives_the_end_of_its_parent_and_of_itself(self):
        code = """
right = {"a": torch.randn(1000, 30), "b": torch.randn(77)}
save(right)
parent = dist.new_group([0, 1, 2])
mine = dist.new_group([0, 1])
opened = [tensorfs.safe_open(file, "pt", process_group=mine, share=share) for share in ("host", "network")] if rank < 2 else []
if rank < 3:
    dist.destroy_process_group(parent)
for f in opened:
    same(f.get_tensors(), right)
dist.barrier()
answers = []
# Every group of the process ends.
dist.destroy_process_group()
for f in opened:
    before = time.monotonic()
    found = {}
    answers.append(failure(lambda: found.update(f.get_tensors())))
    if answers[-1] is None:
        same(found, right)
    assert time.monotonic() - before < 30
    f.__exit__()
say(answers)
"""
        first, second, *_ = self.finish(self.start(code, 3))
        self.assertEqual(first, second)

    def test_a_child_of_a_fork_keeps_the_tensors_and_is_refused_by_the_group(self):
        code = """
right = {"a": torch.randn(1000, 300), "tied": torch.randn(5)}
save(right)
for share in ("host", "network"):
    f = tensorfs.safe_open(file, "pt", process_group=world, share=share)
    found, (read, write) = f.get_tensors(), os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps([failure(f.get_tensors), all(torch.equal(found[n], right[n]) for n in right)]).encode())
        os._exit(0)
    os.wait()
    refused, kept = json.loads(os.read(read, 9999))
    assert kept and refused[0] == "GroupError" and "belongs to the process that opened it" in refused[1], refused
    same(f.get_tensors(), right)
"""
        self.finish(self.start(code, 2))

    def test_a_storage_that_stalls_ends_the_load_on_all_within_the_deadline(self):
        hf_set(self.tmp / "source", megabytes=6)
        code = """
def wait_for(flag):
    while not os.path.exists(f"{folder}/{flag}"):
        time.sleep(0.01)
for share in ("host", "network"):
    with tensorfs.safe_open(PATH, "pt", process_group=world, share=share, io_timeout=3) as f:
        say("ready")
        wait_for(f"stalled-{share}")
        before = time.monotonic()
        answer = failure(f.get_tensors)
        assert time.monotonic() - before < 9, time.monotonic() - before
    say(answer)
    wait_for(f"lifted-{share}")
"""
        with FaultFs(self.tmp / "source") as source, source.lifted():
            ranks = self.start(f"PATH = {str(source.path)!r}\n" + code, 2)
            for share in ("host", "network"):
                self.assertEqual([json.loads(one.stdout.readline()) for one in ranks], ["ready"] * 2)
                source.tell("stall", "model-00002*")
                (self.tmp / f"stalled-{share}").touch()
                answers = [json.loads(one.stdout.readline()) for one in ranks]
                source.tell("ok")
                (self.tmp / f"lifted-{share}").touch()
                self.assertEqual(answers[0], answers[1])
                self.assertEqual(answers[0][0], "TimeoutError")
                self.assertRegex(answers[0][1], "rank [01]: .* did not come within 3 s")
            self.finish(ranks)

    def test_each_byte_is_read_once_and_the_memory_of_a_rank_has_a_bound(self):
        code = """
right = {f"w{n}": torch.randn(1 << 20, 8) for n in range(8)}
save(right)
total = os.path.getsize(file)
del right
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) << 10
def loaded(load, own):
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    found = load()
    assert peak() - before < own + (256 << 20), (peak() - before) >> 20
    return found
for share in ("host", "network"):
    for dim, own in ((None, total), (0, total // 4), (1, total // 4)):
        with tensorfs.safe_open(file, "pt", process_group=world, share=share, source="direct" if share == "network" else None) as f:
            loaded((lambda: f.get_tensors()) if dim is None else (lambda: dict(f.tensors(shard=dim))), own)
            read = [None] * size
            dist.all_gather_object(read, f.stats.get("bytes_read", 0))
        assert sum(read) < 1.02 * total, (share, dim, sum(read) / total)
"""
        self.finish(self.start(code))

    def test_a_rank_killed_at_any_moment_ends_the_load_on_all_others(self):
        code = """
right = {"a": torch.randn(1000, 300), "b": torch.randn(7)}
save(right)
say("ready")
def loads():
    while True:
        for share in ("host", "network"):
            with tensorfs.safe_open(file, "pt", process_group=world, share=share, io_timeout=10) as f:
                same(f.get_tensors(), right)
                f.get_sharded("a", 1)
answer = failure(loads)
assert "memfd:tensorfs" not in open("/proc/self/maps").read()
say(answer)
os._exit(0)
"""
        choose = random.Random(5)
        for trial in range(KILLS or 3):
            victim = trial % 3
            ranks = self.start(code, 3)
            for one in ranks:
                one.stdout.readline()
            time.sleep(choose.uniform(0, 1.5))
            ranks[victim].kill()
            answers = self.finish([one for rank, one in enumerate(ranks) if rank != victim], 40)
            self.assertEqual(answers[0], answers[1], trial)
            self.assertRegex(answers[0], f"GroupError.*rank {victim}: " if victim else "GroupError")

    def test_the_example_runs(self):
        save_file({"a": np.zeros((40, 3), np.float32), "b": np.ones(5, np.float32)}, self.tmp / "model.safetensors")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, ROOT / "examples/process_group.py", self.tmp],
            capture_output=True,
            text=True,
            timeout=90,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in ("rank 0: 2 slices of", "rank 1: 2 slices of", "rank 0: a [40, 3]"):
            self.assertIn(line, done.stdout)

    def test_a_group_that_is_none_is_refused(self):
        code = """
save({"a": torch.zeros(3)})
assert failure(lambda: tensorfs.load_file(file, process_group=3))[0] == "TypeError"
assert "expected host or network" in failure(lambda: tensorfs.load_file(file, process_group=world, share="disk"))[1]
f = tensorfs.safe_open(file, "pt")
assert "open with process_group=" in failure(lambda: f.get_sharded("a", 0))[1]
"""
        self.finish(self.start(code, 1))


if __name__ == "__main__":
    unittest.main()
