"""`tensorfs heat`, which says what was read of a mount, and `tensorfs warm`, which reads it again."""

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys

from safetensors import safe_open

import checkpoints
import oracle
from checkpoints import hf_set
from mounts import Mount, TestCase, needs_root, tensorfs, wait_until

FILE = "model.safetensors"
READ = "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); os.pread(fd, int(sys.argv[3]), int(sys.argv[2]))"


LIBC = ctypes.CDLL(None, use_errno=True)


def drop_from_page_cache(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_pages(path):
    """How many pages of a file the page cache holds, and how many it has."""
    length = os.stat(path).st_size
    with open(path, "rb") as file, mmap.mmap(file.fileno(), length, mmap.MAP_PRIVATE) as mapped:
        pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(length), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in pages), len(pages)


def heat_of(path, **kwargs):
    outcome = tensorfs("heat", path, "--json", **kwargs)
    return outcome.json()


def file_of(heat, name=FILE):
    (found,) = (file for file in heat["files"] if file["path"] == name)
    return found


def places(path):
    """Name -> first and last byte of each tensor of a file, by its header."""
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    return {name: tuple(start + at for at in entry["data_offsets"]) for name, entry in header.items()}


class Heat(TestCase):
    def setUp(self):
        super().setUp()
        self.source = hf_set(self.tmp / "source", megabytes=12)

    def mount(self, *options, **kwargs):
        # No readahead of the kernel: only what the test reads is read.
        return Mount(self.source, "readahead=0", *options, **kwargs)

    @needs_root
    def test_the_tensors_that_a_program_reads_are_counted_and_others_are_not(self):
        with self.mount() as m:
            found = places(m.path / FILE)
            before = file_of(heat_of(m.path))
            name, (start, end) = max(found.items(), key=lambda item: item[1][1] - item[1][0])
            process = subprocess.run([sys.executable, "-S", "-E", "-c", READ, m.path / FILE, str(start), str(end - start)])
            self.assertEqual(process.returncode, 0)
            heat = heat_of(m.path)
            rows = {row["name"]: row for row in file_of(heat)["tensors"]}
            self.assertEqual((rows[name]["offset"], rows[name]["len"]), (start, end - start))
            # The daemon puts a part into the page cache by itself, once single pages are requested.
            self.assertGreater(rows[name]["bytes"], 0)
            self.assertLessEqual(rows[name]["bytes"], end - start)
            # Whole pages are read, which the neighbours have a part of.
            seen_before = {row["name"] for row in before["tensors"]}
            new = set(rows) - seen_before - {name}
            for other in new:
                self.assertLess(rows[other]["bytes"], 2 * 4096, other)
            self.assertLess(len(rows), len(found))
            (by,) = rows[name]["by"]
            reader = heat["readers"][by]
            self.assertEqual(reader["uid"], os.geteuid())
            self.assertTrue(reader["program"].startswith("python"), reader)
            self.assertEqual(file_of(heat)["tensors_total"], len(found))

    def test_a_mount_that_nobody_read_has_no_heat_and_says_so(self):
        with self.mount() as m:
            self.assertEqual(heat_of(m.path)["files"], [])
            self.assertIn("nothing was read", tensorfs("heat", m.path).stdout)

    def test_people_see_the_tensors_and_a_limit_holds(self):
        with self.mount() as m:
            (m.path / FILE).read_bytes()
            text = tensorfs("heat", m.path, "-n", "2").stdout
            self.assertEqual(text.count("of user"), 2 + 1, text)
            self.assertIn("more; see --lines", text)

    def test_what_is_no_mount_is_refused_in_one_line(self):
        outcome = tensorfs("heat", self.tmp)
        self.assertEqual((outcome.code, outcome.stderr), (1, f"tensorfs: {self.tmp}: not a tensorfs mount\n"))

    def test_a_replaced_model_has_heat_of_its_new_version_only(self):
        with self.mount() as m:
            (m.path / FILE).read_bytes()
            old = file_of(heat_of(m.path))
            new = hf_set(self.tmp / "new", megabytes=12, seed=2)
            for path in new.iterdir():
                os.replace(path, self.source / path.name)

            def is_new():
                (m.path / FILE).read_bytes()
                files = [file for file in heat_of(m.path)["files"] if file["path"] == FILE]
                return any(file["version"] != old["version"] and file["bytes"] > 0 for file in files)

            wait_until(is_new, 30, "heat of the new version")

    @needs_root
    def test_a_checkpoint_that_left_and_came_back_keeps_its_heat(self):
        store, away, name = self.tmp / "store", self.tmp / "away", f"model/{FILE}"
        store.mkdir()
        self.source.rename(store / "model")
        with Mount(store, "readahead=0", "watch=auto") as m:
            (m.path / name).read_bytes()
            before = file_of(heat_of(m.path), name)
            (store / "model").rename(away)
            wait_until(lambda: not (m.path / name).exists(), 30, "the checkpoint vanishes")
            away.rename(store / "model")
            wait_until((m.path / name).exists, 30, "the checkpoint is back")
            (m.path / name).read_bytes()
            after = file_of(heat_of(m.path), name)
            self.assertEqual(after["version"], before["version"])
            self.assertGreater(after["opens"], before["opens"])
            self.assertGreaterEqual(after["bytes"], before["bytes"])
            self.assertEqual(after["tensors_total"], before["tensors_total"])


