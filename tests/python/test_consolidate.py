"""`tensorfs consolidate`: the files that a mount shows, as real files, whole or not at all."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import unittest

import numpy as np
from safetensors.numpy import load_file

import checkpoints
import oracle
from checkpoints import sparse_file
from faults import file_system, slow_file
from manifest import GOOD, by_id
from mounts import BIN, Mount, MountFailed, TestCase, detach, needs_root, run, run_measured, tensorfs, visible_files


def content(folder):
    """The bytes of all files below `folder`, and its folders, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def options_of(entry):
    return [word for option in entry.options for word in ("-o", option)]


@contextlib.contextmanager
def loop_mount(image, place):
    """Mounts the file system in the file `image` on the new folder `place`."""
    place.mkdir()
    outcome = run("mount", "-o", "loop", image, place)
    if outcome.code:
        raise unittest.SkipTest(f"no loop device here: {outcome.stderr.strip()}")
    try:
        yield place
    finally:
        detach(place)


class Bytes(TestCase):
    """The written bytes are those of a mount."""

    def assert_like_mount(self, source, *options):
        words = [word for option in options for word in ("-o", option)]
        out = self.tmp / f"out{len(visible_files(self.tmp))}"
        outcome = tensorfs("consolidate", source, out, *words, "--json", "--verify")
        self.assert_done(outcome)
        with Mount(source, *options) as m:
            expected = content(m.path)
        found = content(out)
        self.assertEqual(list(found), list(expected))
        for path, data in expected.items():
            self.assert_same(found[path], data, path)
        report = outcome.json()
        files = [data for data in expected.values() if data is not None]
        self.assertEqual((report["files"], report["bytes"]), (len(files), sum(map(len, files))))
        self.assertTrue(report["verified"])
        return out

    def test_every_fixture_is_written_as_a_mount_shows_it(self):
        for entry in GOOD:
            if entry.source.is_dir():
                with self.subTest(entry.id):
                    shutil.rmtree(self.assert_like_mount(entry.source, *entry.options))

    def test_every_fixture_is_written_as_one_file_as_a_mount_shows_it(self):
        for number, entry in enumerate(GOOD):
            with self.subTest(entry.id):
                out = self.tmp / f"{number}.safetensors"
                # A folder of two variants has a checkpoint by each weight map.
                variant = "variant" in entry.id
                source = entry.source / entry.weight_map if variant else entry.source
                self.assert_done(tensorfs("consolidate", source, out, *options_of(entry)))
                self.assert_same(out.read_bytes(), entry.whole_file())

    def test_pieces_of_every_form_are_put_together(self):
        made = (
            checkpoints.row_wise, checkpoints.column_wise, checkpoints.grid_2d, checkpoints.uneven,
            checkpoints.cube_3d, checkpoints.rows_of_one,
        )
        for make in made:
            with self.subTest(make.__name__):
                self.assert_like_mount(make(self.tmp / make.__name__))
        for number, direct in enumerate(("always", "never")):
            with self.subTest(direct=direct):
                self.assert_like_mount(checkpoints.hf_set(self.tmp / f"hf{number}", 5, 40), f"direct={direct}")

    def test_random_checkpoints_are_written_as_a_mount_shows_them(self):
        rng = random.Random(14)
        for number in range(8):
            made = checkpoints.DcpSet(number)
            for tensor in range(rng.randint(1, 6)):
                shape = [rng.randint(1, 60) for _ in range(rng.randint(1, 4))]
                cut = [rng.choice([1, 1, 2, 3]) for _ in shape]
                made.cut(f"t{tensor}", shape, cut, rng.choice([1, 2, 4, 8]))
            with self.subTest(number):
                self.assert_like_mount(made.save(self.tmp / f"random{number}"))

    def test_thousands_of_tiny_tensors_far_apart_are_written(self):
        # In the order of names, neighbours of the merged file lie in distant parts of the shards.
        rng = np.random.default_rng(3)
        folder = self.tmp / "tiny"
        folder.mkdir()
        tensors = []
        for number in range(3000):
            tensors.append((f"{(number * 7919) % 3000:05}", "U8", [3], rng.bytes(3)))
            tensors.append((f"z{number:05}", "F64", [512], rng.bytes(4096)))
        checkpoints.write_shard(folder / "model.safetensors", tensors)
        out = self.tmp / "tiny.safetensors"
        self.assert_done(tensorfs("consolidate", folder, out, "-o", "direct=always"))
        with Mount(folder) as m:
            self.assert_same(out.read_bytes(), (m.path / "model.safetensors").read_bytes())

    def test_a_view_is_written_as_the_mount_with_that_view_shows_it(self):
        source = checkpoints.hf_set(self.tmp / "src")
        self.assert_like_mount(source, "layout=original")
        self.assert_like_mount(source, "format=bintensors")
        with Mount(source, "format=bintensors") as m:
            out = self.tmp / "behind"
            # Behind a mount lies its source, with the view of the mount.
            self.assert_done(tensorfs("consolidate", m.path, out))
            self.assertEqual(content(out), content(m.path))

    def assert_views_like_mounts(self, source, views, options=()):
        """Writes each view, or finds that both the command and the mount refuse it. Returns the number written."""
        written = 0
        for view in views:
            with self.subTest(source=source, view=view):
                words = [word for option in (*options, *view) for word in ("-o", option)]
                tried = self.tmp / "tried"
                outcome = tensorfs("consolidate", source, tried, *words)
                if outcome.code:
                    self.assert_refused(outcome)
                    self.assertFalse(tried.exists())
                    with contextlib.suppress(MountFailed), Mount(source, *options, *view) as m:
                        self.assertTrue(list(m.path.rglob("TENSORFS-ERROR.txt")))
                    continue
                shutil.rmtree(tried)
                shutil.rmtree(self.assert_like_mount(source, *options, *view))
                written += 1
        return written

    def test_every_view_of_every_fixture_is_written_as_the_mount_shows_it(self):
        (self.tmp / "x.toml").write_text("[[rename]]\nregex = '^'\nto = 'x.'\n")
        rules = f"rename={self.tmp / 'x.toml'}"
        views = (["layout=shards=2"], ["layout=shards=200B", rules, "dtype=f16"], ["format=bintensors", "dtype=f32"])
        written = sum(
            self.assert_views_like_mounts(entry.source, views, entry.options) for entry in GOOD if entry.source.is_dir()
        )
        self.assertGreater(written, len(GOOD))

    def test_every_view_of_random_checkpoints_is_written_as_the_mount_shows_it(self):
        rng = random.Random(41)
        (self.tmp / "x.toml").write_text("[[rename]]\nregex = '^t(.)'\nto = 'l.$1.t'\n")
        for number in range(5):
            made = checkpoints.DcpSet(number)
            count = rng.randint(2, 5)
            for tensor in range(count):
                shape = [rng.randint(1, 90) for _ in range(rng.randint(1, 4))]
                # Long rows in narrow pieces: their cast takes many reads of few bytes.
                shape[-1] *= rng.choice([1, 40])
                made.cut(f"t{tensor}", shape, [rng.choice([1, 2, 3]) for _ in shape], rng.choice([2, 4, 8]))
            source = made.save(self.tmp / f"random{number}")
            mapping = self.tmp / f"map{number}.json"
            mapping.write_text(json.dumps({f"t{tensor}": 1 + tensor % 2 for tensor in range(count)}))
            rules = f"rename={self.tmp / 'x.toml'}"
            views = (
                ["dtype=bf16", f"layout=map={mapping}"], ["dtype=f16", rules, "layout=shards=2"], ["dtype=f32", "exclude=t0"],
                ["include=t[01]", "format=bintensors", rules], ["weight-map=hide"], ["dtype=f32", "keep=t1", "layout=shards=40KB"],
            )
            self.assertEqual(self.assert_views_like_mounts(source, views), len(views))

    def test_a_cast_of_very_many_narrow_pieces_keeps_to_the_memory_of_the_copy(self):
        # One row of the tensor lies in 400 files, and each window of the copy needs thousands of reads of 16 bytes.
        source = checkpoints.DcpSet(6).cut("t", (6000, 800), (1, 400), 8).save(self.tmp / "narrow")
        for dtype in ("bf16", "f32"):
            for direct in ("always", "never"):
                self.assert_like_mount(source, f"dtype={dtype}", f"direct={direct}")

    def test_a_tree_of_models_is_written_whole(self):
        root = self.tmp / "tree"
        checkpoints.hf_set(root / "a/one")
        checkpoints.row_wise(root / "a/two/sharded")
        (root / "a/two/notes").mkdir()
        (root / "a/two/notes/read me").write_text("text")
        (root / "empty").mkdir()
        self.assert_like_mount(root)
        self.assert_like_mount(checkpoints.hub_cache(self.tmp / "models--x--y", root / "a/one").parents[1])


