"""`tensorfs.compat.instanttensor`: the same calls on the genuine package and on ours, if the genuine package is
installed, and tests that need neither it nor torch.

The genuine package loads only to GPUs. On the CPU, the tests call everything in it except loads, and give it the free
memory of a GPU that does not exist. The bytes of tensors are compared with those of safetensors."""

import contextlib
import gc
import importlib.util
import os
import threading
import unittest
from unittest import mock

import tensorfs
from package import FIXTURES, TestCase, environment, has_torch, needs_torch
from peers import compare, differs, plain, sorted_files, write
from tensorfs.compat import instanttensor as ours
from tensorfs.compat.instanttensor import Backend, BackendPolicy, safe_open

needs_genuine = unittest.skipUnless(
    has_torch and importlib.util.find_spec("instanttensor"), "needs torch and instanttensor"
)

SMALL = [("w", "F32", (6, 4)), ("b", "BF16", (6,)), ("none", "I64", (0, 3)), ("one", "F16", ()), ("b.w", "I32", (4, 4))]


class WithFiles(TestCase):
    """A test with two files. Their order in a list differs from the order of their names."""

    def setUp(self):
        super().setUp()
        self.x = write(self.tmp / "x.safetensors", SMALL, {"format": "pt", "k": "1"})
        self.a = write(self.tmp / "a.safetensors", [("v", "F32", (2, 4)), ("u", "U8", (5,))])
        self.files = [self.x, self.a]


class TestWithoutTorch(WithFiles):
    def opened(self, files=None, **arguments):
        return safe_open(self.files if files is None else files, "pt", "cpu", load_now=False, **arguments)

    def test_names_are_those_of_the_sorted_files_in_file_order(self):
        f = self.opened()
        self.assertEqual(f.keys(), ["v", "u", "w", "b", "none", "one", "b.w"])
        self.assertEqual(f.offset_keys(), f.keys())
        self.assertEqual(f.metadata(), {"format": "pt", "k": "1"})
        self.assertIsNone(self.opened(self.a).metadata())

    def test_patterns_select_tensors(self):
        for mode, patterns, names in (
            ("glob", ["b*", "v"], ["v", "b", "b.w"]), ("exact", ["b", "b*"], ["b"]), ("regex", ["b|w", "."], ["v", "u", "w", "b"]),
            ("glob", [], []), ("glob", ["B"], []),
        ):
            with self.subTest(mode, patterns=patterns):
                self.assertEqual(self.opened(tensor_filter=patterns, tensor_name_match_mode=mode).keys(), names)

    def test_arguments_that_mean_nothing_are_refused_in_one_line(self):
        class Two:
            def size(self):
                return 2

        refused = [
            ({"tensor_filter": ["w"], "process_group": object()}, ValueError, "tensor_filter: not with a process_group"),
            ({"process_group": Two()}, TypeError, "process_group: expected a group of torch.distributed"),
            ({"tensor_filter": "w"}, TypeError, "tensor_filter: expected a list of str"),
            ({"tensor_filter": ["("], "tensor_name_match_mode": "regex"}, ValueError, "is no regular expression"),
            ({"tensor_name_match_mode": "no"}, ValueError, "tensor_name_match_mode='no': expected 'exact', 'glob' or 'regex'"),
            ({"buffer_size": 0}, ValueError, "buffer_size=0: expected a number from 1 on"),
            ({"buffer_size": 4096}, ValueError, "buffer_size=4096 is less than 8388608 bytes"),
            ({"buffer_size": 10000, "chunk_size": 4096, "io_depth": 3}, ValueError, "less than 12288 bytes"),
            ({"chunk_size": -1}, ValueError, "chunk_size=-1"),
            ({"chunk_size": (1 << 30) + 1}, ValueError, "expected at most 1073741824 bytes"),
            ({"io_depth": 1025}, ValueError, "io_depth=1025: expected at most 1024"),
            ({"io_depth": "4"}, TypeError, "io_depth: expected an int, not str"),
            ({"concurrency": -1}, ValueError, "concurrency=-1"),
            ({"concurrency": 0, "backend": Backend.MMAP}, ValueError, "MMAP needs one thread or more"),
            ({"max_free_mem_usage": 1.5}, RuntimeError, "max_free_mem_usage=1.5"),
            ({"backend": []}, ValueError, "backend="),
            ({"backend": "AIO"}, TypeError, "backend: expected a Backend"),
        ]
        for arguments, cls, text in refused:
            with self.subTest(arguments), self.assertRaises(cls) as raised:
                self.opened(**arguments)
            self.assertIn(text, str(raised.exception))
            self.assertNotIn("\n", str(raised.exception))
        for device, cls in (("mps", ValueError), (None, TypeError), (True, TypeError)):
            self.assertRaises(cls, safe_open, self.x, "pt", device)
        self.assertRaisesRegex(ValueError, 'expected "pt"', safe_open, self.x, "np", "cpu")
        self.assertRaises(TypeError, safe_open, (self.x,), "pt", "cpu")
        self.assertRaises(FileNotFoundError, safe_open, self.x + "x", "pt", "cpu")

    def test_files_of_another_framework_are_refused(self):
        other = write(self.tmp / "o.safetensors", [("q", "U8", (1,))], {"format": "tf"})
        with self.assertRaisesRegex(ValueError, "o.safetensors: its metadata says format='tf'"):
            self.opened([self.a, other])

    def test_variables_stand_for_arguments(self):
        for name, value in (
            ("BACKEND", "AIO,no"), ("BACKEND", " "), ("CHUNK_SIZE", "x"), ("CONCURRENCY", "-1"), ("IO_DEPTH", "0"), ("BUFFER_SIZE", "0"),
        ):
            with self.subTest(name), environment(**{f"INSTANTTENSOR_{name}": value}), self.assertRaises(ValueError):
                self.opened()
        with environment(INSTANTTENSOR_IO_DEPTH="0", INSTANTTENSOR_BACKEND="BUFFERED , AIO"):
            self.opened(io_depth=4)

    def test_no_files_are_a_checkpoint_without_tensors(self):
        self.assertEqual(self.opened([]).keys(), [])

    def test_shards_of_a_checkpoint_are_whole_tensors(self):
        shards = sorted_files("dcp/row_wise/shards")
        self.assertEqual(sorted(self.opened(shards).keys()), sorted(tensorfs.safe_open(shards, "dlpack").keys()))


