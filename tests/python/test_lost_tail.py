"""A lost last shard, which the shards alone cannot show: what is said, and what proves or refuses it."""

import json
import os
from pathlib import Path

import checkpoints
import oracle
from manifest import by_id
from mounts import Mount, MountFailed, TestCase, tensorfs, wait_until

RANKS = 4
TAIL = "user.tensorfs.tail"


class Sets(TestCase):
    """`full` is a set with one row per rank, `cut` the same without its last shard."""

    def setUp(self):
        super().setUp()
        self.full = checkpoints.rows_of_one(self.tmp / "full", RANKS)
        self.consolidated = self.tmp / "reference.safetensors"
        self.consolidated.write_bytes(oracle.from_dcp(self.full))
        self.cut = self.copy(self.full, "cut")
        (self.cut / checkpoints.dcp_name(RANKS)).unlink()

    def verify(self, source, *words):
        outcome = tensorfs("verify", source, "--json", *words)
        return outcome, outcome.json()["sets"][0]


class LostTail(Sets):
    def assert_proven(self, *words):
        outcome, found = self.verify(self.full, *words)
        self.assert_done(outcome)
        self.assertEqual((found["ok"], found["tail"]), (True, "proven"))
        self.assert_done(self.verify(self.full, *words, "--strict")[0])

    def assert_lost(self, *words, names=None):
        outcome, found = self.verify(self.cut, *words)
        self.assert_refused(outcome)
        self.assertFalse(found["ok"])
        if names:
            self.assertIn(names, outcome.stderr)
            self.assertEqual(found["tensor"], names)

    def assert_mount_refuses(self, option, names=None):
        with Mount(self.full, option) as m:
            self.assertTrue((m.path / "model.safetensors").read_bytes() == self.consolidated.read_bytes())
        with self.assertRaises(MountFailed) as caught, Mount(self.cut, option):
            pass
        self.assertEqual(caught.exception.code, 1)
        if names:
            self.assertIn(names, caught.exception.stderr)

    def manifest(self):
        """The manifest that `--write-manifest` leaves beside the shards of the full set, moved away from there."""
        before = set(self.full.iterdir())
        self.assert_done(tensorfs("verify", self.full, "--write-manifest"))
        (written,) = set(self.full.iterdir()) - before
        return written.rename(self.tmp / written.name)

    def weight_map(self):
        path = self.tmp / "reference.safetensors.index.json"
        path.write_text(json.dumps({"metadata": {}, "weight_map": {"w": "x.safetensors", "lost": "x.safetensors"}}))
        return path

    def test_without_help_the_tail_is_unproven_and_strict_refuses(self):
        for source in (self.full, self.cut):
            outcome, found = self.verify(source)
            self.assert_done(outcome)
            self.assertEqual((found["ok"], found["tail"]), (True, "unproven"))
            self.assertEqual(self.verify(source, "--strict")[0].code, 1)

    def test_cat_and_load_say_that_the_tail_is_unproven(self):
        name = tensorfs("ls", self.cut, "--json").json()["sets"][0]["tensors"][0]["name"]
        for words in (["cat", self.cut, name], ["load", self.cut]):
            outcome = tensorfs(*words)
            self.assertEqual((outcome.stdout + outcome.stderr).count("tail: unproven"), 1)
            outcome = tensorfs(*words, "-o", f"expect-shards={len(list(self.cut.iterdir()))}")
            self.assertEqual((outcome.code, (outcome.stdout + outcome.stderr).count("tail")), (0, 0))

    def test_the_number_of_shards_proves_the_tail(self):
        self.assert_proven("--expect-shards", str(RANKS))
        self.assert_lost("--expect-shards", str(RANKS))
        self.assertEqual(self.verify(self.full, "--expect-shards", str(RANKS + 1))[0].code, 1)

    def test_a_consolidated_file_proves_the_tail_and_names_the_tensor(self):
        self.assert_proven("--reference", self.consolidated)
        self.assert_lost("--reference", self.consolidated, names="w")

    def test_a_written_manifest_proves_the_tail(self):
        manifest = self.manifest()
        self.assert_proven("--reference", manifest)
        self.assert_lost("--reference", manifest)

    def test_a_weight_map_as_reference_finds_a_lost_name(self):
        outcome, found = self.verify(self.full, "--reference", self.weight_map())
        self.assert_refused(outcome)
        self.assertEqual(found["tensor"], "lost")

    def test_a_reference_that_is_no_reference_is_refused(self):
        broken = self.tmp / "broken.json"
        for content in ("", "{", "[]", '{"weight_map": 1}'):
            broken.write_text(content)
            outcome = tensorfs("verify", self.full, "--reference", broken)
            self.assertEqual(outcome.code, 1, content)
            self.assertIn(broken.name, outcome.stderr)
        outcome = tensorfs("verify", self.full, "--reference", self.tmp / "missing")
        self.assertIn("missing", outcome.stderr)

    def test_a_mount_with_expect_shards_refuses_the_cut_set(self):
        self.assert_mount_refuses(f"expect-shards={RANKS}")

    def test_a_mount_with_a_reference_refuses_the_cut_set(self):
        self.assert_mount_refuses(f"reference={self.consolidated}", names="w")
        self.assert_mount_refuses(f"reference={self.manifest()}")

    def test_the_options_work_for_verify_as_for_mount(self):
        for option in (f"expect-shards={RANKS}", f"reference={self.consolidated}"):
            self.assert_proven("-o", option)
            self.assert_lost("-o", option)

    def test_a_manifest_beside_the_shards_is_not_taken_for_a_shard(self):
        self.assert_done(tensorfs("verify", self.full, "--write-manifest"))
        with Mount(self.full) as m:
            self.assertTrue(Path(m.path, "model.safetensors").read_bytes() == self.consolidated.read_bytes())

    def test_a_hugging_face_set_proves_its_own_tail(self):
        source = checkpoints.hf_set(self.tmp / "hf", 3, 1)
        _, found = self.verify(source, "--strict")
        self.assertEqual((found["ok"], found["tail"]), (True, "proven"))


