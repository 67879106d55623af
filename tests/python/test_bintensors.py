"""Bintensors as a source and as a target, judged by the genuine bintensors and safetensors packages."""

import hashlib
import os
import shutil
import signal
import subprocess

import bintensors
import bintensors.numpy
import numpy as np
import safetensors
import safetensors.numpy

import checkpoints
import oracle
from faults import file_system, slow_file
from manifest import GOOD, by_id
from mounts import BIN, Mount, MountFailed, TestCase, needs_root, run_measured, tensorfs, visible_files, wait_until
from reading import fits_numpy, raw_summary

# Names of the dtypes in both packages when they are given bytes.
NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E5M2": "float8_e5m2", "F8_E4M3": "float8_e4m3fn", "I16": "int16",
    "U16": "uint16", "F16": "float16", "BF16": "bfloat16", "I32": "int32", "U32": "uint32", "F32": "float32",
    "F64": "float64", "I64": "int64", "U64": "uint64",
}


def tensors_of(data):
    """Name -> (dtype, shape, bytes) of the bytes of a safetensors file, and its metadata."""
    header = oracle.read_header(data)
    found = {}
    for name, entry in header.tensors.items():
        start, end = (header.data_start + at for at in entry["data_offsets"])
        found[name] = (entry["dtype"], entry["shape"], data[start:end])
    return found, header.metadata


def by_bintensors(tensors, metadata):
    """The file that the genuine package writes."""
    described = {
        name: {"dtype": NAMES[dtype], "shape": shape, "data": data} for name, (dtype, shape, data) in tensors.items()
    }
    return bytes(bintensors.serialize(described, metadata=metadata or None))


def by_safetensors(tensors, metadata):
    """The genuine package is given addresses, which have to stay valid."""
    held = {name: np.frombuffer(data, np.uint8) for name, (_, _, data) in tensors.items()}
    described = {
        name: safetensors.TensorSpec(
            dtype=NAMES[dtype], shape=shape, data_ptr=held[name].ctypes.data, data_len=len(data)
        )
        for name, (dtype, shape, data) in tensors.items()
    }
    return bytes(safetensors.serialize(described, metadata=metadata or None))


def random_tensors(seed):
    rng = np.random.default_rng(seed)
    found = {}
    for number in range(int(rng.integers(0, 40))):
        dtype = str(rng.choice(list(NAMES)))
        shape = rng.integers(0, 12, int(rng.integers(0, 4))).tolist()
        length = int(np.prod(shape, dtype=np.int64)) * oracle.BITS[dtype] // 8
        name = "".join(rng.choice(list("abz./_\u00e9\U0001f600"), int(rng.integers(0, 300)))) + str(number)
        found[name] = (dtype, shape, rng.integers(0, 256, length, np.uint8).tobytes())
    return found


def read_by_bintensors(path):
    """Name -> (dtype, shape, bytes) by `safe_open` and `load_file`; what numpy cannot hold, by `deserialize`."""
    found = {
        name: (part["dtype"], part["shape"], bytes(part["data"]))
        for name, part in bintensors.deserialize(path.read_bytes())
    }
    with bintensors.safe_open(path, framework="np") as file:
        assert sorted(file.keys()) == sorted(found)
        for name in file.keys():
            if fits_numpy(*found[name][:2]):
                assert file.get_tensor(name).tobytes() == found[name][2], name
        metadata = file.metadata()
    if all(fits_numpy(dtype, shape) for dtype, shape, _ in found.values()):
        assert sorted(bintensors.numpy.load_file(path)) == sorted(found)
    return found, metadata or {}


