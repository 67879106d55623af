"""Weight maps: the one that a mount shows beside the file it makes of rank shards, and bad ones, which hide what they name."""

import json
from pathlib import Path

import checkpoints
import oracle
from checkpoints import numbered_set, write_one
from manifest import GOOD, by_id
from mounts import FIXTURES, Mount, TestCase, tensorfs, visible_files

FILE = "model.safetensors"
MAP = "model.safetensors.index.json"
NOTE = "TENSORFS-ERROR.txt"


class OfRankShards(TestCase):
    def shown(self, source, *options):
        with Mount(source, *options) as m:
            names = sorted(path.name for path in m.path.iterdir())
            return names, json.loads((m.path / MAP).read_text()) if MAP in names else None

    def test_it_says_what_the_one_of_torch_says(self):
        for entry in (e for e in GOOD if e.kind == "dcp" and e.fields.get("expected_by", "").startswith("torch")):
            with self.subTest(entry.id):
                torchs = json.loads((FIXTURES / entry.fields["path"] / "expected" / MAP).read_text())
                names, shown = self.shown(entry.source)
                self.assertIn(FILE, names)
                self.assertEqual(shown["metadata"], torchs["metadata"])
                self.assertEqual(shown["weight_map"], dict.fromkeys(torchs["weight_map"], FILE))
                self.assertEqual(list(shown["weight_map"]), sorted(shown["weight_map"]))

    def test_its_total_size_counts_every_dtype(self):
        for id in ("dcp_ints", "dcp_packed_f4", "dcp_scalar_and_empty", "dcp_global_shapes"):
            entry = by_id(id)
            _, shown = self.shown(entry.source)
            self.assertEqual(shown["metadata"], {"total_size": sum(t["nbytes"] for t in entry.tensors.values())})
            self.assertEqual(shown["weight_map"], dict.fromkeys(entry.tensors, FILE))

    def test_it_names_a_file_that_holds_every_tensor(self):
        """As QuantizedHuggingFaceStorageReader goes about it."""
        with Mount(by_id("dcp_grid_2d").source) as m:
            weight_map = json.loads((m.path / MAP).read_text())["weight_map"]
            for name, file in weight_map.items():
                self.assertIn(name, oracle.read_header_of(m.path / file).tensors)

    def test_no_map_is_shown_where_none_is_asked_for_or_none_fits(self):
        source = by_id("dcp_row_wise").source
        self.assertEqual(self.shown(source, "weight-map=hide"), ([FILE], None))
        self.assertEqual(self.shown(source, "format=bintensors"), (["model.bt"], None))
        names, _ = self.shown(source, "layout=original")
        self.assertEqual(names, sorted(path.name for path in source.iterdir()))

    def test_a_map_of_the_source_is_that_one_rewritten(self):
        source = self.copy(by_id("dcp_row_wise").source, "model")
        shard = sorted(path.name for path in source.iterdir())[0]
        tensors = oracle.read_header_of(source / shard).tensors
        metadata = {"total_size": 1, "total_parameters": 7}
        (source / MAP).write_text(json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(tensors, shard)}))
        names, shown = self.shown(source)
        self.assertEqual(names, [FILE, MAP])
        self.assertEqual(shown["metadata"]["total_parameters"], 7)

    def test_a_map_that_outlived_its_files_does_not_come_through(self):
        source = self.copy(by_id("dcp_row_wise").source, "model")
        (source / MAP).write_text(json.dumps({"metadata": {}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}))
        names, shown = self.shown(source)
        self.assertEqual(names, [FILE, MAP])
        self.assertEqual(set(shown["weight_map"].values()), {FILE})

    def test_files_that_were_one_already_get_none(self):
        for id in ("st_many", "hf_no_index"):
            names, _ = self.shown(by_id(id).source)
            self.assertEqual([name for name in names if name.endswith(".index.json")], [])

    def test_the_mounted_folder_verifies_and_converts_as_the_shards_do(self):
        source = checkpoints.grid_2d(self.tmp / "source")
        with Mount(source) as m:
            # A copy of what is shown stands for itself.
            copy = self.copy(m.path, "copy")
        self.assertEqual(sorted(path.name for path in copy.iterdir()), [FILE, MAP])
        outcome = tensorfs("verify", copy, "--json")
        self.assert_done(outcome)
        (found,) = outcome.json()["sets"]
        self.assertEqual((found["name"], found["tail"]), (FILE, "proven"))
        out = self.tmp / "out.safetensors"
        self.assert_done(tensorfs("convert", copy, out, "--to=safetensors"))
        self.assertEqual(oracle.tensor_bytes(out), oracle.tensor_bytes(Path(copy, FILE)))


class BadMaps(TestCase):
    def setUp(self):
        super().setUp()
        numbered_set(self.tmp / "tree/good", 3)
        self.folder = self.tmp / "tree/ck"
        self.folder.mkdir()

    def assert_hidden(self, text):
        """With `text` as weight map nothing but the note is left of the folder."""
        (self.folder / MAP).write_text(text)
        self.assert_refused(tensorfs("verify", self.folder))
        with Mount(self.tmp / "tree") as m:
            self.assertEqual(visible_files(m.path / "ck"), [NOTE])
            self.assertIn(MAP, (m.path / "ck" / NOTE).read_text())
            for entry in self.folder.iterdir():
                self.assertFalse((m.path / "ck" / entry.name).exists(), entry.name)

    # A weight map that does not parse was shown beside the note, and its shards were taken for
    # checkpoints of their own, so that tools loaded half a model.
    def test_a_weight_map_that_does_not_parse_hides_what_it_names(self):
        for name in ("one", "two"):
            write_one(self.folder / f"{name}.safetensors", name, 1)
        named = '"one": "one.safetensors", "two": "two.safetensors"'
        for text in (
            f'{{"weight_map": {{{named}}}',
            f'{{"weight_map": {{{named}, "three": 3}}}}',
            f'{{"metadata": {{}}, "weight_map": {{{named}}}}} trailing',
        ):
            with self.subTest(text=text):
                self.assert_hidden(text)

    # A name that stands twice ended the parse at its second place: the shards read before it were
    # forgotten and shown.
    def test_a_doubled_name_hides_the_shards_of_both_places(self):
        for name in ("one", "two", "three"):
            write_one(self.folder / f"{name}.safetensors", name, 1)
        pairs = '"t": "one.safetensors", "t": "two.safetensors", "u": "three.safetensors"'
        self.assert_hidden(f'{{"weight_map": {{{pairs}}}}}')

    # A map of DCP shards named one more file; the map was refused with the set, and the extra file
    # was shown as a checkpoint of its own.
    def test_a_bad_map_of_dcp_shards_hides_the_extra_file_that_it_names(self):
        checkpoints.rows_of_one(self.folder)
        write_one(self.folder / "extra.safetensors", "extra", 1)
        pairs = f'"w": "{checkpoints.dcp_name(1)}", "extra": "extra.safetensors"'
        self.assert_hidden(f'{{"weight_map": {{{pairs}, "w": "{checkpoints.dcp_name(2)}"}}}}')
        self.assert_hidden(f'{{"weight_map": {{{pairs}')