class Told(Sets):
    """A mount of a set whose tail is unproven says so when it is mounted, and whenever it is asked."""

    REMEDIES = ("expect-shards=", "reference=", "manifest")

    def lines(self, text):
        return [line for line in text.splitlines() if "tail: unproven" in line]

    def assert_warned_once(self, text):
        (line,) = self.lines(text)
        self.assertIn(str(self.full / "model.safetensors"), line)
        for remedy in self.REMEDIES:
            self.assertIn(remedy, line)

    def status(self, m):
        (one,) = tensorfs("status", m.path, "--json").json()
        return one["tail"], tensorfs("status", m.path).stdout

    def test_one_warning_is_given_in_the_foreground(self):
        with Mount(self.full) as m:
            (m.path / "model.safetensors").read_bytes()
            self.assert_warned_once(m.log())

    def test_one_warning_is_given_before_the_daemon_goes_to_the_background(self):
        with Mount(self.full, background=True) as m:
            self.assert_warned_once(m.log())

    def test_one_warning_is_given_on_standard_error_and_one_in_the_log(self):
        for background in (True, False):
            log = self.tmp / f"log-{background}"
            with Mount(self.full, f"log={log}", background=background) as m:
                self.assert_warned_once(m.log())
                self.assert_warned_once(log.read_text())

    def test_who_wants_errors_only_gets_no_warning(self):
        log = self.tmp / "log"
        with Mount(self.full, f"log={log}", env={**os.environ, "TENSORFS_LOG": "error"}) as m:
            self.assertEqual((self.lines(m.log()), self.lines(log.read_text())), ([], []))

    def test_the_status_and_an_attribute_say_it(self):
        with Mount(self.full) as m:
            self.assertEqual(os.getxattr(m.path / "model.safetensors", TAIL), b"unproven")
            found, text = self.status(m)
            self.assertEqual(found, {"proven": 0, "unproven": 1, "files": ["model.safetensors"]})
            (line,) = [line for line in text.splitlines() if "unproven" in line]
            for word in ("model.safetensors", *self.REMEDIES):
                self.assertIn(word, line)

    def test_shards_shown_as_they_are_say_it_too(self):
        with Mount(self.full, "layout=original") as m:
            self.assertEqual(os.getxattr(m.path / checkpoints.dcp_name(1), TAIL), b"unproven")
            self.assertEqual(self.status(m)[0]["files"], ["model.safetensors"])

    def test_nothing_is_said_of_a_tail_that_is_proven(self):
        hf = checkpoints.hf_set(self.tmp / "hf", 3, 1)
        for source, option in (
            (self.full, f"expect-shards={RANKS}"),
            (self.full, f"reference={self.consolidated}"),
            (by_id("dcp_global_shapes").source, "prefer=file"),
            (hf, "prefer=file"),
        ):
            with self.subTest(option), Mount(source, option) as m:
                self.assertEqual(self.lines(m.log()), [])
                self.assertEqual(os.getxattr(m.path / "model.safetensors", TAIL), b"proven")
                found, text = self.status(m)
                self.assertEqual(found, {"proven": 1, "unproven": 0, "files": []})
                self.assertNotIn("unproven", text)
                self.assertNotIn(TAIL, os.listxattr(m.path))

    def test_in_a_tree_each_set_is_warned_of_at_its_first_look_and_once(self):
        tree = self.tmp / "tree"
        for name in "ab":
            checkpoints.rows_of_one(tree / name, RANKS)
        with Mount(tree) as m:
            self.assertEqual(len(self.lines(m.log())), 1, m.log())
            for _ in range(2):
                for name in "ab":
                    (m.path / name / "model.safetensors").read_bytes()
            # A daemon answers first and logs then.
            wait_until(lambda: len(self.lines(m.log())) >= 2, 20, "the second warning")
            self.assertEqual(len(self.lines(m.log())), 2, m.log())
            self.assertEqual(self.status(m)[0]["files"], ["a/model.safetensors", "b/model.safetensors"])


