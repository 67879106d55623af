"""`tensorfs.compat.fastsafetensors`: the same calls on the genuine package and on ours, if the genuine package is
installed, and tests that need neither it nor torch."""

import importlib
import importlib.util
import json
import os
import re
import threading
import unittest

import tensorfs
from package import FIXTURES, ROOT, TestCase, environment, has_torch, needs_torch, python
from peers import WIDTHS, compare, differs, outcome, plain, sorted_files, write
from tensorfs.compat import fastsafetensors as ours
from tensorfs.compat.fastsafetensors.st_types import Device, DeviceType, DType

needs_genuine = unittest.skipUnless(
    has_torch and importlib.util.find_spec("fastsafetensors"), "needs torch and fastsafetensors"
)

SMALL = [("w", "F32", (6, 4)), ("b", "BF16", (6,)), ("none", "I64", (0, 3)), ("one", "F16", ()), ("i", "I32", (4, 4))]


class Peer:
    """One of the two packages."""

    def __init__(self, module, name):
        self.module = module
        self.types = importlib.import_module(f"{name}.st_types")
        self.pipeline = importlib.import_module(f"{name}.parallel_loader").PipelineParallel
        self.made = []

    def group(self):
        return self.module.SingleGroup()

    def loader(self, files, keep=None, **arguments):
        loader = self.module.SafeTensorsFileLoader(self.group(), "cpu", nogds=True, **arguments)
        loader.set_tensor_filter(keep)
        loader.add_filenames(files if isinstance(files, dict) else {0: files})
        return loader

    def buffer(self, files, keep=None, **arguments):
        return self.loader(files, keep).copy_files_to_device(**arguments)

    def weights(self, files, **arguments):
        loader = self.module.ParallelLoader(
            self.group(), files, nogds=True, use_tqdm_on_load=False, **arguments
        )
        try:
            return [(name, tensor.clone()) for name, tensor in loader.iterate_weights()]
        finally:
            loader.close()


class WithFiles(TestCase):
    """A test with two files. Their order in a list differs from the order of their names."""

    def setUp(self):
        super().setUp()
        self.x = write(self.tmp / "x.safetensors", SMALL, {"format": "pt", "k": "1"})
        self.a = write(self.tmp / "a.safetensors", [("v", "F32", (2, 4)), ("u", "U8", (5,))])
        self.files = [self.x, self.a]


