"""`tensorfs.compat.tensorizer`: the names of the tensorizer package, on files that are made here or by that package."""

import contextlib
import gc
import gzip
import importlib.util
import io
import os
import pickle
import tempfile
import unittest
from unittest import mock

import numpy as np

import tensorfs
from object_server import ObjectServer
from package import FIXTURES, TestCase, environment, has_torch, needs_torch, python
from tensorfs.compat import tensorizer
from tensorfs.compat.tensorizer import (
    CryptographyError,
    DecryptionParams,
    HashMismatchError,
    TensorDeserializer,
    TensorSerializer,
    TensorType,
)
from tensorfs.compat.tensorizer import _saving
from tensorfs.compat.tensorizer.stream_io import open_stream
from tensorizer_files import BUFFER, PARAMETER, Stored, encrypted_file_of, file_of

CODES = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "U8": np.uint8, "BOOL": np.bool_, "C64": np.complex64}


def arrays_of(shapes):
    rng = np.random.default_rng(11)
    return {name: rng.integers(0, 2, shape).astype(CODES[dtype]) for name, dtype, shape in shapes}


def stored_of(arrays, **fields):
    codes = {np.dtype(dtype): code for code, dtype in CODES.items()}
    return [
        Stored.of(list(name) if isinstance(name, tuple) else name, codes[array.dtype], array.shape, array.tobytes(), **fields)
        for name, array in arrays.items()
    ]


FLAT = [
    ("weight", "F32", (70, 30)), ("b", "F64", (3, 1, 5)), ("one", "I64", ()), ("none", "F32", (0, 4)),
    ("bytes", "U8", (1001,)), ("flags", "BOOL", (7,)), ("c", "C64", (2, 2)),
]
NESTED = [
    (("model", "layers", 0, "w"), "F32", (5, 2)), (("model", "layers", 1, "w"), "F32", (5, 2)),
    (("model", "norm"), "U8", (9,)), ("head", "I64", (3,)),
]


