"""Which files form a set, and which name it is shown by."""

import json
import re
import unittest

import checkpoints
import oracle
from checkpoints import numbered_set, shard_name, write_one
from mounts import Mount, MountFailed, TestCase, tensorfs, visible_files

FILE = "model.safetensors"
NOTE = "TENSORFS-ERROR.txt"


class Sets(TestCase):
    def verify(self, source):
        """The outcome of verify and what it says of the only set."""
        outcome = tensorfs("verify", source, "--json")
        return outcome, outcome.json()["sets"][0]

    def assert_refused_as(self, source, fault):
        outcome, found = self.verify(source)
        self.assert_refused(outcome)
        self.assertEqual(found["class"], fault, outcome.stdout)

    # Two weight maps each named some shards of one DCP checkpoint; the set went to the first, and what
    # the second named was shown as whole tensors although it was pieces.
    def test_two_weight_maps_of_one_dcp_set_refuse_it(self):
        folder = checkpoints.row_wise(self.tmp / "tree/ck")
        tensors = ["embed", "norm", "bytes"]
        checkpoints.write_weight_map(folder, {checkpoints.dcp_name(1): tensors}, "model")
        checkpoints.write_weight_map(folder, {checkpoints.dcp_name(2): tensors}, "other")
        numbered_set(self.tmp / "tree/good", 3)
        self.assert_refused(tensorfs("verify", folder))
        with self.assertRaises(MountFailed), Mount(folder):
            pass
        for options in ([], ["prefer=shards"]):
            with Mount(self.tmp / "tree", *options) as m:
                self.assertEqual(visible_files(m.path / "ck"), [NOTE])
        for words in (["ls", folder], ["inspect", folder]):
            self.assert_no_pieces(tensorfs(*words, "--json").json())

    def assert_no_pieces(self, listed):
        for found in listed.get("sets") or []:
            for tensor in found.get("tensors") or []:
                self.assertIn(tensor["shape"][0], (4099, 1000), tensor)

    # Files that one rank wrote whole carry a sharding note with zero offsets; that note made a numbered
    # set a DCP one, where gaps in the numbers are normal, and a lost file went unnoticed.
    def test_a_numbered_set_with_sharding_notes_misses_its_lost_file(self):
        folder = self.tmp / "model"
        folder.mkdir()
        for number in (1, 2, 3):
            info = json.dumps({f"t{number}": {"saved_offsets": [0]}})
            metadata = {**checkpoints.FORMAT, "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": info}
            write_one(folder / shard_name(number, 3), f"t{number}", number, metadata)
        outcome, found = self.verify(folder)
        self.assert_done(outcome)
        self.assertEqual((found["kind"], found["tensors"]), ("numbered", 3))
        with Mount(folder) as m:
            self.assertEqual(set(oracle.tensor_bytes(m.path / FILE)), {"t1", "t2", "t3"})
        for number in (3, 1):
            away = (folder / shard_name(number, 3)).rename(self.tmp / "away")
            self.assert_refused_as(folder, "shard_missing")
            away.rename(folder / shard_name(number, 3))

    # A set named consolidated-*-of-* was shown as consolidated.safetensors, which some tools load
    # beside model.safetensors.
    def test_a_set_named_consolidated_is_shown_as_the_model(self):
        for with_map in (False, True):
            folder = numbered_set(self.tmp / f"map-{with_map}", 1, 2, "consolidated", with_map)
            with Mount(folder) as m:
                names = visible_files(m.path)
                self.assertIn(FILE, names)
                self.assertFalse([n for n in names if re.match(r"consolidated.*\.safetensors$", n)], names)
                expected = oracle.whole_tensors(sorted(folder.glob("*.safetensors")))
                self.assert_same((m.path / FILE).read_bytes(), expected)


if __name__ == "__main__":
    unittest.main()