class Formats(TestCase):
    """One test per good fixture; `for_each_fixture` makes them."""

    def is_shown_and_converted(self, entry):
        whole = entry.whole_file()
        tensors, metadata = tensors_of(whole)
        expected = by_bintensors(tensors, metadata)
        shown = f"{entry.shown.removesuffix('.safetensors')}.bt"
        with Mount(entry.source, "format=bintensors", *entry.options) as m:
            self.assertEqual([f for f in visible_files(m.path) if ".safetensors" in f], [])
            self.assertEqual((m.path / shown).read_bytes(), expected)
            self.assertEqual(read_by_bintensors(m.path / shown), (tensors, metadata))
        there, back = self.tmp / "there.bt", self.tmp / "back.safetensors"
        # If a folder has several sets, one of the files is named.
        source = entry.source / entry.weight_map if "variant" in entry.id else entry.source
        report = self.convert(source, there, "bintensors", *entry.options)
        self.assertEqual(there.read_bytes(), expected)
        self.assertEqual(report["digest"], hashlib.sha1(expected).hexdigest())
        report = self.convert(there, back, "safetensors")
        self.assertEqual(report["sha256"], oracle.sha256(back.read_bytes()))
        self.assertEqual(tensors_of(back.read_bytes()), (tensors, metadata))
        if len(metadata) < 2:
            # The package writes several keys in the order that they happen to have.
            self.assertEqual(back.read_bytes(), by_safetensors(tensors, metadata))

    def is_refused_by_name(self, entry):
        lacking = {name for name, t in entry.tensors.items() if t["dtype"] not in NAMES}
        with self.assertRaises(MountFailed) as caught, Mount(entry.source, "format=bintensors", *entry.options):
            pass
        options = [word for option in entry.options for word in ("-o", option)]
        converted = tensorfs("convert", entry.source, self.tmp, "--to=bintensors", *options, "--json")
        self.assert_refused(converted)
        self.assertEqual(converted.json()["class"], "unknown_dtype")
        for message in (caught.exception.stderr, converted.stderr):
            named = [name for name in lacking if f"`{name}`" in message]
            self.assertTrue(named, message)
            self.assertIn(f"no dtype {entry.tensors[named[0]]['dtype']}", message)
        self.assertEqual(visible_files(self.tmp), [])

    def convert(self, source, out, to, *options):
        words = [word for option in options for word in ("-o", option)]
        outcome = tensorfs("convert", source, out, f"--to={to}", *words, "--json")
        self.assert_done(outcome)
        report = outcome.json()
        self.assertEqual((report["ok"], report["path"], report["bytes"]), (True, str(out), out.stat().st_size))
        return report


def for_each_fixture():
    for entry in GOOD:
        known = all(t["dtype"] in NAMES for t in entry.tensors.values())
        check = Formats.is_shown_and_converted if known else Formats.is_refused_by_name
        claim = "is_shown_and_converted_as_the_package_writes_it" if known else "is_refused_as_bintensors_by_name"
        setattr(Formats, f"test_{entry.id}_{claim}", lambda self, e=entry, c=check: c(self, e))


for_each_fixture()


class Random(TestCase):
    def test_random_files_of_the_package_are_shown_as_the_safetensors_package_reads_them(self):
        folder = self.tmp / "src"
        folder.mkdir()
        made = {}
        for seed in range(12):
            tensors = random_tensors(seed)
            metadata = {"k": "v" * seed} if seed % 2 else {}
            made[f"m{seed}"] = (tensors, metadata)
            (folder / f"m{seed}.bt").write_bytes(by_bintensors(tensors, metadata))
        with Mount(folder) as m, Mount(folder, "format=bintensors") as again:
            self.assertEqual(visible_files(m.path), sorted(f"{name}.safetensors" for name in made))
            for name, (tensors, metadata) in made.items():
                data = (m.path / f"{name}.safetensors").read_bytes()
                self.assertEqual(tensors_of(data), (tensors, metadata))
                with safetensors.safe_open(m.path / f"{name}.safetensors", framework="np") as file:
                    self.assertEqual(sorted(file.keys()), sorted(tensors))
                    self.assertEqual(file.metadata() or {}, metadata)
                stored = (folder / f"{name}.bt").read_bytes()
                self.assertEqual((again.path / f"{name}.bt").read_bytes(), stored)
        self.back_and_forth(folder, made)

    def back_and_forth(self, folder, made):
        for name, (tensors, metadata) in made.items():
            outcome = tensorfs("convert", folder / f"{name}.bt", self.tmp, "--to=safetensors")
            self.assert_done(outcome)
            written = self.tmp / f"{name}.safetensors"
            self.assertEqual(written.read_bytes(), by_safetensors(tensors, metadata))
            self.assertIn(oracle.sha256(written.read_bytes()), outcome.stdout)
            outcome = tensorfs("convert", written, self.tmp, "--to=bintensors")
            self.assert_done(outcome)
            stored = (folder / f"{name}.bt").read_bytes()
            self.assertEqual((self.tmp / f"{name}.bt").read_bytes(), stored)
            self.assertIn(hashlib.sha1(stored).hexdigest(), outcome.stdout)

    def test_the_digest_is_the_one_that_save_with_checksum_returns(self):
        tensors = {"a": np.arange(7, dtype=np.float32), "b": np.ones((3, 2), np.int64)}
        digest, data = bintensors.numpy.save_with_checksum(tensors)
        safetensors.numpy.save_file(tensors, self.tmp / "x.safetensors")
        outcome = tensorfs("convert", self.tmp / "x.safetensors", self.tmp, "--to=bintensors", "--json")
        self.assertEqual((outcome.json()["digest_algorithm"], outcome.json()["digest"]), ("sha1", digest.hex()))
        self.assertEqual((self.tmp / "x.bt").read_bytes(), data)


