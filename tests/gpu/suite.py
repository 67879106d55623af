"""Tests of loads to a real GPU: bytes, casts, slices, loads into existing memory, and errors. Results are compared with
the tensors that were written."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import torch
from safetensors.torch import save_file

import tensorfs
import tensorfs.torch

BIN = os.environ["TENSORFS_BIN"]
DEVICE = "cuda:0"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def random_tensor(shape, dtype, seed):
    """A tensor of random bits, which include NaNs."""
    generator = torch.Generator().manual_seed(seed)
    length = torch.empty(shape, dtype=dtype, device="meta").nbytes
    data = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).view(shape)


def bits(tensor):
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class Gpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="tensorfs-test-")
        self.addCleanup(folder.cleanup)
        self.tmp = Path(folder.name)
        # Fills free memory, so that memory of later loads does not contain zeros by chance.
        free, _ = torch.cuda.mem_get_info()
        torch.empty(free // 2, dtype=torch.uint8, device=DEVICE).fill_(0xFF)
        torch.cuda.empty_cache()

    def same(self, got, expected, name=""):
        self.assertEqual((got.dtype, got.shape, got.device.type), (expected.dtype, expected.shape, "cuda"), name)
        self.assertTrue(torch.equal(bits(got), bits(expected)), f"{name}: the bytes differ")

    def shards(self, count=4, megabytes=40):
        """Writes shards whose sizes leave no tensor aligned. Returns all tensors in them."""
        every, weight_map = {}, {}
        dtypes = [torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.bool, torch.float16]
        for number in range(1, count + 1):
            name = f"model-{number:05}-of-{count:05}.safetensors"
            part = {f"s{number}.big": random_tensor((megabytes * 250_000 + 7, 2), torch.bfloat16, number)}
            for at in range(40):
                dtype = dtypes[at % len(dtypes)]
                part[f"s{number}.t{at}"] = random_tensor((at * 37 + 1, 5), dtype, 100 * number + at)
            part[f"s{number}.empty"] = torch.empty(0, 3)
            part[f"s{number}.scalar"] = torch.tensor(1.5)
            save_file(part, self.tmp / name)
            every |= part
            weight_map |= dict.fromkeys(part, name)
        (self.tmp / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return every

    def rank_shards(self, dim, ranks=4):
        """Writes rank shards of torch DCP, which are cut along `dim`."""
        every = {f"w{n}": random_tensor((256, 128 * (n + 1)), torch.bfloat16, n) for n in range(6)}
        for rank in range(ranks):
            part, places = {}, {}
            for name, tensor in every.items():
                part[name] = tensor.chunk(ranks, dim)[rank].contiguous()
                offset = [0, 0]
                offset[dim] = rank * tensor.shape[dim] // ranks
                places[name] = {"saved_offsets": offset}
            extra = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
            save_file(part, self.tmp / f"shard-{rank + 1:05}-model-00001-of-{ranks:05}.safetensors", extra)
        return every

    def test_all_tensors_of_shards_are_what_was_saved(self):
        expected = self.shards()
        for how in ({}, {"source": "direct"}, {"source": "buffered"}, {"engine": "threads"}, {"chunk": "64k"}):
            loaded = tensorfs.torch.load_file(self.tmp, device=DEVICE, **how)
            self.assertEqual(set(loaded), set(expected))
            for name, tensor in expected.items():
                self.same(loaded[name], tensor, f"{name} {how}")

    def test_rank_shards_are_put_together(self):
        for dim in (0, 1):
            with self.subTest(dim=dim):
                expected = self.rank_shards(dim)
                loaded = tensorfs.torch.load_file(self.tmp, device=DEVICE)
                for name, tensor in expected.items():
                    self.same(loaded[name], tensor, name)

    def test_slices_of_both_dimensions(self):
        expected = self.rank_shards(1)
        with tensorfs.safe_open(self.tmp, "pt", DEVICE) as opened:
            for name, tensor in expected.items():
                part = opened.get_slice(name)
                self.same(part[32:64], tensor[32:64], name)
                self.same(part[:, 16:48], tensor[:, 16:48].contiguous(), name)
                self.same(part[5:77, 3:9], tensor[5:77, 3:9].contiguous(), name)
                self.same(opened.get_tensor(name), tensor, name)

    def test_casts_give_the_bits_of_the_cast_on_the_cpu(self):
        sources = {str(dtype): dtype for dtype in (*FLOATS, torch.float64)}
        sources |= {name: getattr(torch, name) for name in SMALL if hasattr(torch, name)}
        tensors = {name: random_tensor((1001, 64), dtype, 7) for name, dtype in sources.items()}
        # Every 16-bit pattern.
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
        for dtype in (torch.float16, torch.bfloat16):
            tensors[f"all {dtype}"] = every.view(dtype).clone()
        save_file(tensors, self.tmp / "model.safetensors")
        for to in FLOATS:
            names = [name for name, tensor in tensors.items() if tensor.dtype != to]
            on_gpu = {name: torch.empty(tensors[name].shape, dtype=to, device=DEVICE) for name in names}
            on_cpu = {name: torch.empty(tensors[name].shape, dtype=to) for name in names}
            for into in (on_gpu, on_cpu):
                tensorfs.load_into(into, self.tmp, strict=False, cast=True)
            for name in names:
                self.same(on_gpu[name], on_cpu[name], f"{name} to {to}")
                number = ~torch.isnan(on_cpu[name])
                by_torch = tensors[name].to(to)
                self.assertTrue(torch.equal(on_cpu[name][number], by_torch[number]), f"{name} to {to}")

    def test_memory_that_waits_is_filled_and_nothing_around_it(self):
        expected = self.shards(2, 8)
        areas, waiting = {}, {}
        for name, tensor in expected.items():
            area = torch.full((tensor.nbytes + 1024,), 0xAA, dtype=torch.uint8, device=DEVICE)
            areas[name] = area
            waiting[name] = area[512 : 512 + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensorfs.load_into(waiting, self.tmp)
        for name, tensor in expected.items():
            self.same(waiting[name], tensor, name)
            around = torch.cat([areas[name][:512], areas[name][512 + tensor.nbytes :]])
            self.assertTrue(bool((around == 0xAA).all()), name)

    def test_memory_of_kernels_under_way_is_waited_for(self):
        expected = self.shards(1, 8)
        name = "s1.big"
        target = torch.empty_like(expected[name], device=DEVICE)
        work = torch.randn(4096, 4096, device=DEVICE)
        for _ in range(20):
            work = work @ work
            work /= work.norm()
        # This runs in the stream after the kernels above, so the load has to wait for it.
        target.fill_(1.0)
        tensorfs.load_into({name: target}, self.tmp, strict=False)
        self.same(target, expected[name])

    def test_many_threads_load_at_once(self):
        expected = self.shards(2, 8)
        results, failures = [], []

        def load():
            try:
                results.append(tensorfs.torch.load_file(self.tmp, device=DEVICE))
            except Exception as failed:
                failures.append(failed)

        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        for loaded in results:
            for name, tensor in expected.items():
                self.same(loaded[name], tensor, name)

    def test_memory_comes_back(self):
        self.shards(2, 8)
        tensorfs.torch.load_file(self.tmp, device=DEVICE)
        gc.collect()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            loaded = tensorfs.torch.load_file(self.tmp, device=DEVICE)
            del loaded
        self.assertEqual(torch.cuda.memory_allocated(), before)
        tensorfs.release_pinned()

    def test_a_shard_cut_short_is_an_error_that_names_it_and_the_next_load_succeeds(self):
        expected = self.shards(2, 8)
        with tensorfs.safe_open(self.tmp, "pt", DEVICE) as opened:
            path = self.tmp / "model-00002-of-00002.safetensors"
            whole = path.read_bytes()
            os.truncate(path, 1 << 20)
            with self.assertRaisesRegex((tensorfs.SafetensorError, OSError), "00002-of-00002"):
                opened.get_tensors()
        path.unlink()
        path.write_bytes(whole)
        loaded = tensorfs.torch.load_file(self.tmp, device=DEVICE)
        self.same(loaded["s2.big"], expected["s2.big"])

    def test_a_gpu_that_is_not_there_is_refused(self):
        self.shards(1, 1)
        count = torch.cuda.device_count()
        done = subprocess.run(
            [BIN, "load", self.tmp, "--device", f"cuda:{count}"], capture_output=True, text=True, check=False
        )
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"cuda:{count}", done.stderr)

    def test_the_command_loads_and_says_how_fast(self):
        expected = self.shards()
        done = subprocess.run(
            [BIN, "load", self.tmp, "--device", DEVICE, "--json"], capture_output=True, text=True, check=False
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual(found["bytes"], sum(tensor.nbytes for tensor in expected.values()))
        self.assertTrue(found["gpu"])


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("no GPU that torch can use: nothing was checked")
    unittest.main(verbosity=2)
