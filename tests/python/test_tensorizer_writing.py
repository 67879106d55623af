"""Tensorizer files that `convert` and `consolidate` write: their bytes, their names, and what is left of a failure."""

import json
import os
import random
import re
import signal
import struct
import subprocess
import time

import checkpoints
from faults import file_system
from manifest import GOOD
from mounts import BIN, Mount, TestCase, needs_root, run_measured, tensorfs, visible_files
from tensorizer_files import AREA, DTYPES, Stored, file_of

WIDTHS = {"BOOL": 8, "U8": 8, "I8": 8, "BF16": 16, "F4": 4, "C64": 64}


def save(path, tensors, metadata=None):
    """A safetensors file of tensors (name, dtype, shape, bytes) in this order."""
    header, start = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + len(data)]}
        start += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors))
    return path


def random_tensors(seed):
    """Tensors of every dtype that the format has, some empty, some without dimensions, and a large one."""
    rng, made = random.Random(seed), []
    for number, dtype in enumerate(DTYPES):
        bits = WIDTHS.get(dtype) or int(re.match(r"[A-Z]+(\d+)", dtype)[1])
        for index, shape in enumerate(([3, 2], [], [0, 4], [rng.randrange(1, 40), 2])):
            if dtype == "F4" and not shape:
                continue
            count = 1
            for dim in shape:
                count *= dim
            data = checkpoints.random_bytes(100 * number + index, count * bits // 8)
            data = bytes(byte & 1 for byte in data) if dtype == "BOOL" else data
            made.append((f"{dtype.lower()}.{index}.\u00fc", dtype, shape, data))
    made.append(("large", "F32", [1_250_001], checkpoints.random_bytes(7, 5_000_004)))
    rng.shuffle(made)
    return made


def expected_file(tensors):
    stored = [Stored.of(name, dtype, shape, data) for name, dtype, shape, data in tensors]
    return file_of(stored, area=AREA)


def in_disk_order(tensors):
    """The tensors of a file by their first bytes. At one place, empty ones come first; the rest is by name."""
    starts, start = {}, 0
    for name, _, _, data in tensors:
        starts[name] = start
        start += len(data)
    return sorted(tensors, key=lambda tensor: (starts[tensor[0]], len(tensor[3]), tensor[0].encode()))


class Written(TestCase):
    def setUp(self):
        super().setUp()
        self.out = self.tmp / "out" / "m.tensors"
        self.out.parent.mkdir()

    def assert_written(self, *args, out=None):
        outcome = tensorfs("convert", *args[:1], out or self.out, *args[1:])
        self.assert_done(outcome)
        return outcome

    def assert_same_tensors(self, source, copy, *options):
        for command in (("diff", source, copy, "--bytes", *options), ("verify", copy, "--index-dir", "none")):
            outcome = tensorfs(*command)
            self.assertEqual((outcome.code, outcome.stderr), (0, ""), command)

    def test_the_bytes_are_those_of_the_tensorizer_package_in_the_order_of_the_source(self):
        for seed in range(2):
            tensors = random_tensors(seed)
            source = save(self.tmp / "m.safetensors", tensors)
            self.assert_written(source, "--verify", "--force")
            self.assert_same(self.out.read_bytes(), expected_file(in_disk_order(tensors)))

    def test_every_fixture_keeps_its_tensors_or_is_refused_for_a_dtype(self):
        refused = []
        for entry in GOOD:
            with self.subTest(entry.id):
                options = [word for option in entry.options for word in ("-o", option)]
                outcome = tensorfs("convert", entry.source, self.out, "--force", *options)
                if outcome.code:
                    self.assert_one_line(outcome)
                    refused.append((entry.id, outcome.stderr))
                    continue
                self.assert_same_tensors(entry.source, self.out, *options)
        self.assertLess(len(refused), len(GOOD) / 4)
        for name, line in refused:
            self.assertRegex(line, "tensorizer has no dtype F6|in pairs|checkpoints here|at least one tensor|takes 1 to 65535", name)

    def test_metadata_is_left_out_with_a_note(self):
        source = save(self.tmp / "m.safetensors", random_tensors(3), {"format": "pt", "step": "7"})
        outcome = self.assert_written(source, "--json")
        report = outcome.json()
        self.assertEqual(report["notes"], ["2 metadata entries are left out, tensorizer files have none"])
        self.assertEqual((report["format"], report["files"], report["digest"]), ("tensorizer", 1, None))
        self.assertEqual(report["bytes"], self.out.stat().st_size)

    def test_several_files_are_one_checkpoint(self):
        source = checkpoints.row_wise(self.tmp / "src")
        outcome = self.assert_written(source, "--verify", "-o", "layout=shards=2", "--json")
        self.assertEqual(visible_files(self.out.parent), ["m-00001-of-00002.tensors", "m-00002-of-00002.tensors"])
        self.assertEqual(outcome.json()["files"], 2)
        self.assert_same_tensors(source, self.out.parent)
        with Mount(self.out.parent) as m:
            self.assertEqual(visible_files(m.path), ["m.safetensors"])
        again = tensorfs("convert", source, self.out, "-o", "layout=shards=2")
        self.assert_refused(again)
        self.assertIn("is there already", again.stderr)

    def test_views_are_applied(self):
        source = checkpoints.row_wise(self.tmp / "src")
        view = ("-o", "include=embed,dtype=bf16")
        self.assert_written(source, *view)
        [found] = tensorfs("ls", self.out, "--json").json()["sets"]
        self.assertEqual([(tensor["name"], tensor["dtype"]) for tensor in found["tensors"]], [("embed", "BF16")])
        plain = self.tmp / "plain.safetensors"
        self.assert_done(tensorfs("convert", source, plain, *view))
        self.assert_same_tensors(plain, self.out)

    def test_consolidate_writes_the_same_file(self):
        for source in (checkpoints.uneven(self.tmp / "uneven"), save(self.tmp / "one.safetensors", random_tensors(4))):
            other = self.tmp / "out" / "other.tensors"
            self.assert_written(source, "--force")
            self.assert_done(tensorfs("consolidate", source, other, "--verify", "--force"))
            self.assert_same(other.read_bytes(), self.out.read_bytes())
        source = checkpoints.row_wise(self.tmp / "src")
        outcome = tensorfs("consolidate", source, other, "--force", "-o", "format=bintensors")
        self.assert_refused(outcome, code=2)
        self.assertIn("the name is one of a tensorizer file", outcome.stderr)

    def test_the_format_is_that_of_the_name_or_of_the_option(self):
        source = save(self.tmp / "m.safetensors", random_tensors(5))
        self.assert_written(source, "--to", "tensorizer", out=self.out.parent)
        self.assertEqual(visible_files(self.out.parent), ["m.tensors"])
        for out, option, part in (
            ("x.bin", (), "give --to"), ("x.safetensors", ("--to", "tensorizer"), "--to says tensorizer"),
            ("x.tensors", ("--to", "safetensors"), "--to says safetensors"),
        ):
            outcome = tensorfs("convert", source, self.out.parent / out, *option)
            self.assert_refused(outcome, code=2)
            self.assertIn(part, outcome.stderr)
        self.assertEqual(visible_files(self.out.parent), ["m.tensors"])

    def test_options_of_a_view_that_convert_does_not_follow_are_refused(self):
        source = save(self.tmp / "m.safetensors", [(name, "F32", [200], bytes(800)) for name in ("a", "b")])
        split = self.tmp / "split.json"
        split.write_text('{"a": 1, "b": 2}')
        refused = [(to, "layout=original") for to in ("bintensors", "safetensors", "tensorizer")]
        for files in ("shards=2", "shards=1000B", f"map={split}"):
            refused += [(to, f"layout={files}") for to in ("bintensors", "safetensors")]
        refused += [(to, "format=bintensors") for to in ("bintensors", "safetensors", "tensorizer")]
        for to, option in refused:
            with self.subTest(to, option=option):
                outcome = tensorfs("convert", source, self.out.parent, "--to", to, "-o", option)
                self.assert_refused(outcome, code=2)
                self.assert_one_line(outcome)
                self.assertIn(f"option {option}: ", outcome.stderr)
                self.assertEqual(os.listdir(self.out.parent), [])
        self.assert_done(tensorfs("convert", source, self.out.parent, "--to", "safetensors", "-o", "layout=single"))

    # They were written, and are no checkpoint together.
    def test_several_files_get_no_hidden_names(self):
        source = checkpoints.numbered_set(self.tmp / "set", 1)
        for name in (".tensors", ".hidden.tensors"):
            outcome = tensorfs("convert", source, self.out.parent / name, "-o", "layout=shards=2")
            self.assert_refused(outcome, code=2)
            self.assert_one_line(outcome)
            self.assertIn(f"{name}: begins with a dot", outcome.stderr)
            self.assertEqual(os.listdir(self.out.parent), [])

    def test_numbers_with_gaps_are_refused_before_anything_is_written(self):
        source = save(self.tmp / "m.safetensors", [(name, "F32", [200], bytes(800)) for name in ("q", "k", "i")])
        split = self.tmp / "split.json"
        for numbers, gap in (({"q": 1, "k": 3, "i": 4}, 2), ({"q": 2, "k": 2, "i": 2}, 1)):
            split.write_text(json.dumps(numbers))
            outcome = tensorfs("convert", source, self.out, "-o", f"layout=map={split}")
            self.assert_refused(outcome, code=2)
            self.assert_one_line(outcome)
            self.assertIn(f"option layout=map={split}: has no file {gap}, and tensorizer files have no weight map", outcome.stderr)
            self.assertEqual(os.listdir(self.out.parent), [])

    def test_tensors_that_the_format_lacks_are_refused_and_nothing_is_left(self):
        for tensor, part in (
            (("a.b", "F6_E2M3", [4], bytes(3)), "tensorizer has no dtype F6_E2M3"),
            (("a.b", "F4", [2, 3], bytes(3)), "in pairs along the last dimension"),
            (("\x1ea.b", "U8", [2], bytes(2)), "is a path in tensorizer files"),
        ):
            outcome = tensorfs("convert", save(self.tmp / "m.safetensors", [tensor]), self.out)
            self.assert_refused(outcome)
            self.assertIn(part, outcome.stderr)
            self.assertIn("a.b", outcome.stderr)
            self.assertEqual(os.listdir(self.out.parent), [])

    @needs_root
    def test_a_full_disk_is_found_before_anything_is_written(self):
        source = checkpoints.hf_set(self.tmp / "large", megabytes=12)
        with file_system("tmpfs", self.tmp / "small", "-o", "size=4m") as small:
            for layout in ("single", "shards=2"):
                outcome = tensorfs("convert", source, small / "x.tensors", "-o", f"layout={layout}")
                self.assert_refused(outcome)
                self.assertRegex(outcome.stderr, r"\d+ bytes are missing")
                self.assertEqual(os.listdir(small), [])

    def test_a_conversion_that_is_stopped_or_killed_leaves_no_file(self):
        tensors = [(f"t{number}", "U8", [4_000_000], bytes(4_000_000)) for number in range(10)]
        source = save(self.tmp / "m.safetensors", tensors)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for delay in (0.02, 0.04, 0.08):
                process = subprocess.Popen(
                    [BIN, "convert", source, self.out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                time.sleep(delay)
                process.send_signal(number)
                process.wait()
                if self.out.exists():
                    # It was too late for the signal.
                    self.assert_same(self.out.read_bytes(), expected_file(in_disk_order(tensors)))
                    self.out.unlink()
                # A killed run leaves its lock, which the next one takes over.
                locks = [".m.tensors.tensorfs-partial/lock"] if number == signal.SIGKILL else []
                self.assertIn(visible_files(self.out.parent), ([], locks))
        self.assert_written(source)
        self.assertEqual(os.listdir(self.out.parent), ["m.tensors"])

    def test_an_encrypted_file_opens_with_its_key_and_holds_no_plain_data(self):
        tensors = [tensor for tensor in random_tensors(8) if tensor[3]]
        source = save(self.tmp / "m.safetensors", tensors)
        key, other = self.tmp / "key", self.tmp / "other"
        key.write_bytes(checkpoints.random_bytes(1, 32))
        other.write_text(checkpoints.random_bytes(2, 32).hex())
        self.assert_written(source, "--key-file", key, "--verify")
        data = self.out.read_bytes()
        self.assertEqual(data[5], 3)
        self.assertTrue(all(tensor[3] not in data for tensor in tensors if len(tensor[3]) > 16))
        again = self.tmp / "again.tensors"
        self.assert_done(tensorfs("convert", self.out, again, "-o", f"key-file={key}"))
        self.assert_same(again.read_bytes(), expected_file(tensors))
        outcome = tensorfs("verify", self.out, "--index-dir", "none", "-o", f"key-file={key}")
        self.assert_done(outcome)
        self.assert_refused(tensorfs("convert", self.out, self.tmp / "x.tensors"))
        self.assert_refused(tensorfs("convert", self.out, self.tmp / "x.tensors", "-o", f"key-file={other}"))
        # Another key for the copy, and another nonce each time.
        self.assert_done(tensorfs("convert", self.out, again, "--force", "-o", f"key-file={key}", "--key-file", other))
        self.assertEqual(len(again.read_bytes()), len(data))
        self.assert_written(source, "--key-file", key, "--force")
        self.assertNotEqual(self.out.read_bytes(), data)

    def test_a_passphrase_encrypts_under_a_new_salt_and_only_it_opens_the_file(self):
        tensors = [tensor for tensor in random_tensors(9) if tensor[3]]
        source = save(self.tmp / "m.safetensors", tensors)
        passphrase, bare, other, key = (self.tmp / name for name in ("passphrase", "bare", "other", "key"))
        passphrase.write_text("p\u00e4ssphrase of words\n")
        bare.write_text("p\u00e4ssphrase of words")
        other.write_text("p\u00e4ssphrase of words \n")
        key.write_bytes(bytes(range(32)))
        self.assert_written(source, "--passphrase-file", passphrase, "--verify")
        data = self.out.read_bytes()
        self.assertTrue(all(tensor[3] not in data for tensor in tensors if len(tensor[3]) > 16))
        back = self.tmp / "back.tensors"
        for secret in (passphrase, bare):
            self.assert_done(tensorfs("convert", self.out, back, "--force", "-o", f"passphrase-file={secret}"))
            self.assert_same(back.read_bytes(), expected_file(tensors))
        with Mount(self.out, f"passphrase-file={passphrase}") as m:
            outcome = tensorfs("diff", source, m.path / "m.safetensors", "--bytes")
            self.assertEqual((outcome.code, outcome.stderr), (0, ""))
        none = self.tmp / "none.tensors"
        for options, kind in (
            (["-o", f"passphrase-file={other}"], "decrypt_failed"),
            (["-o", f"key-file={key}"], "decrypt_failed"),
            ([], "key_required"),
        ):
            outcome = tensorfs("convert", self.out, none, *options, "--json")
            self.assert_refused(outcome)
            self.assertEqual(outcome.json()["class"], kind)
            self.assertFalse(none.exists())
        # Each tensor names the derivation, whose salt is that of the file alone.
        self.assert_written(source, "--passphrase-file", passphrase, "--force")
        derivation = struct.pack("<HQQIH", 1, 3, 256 << 20, 2, 16)
        salts = [
            {file[match.end() : match.end() + 16] for match in re.finditer(re.escape(derivation), file)}
            for file in (data, self.out.read_bytes())
        ]
        self.assertEqual([len(salts[0]), len(salts[1]), len(salts[0] | salts[1])], [1, 1, 2])

    def test_what_cannot_be_encrypted_is_refused_and_nothing_is_left(self):
        key, short = self.tmp / "key", self.tmp / "short"
        key.write_bytes(bytes(range(32)))
        short.write_bytes(b"abc")
        full = save(self.tmp / "m.safetensors", [("a.b", "U8", [4], bytes(4))])
        empty = save(self.tmp / "empty.safetensors", [("a.b", "U8", [0], b"")])
        why = "empty.safetensors: tensor `a.b`: has no elements, and the format cannot encrypt a tensor without bytes"
        for source, out, path, code, part in (
            (empty, "x.tensors", key, 1, why),
            (full, "x.safetensors", key, 2, "safetensors files are not encrypted"),
            (full, "x.tensors", short, 1, "short"),
            (full, "x.tensors", self.tmp / "none", 1, "No such file"),
        ):
            outcome = tensorfs("convert", source, self.out.parent / out, "--key-file", path)
            self.assert_refused(outcome, code=code)
            self.assertIn(part, outcome.stderr)
            self.assertEqual(os.listdir(self.out.parent), [])

    def test_memory_is_bounded_whatever_the_size(self):
        part, count = 50_000_000, 6
        header = {
            f"t{number}": {"dtype": "U8", "shape": [part], "data_offsets": [number * part, (number + 1) * part]}
            for number in range(count)
        }
        header = json.dumps(header).encode()
        source = self.tmp / "large.safetensors"
        source.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(source, 8 + len(header) + part * count)
        outcome, peak = run_measured(BIN, "convert", source, self.out)
        self.assert_done(outcome)
        self.assertLess(peak, 200 << 20)

    def test_a_tensorizer_file_is_written_again_with_the_same_bytes(self):
        tensors = random_tensors(6)
        path = self.tmp / "again.tensors"
        path.write_bytes(expected_file(tensors))
        self.assert_written(path)
        self.assert_same(self.out.read_bytes(), path.read_bytes())