class Sources(TestCase):
    def test_a_bintensors_file_is_hidden_behind_what_it_is_shown_as_and_can_be_named(self):
        folder = self.copy(by_id("bt_all_dtypes").source.parent, "src")
        (folder / "notes.txt").write_text("kept")
        names = sorted(f"{path.stem}.safetensors" for path in folder.glob("*.bt"))
        with Mount(folder) as m:
            self.assertEqual(visible_files(m.path), sorted([*names, "notes.txt"]))
        with Mount(folder / "one.bt") as m:
            self.assertEqual(visible_files(m.path), ["one.safetensors"])
        with Mount(folder, "layout=original") as m:
            self.assertEqual(visible_files(m.path), visible_files(folder))
            self.assertEqual((m.path / "one.bt").read_bytes(), (folder / "one.bt").read_bytes())

    def test_safetensors_wins_over_bintensors_of_its_stem_and_says_so(self):
        folder = self.copy(by_id("hf_three_shards").source, "src")
        one = by_id("bt_one").source
        # One stands for the set, one for a shard of it, one for itself.
        shard = next(folder.glob("*-00001-of-*.safetensors"))
        for name in ("model.bt", f"{shard.stem}.bt", "other.bt"):
            shutil.copy(one, folder / name)
        with Mount(folder) as m:
            weights = [f for f in visible_files(m.path) if f.endswith(".safetensors")]
            self.assertEqual(weights, ["model.safetensors", "other.safetensors"])
            self.assertNotIn("w", oracle.tensor_bytes(m.path / "model.safetensors"))
            self.assertIn("model.bt is hidden", m.log())
        notes = " ".join(tensorfs("verify", folder, "--json").json()["notes"])
        self.assertIn("model.bt is hidden", notes)
        self.assertIn(f"{shard.stem}.bt is hidden", notes)
        with Mount(folder / "model.bt") as m:
            self.assertEqual(list(oracle.tensor_bytes(m.path / "model.safetensors")), ["w"])

    def test_listings_and_verify_work_on_a_bintensors_file(self):
        one = by_id("bt_one").source
        for command in ("ls", "inspect", "verify"):
            outcome = tensorfs(command, one, "--json")
            self.assert_done(outcome)
            found = outcome.json()["sets"][0]
            self.assertEqual((found["name"], found["kind"]), ("one.safetensors", "bintensors"))
        as_bintensors = tensorfs("ls", one, "-o", "format=bintensors", "--json").json()["sets"][0]
        self.assertEqual((as_bintensors["name"], as_bintensors["size"]), ("one.bt", one.stat().st_size))

    def test_a_bad_bintensors_file_in_a_tree_hides_only_itself(self):
        folder = self.copy(by_id("bt_one").source.parent, "src")
        shutil.copy(by_id("bad_bt_hole").source, folder / "bad.bt")
        with Mount(folder) as m:
            self.assertIn("one.safetensors", visible_files(m.path))
            self.assertNotIn("bad.safetensors", visible_files(m.path))
            text = (m.path / "TENSORFS-ERROR.txt").read_text()
            self.assertIn("bad.bt", text)
            self.assertIn("offset_gap", text)

    def test_a_set_with_a_dtype_that_bintensors_lacks_hides_only_itself(self):
        folder = self.copy(by_id("hf_three_shards").source, "src")
        shutil.copy(by_id("st_all_dtypes").source, folder / "odd.safetensors")
        with Mount(folder, "format=bintensors") as m:
            weights = [f for f in visible_files(m.path) if f.endswith((".bt", ".safetensors", ".index.json"))]
            self.assertEqual(weights, ["model.bt"])
            self.assertRegex((m.path / "TENSORFS-ERROR.txt").read_text(), r"odd\.bt .*unknown_dtype.*odd\.safetensors")

    def test_a_mount_from_the_index_shows_the_same_in_either_format(self):
        folder = self.copy(by_id("hf_three_shards").source, "src")
        shutil.copy(by_id("bt_varints").source, folder / "other.bt")
        # Indexes are only trusted for files that were left alone for a while.
        for path in folder.iterdir():
            os.utime(path, (1_700_000_000, 1_700_000_000))
        for options in ((), ("format=bintensors",)):
            contents = []
            for _ in range(3):
                with Mount(folder, *options) as m:
                    contents.append({name: (m.path / name).read_bytes() for name in visible_files(m.path)})
            self.assertEqual(contents[0], contents[1])
            self.assertEqual(contents[0], contents[2])

    def test_a_changed_bintensors_file_is_never_served_with_other_bytes(self):
        path = self.copy(by_id("bt_varints").source, "m.bt")
        with Mount(self.tmp) as m:
            shown = m.path / "m.safetensors"
            before = raw_summary(shown)
            data = path.read_bytes()
            path.write_bytes(data[:-8])
            with self.assertRaises(OSError):
                shown.read_bytes()
            path.unlink()
            path.write_bytes(data)
            self.assertEqual(wait_until(lambda: self.reads(shown), 20, "the file is back"), before)

    def reads(self, path):
        try:
            return raw_summary(path)
        except OSError:
            return None


