"""Tests of the load format for inference engines that need no engine. `tests/engines` has the other tests."""

import logging
import operator
import random
import sys
from importlib.metadata import entry_points
from unittest import mock

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from package import TestCase, needs_torch, python
from tensorfs.engines import sglang, vllm
from tensorfs.engines._options import WORDS, options_of, options_of_weight_loader

GROUPS = {"vllm.general_plugins": vllm, "sglang.srt.plugins": sglang}

REFUSED = {
    "there is no option 'pth'; expected one of path, process_group, lazy, ": {"pth": "x"},
    "expected a JSON object, not str": "path=x",
    "path: expected text, not 5": {"path": 5},
    "path: expected a folder, a file or a URL, not nothing": {"path": ""},
    "lazy: expected true or false, not 1": {"lazy": 1},
    "io_depth: expected a number, not True": {"io_depth": True},
    "io_depth=0: expected a number from 1 to 4096": {"io_depth": 0},
    "chunk=7: expected a size from 4096 to 1073741824 bytes, like 16M": {"chunk": 7},
    "engine=gpu: expected auto, uring, threads or cufile": {"engine": "gpu"},
    "share: expected host or network, not 'nfs'": {"share": "nfs"},
    "include: expected text or a list, not 3": {"include": 3},
    "keep needs dtype": {"keep": "*.norm"},
    "unproven_tail=no: expected warn or error": {"unproven_tail": "no"},
    "lazy and process_group exclude each other": {"lazy": True, "process_group": True},
    "share is about a process group": {"lazy": True, "share": "host"},
}

# Runs in an interpreter that has none of the engines, and no torch.
WITHOUT = """
import importlib.abc, logging, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "sglang", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
from tensorfs.engines import sglang, vllm
before = set(sys.modules)
for module in (vllm, sglang):
    module.register()
    module.register()
print(*sorted(set(sys.modules) - before))
"""


class EntryPoints(TestCase):
    def test_the_engines_find_the_load_format(self):
        for group, module in GROUPS.items():
            with self.subTest(group):
                found = [one for one in entry_points(group=group) if one.name == "tensorfs"]
                self.assertEqual({one.load() for one in found}, {module.register})

    def test_without_the_engines_nothing_is_raised_or_imported(self):
        *said, imported = python(WITHOUT).splitlines()
        self.assertEqual(imported, "")
        for engine in ("vllm", "sglang"):
            ours = [line for line in said if line.startswith(f"{engine}.tensorfs WARNING load format tensorfs is not available: ")]
            self.assertEqual((len(ours), [line for line in ours if "No module named" not in line]), (2, []))
        self.assertEqual(len(said), 4)

    def test_an_engine_that_fails_in_any_way_is_not_disturbed(self):
        class Broken:
            def __getattr__(self, name):
                raise RuntimeError("this engine is odd")

        for module, names in (
            (vllm, ("vllm", "vllm.model_executor")),
            (sglang, ("sglang", "sglang.srt", "sglang.srt.arg_groups")),
        ):
            with self.subTest(module.__name__), mock.patch.dict(sys.modules, {name: Broken() for name in names}):
                with self.assertLogs(level=logging.WARNING) as caught:
                    module.register()
                self.assertEqual(len(caught.output), 1)

    def test_only_its_own_name_is_the_load_format(self):
        self.assertEqual([word for word in ("tensorfs", "TensorFS", "auto", None, dict) if sglang.is_ours(word)], ["tensorfs", "TensorFS"])