@needs_torch
class TestWithTorch(WithFiles):
    def test_tensors_have_the_bits_that_safetensors_reads(self):
        import safetensors.torch

        for files in ([path] for path in sorted_files("safetensors") if "odd_f6" not in path and "huge" not in path):
            with self.subTest(os.path.basename(files[0])), safe_open(files, "pt", "cpu") as f:
                expected = safetensors.torch.load_file(files[0])
                self.assertEqual(plain(dict(f.tensors())), plain(expected))
        for folder in ("hf/three_shards", "dcp/whole_files"):
            files = sorted_files(folder)
            with safe_open(files, "pt", "cpu") as f:
                expected = {name: tensor for path in files for name, tensor in safetensors.torch.load_file(path).items()}
                self.assertEqual(plain(dict(f.tensors())), plain(expected))

    def test_arguments_change_how_it_is_read_and_not_what(self):
        expected = plain(tensorfs.load_file([self.a, self.x]))
        for arguments in (
            {"buffer_size": 8 << 20}, {"chunk_size": 3, "io_depth": 1}, {"chunk_size": 1 << 20, "io_depth": 2, "buffer_size": 4 << 20},
            {"backend": Backend.MMAP}, {"backend": [Backend.CUFILE, Backend.URING]}, {"backend": BackendPolicy.BUFFERED},
            {"copy": False}, {"load_now": False}, {"concurrency": 3}, {"max_free_mem_usage": 0.1},
        ):
            with self.subTest(arguments), safe_open(self.files, "pt", "cpu", None, **arguments) as f:
                self.assertEqual(plain(dict(f.tensors())), expected)

    def test_only_selected_tensors_are_loaded(self):
        with safe_open(self.files, "pt", "cpu", tensor_filter=["b*"]) as f:
            self.assertEqual([name for name, _ in f.tensors()], ["b", "b.w"])

    def test_metadata_of_a_tensor_is_that_of_torch(self):
        import torch

        f = safe_open(self.x, "pt", "cpu", load_now=False)
        self.assertEqual(f.get_tensor_metadata("w"), (torch.float32, torch.Size([6, 4])))
        self.assertRaises(KeyError, f.get_tensor_metadata, "no")

    def test_tensors_are_taken_once_and_within_the_context(self):
        with safe_open(self.x, "pt", "cpu") as f:
            list(f.tensors())
            with self.assertRaisesRegex(RuntimeError, "tensors are loaded once"):
                next(f.tensors())
        f = safe_open(self.x, "pt", "cpu")
        with f:
            pass
        with self.assertRaisesRegex(RuntimeError, "after the end of the context"):
            next(f.tensors())

    def test_tensors_outlive_the_context(self):
        with safe_open(self.x, "pt", "cpu", copy=False) as f:
            tensors = dict(f.tensors())
        gc.collect()
        self.assertEqual(plain(tensors), plain(tensorfs.load_file(self.x)))

    def test_the_load_begins_when_it_is_opened_and_ends_when_nobody_wants_it(self):
        def loads():
            return any(thread.name == "tensorfs-prefetch" for thread in threading.enumerate())

        small = {"chunk_size": 4096, "buffer_size": 4096}
        many = [write(self.tmp / f"{number}.safetensors", [(f"t{number}", "U8", (5000,))]) for number in range(4)]
        f = safe_open(many, "pt", "cpu", **small)
        self.assertTrue(loads())
        del f
        gc.collect()
        self.assertFalse(loads())
        with safe_open(many, "pt", "cpu", **small) as f:
            tensors = f.tensors()
            next(tensors)
            self.assertTrue(loads())
        self.assertFalse(loads())
        self.assertRaises(tensorfs.SafetensorError, next, tensors)

    def test_a_dtype_that_torch_lacks_is_refused(self):
        path = str(FIXTURES / "safetensors/odd_f6.safetensors")
        f = safe_open(path, "pt", "cpu", load_now=False)
        self.assertRaises(ValueError, next, f.tensors())
        self.assertRaises(ValueError, f.get_tensor_metadata, f.keys()[0])