class References(Sets):
    def weight_map(self, metadata):
        path = self.tmp / "reference.safetensors.index.json"
        names = oracle.read_header(self.consolidated.read_bytes()).tensors
        path.write_text(json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(names, "x.safetensors")}))
        return path

    def total_size(self):
        ends = [e["data_offsets"][1] for e in oracle.read_header(self.consolidated.read_bytes()).tensors.values()]
        return max(ends)

    # A weight map knows names only, yet as a reference it was said to prove the tail, also of a set
    # whose last shard was lost.
    def test_a_weight_map_proves_the_tail_only_by_its_size(self):
        for metadata, tail in (({}, "unproven"), ({"total_size": self.total_size()}, "proven")):
            outcome, found = self.verify(self.full, "--reference", self.weight_map(metadata))
            self.assert_done(outcome)
            self.assertEqual((found["ok"], found["tail"]), (True, tail), metadata)

    # The last shard was lost; the map's total_size is larger than what the shards hold, and nobody
    # compared the two.
    def test_a_weight_map_with_a_larger_size_refuses_the_cut_set(self):
        size = self.total_size()
        self.assertEqual(self.verify(self.cut, "--reference", self.weight_map({"total_size": size}))[0].code, 1)
        self.assertEqual(self.verify(self.full, "--reference", self.weight_map({"total_size": size + 1}))[0].code, 1)
        option = f"reference={self.weight_map({'total_size': size})}"
        with self.assertRaises(MountFailed), Mount(self.cut, option):
            pass

    # After a shard was lost, --write-manifest wrote a new manifest without it: the only witness
    # of the loss was overwritten.
    def test_a_manifest_that_lists_a_lost_shard_is_not_overwritten(self):
        before = set(self.full.iterdir())
        self.assert_done(tensorfs("verify", self.full, "--write-manifest"))
        (manifest,) = set(self.full.iterdir()) - before
        content = manifest.read_bytes()
        (self.full / checkpoints.dcp_name(RANKS)).unlink()
        left = set(self.full.iterdir())
        for _ in range(2):
            self.assert_refused(tensorfs("verify", self.full, "--write-manifest"))
            self.assertEqual(manifest.read_bytes(), content)
            self.assertEqual(set(self.full.iterdir()), left)

    # The header is all that a reference is for, but a file cut after it was refused as truncated.
    # People publish just that: a few kilobytes instead of the weights.
    def test_a_file_that_is_only_a_header_is_a_reference(self):
        path = self.tmp / "header.safetensors"
        whole = self.consolidated.read_bytes()
        path.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
        outcome, found = self.verify(self.full, "--reference", path)
        self.assert_done(outcome)
        self.assertEqual((found["ok"], found["tail"]), (True, "proven"))
        outcome, found = self.verify(self.cut, "--reference", path)
        self.assert_refused(outcome)
        self.assertEqual(found["tensor"], "w")
        with Mount(self.full, f"reference={path}") as m:
            self.assert_same((m.path / "model.safetensors").read_bytes(), whole)
        with self.assertRaises(MountFailed), Mount(self.cut, f"reference={path}"):
            pass


class Demo(TestCase):
    def test_the_demo_does_not_warn_about_its_own_checkpoints(self):
        outcome = tensorfs("demo")
        self.assert_done(outcome)
        self.assertEqual(outcome.stderr, "")
        self.assertEqual(outcome.stdout.count("all equal"), 4)