class OptionsOfTheEngine(TestCase):
    def test_options_are_sorted_by_what_they_are_for(self):
        given = {"path": "s3://b/k", "chunk": "8M", "include": "model.*", "share": "network", "enable_weights_track": False}
        options, of_engine = options_of(given, ("enable_weights_track",))
        self.assertEqual(of_engine, {"enable_weights_track": False})
        self.assertEqual((options.path, options.process_group, options.lazy), ("s3://b/k", True, False))
        self.assertEqual(options.arguments(False), {"chunk": "8M", "share": "network"})
        self.assertEqual(options.arguments(True), {"chunk": "8M", "share": "network", "include": "model.*"})
        for nothing in (None, {}):
            self.assertEqual(options_of(nothing)[0], (None, True, False, {}, {}))
        self.assertFalse(options_of({"lazy": True})[0].process_group)

    def test_every_mistake_is_one_line_that_names_it(self):
        for message, given in REFUSED.items():
            with self.subTest(given), self.assertRaises(ValueError) as caught:
                options_of(given)
            self.assertTrue(str(caught.exception).startswith(f"load format tensorfs, model_loader_extra_config: {message}"), caught.exception)
            self.assertNotIn("\n", str(caught.exception))

    def test_a_weight_loader_has_those_that_are_not_about_groups(self):
        options = options_of_weight_loader({"path": "s3://b/k", "chunk": "8M", "include": "model.*"})
        self.assertEqual(options, ("s3://b/k", False, True, {"chunk": "8M"}, {"include": "model.*"}))
        self.assertFalse(options_of_weight_loader({"lazy": False}).lazy)
        for given, message in (
            ({"share": "host"}, "there is no option 'share'; expected one of path, lazy, chunk, "),
            ({"process_group": True}, "there is no option 'process_group'"),
            ({"path": ""}, "path: expected a folder, a file or a URL, not nothing"),
        ):
            with self.subTest(given), self.assertRaises(ValueError) as caught:
                options_of_weight_loader(given)
            self.assertTrue(str(caught.exception).startswith(f"TensorfsWeightLoader: {message}"), caught.exception)

    def test_the_page_has_every_option(self):
        from package import ROOT

        page = (ROOT / "docs/guides/engines.md").read_text()
        self.assertEqual([word for word in WORDS if f"`{word}`" not in page], [])


