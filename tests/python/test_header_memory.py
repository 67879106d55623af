"""Memory for the headers of a folder: links to one file cost little more than the file."""

import json
import os
import re
import sys
import unittest
from pathlib import Path

from checkpoints import numbered_set
from mounts import BIN, Mount, TestCase, run_measured, wait_until

FILE = "model.safetensors"
TENSORS = 60_000
LINKS = 7


class LinkedHeaders(TestCase):
    def folder(self, name, links):
        """One file of many tensors, and links to it: each is a checkpoint of its own."""
        folder = self.tmp / name
        folder.mkdir(parents=True)
        tensors = {
            f"layers.{n}.some.rather.usual.name.weight": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]}
            for n in range(TENSORS)
        }
        header = json.dumps(tensors, separators=(",", ":")).encode()
        self.header_len = len(header)
        (folder / "m0.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(TENSORS))
        for number in range(1, links):
            os.link(folder / "m0.safetensors", folder / f"m{number}.safetensors")
        return folder

    def assert_links_cost_little(self, measure):
        alone, linked = measure("alone", 1), measure("linked", 1 + LINKS)
        each = (linked - alone) / LINKS / self.header_len
        self.assertLess(each, 1.9, f"{alone} bytes for one, {linked} for {1 + LINKS}")

    # Every link had its header parsed and kept: k links took k times the memory, of a daemon that is the last to be killed.
    def test_links_to_a_file_with_a_large_header_cost_little_in_commands(self):
        for words in (["index", "--rebuild"], ["verify"]):
            with self.subTest(words=words):

                def measure(name, links):
                    folder = self.folder(f"{words[0]}/{name}", links)
                    outcome, peak = run_measured(BIN, *words, folder, "--json")
                    self.assert_done(outcome)
                    self.assertTrue(outcome.json()["ok"])
                    return peak

                self.assert_links_cost_little(measure)

    def test_links_to_a_file_with_a_large_header_cost_little_in_the_background_of_a_mount(self):
        def measure(name, links):
            self.folder(f"{name}/tree/model", links)
            numbered_set(self.tmp / name / "tree/aaa", 1)
            index = self.tmp / name / "index"
            with Mount(self.tmp / name / "tree", f"index-dir={index}") as m:
                self.assertTrue((m.path / "aaa" / FILE).exists())
                wait_until(lambda: len(list(index.iterdir())) >= 2, 60, "both are indexed")
                for number in range(links):
                    self.assertTrue((m.path / f"model/m{number}.safetensors").exists())
                status = Path(f"/proc/{m.pid}/status").read_text()
                return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

        self.assert_links_cost_little(measure)


class ManyShards(TestCase):
    def shards(self, noted, count):
        """A set of shards with 500 tensors each; the bytes of all headers and of the weight map."""
        folder = self.tmp / f"noted-{noted}-{count}"
        folder.mkdir()
        each, total, shard_of = 500, 0, {}
        for shard in range(count):
            names = [f"model.layers.{shard}.mlp.experts.{n}.gate_proj.weight" for n in range(each)]
            header = {n: {"dtype": "U8", "shape": [1, 1], "data_offsets": [at, at + 1]} for at, n in enumerate(names)}
            if noted:
                note = json.dumps({n: {"saved_offsets": [0, 0]} for n in names})
                header["__metadata__"] = {"DCP_SHARDING_INFO": note, "DCP_VERSION": "1.0"}
                file = f"shard-{shard + 1:05}-model-00001-of-00001.safetensors"
            else:
                file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
                shard_of |= dict.fromkeys(names, file)
            text = json.dumps(header, separators=(",", ":")).encode()
            total += len(text)
            (folder / file).write_bytes(len(text).to_bytes(8, "little") + text + bytes(each))
        if shard_of:
            text = json.dumps({"metadata": {}, "weight_map": shard_of})
            total += len(text)
            (folder / "model.safetensors.index.json").write_text(text)
        return folder, total

    # All headers were held as trees of strings until the whole proof was done, and the weight map beside them.
    def test_a_first_proof_of_many_shards_takes_little_more_memory_than_their_headers(self):
        name = "model.layers.1.mlp.experts.5.gate_proj.weight"
        for noted in (False, True):
            with self.subTest(noted=noted):
                (few, len_of_few), (many, len_of_many) = (self.shards(noted, count) for count in (4, 128))
                _, least = run_measured(BIN, "inspect", few, name, "--index-dir", "none")
                outcome, peak = run_measured(BIN, "inspect", many, name, "--index-dir", "none")
                self.assert_done(outcome)
                more = (peak - least) / (len_of_many - len_of_few)
                self.assertLess(more, 3, f"{peak} bytes, {least} for a small one")


if __name__ == "__main__":
    sys.exit(unittest.main())
