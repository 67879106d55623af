"""The cost of a change in one folder of a large tree."""

import re
import sys
import unittest
from pathlib import Path

import checkpoints
from checkpoints import numbered_set, shard_name, write_one
from mounts import Mount, TestCase, wait_until

FILE = "model.safetensors"
FOLDERS, FILES = 60, 1000
MEGABYTE = 1 << 20


class LargeTree(TestCase):
    def peak(self, m):
        status = Path(f"/proc/{m.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    def replace(self, model, round):
        """A new shard in the place of the first."""
        new = model / "new"
        write_one(new, "t1", 1000 + round)
        new.rename(model / shard_name(1, 3, "model"))

    # Each replaced shard copied the whole tree twice, in time and memory.
    def test_a_replaced_shard_does_not_cost_what_the_whole_tree_costs(self):
        tree = self.tmp / "tree"
        model = numbered_set(tree / "aaa", 1)
        for folder in range(FOLDERS):
            (tree / f"data{folder:03}").mkdir()
            for number in range(FILES):
                (tree / f"data{folder:03}" / f"some-rather-usual-name-{number:05}.txt").touch()
        with Mount(tree) as m:
            self.assertTrue((m.path / "aaa" / FILE).exists())
            before = self.peak(m)
            for round in range(6):
                self.replace(model, round)
                whole = checkpoints.hf_whole(model)
                wait_until(lambda: (m.path / "aaa" / FILE).read_bytes() == whole, 20, f"change {round} is seen")
            # The files of the set itself are read in blocks that stay.
            self.assertLess(self.peak(m) - before, 16 * MEGABYTE)


if __name__ == "__main__":
    sys.exit(unittest.main())