class TestWithoutTorch(WithFiles):
    def test_names_shapes_and_headers_are_known_before_anything_is_loaded(self):
        loader = ours.SafeTensorsFileLoader(ours.SingleGroup(), "cpu")
        loader.add_filenames({0: self.files})
        self.assertEqual(loader.get_keys(), ["w", "b", "none", "one", "i", "v", "u"])
        self.assertEqual(loader.get_shape("w"), [6, 4])
        header, rank = loader.meta[self.x]
        self.assertEqual((header.src, header.metadata, rank), (self.x, {"format": "pt", "k": "1"}, 0))
        self.assertEqual(loader.meta[self.a][0].metadata, "")
        self.assertEqual(loader.frames["b"].data_offsets, [96, 108])
        with open(self.x, "rb") as file:
            self.assertEqual(header.header_length, 8 + int.from_bytes(file.read(8), "little"))

    def test_a_filter_leaves_tensors_out_of_names_and_shapes(self):
        loader = ours.SafeTensorsFileLoader(None)
        loader.set_tensor_filter(lambda name: name != "w")
        loader.add_filenames({0: [self.x]})
        self.assertEqual(loader.get_keys(), ["b", "none", "one", "i"])
        with self.assertRaisesRegex(ValueError, "the filter leaves the tensor 'w' out"):
            loader.get_shape("w")
        with self.assertRaises(KeyError):
            loader.get_shape("no")

    def test_files_of_several_ranks_are_added_in_turn(self):
        loader = ours.SafeTensorsFileLoader(None)
        more = write(self.tmp / "m.safetensors", [("m", "U8", (1,))])
        loader.add_filenames({0: [self.x, more], 1: [self.a]})
        self.assertEqual(list(loader.meta), [self.x, self.a, more])

    def test_arguments_that_mean_nothing_are_refused_in_one_line(self):
        def adds(files):
            return lambda: ours.SafeTensorsFileLoader(None).add_filenames(files)

        class Two(ours.SingleGroup):
            def size(self):
                return 2

        refused = [
            (lambda: ours.SafeTensorsFileLoader("all"), TypeError, "pg: expected a process group of torch, a SingleGroup or"),
            (lambda: ours.SafeTensorsFileLoader(Two()), TypeError, "pg: expected a process group of torch, a SingleGroup or"),
            (lambda: ours.SafeTensorsFileLoader(None, framework="np"), tensorfs.SafetensorError, "framework 'np' is not"),
            (adds([self.x]), TypeError, "filenames: expected a mapping from ranks to lists of paths, not list"),
            (adds({0: self.x}), TypeError, "filenames of rank 0: expected a list of paths, not str"),
            (adds({0: ["missing.safetensors"]}), FileNotFoundError, "missing.safetensors"),
            (adds({0: [self.x, self.x + "/../x.safetensors"]}), OSError, "x.safetensors"),
            (adds({0: [str(FIXTURES / "safetensors/odd_f6.safetensors")]}), ValueError, "has F6_E2M3, which torch has not"),
            (lambda: ours.ParallelLoader(None, [], max_concurrent_producers=2), ValueError, "max_concurrent_producers=2"),
            (lambda: ours.ParallelLoader(None, [self.x], max_batch_bytes=95), ValueError, "'w' has 96 bytes; allow as many"),
            (
                lambda: ours.ParallelLoader(None, [self.x], device_memory_budget=170),
                ours.BudgetInfeasibleError,
                "device_memory_budget=170: 174 bytes are needed: 174 for tensors that stay, 0 for those in use",
            ),
        ]
        for call, cls, text in refused:
            with self.subTest(text):
                self.assertRaisesRegex(cls, text, call)
                with self.assertRaises(cls) as raised:
                    call()
                self.assertNotIn("\n", str(raised.exception))

    def test_a_name_in_two_files_is_refused_as_soon_as_they_are_added(self):
        again = write(self.tmp / "z.safetensors", [("v", "U8", (2,))])
        with self.assertRaisesRegex(tensorfs.SafetensorError, "tensor `v`: lies in"):
            ours.SafeTensorsFileLoader(None).add_filenames({0: [self.a, again]})

    def test_shards_of_a_checkpoint_are_whole_tensors_together_and_pieces_alone(self):
        shards = sorted_files("dcp/row_wise/shards")
        loader = ours.SafeTensorsFileLoader(None)
        loader.add_filenames({0: shards[:1]})
        piece = loader.get_shape("f32")
        loader.add_filenames({0: shards})
        self.assertEqual(loader.get_shape("f32"), [4 * piece[0], *piece[1:]])

    def test_programs_that_import_the_packages_by_name_get_ours(self):
        page = (ROOT / "docs/guides/other-loaders.md").read_text()
        (stand_in,) = [block for block in re.findall(r"(?ms)^```python\n(.*?)^```", page) if "sys.modules" in block]
        python(
            stand_in
            + "from fastsafetensors.parallel_loader import ParallelLoader\n"
            + "from fastsafetensors import SingleGroup, st_types\n"
            + "import fastsafetensors.loader, instanttensor\n"
            + "assert ParallelLoader.__module__.startswith('tensorfs.') and SingleGroup().size() == 1\n"
            + "assert fastsafetensors.loader.fastsafe_open.__module__.startswith('tensorfs.')\n"
            + "assert instanttensor.safe_open.__module__.startswith('tensorfs.') and instanttensor.Backend.URING\n"
        )

    def test_devices_are_words_with_numbers(self):
        self.assertEqual(Device.from_str("cuda:3"), Device(DeviceType.CUDA, 3))
        self.assertEqual(Device.from_str("CPU").as_str(), "cpu")
        for word in ("mps", "cuda:", "cuda:x", ""):
            with self.subTest(word), self.assertRaises(ValueError):
                Device.from_str(word)

    def test_experts_are_spread_over_ranks(self):
        ranges = [ours.owned_expert_range(10, 4, rank) for rank in range(4)]
        self.assertEqual(ranges, [(0, 3), (3, 6), (6, 8), (8, 10)])
        keep = ours.expert_parallel_filter(10, 4, 1)
        self.assertTrue(keep("model.experts.4.w") and keep("model.norm"))
        self.assertFalse(keep("model.experts.6.w"))
        for size, rank in ((0, 0), (2, 2), (2, -1)):
            with self.assertRaises(ValueError):
                ours.owned_expert_range(8, size, rank)

    def test_the_environment_can_ask_for_experts(self):
        self.assertIsNone(ours.expert_parallel_filter_from_env())
        asked = {"FASTSAFETENSORS_EP_SLICE": "1", "FASTSAFETENSORS_EP_NUM_EXPERTS": "4"}
        with environment(**asked, WORLD_SIZE="2", RANK="1"):
            keep = ours.expert_parallel_filter_from_env()
            self.assertEqual([keep(f"a.experts.{number}.w") for number in range(4)], [False, False, True, True])
        with environment(**asked, FASTSAFETENSORS_EP_SIZE="1"):
            self.assertIsNone(ours.expert_parallel_filter_from_env())

    def test_the_configuration_is_a_file_of_json(self):
        file = self.tmp / "config.json"
        file.write_text(json.dumps({
            "queue_size": 3, "parallel": {"use_pipeline": True, "none": 1}, "base": {"copier_type": "gds", "debug_log": True}
        }))
        with environment(FASTSAFETENSORS_CONFIG=str(file)):
            config = ours.load_config()
        self.assertEqual((config.queue_size, config.use_pipeline), (3, True))
        self.assertEqual(config.get_extension_config("base"), {"copier_type": "gds"})
        with environment(FASTSAFETENSORS_CONFIG=str(file) + "x"), self.assertRaises(FileNotFoundError):
            ours.load_config()
        with self.assertRaises(ValueError):
            ours.LoaderConfig(max_concurrent_producers=2)

    def test_a_loader_of_another_kind_is_refused(self):
        file = self.tmp / "config.json"
        file.write_text('{"loader": "3fs"}')
        with environment(FASTSAFETENSORS_CONFIG=str(file)), self.assertRaisesRegex(ValueError, "loader='3fs'"):
            ours.AutoLoader(None, [self.x])


