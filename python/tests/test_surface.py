"""Compares `safe_open` with that of safetensors: results and classes of errors are equal."""

import os
import random
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors
from safetensors.numpy import save_file

import tensorfs
from checkpoints import column_wise, hf_set, row_wise, write_shard
from package import Mount, TestCase, dlpack_bytes, needs_ml_dtypes, needs_torch


def outcome(work):
    """The result of `work`. If it fails: the public classes of its error, and the text."""
    try:
        return np.asarray(work()), None
    except Exception as e:
        cls = safetensors.SafetensorError if isinstance(e, safetensors.SafetensorError) else type(e)
        return None, (cls, str(e))


class HalfBytes(TestCase):
    @needs_torch
    def test_an_index_gives_the_elements_it_names_or_is_refused(self):
        import torch

        file = self.tmp / "model.safetensors"
        data = np.arange(16, dtype=np.uint8) * 17 + 1
        write_shard(file, [("a", "F4", (2, 16), data.tobytes())])
        elements = np.stack([data & 15, data >> 4], -1).reshape(2, 16)
        for backend in ("mmap", "pread"):
            found = tensorfs.safe_open(file, "pt", backend=backend).get_slice("a")
            for index in (1, slice(1, 2), (0, slice(4, 10)), (slice(None, None, 2), slice(2, 4)), (..., slice(-4, None))):
                with self.subTest(backend=backend, index=index):
                    got = found[index].contiguous().view(torch.uint8).numpy()
                    got = np.stack([got & 15, got >> 4], -1).reshape(*got.shape[:-1], -1)
                    np.testing.assert_array_equal(got, elements[index])
            bad = [(0, 3), (0, slice(1, 3)), (0, slice(None, None, 2)), (..., slice(0, 2, 3))]
            for index in bad + [(..., [0, 1]), [1, 0], (0, None), torch.tensor([1])] * (backend == "mmap"):
                with self.subTest(backend=backend, index=index), self.assertRaises(tensorfs.SafetensorError):
                    found[index]