class _Grows:
    """An object with a tensor that it makes of its storage without the functions of torch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __reduce__(self):
        return _of_storage, (self.tensor.untyped_storage(), self.tensor.shape)


def _of_storage(storage, shape):
    import torch

    return torch.empty(0).set_(storage._untyped_storage, 0, shape)


class Case(TestCase):
    """A test with a file of tensors."""

    def setUp(self):
        super().setUp()
        self.arrays = arrays_of(FLAT)
        self.file = self.tmp / "one.tensors"
        self.file.write_bytes(file_of(stored_of(self.arrays)))

    def opened(self, source=None, device="cpu", **arguments):
        found = TensorDeserializer(self.file if source is None else source, device, **arguments)
        self.addCleanup(found.close)
        return found

    def check(self, found, arrays=None):
        """Compares tensors of torch or arrays of numpy by name with `arrays`, in their order."""
        arrays = self.arrays if arrays is None else arrays
        self.assertEqual(list(found), list(arrays))
        for name, array in arrays.items():
            given = found[name].detach().numpy() if hasattr(found[name], "detach") else found[name]
            self.assertEqual((given.dtype, given.shape), (array.dtype, array.shape), name)
            np.testing.assert_array_equal(given, array)

class Arrays(Case):
    """The part that works without torch. If torch is installed, tensors are on the CPU."""

    def test_tensors_have_their_names_order_and_bytes(self):
        for lazy_load in (False, True):
            for verify_hash in (False, True):
                with self.subTest(lazy_load=lazy_load, verify_hash=verify_hash):
                    self.check(self.opened(lazy_load=lazy_load, verify_hash=verify_hash))

    def test_arguments_that_only_tune_the_tensorizer_package_are_taken(self):
        self.check(self.opened(num_readers=4, plaid_mode=True, plaid_mode_buffers=2))
        with self.assertRaisesRegex(ValueError, "num_readers=0: expected a number from 1 on"):
            self.opened(num_readers=0)

    def test_bytes_are_counted(self):
        total = sum(array.nbytes for array in self.arrays.values())
        found = self.opened(lazy_load=True)
        self.assertEqual((found.total_tensor_bytes, found.total_bytes_read), (total, 0))
        found["weight"]
        self.assertEqual(found.total_bytes_read, self.arrays["weight"].nbytes)
        found["weight"]
        self.assertEqual(found.total_bytes_read, self.arrays["weight"].nbytes)
        self.assertEqual(self.opened().total_bytes_read, total)

    def test_arrays_come_with_index_type_and_name(self):
        stored = stored_of(self.arrays)
        stored[1].kind, stored[2].kind = PARAMETER, BUFFER
        self.file.write_bytes(file_of(stored))
        for lazy_load in (False, True):
            rows = list(self.opened(lazy_load=lazy_load).read_numpy_arrays(verify_hash=True))
            self.assertEqual([row[0] for row in rows], [0] * len(rows))
            types = [TensorType.STATE_DICT, TensorType.PARAM, TensorType.BUFFER]
            self.assertEqual([row[1] for row in rows[:3]], types)
            self.check({row[2]: row[3] for row in rows})
            self.assertEqual({row[4:] for row in rows}, {(False, None)})

    def test_a_dtype_that_numpy_lacks_is_refused_or_given_as_integers(self):
        raw = bytes(range(12))
        self.file.write_bytes(file_of([Stored.of("b", "BF16", [3, 2], raw), Stored.of("f", "F4", [2, 4], raw[:4])]))
        with self.assertRaisesRegex(ValueError, "'b' has the dtype torch.bfloat16, which numpy lacks"):
            list(self.opened(lazy_load=True).read_numpy_arrays())
        rows = list(self.opened(lazy_load=True).read_numpy_arrays(allow_raw_data=True))
        facts = [(row[3].shape, row[3].dtype, row[3].tobytes(), *row[4:]) for row in rows]
        self.assertEqual(facts[0], ((3, 2), np.int16, raw, True, "torch.bfloat16"))
        self.assertEqual(facts[1], ((2, 2), np.int8, raw[:4], True, "torch.float4_e2m1fn_x2"))
        if has_torch:
            loaded = self.opened(lazy_load=False).read_numpy_arrays(allow_raw_data=True)
            self.assertEqual([row[3].tobytes() for row in loaded], [raw, raw[:4]])

    def test_several_files_lie_in_one_as_the_package_writes_them(self):
        # The tensorizer package writes the second file over the end mark of the first file.
        for end in (b"", bytes(8)):
            self.check_two_files(end)

    def check_two_files(self, end):
        other = {"other": np.arange(5.0), "more": np.ones((2, 3), np.uint8)}
        first = file_of(stored_of(self.arrays), area=256 << 10, end=end)
        both = first + file_of(stored_of(other), start=len(first))
        self.file.write_bytes(both)
        joined = self.tmp / "joined"
        joined.write_bytes(first + file_of(stored_of(other)))
        for make in (lambda path: open(path, "rb"), lambda path: io.BytesIO(path.read_bytes())):
            for start, arrays in ((0, self.arrays), (len(first), other)):
                for lazy_load in (False, True):
                    opened = make(self.file)
                    opened.seek(start)
                    self.check(self.opened(opened, lazy_load=lazy_load, verify_hash=True), arrays)
            for path, start, message in (
                (joined, len(first), "its header begins at byte"), (self.file, len(first) - 3, "does not begin with"),
                (self.file, len(both) + 9, "does not begin with|73 from byte"),
            ):
                opened = make(path)
                opened.seek(start)
                with self.subTest(message), self.assertRaisesRegex(tensorfs.SafetensorError, message):
                    self.opened(opened)

    def test_bytes_that_a_file_object_still_keeps_are_read(self):
        first, values = len(self.file.read_bytes()), np.arange(4, dtype=np.float32)
        data = self.file.read_bytes() + file_of(stored_of({"a": values}), start=first)
        for opened in (tempfile.TemporaryFile(dir=self.tmp), tempfile.NamedTemporaryFile(dir=self.tmp)):
            opened.write(data)
            opened.flush()
            opened.seek(first)
            opened.read(5)
            opened.seek(data.rindex(values.tobytes()))
            opened.write((values + 70).tobytes())
            # Python does not flush its buffer if it seeks to a place in the buffer.
            opened.seek(first)
            self.check(self.opened(opened), {"a": values + 70})

    def test_a_position_that_is_no_place_of_a_file_counts_as_the_first_byte(self):
        data = self.file.read_bytes()

        class Odd(io.BytesIO):
            def tell(self):
                if isinstance(self.position, type):
                    raise self.position("no position")
                return self.position

        for position in (-1, 1 << 62, (1 << 63) - 1, 1 << 64, True, None, 3.0, NotImplementedError, ValueError, OSError):
            with self.subTest(position=position):
                opened = Odd(data)
                opened.position = position
                self.check(self.opened(opened))

    def test_a_descriptor_is_read_from_its_first_byte_at_any_position(self):
        descriptor = os.open(self.file, os.O_RDONLY)
        self.addCleanup(os.close, descriptor)
        os.lseek(descriptor, 100, os.SEEK_SET)
        self.check(self.opened(descriptor))
        self.assertEqual(os.lseek(descriptor, 0, os.SEEK_CUR), 100)

    def test_a_source_without_end_is_refused_by_its_first_bytes(self):
        taken = []

        class Endless:
            def read(self, size):
                taken.append(size)
                if sum(taken) > 1 << 20:
                    raise AssertionError("more than 1 MiB was read")
                return b"\7" * min(size, 5)

        reader, writer = os.pipe()
        self.addCleanup(os.close, writer)
        os.write(writer, bytes(73))
        for source, name in ((Endless(), "<Endless>"), (open("/dev/zero", "rb"), "/dev/zero"), (open(reader, "rb"), "<Buff")):
            with self.subTest(name), self.assertRaisesRegex(
                tensorfs.SafetensorError, f"^{name}.*: does not begin with `.TZR.` at byte 0"
            ) as caught:
                self.opened(source)
            self.assertEqual(caught.exception.kind, "header_decode")

    def test_tensors_without_data_count_with_lazy_load_only(self):
        meta = Stored.of("meta", "F32", [3, 5], b"", hashes=[])
        one = Stored.of("one", "I64", [2], bytes(16))
        self.file.write_bytes(file_of([meta, one], version=4))
        self.assertEqual(self.opened(lazy_load=True).total_tensor_bytes, 76)
        self.assertEqual(self.opened(lazy_load=False).total_tensor_bytes, 16)

    def test_reading_goes_on_behind_the_last_tensor(self):
        found = self.opened(lazy_load=True)
        names = list(self.arrays)
        self.assertEqual([row[2] for row in found.read_numpy_arrays(num_tensors=2)], names[:2])
        self.assertEqual([row[2] for row in found.read_tensors(num_tensors=3)], names[2:5])
        self.assertEqual([row[2] for row in found.read_numpy_arrays(lambda name: name != "flags")], names[6:])
        self.assertEqual(list(found.read_tensors(num_tensors=0)), [])
        with self.assertRaisesRegex(ValueError, "num_tensors=-2"):
            list(found.read_tensors(num_tensors=-2))

    def test_a_filter_leaves_tensors_out(self):
        wanted = {name: array for name, array in self.arrays.items() if "e" in name}
        found = self.opened(filter_func=lambda name: "e" in name)
        self.check(found, wanted)
        self.assertEqual(found.total_tensor_bytes, sum(array.nbytes for array in wanted.values()))
        with self.assertRaises(KeyError):
            found["b"]
        self.assertNotIn("b", found)

    def test_nested_tensors_are_mappings_and_a_tree_as_it_was_saved(self):
        arrays = arrays_of(NESTED)
        self.file.write_bytes(file_of(stored_of(arrays)))
        for lazy_load in (False, True):
            found = self.opened(lazy_load=lazy_load)
            self.assertEqual(list(found), ["model", "head"])
            self.assertEqual(list(found["model"]["layers"]), [0, 1])
            self.check(found["model"]["layers"][1], {"w": arrays["model", "layers", 1, "w"]})
            with self.assertRaises(TypeError):
                found["model"]["norm"] = None
            tree = found.tree()
            self.assertIsInstance(tree["model"]["layers"], list)
            self.check(tree["model"]["layers"][0], {"w": arrays["model", "layers", 0, "w"]})
            self.check({"x": found.tree(("model", "norm"))}, {"x": arrays["model", "norm"]})
            self.assertEqual(len(found.tree(["model", "layers"], filter_func=lambda path: path[2] == 1)), 1)
            self.assertEqual(found.tree(("none",), default=3), 3)
            with self.assertRaisesRegex(TypeError, "prefix: expected a sequence of keys"):
                found.tree("model")
        found = self.opened(filter_func=lambda name: name == "head")
        self.assertEqual((list(found), dict(found["model"])), (["model", "head"], {}))

    def test_a_list_is_a_list(self):
        arrays = {(number,): np.array([number], np.uint8) for number in range(11)}
        self.file.write_bytes(file_of(stored_of(arrays)))
        found = self.opened()
        self.assertEqual(list(found), list(range(11)))
        self.assertEqual([int(tensor[0]) for tensor in found.tree()], list(range(11)))
        self.assertIn(5, found)
        self.assertNotIn("5", found)

    def test_a_layer_that_is_neither_dict_nor_list_is_refused(self):
        arrays = {("a", 0): np.zeros(1, np.uint8), ("a", "b"): np.zeros(1, np.uint8)}
        self.file.write_bytes(file_of(stored_of(arrays)))
        with self.assertRaisesRegex(tensorfs.SafetensorError, "neither a dict nor a list"):
            self.opened()

    def test_files_are_given_by_path_url_object_or_descriptor(self):
        data, odd = self.file.read_bytes(), self.tmp / "a b%.tensors"
        odd.write_bytes(data)
        behind = self.tmp / "behind"
        behind.write_bytes(b"prefix" + file_of(stored_of(self.arrays), start=6))
        unnamed = tempfile.TemporaryFile(dir=self.tmp)
        unnamed.write(data)
        unnamed.seek(0)
        named = tempfile.NamedTemporaryFile(dir=self.tmp)
        named.write(data)
        named.seek(0)
        at_offset = open(behind, "rb")
        at_offset.seek(6)
        replaced = open(self.file, "rb")
        os.rename(behind, self.file)
        packed = io.BytesIO(gzip.compress(data))
        pipe = os.popen(f"cat '{odd}'")
        sources = {
            "text": str(odd), "bytes": os.fsencode(odd), "url": f"file://{self.tmp}/a%20b%25.tensors",
            "localhost": f"FILE://localhost{self.tmp}/a%20b%25.tensors", "object": open(odd, "rb"),
            "raw": open(odd, "rb", buffering=0), "memory": io.BytesIO(data), "unnamed": unnamed, "named": named,
            "offset": at_offset, "replaced": replaced, "gzip": gzip.GzipFile(fileobj=packed), "pipe": pipe.buffer,
            "gzip file": gzip.open(self._gzip(data)), "stream": open_stream(odd), "begin": open_stream(self.file, begin=6),
        }
        for kind, source in sources.items():
            for lazy_load in (False, True):
                with self.subTest(kind, lazy_load=lazy_load):
                    if lazy_load and hasattr(source, "read"):
                        # The load above has closed the source.
                        self.assertTrue(source.closed)
                        continue
                    self.check(self.opened(source, lazy_load=lazy_load))
        descriptor = os.open(odd, os.O_RDONLY)
        found = self.opened(descriptor, lazy_load=True)
        os.close(descriptor)
        self.check(found)
        pipe.close()

    def _gzip(self, data):
        path = self.tmp / "packed.gz"
        path.write_bytes(gzip.compress(data))
        return path

    def test_files_of_remote_sources_are_given_by_their_url(self):
        with ObjectServer() as server:
            server.put("compat", "models/model.tensors", self.file.read_bytes())
            server.public.add("compat")
            with environment(**server.environment(), HOME=str(self.tmp)):
                for url in ("s3://compat/models/model.tensors", f"{server.url}/compat/models/model.tensors"):
                    for how in ({}, {"lazy_load": True}):
                        with self.opened(url, **how) as found:
                            self.check(found)
                with self.assertRaises(FileNotFoundError):
                    self.opened("s3://compat/models/none.tensors")
                with self.assertRaisesRegex(ValueError, "only local files are opened.*; TensorDeserializer reads its URL$"):
                    open_stream("s3://compat/models/model.tensors")

    def test_no_secret_of_a_url_is_in_an_error(self):
        named = io.BytesIO(b"nonsense" * 100)
        named.name = "https://u:hunter2@h/m.tensors?sig=hunter2"
        works = {
            "ftp://***@h/m?***": lambda: open_stream("ftp://u:hunter2@h/m?sig=hunter2"),
            "FTP://***@h/m?***": lambda: self.opened("FTP://u:hunter2@h/m?sig=hunter2"),
            "s3://***@h/m": lambda: open_stream("s3://u:hunter2@h/m"),
            "https://***@h/m?***": lambda: TensorSerializer("https://u:hunter2@h/m?sig=hunter2"),
            "file://***@h/m?***": lambda: self.opened("file://u:hunter2@h/m?hunter2"),
            "redis://***@h/m": lambda: self.opened("redis://u:hunter2@h/m"),
            "https://***@h/m.tensors?***": lambda: self.opened(named),
        }
        for shown, work in works.items():
            with self.subTest(shown), self.assertRaises((OSError, ValueError, tensorfs.SafetensorError)) as caught:
                work()
            self.assertIn(shown, str(caught.exception))
            self.assertNotIn("hunter2", f"{caught.exception} {vars(caught.exception)}")
            self.assertEqual("TensorDeserializer" in str(caught.exception), shown == "s3://***@h/m")

    def test_a_file_object_is_closed_with_the_deserializer(self):
        for source in (io.BytesIO(self.file.read_bytes()), open(self.file, "rb")):
            with self.opened(source, lazy_load=True) as found:
                self.assertFalse(source.closed)
                found["weight"]
            self.assertTrue(source.closed)
            found["weight"]
            with self.assertRaisesRegex(ValueError, "is closed"):
                found["b"]

    def test_sources_that_are_no_local_files_are_refused_in_one_line(self):
        for source, error, message in (
            ("ftp://x.org/m.tensors", ValueError, "^ftp://x.org/m.tensors: expected a path, file:///PATH, or a URL of s3, gs, "),
            ("file://server/m.tensors", ValueError, "expected file:///PATH"), (io.StringIO(), TypeError, "binary file object"),
            (3.5, TypeError, "not float"), (True, TypeError, "not bool"), (open(self.file, "ab"), ValueError, "mode rb"),
            (self.tmp / "gone", FileNotFoundError, "gone"),
            (io.BytesIO(b"nonsense"), tensorfs.SafetensorError, "<BytesIO>"),
            (FIXTURES / "hf/three_shards/model-00001-of-00003.safetensors", tensorfs.SafetensorError, "no tensorizer file"),
            (io.BytesIO(self.file.read_bytes()[:-100]), tensorfs.SafetensorError, "^<BytesIO>: tensor"),
        ):
            with self.subTest(source=source):
                with self.assertRaisesRegex(error, message) as caught:
                    self.opened(source)
                self.assertEqual(len(str(caught.exception).splitlines()), 1)
        reader, writer = os.pipe()
        with self.assertRaisesRegex(ValueError, "is no regular file"):
            self.opened(reader)
        os.close(reader)
        os.close(writer)

    def test_streams_are_opened_in_binary_modes_and_make_their_folders(self):
        path = self.tmp / "new/folder/file"
        with open_stream(f"file://{path}", "wb+", buffer_size=0) as stream:
            stream.write(b"abc")
        with open_stream(str(path), begin=1, s3_access_key_id=None) as stream:
            self.assertEqual(stream.read(), b"bc")
        with self.assertRaisesRegex(ValueError, "a binary mode is needed"):
            open_stream(path, "r")

    def test_bytes_that_differ_from_their_hash_are_refused(self):
        data = bytearray(self.file.read_bytes())
        place = data.rindex(self.arrays["bytes"].tobytes())
        data[place + 500] ^= 1
        self.file.write_bytes(data)
        self.opened()
        with self.assertRaisesRegex(HashMismatchError, "tensor 'bytes': its header and its bytes have the CRC32"):
            self.opened(verify_hash=True)
        found = self.opened(lazy_load=True, verify_hash=True)
        found["weight"]
        with self.assertRaises(HashMismatchError) as caught:
            found["bytes"]
        self.assertEqual((caught.exception.kind, caught.exception.path), ("hash_mismatch", str(self.file)))
        with self.assertRaises(HashMismatchError):
            list(found.read_numpy_arrays(verify_hash=True))
        self.assertEqual(len(list(self.opened(lazy_load=True).read_numpy_arrays())), len(self.arrays))

    def test_hashes_of_the_tensorizer_package_match(self):
        for path in sorted((FIXTURES / "tensorizer").glob("*.tensors")):
            with self.subTest(path.name):
                rows = list(self.opened(path, lazy_load=True).read_numpy_arrays(allow_raw_data=True, verify_hash=True))
                self.assertGreater(len(rows), 0)

    def test_a_file_that_changed_is_refused(self):
        found = self.opened(lazy_load=True)
        with open(self.file, "r+b") as file:
            file.write(b"|TZR|\1")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "was written to"):
            found["weight"]

    def test_many_small_tensors_are_read(self):
        arrays = {f"layer.{number}.weight": np.full((3,), number, np.int64) for number in range(2000)}
        self.file.write_bytes(file_of(stored_of(arrays)))
        self.check(self.opened(verify_hash=True), arrays)

    @unittest.skipIf(has_torch, "needs a Python without torch")
    def test_without_torch_only_what_needs_it_is_refused(self):
        for arguments in ({"device": "cuda"}, {"dtype": "float16"}):
            with self.assertRaisesRegex((RuntimeError, TypeError), "needs torch, which is not installed"):
                self.opened(**arguments)
        self.assertFalse(hasattr(tensorizer, "nonsense"))


class Encrypted(Case):
    """Reads of encrypted files."""

    KEY = bytes(range(70, 102))

    def setUp(self):
        super().setUp()
        self.arrays = {name: array for name, array in self.arrays.items() if array.nbytes}
        self.plain = self.tmp / "plain.tensors"
        self.file.rename(self.plain)
        self.file.write_bytes(encrypted_file_of(stored_of(self.arrays), self.KEY, 1 << 16))

    def test_tensors_are_decrypted_with_a_key(self):
        key = DecryptionParams.from_key(self.KEY)
        for source in (self.file, open(self.file, "rb"), io.BytesIO(self.file.read_bytes())):
            for lazy_load in (False, True) if source == self.file else (False,):
                self.check(self.opened(source, encryption=key, lazy_load=lazy_load, verify_hash=True))
        rows = list(self.opened(lazy_load=True, encryption=key).read_numpy_arrays(verify_hash=True))
        self.check({row[2]: row[3] for row in rows})
        self.assertNotIn(self.KEY.hex(), repr(key))

    def test_tensors_are_decrypted_with_a_passphrase(self):
        path = FIXTURES / "encrypted/v3_string.tensors"
        found = self.opened(path, encryption=DecryptionParams.from_string("correct horse battery staple"), verify_hash=True)
        self.assertGreater(found.total_tensor_bytes, 0)
        with self.assertRaises(CryptographyError):
            self.opened(path, encryption=DecryptionParams.from_string("another"))

    def test_a_missing_a_wrong_and_a_needless_key_are_refused(self):
        wrong = DecryptionParams.from_key(bytes(32))
        for source in (self.file.read_bytes(), None):
            for encryption, kind in ((None, "key_required"), (wrong, "decrypt_failed")):
                with self.subTest(kind=kind), self.assertRaises(CryptographyError) as caught:
                    self.opened(source and io.BytesIO(source), encryption=encryption)
                self.assertEqual(caught.exception.kind, kind)
            with self.assertRaises(CryptographyError) as caught:
                self.opened(io.BytesIO(self.plain.read_bytes()) if source else self.plain, encryption=wrong)
            self.assertEqual(caught.exception.kind, "not_encrypted")
        for encryption, error in ((b"key", TypeError), (DecryptionParams(), ValueError)):
            with self.assertRaises(error):
                self.opened(encryption=encryption)
        for make in (lambda: DecryptionParams.from_key(b"short"), lambda: DecryptionParams.from_string("")):
            self.assertRaises(ValueError, make)
        for make in (lambda: DecryptionParams.from_key("0" * 32), lambda: DecryptionParams.from_string(5)):
            self.assertRaises(TypeError, make)

    def test_a_changed_byte_is_refused(self):
        data = bytearray(self.file.read_bytes())
        data[-20] ^= 1
        self.file.write_bytes(data)
        with self.assertRaises(CryptographyError) as caught:
            self.opened(encryption=DecryptionParams.from_key(self.KEY))
        self.assertEqual(caught.exception.kind, "decrypt_failed")


class Writing(Case):
    """`TensorSerializer` with arrays of numpy. The tests of the program compare the bytes of files."""

    def setUp(self):
        super().setUp()
        self.out = self.tmp / "folder/out.tensors"

    def rows(self, source=None):
        found = self.opened(self.out if source is None else source, lazy_load=True, verify_hash=True)
        return list(found.read_numpy_arrays(allow_raw_data=True))

    def test_a_state_dict_is_read_as_it_was_written(self):
        arrays = arrays_of(NESTED)
        layers = [{"w": arrays["model", "layers", number, "w"]} for number in (0, 1)]
        nested = {"model": {"layers": layers, "norm": arrays["model", "norm"]}, "head": arrays["head"]}
        serializer = TensorSerializer(self.out)
        serializer.write_state_dict(nested)
        self.assertEqual(serializer.total_tensor_bytes, sum(array.nbytes for array in arrays.values()))
        serializer.close()
        expected = [(name, array.tobytes()) for name, array in arrays.items()]
        self.assertEqual([(row[2], row[3].tobytes()) for row in self.rows()], expected)
        with tensorfs.safe_open(self.out, "np") as f:
            self.assertEqual(f.keys(), ["head", "model.layers.0.w", "model.layers.1.w", "model.norm"])

    def test_tensors_have_their_index_type_dtype_and_shape(self):
        arrays = [
            np.arange(12, dtype=">f4").reshape(3, 4).T, np.float16(3), np.zeros((2, 0), np.uint64), np.array([True, False]),
            np.arange(4, dtype=np.complex64),
        ]
        arrays[1] = np.array(arrays[1])
        serializer = TensorSerializer(f"file://{self.out}", limit_cpu_concurrency=2)
        for number, array in enumerate(arrays):
            serializer.write_tensor(number, f"t{number}", number % 3, array)
        serializer.write_tensor(9, ("a", 0), TensorType.STATE_DICT, arrays[0])
        serializer.close()
        rows = self.rows()
        self.assertEqual([row[:3] for row in rows[:5]], [(number, number % 3, f"t{number}") for number in range(5)])
        self.assertEqual(rows[5][:3], (9, 2, ("a", 0)))
        for array, row in zip(arrays, rows):
            np.testing.assert_array_equal(row[3], array)

    def test_a_file_at_a_path_appears_whole_and_replaces_the_one_before(self):
        for number in range(2):
            serializer = TensorSerializer(os.fsencode(self.out))
            serializer.write_tensor(number, "a", 0, np.zeros(3))
            self.assertEqual(self.out.exists(), number > 0)
            if number:
                self.assertEqual(self.rows()[0][0], 0)
            serializer.close()
            self.assertEqual(self.rows()[0][0], number)
            with self.assertRaisesRegex(ValueError, "the serializer is closed"):
                serializer.write_tensor(0, "b", 0, np.zeros(3))
            serializer.close()
        self.assertEqual(os.listdir(self.out.parent), ["out.tensors"])

    def test_nothing_is_left_of_a_file_that_was_not_written_to_its_end(self):
        empty = TensorSerializer(self.out)
        with self.assertRaisesRegex(ValueError, "no tensor was written"):
            empty.close()
        failed = TensorSerializer(self.out)
        failed.write_tensor(0, "a", 0, np.zeros(3))
        with self.assertRaises(TypeError):
            failed.write_tensor(0, "b", 0, [1, 2])
        failed.close()
        dropped = TensorSerializer(self.out)
        dropped.write_tensor(0, "a", 0, np.zeros(3))
        with self.assertWarnsRegex(ResourceWarning, "was not closed"):
            del dropped
            gc.collect()
        self.assertEqual(os.listdir(self.out.parent), [])

    def test_file_objects_are_written_and_closed(self):
        path = self.tmp / "behind"
        for opened in (open(path, "wb"), open(path, "wb+", buffering=0), tempfile.NamedTemporaryFile("wb+", dir=self.tmp)):
            opened.write(b"prefix")
            with self.assertRaisesRegex(ValueError, "at byte 6"):
                TensorSerializer(opened)
            opened.seek(0)
            serializer = TensorSerializer(opened)
            serializer.write_tensor(0, "a", 0, np.arange(5))
            again = open(opened.name, "rb")
            serializer.close()
            self.assertTrue(opened.closed)
            self.assertEqual(self.rows(again)[0][3].tolist(), [0, 1, 2, 3, 4])
        descriptor = os.open(path, os.O_RDWR | os.O_TRUNC)
        serializer = TensorSerializer(descriptor)
        serializer.write_tensor(0, "a", 0, np.arange(5))
        serializer.close()
        os.close(descriptor)
        self.assertEqual(len(self.rows(path)), 1)

    def test_files_that_cannot_be_written_are_refused(self):
        reader, writer = os.pipe()
        for target, error, message in (
            ("s3://bucket/x", ValueError, "only local files are"), (io.StringIO(), TypeError, "binary file object"),
            (open(self.file, "rb"), ValueError, "mode wb"), (open(self.file, "ab"), ValueError, "for appending"),
            (open(writer, "wb", buffering=0), ValueError, "cannot seek"), (None, TypeError, "not NoneType"),
        ):
            with self.subTest(target=target), self.assertRaisesRegex(error, message):
                TensorSerializer(target)
        os.close(reader)
        with self.assertRaisesRegex(ValueError, "limit_cpu_concurrency=0"):
            TensorSerializer(self.out, limit_cpu_concurrency=0)

    def test_names_that_no_reader_could_tell_apart_are_refused(self):
        one = np.zeros(1)
        for names, error in (
            (["a", "a"], ValueError), ([("a", "b"), "a.b"], ValueError), (["a", ("a", "b")], ValueError),
            ([("a", "b"), "a"], ValueError), ([("a", 0), ("a", "b")], ValueError), ([("a", 0), ("a", "0")], ValueError),
            ([""], ValueError), (["\x1ea"], ValueError), ([(0, -1)], TypeError), ([3], TypeError), ([()], TypeError),
        ):
            serializer = TensorSerializer(self.out)
            with self.subTest(names=names), self.assertRaises(error):
                for name in names:
                    serializer.write_tensor(0, name, TensorType.STATE_DICT, one)
            with contextlib.suppress(ValueError):
                serializer.close()
        serializer = TensorSerializer(self.out)
        with self.assertRaisesRegex(ValueError, "a path is the name of a value of a state dict only"):
            serializer.write_tensor(0, ("a", 0), TensorType.PARAM, one)
        serializer.close()

    def test_names_that_no_reader_could_decode_are_refused(self):
        for name in ("\ud800", ("a", "\ud800"), ("a", 1 << 70)):
            serializer = TensorSerializer(self.out)
            with self.subTest(name=name), self.assertRaises((ValueError, tensorfs.SafetensorError)):
                serializer.write_tensor(0, name, TensorType.STATE_DICT, np.zeros(1))
            serializer.close()
            self.assertEqual(os.listdir(self.out.parent), [])

    def test_a_masked_array_is_refused(self):
        serializer = TensorSerializer(self.out)
        with self.assertRaisesRegex(TypeError, "tensor 'a': is a masked array"):
            serializer.write_state_dict({"a": np.ma.masked_array([1, 2], [True, False])})
        serializer.close()

    def test_a_link_stays_and_leads_to_the_new_file(self):
        self.out.parent.mkdir()
        self.out.symlink_to("../target/real.tensors")
        for number in range(2):
            serializer = TensorSerializer(self.out)
            serializer.write_state_dict({"a": np.full(1, number)})
            serializer.close()
            self.assertTrue(self.out.is_symlink())
            self.assertEqual(self.rows(self.tmp / "target/real.tensors")[0][3].tolist(), [number])

    def test_a_descriptor_that_appends_is_refused(self):
        before = self.file.read_bytes()
        descriptor = os.open(self.file, os.O_RDWR | os.O_APPEND)
        self.addCleanup(os.close, descriptor)
        with self.assertRaisesRegex(ValueError, "O_APPEND"):
            TensorSerializer(descriptor)
        self.assertEqual(self.file.read_bytes(), before)

    def test_a_longer_file_is_cut_behind_the_last_tensor(self):
        path = self.tmp / "long"
        path.write_bytes(bytes(1 << 20))
        for target in (io.BytesIO(bytes(1 << 20)), open(path, "rb+")):
            kept, target.close = target.close, lambda: None
            serializer = TensorSerializer(target)
            serializer.write_state_dict({"a": np.arange(3)})
            serializer.close()
            target.seek(0)
            self.assertLess(len(target.read()), 300_000)
            kept()
        self.assertEqual(self.rows(path)[0][3].tolist(), [0, 1, 2])

    def test_values_that_are_no_tensors_are_refused_with_their_place(self):
        for value, message in (
            ({"a": [None]}, r"NoneType at \['a', 0\]"), ({1: np.zeros(1)}, "key 1 in"), ("text", "str at"),
            ({"a": np.zeros(1, "complex128")}, "tensor 'a': tensorfs reads no tensorizer files with complex128"),
        ):
            serializer = TensorSerializer(self.out)
            with self.subTest(value=value), self.assertRaisesRegex(TypeError, message):
                serializer.write_state_dict(value)
            serializer.close()

    def test_a_list_of_many_tensors_is_written_and_read(self):
        arrays = [np.full(3, number, np.uint16) for number in range(10_000)]
        serializer = TensorSerializer(self.out)
        serializer.write_state_dict(arrays)
        serializer.close()
        self.assertEqual([int(row[3][0]) for row in self.rows()], list(range(10_000)))

    def test_a_list_of_many_tensors_is_written_in_several_batches(self):
        # The arrays are copied, because their numbers have to become little-endian.
        arrays = [np.full(3, number, ">u2") for number in range(10_000)]
        serializer = TensorSerializer(self.out)
        with mock.patch.object(_saving, "_BATCH_MAX", 6000):
            serializer.write_state_dict(arrays)
        serializer.close()
        self.assertEqual([int(row[3][0]) for row in self.rows()], list(range(10_000)))

    @needs_torch
    def test_a_tensor_without_its_memory_is_named_and_nothing_is_written(self):
        import torch
        from torch._subclasses import FakeTensorMode

        freed, cut = torch.ones(1000), torch.ones(1000)
        freed.untyped_storage().resize_(0)
        cut.untyped_storage().resize_(100)
        with FakeTensorMode():
            fake = torch.empty(4)
        for tensor, why in (
            (freed, "its storage has 0 of the 4000 bytes that it needs"),
            (cut, "its storage has 100 of the 4000 bytes that it needs"),
            (fake, "a FakeTensor has no address"),
            (torch.nn.UninitializedParameter(), "is nested or uninitialized"),
        ):
            serializer = TensorSerializer(self.out)
            with self.assertRaisesRegex(tensorfs.SafetensorError, f"tensor 'bad': .*{why}"):
                serializer.write_state_dict({"good": torch.ones(3), "bad": tensor})
            serializer.close()
            self.assertFalse(os.path.exists(self.out))

    def test_batches_end_by_the_bytes_that_only_they_keep(self):
        plain, swapped = np.zeros(100, np.uint16), np.zeros(100, ">u2")
        for tensor, remove_from, lengths in (
            (plain, None, [20]),
            (swapped, None, [5, 5, 5, 5]),
            (plain, object(), [5, 5, 5, 5]),
        ):
            tensors = [_saving._ToWrite(0, (str(n),), 2, tensor, remove_from) for n in range(20)]
            with mock.patch.object(_saving, "_BATCH_MAX", 1000):
                self.assertEqual([len(batch) for batch in _saving._batches(tensors)], lengths)

    def test_a_child_process_writes(self):
        python(
            """
