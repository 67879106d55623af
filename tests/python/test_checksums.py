"""`tensorfs verify` records a checksum of every byte at the first full read, and compares it from then on."""

import hashlib
import json
import os
import shutil
import subprocess
import unittest
from pathlib import Path

import checkpoints
import oracle
from mounts import BIN, Mount, TestCase, is_root, run, tensorfs

CHUNK = 1 << 20


def single(folder, seed=1, rows=3000):
    """A folder with one whole file: a large tensor, a small one, a scalar and an empty one."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [("big", (rows, 100), 4 * rows * 100), ("small", (7, 5), 140), ("scalar", (), 4), ("empty", (0, 3), 0)]
    tensors = [
        (name, "F32", shape, checkpoints.random_bytes(seed + at, length))
        for at, (name, shape, length) in enumerate(parts)
    ]
    checkpoints.write_shard(folder / "model.safetensors", tensors)
    return folder


def replicated(folder):
    """A DCP set with rows over two ranks, and a tensor that both of them hold."""
    one = checkpoints.DcpSet(8).cut("rows", (400, 30), (2, 1))
    data = one.tensors["rows"][:100]
    one.tensors["twice"] = data
    one.place("twice", data, [([0, 0], [100, 30])] * 2, 4)
    return one.save(folder)


def bintensors(folder):
    """A folder with one file in the bintensors format."""
    made = single(folder.with_name(f"{folder.name} as safetensors"))
    folder.mkdir()
    outcome = tensorfs("convert", made / "model.safetensors", "--to", "bintensors", folder / "model.bt")
    if outcome.code:
        raise AssertionError(outcome.stderr)
    return folder


def flip(path, at, bit=2):
    """Flips one bit where it lies, as a disk would: the times stay, but for the one that cannot be set."""
    stat = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def places(path):
    """Name -> (first byte, end) of the pieces in a shard."""
    header = oracle.read_header_of(path)
    ranges = {name: entry["data_offsets"] for name, entry in header.tensors.items()}
    return {name: (header.data_start + start, header.data_start + end) for name, (start, end) in ranges.items()}


def shards_of(folder):
    return sorted(folder.glob("*.safetensors"))


class VerifyCase(TestCase):
    def verify(self, folder, *args, code=0, **kwargs):
        """The report of `verify --json` for the one set in a folder."""
        outcome = tensorfs("verify", folder, "--json", *args, **kwargs)
        self.assertEqual(outcome.code, code, f"{outcome.stdout}\n{outcome.stderr}")
        [found] = outcome.json()["sets"]
        return found

    def assert_differs(self, folder, shard, at, tensor, **facts):
        """`verify` refuses the set and names the shard, the tensor and where `at` lies."""
        found = self.verify(folder, code=1)
        self.assertEqual(found["class"], "hash_mismatch", found)
        self.assertEqual((found["file"], found["tensor"]), (str(shard), tensor))
        start, end = found["range"]
        self.assertTrue(start <= at < end <= start + CHUNK, f"{at} in {found['range']}")
        self.assertIn(f"bytes {start}..{end}", found["error"])
        self.assertNotEqual(found["expected"], found["found"])
        self.assertIn(found["expected"], found["error"])
        for key, value in facts.items():
            self.assertEqual(found[key], value, key)
        return found


class Checksums(VerifyCase):
    def kinds(self):
        return {
            "hf": checkpoints.hf_set(self.tmp / "hf", 3, 1),
            "dcp": checkpoints.grid_2d(self.tmp / "dcp"),
            "replicas": replicated(self.tmp / "replicas"),
            "single": single(self.tmp / "single"),
        }

    def test_the_first_verify_records_and_the_next_compares_all_of_it(self):
        for kind, folder in self.kinds().items():
            with self.subTest(kind):
                pieces = sum(1 + sum(end > start for start, end in places(s).values()) for s in shards_of(folder))
                first, second = self.verify(folder), self.verify(folder)
                facts = ("checksums", "checksums_recorded", "checksums_compared")
                self.assertEqual([first[key] for key in facts], ["recorded", pieces, 0])
                self.assertEqual([second[key] for key in facts], ["compared", 0, pieces])
                self.assertEqual(first["bytes_read"], sum(s.stat().st_size for s in shards_of(folder)))
                text = tensorfs("verify", folder)
                self.assertIn(f"checksums: {pieces} headers and pieces are as recorded", text.stdout)

    def test_one_flipped_bit_in_any_part_of_any_shard_is_found_and_named(self):
        for kind, folder in self.kinds().items():
            self.verify(folder)
            for shard in shards_of(folder):
                # Its metadata says "pt", and may say anything.
                header = shard.read_bytes().index(b'"pt"') + 1
                flips = [(header, None, "header")]
                for name, (start, end) in places(shard).items():
                    if end > start:
                        flips += [(start, name, "tensor"), (end - 1, name, "tensor")]
                for at, tensor, part in flips:
                    with self.subTest(kind, shard=shard.name, at=at):
                        flip(shard, at, 0)
                        self.assert_differs(folder, shard, at, tensor, part=part, same_mtime=True, more_differ=0)
                        flip(shard, at, 0)
            self.assertEqual(self.verify(folder)["checksums"], "compared")

    def test_a_file_in_the_bintensors_format_has_checksums_too(self):
        folder = bintensors(self.tmp / "bt")
        self.assertEqual(self.verify(folder)["checksums"], "recorded")
        [file] = folder.iterdir()
        data = file.read_bytes()
        small = checkpoints.random_bytes(2, 140)
        for at, tensor in ((data.index(small), "small"), (len(data) - 1, None), (data.index(b"pt"), None)):
            flip(file, at, 0)
            found = self.verify(folder, code=1)
            self.assertEqual(found["class"], "hash_mismatch", found)
            self.assertTrue(found["range"][0] <= at < found["range"][1])
            self.assertIn(tensor, (None, found["tensor"]))
            flip(file, at, 0)
        self.assertEqual(self.verify(folder)["checksums"], "compared")

    def test_a_flipped_bit_of_a_large_tensor_is_named_to_a_mebibyte(self):
        folder = single(self.tmp / "ck", rows=12_000)
        [shard] = shards_of(folder)
        self.verify(folder)
        start, end = places(shard)["big"]
        for at in (start, start + CHUNK - 1, start + CHUNK, start + 3 * CHUNK + 17, end - 1):
            flip(shard, at)
            found = self.assert_differs(folder, shard, at, "big")
            self.assertEqual(found["range"][0], start + (at - start) // CHUNK * CHUNK)
            flip(shard, at)

    def test_what_differs_beside_the_first_is_counted(self):
        folder = checkpoints.hf_set(self.tmp / "hf", 3, 1)
        self.verify(folder)
        first, _, last = shards_of(folder)
        for name in ("layers.1.U8", "layers.1.rows"):
            flip(first, places(first)[name][0])
        for name in ("layers.3.scalar", "layers.3.F32"):
            flip(last, places(last)[name][0])
        found = self.verify(folder, code=1)
        self.assertEqual((found["file"], found["more_differ"]), (str(first), 3))
        self.assertIn("3 more headers and tensors differ", found["error"])

    def test_what_differs_in_several_blobs_of_the_hub_is_counted(self):
        made = checkpoints.hf_set(self.tmp / "hf", 3, 1)
        blobs, snapshot = self.tmp / "models--a--b/blobs", self.tmp / "models--a--b/snapshots/one"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in made.iterdir():
            blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
        self.verify(snapshot)
        first, _, last = shards_of(snapshot)
        flip(first, places(first)["layers.1.rows"][0])
        flip(last, places(last)["layers.3.F32"][0])
        found = self.verify(snapshot, code=1)
        self.assertEqual((found["tensor"], found["more_differ"]), ("layers.1.rows", 1))

    def test_bytes_that_no_tensor_uses_have_checksums_too(self):
        folder = checkpoints.hf_set(self.tmp / "hf", 2, 1)
        first, last = shards_of(folder)
        # A tensor of the first shard stands in the last one as well, and the map says where to read it.
        name = "layers.1.rows"
        tensors = [(n, d, s, data) for n, (d, s, data) in oracle.tensor_bytes(last).items()]
        tensors.append((name, *oracle.tensor_bytes(first)[name][:2], bytes(7 * 33 * 5 * 4)))
        checkpoints.write_shard(last, tensors)
        self.verify(folder)
        at = places(last)[name][0] + 100
        flip(last, at)
        self.assert_differs(folder, last, at, None, part="unused")

    def test_a_file_saved_anew_is_recorded_anew_and_said(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        new = single(self.tmp / "new", seed=5) / shard.name
        os.utime(new, (1e9, 1e9))
        os.replace(new, shard)
        outcome = tensorfs("verify", folder, "--json").json()
        self.assertEqual(outcome["sets"][0]["checksums"], "recorded")
        self.assertIn("is another file than the one whose checksums were recorded", outcome["notes"][0])
        self.assertEqual(self.verify(folder)["checksums"], "compared")
        flip(shard, 5000)
        self.verify(folder, code=1)

    def test_other_bytes_of_the_same_length_and_time_are_a_mismatch(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        new = single(self.tmp / "new", seed=5) / shard.name
        shutil.copystat(shard, new)
        os.replace(new, shard)
        found = self.assert_differs(folder, shard, places(shard)["big"][0], "big", same_mtime=True)
        self.assertIn("its modification time is unchanged since then", found["error"])

    def test_a_file_of_another_length_with_the_old_time_is_a_mismatch(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        new = single(self.tmp / "new", rows=3100) / shard.name
        shutil.copystat(shard, new)
        os.replace(new, shard)
        found = self.verify(folder, code=1)
        self.assertEqual(found["class"], "hash_mismatch")
        self.assertRegex(found["error"], r"it has 124\d{4} bytes, 120\d{4} were recorded")

    def test_a_file_written_to_is_a_mismatch_until_it_is_recorded(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        at = places(shard)["small"][0]
        flip(shard, at)
        os.utime(shard, (1.6e9, 1.6e9))
        found = self.assert_differs(folder, shard, at, "small", same_mtime=False)
        self.assertIn("`tensorfs verify --record`", found["error"])
        # Being refused records nothing.
        self.assert_differs(folder, shard, at, "small")
        outcome = tensorfs("verify", folder, "--json", "--record").json()
        self.assertEqual(outcome["sets"][0]["checksums"], "recorded")
        self.assertIn("tensor `small`", outcome["notes"][0])
        self.assertEqual(self.verify(folder)["checksums"], "compared")
        flip(shard, at)
        self.assert_differs(folder, shard, at, "small", same_mtime=True)

    def test_a_good_copy_put_in_its_place_is_compared(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        shutil.copy2(shard, self.tmp / "good")
        flip(shard, 100_000)
        self.verify(folder, code=1)
        os.replace(self.tmp / "good", shard)
        self.assertEqual(self.verify(folder)["checksums"], "compared")
        # Only touched, it is what it was.
        os.utime(shard)
        self.assertEqual(self.verify(folder)["checksums"], "compared")
        self.assertEqual(self.verify(folder, "--record")["checksums"], "compared")

    def test_replicas_that_differ_are_refused_and_not_recorded(self):
        folder = replicated(self.tmp / "ck")
        shard = shards_of(folder)[1]
        flip(shard, places(shard)["twice"][0] + 40)
        found = self.verify(folder, code=1)
        self.assertEqual((found["class"], found["tensor"]), ("dcp_overlap", "twice"))
        self.assertIn("its byte 40 differs", found["error"])
        flip(shard, places(shard)["twice"][0] + 40)
        found = self.verify(folder)
        self.assertEqual((found["checksums"], found["replicas_compared"]), ("recorded", 1))

    def test_indexes_do_not_hide_what_verify_has_to_see(self):
        folder = single(self.tmp / "ck")
        [shard] = shards_of(folder)
        self.verify(folder)
        self.assert_done(tensorfs("ls", folder))
        at = shard.read_bytes().index(b'"pt"') + 1
        flip(shard, at, 0)
        self.assert_differs(folder, shard, at, None)
        self.assert_done(tensorfs("ls", folder))
        self.assert_differs(folder, shard, at, None)


class Output(VerifyCase):
    def test_sha256_is_what_other_tools_print(self):
        folder = checkpoints.hf_set(self.tmp / "a \\ b", 3, 1)
        wanted = {s.name: hashlib.sha256(s.read_bytes()).hexdigest() for s in shards_of(folder)}
        self.assertEqual(self.verify(folder, "--sha256")["sha256"], wanted)
        self.assertNotIn("sha256", self.verify(folder))
        printed = run(BIN, "verify", "--sha256", folder.name, cwd=self.tmp)
        tool = run("sha256sum", *(f"{folder.name}/{name}" for name in wanted), cwd=self.tmp)
        self.assertEqual(printed.stdout, tool.stdout)
        self.assertIn("checksums: ", printed.stderr)
        checked = subprocess.run(
            ["sha256sum", "-c", "--strict"], input=printed.stdout, cwd=self.tmp, text=True, capture_output=True, timeout=20
        )
        self.assertEqual(checked.returncode, 0, checked.stderr)

    def test_sha256_of_a_single_shard_names_the_files_of_its_set(self):
        folder = checkpoints.hf_set(self.tmp / "hf", 2, 1)
        names = [s.name for s in shards_of(folder)]
        printed = run(BIN, "verify", "--sha256", names[0], cwd=folder)
        self.assertEqual([line.split("  ")[1] for line in printed.stdout.splitlines()], names)

    @unittest.skipUnless(is_root or shutil.which("fusermount3"), "needs fusermount3")
    def test_sha256_of_what_a_mount_shows_names_the_shards_in_the_source(self):
        folder = checkpoints.hf_set(self.tmp / "hf", 2, 1)
        with Mount(folder) as m:
            printed = tensorfs("verify", "--sha256", m.path)
        self.assertEqual(
            [line.split("  ")[1] for line in printed.stdout.splitlines()], [str(s) for s in shards_of(folder)]
        )

    def test_a_store_that_cannot_be_written_is_no_failure(self):
        folder = single(self.tmp / "ck")
        (self.tmp / "file").write_text("")
        environment = {**os.environ, "TENSORFS_INDEX_DIR": str(self.tmp / "file" / "store")}
        for options in ({"env": environment}, {"env": {**os.environ, "TENSORFS_INDEX_DIR": "none"}}):
            found = self.verify(folder, **options)
            self.assertEqual((found["checksums"], found["checksums_recorded"]), ("not_recorded", 0))
            outcome = tensorfs("verify", folder, **options)
            self.assertIn("checksums: not recorded", outcome.stdout)
            self.assertEqual(outcome.stderr, "")
            self.assertIn("checksums are not recorded: ", tensorfs("verify", "-v", folder, **options).stderr)

    def test_a_damaged_record_is_said_and_made_anew(self):
        folder, store = single(self.tmp / "ck"), self.tmp / "store"
        self.verify(folder, "--index-dir", store)
        [sums] = store.glob("*.sums")
        whole = sums.read_bytes()
        for content in (whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b"", b"x" * 5000):
            sums.write_bytes(content)
            outcome = tensorfs("verify", folder, "--json", "--index-dir", store).json()
            self.assertEqual(outcome["sets"][0]["checksums"], "recorded")
            self.assertIn(f"{sums}: not used: it ", outcome["notes"][0])
            self.assertEqual(self.verify(folder, "--index-dir", store)["checksums"], "compared")

    def test_index_tells_of_how_many_shards_there_are_checksums(self):
        folder, store = checkpoints.hf_set(self.tmp / "hf", 3, 1), self.tmp / "store"
        index = lambda: tensorfs("index", folder, "--json", "--index-dir", store).json()["indexes"][0]["checksums"]
        self.assertIsNone(index())
        self.verify(folder, "--index-dir", store)
        self.assertEqual(index()["shards"], 3)
        self.assertGreater(index()["recorded_unix"], 1.7e9)
        self.assertIn("checksums of 3 shards are recorded", tensorfs("index", folder, "--index-dir", store).stdout)

    def test_sixteen_processes_that_verify_at_once_all_succeed(self):
        tree, store = self.tmp / "tree", self.tmp / "store"
        for number in range(3):
            checkpoints.hf_set(tree / str(number), 2, 1, seed=number)
        words = [str(BIN), "verify", "--json", "--index-dir", str(store), str(tree)]
        children = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(16)]
        for child in children:
            out, _ = child.communicate(timeout=120)
            self.assertEqual(child.returncode, 0, out)
            self.assertEqual({s["checksums"] for s in json.loads(out)["sets"]} - {"recorded", "compared"}, set())
        outcome = tensorfs("verify", "--json", "--index-dir", store, tree).json()
        self.assertEqual([s["checksums"] for s in outcome["sets"]], ["compared"] * 3)
        # Nothing is left half-written.
        self.assertEqual({path.suffix for path in store.iterdir()}, {".sums"})

    def test_the_checksums_of_two_sets_in_a_folder_are_kept_together(self):
        folder, store = single(self.tmp / "ck"), self.tmp / "store"
        shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
        self.verify(folder / "model.safetensors", "--index-dir", store)
        outcome = tensorfs("verify", "--json", "--index-dir", store, folder).json()
        self.assertEqual([s["checksums"] for s in outcome["sets"]], ["compared", "recorded"])
        self.assertEqual(len(list(Path(store).glob("*.sums"))), 1)
