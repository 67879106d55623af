"""`tensorfs diff`: which tensors of two checkpoints differ, with the exit status of diff(1)."""

import os
import signal
import subprocess

import numpy as np

import checkpoints
from manifest import by_id
from mounts import BIN, Mount, TestCase, tensorfs


def save(folder, tensors):
    folder.mkdir(exist_ok=True)
    rows = [(name, "F32", list(data.shape), data.astype("<f4").tobytes()) for name, data in tensors.items()]
    checkpoints.write_shard(folder / "model.safetensors", rows)
    return folder


class Diff(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(4)
        self.tensors = {f"layers.{n}.w": rng.standard_normal((40, 30 + n)) for n in range(6)}
        self.tensors["large"] = rng.standard_normal((700, 1000))
        self.tensors["empty"] = np.zeros((0, 3))
        self.a = save(self.tmp / "a", self.tensors)

    def diff(self, a, b, *words, code):
        outcome = tensorfs("diff", a, b, "--json", *words)
        self.assertEqual(outcome.code, code, outcome.stderr)
        text = tensorfs("diff", a, b, *words)
        self.assertEqual(text.code, code)
        # Like diff(1), it is silent if there is no difference.
        self.assertEqual(text.stdout == "", code == 0)
        return outcome.json()

    def changed(self):
        """A copy with one tensor gone, one added, one renamed, and one changed in each way."""
        new = dict(self.tensors)
        del new["layers.0.w"]
        new["extra"] = np.ones((2, 2))
        new["model.layers.1.w"] = new.pop("layers.1.w")
        new["layers.2.w"] = new["layers.2.w"].T
        new["large"] = new["large"].copy()
        new["large"][-1, -1] += 1
        folder = save(self.tmp / "b", {name: data for name, data in new.items() if name != "layers.3.w"})
        other = [("layers.3.w", "I32", [40, 33], self.tensors["layers.3.w"].astype("<f4").tobytes())]
        checkpoints.write_shard(folder / "other.safetensors", other)
        checkpoints.write_weight_map(folder, {"model.safetensors": list(new), "other.safetensors": ["layers.3.w"]})
        return folder

    def assert_changed(self, found):
        self.assertEqual([t["name"] for t in found["gone"]], ["layers.0.w"])
        self.assertEqual([(t["name"], t["shape"]) for t in found["added"]], [("extra", [2, 2])])
        self.assertEqual([(t["name"], t["new_name"]) for t in found["renamed"]], [("layers.1.w", "model.layers.1.w")])
        changed = {t["name"]: t for t in found["changed"]}
        self.assertEqual(sorted(changed), ["large", "layers.2.w", "layers.3.w"])
        self.assertTrue(changed["large"]["bytes_differ"])
        self.assertEqual(changed["layers.2.w"]["shape"], [[40, 32], [32, 40]])
        self.assertEqual(changed["layers.3.w"]["dtype"], ["F32", "I32"])
        self.assertFalse(found["same"])

    def test_tensors_that_are_gone_added_renamed_and_changed_are_told(self):
        changed = self.changed()
        options = ("-o", "prefer=shards")
        found = self.diff(self.a, changed, *options, code=1)
        self.assert_changed(found)
        self.assertGreater(found["bytes_read"], 0)
        text = tensorfs("diff", self.a, changed, *options).stdout
        for line in ("- layers.0.w", "+ extra", "> layers.1.w", "! large  other bytes", "! layers.3.w  F32 to I32"):
            self.assertIn(f"\n{line}", text)

    def test_recorded_checksums_are_used_and_bytes_are_read_on_request(self):
        b = save(self.tmp / "b", self.tensors)
        for folder in (self.a, b):
            self.assert_done(tensorfs("verify", folder))
        self.assertEqual(self.diff(self.a, b, code=0)["bytes_read"], 0)
        self.assertEqual(self.diff(self.a, b, "--bytes", code=0)["bytes_read"], 2 * (self.a_len()))
        # Bytes that change without a new time are seen by reading alone.
        path = b / "model.safetensors"
        before = path.stat()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x55")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = self.diff(self.a, b, "--bytes", code=1)
        self.assertEqual(len(found["changed"]), 1)

    def a_len(self):
        return sum(data.size * 4 for data in self.tensors.values())

    def test_equal_checkpoints_are_the_same_however_they_are_cut(self):
        self.assertTrue(self.diff(self.a, self.a, code=0)["same"])
        link = self.tmp / "linked"
        link.mkdir()
        os.link(self.a / "model.safetensors", link / "model.safetensors")
        # The same file needs no look at its bytes.
        self.assertEqual(self.diff(self.a, link, code=0)["bytes_read"], 0)
        shards = checkpoints.grid_2d(self.tmp / "grid")
        self.assert_done(tensorfs("consolidate", shards, self.tmp / "whole"))
        self.assertTrue(self.diff(shards, self.tmp / "whole", code=0)["same"])
        self.assert_done(tensorfs("convert", shards, self.tmp / "whole.bt", "--to", "bintensors"))
        self.assertTrue(self.diff(shards, self.tmp / "whole.bt", code=0)["same"])
        with Mount(shards) as m:
            self.diff(m.path, self.tmp / "whole", code=0)

    def test_headers_alone_are_compared_on_request(self):
        other = {name: data + 1 for name, data in self.tensors.items()}
        b = save(self.tmp / "b", other)
        found = self.diff(self.a, b, "--headers", code=0)
        self.assertFalse(found["bytes_compared"])
        self.diff(self.a, b, code=1)

    def test_trouble_has_the_status_two(self):
        for words in ((self.a, self.tmp / "none"), (self.tmp / "none", self.a), (self.a,),
                      (self.a, by_id("bad_dcp_hole_middle").source), (self.a, self.a, "--bytes", "--headers")):
            outcome = tensorfs("diff", *words)
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertEqual(outcome.stdout, "")