class SingleFile(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"
        rng = np.random.default_rng(1)
        self.tensors = {
            "b.matrix": rng.standard_normal((11, 7)).astype(np.float32),
            "a.cube": rng.integers(0, 99, (4, 5, 6)),
            "scalar": np.array(2.5),
            "empty": np.zeros((0, 3), np.float16),
            "flags": rng.integers(0, 2, (9,)).astype(bool),
        }
        save_file(self.tensors, self.file, metadata={"format": "np", "k": "v"})

    def both(self, **how):
        return tensorfs.safe_open(self.file, "np", **how), safetensors.safe_open(self.file, "np", **how)

    def test_names_metadata_and_slices_are_described_alike(self):
        ours, genuine = self.both()
        with ours as f, genuine as g:
            self.assertEqual(f.keys(), g.keys())
            self.assertEqual(f.offset_keys(), g.offset_keys())
            self.assertEqual(f.metadata(), g.metadata())
            for name in g.keys():
                self.assertEqual(f.get_slice(name).get_shape(), g.get_slice(name).get_shape())
                self.assertEqual(f.get_slice(name).get_dtype(), g.get_slice(name).get_dtype())

    def test_tensors_are_the_same_and_ordinary(self):
        ours, genuine = self.both()
        with ours as f, genuine as g:
            for name, right in g.get_tensors().items():
                for found in (f.get_tensor(name), f.get_tensors()[name]):
                    self.assertEqual((found.dtype, found.shape), (right.dtype, right.shape))
                    self.assertTrue(found.flags.writeable and found.flags.c_contiguous)
                    np.testing.assert_array_equal(found, right)
            self.assertEqual(list(f.get_tensors()), list(g.get_tensors()))

    def test_metadata_that_is_absent_is_none_and_empty_metadata_is_empty(self):
        save_file(self.tensors, self.file)
        self.assertIsNone(tensorfs.safe_open(self.file, "np").metadata())
        write_shard(self.file, [("a", "U8", [1], b"x")], {})
        ours, genuine = self.both()
        self.assertEqual(ours.metadata(), genuine.metadata())

    def test_random_indices_give_what_safetensors_gives(self):
        choose = random.Random(3)

        def item(size):
            kind = choose.randrange(8)
            if kind == 0:
                return choose.randrange(-size - 1, size + 2)
            if kind == 1:
                return Ellipsis
            if kind == 2:
                return slice(None, None, choose.choice([1, 2, 3, 0, -1]))
            # safetensors panics if the end is before the start.
            start, stop = sorted(choose.randrange(0, size + 2) for _ in "ab")
            bounds = choose.choice([None, start]), choose.choice([None, stop])
            if bounds[0] is not None and bounds[1] is None and start > size:
                bounds = (None, None)
            return slice(*bounds, choose.choice([None, None, 1, 2]))

        compared = 0
        for backend in ("mmap", "pread"):
            ours, genuine = self.both(backend=backend)
            with ours as f, genuine as g:
                for _ in range(600):
                    name = choose.choice(["b.matrix", "a.cube", "flags", "scalar"])
                    shape = self.tensors[name].shape
                    count = choose.randrange(0, len(shape) + 2)
                    index = tuple(item(shape[min(at, len(shape) - 1)] if shape else 1) for at in range(count))
                    index = index[0] if len(index) == 1 and choose.random() < 0.5 else index
                    wanted, refused = outcome(lambda: g.get_slice(name)[index])
                    with self.subTest(name=name, index=index, backend=backend):
                        found, error = outcome(lambda: f.get_slice(name)[index])
                        self.assertEqual(error, refused)
                        if not refused:
                            self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape))
                            np.testing.assert_array_equal(found, wanted)
                            compared += 1
        self.assertGreater(compared, 300)

    @needs_torch
    def test_random_indices_give_what_torch_gives(self):
        import torch

        choose = random.Random(5)

        def item(size):
            kind = choose.randrange(9)
            if kind == 0:
                return choose.choice([..., None, True, [0, 1], torch.tensor([1]), np.int64(1), "x", 1.5])
            if kind < 3:
                return choose.randrange(-size - 1, size + 2)
            bounds = [choose.choice([None, choose.randrange(-size - 2, size + 3)]) for _ in "ab"]
            return slice(*bounds, choose.choice([None, None, 1, 2, 3, 0, -1]))

        def compared(tensor):
            return tensor.dtype, tuple(tensor.shape), tensor.tolist()

        with tensorfs.safe_open(self.file, "pt") as f, safetensors.safe_open(self.file, "pt") as g:
            for _ in range(600):
                name = choose.choice(["b.matrix", "a.cube", "flags", "scalar", "empty"])
                shape = self.tensors[name].shape
                count = choose.randrange(0, len(shape) + 2)
                index = tuple(item(shape[min(at, len(shape) - 1)] if shape else 1) for at in range(count))
                index = index[0] if len(index) == 1 and choose.random() < 0.5 else index
                with self.subTest(name=name, index=index):
                    try:
                        right = g.get_slice(name)[index]
                    except Exception as e:
                        with self.assertRaises(type(e)) as caught:
                            f.get_slice(name)[index]
                        self.assertEqual(str(caught.exception), str(e))
                    else:
                        found = f.get_slice(name)[index]
                        self.assertEqual(compared(found), compared(right))
                        self.assertTrue(found.is_contiguous() or not right.is_contiguous())

    @needs_torch
    def test_plain_indices_give_the_same_from_the_page_cache_and_past_it(self):
        import torch

        indices = (1, slice(1, 3), slice(None, 2), (2, slice(1, 2)), (slice(1, 3), 0), (slice(0, 2), slice(1, None)))
        native, calls = tensorfs._open.load_indexed, []

        def counted(*given):
            made = native(*given)
            calls.append(made is not None)
            return made

        for name in ("b.matrix", "a.cube"):
            right = torch.from_numpy(self.tensors[name].copy())
            for source in ("buffered", "direct"):
                calls.clear()
                with (
                    mock.patch.object(tensorfs._open, "load_indexed", counted),
                    tensorfs.safe_open(self.file, "pt", source=source) as f,
                ):
                    part = f.get_slice(name)
                    # The kernel may drop the file from the page cache in between, so it is read again.
                    Path(self.file).read_bytes()
                    for index in indices:
                        with self.subTest(name=name, source=source, index=index):
                            self.assertTrue(torch.equal(part[index], right[index]))
                    self.assertEqual(calls, [source == "buffered"] * len(indices))

    @needs_torch
    def test_a_part_of_a_file_that_changed_is_refused_though_the_page_cache_has_it(self):
        # File times may have a resolution of ten milliseconds.
        os.utime(self.file, (1, 1))
        with tensorfs.safe_open(self.file, "pt") as f:
            part = f.get_slice("b.matrix")
            part[1:2]
            with open(self.file, "r+b") as file:
                file.seek(-1, 2)
                file.write(b"z")
            with self.assertRaises(tensorfs.SafetensorError) as caught:
                part[1:2]
            self.assertEqual(caught.exception.kind, "changed")

    def test_lists_and_other_indices_are_refused_alike(self):
        ours, genuine = self.both()
        with ours as f, genuine as g:
            for index in ([0, 1], "x", None, (0, "x"), (..., ...), 1.5, (0, 0, 0)):
                with self.subTest(index=index):
                    _, refused = outcome(lambda: g.get_slice("b.matrix")[index])
                    self.assertEqual(outcome(lambda: f.get_slice("b.matrix")[index])[1], refused)
            np.testing.assert_array_equal(f.get_slice("b.matrix")[[]], g.get_slice("b.matrix")[[]])

    def test_odd_indices_are_taken_or_refused_alike(self):
        class Fails:
            def __index__(self):
                raise RuntimeError("no index")

        class One:
            def __index__(self):
                return 1

        odd = [True, False, (True, 1), (..., True), One(), Fails(), np.int64(1), np.array(1), np.array([1]), 1 << 70, -(1 << 70)]
        odd += [slice(bound, None) for bound in ("a", 1.5, True, One(), Fails(), 1 << 70, -(1 << 70), np.array([1, 2]))]
        odd += [slice(None, None, step) for step in ("a", 0, -1, 1 << 70, True)]
        ours, genuine = self.both()
        with ours as f, genuine as g:
            for name in ("b.matrix", "scalar"):
                for index in odd:
                    with self.subTest(name=name, index=index):
                        array, refused = outcome(lambda: g.get_slice(name)[index])
                        got, why = outcome(lambda: f.get_slice(name)[index])
                        self.assertEqual(got is None, array is None)
                        if array is None:
                            # The interpreter has several texts for a number that is too large.
                            words = 1 if refused[0] is OverflowError else 2
                            self.assertEqual(why[:words], refused[:words])
                        else:
                            np.testing.assert_array_equal(got, array)

    @needs_torch
    def test_what_torch_says_to_an_odd_index_is_said_alike(self):
        import torch
        import safetensors.torch

        class Fails:
            def __index__(self):
                raise KeyError("no index")

        masks = [np.array(flag) for flag in (True, False)] + [np.array([1, 0, 1, 0], bool), [True, False, True, False], np.bool_(True)]
        masks += [torch.tensor(True), torch.tensor([True, False, True, True]), torch.tensor(1, dtype=torch.uint8), np.array(1, np.uint8)]
        masks += [np.array([0, 1, 0, 0], np.uint8), (np.array(True), 0), (0, np.ones(6, bool)), (True, 0), True, None, (..., None)]
        floats = [1.5, np.float32(1), np.array(1.5), np.array([1.5]), torch.tensor(1.5), (torch.tensor(1.5), 0), torch.tensor([0.5]), torch.tensor(1j)]
        others = ["a", b"a", (0, "a"), {}, object(), Fails(), torch, np.array("a"), np.array(None), ["a"], range(2), slice("a"), slice(1.0, 2)]
        outside = [9, -9, 10**20, np.int64(9), torch.tensor(9), torch.tensor([9]), [9], (0, 0, 0, 0), (..., ...), ([0, 1], [1, 2, 3]), (0,) * 65]
        steps = [slice(None, None, step) for step in (0, -1, 2, 1.5, 10**30)] + [slice(torch.tensor(1), None), slice(Fails(), None)]
        numbers = [0, -1, np.int32(-1), np.array(1), np.uint8(1), torch.tensor(1), [0, 1], [], ([0, 1], 0), torch.tensor([0, 2]), slice(-3, -1), ..., ()]
        tensors = {
            "matrix": torch.arange(24.0).reshape(4, 6),
            "cube": torch.arange(24).reshape(2, 3, 4),
            "vector": torch.arange(4),
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 3),
            "halves": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6),
        }
        safetensors.torch.save_file(tensors, self.file)
        for copy in (True, False):
            with warnings.catch_warnings(), tensorfs.safe_open(self.file, "pt", copy=copy) as f, safetensors.safe_open(self.file, "pt") as g:
                # Torch warns of masks of bytes, and of lists of lists.
                warnings.simplefilter("ignore")
                for name in tensors:
                    ours, genuine = f.get_slice(name), g.get_slice(name)
                    for index in masks + floats + others + outside + steps + numbers:
                        with self.subTest(name=name, index=index, copy=copy):
                            try:
                                right, refused = genuine[index], None
                            except Exception as e:
                                refused = type(e)
                            if refused is None:
                                self.assertTrue(torch.equal(ours[index], right))
                                continue
                            with self.assertRaises(Exception) as caught:
                                ours[index]
                            self.assertIs(type(caught.exception), refused)

    def test_names_that_are_no_text_are_refused_as_that(self):
        with tensorfs.safe_open(self.file, "np") as f:
            for names, found in ((b"scalar", "names: expected .* not bytes"), ([b"scalar"], "is a str, not bytes"), ([1], "is a str, not int")):
                for load in (f.get_tensors, f.tensors, f.nbytes, lambda names: tensorfs.load_file(self.file, "np", names=names)):
                    with self.subTest(names=names), self.assertRaisesRegex(TypeError, found):
                        load(names)
            with self.assertRaisesRegex(TypeError, "is a str, not bytes"):
                f.prefetch({b"scalar": None})
        with self.assertRaisesRegex(TypeError, "include: expected a glob or a list of them, not bytes"):
            tensorfs.safe_open(self.file, "np", include=b"scalar")

    def test_a_tensor_that_the_framework_cannot_have_is_named(self):
        for shape in ([1] * 65, [0, 1 << 62], [0, 1 << 63]):
            file = self.tmp / "odd.safetensors"
            write_shard(file, [("odd", "F32", shape, bytes(0 if 0 in shape else 4))])
            with tensorfs.safe_open(file, "np") as f:
                for load in (lambda: f.get_tensor("odd"), f.get_tensors, lambda: f.get_slice("odd")[...]):
                    with self.assertRaisesRegex(tensorfs.SafetensorError, "tensor `odd`: numpy has no tensor of shape"):
                        load()

    def test_a_gpu_number_that_no_machine_has_is_refused_by_name(self):
        for device in ("cuda:" + "9" * 30, 10**30, "9" * 5000, 1 << 63):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "is invalid: no GPU has a number of more than 9 digits"):
                tensorfs.safe_open(self.file, "pt", device)

    def test_a_handle_and_its_slices_are_pickled_as_its_arguments_and_open_again(self):
        import pickle

        with tensorfs.safe_open(self.file, "np", include=["b.*", "s*"], chunk="1M") as f:
            with pickle.loads(pickle.dumps(f)) as again:
                self.assertEqual(again.keys(), f.keys())
                np.testing.assert_array_equal(again.get_tensor("b.matrix"), self.tensors["b.matrix"])
            part = f.get_slice("b.matrix")
            again, both = pickle.loads(pickle.dumps([part, f.get_slice("scalar")])), part[1:3]
            np.testing.assert_array_equal(again[0][1:3], both)
            self.assertIs(again[0]._opened, again[1]._opened)
        for handle in (f, part):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "File is closed"):
                pickle.dumps(handle)
        # A file that is not encrypted accepts no key.
        f._open, f._arguments["key"] = f, bytes(32)
        with self.assertRaisesRegex(TypeError, "give key_file="):
            pickle.dumps(f)

    def test_what_is_wrong_with_a_call_is_said_in_the_same_words(self):
        def opened(cls, *arguments, **how):
            return lambda: cls(self.file, *arguments, **how) and 0

        for arguments, how in (
            (("nonsense",), {}),
            (("np", "nonsense"), {}),
            (("np", []), {}),
            (("np",), {"backend": "x"}),
        ):
            with self.subTest(arguments=arguments, how=how):
                refused = outcome(opened(safetensors.safe_open, *arguments, **how))[1]
                self.assertEqual(outcome(opened(tensorfs.safe_open, *arguments, **how))[1], refused)
        ours, genuine = self.both()
        for call in (lambda f: f.get_tensor("absent"), lambda f: f.get_slice("absent")):
            self.assertEqual(outcome(lambda: call(ours))[1], outcome(lambda: call(genuine))[1])
        missing = [outcome(lambda: cls("not a file", "np") and 0)[1] for cls in (tensorfs.safe_open, safetensors.safe_open)]
        self.assertEqual(*missing)
        for f in (ours, genuine):
            with f:
                pass
        for call in (lambda f: f.keys(), lambda f: f.get_tensor("scalar"), lambda f: f.metadata()):
            self.assertEqual(outcome(lambda: call(ours))[1], outcome(lambda: call(genuine))[1])

    def test_one_handle_serves_slices_after_it_was_closed(self):
        with tensorfs.safe_open(self.file, "np") as f:
            part = f.get_slice("b.matrix")
        np.testing.assert_array_equal(part[1:3], self.tensors["b.matrix"][1:3])

    def test_the_position_in_the_file_is_known_without_reading(self):
        with tensorfs.safe_open(self.file, "np") as f:
            data = self.file.read_bytes()
            start = 8 + int.from_bytes(data[:8], "little")
            for name, array in self.tensors.items():
                meta = f.get_tensor_metadata(name)
                self.assertEqual((meta.shape, meta.nbytes), (list(array.shape), array.nbytes))
                begin, end = meta.data_offsets
                self.assertEqual(data[start + begin : start + end], array.tobytes())
                self.assertEqual(meta.pieces, [(str(self.file), start + begin, start + end)])

    def test_names_are_chosen_by_glob_by_expression_and_exactly(self):
        import re

        with tensorfs.safe_open(self.file, "np") as f:
            self.assertEqual(set(f.get_tensors("*.*")), {"b.matrix", "a.cube"})
            self.assertEqual(set(f.get_tensors(re.compile("^e|a.c"))), {"empty", "a.cube"})
            self.assertEqual(set(f.get_tensors(["scalar"])), {"scalar"})
            self.assertEqual([name for name, _ in f.tensors("*a*")], [n for n in f.offset_keys() if "a" in n])
            for nothing in ("nothing*", re.compile("nothing")):
                with self.assertRaisesRegex(tensorfs.SafetensorError, r"names='nothing.*' matches none of the \d tensors: a.cube"):
                    f.get_tensors(nothing)
            self.assertEqual(f.get_tensors([]), {})
            with self.assertRaisesRegex(tensorfs.SafetensorError, "absent"):
                f.get_tensors(["scalar", "absent"])
        self.assertEqual(set(tensorfs.load_file(self.file, "np", names="f*")), {"flags"})


