"""`tensorfs load`: what it says of a load, and what it refuses."""

import json
import os
import re
import shutil
import struct

from checkpoints import column_wise, hf_set, row_wise
from mounts import BIN, FIXTURES, Mount, TestCase, tensorfs

# Name under which programs look for the driver. Files of these names that are no libraries keep those of the
# machine away.
DRIVERS = ["libcuda.so", "libcuda.so.1", "libcuda.so.9", "libcuda.so.10", "libcuda.so.11", "libcuda.so.12"]


class Load(TestCase):
    def load(self, *words):
        outcome = tensorfs("load", *words, "--json")
        self.assert_done(outcome)
        return outcome.json()

    def test_every_byte_of_every_kind_of_checkpoint_is_loaded_and_read_once(self):
        for make in (hf_set, row_wise, column_wise):
            with self.subTest(make=make.__name__):
                folder = self.tmp / make.__name__
                make(folder)
                (listed,) = tensorfs("ls", folder, "--json").json()["sets"]
                loaded = self.load(folder)
                self.assertEqual((loaded["bytes"], loaded["tensors"]), (listed["bytes"], len(listed["tensors"])))
                self.assertLessEqual(loaded["bytes_read"], loaded["bytes"] * 1.05)
                self.assertLessEqual(loaded["staging_peak"], 256 << 20)

    def test_it_says_in_which_pages_the_memory_of_a_long_load_came(self):
        file, length = self.tmp / "model.safetensors", 65 << 20
        header = json.dumps({"a": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(file, 8 + len(header) + length)
        loaded = self.load(file)
        taken = loaded["huge_bytes"] + loaded["small_bytes"]
        # Before Linux 5.14 it cannot be asked for.
        self.assertTrue(taken == 0 or length <= taken <= length + (2 << 20), taken)
        self.assertEqual(taken > 0, loaded["huge_thread_s"] + loaded["small_thread_s"] > 0)
        text = tensorfs("load", file)
        self.assert_done(text)
        self.assertEqual(taken > 0, " huge pages" in text.stdout and " small pages" in text.stdout, text.stdout)

    def test_the_trace_shows_each_read_with_its_stages_in_order(self):
        folder, trace = self.tmp / "dcp", self.tmp / "trace.json"
        column_wise(folder)
        loaded = self.load(folder, "--trace", trace)
        events = json.loads(trace.read_text())["traceEvents"]
        read = sum(e["args"]["to"] - e["args"]["from"] for e in events if e["name"] == "read")
        self.assertEqual(read, loaded["bytes_read"])
        self.assertEqual({e["name"] for e in events}, {"queue", "read", "copy"})
        self.assertTrue(all(e["ph"] == "X" and e["dur"] >= 0 and e["ts"] >= 0 for e in events))

    def test_the_log_names_the_load_and_the_shard_of_each_read(self):
        folder = self.tmp / "dcp"
        column_wise(folder)
        outcome = tensorfs("load", folder, "--json", "-o", "direct=always", env={**os.environ, "TENSORFS_LOG": "trace"})
        self.assert_done(outcome)
        reads = re.findall(r"fetch\{shard=(\S+) offset=\d+ len=(\d+)\}: read", outcome.stderr)
        shards = {str(path) for path in folder.glob("*.safetensors")}
        (loads,) = re.findall(r"load\{folder=.* bytes=(\d+)\}: loaded", outcome.stderr)
        self.assertEqual(int(loads), outcome.json()["bytes"])
        self.assertEqual({shard for shard, _ in reads}, shards, outcome.stderr[-2000:])
        self.assertEqual(sum(int(length) for _, length in reads), outcome.json()["bytes_read"])

    def test_progress_is_drawn_where_it_is_asked_for(self):
        folder = self.tmp / "hf"
        hf_set(folder)
        for progress, drawn in (("always", True), ("never", False), ("auto", False)):
            outcome = tensorfs("load", folder, "--progress", progress)
            self.assert_done(outcome)
            self.assertEqual("MB" in outcome.stderr, drawn, outcome.stderr)

    def test_progress_needs_no_value_before_and_after_a_source(self):
        folder = self.tmp / "hf"
        hf_set(folder, megabytes=1)
        out = self.tmp / "out"
        for words in (
            ["load"],
            ["verify"],
            ["warm"],
            ["convert"],
            ["consolidate"],
            ["diff"],
        ):
            operands = [folder, folder] if words == ["diff"] else [folder]
            if words[0] in ("convert", "consolidate"):
                operands = [folder, out / f"{words[0]}.safetensors"]
                out.mkdir(exist_ok=True)
            for place in (["--progress", *operands], [*operands, "--progress"], [*operands, "--progress=never"]):
                for path in out.glob("*"):
                    path.unlink()
                outcome = tensorfs(*words, *place)
                self.assertEqual(outcome.code, 0, (words, outcome.stderr))

    def test_a_path_on_a_mount_is_loaded_past_it(self):
        folder = self.tmp / "hf"
        hf_set(folder)
        with Mount(folder) as m:
            loaded = self.load(m.path)
            self.assertEqual(loaded["directory"], str(folder))
            self.assertEqual(self.load(m.path / "model.safetensors")["bytes"], loaded["bytes"])

    def test_a_bad_checkpoint_and_several_at_once_are_refused(self):
        outcome = tensorfs("load", FIXTURES / "bad/dcp/hole_middle", "--json")
        self.assertEqual((outcome.code, outcome.json()["class"]), (1, "dcp_hole"))
        for name in ("a", "b"):
            hf_set(self.tmp / "tree" / name)
        outcome = tensorfs("load", self.tmp / "tree")
        self.assertEqual(outcome.code, 2)
        self.assertIn("2 checkpoints here", outcome.stderr)
        outcome = tensorfs("load", self.tmp / "nothing")
        self.assertEqual(outcome.code, 1)
        self.assertIn("nothing", outcome.stderr)

    def test_a_trace_that_cannot_be_written_is_an_error_that_names_it(self):
        folder = self.tmp / "hf"
        hf_set(folder)
        outcome = tensorfs("load", folder, "--trace", self.tmp / "no/such/trace.json")
        self.assertEqual(outcome.code, 1)
        self.assertIn("no/such/trace.json", outcome.stderr)
        self.assertEqual(tensorfs("load", folder, "--trace", "/dev/full").code, 1)

    def test_a_trace_replaces_a_trace_and_nothing_else(self):
        folder, trace = self.tmp / "hf", self.tmp / "trace.json"
        hf_set(folder)
        for _ in range(2):
            self.load(folder, "--trace", trace)
        shard = folder / "model-00001-of-00003.safetensors"
        before = shard.read_bytes()
        outcome = tensorfs("load", folder, "--trace", shard)
        self.assertEqual((outcome.code, shard.read_bytes()), (1, before))
        self.assertIn("is no trace", outcome.stderr)

    def test_what_is_larger_than_memory_is_refused_with_numbers(self):
        file = self.tmp / "huge.safetensors"
        size = 1 << 40
        entries = {f"w{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]} for n in range(8)}
        header = json.dumps(entries).encode()
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(file, 8 + len(header) + 8 * size)
        outcome = tensorfs("load", file)
        self.assertEqual(outcome.code, 1)
        self.assertIn(f"takes {8 * size} bytes of memory", outcome.stderr)


class LoadToGpu(TestCase):
    """On a driver whose devices are memory of the process: tests/fakecuda, which the Rust tests build."""

    def driver(self, library=None):
        folder = self.tmp / "driver"
        folder.mkdir()
        for name in DRIVERS:
            (folder / name).write_bytes(b"no library")
        if library:
            shutil.copy(library, folder / "libcuda.so")
        return {**os.environ, "LD_LIBRARY_PATH": str(folder)}

    def test_every_byte_goes_to_the_gpu_and_each_stage_is_shown(self):
        log = self.tmp / "log"
        env = {**self.driver(BIN.parent / "deps/libfakecuda.so"), "FAKE_LOG": str(log)}
        folder, trace = self.tmp / "dcp", self.tmp / "trace.json"
        column_wise(folder)
        on_host = tensorfs("load", folder, "--json").json()
        outcome = tensorfs("load", folder, "--device", "cuda:1", "--json", "--trace", trace, env=env)
        self.assert_done(outcome)
        loaded = outcome.json()
        self.assertEqual(loaded["device"], "cuda:1")
        self.assertEqual(loaded["bytes"], on_host["bytes"])
        self.assertEqual(set(loaded), set(on_host))
        self.assertEqual((on_host["gpu"], loaded["gpu"]["name"]), (None, "fake 1"))
        self.assertEqual(loaded["gpu"]["pinning"], "registered")
        calls = [json.loads(line) for line in log.read_text().splitlines()]
        self.assertEqual([call for call in calls if call["code"]], [])
        copies = [call for call in calls if call["call"] in ("cuMemcpyHtoDAsync_v2", "cuMemcpy2DAsync_v2")]
        self.assertEqual(len(copies), loaded["gpu"]["copies"])
        events = json.loads(trace.read_text())["traceEvents"]
        self.assertEqual({e["name"] for e in events}, {"queue", "read", "copy"})
        outcome = tensorfs("load", folder, "--device", "cuda", env=env)
        self.assert_done(outcome)
        for stage in ("gpu      fake 0", "allocate", "pin", "copy"):
            self.assertIn(f"\n  {stage}", outcome.stdout)

    def test_cufile_is_used_where_it_is_asked_for_and_there_and_else_the_reason_is_said(self):
        env = self.driver(BIN.parent / "deps/libfakecuda.so")
        for name in ("libcufile.so.0", "libcufile.so"):
            (self.tmp / "driver" / name).write_bytes(b"no library")
        folder = self.tmp / "hf"
        hf_set(folder)
        why = "libcufile.so.0 cannot be loaded" if os.path.exists("/dev/nvidia-fs0") else "no /dev/nvidia-fs0"
        outcome = tensorfs("load", folder, "--device", "cuda", "--cufile", env=env)
        self.assert_done(outcome)
        self.assertIn(f"\n  cufile   not used: {why}\n", outcome.stdout)
        gpu = tensorfs("load", folder, "--device", "cuda", "--cufile", "--json", env=env).json()["gpu"]
        self.assertEqual((gpu["cufile_bytes"], gpu["cufile_unused"]), (0, why))
        outcome = tensorfs("load", folder, "--device", "cuda", env=env)
        self.assertNotIn("cufile", outcome.stdout)
        outcome = tensorfs("load", folder, "--cufile", env=env)
        self.assertIn("--cufile reads to a GPU: say --device cuda:N", outcome.stderr)

    def test_a_machine_without_a_driver_or_gpu_says_so_in_one_line(self):
        folder = self.tmp / "hf"
        hf_set(folder)
        env = self.driver()
        outcome = tensorfs("load", folder, "--device", "cuda:0", env=env)
        self.assertEqual(outcome.code, 1)
        self.assertEqual(
            outcome.stderr, "tensorfs: cuda:0: there is no NVIDIA driver: libcuda.so.1 cannot be loaded\n"
        )
        self.assertEqual(tensorfs("load", folder, "--device", "cuda:0", "--json", env=env).json()["class"], "device")
        shutil.copy(BIN.parent / "deps/libfakecuda.so", self.tmp / "driver/libcuda.so")
        outcome = tensorfs("load", folder, "--device", "cuda:9", env=env)
        self.assertEqual(outcome.stderr, "tensorfs: cuda:9: there is no such GPU; the driver sees 2\n")
        self.assertEqual(tensorfs("load", folder, "--device", "gpu").code, 2)
