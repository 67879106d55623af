"""`tensorfs cat`: the bytes of one tensor, judged by safetensors and numpy."""

import io
import os
import pty
import resource
import subprocess

import numpy as np
from safetensors.numpy import load_file

import checkpoints
import oracle
from manifest import by_id
from mounts import BIN, Mount, TestCase, tensorfs


def cat(*words, **popen):
    return subprocess.run([BIN, "cat", *map(str, words)], capture_output=True, timeout=30, **popen)


class Cat(TestCase):
    def test_the_bytes_of_every_tensor_are_those_of_the_mount(self):
        for id in ("dcp_col_wise", "st_all_dtypes", "dcp_scalar_and_empty"):
            source = by_id(id).source
            with Mount(source) as m:
                [file] = [path for path in m.path.iterdir() if path.suffix == ".safetensors"]
                expected = oracle.tensor_bytes(file)
            for name, (_, _, data) in expected.items():
                done = cat(source, "--", name)
                # Rank shards do not prove their tail, which is the one thing to be said.
                tails = id.startswith("dcp")
                self.assertEqual((done.returncode, done.stderr.count(b"\n")), (0, tails), name)
                self.assertEqual(done.stdout, data, name)

    def test_an_npy_file_is_that_of_numpy_byte_by_byte(self):
        shapes = [(), (0,), (3,), (2, 3), (1, 2, 3, 4), (10, 7), (1000003,)]
        kinds = ["bool", "u1", "i1", "<i2", "<u2", "<f2", "<i4", "<u4", "<f4", "<c8", "<f8", "<i8", "<u8"]
        words = ["BOOL", "U8", "I8", "I16", "U16", "F16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"]
        arrays = {}
        rows = []
        for number, (kind, word) in enumerate(zip(kinds, words)):
            shape = shapes[number % len(shapes)]
            array = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(kind)
            arrays[word] = array
            rows.append((word, word, list(shape), array.tobytes()))
        # Headers of numpy end at multiples of 64: every length of a shape.
        for digits in range(1, 8):
            shape = (1, 10**digits, 0)
            arrays[f"s{digits}"] = np.zeros(shape, "<f4")
            rows.append((f"s{digits}", "F32", list(shape), b""))
        checkpoints.write_shard(self.tmp / "model.safetensors", rows)
        for name, array in arrays.items():
            expected = io.BytesIO()
            np.save(expected, array)
            self.assertEqual(cat(self.tmp, name, "--npy").stdout, expected.getvalue(), name)

    def test_a_dtype_that_numpy_lacks_is_refused_with_what_to_do(self):
        checkpoints.write_shard(
            self.tmp / "model.safetensors",
            [("b", "BF16", [2], b"\x80\x3f\x00\x40"), ("f", "F8_E4M3", [2], b"\x38\x40")],
        )
        for name, word, advice in (("b", "BF16", "-o dtype=f32"), ("f", "F8_E4M3", "raw bytes")):
            done = cat(self.tmp, name, "--npy")
            self.assertEqual((done.returncode, done.stdout), (1, b""))
            for part in (word, advice, f"`{name}`"):
                self.assertIn(part, done.stderr.decode())
        done = cat(self.tmp, "b", "--npy", "-o", "dtype=f32")
        np.testing.assert_array_equal(np.load(io.BytesIO(done.stdout)), np.array([1, 2], "f4"))

    def test_options_of_views_and_paths_on_mounts_are_taken(self):
        source = by_id("hf_gpt2_tiny").source
        name = "transformer.wte.weight"
        expected = cat(source, name).stdout
        with Mount(source) as m:
            self.assertEqual(cat(m.path, name).stdout, expected)
            [file] = [path for path in m.path.iterdir() if path.suffix == ".safetensors"]
            self.assertEqual(load_file(file)[name].tobytes(), expected)
        self.assertIn(b"has no tensor", cat(source, name, "-o", "exclude=*wte*").stderr)
        self.assertEqual(len(cat(source, name, "-o", "dtype=bf16").stdout), len(expected) // 2)

    def test_a_name_that_is_not_there_gets_the_nearest_ones(self):
        source = by_id("hf_gpt2_tiny").source
        for wrong in ("transformer.wte.weigth", "wte.weight", "wte.wieght"):
            done = cat(source, wrong)
            self.assertEqual((done.returncode, done.stdout), (1, b""))
            self.assertIn("did you mean `transformer.wte.weight`", done.stderr.decode())
        self.assertIn("`tensorfs ls` lists all", cat(source, "qqqqqqqqq").stderr.decode())

    def test_a_terminal_gets_no_bytes_unless_forced(self):
        source, name = by_id("hf_gpt2_tiny").source, "transformer.ln_f.bias"
        master, slave = pty.openpty()
        try:
            done = subprocess.run([BIN, "cat", source, name], stdout=slave, stderr=subprocess.PIPE, timeout=30)
            self.assertEqual(done.returncode, 2)
            self.assertIn(b"is a terminal", done.stderr)
            done = subprocess.run([BIN, "cat", source, name, "--force"], stdout=slave, timeout=30)
            self.assertEqual(done.returncode, 0)
        finally:
            os.close(master)
            os.close(slave)

    def test_a_reader_that_goes_is_no_failure_and_a_full_disk_is_one(self):
        data = np.arange(4 << 20, dtype="<u4").tobytes()
        checkpoints.write_shard(self.tmp / "model.safetensors", [("w", "U32", [4 << 20], data)])
        process = subprocess.Popen([BIN, "cat", self.tmp, "w"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.assertEqual(process.stdout.read(100), data[:100])
        process.stdout.close()
        self.assertEqual(process.stderr.read(), b"")
        process.stderr.close()
        self.assertEqual(process.wait(30), 0)
        with open("/dev/full", "wb") as full:
            done = subprocess.run([BIN, "cat", self.tmp, "w"], stdout=full, stderr=subprocess.PIPE, timeout=30)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"standard output: cannot write", done.stderr)

    def test_a_tensor_larger_than_the_memory_passes_through(self):
        size = 1 << 30
        path = self.tmp / "model.safetensors"
        text = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (size, size)
        with open(path, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + size)

        def limit():
            resource.setrlimit(resource.RLIMIT_DATA, (400 << 20, 400 << 20))

        with open("/dev/null", "wb") as null:
            done = subprocess.run(
                [BIN, "cat", self.tmp, "w"], stdout=null, stderr=subprocess.PIPE, timeout=60, preexec_fn=limit
            )
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_json_is_no_form_of_bytes(self):
        self.assertEqual(tensorfs("cat", by_id("hf_gpt2_tiny").source, "x", "--json").code, 2)
