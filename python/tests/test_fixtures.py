"""Every fixture is loaded with the bytes that the manifest states, or refused with a typed error that says what is
wrong."""

import hashlib

import numpy as np
import safetensors
from safetensors.numpy import load_file as genuine_load_file

import tensorfs
import tensorfs.numpy
from manifest import BAD, GOOD, by_id
from package import FIXTURES, TestCase
from tensorfs._errors import shown


def source(entry):
    """The path to open. In a folder with two checkpoints, it is the path of the checkpoint that the entry means."""
    path = entry.source
    if entry.kind == "hf_single":
        return path / entry.shown
    if entry.kind == "hf_sharded":
        return path / entry.weight_map
    return path


class Good(TestCase):
    def loads(self, entry):
        choices = {"zero": "fp32"} if "zero=fp32" in entry.options else {}
        with tensorfs.safe_open(source(entry), "dlpack", **choices) as f:
            self.assertEqual(set(f.keys()), set(entry.tensors))
            self.assertEqual(sorted(f.offset_keys()), sorted(f.keys()))
            ways = [f.get_tensors(), {name: f.get_tensor(name) for name in f.keys()}, dict(f.tensors())]
            self.assertEqual(f.nbytes(), sum(fields["nbytes"] for fields in entry.tensors.values()))
        for tensors in ways:
            self.assertEqual(set(tensors), set(entry.tensors))
            for name, fields in entry.tensors.items():
                found = tensors[name]
                self.assertEqual((found.dtype, list(found.shape)), (fields["dtype"], fields["shape"]), name)
                self.assertEqual(hashlib.sha256(found.tobytes()).hexdigest(), fields["sha256"], name)


class Bad(TestCase):
    def refused(self, entry):
        path = entry.build(self.tmp)
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            with tensorfs.safe_open(path, "np") as f:
                f.get_tensors()
        error = caught.exception
        self.assertIsInstance(error, safetensors.SafetensorError)
        self.assertIn(error.kind, entry.classes, error)
        names = entry.names(path)
        self.assertTrue(any(name in str(error) for name in names), f"none of {sorted(names)} in {error}")
        if error.tensor is not None:
            self.assertIn(shown(error.tensor[:100]), str(error))

    def refused_or_right(self, entry):
        path = entry.build(self.tmp)
        try:
            with tensorfs.safe_open(path, "dlpack") as f:
                found = {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in f.get_tensors().items()}
        except tensorfs.SafetensorError as error:
            # The folder of a broken checkpoint may contain two checkpoints, which is an error of kind `usage`.
            self.assertIn(error.kind, entry.classes | {"usage"}, error)
            return
        if entry.tensors is not None:
            self.assertEqual(found, {name: fields["sha256"] for name, fields in entry.tensors.items()})


def for_each_fixture():
    for entry in GOOD:
        setattr(Good, f"test_{entry.id}_loads_byte_for_byte", lambda self, e=entry: self.loads(e))
    for entry in BAD:
        if entry.expect == "error":
            setattr(Bad, f"test_{entry.id}_is_refused", lambda self, e=entry: self.refused(e))
        else:
            setattr(Bad, f"test_{entry.id}_is_refused_or_right", lambda self, e=entry: self.refused_or_right(e))


for_each_fixture()


class Judged(TestCase):
    def test_arrays_are_those_of_safetensors(self):
        for path in sorted(FIXTURES.glob("hf/*/*.safetensors")):
            with self.subTest(path=path.name):
                try:
                    right = genuine_load_file(path)
                except TypeError:
                    # numpy itself lacks bfloat16.
                    continue
                found = tensorfs.numpy.load_file(path)
                self.assertEqual(list(found), list(right))
                for name, array in right.items():
                    self.assertEqual((found[name].dtype, found[name].shape), (array.dtype, array.shape))
                    np.testing.assert_array_equal(found[name], array)

    def test_a_damaged_file_is_named_with_its_tensor(self):
        entry = by_id("bad_dcp_hole_middle")
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            tensorfs.safe_open(entry.source, "np")
        error = caught.exception
        self.assertEqual(error.kind, "dcp_hole")
        self.assertIn(str(entry.source), error.path)
        self.assertIn(f"`{error.tensor}`", str(error))