class ManyFiles(TestCase):
    def test_a_folder_a_weight_map_a_list_a_mapping_and_a_mount_give_the_same(self):
        folder = hf_set(self.tmp / "hf")
        shards = sorted(folder.glob("*.safetensors"))
        with tensorfs.safe_open(folder, "dlpack") as f:
            right = dlpack_bytes(f)
        where = {name: shard for shard in shards for name in safetensors.safe_open(shard, "np").keys()}
        self.assertEqual(set(right), set(where))
        for source in (folder / "model.safetensors.index.json", shards, list(map(str, shards)), where, str(folder)):
            with self.subTest(source=type(source)), tensorfs.safe_open(source, "dlpack") as f:
                self.assertEqual(dlpack_bytes(f), right)
        with Mount(folder) as m:
            for source in (m.path, m.path / "model.safetensors"):
                with self.subTest(source=source), tensorfs.safe_open(source, "dlpack") as f:
                    self.assertEqual(dlpack_bytes(f), right)
                    pieces = [f.get_tensor_metadata(name).pieces for name in f.keys()]
            self.assertTrue(all(path.startswith(str(folder)) for ((path, *_),) in pieces), "read past the mount")

    def test_one_shard_is_what_safetensors_sees_in_it(self):
        for make in (hf_set, row_wise):
            shard = sorted((make(self.tmp / make.__name__)).glob("*.safetensors"))[1]
            with tensorfs.safe_open(shard, "dlpack") as f, safetensors.safe_open(shard, "np") as g:
                self.assertEqual((f.keys(), f.offset_keys(), f.metadata()), (g.keys(), g.offset_keys(), g.metadata()))
                for name in g.keys():
                    self.assertEqual(list(f.get_tensor(name).shape), g.get_slice(name).get_shape())

    def test_pieces_of_ranks_are_put_together_and_parts_of_them_read_right(self):
        for make, name, whole in ((row_wise, "embed", (4099, 257)), (column_wise, "down", (333, 77))):
            folder = make(self.tmp / make.__name__)
            with Mount(folder) as m, safetensors.safe_open(m.path / "model.safetensors", "np") as g:
                right = g.get_tensor(name)
            self.assertEqual(right.shape, whole)
            with tensorfs.safe_open(folder, "np") as f:
                np.testing.assert_array_equal(f.get_tensor(name).view(np.uint8), right.view(np.uint8))
                part = f.get_slice(name)
                for index in (np.s_[3], np.s_[10:200, 5:40], np.s_[:, 7], np.s_[1:300:7, ::3], np.s_[..., -1]):
                    np.testing.assert_array_equal(part[index].view(np.uint8), right[index].copy().view(np.uint8))
            listed = sorted(folder.glob("*.safetensors"))
            with tensorfs.safe_open(listed, "np") as f:
                np.testing.assert_array_equal(f.get_tensor(name).view(np.uint8), right.view(np.uint8))

    def test_what_is_no_source_is_refused(self):
        with self.assertRaises(TypeError):
            tensorfs.safe_open(7, "np")
        for source in ([], [self.tmp / "absent.safetensors"], {"a": "absent.safetensors"}, self.tmp / "absent"):
            with self.subTest(source=source), self.assertRaises((FileNotFoundError, tensorfs.SafetensorError)):
                tensorfs.safe_open(source, "np")
        (self.tmp / "nothing").mkdir()
        with self.assertRaisesRegex(tensorfs.SafetensorError, "nothing"):
            tensorfs.safe_open(self.tmp / "nothing", "np")