@needs_torch
class TestWithTorch(WithFiles):
    def test_shards_of_a_checkpoint_come_whole_one_after_the_other(self):
        shards = sorted_files("dcp/row_wise/shards")
        expected = tensorfs.load_file(shards)
        loader = ours.ParallelLoader(None, shards[::-1], use_tqdm_on_load=False)
        found = dict(loader.iterate_weights())
        loader.close()
        self.assertEqual(plain(found), plain(expected))

    def test_a_closed_iterator_leaves_no_thread(self):
        loader = ours.ParallelLoader(None, self.files, max_batch_bytes=96, use_tqdm_on_load=False)
        weights = loader.iterate_weights()
        next(weights)
        names = [thread.name for thread in threading.enumerate()]
        self.assertIn("tensorfs-prefetch", names)
        weights.close()
        self.assertNotIn("tensorfs-prefetch", [thread.name for thread in threading.enumerate()])

    def test_weights_can_be_taken_again(self):
        loader = ours.ParallelLoader(None, self.files, use_tqdm_on_load=False)
        self.assertEqual([name for name, _ in loader.iterate_weights()], [name for name, _ in loader.iterate_weights()])

    def test_a_budget_that_fits_less_ahead_loads_less_ahead(self):
        for budget in (3 * 96, 10_000):
            loader = ours.ParallelLoader(
                None, [self.x], use_tqdm_on_load=False, device_memory_budget=budget, queue_size=4,
                resident_tensor=lambda name: name == "w",
            )
            self.assertEqual([name for name, _ in loader.iterate_weights()], ["w", "b", "none", "one", "i"])

    def test_a_second_copy_with_a_dtype_reads_the_bytes_of_the_file(self):
        loader = ours.SafeTensorsFileLoader(None)
        loader.add_filenames({0: [self.x]})
        first = loader.copy_files_to_device(DType.F16).get_tensor("w")
        self.assertTrue(first.equal(loader.copy_files_to_device(DType.F16).get_tensor("w")))


