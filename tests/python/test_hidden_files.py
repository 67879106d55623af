"""Hidden files are no part of a checkpoint, and folders that the mount leaves empty are not shown."""

import oracle
from manifest import by_id
from mounts import Mount, TestCase, tensorfs, visible_files

FILE = "model.safetensors"
# A file that macOS writes: the attributes of the file beside it.
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(38)


class SidecarsOfMacOS(TestCase):
    def test_they_change_no_checkpoint(self):
        for id, option in (("hf_gpt2_tiny", None), ("dcp_row_wise", None), ("hf_three_shards", "layout=original")):
            with self.subTest(id):
                entry = by_id(id)
                source = self.copy(entry.source, id)
                expected = self.shown(source, option)
                for path in list(source.iterdir()):
                    (source / f"._{path.name}").write_bytes(APPLE_DOUBLE)
                found = self.shown(source, option)
                sidecars = {name for name in found if name.startswith("._")}
                self.assertEqual({name: found[name] for name in found.keys() - sidecars}, expected)
                # They are mirrored as every other file is.
                self.assertEqual({found[name] for name in sidecars}, {oracle.sha256(APPLE_DOUBLE)})
                outcome = tensorfs("verify", source, "--json")
                self.assert_done(outcome)
                self.assertEqual(len(outcome.json()["sets"]), 1, outcome.json())

    def test_a_folder_with_nothing_else_holds_no_checkpoint(self):
        (self.tmp / "._model.safetensors").write_bytes(APPLE_DOUBLE)
        outcome = tensorfs("verify", self.tmp)
        self.assert_refused(outcome)
        self.assertIn("no safetensors, bintensors, tensorizer or torch files", outcome.stderr)

    def test_a_hidden_file_that_is_named_is_opened(self):
        source = self.tmp / ".model.safetensors"
        source.write_bytes((by_id("st_many").source).read_bytes())
        self.assert_done(tensorfs("verify", source))

    def shown(self, source, option):
        with Mount(source, *([option] if option else [])) as m:
            return {str(name): oracle.sha256((m.path / name).read_bytes()) for name in visible_files(m.path)}


class EmptyFolders(TestCase):
    """`sharded/` holds the rank shards of the files above it, which torch has consolidated."""

    def setUp(self):
        super().setUp()
        self.source = self.copy(by_id("dcp_with_consolidated").source, "model")

    def test_a_folder_whose_checkpoint_the_parent_shows_is_not_shown_when_it_is_empty(self):
        with Mount(self.source) as m:
            names = sorted(path.name for path in m.path.iterdir())
            self.assertEqual(names, [FILE, f"{FILE}.index.json"])
            self.assertFalse((m.path / "sharded").exists())

    def test_it_is_shown_with_what_else_lies_in_it(self):
        (self.source / "sharded/notes.txt").write_text("a\n")
        with Mount(self.source) as m:
            self.assertEqual([path.name for path in (m.path / "sharded").iterdir()], ["notes.txt"])

    def test_so_it_is_with_a_folder_in_it(self):
        (self.source / "sharded/more").mkdir()
        with Mount(self.source) as m:
            self.assertEqual([path.name for path in (m.path / "sharded").iterdir()], ["more"])

    def test_a_folder_that_is_empty_in_the_source_is_shown(self):
        (self.source / "consolidated").mkdir()
        with Mount(self.source) as m:
            self.assertTrue((m.path / "consolidated").is_dir())