class Dtypes(TestCase):
    def setUp(self):
        super().setUp()
        self.file = self.tmp / "model.safetensors"

    def test_a_dtype_that_numpy_lacks_is_named_with_its_tensor(self):
        write_shard(self.file, [("odd", "F6_E2M3", [4], b"abc")])
        with tensorfs.safe_open(self.file, "np") as f:
            with self.assertRaisesRegex(tensorfs.DtypeError, "`odd`.*F6_E2M3") as caught:
                f.get_tensor("odd")
            self.assertIsInstance(caught.exception, (TypeError, safetensors.SafetensorError))
            self.assertEqual(caught.exception.tensor, "odd")
        with tensorfs.safe_open(self.file, "dlpack") as f:
            self.assertEqual(f.get_tensor("odd").tobytes(), b"abc")

    @needs_ml_dtypes
    def test_small_floats_are_those_of_ml_dtypes(self):
        import ml_dtypes

        write_shard(self.file, [("b", "BF16", [2], b"\x80?\x00\xc0"), ("e", "F8_E4M3", [2], b"\x38\xb8")])
        with tensorfs.safe_open(self.file, "np") as f:
            self.assertEqual(f.get_tensor("b").dtype, np.dtype(ml_dtypes.bfloat16))
            self.assertEqual(f.get_tensor("b").astype(float).tolist(), [1.0, -2.0])
            self.assertEqual(f.get_tensor("e").astype(float).tolist(), [1.0, -1.0])

    @needs_torch
    def test_every_dtype_of_torch_is_what_safetensors_gives(self):
        import torch

        from package import FIXTURES

        file = FIXTURES / "safetensors/all_dtypes.safetensors"
        with tensorfs.safe_open(file, "pt") as f, safetensors.safe_open(file, "pt") as g:
            for name in g.keys():
                found, right = f.get_tensor(name), g.get_tensor(name)
                self.assertEqual((found.dtype, found.shape), (right.dtype, right.shape), name)
                self.assertTrue(torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (found, right))))