@needs_torch
class Weights(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(4)
        self.tensors = {
            "layers.0.weight": rng.standard_normal((512, 700)).astype(np.float32),
            "layers.0.experts": rng.integers(-9, 9, (4, 300, 256)).astype(np.int32),
            "norm": rng.standard_normal(64).astype(np.float16),
            "scalar": np.array(2.5),
        }
        self.file = self.tmp / "model.safetensors"
        save_file(self.tensors, self.file, metadata={"format": "pt"})

    def iterate(self, given=None, **how):
        from tensorfs.engines._weights import weights

        return dict(weights(str(self.file), "cpu", options_of(given)[0], **how))

    def lazily_of(self, file):
        from tensorfs.engines import _weights

        with mock.patch.object(_weights, "_LAZY_MIN", 1):
            return dict(_weights.weights(str(file), "cpu", options_of({"lazy": True})[0]))

    def lazily(self):
        return self.iterate({"lazy": True})

    def test_tensors_are_those_of_the_checkpoint(self):
        for given in (None, {"lazy": True}, {"io_depth": 2, "chunk": "64K"}):
            with self.subTest(given):
                found = self.iterate(given)
                self.assertEqual(found.keys(), self.tensors.keys())
                for name, right in self.tensors.items():
                    self.assertEqual(tuple(found[name].shape), right.shape)
                    np.testing.assert_array_equal(found[name].numpy(), right)

    def test_tensors_by_name_are_lazy_or_views_of_mapped_files(self):
        import torch

        from tensorfs.engines._weights import weights_by_name

        lazily, mapped = (weights_by_name(self.file, options_of_weight_loader({"lazy": lazy})) for lazy in (True, False))
        self.assertEqual({type(found).__name__ for name, found in lazily.items() if "layers" in name}, {"LazyTensor"})
        self.assertEqual({type(found) for found in mapped.values()}, {torch.Tensor})
        self.assertEqual(len({found.untyped_storage().data_ptr() for found in mapped.values()}), 1)
        for name, right in self.tensors.items():
            for found in (lazily[name], mapped[name]):
                np.testing.assert_array_equal(found.numpy(), right)
        mapped["norm"].zero_()
        np.testing.assert_array_equal(self.iterate()["norm"].numpy(), self.tensors["norm"])

    def test_unwanted_tensors_are_left_out(self):
        for given in (None, {"lazy": True}):
            found = self.iterate(given, wanted=lambda name: "experts" not in name)
            self.assertEqual(found.keys(), self.tensors.keys() - {"layers.0.experts"})

    def test_options_for_the_model_hold_for_no_other_checkpoint(self):
        given = {"include": "layers.*"}
        self.assertEqual(len(self.iterate(given)), 2)
        self.assertEqual(len(self.iterate(given, is_model=False)), 4)

    def test_lazy_tensors_read_the_parts_that_are_used(self):
        import torch

        parts = [
            lambda x: x.narrow(0, 100, 50),
            lambda x: x.narrow(1, 200, 50).contiguous(),
            lambda x: x.chunk(4, 1)[3],
            lambda x: x.split([100, 412])[1].narrow(1, 5, 6),
            lambda x: x.t()[7:9],
            lambda x: x[-3, 5:],
            lambda x: x.view(700, 512)[3],
            lambda x: x.transpose(0, 1).unbind(0)[2],
            lambda x: x[::3].float(),
            lambda x: x[[1, 5]],
            lambda x: x.view(torch.int32).narrow(0, 1, 2),
            lambda x: torch.cat([x, x])[513],
            lambda x: x.data.unsqueeze(0).expand(2, -1, -1)[1, 2:4],
            lambda x: x.unsqueeze(0).unbind()[0].narrow(0, 5, 7),
            lambda x: x.unsqueeze(-1)[3].transpose(0, 1),
            lambda x: x.t().unsqueeze(1).narrow(1, 0, 1)[2:9],
            lambda x: x.unsqueeze(1)[:, 1:],
            lambda x: x.unsqueeze(1).split([0, 1], 1)[1].chunk(2, 2)[1],
            lambda x: x.unsqueeze(2).permute(2, 1, 0)[0, :, 4],
        ]
        whole = torch.from_numpy(self.tensors["layers.0.weight"])
        for number, part in enumerate(parts):
            with self.subTest(number):
                right, lazy = part(whole), part(self.lazily()["layers.0.weight"])
                found = torch.empty_like(right).copy_(lazy)
                self.assertTrue(torch.equal(found, right))
                self.assertEqual(lazy.stride(), right.stride())
                if type(lazy) is not torch.Tensor:
                    self.assertEqual(lazy.storage_offset(), right.storage_offset())
        experts = self.lazily()["layers.0.experts"]
        self.assertEqual(experts[2].narrow(0, 10, 5).tolist(), self.tensors["layers.0.experts"][2, 10:15].tolist())

    def test_chains_of_views_are_those_of_torch_or_refused_as_there(self):
        import torch

        whole = torch.arange(120, dtype=torch.float32).reshape(4, 6, 5)
        file = self.tmp / "chains.safetensors"
        save_file({"x": whole.numpy()}, file)
        rng = random.Random(7)
        number = lambda low=-3, high=6: rng.randint(low, high)
        steps = [
            lambda: operator.methodcaller("narrow", number(-2, 2), number(0, 2), number(0, 3)),
            lambda: operator.methodcaller("select", number(-2, 2), number(-1, 1)),
            lambda: operator.methodcaller("unsqueeze", number(-3, 3)),
            lambda: operator.methodcaller("permute", rng.sample((0, 1, 2), 3)),
            lambda: operator.methodcaller("permute", [number(-1, 3) for _ in range(number(1, 4))]),
            lambda: operator.methodcaller("transpose", number(-3, 2), number(-3, 2)),
            lambda: operator.methodcaller("squeeze"),
            lambda: operator.methodcaller("view", -1, rng.choice((1, 2, 3, 5))),
            lambda: operator.methodcaller("view", rng.choice((torch.int32, torch.uint8, torch.float64))),
            lambda: operator.methodcaller("unfold", number(-1, 1), 2, 1),
            lambda: operator.methodcaller("diagonal"),
            lambda: operator.methodcaller("as_strided", (2, 3), (number(0, 30), 1)),
            lambda: operator.methodcaller("as_strided", (3,), (2,), number(0, 90)),
            lambda: operator.itemgetter((..., slice(number(0, 2), None, number(1, 2)))),
        ]

        def after(tensor, chain):
            for step in chain:
                tensor = step(tensor)
            return tensor

        alike = refused = 0
        for count in range(400):
            chain = [rng.choice(steps)() for _ in range(number(1, 4))]
            try:
                right = after(whole, chain)
            except (RuntimeError, IndexError):
                right = None
            lazy = self.lazily_of(file)["x"]
            with self.subTest(count=count, chain=chain):
                if right is None:
                    refused += 1
                    self.assertRaises((RuntimeError, IndexError), after, lazy, chain)
                    continue
                alike += 1
                found = after(lazy, chain)
                facts = [(x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_contiguous()) for x in (found, right)]
                self.assertEqual(facts[0], facts[1])
                self.assertEqual(*(x.contiguous().numpy().tobytes() for x in (found, right)))
        self.assertGreater(min(alike, refused), 50)

    def test_conjugate_values_are_a_copy(self):
        import torch

        right = torch.from_numpy(np.arange(24, dtype=np.float32).reshape(4, 6).view(np.complex64))
        file = self.tmp / "complex.safetensors"
        save_file({"x": right.numpy()}, file)
        lazy = self.lazily_of(file)["x"].narrow(1, 1, 2)
        for use in (lambda x: x.conj() + 0, lambda x: torch._neg_view(x) + 0, lambda x: x.conj()[1], lambda x: x.mH.clone()):
            self.assertEqual(use(lazy).tolist(), use(right.narrow(1, 1, 2)).tolist())

    def test_the_memory_of_a_part_is_that_of_the_whole_tensor(self):
        import torch

        part = self.lazily()["layers.0.weight"].narrow(1, 200, 50)[3]
        memory, whole = part.untyped_storage(), torch.from_numpy(self.tensors["layers.0.weight"])
        self.assertEqual(memory.nbytes(), whole.nbytes)
        again = torch.empty(0).set_(memory, part.storage_offset(), part.shape, part.stride())
        self.assertTrue(torch.equal(again, whole.narrow(1, 200, 50)[3]))
        with self.assertRaisesRegex(RuntimeError, "shares the memory of a weight"):
            torch.empty(0).set_(part)

    def test_the_rest_of_a_lazy_tensor_is_not_read(self):
        from tensorfs.engines._lazy import lazy_tensor

        with tensorfs.safe_open(self.file, "pt") as opened:
            facts = opened.get_tensor_metadata("layers.0.weight")
            asked = []

            class Recorded:
                def __getitem__(self, index):
                    asked.append(index)
                    return opened.get_slice("layers.0.weight")[index]

            opened_too = mock.Mock(get_slice=lambda name: Recorded())
            made = lazy_tensor(opened_too, "layers.0.weight", facts, "cpu")
            half = made.narrow(1, 350, 350).unsqueeze(0).unbind()[0].narrow(0, 8, 4)
            for wrong in (-4, 3):
                self.assertRaises(IndexError, made.unsqueeze, wrong)
            # The calls above may have read the tensor.
            asked.clear()
            half.clone()
            self.assertEqual(asked, [(slice(8, 12), slice(350, 700))])

    def test_no_tensor_is_read_ahead_of_the_model(self):
        from tensorfs.engines import _weights

        right = {f"layers.{layer}.weight": np.full((64, 64), layer, np.float32) for layer in range(24)}
        right["norm"] = np.arange(9.0)
        save_file(right, self.file)
        safe_open, opened = tensorfs.safe_open, []
        # Reads are direct, because copies from the page cache are not counted.
        options = options_of({"lazy": True, "source": "direct"})[0]
        self.enter(mock.patch.object(_weights, "safe_open", lambda *given, **how: opened.append(safe_open(*given, **how)) or opened[-1]))
        self.enter(mock.patch.object(_weights, "_LAZY_MIN", 1 << 10))
        for seen in (9, 25):
            used = 0
            for name, tensor in list(_weights.weights(str(self.file), "cpu", options))[:seen]:
                np.testing.assert_array_equal(tensor.numpy(), right[name])
                used += tensor.nbytes if name != "norm" else 0
            self.assertEqual((opened[-1].stats["bytes"], opened[-1].stats["bytes_ahead_unused"]), (used + right["norm"].nbytes, 0))

    def test_short_tensors_come_in_groups_in_their_place(self):
        from tensorfs.engines import _weights

        right = {f"{number:02}": np.full(1000 * (number % 3 + 1), number, np.int32) for number in range(20)}
        save_file(right, self.file)
        for longest in (1, 9000, 1 << 30):
            with mock.patch.object(_weights, "_LAZY_MIN", 12000), mock.patch.object(_weights, "_SHORT_MAX", longest):
                found = list(_weights.weights(str(self.file), "cpu", options_of({"lazy": True})[0]))
            self.assertEqual([name for name, _ in found], tensorfs.safe_open(self.file, "np").offset_keys())
            for name, tensor in found:
                self.assertEqual(type(tensor).__name__, "LazyTensor" if right[name].nbytes == 12000 else "Tensor")
                np.testing.assert_array_equal(tensor.numpy(), right[name])

    def test_nothing_writes_to_a_lazy_tensor_or_its_views(self):
        import torch

        made = self.lazily()["layers.0.weight"]
        out = torch.zeros(512, 700)
        for write in (
            lambda: made.add_(1),
            lambda: made.narrow(0, 1, 2).zero_(),
            lambda: made.view(-1).mul_(2),
            lambda: made.__setitem__(0, 1),
            lambda: torch.add(out, 1, out=made),
            lambda: setattr(torch.nn.Parameter(out), "data", made),
        ):
            with self.assertRaises(RuntimeError):
                write()
        made.numpy()[:] = 0
        np.testing.assert_array_equal(made.numpy(), self.tensors["layers.0.weight"])
        parameter = torch.nn.Parameter(out)
        parameter.data.copy_(made)
        np.testing.assert_array_equal(parameter.detach().numpy(), self.tensors["layers.0.weight"])
