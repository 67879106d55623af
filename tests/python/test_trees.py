"""A tree of checkpoints: the good ones are served, a broken one is hidden and says why."""

import json

import oracle
from manifest import by_id
from mounts import Mount, MountFailed, TestCase, tensorfs, visible_files
from reading import genuine_summary, summary

NOTE = "TENSORFS-ERROR.txt"


class Trees(TestCase):
    GOOD = {"llm": "hf_three_shards", "team/dcp": "dcp_row_wise", "adapters/one": "hf_adapter"}
    BROKEN = {"incomplete": "bad_hf_missing_shard", "team/holes": "bad_dcp_hole_middle"}

    def tree(self, models):
        for folder, name in models.items():
            self.copy(by_id(name).source, f"tree/{folder}")
            (self.tmp / "tree" / folder / "config.json").write_text(json.dumps({"of": name}))
        return self.tmp / "tree"

    def test_good_models_are_right_beside_broken_ones(self):
        with Mount(self.tree(self.GOOD | self.BROKEN)) as m:
            for folder, name in self.GOOD.items():
                entry = by_id(name)
                self.assertEqual(genuine_summary(m.path / folder / entry.shown, "mmap"), summary(entry.tensors), folder)

    def test_a_broken_model_is_hidden_and_a_note_names_the_file(self):
        tree = self.tree(self.GOOD | self.BROKEN)
        with Mount(tree) as m:
            for folder, name in self.BROKEN.items():
                self.assertEqual(visible_files(m.path / folder), sorted([NOTE, "config.json"]))
                self.assertEqual((m.path / folder / "config.json").read_text(), json.dumps({"of": name}))
                note = (m.path / folder / NOTE).read_text()
                names = by_id(name).names(tree / folder)
                self.assertTrue(any(n in note for n in names), note)
                self.assertEqual((m.path / folder / NOTE).stat().st_size, len(note.encode()))

    def test_the_note_gives_the_reason_that_verify_gives(self):
        tree = self.tree(self.GOOD | self.BROKEN)
        outcome = tensorfs("verify", tree, "--json")
        with Mount(tree) as m:
            for found in outcome.json()["sets"]:
                if not found["ok"]:
                    self.assertIn(found["error"], (m.path / found["directory"] / NOTE).read_text())

    def test_verify_reports_each_model_of_a_tree(self):
        outcome = tensorfs("verify", self.tree(self.GOOD | self.BROKEN), "--json")
        self.assert_refused(outcome)
        found = {s["directory"]: s["ok"] for s in outcome.json()["sets"]}
        self.assertEqual(found, dict.fromkeys(self.GOOD, True) | dict.fromkeys(self.BROKEN, False))

    def test_a_tree_of_broken_models_does_not_mount(self):
        with self.assertRaises(MountFailed) as caught, Mount(self.tree(self.BROKEN)):
            pass
        self.assertEqual(caught.exception.code, 1)

    def test_a_folder_without_weights_is_mirrored_or_refused_but_never_crashes(self):
        source = self.tmp / "plain"
        source.mkdir()
        (source / "notes.txt").write_text("nothing to see")
        try:
            with Mount(source) as m:
                self.assertEqual((m.path / "notes.txt").read_text(), "nothing to see")
        except MountFailed as error:
            self.assertEqual(error.code, 1)

    def test_other_files_are_shown_byte_for_byte(self):
        source = self.copy(by_id("hf_gpt2_tiny").source)
        (source / "sub").mkdir()
        (source / "sub/vocab.bin").write_bytes(bytes(range(256)) * 1000)
        (source / "empty.txt").touch()
        with Mount(source) as m:
            for name in ("config.json", "generation_config.json", "sub/vocab.bin", "empty.txt"):
                self.assertEqual((m.path / name).read_bytes(), (source / name).read_bytes(), name)
            self.assertEqual(
                visible_files(m.path),
                sorted(["config.json", "empty.txt", "generation_config.json", "model.safetensors",
                        "model.safetensors.index.json", "sub/vocab.bin"]),
            )

    def test_shards_without_a_map_are_refused_when_one_is_missing(self):
        source = self.copy(by_id("hf_no_index").source)
        next(source.glob("*-00001-of-*")).unlink()
        outcome = tensorfs("verify", source, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "shard_missing")

    def test_files_that_merely_lie_together_are_not_merged(self):
        source = self.tmp / "together"
        source.mkdir()
        for name in ("st_no_metadata", "st_many"):
            self.copy(by_id(name).source, f"together/{by_id(name).source.name}")
        with Mount(source) as m:
            for name in ("st_no_metadata", "st_many"):
                entry = by_id(name)
                self.assertEqual(genuine_summary(m.path / entry.source.name, "pread"), summary(entry.tensors))

    def test_a_tensor_that_the_map_omits_is_kept_and_listed(self):
        entry = by_id("bad_hf_shard_has_unlisted")
        with Mount(entry.source) as m:
            header = oracle.read_header((m.path / "model.safetensors").read_bytes())
            shown = json.loads((m.path / "model.safetensors.index.json").read_text())
        self.assertEqual(set(shown["weight_map"]), set(header.tensors))
        self.assertLessEqual(set(entry.tensors), set(header.tensors))
