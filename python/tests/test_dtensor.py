"""`load_into` on DTensors: each of four processes fills its local shards, and reads no more than these."""

import os
import subprocess
import sys
import tempfile
import unittest

from package import TestCase, has_torch, python

WORLD = 4

# Each process runs this code. Only its start waits for the other processes.
SETUP = """
import random, sys
import torch, tensorfs
import torch.distributed as dist
from safetensors.torch import save_file
from tensorfs import _into, _settings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
file = f"{folder}/{rank}.safetensors"
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

def empty_like(right):
    local = torch.zeros_like(right.to_local())
    return DTensor.from_local(local, right.device_mesh, right.placements, run_check=False,
                              shape=right.shape, stride=right.stride())

def locals_of(model):
    found = model.state_dict().items()
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in found}

def refused(into, why, whole):
    save_file({"w": whole}, file)
    try:
        tensorfs.load_into({"w": into}, file)
    except tensorfs.MismatchError as e:
        assert "`w`" in str(e) and why in str(e), e
    else:
        raise AssertionError(f"{why}: not refused")
"""

RANDOM = """
from torch.distributed.tensor.placement_types import _StridedShard
meshes = [init_device_mesh("cpu", shape) for shape in [(4,), (2, 2), (1, 4), (2, 1, 2)]]
choose, compared, empty = random.Random(3), 0, 0
for trial in range(120):
    mesh = choose.choice(meshes)
    shape = [choose.choice([1, 2, 3, 5, 7, 8, 13, 64, 257]) for _ in range(choose.choice([1, 2, 2, 3]))]
    kinds = [lambda dim: Replicate(), Shard, Shard, lambda dim: _StridedShard(dim, split_factor=choose.choice([2, 3]))]
    placements = [choose.choice(kinds)(choose.randrange(len(shape))) for _ in range(mesh.ndim)]
    torch.manual_seed(trial)
    whole = torch.randn(shape).to(choose.choice([torch.float32, torch.bfloat16]))
    try:
        right = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    except Exception:
        # Older versions of torch cannot make all of these.
        continue
    save_file({"w": whole}, file)
    into = empty_like(right)
    tensorfs.load_into({"w": into}, file)
    assert torch.equal(into.to_local(), right.to_local()), (shape, mesh.shape, placements)
    compared, empty = compared + 1, empty + (right.to_local().numel() == 0)
assert compared > 60, compared
assert empty or rank == 0
"""

REFUSED = """
mesh, whole = init_device_mesh("cpu", (4,)), torch.randn(8, 6)
local = torch.zeros(2, 6)
refused(DTensor.from_local(local, mesh, [Partial()], run_check=False), "Partial", torch.randn(2, 6))

class Own(Shard):
    pass

into = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
into._spec.placements = (Own(0),)
refused(into, "Own" if "Own" in repr(Own(0)) else "Shard", whole)
wrong = DTensor.from_local(torch.zeros(3, 6), mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
refused(wrong, "[3, 6]", whole)
refused(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "shape [9, 6]", torch.randn(9, 6))
refused(DTensor.from_local(torch.zeros(6, 2).t(), mesh, [Shard(0)], run_check=False), "contiguous", whole)
refused(distribute_tensor(whole.to("meta"), mesh, [Shard(0)], src_data_rank=None), "meta", whole)
refused(DTensor.from_local(local.double(), mesh, [Shard(0)], run_check=False), "dtype", whole)
cast = DTensor.from_local(local.bfloat16(), mesh, [Shard(0)], run_check=False)
tensorfs.load_into({"w": cast}, file, cast=True)
assert torch.equal(cast.to_local(), whole[2 * rank : 2 * rank + 2].bfloat16())
"""