class OddMetadata(TestCase):
    """Features that bintensors has and safetensors lacks, or has in another way."""

    def write(self, name, tensors, metadata=None):
        path = self.tmp / name
        described = {key: {"dtype": "uint8", "shape": [len(data)], "data": data} for key, data in tensors.items()}
        path.write_bytes(bytes(bintensors.serialize(described, metadata=metadata)))
        return path

    def test_a_tensor_called_as_the_metadata_of_safetensors_is_refused_there_and_kept_here(self):
        for data in (b"abc", b""):
            source = self.write("a.bt", {"__metadata__": data, "w": b"1234"})
            for outcome in (
                tensorfs("convert", source, self.tmp / "a.safetensors", "--to", "safetensors"),
                tensorfs("ls", source),
            ):
                self.assertEqual(outcome.code, 1)
                self.assertIn("a.bt: tensor `__metadata__`", outcome.stderr)
            self.assertFalse((self.tmp / "a.safetensors").exists())
            with self.assertRaises(MountFailed):
                Mount(source).__enter__()
            self.assert_done(tensorfs("convert", source, self.tmp / "b.bt", "--to", "bintensors", "--force"))
            self.assertEqual((self.tmp / "b.bt").read_bytes(), source.read_bytes())
            with Mount(source, "format=bintensors") as m:
                self.assertEqual((m.path / "a.bt").read_bytes(), source.read_bytes())

    def test_metadata_that_is_empty_or_about_shards_is_kept_as_it_is(self):
        plain_note = {"DCP_SHARDING_INFO": '{"w":{"saved_offsets":[0]}}', "DCP_VERSION": "1.0"}
        for number, metadata in enumerate(({}, {"DCP_SHARDING_INFO": "xx", "format": "pt"}, plain_note)):
            source = self.write(f"{number}.bt", {"w": b"1234"}, metadata)
            again, other = self.tmp / f"again{number}.bt", self.tmp / f"{number}.safetensors"
            outcome = tensorfs("convert", source, again, "--to", "bintensors")
            self.assert_done(outcome)
            self.assertNotIn("unproven", outcome.stdout)
            self.assertEqual(again.read_bytes(), source.read_bytes())
            with Mount(source, "format=bintensors") as m:
                self.assertEqual((m.path / source.name).read_bytes(), source.read_bytes())
            self.assert_done(tensorfs("convert", source, other, "--to", "safetensors"))
            with safetensors.safe_open(other, framework="np") as file:
                self.assertEqual(file.metadata() or {}, metadata)
            if not metadata:
                expected = by_safetensors({"w": ("U8", [4], b"1234")}, None)
                self.assertEqual(len(other.read_bytes()), len(expected) + len('"__metadata__":{},') // 8 * 8)


class Attacks(TestCase):
    def test_huge_counts_with_the_bytes_for_them_take_neither_time_nor_memory(self):
        number = b"\xfc" + (20_000_000).to_bytes(4, "little")
        starts = {"tensors": b"\0", "dimensions": b"\0\1\1a\1", "metadata": b"\1"}
        for what, start in starts.items():
            # The rest of the header is a hole, which reads as zeros.
            path = self.tmp / f"{what}.bt"
            path.write_bytes((100_000_000).to_bytes(8, "little") + start + number)
            os.truncate(path, 100_000_008)
            with self.subTest(what=what):
                outcome, peak = run_measured(BIN, "ls", path, "--json")
                self.assert_refused(outcome)
                self.assertLess(peak, 100_000_000)


class Options(TestCase):
    def test_formats_that_are_none_and_that_cannot_be_are_usage(self):
        one = by_id("bt_one").source
        for option in ("format=gguf", "format=", "format", "format=bintensors,layout=original"):
            self.assert_refused(tensorfs("ls", one, "-o", option), 2)
        self.assertEqual(tensorfs("convert", one, self.tmp).code, 2)
        self.assertEqual(tensorfs("convert", one, self.tmp, "--to=gguf").code, 2)

    def test_a_mount_in_either_format_is_a_source_itself(self):
        source = by_id("hf_three_shards").source
        for option in ("format=safetensors", "format=bintensors"):
            with Mount(source, option) as m:
                for to in ("bintensors", "safetensors"):
                    outcome = tensorfs("convert", m.path, self.tmp, f"--to={to}", "--force")
                    self.assert_done(outcome)
        tensors, metadata = tensors_of(by_id("hf_three_shards").whole_file())
        self.assertEqual(visible_files(self.tmp), ["model.bt", "model.safetensors"])
        self.assertEqual((self.tmp / "model.bt").read_bytes(), by_bintensors(tensors, metadata))


class Targets(TestCase):
    """Where `convert` writes, and what it leaves when it cannot."""

    def setUp(self):
        super().setUp()
        self.out = self.tmp / "out"
        self.out.mkdir()
        self.one = by_id("bt_one").source

    def convert(self, source, out, *words, to="safetensors"):
        return tensorfs("convert", source, out, f"--to={to}", *words)

    def test_a_file_that_is_there_is_replaced_only_when_asked_for(self):
        target = self.out / "one.safetensors"
        target.write_text("mine")
        self.assert_refused(self.convert(self.one, self.out))
        self.assertEqual(target.read_text(), "mine")
        self.assert_done(self.convert(self.one, self.out, "--force"))
        self.assertEqual(list(oracle.tensor_bytes(target)), ["w"])
        self.assertEqual(visible_files(self.out), ["one.safetensors"])
        # A link is replaced, and not what it leads to.
        other = self.out / "link.safetensors"
        other.symlink_to(target)
        self.assert_refused(self.convert(self.one, other))
        self.assert_done(self.convert(by_id("bt_varints").source, other, "--force"))
        self.assertFalse(other.is_symlink())
        self.assertEqual(list(oracle.tensor_bytes(target)), ["w"])

    def test_the_target_is_a_file_or_a_folder_and_its_name_fits_the_format(self):
        self.assert_done(self.convert(self.one, self.out / "named.safetensors"))
        self.assert_done(self.convert(self.one, f"{self.out}/", to="bintensors"))
        self.assertEqual(visible_files(self.out), ["named.safetensors", "one.bt"])
        self.assert_refused(self.convert(self.one, self.out / "wrong.bt"), 2)
        self.assert_refused(self.convert(self.one, self.out / "wrong.safetensors", to="bintensors"), 2)
        self.assert_refused(self.convert(self.one, f"{self.out}/none/"))
        self.assert_refused(self.convert(self.one, self.out / "none/x.safetensors"))
        self.assert_refused(self.convert(self.one, self.out / "one.bt/x.safetensors"))
        self.assertEqual(visible_files(self.out), ["named.safetensors", "one.bt"])

    def test_the_new_file_has_the_permissions_of_the_user_and_not_of_the_package(self):
        self.assert_done(self.convert(self.one, self.out))
        self.assertEqual((self.out / "one.safetensors").stat().st_mode & 0o777, 0o666 & ~current_umask())

    def test_several_checkpoints_and_bad_ones_are_refused_and_leave_nothing(self):
        self.assert_refused(self.convert(self.one.parent, self.out), 2)
        outcome = self.convert(by_id("bad_bt_overlap").source, self.out, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "offset_overlap")
        self.assert_refused(self.convert(by_id("bad_dcp_hole_middle").source, self.out, to="bintensors"))
        self.assertEqual(visible_files(self.out), [])

    @needs_root
    def test_a_full_disk_leaves_nothing_and_says_so(self):
        source = checkpoints.hf_set(self.tmp / "src", megabytes=12)
        with file_system("tmpfs", self.tmp / "small", "-o", "size=4m") as small:
            for words in ((), ("--force",)):
                outcome = self.convert(source, small, *words, to="bintensors")
                self.assert_refused(outcome)
                self.assertIn("No space left", outcome.stderr)
                self.assertEqual(visible_files(small), [])

    def test_a_conversion_that_is_stopped_or_killed_leaves_nothing(self):
        with slow_file(self.tmp / "below") as source:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                words = [BIN, "convert", source, self.out, "--to=bintensors", "--progress=always"]
                process = subprocess.Popen(words, stderr=subprocess.PIPE)
                self.assertTrue(process.stderr.read(1), "no progress")
                process.send_signal(number)
                process.stderr.close()
                process.wait(60)
                self.assertEqual(process.returncode, -number)
                # A killed run leaves its lock, which the next one takes over.
                locks = [".large.bt.tensorfs-partial/lock"] if number == signal.SIGKILL else []
                self.assertEqual(visible_files(self.out), locks)

    def test_neither_files_of_the_source_nor_what_is_no_file_is_replaced(self):
        source = self.tmp / "hf"
        checkpoints.hf_set(source)
        before = {path.name: path.read_bytes() for path in source.iterdir()}
        for name in ("model-00002-of-00003.safetensors", "model.safetensors.index.json"):
            outcome = tensorfs("convert", source, source / name, "--to", "safetensors", "--force")
            self.assertEqual(outcome.code, 1)
            self.assertIn("is a file of the source", outcome.stderr)
        self.assertEqual({path.name: path.read_bytes() for path in source.iterdir()}, before)
        fifo = self.tmp / "fifo"
        os.mkfifo(fifo)
        outcome = tensorfs("convert", source, fifo, "--to", "safetensors", "--force")
        self.assertEqual(outcome.code, 1)
        self.assertIn("neither a regular file nor a link", outcome.stderr)
        self.assertTrue(fifo.is_fifo())
        link = self.tmp / "link"
        link.symlink_to(fifo)
        self.assertEqual(tensorfs("convert", source, link, "--to", "safetensors", "--force").code, 1)
        self.assertTrue(link.is_symlink())

    def test_a_file_that_is_replaced_keeps_its_mode_and_may_be_the_only_one_of_its_source(self):
        path = self.tmp / "a.safetensors"
        safetensors.numpy.save_file({"w": np.arange(5, dtype=np.int16)}, path, metadata={"a": "b"})
        before = path.read_bytes()
        path.chmod(0o600)
        self.assert_done(tensorfs("convert", path, path, "--to", "safetensors", "--force"))
        self.assertEqual((path.read_bytes(), path.stat().st_mode & 0o777), (before, 0o600))


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