class _NoGpu:
    """The properties of a GPU that does not exist."""

    is_integrated = False


@contextlib.contextmanager
def a_gpu():
    """A block in which the queries about GPU memory that the genuine package makes before it opens files get
    answers."""
    with mock.patch("torch.cuda.mem_get_info", lambda *_: (1 << 34, 1 << 35)):
        with mock.patch("torch.cuda.get_device_properties", lambda *_: _NoGpu):
            yield


@needs_genuine
class TestTheSameCalls(WithFiles):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        import instanttensor

        def genuine_open(files, framework="pt", device="cuda:0", *arguments, **more):
            # Threads of the package print the errors of files.
            with a_gpu(), mock.patch.object(threading, "excepthook", lambda *_: None):
                return instanttensor.safe_open(files, framework, device, *arguments, **{"load_now": False, **more})

        def our_open(files, framework="pt", device="cpu", *arguments, **more):
            if device in ("cuda:0", "cuda", 0):
                device = "cpu"
            return ours.safe_open(files, framework, device, *arguments, **{"load_now": False, **more})

        cls.genuine, cls.ours = (instanttensor, genuine_open), (ours, our_open)

    def same(self, label, call):
        compare(self, label, call, self.genuine, self.ours)

    def different(self, label, call, expected):
        differs(self, label, call, self.genuine, self.ours, expected)

    def test_names_dtypes_shapes_and_metadata(self):
        def call(files):
            def asked(peer):
                f = peer[1](list(files))
                names = f.keys()
                return names, f.offset_keys(), [[str(dtype), list(shape)] for dtype, shape in map(f.get_tensor_metadata, names)]

            return asked

        # The genuine package refuses an empty tensor at the offset of another tensor, and a file without tensors.
        for path in sorted_files("safetensors"):
            name = os.path.basename(path)
            if name in ("odd_unsorted.safetensors", "empty.safetensors"):
                self.different(name, call([path]), "reads")
            else:
                self.same(name, call([path]))
        for files in (self.files, [self.x], sorted_files("hf/three_shards"), sorted_files("hf/three_shards")[::-1]):
            self.same(str(len(files)), call(files))
        self.same("metadata", lambda peer: [peer[1](files).metadata() for files in (self.x, [self.x, self.a])])

    def test_bad_files_are_refused(self):
        # The genuine package reads files that can be read in two ways, and checks shapes only when it loads.
        for path in sorted_files("bad/safetensors"):
            if os.path.basename(path) == "entry_as_array.safetensors":
                continue
            with self.subTest(os.path.basename(path)), self.assertRaises((tensorfs.SafetensorError, ValueError)):
                self.ours[1](path)

    def test_filters(self):
        for mode in ("glob", "exact", "regex", "no", None):
            for patterns in (["b*"], ["b.w"], ["b", "v"], [], ["[bw]"], ["("], "w", [1], ["?"], ["B"], None, [".*"], ["b|w"]):
                self.same(
                    f"{mode} {patterns}",
                    lambda peer, patterns=patterns, mode=mode: peer[1](
                        self.files.copy(), tensor_filter=patterns, tensor_name_match_mode=mode
                    ).keys(),
                )
        self.same("with a group", lambda peer: peer[1](self.x, "pt", "cuda:0", object(), tensor_filter=["w"]))
        self.same("with a group, by name", lambda peer: peer[1](self.x, process_group=object(), tensor_filter=[]))

    def test_arguments(self):
        names = lambda peer, *a, **k: peer[1](*a, **k).keys()  # noqa: E731
        for framework in ("np", "torch", "tf", None):
            self.same(f"framework {framework}", lambda peer, framework=framework: names(peer, self.x, framework))
        for device in ("mps", "meta", None):
            self.same(f"device {device}", lambda peer, device=device: names(peer, self.x, "pt", device))
        self.different("the CPU", lambda peer: names(peer, self.x, "pt", "cpu"), "reads")
        self.different("a path of pathlib", lambda peer: names(peer, self.tmp / "x.safetensors"), "reads")
        self.different("a tuple", lambda peer: names(peer, (self.x,)), TypeError)
        self.different("a missing file", lambda peer: names(peer, self.x + "x"), FileNotFoundError)
        self.different("the same file twice", lambda peer: names(peer, [self.x, self.x]), tensorfs.SafetensorError)
        self.same("no files", lambda peer: names(peer, []))
        self.same("another format", lambda peer: names(peer, write(self.tmp / "o.safetensors", SMALL, {"format": "tf"})))
        self.same("unknown tensor", lambda peer: peer[1](self.x).get_tensor_metadata("no"))
        numbers = {
            "buffer_size": (-1, 0, 1, 4096, 8 << 20, 1 << 30, "x"),
            "chunk_size": (-1, 0, 1, 4097, 1 << 20, 1 << 30, (1 << 30) + 1),
            "io_depth": (-1, 0, 1, 7, 1024, 1025, "x"),
            "concurrency": (-1, 0, 1, 64),
            "max_free_mem_usage": (-1, 0, 0.5, 1, 1.1, float("nan"), float("inf")),
        }
        for name, values in numbers.items():
            for value in values:
                self.same(f"{name}={value}", lambda peer, name=name, value=value: names(peer, self.x, **{name: value}))
                if isinstance(value, (int, float)):
                    with environment(**{f"INSTANTTENSOR_{name.upper()}": str(value)}):
                        self.same(f"{name}={value} of the environment", lambda peer: names(peer, self.x))
        for buffer, chunk, depth in ((4096, 4096, 1), (4096, 4096, 2), (8191, 4096, 2), (8192, 4000, 2), (1 << 20, None, 4)):
            self.same(
                f"{buffer} {chunk} {depth}",
                lambda peer, buffer=buffer, chunk=chunk, depth=depth: names(
                    peer, self.x, buffer_size=buffer, chunk_size=chunk, io_depth=depth
                ),
            )

    def test_backends(self):
        self.same("names", lambda peer: [[one.name for one in peer[0].Backend], [one.name for one in peer[0].BackendPolicy]])
        choices = {
            "one": lambda m: m.Backend.MMAP, "list": lambda m: [m.Backend.AIO, m.Backend.MMAP], "policy": lambda m: m.BackendPolicy.BUFFERED,
            "none": lambda m: [], "text": lambda m: "AIO", "text in a list": lambda m: [m.Backend.AIO, "AIO"], "tuple": lambda m: (m.Backend.AIO,),
        }
        for label, choice in choices.items():
            for threads_ in (None, 0, 2):
                self.same(
                    f"{label} {threads_}",
                    lambda peer, choice=choice, threads_=threads_: peer[1](self.x, backend=choice(peer[0]), concurrency=threads_).keys(),
                )
        for text in ("AIO", "MMAP", "BUFFERED, MMAP", "no", "", " , ", "aio"):
            with environment(INSTANTTENSOR_BACKEND=text):
                self.same(f"environment {text!r}", lambda peer: peer[1](self.x).keys())

    def test_tensors_after_the_end_and_again(self):
        def again(peer):
            f = peer[1](self.x)
            f.iterated = f._iterated = True
            return next(f.tensors())

        def after(peer):
            f = peer[1](self.x)
            f._invalidated = f._closed = True
            return next(f.tensors())

        self.same("again", again)
        self.same("after", after)


if __name__ == "__main__":
    unittest.main()