class Warm(TestCase):
    def setUp(self):
        super().setUp()
        self.source = hf_set(self.tmp / "source", megabytes=12)
        self.shards = sorted(self.source.glob("*.safetensors"))

    def cold(self):
        for path in self.shards:
            drop_from_page_cache(path)

    def test_a_source_is_read_into_the_page_cache(self):
        self.cold()
        outcome = tensorfs("warm", self.source, "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["bytes"], sum(path.stat().st_size for path in self.shards))
        for path in self.shards:
            cached, total = cached_pages(path)
            self.assertEqual(cached, total, path)

    # The whole shards were read.
    def test_of_a_view_only_the_bytes_of_its_tensors_are_read(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        shards = sorted(source.glob("*.safetensors"))
        whole = sum(path.stat().st_size for path in shards)
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nfrom = 'embed'\ncut = 0\n")
        for options, tensors in (("include=norm", {"norm": 1}), ("exclude=embed", {"norm": 1, "bytes": 1}), (f"tp=8,rank=3,exclude=bytes,tp-rules={rules}", {"embed": 8, "norm": 1})):
            lengths = {tensor.name: len(tensor.data) for tensor in oracle.tensors_of(source)[0]}
            wanted = sum(lengths[name] // part for name, part in tensors.items())
            outcome = tensorfs("warm", source, "--json", "-o", options)
            self.assert_done(outcome)
            # With headers, and with short gaps between tensors.
            least, most = wanted * 7 // 8, wanted + 16384 * len(shards) + (65536 if "tp=" in options else 16384) * len(shards)
            self.assertTrue(least <= outcome.json()["bytes"] <= min(most, whole), (options, outcome.json()["bytes"], wanted, whole))

    def test_rows_of_a_rank_that_lie_apart_are_read_without_the_rest(self):
        source = self.tmp / "wide"
        source.mkdir()
        rows, columns = 16, 1 << 18
        checkpoints.write_shard(source / FILE, [("w", "F32", [rows, columns], bytes(4 * rows * columns))])
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nfrom = 'w'\ncut = 1\n")
        drop_from_page_cache(source / FILE)
        outcome = tensorfs("warm", source, "--json", "-o", f"tp=4,rank=1,tp-rules={rules}")
        self.assert_done(outcome)
        header = (source / FILE).stat().st_size - 4 * rows * columns
        self.assertEqual(outcome.json()["bytes"], rows * columns + header)

    def test_options_of_a_view_are_refused_on_a_mount_which_has_its_own(self):
        with Mount(self.source) as m:
            outcome = tensorfs("warm", m.path, "-o", "include=*")
            self.assert_refused(outcome, 2)
            self.assert_one_line(outcome)
            self.assertIn("lies on a mount, which has options of its own", outcome.stderr)

    def test_the_files_of_a_mount_are_read_through_the_mount(self):
        with Mount(self.source) as m:
            outcome = tensorfs("warm", m.path, "--json")
            self.assert_done(outcome)
            self.assertTrue(outcome.json()["mount"])
            cached, total = cached_pages(m.path / FILE)
            self.assertEqual(cached, total)
            self.assertEqual(file_of(heat_of(m.path))["bytes"] // 4096 * 4096, (m.path / FILE).stat().st_size // 4096 * 4096)

    @needs_root
    def test_the_tensors_of_a_heat_are_read_and_no_others(self):
        file = self.tmp / "heat.json"
        with Mount(self.source, "readahead=0") as m:
            found = places(m.path / FILE)
            name, (start, end) = max(found.items(), key=lambda item: item[1][1] - item[1][0])
            with safe_open(m.path / FILE, "np") as opened:
                opened.get_tensor(name)
            outcome = tensorfs("heat", m.path, "--json")
            heat = outcome.json()
            file_of(heat)["tensors"] = [row for row in file_of(heat)["tensors"] if row["name"] == name]
            file.write_text(json.dumps(heat))
        self.cold()
        outcome = tensorfs("warm", self.source, "--heat", file, "--json")
        self.assert_done(outcome)
        self.assertEqual((outcome.json()["bytes"], outcome.json()["tensors_missing"]), (end - start, 0))
        with Mount(self.source, "readahead=0") as m:
            outcome = tensorfs("warm", m.path, "--heat", file, "--json")
            self.assert_done(outcome)
            # The header of the file comes with it, and what lies between.
            self.assertGreaterEqual(outcome.json()["bytes"], end - start)
            self.assertLess(outcome.json()["bytes"], (m.path / FILE).stat().st_size)
            self.assertIn(name, {row["name"] for row in file_of(heat_of(m.path))["tensors"]})

    # The whole of a large tensor was read, although the kernel's read-ahead had touched its beginning only.
    def test_of_a_large_tensor_only_the_parts_that_were_read_are_read_again(self):
        length, small = 256 << 20, 1 << 20
        sources = {}
        for name, parts in (("one", 1), ("rows", 2)):
            sources[name] = self.tmp / name
            sources[name].mkdir()
            for rank in range(parts):
                shape = [64 // parts, length // 64]
                path = sources[name] / (FILE if parts == 1 else f"shard-0000{rank + 1}-model-00001-of-00001.safetensors")
                info = {"large": {"saved_offsets": [rank * shape[0], 0]}, "small": {"saved_offsets": [0]}}
                metadata = {"__metadata__": {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"}} if parts > 1 else {}
                large = {"dtype": "U8", "shape": shape, "data_offsets": [small, small + length // parts]}
                text = json.dumps({**metadata, "small": {"dtype": "U8", "shape": [small], "data_offsets": [0, small]}, "large": large})
                path.write_bytes(len(text).to_bytes(8, "little") + text.encode())
                os.truncate(path, path.stat().st_size + small + length // parts)
        part = length // 64
        file = self.tmp / "heat.json"
        with Mount(sources["rows"]) as m:
            start, _ = places(m.path / FILE)["large"]
            with open(m.path / FILE, "rb", buffering=0) as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for at in (0, length // 2 + part):
                    os.pread(opened.fileno(), 4096, start + at)
            file.write_text(tensorfs("heat", m.path, "--json").stdout)
            (row,) = (row for row in file_of(json.loads(file.read_text()))["tensors"] if row["name"] == "large")
            ranges = row["ranges"]
            self.assertTrue(all(0 <= a < b <= length for a, b in ranges) and len(ranges) >= 2, ranges)
            self.assertTrue(all(any(a <= at < b for a, b in ranges) for at in (0, length // 2 + part)), ranges)
            total = sum(b - a for a, b in ranges)
            self.assertLess(total, length // 8)
            outcome = tensorfs("warm", m.path, "--heat", file, "--json")
            self.assert_done(outcome)
            self.assertTrue(total <= outcome.json()["bytes"] <= total + small + 65536, outcome.json())
        for name, options in (("one", ()), ("rows", ()), ("one", ("-o", "include=*"))):
            outcome = tensorfs("warm", sources[name], "--heat", file, "--json", *options)
            self.assert_done(outcome)
            self.assertTrue(total <= outcome.json()["bytes"] <= total + small + 65536, (name, outcome.json()))
        # The whole tensor is read if the list has no parts of it, or another length.
        heat = json.loads(file.read_text())
        for change in (lambda row: row.update(len=row["len"] + 1), lambda row: row.pop("ranges", None)):
            for row in file_of(heat)["tensors"]:
                change(row)
            file.write_text(json.dumps(heat))
            outcome = tensorfs("warm", sources["one"], "--heat", file, "--json")
            self.assert_done(outcome)
            self.assertGreaterEqual(outcome.json()["bytes"], length)

    # The exit status was 0, and nothing was named.
    def test_a_checkpoint_that_a_mount_refuses_is_told_and_fails(self):
        tree = self.tmp / "tree"
        (tree / "good").mkdir(parents=True)
        (tree / "good" / FILE).write_bytes(self.shards[0].read_bytes())
        (tree / "bad").mkdir()
        (tree / "bad" / FILE).write_bytes(b"garbage, no header")
        with Mount(tree) as m:
            reason = (m.path / "bad/TENSORFS-ERROR.txt").read_text().strip()
            for path, files in ((m.path, 1), (m.path / "bad", 0)):
                outcome = tensorfs("warm", path)
                self.assert_refused(outcome)
                self.assertEqual(outcome.stderr.strip(), f"tensorfs: {m.path / 'bad'}: {reason}")
                self.assertEqual("of 1 file" in outcome.stdout, files == 1, outcome.stdout)
                outcome = tensorfs("warm", path, "--json")
                self.assertEqual(outcome.code, 1)
                report = outcome.json()
                self.assertEqual((report["ok"], report["files"], report["error"]), (False, files, f"{m.path / 'bad'}: {reason}"))
            self.assert_done(tensorfs("warm", m.path / "good"))
            # The copy of a mount has such a file, too.
            shutil.copytree(m.path / "good", self.tmp / "copy")
            shutil.copy(m.path / "bad/TENSORFS-ERROR.txt", self.tmp / "copy")
        with Mount(self.tmp / "copy") as m:
            self.assertIn("TENSORFS-ERROR.txt", os.listdir(m.path))
            self.assert_done(tensorfs("warm", m.path))

    def test_a_heat_names_the_files_of_a_layout(self):
        source = checkpoints.numbered_set(self.tmp / "set", 1)
        file = self.tmp / "heat.json"
        name = "model-00001-of-00002.safetensors"
        file.write_text(json.dumps({"files": [{"path": name, "bytes": 9, "tensors": [{"name": "t1"}]}]}))
        read = [tensorfs("warm", source, "--heat", file, "--json", *words).json() for words in ((), ("-o", "layout=shards=2"))]
        self.assertEqual(read[0]["bytes"], 0)
        self.assertGreater(read[1]["bytes"], 0)
        # Without a heat they change nothing.
        for option in ("layout=shards=2", "format=bintensors"):
            outcome = tensorfs("warm", source, "-o", option)
            self.assert_refused(outcome, 2)
            self.assertIn(f"option {option}: warm reads tensors", outcome.stderr)

    def test_a_heat_of_other_tensors_is_told(self):
        heat = {"files": [{"path": FILE, "bytes": 1, "tensors": [{"name": "gone"}]}]}
        (self.tmp / "heat.json").write_text(json.dumps(heat))
        outcome = tensorfs("warm", self.source, "--heat", self.tmp / "heat.json")
        self.assert_done(outcome)
        self.assertIn("1 tensor of the heat", outcome.stderr)

    def test_a_file_that_is_no_heat_is_refused_in_one_line(self):
        for text in (
            "", "{}", "[1]", '{"files": 3}', '{"files": []}', '{"files": [{"path": 3}]}',
            '{"files": [{"path": "a", "bytes": 1, "tensors": [{"name": "t", "len": 9, "ranges": [[1]]}]}]}',
        ):
            with self.subTest(text):
                (self.tmp / "heat.json").write_text(text)
                outcome = tensorfs("warm", self.source, "--heat", self.tmp / "heat.json")
                self.assertEqual(outcome.code, 1)
                self.assertEqual(len(outcome.stderr.splitlines()), 1)
                self.assertIn("heat.json", outcome.stderr)

    def test_a_heat_leads_to_no_file_outside_of_the_mount(self):
        secret = self.tmp / "secret"
        secret.write_bytes(bytes(100_000))
        drop_from_page_cache(secret)
        heat = {"files": [{"path": p, "bytes": 1} for p in (str(secret), "../secret", "../../../../../../etc/passwd")]}
        (self.tmp / "heat.json").write_text(json.dumps(heat))
        with Mount(self.source) as m:
            outcome = tensorfs("warm", m.path, "--heat", self.tmp / "heat.json", "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["files"], 0)

    def test_a_source_that_is_refused_is_told_and_fails(self):
        broken = self.tmp / "tree" / "broken" / FILE
        broken.parent.mkdir(parents=True)
        broken.write_bytes(b"garbage, no header")
        expected = tensorfs("ls", broken)
        for words in ((), ("--json",)):
            outcome = tensorfs("warm", broken, *words)
            self.assert_refused(outcome)
            self.assertEqual(outcome.stderr, expected.stderr)
            self.assertNotIn("warmed", outcome.stdout)
        self.assertEqual((outcome.json()["ok"], outcome.json()["class"]), (False, tensorfs("ls", broken, "--json").json()["class"]))
        # The other checkpoints of a tree are read.
        shutil.copytree(self.source, broken.parent.parent / "whole")
        outcome = tensorfs("warm", broken.parent.parent, "--json")
        self.assert_refused(outcome)
        self.assertIn("broken", outcome.stderr)
        found = outcome.json()
        self.assertEqual((found["ok"], found["bytes"]), (False, sum(path.stat().st_size for path in self.shards)))
        self.assertIn(found["error"], outcome.stderr)

    def test_a_source_that_is_not_there_is_refused_in_one_line(self):
        outcome = tensorfs("warm", self.tmp / "gone")
        self.assertEqual(outcome.code, 1)
        self.assertEqual(len(outcome.stderr.splitlines()), 1)
