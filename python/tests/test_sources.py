"""Sources that are not paths of weights: models of the hub cache by name, and files of other formats."""

import io
import os
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors
import safetensors.numpy

import tensorfs
from package import TestCase


class Foreign(TestCase):
    def write(self, name, content):
        path = self.tmp / name
        path.write_bytes(content)
        return path

    def torch_save(self):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02}q\x00.")
        return made.getvalue()

    def test_each_way_of_opening_says_what_the_file_is_with_the_exception_of_safetensors(self):
        file = self.write("model.safetensors", self.torch_save())
        folder = self.tmp / "folder"
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(self.torch_save())
        for source in (file, folder, [file], {"w": file}):
            for way in (
                lambda source: tensorfs.safe_open(source, framework="np"),
                lambda source: tensorfs.load_file(source, framework="np"),
                lambda source: tensorfs.load_into({}, source),
            ):
                with self.subTest(source=source), self.assertRaises(safetensors.SafetensorError) as raised:
                    way(source)
                self.assertIn("torch.save", str(raised.exception))
                self.assertNotIn("announces", str(raised.exception))
        # The genuine package refuses it with the same class.
        with self.assertRaises(safetensors.SafetensorError):
            safetensors.safe_open(file, framework="np")

    def test_bytes_are_told_too(self):
        with self.assertRaises(safetensors.SafetensorError) as raised:
            tensorfs.numpy.load(b"<!DOCTYPE html><title>Sign in</title>")
        self.assertIn("an HTML page with the title `Sign in`", str(raised.exception))


class HubNames(TestCase):
    def setUp(self):
        super().setUp()
        commit = "c" * 40
        self.snapshot = self.tmp / "hub/models--acme--tiny/snapshots" / commit
        self.snapshot.mkdir(parents=True)
        refs = self.tmp / "hub/models--acme--tiny/refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
        self.weights = {"w": np.arange(6, dtype="f4").reshape(2, 3)}
        safetensors.numpy.save_file(self.weights, self.snapshot / "model.safetensors")
        work = self.tmp / "work"
        work.mkdir()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(work)
        changed = mock.patch.dict(os.environ, {"HF_HUB_CACHE": str(self.tmp / "hub")})
        changed.start()
        self.addCleanup(changed.stop)

    def test_a_name_opens_the_snapshot_of_the_cache(self):
        for source in ("acme/tiny", Path("acme/tiny"), "acme/tiny@main", f"acme/tiny@{'c' * 40}"):
            found = tensorfs.load_file(source, framework="np")
            np.testing.assert_array_equal(found["w"], self.weights["w"])
        tensorfs.consolidate("acme/tiny", self.tmp / "out")
        np.testing.assert_array_equal(safetensors.numpy.load_file(self.tmp / "out/model.safetensors")["w"], self.weights["w"])

    def test_a_path_wins(self):
        os.makedirs("acme/tiny")
        safetensors.numpy.save_file({"here": np.zeros(1)}, "acme/tiny/model.safetensors")
        self.assertEqual(list(tensorfs.load_file("acme/tiny", framework="np")), ["here"])

    def test_a_file_that_is_not_there_is_told_as_safetensors_does(self):
        for name in ("acme/other.safetensors", "acme/none"):
            with self.assertRaises(FileNotFoundError) as ours:
                tensorfs.safe_open(name, framework="np")
            with self.assertRaises(FileNotFoundError) as genuine:
                safetensors.safe_open(name, framework="np")
            self.assertEqual(str(ours.exception), str(genuine.exception))
        with self.assertRaises(FileNotFoundError) as raised:
            tensorfs.safe_open("acme/tiny@v9", framework="np")
        self.assertIn("no revision v9", str(raised.exception))
