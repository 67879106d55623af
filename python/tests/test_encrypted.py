"""Encrypted tensorizer files in the package: every way of loading, and the refusals."""

import os

import numpy as np

import tensorfs
import tensorfs.numpy
from package import Mount, TestCase, environment
from tensorizer_files import Stored, encrypted_file_of

KEY = bytes(range(100, 132))
PIECE = 1 << 16


class Encrypted(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(11)
        self.arrays = {
            "w": rng.standard_normal((1500, 700)).astype(np.float32),
            "ww": rng.integers(0, 100, (33, 5, 2)).astype(np.float16),
            "www": np.array(7),
            "wwww": np.zeros((0, 4), np.float32),
            "wwwww": rng.integers(0, 255, 3 * PIECE).astype(np.uint8),
        }
        dtypes = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}
        stored = [
            Stored.of(name, dtypes[str(array.dtype)], array.shape, array.tobytes())
            for name, array in self.arrays.items()
        ]
        self.file = self.tmp / "one.tensors"
        self.file.write_bytes(encrypted_file_of(stored, KEY, PIECE))
        self.key_file = self.tmp / "key"
        self.key_file.write_text(KEY.hex())

    def check(self, found):
        self.assertEqual(set(found), set(self.arrays))
        for name, array in self.arrays.items():
            self.assertEqual((found[name].dtype, found[name].shape), (array.dtype, array.shape))
            np.testing.assert_array_equal(found[name], array)

    def test_every_way_of_loading_decrypts(self):
        folder = self.tmp / "set"
        folder.mkdir()
        (folder / "model.tensors").write_bytes(self.file.read_bytes())
        for source in (self.file, folder, [self.file], dict.fromkeys(self.arrays, self.file)):
            self.check(tensorfs.numpy.load_file(source, key_file=self.key_file))
        for secret in ({"key": KEY}, {"key": KEY.hex()}, {"key": KEY.hex().encode()}, {"key_file": str(self.key_file)}):
            with tensorfs.safe_open(self.file, "np", **secret) as f:
                self.check({name: f.get_tensor(name) for name in f.keys()})
                self.check(dict(f.tensors()))
                part = f.get_slice("w")[3:400:7, 11:200]
                np.testing.assert_array_equal(part, self.arrays["w"][3:400:7, 11:200])
                for rows in ((0, 1), (700, 703), (10, 1490)):
                    np.testing.assert_array_equal(f.get_slice("w")[slice(*rows)], self.arrays["w"][slice(*rows)])
        with tensorfs.safe_open(self.file, "np", copy=False, key=KEY) as f:
            self.check(f.get_tensors())
        with environment(TENSORFS_KEY_FILE=str(self.key_file)):
            self.check(tensorfs.numpy.load_file(self.file))
        into = {name: np.zeros_like(array) for name, array in self.arrays.items()}
        tensorfs.load_into(into, self.file, key=KEY)
        self.check(into)

    def test_views_prefetch_and_consolidation_decrypt(self):
        with tensorfs.safe_open(self.file, "np", dtype="f16", include="w", key=KEY) as f:
            np.testing.assert_array_equal(f.get_tensor("w"), self.arrays["w"].astype(np.float16))
        with tensorfs.safe_open(self.file, "np", key=KEY) as f, f.prefetch() as loader:
            self.check(dict(loader))
        tensorfs.consolidate(self.file, self.tmp / "out", key=KEY)
        self.check(tensorfs.numpy.load_file(next((self.tmp / "out").glob("*.safetensors"))))

    def test_the_message_without_a_key_names_the_arguments(self):
        arguments = "`key_file=` or `key=`.*`passphrase_file=` or `passphrase=`"
        with self.assertRaisesRegex(tensorfs.SafetensorError, arguments):
            tensorfs.numpy.load_file(self.file)

    def test_the_derivation_of_a_key_does_not_count_as_a_file_system_that_does_not_answer(self):
        derived = self.tmp / "derived.tensors"
        stored = [Stored.of("w", "F32", self.arrays["w"].shape, self.arrays["w"].tobytes())]
        derived.write_bytes(encrypted_file_of(stored, KEY, PIECE, derivation=(1 << 14, 64 << 10)))
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            tensorfs.safe_open(derived, "np", passphrase="not that of the file", io_timeout=0.1)
        self.assertEqual(caught.exception.kind, "decrypt_failed")

    def test_a_key_that_does_not_come_is_told_from_a_file_system_that_does_not_answer(self):
        fifo = self.tmp / "fifo"
        os.mkfifo(fifo)
        with self.assertRaisesRegex(TimeoutError, "cannot open: its key did not come"):
            tensorfs.safe_open(self.file, "np", key_file=fifo, io_timeout=0.2)

    def test_a_mount_with_a_key_serves_the_package(self):
        with Mount(self.file, f"key-file={self.key_file}") as m:
            self.check(tensorfs.numpy.load_file(m.path / "one.safetensors"))

    def test_wrong_missing_and_needless_keys_are_refused(self):
        def kind(source, **secret):
            with self.assertRaises(tensorfs.SafetensorError) as caught:
                tensorfs.numpy.load_file(source, **secret)
            self.assertNotIn(KEY.hex(), str(caught.exception))
            return caught.exception.kind

        self.assertEqual(kind(self.file), "key_required")
        self.assertEqual(kind(self.file, key=bytes(32)), "decrypt_failed")
        self.assertEqual(kind(self.file, passphrase="x"), "key_required")
        for bad in (b"short", "short", "x" * 64, "x" * 32, KEY.hex()[1:], "\u0661" * 64):
            self.assertEqual(kind(self.file, key=bad), "usage")
        with self.assertRaisesRegex(TypeError, "key: expected bytes or a str of hexadecimal digits, not int"):
            tensorfs.numpy.load_file(self.file, key=7)
        self.assertEqual(kind(self.file, key=KEY, key_file=self.key_file), "usage")
        plain = self.tmp / "plain.safetensors"
        tensorfs.numpy.save_file({"a": np.zeros(3)}, plain)
        self.assertEqual(kind(plain, key=KEY), "not_encrypted")
        data = bytearray(self.file.read_bytes())
        data[-1000] ^= 1
        self.file.write_bytes(data)
        self.assertEqual(kind(self.file, key=KEY), "decrypt_failed")
        into = {name: np.zeros_like(array) for name, array in self.arrays.items()}
        with self.assertRaises(tensorfs.SafetensorError):
            tensorfs.load_into(into, self.file, key=KEY)
