"""Files of other formats: every command and a mount say what such a file is and what to do, in one line."""

import gzip
import io
import json
import os
import pickle
import zipfile

import numpy as np

import checkpoints
from mounts import BIN, TestCase, tensorfs

HTML = b"<!doctype html>\n<html><head><title>Sign in</title></head><body></body></html>\n"


def torch_save(name="archive"):
    """A file of torch.save without tensors."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(f"{name}/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr(f"{name}/version", "3\n")
    return made.getvalue()


def numpy_file(save, *arrays):
    made = io.BytesIO()
    save(made, *arrays)
    return made.getvalue()


class Foreign(TestCase):
    def write(self, name, content):
        path = self.tmp / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        return path

    def assert_says(self, source, *words):
        """Each command refuses `source` in one line with these words."""
        out = self.tmp / "out"
        for command in (
            ["ls", source],
            ["inspect", source],
            ["load", source],
            ["verify", source],
            ["index", source],
            ["cat", source, "x"],
            ["report", source, "--html", out],
            ["consolidate", source, out],
            ["convert", source, out, "--to", "safetensors"],
            ["diff", source, source],
        ):
            outcome = tensorfs(*command)
            self.assertEqual(outcome.code, 2 if command[0] == "diff" else 1, (command, outcome))
            self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
            for word in words:
                self.assertIn(word, outcome.stderr, command)
            self.assertFalse(out.exists(), command)
        target = self.tmp / "mnt"
        target.mkdir(exist_ok=True)
        outcome = tensorfs("mount", source, target)
        self.assertEqual(outcome.code, 1, outcome)
        for word in words:
            self.assertIn(word, outcome.stderr)

    def test_a_file_that_is_named_is_told_for_what_it_is_by_every_command(self):
        self.assert_says(self.write("model.bin", torch_save()), "model.bin: is a file of torch.save without tensors", "name the file")
        self.assert_says(self.write("web/model.safetensors", HTML), "an HTML page", "`Sign in`", "again")

    def test_each_format_is_told_and_keeps_its_class(self):
        for name, content, words, kind in (
            ("__0_0.distcp", torch_save(), "name the folder that has both", "zip_prefix"),
            ("model.safetensors", torch_save("model"), "a file of torch.save", "zip_prefix"),
            ("state.pkl", pickle.dumps({"a": 1}), "a pickle of Python", "header_too_large"),
            ("a.npy", numpy_file(np.save, np.zeros(3)), "one array of numpy", "header_too_large"),
            ("a.npz", numpy_file(np.savez, np.zeros(3)), "arrays of numpy", "zip_prefix"),
            ("m.safetensors.gz", gzip.compress(b"x" * 99), "packed by gzip", "header_too_large"),
            ("m.gguf", b"GGUF\3" + bytes(range(1, 90)), "GGUF", "header_too_large"),
            ("config.json", json.dumps({"hidden_size": 64}, indent=1).encode(), "name the folder", "header_too_large"),
            ("m.safetensors", gzip.compress(os.urandom(600_000), mtime=0), "packed by gzip", "header_utf8"),
            ("model.safetensors", "<html><title>Acc\u00e8s refus\u00e9</title>".encode("latin-1"), "`Acc\u00e8s refus\u00e9`", "header_too_large"),
            ("model.safetensors", "Zugriff verweigert".encode("utf-16"), "`Zugriff verweigert`", "header_too_large"),
            ("model.safetensors", BIN.read_bytes()[:5000], "a program or a library", "header_too_large"),
            ("state.pkl", pickle.dumps({"a": 1}, protocol=0), "a pickle of Python", "header_too_large"),
            ("model.safetensors", bytes(8) + b"{}" * 99, "begins with 8 bytes of zeros", "header_json"),
            ("model.safetensors", b"", "is empty", "too_short"),
            ("model.safetensors", bytes(5000), "zeros", "header_json"),
        ):
            with self.subTest(name, words=words):
                outcome = tensorfs("verify", self.write(name, content), "--json")
                self.assertEqual(outcome.code, 1)
                self.assertEqual(outcome.json()["class"], kind, outcome.json())
                self.assertIn(words, outcome.json()["error"])

    def test_a_folder_with_a_config_and_no_weights_is_told(self):
        self.write("model/config.json", b"{}")
        self.assert_says(self.tmp / "model", "no safetensors", "config.json is there without weights; fetch or save them too")

    def test_a_folder_of_such_files_is_told_for_what_it_holds_by_every_command(self):
        self.write("step/a.gguf", b"GGUF\3" + bytes(range(1, 90)))
        self.write("step/.metadata", pickle.dumps({"torch.distributed.checkpoint.metadata": 1}))
        self.assert_says(self.tmp / "step", "no safetensors", ".metadata (and 1 other such file)", "name the folder that has both")

    def test_a_download_that_did_not_end_is_told_though_its_header_is_whole(self):
        shard = checkpoints.hf_set(self.tmp / "set", 1, 1) / "model-00001-of-00001.safetensors"
        data = shard.read_bytes()
        for end in (".part", ".incomplete"):
            self.write(f"part{end}/model.safetensors{end}", data[: len(data) // 2])
            self.assert_says(self.tmp / f"part{end}", f"is an unfinished download by its name, `*{end}`")

    def test_a_snapshot_of_the_hub_cache_tells_of_a_download_that_did_not_end(self):
        snapshot = self.tmp / "models--a--b/snapshots/1"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (self.tmp / "models--a--b/blobs").mkdir()
        (self.tmp / "models--a--b/blobs/12ab.incomplete").write_bytes(b"1")
        outcome = tensorfs("ls", snapshot)
        self.assertIn("1 download of the model not finished", outcome.stderr)
