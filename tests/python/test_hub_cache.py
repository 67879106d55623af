"""A whole hub cache as source: each snapshot has one merged file, and no blob shows the bytes of it again."""

import hashlib
import unittest

import checkpoints
from mounts import Mount, TestCase, visible_files

MODEL = "models--ORG--NAME"


class HubCache(TestCase):
    def setUp(self):
        super().setUp()
        self.hub = self.tmp / "hub"
        self.checkpoint = checkpoints.hf_set(self.tmp / "checkpoint", megabytes=1)
        self.snapshot = checkpoints.hub_cache(self.hub / MODEL, self.checkpoint)
        self.blobs = sorted(blob.name for blob in (self.hub / MODEL / "blobs").iterdir())
        self.shards = {hashlib.sha256(file.read_bytes()).hexdigest() for file in self.checkpoint.glob("*.safetensors")}

    def shown(self, source, *options):
        """Names in the snapshot and among the blobs of a mount of `source`."""
        with Mount(source, *options) as m:
            model = m.path / MODEL if source == self.hub else m.path
            snapshot = model / "snapshots" / self.snapshot.name
            if not options:
                self.assert_same((snapshot / "model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))
                self.assertEqual((model / "refs/main").read_text(), self.snapshot.name)
            return visible_files(snapshot), visible_files(model / "blobs")

    # `blobs` showed the shards beside the merged file of the snapshot, so that copies took their bytes twice.
    def test_blobs_show_no_shard_that_a_snapshot_shows_merged(self):
        self.assertEqual(len(self.shards), 3)
        for source in (self.hub, self.hub / MODEL):
            snapshot, blobs = self.shown(source)
            self.assertEqual(snapshot, ["config.json", "model.safetensors", "model.safetensors.index.json"])
            self.assertEqual(blobs, [name for name in self.blobs if name not in self.shards])

    def test_blobs_show_every_file_where_shards_are_shown_as_they_are(self):
        snapshot, blobs = self.shown(self.hub, "layout=original")
        self.assertEqual(snapshot, visible_files(self.checkpoint))
        self.assertEqual(blobs, self.blobs)

    def test_blobs_of_other_files_and_of_no_snapshot_are_shown(self):
        name = "b" * 64
        (self.hub / MODEL / "blobs" / name).write_bytes(b"of no snapshot")
        whole = checkpoints.hf_whole(self.checkpoint)
        blob = self.hub / MODEL / "blobs" / hashlib.sha256(whole).hexdigest()
        blob.write_bytes(whole)
        other = self.snapshot.with_name("c" * 40)
        other.mkdir()
        (other / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
        shown = self.shown(self.hub)[1]
        self.assertIn(name, shown)
        self.assertIn(blob.name, shown)


if __name__ == "__main__":
    unittest.main()
