"""Tensorizer files as sources: which files form a set, what is shown of them, and what is refused."""

import dataclasses
import itertools
import mmap
import os
import shutil
import struct
import zlib

import numpy as np
import safetensors.numpy

import checkpoints
import oracle
from manifest import by_id
from mounts import Mount, MountFailed, TestCase, tensorfs, visible_files, wait_until
from reading import raw_summary, summary
from tensorizer_files import Stored, file_of, header_of, write_long


def numbered(folder, count, dtype="BF16"):
    """A set of numbered files; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {
        f"layer.{number}.weight": (dtype, [8, 32], checkpoints.random_bytes(number, 8 * 32 * 2))
        for number in range(6)
    }
    names = list(made)
    for number in range(count):
        own = [Stored.of(name, *made[name]) for name in names[number::count]]
        (folder / f"model-{number + 1:05}-of-{count:05}.tensors").write_bytes(file_of(own))
    return made


class Sets(TestCase):
    def test_a_file_is_hidden_behind_what_it_is_shown_as_and_can_be_named(self):
        folder = self.copy(by_id("tz_module").source.parent, "src")
        (folder / "notes.txt").write_text("kept")
        names = sorted(f"{path.stem}.safetensors" for path in folder.glob("*.tensors"))
        with Mount(folder) as m:
            self.assertEqual(visible_files(m.path), sorted([*names, "notes.txt"]))
        with Mount(folder / "module.tensors") as m:
            self.assertEqual(visible_files(m.path), ["module.safetensors"])
        with Mount(folder, "layout=original") as m:
            self.assertEqual(visible_files(m.path), visible_files(folder))
            self.assertEqual((m.path / "module.tensors").read_bytes(), (folder / "module.tensors").read_bytes())

    def test_the_files_of_ranks_are_checkpoints_of_their_own(self):
        folder = self.tmp / "src"
        folder.mkdir()
        parts = {number: checkpoints.random_bytes(number, 64) for number in range(3)}
        for number, data in parts.items():
            stored = Stored.of("w", "F32", [16], data)
            (folder / f"model-rank-{number:03}.tensors").write_bytes(file_of([stored]))
        with Mount(folder) as m:
            self.assertEqual(visible_files(m.path), [f"model-rank-{number:03}.safetensors" for number in parts])
            for number, data in parts.items():
                shown = oracle.tensor_bytes(m.path / f"model-rank-{number:03}.safetensors")
                self.assertEqual(shown, {"w": ("F32", [16], data)})

    def test_numbered_files_are_one_checkpoint_and_lost_ones_are_noticed(self):
        folder = self.tmp / "src"
        made = numbered(folder, 3)
        for _ in range(2):
            with Mount(folder) as m:
                self.assertEqual(visible_files(m.path), ["model.safetensors"])
                self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors"), made)
        found = tensorfs("verify", folder, "--json").json()["sets"][0]
        self.assertEqual((found["kind"], found["tensors"]), ("numbered", len(made)))
        with Mount(folder, "layout=shards=3") as m:
            parts = [oracle.tensor_bytes(m.path / name) for name in visible_files(m.path) if "-of-" in name]
            self.assertEqual({name: tensor for part in parts for name, tensor in part.items()}, made)
        (folder / "model-00002-of-00003.tensors").unlink()
        outcome = tensorfs("verify", folder, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "shard_missing")

    def test_numbered_files_that_hold_one_name_twice_are_refused(self):
        folder = self.tmp / "src"
        folder.mkdir()
        for number in (1, 2):
            stored = Stored.of("w", "U8", [4], bytes([number] * 4))
            (folder / f"m-0000{number}-of-00002.tensors").write_bytes(file_of([stored]))
        outcome = tensorfs("verify", folder, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "duplicate_tensor")

    def test_safetensors_and_bintensors_of_the_stem_go_first_and_the_log_says_so(self):
        folder = self.copy(by_id("hf_three_shards").source, "src")
        one = by_id("tz_module").source
        shard = next(folder.glob("*-00001-of-*.safetensors"))
        shutil.copy(by_id("bt_one").source, folder / "both.bt")
        for name in ("model.tensors", f"{shard.stem[:5]}.tensors", "both.tensors", "other.tensors"):
            shutil.copy(one, folder / name)
        with Mount(folder) as m:
            weights = [f for f in visible_files(m.path) if f.endswith(".safetensors")]
            self.assertEqual(weights, ["both.safetensors", "model.safetensors", "other.safetensors"])
            self.assertNotIn(".w", oracle.tensor_bytes(m.path / "model.safetensors"))
            self.assertIn("w", oracle.tensor_bytes(m.path / "both.safetensors"))
            self.assertIn("model.tensors is hidden", m.log())
        notes = " ".join(tensorfs("verify", folder, "--json").json()["notes"])
        self.assertIn("both.tensors is hidden (safetensors goes before bintensors, and both before tensorizer)", notes)
        with Mount(folder / "both.tensors") as m:
            self.assertIn(".w", oracle.tensor_bytes(m.path / "both.safetensors"))

    def test_a_file_of_another_name_is_known_by_its_first_bytes(self):
        made = by_id("tz_module")
        for name in ("0123abcd", "weights.bin"):
            blob = self.copy(made.source, name)
            with Mount(blob) as m:
                self.assertEqual(visible_files(m.path), [f"{name}.safetensors"])
                shown = raw_summary(m.path / f"{name}.safetensors")
            self.assertEqual(shown, summary(made.tensors))

    def test_a_file_with_the_name_of_another_format_is_refused(self):
        for name in ("m.safetensors", "m-00001-of-00001.safetensors", "m.bt"):
            folder = self.tmp / f"as_{name}"
            folder.mkdir()
            shutil.copy(by_id("tz_module").source, folder / name)
            outcome = tensorfs("verify", folder, "--json")
            self.assert_refused(outcome)
            self.assertEqual(outcome.json()["class"], "header_decode")
            self.assertIn("is a tensorizer file by its first bytes; call it `*.tensors`", outcome.stderr)
        path = self.tmp / "s.tensors"
        safetensors.numpy.save_file({"w": np.zeros(3)}, path)
        outcome = tensorfs("verify", path)
        self.assert_refused(outcome)
        self.assertIn("does not begin with `|TZR|`", outcome.stderr)

    def test_a_second_file_in_the_place_of_the_end_mark_is_not_shown_and_a_note_says_so(self):
        made = {"w": ("F32", [16], checkpoints.random_bytes(1, 64)), "b": ("U8", [3], b"abc")}
        other = {"w": ("F32", [16], checkpoints.random_bytes(2, 64))}
        first = file_of([Stored.of(name, *tensor) for name, tensor in made.items()], end=b"")
        second = file_of([Stored.of(name, *tensor) for name, tensor in other.items()], start=len(first))
        folder = self.tmp / "src"
        folder.mkdir()
        path = folder / "two.tensors"
        path.write_bytes(first + second)
        note = f"two.tensors: another tensorizer file begins at its byte {len(first)}, which is not shown"
        # The second time it is read from the index and its recorded checksums.
        for _ in range(2):
            with Mount(folder) as m:
                self.assertEqual(oracle.tensor_bytes(m.path / "two.safetensors"), made)
                self.assertIn(note, m.log())
            outcome = tensorfs("verify", path, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["sets"][0]["header_hashes_compared"], 2)
            for described in (outcome, tensorfs("ls", path, "--json"), tensorfs("ls", folder, "--json")):
                self.assertIn(note, " ".join(described.json()["notes"]))
        alone = self.tmp / "alone.tensors"
        self.assert_done(tensorfs("convert", path, alone))
        self.assertEqual(alone.read_bytes()[-8:], bytes(8))
        self.assert_done(tensorfs("diff", path, alone))
        self.assertEqual(len(tensorfs("ls", path, "--json").json()["sets"][0]["tensors"]), 2)
        with open(path, "r+b") as file:
            file.seek(len(first))
            file.write(b"|TZX|")
        outcome = tensorfs("verify", path, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "data_trailing")

    def test_a_bad_file_in_a_tree_hides_only_itself(self):
        folder = self.copy(by_id("tz_module").source.parent, "src")
        shutil.copy(by_id("bad_tz_shape_differs").source, folder / "bad.tensors")
        with Mount(folder) as m:
            self.assertIn("module.safetensors", visible_files(m.path))
            self.assertNotIn("bad.safetensors", visible_files(m.path))
            text = (m.path / "TENSORFS-ERROR.txt").read_text()
            self.assertIn("bad.tensors", text)
            self.assertIn("header_decode", text)

    def test_an_encrypted_file_is_refused_and_none_of_its_bytes_is_shown(self):
        folder = self.tmp / "src"
        folder.mkdir()
        shutil.copy(by_id("bad_tz_encrypted_v3").source, folder / "secret.tensors")
        with self.assertRaises(MountFailed) as caught, Mount(folder):
            pass
        self.assertIn("secret.tensors: is encrypted", caught.exception.stderr)
        for command in ("ls", "inspect", "verify"):
            self.assert_refused(tensorfs(command, folder))
        self.assert_refused(tensorfs("consolidate", folder, self.tmp / "out"))
        self.assertFalse((self.tmp / "out").exists())


class Long(TestCase):
    def test_a_tensor_longer_than_32_bits_can_say_is_shown_and_the_one_behind_it(self):
        length = 5 * 2**30 + 3
        last = write_long(self.tmp / "long.tensors", length)
        with Mount(self.tmp / "long.tensors") as m:
            path = m.path / "long.safetensors"
            header = oracle.read_header_of(path)
            self.assertEqual(header.tensors["long"]["shape"], [length])
            with open(path, "rb") as file:
                for name, offset, expected in (("last", 0, last), ("long", length - 100, bytes(100)), ("long", 2**32, b"\0")):
                    file.seek(header.data_start + header.tensors[name]["data_offsets"][0] + offset)
                    self.assertEqual(file.read(len(expected)), expected)
        # A tensor of the length that is left after 32 bits is another one.
        cut = self.tmp / "cut.tensors"
        write_long(cut, length)
        os.truncate(cut, cut.stat().st_size - 2**32)
        self.assert_refused(tensorfs("verify", cut))


class Meta(TestCase):
    """Tensors of which a file has the shape only."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(3)
        self.arrays = {
            "a": rng.random((6, 10)).astype(np.float32),
            "m": np.zeros((4, 10), np.float32),
            "n": np.zeros((6, 5), np.float32),
            "big": np.zeros((1500, 1001), np.float16),
            "z": rng.random((6, 3)).astype(np.float32),
        }
        dtypes = {"float32": "F32", "float16": "F16"}
        self.file = self.tmp / "m.tensors"
        self.file.write_bytes(file_of([
            Stored.of(name, dtypes[array.dtype.name], array.shape, array.tobytes() if array.any() else b"")
            for name, array in self.arrays.items()
        ], version=4))

    def shown(self, *options):
        with Mount(self.file, *options) as m:
            return {
                name: np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[dtype]).reshape(shape)
                for name, (dtype, shape, data) in oracle.tensor_bytes(m.path / "m.safetensors").items()
            }

    def check(self, found, expected):
        self.assertEqual(set(found), set(expected))
        for name, array in expected.items():
            self.assertEqual(found[name].dtype, array.dtype, name)
            np.testing.assert_array_equal(found[name], array, name)

    def test_they_are_zeros_in_a_mount_and_in_its_views(self):
        for options in ((), ("direct=never",), ("io=pread",)):
            self.check(self.shown(*options), self.arrays)
        rules = self.tmp / "rules.toml"
        rules.write_text(
            "[[fuse]]\nfrom = ['a', 'n', 'z']\nto = 'wide'\ndim = 1\n"
            "[[split]]\nfrom = 'm'\nto = ['m.0', 'm.1']\ndim = 1\nsizes = [3, 7]\n"
        )
        wide = np.concatenate([self.arrays[name] for name in "anz"], 1)
        zeros = {"m.0": np.zeros((4, 3), np.float32), "m.1": np.zeros((4, 7), np.float32), "big": self.arrays["big"]}
        self.check(self.shown(f"rename={rules}"), {"wide": wide, **zeros})
        half = {name: array.astype(np.float16) for name, array in {"wide": wide, **zeros}.items()}
        self.check(self.shown(f"rename={rules}", "dtype=f16"), half)

    def test_every_command_takes_them(self):
        for out, arguments in (("v.st", ["--to", "safetensors"]), ("v.bt", ["--to", "bintensors"])):
            self.assert_done(tensorfs("convert", self.file, self.tmp / out, *arguments))
        self.check(safetensors.numpy.load_file(self.tmp / "v.st"), self.arrays)
        shutil.move(self.tmp / "v.st", self.tmp / "v.safetensors")
        self.assert_done(tensorfs("diff", self.file, self.tmp / "v.safetensors"))
        outcome = tensorfs("verify", self.file, "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["sets"][0]["header_hashes_compared"], 5)
        # Once more, against the checksums that were recorded.
        self.assert_done(tensorfs("verify", self.file))
        self.check(self.shown("verify=read"), self.arrays)
        self.assert_done(tensorfs("load", self.file))
        self.assert_done(tensorfs("warm", self.file))
        self.assert_done(tensorfs("report", self.file, "--html", self.tmp / "page.html"))
        outcome = tensorfs("inspect", self.file, "--json")
        pieces = {tensor["name"]: tensor["pieces"] for tensor in outcome.json()["sets"][0]["tensors"]}
        self.assertEqual([pieces[name][0]["range"] for name in ("m", "n", "big")], [None] * 3)
        self.assertEqual(len(pieces["a"][0]["range"]), 2)
        self.assertIn("the shape only, read as zeros: box [4, 10]", tensorfs("inspect", self.file).stdout)

    def test_a_folder_of_them_is_mounted_from_its_index(self):
        folder = self.tmp / "src"
        folder.mkdir()
        shutil.copy(self.file, folder / "m.tensors")
        os.utime(folder / "m.tensors", (1_700_000_000, 1_700_000_000))
        self.file = folder
        for _ in range(3):
            self.check(self.shown(), self.arrays)

    def test_a_tensor_of_a_tebibyte_takes_neither_memory_nor_disk(self):
        path = self.tmp / "huge.tensors"
        huge = Stored.of("huge", "U8", [2**40], b"", is_long=True)
        last = Stored.of("last", "F32", [2], bytes(range(8)))
        path.write_bytes(file_of([huge, last], version=5))
        self.assert_done(tensorfs("verify", path))
        with Mount(path) as m:
            shown = m.path / "huge.safetensors"
            self.assertGreater(shown.stat().st_size, 2**40)
            header = oracle.read_header_of(shown)
            with open(shown, "rb") as file:
                for name, offset, expected in (("last", 0, bytes(range(8))), ("huge", 0, bytes(99)), ("huge", 2**40 - 99, bytes(99))):
                    file.seek(header.data_start + header.tensors[name]["data_offsets"][0] + offset)
                    self.assertEqual(file.read(len(expected)), expected)
        outcome = tensorfs("load", path)
        self.assert_refused(outcome)
        self.assertRegex(outcome.stderr, r"huge\.tensors: takes \d+ bytes of memory")
        for command in (("convert", path, self.tmp / "out.safetensors", "--to", "safetensors"), ("consolidate", path, self.tmp / "out")):
            outcome = tensorfs(*command)
            self.assert_refused(outcome)
            self.assertRegex(outcome.stderr, r"takes \d+ bytes|bytes are free|free")
            self.assertEqual([entry.name for entry in self.tmp.iterdir() if entry.name.startswith(".") or entry.name == "out"], [])

    def test_zeros_that_a_cast_changes_are_written(self):
        path = self.tmp / "scales.tensors"
        path.write_bytes(file_of([Stored.of("w", "F8_E8M0", [99], b"")], version=5))
        dtypes = self.tmp / "dtypes.json"
        dtypes.write_text('{"w": "F32"}')
        for word, suffix in (("tensorizer", "tensors"), ("safetensors", "safetensors")):
            out = self.tmp / f"out.{suffix}"
            self.assert_done(tensorfs("convert", path, out, "--to", word, "-o", f"dtype=map={dtypes}"))
            back = self.tmp / f"back_{suffix}.safetensors"
            self.assert_done(tensorfs("convert", out, back, "--to", "safetensors"))
            found = safetensors.numpy.load_file(back)["w"]
            np.testing.assert_array_equal(found, np.full(99, 2.0**-127, np.float32))

    def test_page_faults_in_a_tensor_of_a_tebibyte_put_none_of_its_zeros_into_the_page_cache(self):
        path = self.tmp / "huge.tensors"
        huge = Stored.of("huge", "U8", [2**40], b"", is_long=True)
        length = 2**24
        real = Stored.of("real", "U8", [length], checkpoints.random_bytes(1, length))
        path.write_bytes(file_of([huge, real], version=5))
        with Mount(path) as m, open(m.path / "huge.safetensors", "rb") as file:
            header = oracle.read_header_of(m.path / "huge.safetensors")
            start = {name: header.data_start + header.tensors[name]["data_offsets"][0] for name in ("huge", "real")}
            self.assertEqual(start["real"] % 4096, 0)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                mapped.madvise(mmap.MADV_RANDOM)
                for page in range(1000):
                    self.assertEqual(mapped[start["huge"] + page * 2**22], 0)
                # One thread stores tensors, in the order in which they are noticed.
                pages = iter(range(0, length, 4096))

                def is_stored():
                    for page in itertools.islice(pages, 64):
                        self.assertEqual(mapped[start["real"] + page], real.data[page])
                    return self.stored_bytes(m) >= length

                wait_until(is_stored, 30, "a tensor is stored")
            self.assertEqual(self.stored_bytes(m), length)

    def stored_bytes(self, m):
        return tensorfs("status", m.path, "--json").json()[0]["counters"]["stored_bytes"]

    def test_copies_are_compared_without_reading_their_zeros(self):
        for name, names in (("a", ["huge", "long"]), ("b", ["huge", "long"]), ("c", ["huge", "other"])):
            metas = [Stored.of(name, "U8", [2**40], b"", is_long=True) for name in names]
            real = Stored.of("real", "F32", [2], bytes(range(8)))
            (self.tmp / f"{name}.tensors").write_bytes(file_of([*metas, real], version=5))
        a, b, c = (self.tmp / f"{name}.tensors" for name in "abc")
        self.assert_done(tensorfs("diff", a, b))
        outcome = tensorfs("diff", a, c, "--json")
        self.assertEqual(outcome.code, 1, outcome.stderr)
        renamed = [(tensor["name"], tensor["new_name"]) for tensor in outcome.json()["renamed"]]
        self.assertEqual((renamed, outcome.json()["bytes_read"]), ([("long", "other")], 16))

    def test_a_checkpoint_of_more_bytes_than_a_file_can_have_is_refused_in_commands_and_in_a_mount(self):
        folder = self.tmp / "tree" / "src"
        folder.mkdir(parents=True)
        shutil.copy(self.file, self.tmp / "tree" / "good.tensors")
        for number in range(1, 6):
            metas = [Stored.of(f"m{number}.{n}", "U8", [2**61 - 64], b"", is_long=True) for n in "ab"]
            (folder / f"m-{number:05}-of-00005.tensors").write_bytes(file_of(metas, version=5))
        out = self.tmp / "out.safetensors"
        for command in (["ls", folder], ["verify", folder], ["inspect", folder], ["load", folder], ["diff", folder, folder],
                        ["convert", folder, out, "--to", "safetensors"], ["consolidate", folder, self.tmp / "out"]):
            outcome = tensorfs(*command)
            self.assertNotEqual(outcome.code, 0, command)
            self.assertIn("less than 2^63; check the shapes", outcome.stderr, command)
        with Mount(folder.parent) as m:
            self.assertEqual(visible_files(m.path / "src"), ["TENSORFS-ERROR.txt"])
            self.assertIn("overflow", (m.path / "src" / "TENSORFS-ERROR.txt").read_text())
            self.assertIn("good.safetensors", visible_files(m.path))


class Commands(TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.tmp / "src"
        self.made = numbered(self.folder, 2, dtype="F16")

    def test_every_command_takes_tensorizer_files(self):
        one = by_id("tz_every_dtype").source
        for command in ("ls", "inspect", "verify"):
            outcome = tensorfs(command, one, "--json")
            self.assert_done(outcome)
            found = outcome.json()["sets"][0]
            self.assertEqual((found["name"], found["kind"]), ("every_dtype.safetensors", "tensorizer"))
        self.assert_done(tensorfs("load", one))
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", self.folder, out, "--verify"))
        self.assertEqual(oracle.tensor_bytes(out / "model.safetensors"), self.made)
        self.assert_done(tensorfs("convert", self.folder, self.tmp / "copy.bt", "--to", "bintensors"))
        self.assert_done(tensorfs("diff", self.folder, self.tmp / "copy.bt"))
        self.assert_done(tensorfs("diff", self.folder, out))
        self.assert_done(tensorfs("report", self.folder, "--html", self.tmp / "page.html"))
        shutil.copy(one, self.tmp / "blob")
        page = self.tmp / "blob.html"
        self.assert_done(tensorfs("report", self.tmp / "blob", "--html", page, "-o", "layout=original"))
        self.assertRegex(page.read_text(), r'"format": ?"tensorizer"')

    def test_views_select_rename_and_cast_tensors_of_tensorizer_files(self):
        with Mount(self.folder, "dtype=f32", "include=layer.1.*") as m:
            shown = oracle.tensor_bytes(m.path / "model.safetensors")
        dtype, shape, data = shown["layer.1.weight"]
        self.assertEqual((list(shown), dtype, shape), (["layer.1.weight"], "F32", [8, 32]))
        expected = np.frombuffer(self.made["layer.1.weight"][2], np.float16).astype(np.float32)
        found = np.frombuffer(data, np.float32)
        np.testing.assert_array_equal(found[~np.isnan(expected)], expected[~np.isnan(expected)])

    def test_a_tensorizer_file_is_a_reference(self):
        out = self.tmp / "out"
        one = by_id("tz_module").source
        self.assert_done(tensorfs("consolidate", one, out))
        self.assert_done(tensorfs("verify", out, "-o", f"reference={one}"))
        outcome = tensorfs("verify", out, "-o", f"reference={by_id('tz_nested').source}", "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "tensor_missing")

    def test_a_mount_from_the_index_shows_the_same_and_notices_a_header_that_changes(self):
        for path in self.folder.iterdir():
            os.utime(path, (1_700_000_000, 1_700_000_000))
        contents = []
        for _ in range(3):
            with Mount(self.folder) as m:
                contents.append((m.path / "model.safetensors").read_bytes())
        self.assertEqual(contents, contents[:1] * 3)
        # The header of the last tensor: its name, in a file of the same length and times.
        path = self.folder / "model-00002-of-00002.tensors"
        data = path.read_bytes()
        self.assertEqual(data.count(b"layer.5.weight"), 2)
        path.write_bytes(data.replace(b"layer.5.weight", b"layer.6.weight"))
        os.utime(path, (1_700_000_000, 1_700_000_000))
        with Mount(self.folder) as m:
            self.assertIn("layer.6.weight", oracle.tensor_bytes(m.path / "model.safetensors"))
        with open(path, "r+b") as file:
            file.seek(data.rindex(b"layer.5.weight"))
            file.write(b"layer.7.weight")
        os.utime(path, (1_700_000_000, 1_700_000_000))
        self.assert_refused(tensorfs("verify", self.folder))

    def test_verify_compares_the_hashes_in_the_headers_of_tensors(self):
        for entry in ("tz_v1_module", "tz_v2_nested", "tz_v5_long", "tz_every_dtype"):
            outcome = tensorfs("verify", by_id(entry).source, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["sets"][0]["header_hashes_compared"], len(by_id(entry).tensors))
        outcome = tensorfs("verify", self.folder)
        self.assert_done(outcome)
        self.assertIn("6 tensors match their hashes", outcome.stdout)
        # Nothing was recorded of these files before.
        path = self.copy(by_id("tz_module").source)
        data = path.read_bytes()
        stored = oracle.tensor_bytes(self.shown(path))[".w"][2]
        for place in (data.index(stored) + 5, data.index(stored) - 20):
            changed = bytearray(data)
            changed[place] ^= 0x10
            path.write_bytes(changed)
            outcome = tensorfs("verify", path, "--record", "--json")
            self.assert_refused(outcome)
            self.assertEqual((outcome.json()["class"], outcome.json()["sets"][0]["tensor"]), ("hash_mismatch", ".w"))
            self.assertRegex(outcome.stderr, "tensor `.w`: its header and its bytes have the (CRC32|SHA-256) [0-9a-f]+, its ")
            path.write_bytes(data)
            self.assert_done(tensorfs("verify", path))

    def shown(self, path):
        out = self.tmp / "shown.safetensors"
        self.assert_done(tensorfs("convert", path, out, "--to", "safetensors", "--force"))
        return out

    def test_a_hash_that_a_header_repeats_counts_once(self):
        path, data = self.tmp / "repeated.tensors", bytes(range(64))
        empty = Stored.of("w", "U8", [64], data, hashes=[(0, bytes(4))] * 255)
        crc = struct.pack("<I", zlib.crc32(header_of(empty) + data))
        for last, changed, word in ((crc, data, None), (crc, bytes(64), "hash_mismatch"), (bytes(4), data, "header_decode")):
            hashes = [*[(0, crc)] * 254, (0, last)]
            path.write_bytes(file_of([dataclasses.replace(empty, hashes=hashes, data=changed)]))
            outcome = tensorfs("verify", path, "--json", "--index-dir", "none")
            self.assertEqual((outcome.code, outcome.json()["class"]), (int(word is not None), word), outcome.stderr)
            if word is None:
                self.assertEqual(outcome.json()["sets"][0]["header_hashes_compared"], 1)

    def test_a_file_without_hashes_is_verified_without_them(self):
        path = self.tmp / "plain.tensors"
        path.write_bytes(file_of([Stored.of("w", "U8", [4], b"abcd", hashes=[])]))
        outcome = tensorfs("verify", path, "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["sets"][0]["header_hashes_compared"], 0)

    def test_checksums_are_recorded_and_compared_before_a_read(self):
        self.assert_done(tensorfs("verify", self.folder))
        with Mount(self.folder, "verify=read") as m:
            self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors"), self.made)
        path = self.folder / "model-00001-of-00002.tensors"
        data = bytearray(path.read_bytes())
        place = data.index(self.made["layer.2.weight"][2])
        data[place + 100] ^= 1
        before = path.stat()
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        outcome = tensorfs("verify", self.folder, "--json")
        self.assert_refused(outcome)
        self.assertEqual((outcome.json()["class"]), "hash_mismatch")
        self.assertIn("layer.2.weight", outcome.stderr)
        self.assertIn("its header and its bytes have the ", outcome.stderr)
        self.assertNotIn("--record", outcome.stderr)