WRITTEN = """
def error_of(call):
    try:
        call()
    except Exception as e:
        return e

mesh, whole = init_device_mesh("cpu", (world,)), torch.randn(8, 8)
save_file({"w": whole}, file)
for placement in (Shard(0), Shard(1), Replicate()):
    for fails in (False, True):
        into = empty_like(distribute_tensor(whole, mesh, [placement], src_data_rank=None))
        x = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()], src_data_rank=None).requires_grad_()
        local = torch.ones_like(into.to_local(), requires_grad=True)
        y, z = (x * into), (local * into.to_local())
        genuine = _into.open_checkpoint
        if fails:
            def opened_and_cut(*arguments):
                opened = genuine(*arguments)
                with open(file, "r+b") as f:
                    f.truncate(100)
                return opened
            _into.open_checkpoint = opened_and_cut
        error = error_of(lambda: tensorfs.load_into({"w": into}, file))
        _into.open_checkpoint = genuine
        assert bool(error) == fails, error
        ones = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()], src_data_rank=None).redistribute(mesh, y.placements)
        for backward in (lambda: y.backward(ones), lambda: z.sum().backward()):
            error = error_of(backward)
            assert "modified by an inplace operation" in str(error), (placement, fails, error)
        save_file({"w": whole}, file)
"""

PART = """
class Counted:
    # Wraps a loader, and sums up the bytes read.
    def __init__(self, loader):
        self.loader, self.read = loader, 0

    def plan(self, *arguments):
        plan = self.loader.plan(*arguments)
        self.read += plan.read
        return plan

    def __getattr__(self, name):
        return getattr(self.loader, name)

mesh, whole = init_device_mesh("cpu", (4,)), torch.randn(400, 10000)
save_file({"w": whole}, file)
genuine = _settings.loader
for placement, most in ((Shard(0), whole.nbytes // 4 + 8192), (Replicate(), whole.nbytes + 8192)):
    into = empty_like(distribute_tensor(whole, mesh, [placement], src_data_rank=None))
    counted = Counted(genuine())
    _settings.loader = lambda **how: counted
    tensorfs.load_into({"w": into}, file)
    assert 0 < counted.read <= most, (counted.read, most)
few = empty_like(distribute_tensor(torch.randn(2, 10), mesh, [Shard(0)], src_data_rank=None))
save_file({"w": torch.ones(2, 10)}, file)
counted = Counted(genuine())
tensorfs.load_into({"w": few}, file)
assert few.to_local().shape[0] == (1 if rank < 2 else 0)
assert (few.to_local() == 1).all() and (counted.read == 0) == (rank >= 2)
"""

MODELS = """
from safetensors.torch import save_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Model(nn.Module):
    def __init__(self, width=10, tied=False):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(13, 32), nn.Linear(32, width), nn.Linear(width, 32)
        self.norm, self.head, self.scale = nn.LayerNorm(32), nn.Linear(32, 13, bias=False), nn.Parameter(torch.randn(1))
        self.register_buffer("steps", torch.arange(5))
        if tied:
            self.head.weight = self.embed.weight

def same(make, wrap, on_meta=False, save=save_model):
    torch.manual_seed(1)
    right = make()
    save(right, file)
    wrap(right)
    if on_meta:
        with torch.device("meta"):
            other = make()
        wrap(other)
        other.to_empty(device="cpu")
    else:
        torch.manual_seed(2)
        other = make()
        wrap(other)
    assert tensorfs.load_into(other.state_dict(), file) == ([], [])
    found = locals_of(other)
    for name, local in locals_of(right).items():
        assert torch.equal(found[name], local), (name, local.shape)

def save_twice(model, path):
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)

line = init_device_mesh("cpu", (4,))
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}

def whole(model):
    fully_shard(model, mesh=line)

def nested(model):
    fully_shard(model.up, mesh=line)
    fully_shard(model, mesh=line)

def tensor_parallel(model):
    parallelize_module(model, square["model"], plan)
    fully_shard(model, mesh=square["data"])

same(Model, whole)
same(Model, nested, on_meta=True)
same(Model, lambda model: fully_shard(model, mesh=square))
same(lambda: Model(tied=True), whole)
same(lambda: Model(tied=True), whole, save=save_twice)
same(Model, lambda model: parallelize_module(model, line, plan))
for width in (2, 10, 18, 30):
    same(lambda: Model(width), tensor_parallel)
"""

