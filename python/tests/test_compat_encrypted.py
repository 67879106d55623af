"""`tensorfs.compat.tensorizer`: encrypted files that it writes. The key derivations have small limits, so that they are
fast."""

import dataclasses
import io
from unittest import mock

import numpy as np

from package import TestCase, needs_torch
from tensorfs.compat.tensorizer import (
    CryptographyError,
    DecryptionParams,
    EncryptionParams,
    TensorDeserializer,
    TensorSerializer,
    _secrets,
)

PASSPHRASE = "correct horse battery staple"
MIN = EncryptionParams.OpsLimit.MIN, EncryptionParams.MemLimit.MIN


class Writing(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(5)
        # The second array has several pieces of 2 MiB.
        self.arrays = {
            "a": rng.standard_normal((30, 7)).astype(np.float32),
            "long": rng.integers(0, 255, 5_000_001).astype(np.uint8),
            "one": np.array(3, np.int64),
        }
        self.out = self.tmp / "out.tensors"

    def write(self, encryption, out=None):
        serializer = TensorSerializer(self.out if out is None else out, encryption=encryption)
        serializer.write_state_dict(self.arrays)
        serializer.close()

    def check(self, decryption):
        with TensorDeserializer(self.out, "cpu", lazy_load=True, verify_hash=True, encryption=decryption) as found:
            rows = {row[2]: row[3].copy() for row in found.read_numpy_arrays()}
        self.assertEqual(list(rows), list(self.arrays))
        for name, array in self.arrays.items():
            self.assertEqual(rows[name].dtype, array.dtype)
            np.testing.assert_array_equal(rows[name], array)

    def refused(self, kind, decryption):
        with self.assertRaises(CryptographyError) as caught:
            TensorDeserializer(self.out, "cpu", encryption=decryption)
        self.assertEqual(caught.exception.kind, kind)

    def test_a_file_is_read_with_the_key_that_it_was_written_with_and_no_other(self):
        encryption = EncryptionParams.random()
        self.write(encryption)
        self.check(DecryptionParams.from_key(encryption.key))
        self.refused("decrypt_failed", DecryptionParams.from_key(EncryptionParams.random().key))
        self.refused("key_required", DecryptionParams.from_string(PASSPHRASE))
        self.refused("key_required", None)

    def test_a_file_is_read_with_its_passphrase_or_the_key_of_it(self):
        encryption = EncryptionParams.from_string(PASSPHRASE, *MIN)
        self.write(encryption)
        self.check(DecryptionParams.from_string(PASSPHRASE))
        self.check(DecryptionParams.from_string(PASSPHRASE.encode()))
        self.check(DecryptionParams.from_key(encryption.key))
        self.assertIn(encryption.salt, self.out.read_bytes())
        self.refused("decrypt_failed", DecryptionParams.from_string("another"))
        self.refused("key_required", None)

    def test_no_bytes_of_a_tensor_are_in_the_file(self):
        self.write(EncryptionParams.random())
        data = self.out.read_bytes()
        array = self.arrays["long"].tobytes()
        for start in (0, 2 << 20, len(array) - 64):
            self.assertNotIn(array[start : start + 64], data)
        self.assertNotIn(self.arrays["a"].tobytes()[:64], data)

    def test_the_same_key_encrypts_otherwise_each_time(self):
        encryption, files = EncryptionParams(bytes(32)), []
        for _ in range(2):
            self.write(encryption)
            files.append(self.out.read_bytes())
            self.check(DecryptionParams.from_key(bytes(32)))
        tails = [file[-1000:] for file in files]
        self.assertNotEqual(*tails)

    def test_file_objects_and_descriptors_are_encrypted(self):
        encryption = EncryptionParams(bytearray(range(32)))
        with open(self.out, "wb+") as file:
            self.write(encryption, file.fileno())
        self.check(DecryptionParams.from_key(encryption.key))
        kept = io.BytesIO()
        kept.close = lambda: None
        self.write(encryption, kept)
        self.out.write_bytes(kept.getvalue())
        self.check(DecryptionParams.from_key(encryption.key))

    def test_an_empty_tensor_is_refused_and_nothing_is_left(self):
        serializer = TensorSerializer(self.out, encryption=EncryptionParams.random())
        with self.assertRaisesRegex(Exception, "none.*without encryption"):
            serializer.write_state_dict({"a": self.arrays["a"], "none": np.zeros((0, 2), np.float32)})
        serializer.close()
        self.assertEqual(list(self.tmp.iterdir()), [])

    def test_only_parameters_for_writing_write_and_only_those_for_reading_read(self):
        encryption = EncryptionParams.random()
        for other in (DecryptionParams.from_key(encryption.key), encryption.key, PASSPHRASE):
            with self.assertRaisesRegex(TypeError, "expected EncryptionParams or None"):
                TensorSerializer(self.tmp / "folder/out.tensors", encryption=other)
        self.assertEqual(list(self.tmp.iterdir()), [])
        self.write(encryption)
        with self.assertRaisesRegex(TypeError, "expected DecryptionParams or None"):
            TensorDeserializer(self.out, "cpu", encryption=encryption)

    @needs_torch
    def test_torch_saves_and_loads_encrypted_tensors(self):
        import torch

        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

        saved, encryption = {"a": torch.rand(1000), "b": torch.arange(5)}, EncryptionParams.random()
        path = self.tmp / "module.pt"
        with tensorizer_saving(encryption=encryption):
            torch.save(saved, path)
        decryption = DecryptionParams.from_key(encryption.key)
        with tensorizer_loading(device="cpu", encryption=decryption):
            found = torch.load(path, weights_only=False)
        self.assertTrue(all(torch.equal(found[name], tensor) for name, tensor in saved.items()))
        with tensorizer_loading(device="cpu"), self.assertRaises(CryptographyError):
            torch.load(path, weights_only=False)


class Parameters(TestCase):
    def test_a_passphrase_gives_the_key_that_the_tensorizer_package_derives(self):
        made = EncryptionParams.from_string("test", *MIN, bytes(16))
        self.assertEqual(made.key.hex(), "185d9543e6945bb30c6ecb2d1ac58a388ddfe954c34cf395a4fa12f986897662")
        self.assertEqual(made.salt, bytes(16))
        made = EncryptionParams.from_string("p\u00e4ss", 2, 100_000, bytes(range(16)), encoding="latin-1")
        self.assertEqual(made.key.hex(), "20a4a863e6f09dcb223992f1f37638de95149b694653554df432361f31412e15")

    def test_a_passphrase_takes_the_moderate_limits_and_a_random_salt_by_default(self):
        with mock.patch.object(_secrets, "derive_key", return_value=bytes(32)) as derive:
            salts = {EncryptionParams.from_string(PASSPHRASE).salt for _ in range(2)}
        self.assertEqual({call.args for call in derive.call_args_list}, {(PASSPHRASE.encode(), 3, 256 << 20, s) for s in salts})
        self.assertEqual([len(salt) for salt in salts], [16, 16])

    def test_presets_are_those_of_libsodium(self):
        self.assertEqual(list(EncryptionParams.OpsLimit), [1, 2, 3, 4])
        self.assertEqual(list(EncryptionParams.MemLimit), [8 << 10, 64 << 20, 256 << 20, 1 << 30])
        with mock.patch.object(_secrets, "derive_key", return_value=bytes(32)):
            for ops, mem in zip(EncryptionParams.OpsLimit, EncryptionParams.MemLimit):
                EncryptionParams.from_string(PASSPHRASE, ops, mem)

    def test_bad_arguments_are_refused_before_a_key_is_derived(self):
        make, ops, mem = EncryptionParams.from_string, EncryptionParams.OpsLimit.MIN, EncryptionParams.MemLimit.MIN
        with mock.patch.object(_secrets, "derive_key", side_effect=AssertionError):
            for arguments, error, message in (
                (("",), ValueError, "source: is empty"),
                ((b"",), ValueError, "source: is empty"),
                ((7,), TypeError, "source: .*not int"),
                (("x", mem), TypeError, "opslimit: .*not MemLimit"),
                (("x", 1.5), TypeError, "opslimit: .*not float"),
                (("x", 0), ValueError, "opslimit=0: expected 1 to 64 passes"),
                (("x", 17, 1 << 30), ValueError, "opslimit=17: expected 1 to 16 passes"),
                (("x", -1), ValueError, "opslimit=-1"),
                (("x", ops, ops), TypeError, "memlimit: .*not OpsLimit"),
                (("x", 1, 8191), ValueError, "memlimit=8191: expected 8192 to 1073741824 bytes"),
                (("x", 1, (1 << 30) + 1), ValueError, "memlimit=1073741825"),
                (("x", 1, mem, bytes(15)), ValueError, "salt: expected 16 bytes, not 15"),
                (("x", 1, mem, "0" * 16), TypeError, "salt: .*not str"),
            ):
                with self.subTest(arguments=arguments), self.assertRaisesRegex(error, message):
                    make(*arguments)
        for key, error in ((bytes(31), ValueError), (b"", ValueError), ("0" * 32, TypeError), (32, TypeError)):
            with self.subTest(key=key), self.assertRaises(error):
                EncryptionParams(key)

    def test_keys_have_no_salt_and_are_not_shown(self):
        made = EncryptionParams(bytes(range(32)))
        self.assertEqual((made.key, made), (bytes(range(32)), EncryptionParams(memoryview(bytes(range(32))))))
        with self.assertRaisesRegex(ValueError, "has no salt"):
            made.salt
        self.assertNotEqual(EncryptionParams.random(), EncryptionParams.random())
        reading = DecryptionParams.from_key(made.key), DecryptionParams.from_string(PASSPHRASE)
        self.assertEqual([dataclasses.astuple(one) for one in reading], [(made.key, None), (None, PASSPHRASE.encode())])
        self.assertEqual([repr(one) for one in (made, *reading)], ["<EncryptionParams>"] + ["<DecryptionParams>"] * 2)