import sys, numpy
from tensorfs.compat.tensorizer import TensorSerializer
serializer = TensorSerializer(sys.argv[1])
serializer.write_state_dict({"a": numpy.arange(4)})
serializer.close()
""",
            self.out,
        )
        self.assertEqual(self.rows()[0][3].tolist(), [0, 1, 2, 3])


@needs_torch
class Tensors(Case):
    """Tensors and modules of torch."""

    def setUp(self):
        super().setUp()
        import torch

        torch.manual_seed(3)
        self.torch = torch

    def module(self):
        nn = self.torch.nn
        made = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Embedding(11, 3)))
        made.register_parameter("scale", nn.Parameter(self.torch.rand(3)))
        return made

    def write(self, module, **arguments):
        serializer = TensorSerializer(self.file)
        serializer.write_module(module, **arguments)
        serializer.close()

    def test_a_module_is_written_with_types_and_indices(self):
        module = self.module()
        module[0].register_buffer("scratch", self.torch.ones(2), persistent=False)
        self.write(module)
        rows = [row[:3] for row in self.opened(lazy_load=True).read_tensors()]
        self.assertEqual(rows[:4], [(0, 0, ".scale"), (1, 0, "0.weight"), (1, 0, "0.bias"), (1, 1, "0.scratch")])
        self.assertEqual(rows[-1], (4, 0, "2.0.weight"))
        self.write(module, include_non_persistent_buffers=False, remove_tensors=True)
        self.assertEqual([row[:3] for row in self.opened(lazy_load=True).read_tensors()], rows[:3] + rows[4:])
        self.assertIsNone(module[0].weight)
        self.assertIsNotNone(module[0].scratch)

    def test_meta_tensors_that_the_package_cannot_read_are_written_as_zeros(self):
        torch = self.torch
        with torch.device("meta"):
            module = torch.nn.BatchNorm1d(3).bfloat16()
            module.wide = torch.nn.Parameter(torch.empty(4, 2))
        serializer = TensorSerializer(self.file)
        serializer.write_module(module)
        serializer.close()
        found = self.opened(lazy_load=True, verify_hash=True)
        stored = {name: entry.data_length for (name,), entry in found._entries.items()}
        self.assertEqual(stored, {
            ".weight": 6, ".bias": 6, ".wide": 0, ".running_mean": 6, ".running_var": 6, ".num_batches_tracked": 8,
        })
        self.assertTrue(all(not found[name].any() for name in found))

    def test_a_meta_tensor_of_which_zeros_are_written_may_be_longer_than_the_memory(self):
        empty = self.torch.empty(1 << 42, dtype=self.torch.bfloat16, device="meta")
        serializer = TensorSerializer(self.file)
        with self.assertRaisesRegex(OSError, "No space left: 879[0-9]+ bytes are needed"):
            serializer.write_state_dict({"a": empty})
        serializer.close()
        for encryption in (None, tensorizer.EncryptionParams.random()):
            serializer = TensorSerializer(self.file, encryption=encryption)
            serializer.write_state_dict({"a": empty[: 5 << 20], "b": self.torch.ones(2)})
            serializer.close()
            key = encryption and DecryptionParams.from_key(encryption.key)
            found = self.opened(lazy_load=True, verify_hash=True, encryption=key)
            self.assertEqual((found["a"].shape[0], int(found["a"].count_nonzero())), (5 << 20, 0))
            self.assertEqual(found["b"].tolist(), [1, 1])

    def test_tensors_of_every_kind_are_written_by_their_values(self):
        torch = self.torch
        tensors = {
            "columns": torch.rand(5, 3).t(), "part": torch.rand(10)[::2], "conj": torch.rand(3, dtype=torch.complex64).conj(),
            "bf16": torch.rand(3).bfloat16(), "f8": torch.rand(3).to(torch.float8_e4m3fn), "one": torch.tensor(2.5),
            "none": torch.empty(0, 3), "parameter": torch.nn.Parameter(torch.rand(2)),
        }
        serializer = TensorSerializer(self.file)
        serializer.write_state_dict({**tensors, "meta": torch.empty(4, 2, device="meta")})
        serializer.close()
        found = self.opened(verify_hash=True)
        for name, tensor in tensors.items():
            self.assertEqual(found[name].dtype, tensor.dtype)
            cast = torch.complex64 if tensor.is_complex() else torch.float32
            self.assertTrue(torch.equal(found[name].to(cast), tensor.to(cast).resolve_conj()), name)
        self.assertTrue(torch.equal(found["meta"], torch.zeros(4, 2)))
        self.assertEqual(self.opened().total_bytes_read, sum(tensor.nbytes for tensor in tensors.values()))
        for tensor in (torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)):
            serializer = TensorSerializer(self.file)
            with self.assertRaises(tensorfs.SafetensorError):
                serializer.write_state_dict([tensor])
            serializer.close()

    def test_torch_saves_and_loads_with_a_tensorizer_file_beside(self):
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

        torch, path, beside = self.torch, self.tmp / "module.pt", self.tmp / "module.pt.tensors"
        shared = torch.rand(100)
        saved = {"a": shared, "b": shared[10:20], "c": torch.rand(3).half(), "meta": torch.empty(3, device="meta"), "n": 5}
        genuine = torch.save, torch.load
        with tensorizer_saving():
            torch.save(saved, path)
        self.assertLess(path.stat().st_size, 2000)
        self.assertEqual(len(list(self.opened(beside))), 2)
        with tensorizer_loading(device="cpu", verify_hash=True):
            found = torch.load(path, weights_only=False)
            # A file of torch without a tensorizer file is loaded as always.
            torch.save(shared, self.tmp / "plain.pt")
            self.assertTrue(torch.equal(torch.load(self.tmp / "plain.pt"), shared))
        self.assertEqual((torch.save, torch.load), genuine)
        self.assertTrue(torch.equal(found["a"], shared))
        self.assertEqual(found["b"].untyped_storage().data_ptr(), found["a"].untyped_storage().data_ptr())
        self.assertTrue(torch.equal(found["c"], saved["c"]) and found["meta"].is_meta and found["n"] == 5)
        with self.assertRaises(Exception):
            torch.load(path, weights_only=False)
        with tensorizer_loading(lambda f: f"{f}.gone"), self.assertRaises(FileNotFoundError):
            torch.load(path, weights_only=False)

    def test_other_functions_may_save_and_load_the_tensors(self):
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading, tensorizer_saving

        torch, path, kept = self.torch, self.tmp / "x.pt", []
        with tensorizer_saving("there", save_func=lambda *call: kept.append(call), limit=3):
            torch.save([torch.ones(4)], path)
        ((file_obj, tensors, arguments),) = kept
        self.assertEqual((file_obj, len(tensors), arguments), ("there", 1, {"limit": 3}))
        with tensorizer_loading("there", load_func=lambda file_obj, arguments: tensors, suppress_weights_only=True):
            self.assertEqual(torch.load(path, weights_only=True)[0].tolist(), [1, 1, 1, 1])
        with tensorizer_loading("there", load_func=lambda file_obj, arguments: []), self.assertRaisesRegex(
            pickle.UnpicklingError, "tensor 0 is not among the 0"
        ):
            torch.load(path, weights_only=False)
        with self.assertRaisesRegex(TypeError, "cast the loaded tensors"):
            tensorizer_loading("there", dtype=torch.float16)
        in_memory = io.BytesIO()
        with tensorizer_saving(), self.assertLogs("tensorfs.compat.tensorizer.torch_compat", "WARNING"):
            torch.save(torch.ones(2), in_memory)
        in_memory.seek(0)
        self.assertEqual(torch.load(in_memory).tolist(), [1, 1])

    def mixed(self, asked, stored, genuine=None):
        """The path of a file of torch with `asked`, beside the tensorizer file of a save of `stored`."""
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_saving

        path, other = self.tmp / "asked.pt", self.tmp / "stored.pt"
        for saved, at in ((asked, path), (stored, other)):
            with (genuine or tensorizer_saving)():
                self.torch.save(saved, at)
        os.replace(f"{other}.tensors", f"{path}.tensors")
        return path

    def load_mixed(self, *saves):
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading

        path = self.mixed(*saves)
        with tensorizer_loading(device="cpu"):
            return self.torch.load(path, weights_only=False)

    def test_a_tensorizer_file_of_another_save_with_fewer_bytes_is_refused(self):
        torch = self.torch
        matrix = torch.rand(20, 50)
        wanted = {
            "tensor": (matrix, 4000),
            "parameter": (torch.nn.Parameter(matrix), 4000),
            "view": (matrix[3:, 5:10], 4000 - 4 * 40),
            "strides": (matrix.t(), 4000),
            "offset": (matrix.view(-1)[-1:], 4000),
            "one more": (torch.rand(11), 44),
            "wider": (torch.rand(10).double(), 80),
            "dtype without a storage of its own": (torch.zeros(50, dtype=torch.uint16), 100),
            "in a module": (torch.nn.Linear(10, 10, bias=False), 400),
            "without dtype": (matrix.untyped_storage(), None),
        }
        for kind, (asked, nbytes) in wanted.items():
            with self.subTest(kind=kind):
                if nbytes is None:
                    # For a storage without a tensor, the file of torch does not say its length.
                    self.assertEqual(self.load_mixed(asked, torch.ones(10))._untyped_storage.nbytes(), 40)
                    continue
                with self.assertRaisesRegex(
                    tensorfs.MismatchError, f"asked.pt.tensors: tensor `0` has 40 bytes, .* torch needs {nbytes}; "
                ) as e:
                    self.load_mixed(asked, torch.ones(10))
                self.assertEqual((e.exception.path, e.exception.tensor), (f"{self.tmp}/asked.pt.tensors", "0"))
        self.assertEqual(self.load_mixed(torch.rand(10)[2:4], torch.arange(10.0)).tolist(), [2, 3])
        self.assertEqual(self.load_mixed(torch.rand(10)[7:7], torch.arange(1.0)).shape, (0,))
        with self.assertRaisesRegex(tensorfs.MismatchError, "tensor `1` has 8 bytes, .* needs 4000"):
            self.load_mixed([torch.ones(3), matrix, matrix[2]], [torch.ones(3), torch.ones(2)])

    def test_code_of_saved_objects_makes_no_storage_longer(self):
        with self.assertRaisesRegex(tensorfs.MismatchError, "tensor `0` has 40 bytes, .* needs 4000"):
            self.load_mixed(_Grows(self.torch.rand(1000)), self.torch.ones(10))

    def test_a_tensorizer_file_with_other_tensors_than_those_of_the_save_is_refused(self):
        torch = self.torch
        with self.assertRaisesRegex(tensorfs.MismatchError, "tensor `1` is not in the file of torch, which has 1 of 2; "):
            self.load_mixed(torch.ones(3), [torch.ones(3), torch.ones(4)])
        path = self.mixed(torch.ones(3), torch.ones(3))
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading

        for saved, why in (
            ({"w": torch.ones(3)}, "tensor `w` has a name; expected a number"),
            ([torch.ones(3)], "tensor `0` has torch.float32; expected torch.uint8"),
            ([[torch.ones(3)]], "tensor `0` is a list; expected a tensor"),
        ):
            serializer = TensorSerializer(f"{path}.tensors")
            serializer.write_state_dict(saved)
            serializer.close()
            with self.assertRaisesRegex(tensorfs.MismatchError, why), tensorizer_loading(device="cpu"):
                torch.load(path, weights_only=False)

    def test_a_filter_changes_the_number_of_no_tensor(self):
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading

        path = self.mixed([self.torch.zeros(3), self.torch.ones(3)], [self.torch.zeros(3), self.torch.ones(3)])
        with tensorizer_loading(device="cpu", filter_func=lambda name: name != (0,)), self.assertRaisesRegex(
            pickle.UnpicklingError, "tensor 0 is not among the 1"
        ):
            self.torch.load(path, weights_only=False)

    def test_tensors_of_another_function_have_their_own_bytes(self):
        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading

        torch, whole = self.torch, self.torch.arange(8, dtype=self.torch.uint8)
        shared = torch.rand(1)
        path = self.mixed([torch.rand(1), shared, shared], torch.ones(1))
        with tensorizer_loading(load_func=lambda *_: [whole[:4], whole[4:]], device="cpu"):
            first, second, third = torch.load(path, weights_only=False)
        self.assertEqual(bytes(first.view(torch.uint8).tolist()), bytes(range(4)))
        self.assertEqual(bytes(second.view(torch.uint8).tolist()), bytes(range(4, 8)))
        self.assertEqual(second.data_ptr(), third.data_ptr())

    def test_mixed_up_files_are_refused_wherever_the_genuine_package_does_so(self):
        if importlib.util.find_spec("tensorizer") is None:
            self.skipTest("needs tensorizer")
        from tensorizer.torch_compat import tensorizer_loading as genuine_loading, tensorizer_saving as genuine_saving

        from tensorfs.compat.tensorizer.torch_compat import tensorizer_loading

        torch, random, outcomes = self.torch, np.random.default_rng(5), set()

        def saved():
            tensors = []
            for _ in range(random.integers(1, 4)):
                base = torch.rand(int(random.integers(1, 5)), int(random.integers(1, 5)))
                base = base.to([torch.float32, torch.float64, torch.uint8, torch.uint16][random.integers(4)])
                tensors.append([base, base.t(), base[1:], base[:, :1], base.view(-1)[-1:]][random.integers(5)])
            return tensors

        def loaded(loading, path):
            try:
                with loading(device="cpu"):
                    return torch.load(path, weights_only=False)
            except (RuntimeError, IndexError, pickle.UnpicklingError) as e:
                return e

        for _ in range(60):
            asked = saved()
            path = self.mixed(asked, saved(), genuine_saving)
            theirs, ours = loaded(genuine_loading, path), loaded(tensorizer_loading, path)
            outcomes.add((type(theirs), type(ours).__name__))
            if isinstance(theirs, Exception):
                self.assertIsInstance(ours, Exception)
            elif isinstance(ours, Exception):
                # The genuine package loads a tensorizer file that has more tensors than the file of torch.
                self.assertRegex(str(ours), "is not in the file of torch")
            else:
                for tensor, other in zip(theirs, ours, strict=True):
                    self.assertEqual((tensor.dtype, tensor.shape), (other.dtype, other.shape))
                    self.assertEqual(*(each.contiguous().view(torch.uint8).tolist() for each in (tensor, other)))
        self.assertGreaterEqual(len(outcomes), 4)

    def assert_equal(self, one, other):
        states = one.state_dict(), other.state_dict()
        self.assertEqual(list(states[0]), list(states[1]))
        for name, tensor in states[0].items():
            self.assertTrue(self.torch.equal(tensor, states[1][name]), name)

    def test_tensors_are_parameters_with_memory_of_their_own(self):
        found = self.opened()
        for name, tensor in found.items():
            self.assertIs(type(tensor), self.torch.nn.Parameter)
            self.assertEqual(tensor.requires_grad, tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            self.assertEqual(tensor.untyped_storage().nbytes(), self.arrays[name].nbytes)
        self.assertIs(found["weight"], found["weight"])

    def test_every_dtype_is_that_of_the_file(self):
        found = self.opened(FIXTURES / "tensorizer/every_dtype.tensors", verify_hash=True)
        with tensorfs.safe_open(FIXTURES / "tensorizer/every_dtype.tensors", "pt") as f:
            for name in f.keys():
                self.assertEqual(found[name].dtype, f.get_tensor(name).dtype)

    def test_all_but_booleans_are_cast(self):
        for dtype in (self.torch.float16, self.torch.bfloat16, self.torch.float64):
            for verify_hash in (False, True):
                found = self.opened(dtype=dtype, verify_hash=verify_hash, filter_func=lambda name: name != "c")
                for name, tensor in found.items():
                    expected = self.torch.from_numpy(self.arrays[name])
                    expected = expected if name == "flags" else expected.to(dtype)
                    self.assertEqual(tensor.dtype, expected.dtype)
                    self.assertTrue(self.torch.equal(tensor, expected))

    def test_a_module_gets_its_tensors_also_without_memory_before(self):
        original = self.module()
        self.write(original)
        with tensorizer.utils.no_init_or_tensor():
            empty = self.module()
        self.assertTrue(all(parameter.is_meta for parameter in empty[0].parameters()))
        meta = self.module().to("meta")
        for lazy_load in (False, True):
            for module in (self.module(), empty, meta):
                found = self.opened(lazy_load=lazy_load)
                self.assertEqual(found.load_into_module(module, verify_hash=True), 9)
                self.assert_equal(module, original)
        partly = self.module()
        self.assertEqual(self.opened().load_into_module(partly, lambda name: name.startswith("0.")), 2)
        self.assertTrue(self.torch.equal(partly[0].weight, original[0].weight))
        self.assertFalse(self.torch.equal(partly[2][0].weight, original[2][0].weight))

    def test_a_module_without_a_place_is_refused_before_anything_is_loaded(self):
        self.write(self.module())
        found = self.opened(lazy_load=True)
        with self.assertRaisesRegex(KeyError, "the module has no submodule '1'"):
            found.load_into_module(self.torch.nn.Sequential(self.torch.nn.Linear(7, 5)))
        self.assertEqual(found.total_bytes_read, 0)
        self.file.write_bytes(file_of(stored_of(self.arrays)))
        with self.assertRaisesRegex(NotImplementedError, "was saved by write_state_dict"):
            self.opened(lazy_load=True).load_into_module(self.module())

    def test_a_module_is_compared_with_the_file(self):
        original = self.module()
        self.write(original)
        found = self.opened(lazy_load=True)
        passed, results = found.verify_module(original)
        self.assertEqual((passed, [result for _, result in results]), (True, [True] * 9))
        with self.torch.no_grad():
            original[0].bias[0] += 1
        passed, results = found.verify_module(original)
        self.assertEqual((passed, [name for name, result in results if not result]), (False, ["0.bias"]))
        self.assertFalse(found.verify_module(self.torch.nn.Linear(1, 1))[0])

    def test_a_meta_tensor_of_the_file_is_compared_with_zeros(self):
        module = self.torch.nn.Linear(3, 2, bias=False, device="meta")
        self.write(module)
        found = self.opened(lazy_load=True)
        for value in (0, 1):
            module = self.torch.nn.Linear(3, 2, bias=False)
            self.torch.nn.init.constant_(module.weight, value)
            self.assertEqual(found.verify_module(module)[0], not value)

    def test_a_state_dict_is_loaded(self):
        original = self.module()
        arrays = {name: tensor.numpy() for name, tensor in original.state_dict().items()}
        self.file.write_bytes(file_of(stored_of(arrays)))
        module = self.module()
        with self.opened() as state_dict:
            module.load_state_dict(state_dict)
        self.assert_equal(module, original)

    def test_other_devices_get_tensors_from_the_cpu(self):
        found = self.opened(device="meta")
        self.assertTrue(found["weight"].is_meta)
        with self.assertRaisesRegex(RuntimeError, "arrays on the CPU, but the device is meta"):
            next(found.read_numpy_arrays())

    @unittest.skipIf(has_torch and __import__("torch").cuda.is_available(), "needs a machine without GPU")
    def test_without_a_gpu_the_cpu_is_the_default(self):
        self.assertEqual(TensorDeserializer(self.file)["weight"].device.type, "cpu")
        with self.assertRaisesRegex(RuntimeError, "torch finds no GPU"):
            self.opened(device="cuda")

    def test_memory_is_told_in_units(self):
        utils = tensorizer.utils
        self.assertEqual([utils.convert_bytes(10), utils.convert_bytes(2_500_000)], ["10.0 bytes", "2.5 MB"])
        self.assertEqual([utils.convert_bytes(1 << 21, False), utils.convert_bytes(3e18)], ["2.0 MiB", "3000.0 PB"])
        self.assertRegex(utils.get_mem_usage(), r"^CPU: \(maxrss: [\d,]+MiB F: [\d,]+MiB\)")
        self.assertGreater(utils.CPUMemoryUsage.now().free, 0)
        self.assertEqual(utils.no_init_or_tensor(lambda: self.torch.empty(3)).device.type, "meta")
        self.assertEqual(self.torch.empty(3).device.type, "cpu")
        with self.assertRaises(TypeError):
            utils.no_init_or_tensor(3)