@needs_genuine
class TestTheSameCalls(WithFiles):
    """Results are compared with those of the genuine package on the CPU."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        import fastsafetensors

        cls.genuine = Peer(fastsafetensors, "fastsafetensors")
        cls.ours = Peer(ours, "tensorfs.compat.fastsafetensors")

    def same(self, label, call):
        compare(self, label, call, self.genuine, self.ours)

    def different(self, label, call, expected):
        differs(self, label, call, self.genuine, self.ours, expected)

    def all_of(self, files):
        def call(peer):
            loader = peer.loader(files)
            buffer = loader.copy_files_to_device()
            keys = list(buffer.key_to_rank_lidx)
            return (
                loader.get_keys(), keys, [buffer.get_shape(key) for key in keys], [buffer.get_filename(key) for key in keys],
                buffer.key_to_rank_lidx, loader.frames, {path: (header.metadata or "", rank) for path, (header, rank) in loader.meta.items()},
                [buffer.get_tensor(key) for key in keys], buffer.as_dict({key: -1 for key in keys}),
            )

        return call

    def test_every_dtype_has_the_same_bits(self):
        for pad in (True, False):
            path = write(
                self.tmp / f"dtypes{pad}.safetensors",
                [(f"{dtype}.{len(shape)}", dtype, shape) for dtype in WIDTHS for shape in ((6, 4), (2, 3, 2), (4,))]
                + [("s", "F32", ()), ("none", "BF16", (0, 2))],
                {"a": "b"}, pad,
            )
            self.same(f"padded: {pad}", self.all_of([path]))

    def test_good_files_have_the_same_names_shapes_and_bits(self):
        # The genuine package lacks C64, and refuses an empty tensor at the offset of another tensor.
        reads = ("all_dtypes", "odd_unsorted")
        for path in sorted_files("safetensors"):
            check = self.different if any(word in path for word in reads) else self.same
            arguments = ("reads",) if check == self.different else ()
            check(os.path.basename(path), self.all_of([path]), *arguments)

    def test_bad_files_are_refused_by_both(self):
        # Only our package refuses files that can be read in two ways, and files with trailing bytes.
        refused = ("data_trailing", "dup_", "lone_surrogate", "metadata_int", "metadata_list", "metadata_nested")
        for path in sorted_files("bad/safetensors"):
            name = os.path.basename(path)
            if name.startswith(refused):
                self.different(name, self.all_of([path]), tensorfs.SafetensorError)
            elif name.startswith("entry_as_array"):
                self.different(name, self.all_of([path]), "reads")
            else:
                self.same_refusal(name, self.all_of([path]))

    def same_refusal(self, label, call):
        """Both packages refuse, where the genuine one may raise any exception, or both read the same."""
        with self.subTest(label):
            (value, raised), (found, ours_raised) = outcome(call, self.genuine), outcome(call, self.ours)
            self.assertEqual(raised is None, ours_raised is None, f"{raised!r} and {ours_raised!r}")
            self.assertEqual(found, value)

    def test_numbered_files_are_read_alike_in_any_order(self):
        for folder in ("hf/three_shards", "hf/no_index", "dcp/whole_files"):
            files = sorted_files(folder)
            for order, given in (("sorted", files), ("reversed", files[::-1]), ("some", files[1:])):
                self.same(f"{folder}, {order}", self.all_of(given))
                self.same(f"{folder}, {order}, one after the other", lambda peer, given=given: peer.weights(given))

    def test_each_shard_of_a_checkpoint_alone_is_read_as_it_lies_there(self):
        for path in sorted_files("dcp/row_wise/shards") + sorted_files("dcp/grid_2d/shards"):
            self.same(path, self.all_of([path]))

    def test_shards_together_are_whole_where_the_package_refuses_them(self):
        self.different("row_wise", self.all_of(sorted_files("dcp/row_wise/shards")), "reads")

    def test_calls_on_a_buffer(self):
        dtype = lambda peer, name: peer.types.DType[name]  # noqa: E731
        calls = {
            "get_tensor": lambda b, p: b.get_tensor("w"),
            "get_tensor, dtype": lambda b, p: b.get_tensor("w", dtype=dtype(p, "F64")),
            "get_tensor, device": lambda b, p: b.get_tensor("w", device=p.types.Device.from_str("cpu")),
            "get_tensor, unknown": lambda b, p: b.get_tensor("no"),
            "the same memory": lambda b, p: b.get_tensor("w").add_(1) is b.get_tensor("w"),
            "get_tensor_wrapped": lambda b, p: b.get_tensor_wrapped("b"),
            "wrapped to": lambda b, p: b.get_tensor_wrapped("b").to(dtype=dtype(p, "F32")),
            "wrapped index": lambda b, p: b.get_tensor_wrapped("w")[1:3],
            "wrapped view": lambda b, p: b.get_tensor_wrapped("w").view(dtype(p, "U8")),
            "wrapped reshape": lambda b, p: b.get_tensor_wrapped("w").reshape([24]),
            "wrapped clone": lambda b, p: b.get_tensor_wrapped("w").clone().detach().contiguous().get_nbytes(),
            "push_tensor": lambda b, p: [b.push_tensor("w", rank) for rank in (0, 3)],
            "push_tensor, unknown": lambda b, p: b.push_tensor("no", 0),
            "get_filename, unknown": lambda b, p: b.get_filename("no"),
            "get_shape": lambda b, p: [b.get_shape(name) for name in ("w", "none", "one")],
            "get_shape, unknown": lambda b, p: b.get_shape("no"),
            "iter_local_tensors": lambda b, p: b.iter_local_tensors(["one", "w"]),
            "as_dict": lambda b, p: b.as_dict({"w": 0, "v": 1, "one": -1}),
            "as_dict, unknown": lambda b, p: b.as_dict({"no": 0}),
            "close twice": lambda b, p: [b.close(), b.close()],
        }
        for dim in (-1, 0, 1, 7):
            calls[f"get_sharded {dim}"] = lambda b, p, dim=dim: [b.get_sharded(name, dim) for name in ("w", "none", "one")]
            calls[f"get_sharded_wrapped {dim}"] = lambda b, p, dim=dim: b.get_sharded_wrapped("w", dim)
        for names in (["w", "v"], ["v", "w"], ["w"], ["w", "i"], ["w", "b"], ["i", "w", "i"], [], ["no"], ["one"]):
            for dim in (0, 1, -1, 2):
                calls[f"get_multi_cols {names} {dim}"] = lambda b, p, names=names, dim=dim: b.get_multi_cols(names, dim)
        for label, call in calls.items():
            self.same(label, lambda peer, call=call: call(peer.buffer(self.files), peer))

    def test_joined_columns_of_small_floats(self):
        for dtype in ("F8_E8M0", "F8_E4M3", "F4"):
            path = write(self.tmp / f"{dtype}.safetensors", [("p", dtype, (4, 4)), ("q", dtype, (4, 4))])
            for dim in (0, 1):
                self.same(f"{dtype} {dim}", lambda peer, path=path, dim=dim: peer.buffer([path]).get_multi_cols(["p", "q"], dim))

    def test_a_closed_buffer_keeps_the_tensors_that_were_taken(self):
        def call(peer):
            buffer = peer.buffer(self.files)
            taken = buffer.get_tensor("w")
            buffer.close()
            return taken, list(buffer.key_to_rank_lidx)

        self.same("taken", call)
        self.different("asked", lambda peer: [b := peer.buffer(self.files), b.close(), b.get_tensor("w")][2:], tensorfs.SafetensorError)

    def test_a_dtype_casts_what_is_loaded(self):
        for name in ("F16", "BF16", "F32", "F64", "I8", "U8", "AUTO"):
            self.same(name, lambda peer, name=name: list(peer.buffer([self.a], dtype=peer.types.DType[name]).as_dict({"v": 0}).items()))

            def filtered(peer, name=name):
                buffer = peer.buffer([self.x], lambda key: key in ("w", "i"), dtype=peer.types.DType[name])
                return [buffer.get_tensor(key) for key in ("w", "i")]

            if name == "F32":
                # The genuine package also checks tensors that the filter leaves out.
                self.different("F32 of two", filtered, "reads")
            else:
                self.same(f"{name} of two", filtered)

    def test_filters(self):
        def call(peer):
            loader = peer.loader(self.files, lambda name: name in ("w", "u"))
            buffer = loader.copy_files_to_device()
            return loader.get_keys(), buffer.key_to_rank_lidx, buffer.get_tensor("w"), list(loader.frames)

        self.same("kept", call)
        for left_out in (lambda p: p.loader([self.x], lambda n: n != "w").get_shape("w"),
                         lambda p: p.buffer([self.x], lambda n: n != "w").get_tensor("w"),
                         lambda p: p.buffer([self.x], lambda n: n != "w").get_shape("w"),
                         lambda p: p.buffer([self.x], lambda n: False).key_to_rank_lidx,
                         lambda p: p.loader([self.x]).get_shape("no")):
            self.same("left out", left_out)

    def test_arguments_of_loaders(self):
        make = lambda p, *a, **k: p.module.SafeTensorsFileLoader(*a, nogds=True, **k).pg.size()  # noqa: E731
        calls = {
            "pg=None": lambda p: make(p, None),
            "another device": lambda p: make(p, None, "mps"),
            "no device": lambda p: make(p, None, "nix"),
            "device of torch": lambda p: make(p, None, __import__("torch").device("cpu")),
            "unknown argument": lambda p: make(p, None, future=1),
            "framework pt": lambda p: make(p, None, framework="pt"),
            "framework np": lambda p: make(p, None, framework="np"),
            "pg of text": lambda p: make(p, "x"),
            "no pg": lambda p: make(p),
            "a GPU": lambda p: make(p, None, "cuda:0"),
            "missing file": lambda p: p.loader([self.x + "x"]),
            "files of no rank": lambda p: p.loader({}).get_keys(),
            "no files": lambda p: p.buffer([]).key_to_rank_lidx,
            "list in place of a mapping": lambda p: p.module.SafeTensorsFileLoader(None, nogds=True).add_filenames([self.x]),
            "the same file twice": lambda p: p.buffer([self.x, self.x]).get_tensor("w"),
            "added later": lambda p: [x := p.loader([self.x]), x.add_filenames({0: [self.a]}), x.get_keys()][2:],
            "reset": lambda p: [x := p.loader([self.x]), x.reset(), x.get_keys()][2:],
            "closed": lambda p: [x := p.loader([self.x]), x.close(), x.close(), x.get_keys()][3:],
            "borrowed": lambda p: p.buffer([self.x], borrowed_tensors=True).get_tensor("w").clone(),
        }
        import torch

        if torch.cuda.is_available():
            del calls["a GPU"]
        # The genuine package raises an AttributeError from its own code here.
        self.different("list in place of a mapping", calls.pop("list in place of a mapping"), TypeError)
        for label, call in calls.items():
            self.same(label, call)

    def test_fastsafe_open(self):
        def opened(peer, *arguments, **more):
            with peer.module.fastsafe_open(*arguments, nogds=True, **more) as f:
                return f.metadata(), f.keys(), [f.get_tensor(key) for key in f.keys()], f.get_tensor_wrapped(f.keys()[0])

        calls = {
            "a path": lambda p: opened(p, self.x),
            "a list": lambda p: opened(p, self.files, framework="pytorch", pg=p.group(), device="cpu"),
            "a mapping": lambda p: opened(p, {0: self.files}),
            "a missing file": lambda p: opened(p, self.x + "x"),
            "another framework": lambda p: opened(p, self.x, "np"),
            "an unknown tensor": lambda p: p.module.fastsafe_open(self.x, nogds=True).get_tensor("no"),
        }
        for label, call in calls.items():
            self.same(label, call)
        self.different("a path of pathlib", lambda p: opened(p, self.tmp / "x.safetensors"), "reads")

    def test_weights_one_after_the_other(self):
        keep = lambda name: "w" in name or name == "u"  # noqa: E731
        calls = {
            "queue_size=-1": {"queue_size": -1},
            "queue_size=2": {"queue_size": 2},
            "filter": {"tensor_filter": keep},
            "filter of none": {"tensor_filter": lambda name: False},
            "all_local": {"all_local": True},
            "max_batch_bytes": {"max_batch_bytes": 100},
            "max_batch_bytes too small": {"max_batch_bytes": 50},
            "max_batch_bytes with a filter": {"max_batch_bytes": 50, "tensor_filter": lambda name: name in ("b", "u")},
            "budget": {"device_memory_budget": 1 << 30},
            "budget, nothing stays": {"device_memory_budget": 1 << 20, "accumulate_resident": False},
            "budget, some stay": {"device_memory_budget": 1 << 20, "resident_tensor": keep},
            "allocation size": {"use_chunk_budget_as_allocation_size": True},
            "allocation size of batches": {"use_chunk_budget_as_allocation_size": True, "max_batch_bytes": 100},
            "resident": {"resident_tensor": keep, "accumulate_resident": False},
            "borrowed": {"borrowed_tensors": True, "accumulate_resident": False},
            "borrowed that stay": {"borrowed_tensors": True},
            "runs": {"broadcast_run_bytes": -1},
            "producers": {"max_concurrent_producers": 2},
            "no overlap": {"overlap_io": False},
            "unknown": {"future": 1},
            "framework": {"framework": "np"},
        }
        for label, arguments in calls.items():
            self.same(label, lambda peer, arguments=arguments: peer.weights(self.files, **arguments))
        self.different("budget", lambda peer: peer.weights(self.files, device_memory_budget=100), ours.BudgetInfeasibleError)
        self.same("missing", lambda peer: peer.weights([self.x, self.x + "x"]))
        self.same("no files", lambda peer: peer.weights([]))
        self.different("a name twice", lambda peer: peer.weights([self.x, write(self.tmp / "y.safetensors", SMALL)]), tensorfs.SafetensorError)

    def test_a_budget_that_the_package_takes_is_enough(self):
        files = [self.a, self.x]
        for budget in range(90, 600, 7):
            for more in ({}, {"accumulate_resident": False}):
                call = lambda peer: peer.weights(files, device_memory_budget=budget, **more)  # noqa: B023, E731
                value, raised = outcome(call, self.genuine)
                if raised is None:
                    with self.subTest(budget=budget, **more):
                        self.assertEqual(outcome(call, self.ours), (value, None))

    def test_a_pipeline_with_a_loader_of_the_caller(self):
        def call(peer):
            loader = peer.module.SafeTensorsFileLoader(None, "cpu", nogds=True)
            loader.set_tensor_filter(lambda name: name != "w")
            pipeline = peer.pipeline(None, loader, self.files, use_tqdm_on_load=False)
            weights = [(name, tensor.clone()) for name, tensor in pipeline.iterate_weights()]
            pipeline.close()
            return weights

        self.same("pipeline", call)

    def test_the_configured_loader(self):
        configs = [
            {}, {"queue_size": 3, "use_pipeline": True, "use_tqdm_on_load": False}, {"parallel": {"max_batch_bytes": 100}},
            {"loader": "none"}, {"max_concurrent_producers": 3}, {"framework": "np"}, {"unknown": 1, "base": {"copier_type": "nogds"}},
        ]
        for number, config in enumerate(configs):
            file = self.tmp / f"{number}.json"
            file.write_text(json.dumps({"base": {"copier_type": "nogds"}, **config}))

            def call(peer, file=file):
                with environment(FASTSAFETENSORS_CONFIG=str(file)):
                    loader = peer.module.AutoLoader(None, self.files)
                weights = [(name, tensor.clone()) for name, tensor in loader.iterate_weights()]
                loader.close()
                return weights, loader.config.queue_size, loader.config.create_parallel_kwargs()

            self.same(str(config), call)

    def test_devices_and_experts(self):
        for word in ("cpu", "CPU", "cuda:1", "gpu", "mps", "cuda:x", "cuda:"):
            self.same(word, lambda peer, word=word: peer.types.Device.from_str(word).as_str())
        for numbers in ((8, 2, 0), (7, 3, 2), (7, 3, 3), (7, 0, 0), (2, 4, 3), (2, 4, -1)):
            self.same(str(numbers), lambda peer, numbers=numbers: peer.module.owned_expert_range(*numbers))
        sizes = lambda peer: {dtype.name: size for dtype, size in peer.types.DTYPE_SIZES.items() if dtype.name in WIDTHS}  # noqa: E731
        self.same("sizes", sizes)


if __name__ == "__main__":
    unittest.main()