EMPTY = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
# One column: the second rank of tensor parallelism has none, and FSDP2 splits that empty shard again.
torch.manual_seed(1)
right = torch.nn.Sequential(torch.nn.Linear(1, 6))
save_file(right.state_dict(), file)
torch.manual_seed(2)
other = torch.nn.Sequential(torch.nn.Linear(1, 6))
for model in (right, other):
    parallelize_module(model, mesh["model"], {"0": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
assert tensorfs.load_into(other.state_dict(), file) == ([], [])
found = locals_of(other)
for name, local in locals_of(right).items():
    assert torch.equal(found[name], local), (name, local.shape)
assert (found["0.weight"].numel() == 0) == (mesh.get_coordinate()[1] == 1)
# An empty shard where the placements give it elements.
line, whole = init_device_mesh("cpu", (4,)), torch.randn(8, 6)
for local in (torch.zeros(0, 6), torch.zeros(2, 0), torch.zeros(0, 0)):
    wrong = DTensor.from_local(local, line, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    refused(wrong, str(list(local.shape)), whole)
"""

ALIASES = """
line, one = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (4, 1))
whole = torch.randn(8, 6)
save_file({"w": whole}, file)

def missing(into, other):
    return tensorfs.load_into({"w": into, "other": other}, file, strict=False).missing_keys

for mesh, placements in ((line, [Replicate()]), (one, [Replicate(), Shard(0)]), (one, [Replicate(), Replicate()])):
    into = empty_like(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    local = into.to_local()
    for other in (into, local, local.view(-1), local.numpy()):
        assert missing(into, other) == [], placements
        assert list(other.shape) != [8, 6] or missing(other, into) == []
        assert torch.equal(local, whole)
# A shard is its part of a tensor; its memory alone is no part of one.
into = empty_like(distribute_tensor(whole, line, [Shard(0)], src_data_rank=None))
assert missing(into, into) == [] and missing(into, into.to_local()) == ["other"]
"""


def has_gloo():
    if not has_torch:
        return False
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


@unittest.skipUnless(has_gloo(), "needs torch with gloo")
class Distributed(TestCase):
    def run_in_all(self, code):
        with tempfile.TemporaryDirectory(prefix="tensorfs-test-") as folder:
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            ended = "\ndist.destroy_process_group()\nprint('done')"
            command = [sys.executable, "-W", "ignore", "-c", SETUP + code + ended]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
            ranks = [subprocess.Popen([*command, str(rank), str(WORLD), folder], **pipes) for rank in range(WORLD)]
            try:
                answers = [rank.communicate(timeout=240) for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        for rank, (output, errors) in enumerate(answers):
            self.assertEqual(output[-5:], "done\n", f"rank {rank}: {ranks[rank].returncode}: {errors[-2000:]}")

    def test_random_placements_are_filled_with_what_torch_puts_there(self):
        self.run_in_all(RANDOM)

    def test_placements_that_do_not_say_which_part_a_rank_has_are_refused(self):
        self.run_in_all(REFUSED)

    def test_no_more_is_read_than_the_part_of_a_rank_and_nothing_for_an_empty_one(self):
        self.run_in_all(PART)

    def test_a_backward_pass_that_needs_the_shards_of_before_is_refused(self):
        # One process is enough, because ranks do not wait for each other.
        ended = "\ndist.destroy_process_group()\nprint('done')"
        environment = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        self.assertEqual(python(SETUP + WRITTEN + ended, 0, 1, self.tmp, **environment)[-5:], "done\n")

    def test_models_of_fsdp2_and_tensor_parallelism_are_filled(self):
        self.run_in_all(MODELS)

    def test_a_rank_without_elements_is_left_alone_whatever_the_shape_of_its_shard(self):
        self.run_in_all(EMPTY)

    def test_a_whole_dtensor_and_its_local_tensor_are_the_same_memory(self):
        self.run_in_all(ALIASES)
