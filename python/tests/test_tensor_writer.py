"""The native writer of tensorizer files: its bytes, its targets, and its errors."""

import io
import os

import numpy as np

import tensorfs
import tensorfs.numpy
from package import TestCase, python
from tensorfs import _tensorfs
from tensorizer_files import AREA, Stored, file_of


class Refusing(io.BytesIO):
    """A file object that accepts at most 1000 bytes at a time, and fails after a number of bytes."""

    def __init__(self, most):
        super().__init__()
        self.most = most

    def write(self, data):
        if self.tell() + len(data) > self.most:
            raise BufferError("the file is full")
        return super().write(data[:1000])


class Writer(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(3)
        self.stored, self.arrays = [], []
        for number, (dtype, shape, width) in enumerate([
            ("F32", [700, 300], 4), ("BF16", [33], 2), ("U8", [], 1), ("BOOL", [0, 4], 1), ("U8", [4_300_001], 1),
        ]):
            array = rng.integers(0, 2, int(np.prod(shape)) * width).astype(np.uint8)
            name = ["layers", number, "w"] if number == 1 else f"t{number}.\u00fc"
            self.arrays.append(array)
            self.stored.append(Stored.of(name, dtype, shape, array.tobytes()))
        self.tuples = [
            (stored.name, 2, 0, stored.dtype.decode(), stored.shape, array.ctypes.data, array.nbytes)
            for stored, array in zip(self.stored, self.arrays)
        ]
        self.expected = file_of(self.stored, area=AREA)
        self.path = self.tmp / "m.tensors"

    def test_a_path_appears_whole_at_the_end_and_has_the_bytes_of_the_package(self):
        for parts in ([5], [1, 4], [2, 0, 3]):
            writer, first = _tensorfs.TensorizerWriter(path=self.path), 0
            for count in parts:
                writer.write(self.tuples[first : first + count])
                first += count
            self.assertEqual(writer.data_len, sum(array.nbytes for array in self.arrays))
            writer.sync()
            self.assertEqual(os.listdir(self.tmp), [])
            self.assertEqual(writer.finish(), len(self.expected))
            self.assert_same(self.path.read_bytes(), self.expected)
            self.path.unlink()

    def test_file_objects_get_the_same_bytes_from_where_they_stand(self):
        with io.BytesIO() as memory, open(self.path, "wb+") as file, open(self.tmp / "raw", "wb+", buffering=0) as raw:
            for target in (memory, file, raw):
                writer = _tensorfs.TensorizerWriter(file=target)
                writer.write(self.tuples[:2])
                writer.sync()
                writer.write(self.tuples[2:])
                self.assertEqual(writer.finish(), len(self.expected))
                self.assertEqual(target.tell(), len(self.expected))
                target.seek(0)
                self.assert_same(target.read(), self.expected)
        short = Refusing(1 << 30)
        short.write(b"12345")
        writer = _tensorfs.TensorizerWriter(file=short)
        writer.write(self.tuples)
        writer.finish()
        self.assertEqual(len(short.getvalue()), 5 + len(self.expected))
        # The offsets in the tensorizer file count from its own first byte.
        self.assertEqual(short.getvalue()[:78], b"12345" + self.expected[:73])

    def test_the_exception_of_a_file_object_is_that_of_the_writer_and_ends_it(self):
        writer = _tensorfs.TensorizerWriter(file=Refusing(1_000_000))
        with self.assertRaisesRegex(BufferError, "the file is full"):
            writer.write(self.tuples)
        with self.assertRaisesRegex(ValueError, "has ended"):
            writer.write(self.tuples)

    def test_what_is_refused_leaves_nothing(self):
        name, kind, module, dtype, shape, address, length = self.tuples[0]
        for wrong, part in (
            ((b"", kind, module, dtype, shape, address, length), "its name has a length in bytes of 0"),
            ((name, 3, module, dtype, shape, address, length), "kind is 3"),
            ((name, kind, module, "<U4", shape, address, length), "dtype"),
            ((name, kind, module, dtype, [700, 301], address, length), "842800"),
        ):
            writer = _tensorfs.TensorizerWriter(path=self.path)
            with self.assertRaisesRegex(Exception, part):
                writer.write([wrong])
            writer.abort()
            self.assertEqual(os.listdir(self.tmp), [])
        self.path.write_text("mine")
        with self.assertRaisesRegex(Exception, "there already"):
            _tensorfs.TensorizerWriter(path=self.path, overwrite=False)
        writer = _tensorfs.TensorizerWriter(path=self.path)
        writer.write(self.tuples)
        del writer
        self.assertEqual((os.listdir(self.tmp), self.path.read_text()), (["m.tensors"], "mine"))

    def test_the_list_of_tensors_grows_with_the_first_write(self):
        one = np.ones(1, np.uint8)
        many = [(f"{number:0100}".encode(), 2, 0, "|u1", [1], one.ctypes.data, 1) for number in range(5000)]
        writer = _tensorfs.TensorizerWriter(path=self.path)
        writer.write(many[:10])
        with self.assertRaisesRegex(Exception, "write the tensors at once"):
            writer.write(many[10:])
        writer = _tensorfs.TensorizerWriter(path=self.path)
        writer.write(many)
        writer.finish()
        self.assertEqual(len(tensorfs.numpy.load_file(self.path)), 5000)

    def test_a_list_is_made_long_enough_before_the_first_write(self):
        one = np.ones(1, np.uint8)
        many = [(f"{number:0100}".encode(), 2, 0, "|u1", [1], one.ctypes.data, 1) for number in range(5000)]
        writer = _tensorfs.TensorizerWriter(path=self.path)
        writer.reserve(many)
        for start in range(0, 5000, 1000):
            writer.write(many[start : start + 1000])
        writer.finish()
        together = _tensorfs.TensorizerWriter(path=self.tmp / "together")
        together.write(many)
        together.finish()
        self.assert_same(self.path.read_bytes(), (self.tmp / "together").read_bytes())
        with self.assertRaisesRegex(ValueError, "at most 16777216"):
            _tensorfs.TensorizerWriter(path=self.path, entries_len=2**64 - 1)

    def test_names_that_are_not_read_are_not_written(self):
        one = np.ones(1, np.uint8)
        for names in (
            [b"\xff"], [b'\x1e["\\ud800"]'], [b"\x1e[1180591620717411303424]"], [b"a", b'\x1e["a",0]'],
            [b'\x1e["a",0]', b"a"], [b'\x1e["a","b"]', b"a.b"], [b"a", b"a"],
        ):
            writer = _tensorfs.TensorizerWriter(path=self.path)
            with self.subTest(names=names), self.assertRaises(tensorfs.SafetensorError):
                for name in names:
                    writer.write([(name, 2, 0, "|u1", [1], one.ctypes.data, 1)])
        self.assertEqual(os.listdir(self.tmp), [])

    def test_a_child_of_a_fork_cannot_use_or_remove_the_file_of_its_parent(self):
        python(
            """
import os, sys, numpy
from tensorfs import _tensorfs
one = numpy.ones(1, "u1")
tensors = [(b"a", 2, 0, "|u1", [1], one.ctypes.data, 1)]
writer = _tensorfs.TensorizerWriter(path=sys.argv[1])
child = os.fork()
if child == 0:
    for use in (lambda: writer.write(tensors), writer.sync, writer.finish, writer.abort, lambda: writer.data_len):
        try:
            use()
        except RuntimeError as error:
            assert "process" in str(error), error
        else:
            os._exit(1)
    del use, writer
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.write(tensors)
writer.finish()
""",
            self.path,
        )
        self.assertEqual(list(tensorfs.numpy.load_file(self.path)), ["a"])

    def test_meta_tensors_and_dimensions_of_more_than_32_bits(self):
        writer = _tensorfs.TensorizerWriter(path=self.path)
        writer.write([(b"meta", 0, 7, "<f4", [2, 3], 0, None), (b"long", 1, 0, "|u1", [0, 1 << 40], 0, 0)])
        writer.finish()
        self.assertEqual(self.path.read_bytes()[5], 5)
        found = tensorfs.numpy.load_file(self.path)
        self.assert_same(found["meta"].tobytes(), bytes(24))
        self.assertEqual(found["long"].shape, (0, 1 << 40))

    def encrypted(self, **secret):
        """Writes tensors that are not empty and have dtypes of numpy. Returns their bytes."""
        full = [0, 2, 4]
        writer = _tensorfs.TensorizerWriter(path=self.path, **secret)
        for number in full:
            writer.write([self.tuples[number]])
        writer.finish()
        data = self.path.read_bytes()
        self.assertTrue(all(self.arrays[number].tobytes() not in data for number in full if self.arrays[number].size > 16))
        return [self.arrays[number].tobytes() for number in full]

    def opened(self, **secret):
        with tensorfs.safe_open(self.path, "np", **secret) as f:
            return [f.get_tensor(name).tobytes() for name in f.offset_keys()]

    def kind(self, **secret):
        with self.assertRaises(tensorfs.SafetensorError) as caught:
            self.opened(**secret)
        return caught.exception.kind

    def test_a_key_encrypts_and_only_it_opens_the_file(self):
        key = bytes(range(7, 39))
        expected = self.encrypted(key=key)
        self.assertEqual(self.opened(key=key), expected)
        self.assertEqual(self.kind(key=bytes(32)), "decrypt_failed")
        self.assertEqual(self.kind(passphrase="words"), "key_required")
        self.assertEqual(self.kind(), "key_required")

    def test_a_derived_key_opens_by_its_passphrase(self):
        for ops_limit, mem_limit, salt in ((1, 8192, bytes(16)), (2, 100_000, bytes(range(16)))):
            key = _tensorfs.derive_key("w\u00f6rter".encode(), ops_limit, mem_limit, salt)
            expected = self.encrypted(key=key, derivation=(ops_limit, mem_limit, salt))
            for secret in ({"key": key}, {"passphrase": "w\u00f6rter"}, {"passphrase": "w\u00f6rter".encode()}):
                self.assertEqual(self.opened(**secret), expected)
            self.assertEqual(self.kind(passphrase="w\u00f6rter "), "decrypt_failed")
        self.assertEqual(
            # libsodium derives this key, by crypto_pwhash with 1 pass and 8192 bytes.
            _tensorfs.derive_key(b"passphrase", 1, 8192, bytes(range(16))).hex(),
            "fbf7e4ccf0f8866cd1825daa1412c2d48ca7ed8c0afc5e335aab5c73c2bf906f",
        )

    def test_wrong_keys_and_derivations_are_refused_before_anything_is_written(self):
        key, salt = bytes(32), bytes(16)
        for arguments, part in (
            ({"key": key[1:]}, "a key has 32 bytes, not 31"),
            ({"key": b""}, "a key has 32 bytes, not 0"),
            ({"derivation": (1, 8192, salt)}, "takes its key"),
            ({"key": key, "derivation": (1, 8192, salt[1:])}, "a salt has 16 bytes, not 15"),
            ({"key": key, "derivation": (0, 8192, salt)}, "0 passes"),
            ({"key": key, "derivation": (1, 8191, salt)}, "8191 bytes of memory"),
        ):
            with self.subTest(part), self.assertRaisesRegex(ValueError, part):
                _tensorfs.TensorizerWriter(path=self.path, **arguments)
        self.assertEqual(os.listdir(self.tmp), [])
        for limits, part in (((0, 8192), "0 passes"), ((1, 8191), "8191 bytes of memory"), ((1, 1 << 40), "bytes of memory")):
            with self.subTest(part), self.assertRaisesRegex(ValueError, part):
                _tensorfs.derive_key(b"words", *limits, salt)