class Targets(TestCase):
    """Where `consolidate` writes, what it refuses, and what it leaves when it cannot."""

    def setUp(self):
        super().setUp()
        self.source = checkpoints.row_wise(self.tmp / "src")
        (self.source / "config.json").write_text("{}")
        self.out = self.tmp / "out"

    def consolidate(self, *words, source=None):
        return tensorfs("consolidate", source or self.source, *words)

    def assert_only(self, folder, *names):
        """`folder` has these names, hidden ones included."""
        self.assertEqual(sorted(os.listdir(folder)), sorted(names))

    def test_files_that_are_there_are_replaced_only_when_asked_for(self):
        self.assert_done(self.consolidate(self.out))
        self.assert_refused(self.consolidate(self.out))
        names = ["config.json", "model.safetensors", "model.safetensors.index.json"]
        (self.out / "model.safetensors").write_text("old")
        (self.out / "mine").write_text("mine")
        self.assert_refused(self.consolidate(self.out))
        self.assertEqual((self.out / "model.safetensors").read_text(), "old")
        self.assert_done(self.consolidate(self.out, "--force"))
        self.assert_same((self.out / "model.safetensors").read_bytes(), oracle.from_dcp(self.source))
        self.assert_only(self.out, "mine", *names)
        one = self.tmp / "one.safetensors"
        self.assert_done(self.consolidate(one))
        self.assert_refused(self.consolidate(one))
        self.assert_done(self.consolidate(one, "--force"))
        self.assert_only(self.tmp, "src", "out", "one.safetensors")

    def test_an_empty_folder_is_filled(self):
        self.out.mkdir()
        self.assert_done(self.consolidate(self.out))
        self.assert_only(self.out, "config.json", "model.safetensors", "model.safetensors.index.json")

    def test_weights_are_not_mixed_with_others(self):
        self.out.mkdir()
        (self.out / "model-00001-of-00002.safetensors").write_text("other")
        for words in ((), ("--force",)):
            outcome = self.consolidate(self.out, *words)
            self.assert_refused(outcome)
            self.assertIn("model-00001-of-00002.safetensors", outcome.stderr)
        self.assert_only(self.out, "model-00001-of-00002.safetensors")
        # The source itself is such a folder.
        before = content(self.source)
        self.assert_refused(self.consolidate(self.source, "--force"))
        whole = checkpoints.hf_set(self.tmp / "whole", 1)
        shard = next(whole.glob("*.safetensors"))
        os.rename(shard, whole / "model.safetensors")
        (whole / "model.safetensors.index.json").unlink()
        self.assert_refused(self.consolidate(whole, "--force", source=whole))
        self.assert_refused(self.consolidate(whole / "model.safetensors", "--force", source=whole))
        self.assertEqual(content(self.source), before)

    def test_a_folder_in_the_source_is_written_and_not_copied_into_itself(self):
        inside = self.source / "consolidated"
        self.assert_done(self.consolidate(inside))
        self.assert_same((inside / "model.safetensors").read_bytes(), oracle.from_dcp(self.source))
        self.assertEqual(visible_files(inside), ["config.json", "model.safetensors", "model.safetensors.index.json"])

    def test_names_that_do_not_fit_are_refused(self):
        self.assert_refused(self.consolidate(self.tmp / "x.bt"), 2)
        self.assert_refused(self.consolidate(f"{self.tmp}/x.safetensors/"), 2)
        self.assert_refused(self.consolidate(self.tmp / "none/out"))
        self.assert_refused(self.consolidate(self.tmp / "none/x.safetensors"))
        (self.tmp / "file").write_text("x")
        self.assert_refused(self.consolidate(self.tmp / "file"))
        self.assert_refused(self.consolidate(self.tmp / "file/x"))
        (self.tmp / "broken").symlink_to("nowhere")
        self.assert_refused(self.consolidate(self.tmp / "broken"))
        self.assert_only(self.tmp, "src", "file", "broken")

    # It was written with the bytes of the other format.
    def test_a_file_is_in_the_format_of_its_name_whatever_its_source_is_called(self):
        work = self.tmp / "work"
        work.mkdir()
        blob = work / "blob"
        checkpoints.write_one(blob, "t", 1)
        for name in ("one.bt", "one.tensors"):
            self.assert_done(tensorfs("convert", blob, work / name))
        encrypted, secret = work / "secret.tensors", work / "key"
        secret.write_bytes(bytes(range(32)))
        self.assert_done(tensorfs("convert", blob, encrypted, "--key-file", secret))
        key = ("-o", f"key-file={secret}")
        original = ("-o", "layout=original")
        cases = (
            (blob, "x.bt", (), "bintensors", "safetensors", "the option format=bintensors chooses it"),
            (work / "one.bt", "x.safetensors", ("-o", "format=bintensors"), "safetensors", "bintensors", "the option format=safetensors chooses it"),
            (work / "one.bt", "x.tensors", ("-o", "format=bintensors"), "tensorizer", "bintensors", "leave out format=bintensors"),
            (blob, "x.tensors", ("-o", "format=bintensors"), "tensorizer", "bintensors", "leave out format=bintensors"),
            (work / "one.bt", "x.safetensors", original, "safetensors", "bintensors", "leave out layout=original"),
            (work / "one.tensors", "x.safetensors", original, "safetensors", "tensorizer", "leave out layout=original"),
            (work / "one.tensors", "x.bt", original, "bintensors", "tensorizer", "leave out layout=original"),
            (encrypted, "x.safetensors", (*original, *key), "safetensors", "tensorizer", "leave out layout=original"),
        )
        for source, name, words, named, found, advice in cases:
            with self.subTest(source.name, out=name, words=words):
                outcome = self.consolidate(self.tmp / name, *words, source=source)
                self.assert_refused(outcome, 2)
                self.assert_one_line(outcome)
                said = f"{name}: the name is one of a {named} file, the mount shows a {found} file; {advice}"
                self.assertIn(said, outcome.stderr)
        self.assert_only(self.tmp, "src", "work")
        # A file in the right format is written as it is.
        for source, words in ((blob, ()), (work / "one.bt", original), (work / "one.tensors", original), (encrypted, (*original, *key))):
            out = self.tmp / f"copy{source.suffix or '.safetensors'}"
            self.assert_done(self.consolidate(out, "--force", *words, source=source))
            self.assert_same(out.read_bytes(), source.read_bytes())

    def test_the_suffix_of_a_name_that_is_not_utf_8_counts(self):
        out = os.fsdecode(os.fsencode(self.tmp) + b"/bad\xff.safetensors")
        self.assert_done(self.consolidate(out))
        with open(out, "rb") as file:
            self.assert_same(file.read(), oracle.from_dcp(self.source))

    # Only the files that the mount shows were looked at.
    def test_no_file_of_the_source_is_replaced_whether_it_is_shown_or_not(self):
        both = checkpoints.numbered_set(self.tmp / "both", 1)
        shard = both / "model-00001-of-00003.safetensors"
        shutil.copy(shard, both / "model.safetensors")
        before = content(both)
        for out in (both / "model.safetensors", both):
            outcome = self.consolidate(out, "--force", "-o", "prefer=shards", source=both)
            self.assert_refused(outcome)
            self.assert_one_line(outcome)
            self.assertRegex(outcome.stderr, f"{both}/.*: is a file of the source; write somewhere else")
        # The files of a mount are others than those behind it.
        with Mount(both, "include=t1", "prefer=shards") as m, Mount(m.path, "dtype=f32") as over:
            for mounted in (m, over):
                for words in (("consolidate", mounted.path, shard, "-o", "dtype=bf16"), ("consolidate", mounted.path, shard),
                              ("convert", mounted.path, shard, "-o", "dtype=bf16")):
                    with self.subTest(words[0], over=mounted is over, more=words[3:]):
                        outcome = tensorfs(*words, "--force")
                        self.assert_refused(outcome)
                        self.assertIn(f"{shard}: is a file of the source", outcome.stderr)
            outcome = tensorfs("consolidate", m.path, both, "--force", "-o", "dtype=bf16")
            self.assert_refused(outcome)
        # A weight map on a mount is made by it, and convert may write several files.
        numbered = self.tmp / "numbered"
        numbered.mkdir()
        words = ("-o", "layout=shards=2", "-o", "dtype=f32")
        done = tensorfs("convert", both, numbered / "model.tensors", "-o", "prefer=shards", *words)
        self.assert_done(done)
        written = content(numbered)
        with Mount(both, "prefer=shards", "layout=shards=2") as m, Mount(numbered, "include=t[12]") as other:
            map_file = m.path / "model.safetensors.index.json"
            self.assert_done(tensorfs("verify", map_file))
            for command in (("consolidate", map_file, shard), ("convert", map_file, shard, "--to", "safetensors"),
                            ("convert", other.path, numbered / "model.tensors", *words)):
                with self.subTest(command):
                    outcome = tensorfs(*command, "--force")
                    self.assert_refused(outcome)
                    self.assertIn("is a file of the source", outcome.stderr)
        self.assertEqual((content(both), content(numbered)), (before, written))

    def test_convert_replaces_no_other_file_of_its_source_and_no_key(self):
        both = checkpoints.numbered_set(self.tmp / "both", 1)
        shutil.copy(both / "model-00001-of-00003.safetensors", both / "model.safetensors")
        (both / "config.json").write_text("{}")
        key = self.tmp / "key.tensors"
        key.write_bytes(bytes(range(32)))
        before = content(both)
        for out, words, said in (
            (both / "config.json", ("--to", "safetensors"), "is a file of the source"),
            (both / "model.safetensors", (), "is a file of the source"),
            (key, ("--key-file", key), "has the key of the new file"),
        ):
            outcome = tensorfs("convert", both, out, *words, "--force", "-o", "prefer=shards")
            self.assert_refused(outcome)
            self.assertIn(f"{out}: {said}", outcome.stderr)
        self.assertEqual(content(both), before)
        self.assertEqual(key.read_bytes(), bytes(range(32)))

    def test_a_shard_of_two_weight_maps_is_copied_as_it_is(self):
        folder = self.tmp / "sh"
        checkpoints.hf_set(folder)
        shard = sorted(folder.glob("*.safetensors"))[0]
        for other in set(folder.iterdir()) - {shard}:
            other.unlink()
        text = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(load_file(shard), shard.name)})
        for name in ("model", "other"):
            (folder / f"{name}.safetensors.index.json").write_text(text)
        out = self.tmp / "so.safetensors"
        self.assert_done(self.consolidate(out, "-o", "layout=original", source=folder))
        self.assert_same(out.read_bytes(), shard.read_bytes())

    def test_a_refused_checkpoint_and_several_for_one_file_leave_nothing(self):
        outcome = self.consolidate(self.out, "--json", source=by_id("bad_dcp_hole_middle").source)
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "dcp_hole")
        root = self.tmp / "root"
        checkpoints.hf_set(root / "a")
        checkpoints.hf_set(root / "b")
        outcome = self.consolidate(self.tmp / "x.safetensors", source=root)
        self.assert_refused(outcome)
        self.assertIn("2 weight files", outcome.stderr)
        (root / "b/model-00002-of-00003.safetensors").unlink()
        self.assert_refused(self.consolidate(self.out, source=root))
        self.assert_only(self.tmp, "src", "root")

    def test_nobody_reads_a_file_who_may_not_read_its_source(self):
        for shard in self.source.glob("*.safetensors"):
            shard.chmod(0o600)
        self.source.chmod(0o750)
        self.assert_done(self.consolidate(self.out))
        modes = {path.name: path.stat().st_mode & 0o777 for path in self.out.iterdir()}
        self.assertEqual(modes["model.safetensors"], 0o600)
        self.assertEqual(self.out.stat().st_mode & 0o027, 0)

    @needs_root
    def test_a_full_disk_is_found_before_anything_is_written(self):
        source = checkpoints.hf_set(self.tmp / "large", megabytes=12)
        with file_system("tmpfs", self.tmp / "small", "-o", "size=4m") as small:
            for out in (small / "x.safetensors", small / "x", small):
                outcome = self.consolidate(out, source=source)
                self.assert_refused(outcome)
                needed, free, missing = map(int, re.findall(r"(\d+) bytes", outcome.stderr))
                self.assertEqual((needed - free, free), (missing, 4 << 20))
                self.assert_only(small)

    @needs_root
    def test_a_full_disk_of_a_loop_device_leaves_nothing(self):
        image = self.tmp / "image"
        image.write_bytes(b"")
        os.truncate(image, 16 << 20)
        if not shutil.which("mkfs.ext4") or subprocess.run(["mkfs.ext4", "-q", image]).returncode:
            self.skipTest("no mkfs.ext4")
        source = checkpoints.hf_set(self.tmp / "large", megabytes=20)
        with loop_mount(image, self.tmp / "loop") as disk:
            for out in (disk / "x.safetensors", disk / "x", disk):
                outcome = self.consolidate(out, source=source)
                self.assert_refused(outcome)
                self.assertRegex(outcome.stderr, r"\d+ bytes are missing")
                self.assert_only(disk, "lost+found")

    @needs_root
    def test_a_disk_that_fills_up_meanwhile_keeps_what_is_written_for_the_next_run(self):
        # The first file with weights fits, or nothing does, and a later one finds no inode.
        for inodes in range(3, 9):
            with file_system("tmpfs", self.tmp / f"small{inodes}", "-o", f"nr_inodes={inodes}") as small:
                for out, partial in ((small / "x", ".x.tensorfs-partial"), (small, ".tensorfs.tensorfs-partial")):
                    outcome = self.consolidate(out)
                    if outcome.code == 0:
                        continue
                    self.assert_refused(outcome)
                    self.assertIn("No space left", outcome.stderr)
                    keeps = "keeps what is written" in outcome.stderr
                    self.assert_only(small, *([partial] if keeps else []))
                    if keeps:
                        run("mount", "-o", "remount,nr_inodes=100", small)
                        outcome = self.consolidate(out, "--json")
                        self.assert_done(outcome)
                        self.assertGreater(outcome.json()["reused"], 0)
                        break

    def test_a_source_that_changes_while_it_is_copied_is_refused(self):
        for number, out in enumerate((self.out, self.tmp / "x.safetensors")):
            below = self.tmp / f"below{number}"
            with slow_file(below) as source, subprocess.Popen(
                [BIN, "consolidate", source, out, "--progress"], stderr=subprocess.PIPE
            ) as process:
                self.assertTrue(process.stderr.read(1), "no progress")
                with open(below / source.name, "r+b") as file:
                    file.seek(-1, os.SEEK_END)
                    file.write(b"x")
                _, error = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 1)
            self.assertIn(b"written to while it was in use", error)
            shutil.rmtree(below)
            self.assert_only(self.tmp, "src")

    def test_a_copy_that_is_stopped_leaves_nothing(self):
        with slow_file(self.tmp / "below") as source:
            for number in (signal.SIGTERM, signal.SIGINT):
                for out in (self.out, self.tmp / "x.safetensors"):
                    process = subprocess.Popen([BIN, "consolidate", source, out, "--progress"], stderr=subprocess.PIPE)
                    self.assertTrue(process.stderr.read(1), "no progress")
                    process.send_signal(number)
                    process.stderr.close()
                    self.assertEqual(process.wait(60), -number)
                    self.assert_only(self.tmp, "src", "below")

    def test_a_copy_that_is_killed_at_any_point_never_leaves_a_half_file_and_runs_again(self):
        source = checkpoints.hf_set(self.tmp / "large", 2, 24)
        expected = {}
        self.assert_done(self.consolidate(self.tmp / "good", source=source))
        expected = content(self.tmp / "good")
        whole = self.consolidate(self.tmp / "good", "--force", source=source).seconds
        rng = random.Random(5)
        existing = self.tmp / "existing"
        existing.mkdir()
        killed = 0
        for round_number in range(24):
            out = (self.out, existing, self.tmp / "x.safetensors")[round_number % 3]
            words = [BIN, "consolidate", source, out, "--force"]
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
            try:
                process.wait(rng.random() * whole)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                killed += 1
            self.assert_whole(out, expected)
        self.assertGreater(killed, 0)
        for out in (self.out, existing):
            self.assert_done(self.consolidate(out, "--force", source=source))
            self.assertEqual(content(out), expected)
        self.assert_done(self.consolidate(self.tmp / "x.safetensors", "--force", source=source))
        self.assert_only(self.tmp, "src", "large", "good", "out", "existing", "x.safetensors")

    def assert_whole(self, out, expected):
        """Every file that has its name is whole."""
        if out.is_file():
            self.assert_same(out.read_bytes(), expected["model.safetensors"])
        elif out.exists():
            for path in out.iterdir():
                if not path.name.startswith("."):
                    self.assert_same(path.read_bytes(), expected[path.name], path.name)

    def test_a_folder_of_a_killed_copy_is_taken_over_and_one_in_use_is_not(self):
        partial = self.tmp / ".out.tensorfs-partial"
        (partial / "parts").mkdir(parents=True)
        (partial / "parts/7").write_text("half")
        self.assert_done(self.consolidate(self.out))
        self.assert_only(self.tmp, "src", "out")
        other = self.tmp / "other"
        with slow_file(self.tmp / "below") as source:
            process = subprocess.Popen([BIN, "consolidate", source, other, "--progress"], stderr=subprocess.PIPE)
            try:
                self.assertTrue(process.stderr.read(1), "no progress")
                outcome = self.consolidate(other)
                self.assert_refused(outcome)
                self.assertIn("another process", outcome.stderr)
            finally:
                process.terminate()
                process.stderr.close()
                process.wait(60)

    def test_memory_is_bounded_whatever_the_size(self):
        source, out = sparse_file(self.tmp / "large.safetensors", 400), self.tmp / "x.safetensors"
        for direct in ("auto", "always"):
            outcome, peak = run_measured(BIN, "consolidate", source, out, "-o", f"direct={direct}")
            self.assert_done(outcome)
            self.assertLess(peak, 256 << 20)
            out.unlink()

    def test_progress_is_drawn_when_asked_for(self):
        outcome = self.consolidate(self.out, "--progress=always")
        self.assert_done(outcome)
        self.assertIn("B/s", outcome.stderr)
