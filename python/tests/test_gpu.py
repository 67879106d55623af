"""Loads to the memory of a GPU, with a driver whose devices are memory of the process: see tests/fakecuda.
`tests/gpu/run` tests torch itself, on a machine with a GPU."""

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from package import TestCase, needs_torch, python

DRIVER = Path(os.environ["TENSORFS_BIN"]).parent / "deps/libfakecuda.so"

# Calls of the fake driver in this process, and helpers for its memory.
PRELUDE = """
import ctypes, sys
from tensorfs._tensorfs import Checkpoint, Loader, release_pinned
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)

context = ctypes.c_void_p()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)

def allocate(length):
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(length))
    return address.value

def read(address, length):
    into = ctypes.create_string_buffer(length)
    call("cuMemcpyDtoH_v2", into, ctypes.c_uint64(address), ctypes.c_size_t(length))
    return into.raw

class Owner:
    gone = 0
    def __del__(self):
        Owner.gone += 1
"""


class Gpu(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(1)
        self.tensors = {f"t{n}": rng.integers(0, 256, (n * 7001 + 1, 3), np.uint8) for n in range(20)}
        self.tensors["f"] = rng.standard_normal((300, 500), np.float32)
        self.file = self.tmp / "model.safetensors"
        save_file(self.tensors, self.file)

    def test_the_driver_for_tests_is_there(self):
        self.assertTrue(DRIVER.exists(), f"{DRIVER}: cargo test -p tensorfs --features cuda builds it")

    def test_whole_tensors_parts_and_casts_reach_memory_of_the_gpu(self):
        out = self.tmp / "out"
        out.mkdir()
        python(
            PRELUDE
            + """
from pathlib import Path
checkpoint = Checkpoint.open(sys.argv[2], None)
loader = Loader(gpu=0, chunk=65536)
facts = checkpoint.tensors()
position = {fact[0]: fact[1] for fact in facts}
requests = [(fact[1], None, None, None) for fact in facts]
requests.append((position["f"], [(10, 200), (100, 250)], None, None))
requests.append((position["f"], None, "BF16", None))
waits = allocate(50_000) + 77
requests.append((position["t2"], None, None, waits))
plan = loader.plan(checkpoint, requests)
memory = []
for room in plan.rooms:
    memory.append((waits, 14003 * 3, Owner()) if room is None else (allocate(room), room, Owner()))
took = loader.fill(checkpoint, plan, memory, None, 0)
assert took["bytes_read"] > 0 and took["copies"] > 0, took
assert took["cufile_bytes"] == 0 and "cufile_unused" not in took, took
asked = Loader(gpu=0, chunk=65536, engine="cufile").fill(checkpoint, plan, memory, None, 0)
assert asked["cufile_bytes"] > 0 or asked["cufile_unused"], asked
count = len(memory)
for number, (region, at, length, dtype, shape) in enumerate(plan.placements):
    start = waits - waits % 4096 if plan.rooms[region] is None else memory[region][0]
    Path(sys.argv[3], str(number)).write_bytes(read(start + at, length))
del memory
assert Owner.gone == count, (Owner.gone, count)
release_pinned()
""",
            DRIVER,
            self.file,
            out,
        )
        names = sorted(self.tensors)
        for number, name in enumerate(names):
            self.assertEqual((out / str(number)).read_bytes(), self.tensors[name].tobytes(), name)
        f = self.tensors["f"]
        self.assertEqual((out / str(len(names))).read_bytes(), np.ascontiguousarray(f[10:200, 100:250]).tobytes())
        bits = f.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        self.assertEqual((out / str(len(names) + 1)).read_bytes(), rounded.tobytes())
        self.assertEqual((out / str(len(names) + 2)).read_bytes(), self.tensors["t2"].tobytes())

    def test_a_failure_of_the_driver_is_a_typed_error_and_the_next_load_succeeds(self):
        python(
            PRELUDE
            + """
import tensorfs
checkpoint = Checkpoint.open(sys.argv[2], None)
def load():
    loader = Loader(gpu=0)
    plan = loader.plan(checkpoint, [(0, None, None, None)])
    loader.fill(checkpoint, plan, [(allocate(room), room, Owner()) for room in plan.rooms])
assert cuda.fakecuda_configure(b"fail", b"cuMemcpyHtoDAsync_v2:1:700") == 0
try:
    load()
    raise AssertionError("it did not fail")
except tensorfs.SafetensorError as e:
    assert e.kind == "device" and "cuMemcpyHtoDAsync_v2" in str(e), (e.kind, e)
cuda.fakecuda_configure(b"fail", b"")
load()
""",
            DRIVER,
            self.file,
        )

    def test_frameworks_without_gpus_say_so(self):
        for framework in ("np", "dlpack"):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "cuda:0.*pt"):
                tensorfs.safe_open(self.file, framework, "cuda:0")
        for device in ("cuda:x", "tpu", "mps", -1, True):
            with self.assertRaises(tensorfs.SafetensorError):
                tensorfs.safe_open(self.file, "np", device)

    @needs_torch
    def test_without_a_gpu_the_error_says_so(self):
        import torch

        if torch.cuda.is_available():
            self.skipTest("there is a GPU here")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "cuda:0"):
            tensorfs.load_file(self.file, "pt", "cuda:0")
