"""The released SGLang, without its kernels, on the CPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch

import families
from package import TestCase
from recorded import Recorded

if importlib.util.find_spec("sglang") is None:
    raise unittest.SkipTest("SGLang is not installed")

from sglang.srt.arg_groups import choices
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

# As SGLang does at the beginning of each of its processes.
load_plugins()

from sglang.srt.configs.load_config import LoadConfig, LoadFormat  # noqa: E402
from sglang.srt.layers import linear  # noqa: E402
from sglang.srt.model_loader import get_model_loader, loader, weight_utils  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

from tensorfs.engines.sglang import register  # noqa: E402

HERE = Path(__file__).parent
LAZY = {"lazy": True}


def made(load_format="tensorfs", extra=None, **how):
    return get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}, **how))


def source(folder, **how):
    return loader.DefaultModelLoader.Source(str(folder), None, **how)


def genuine(folder):
    """The weights as SGLang's own reader iterates over them."""
    files = [str(file) for file in sorted(folder.glob("model*.safetensors"))]
    return list(weight_utils.safetensors_weights_iterator(files))


class Registration(TestCase):
    def test_the_command_line_has_the_format_as_a_choice(self):
        self.assertEqual(choices.LOAD_FORMAT_CHOICES.count("tensorfs"), 1)

    def test_a_second_registration_changes_nothing(self):
        hooks = {target: len(several) for target, several in HookRegistry._hooks.items()}
        register()
        self.assertEqual({target: len(several) for target, several in HookRegistry._hooks.items()}, hooks)
        self.assertEqual(choices.LOAD_FORMAT_CHOICES.count("tensorfs"), 1)

    def test_the_format_gives_our_loader_and_others_give_their_own(self):
        ours = made()
        self.assertIsInstance(ours, loader.DefaultModelLoader)
        self.assertEqual(type(ours).__name__, "TensorfsDefaultModelLoader")
        self.assertIs(type(made("safetensors")), loader.DefaultModelLoader)
        self.assertEqual(LoadConfig(load_format="TensorFS").load_format, "tensorfs")
        # Also through the name that other modules have imported before.
        self.assertEqual(type(loader.get_model_loader(LoadConfig(load_format="tensorfs"))), type(ours))
        with self.assertRaises(ValueError):
            LoadConfig(load_format="nonsense")

    def test_the_loader_for_a_quantization_is_kept(self):
        model = mock.Mock(quantization="modelopt_fp8", modelopt_quant=None, model_path="x")
        model._is_already_quantized.return_value = True
        found = get_model_loader(LoadConfig(load_format="tensorfs"), model)
        self.assertIsInstance(found, loader.ModelOptModelLoader)
        self.assertEqual(found.load_config.load_format, LoadFormat.SAFETENSORS)

    def test_mistakes_in_the_options_are_refused_with_the_configuration(self):
        for extra, message in (
            ({"pth": "x"}, "there is no option 'pth'"),
            ({"chunk": 7}, "chunk=7: expected a size"),
            ('{"lazy": 1}', "lazy: expected true or false, not 1"),
        ):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, f"^load format tensorfs, model_loader_extra_config: {message}"):
                LoadConfig(load_format="tensorfs", model_loader_extra_config=extra)


class Iterators(TestCase):
    def setUp(self):
        super().setUp()
        # SGLang asks these of its server, which no test has.
        self.enter(mock.patch.object(loader, "get_server_args", lambda: None))

    def iterate(self, of, folder, **how):
        return of._get_weights_iterator(source(folder, **how))

    def test_every_family_comes_as_sglang_iterates_over_it(self):
        for family in families.FAMILIES:
            folder = self.tmp / family
            tensors = families.write(folder, family)
            right = genuine(folder)
            self.assertEqual({name for name, _ in right}, tensors.keys())
            for extra in (None, {"process_group": False, "engine": "threads"}, LAZY):
                with self.subTest(family, extra=extra):
                    self.assertEqual(families.differences(self.iterate(made(extra=extra), folder), right), [])

    def test_a_prefix_and_patterns_are_kept(self):
        folder = self.tmp / "llama"
        families.write(folder, "llama")
        found = self.iterate(made(), folder, prefix="x.")
        self.assertEqual(families.differences(found, [("x." + name, value) for name, value in genuine(folder)]), [])
        first = "model-00001-of-00003.safetensors"
        found = dict(self.iterate(made(), folder, allow_patterns_overrides=[first]))
        right = dict(weight_utils.safetensors_weights_iterator([str(folder / first)]))
        self.assertEqual(families.differences(found.items(), right.items()), [])

    def test_a_draft_gets_its_own_layer(self):
        from safetensors.torch import save_file

        folder = self.tmp / "mtp"
        folder.mkdir()
        tensors = {f"model.mtp.layers.{layer}.weight": families.of(layer, 4, 3) for layer in range(3)}
        save_file({**tensors, "model.norm.weight": families.of(9, 3)}, folder / "model.safetensors")
        found = dict(self.iterate(made(draft_model_idx=1), folder))
        self.assertEqual(found.keys(), {"model.mtp.layers.0.weight", "model.norm.weight"})
        self.assertTrue(families.same(found["model.mtp.layers.0.weight"], tensors["model.mtp.layers.1.weight"]))

    def test_a_path_stands_for_the_checkpoint_of_the_model_only(self):
        model, other = self.tmp / "model", self.tmp / "other"
        families.write(model, "gemma")
        right = list(families.write(other, "llama").items())
        found = made(extra={"path": str(other / "model.safetensors.index.json")})
        found.model_path = str(model)
        self.assertEqual(families.differences(self.iterate(found, model), right), [])
        self.assertEqual(families.differences(self.iterate(found, model, prefix="x."), [("x." + n, t) for n, t in genuine(model)]), [])

    def test_rank_shards_come_as_whole_tensors(self):
        from checkpoints import column_wise
        from tensorfs import load_file

        column_wise(self.tmp / "run7")
        found = self.iterate(made(), self.tmp / "run7")
        self.assertEqual(families.differences(found, load_file(self.tmp / "run7").items()), [])

    def test_the_group_that_sglang_names_is_the_one_that_loads(self):
        folder = self.tmp / "llama"
        families.write(folder, "llama")
        words = [str(folder), f"file://{self.tmp}/rendezvous"]
        path = os.pathsep.join(place for place in sys.path if place)
        started = [
            subprocess.Popen(
                [sys.executable, str(HERE / "sglang_rank.py"), str(rank), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
            for rank in range(3)
        ]
        for rank, one in enumerate(started):
            out, err = one.communicate(timeout=300)
            self.assertEqual(one.returncode, 0, err[-3000:])
            self.assertEqual(json.loads(re.findall(r"(?m)^ANSWER (.*)$", out)[-1]), {"world": 3, "pair": 2 if rank < 2 else 1, "none": 1})


class Layers(TestCase):
    """The linear layers of SGLang, which cut the weights that they are given. Its whole models import kernels."""

    def setUp(self):
        super().setUp()
        self.enter(mock.patch.object(loader, "get_server_args", lambda: None))

    def layers(self):
        """The name of each weight -> its layer, and which part of the layer it is."""
        hidden, heads, kv, middle = families.HIDDEN, families.HEADS, families.KV_HEADS, families.MIDDLE
        how = {"bias": False, "params_dtype": torch.bfloat16}
        found = {}
        for number in range(families.LAYERS):
            prefix = f"model.layers.{number}"
            qkv = linear.QKVParallelLinear(hidden, hidden // heads, heads, kv, **how)
            found.update({f"{prefix}.self_attn.{part}_proj.weight": (qkv, (part,)) for part in "qkv"})
            found[f"{prefix}.self_attn.o_proj.weight"] = linear.RowParallelLinear(hidden, hidden, **how), ()
            gate_up = linear.MergedColumnParallelLinear(hidden, [middle] * 2, **how)
            found.update({f"{prefix}.mlp.{part}_proj.weight": (gate_up, (at,)) for at, part in enumerate(("gate", "up"))})
            found[f"{prefix}.mlp.down_proj.weight"] = linear.RowParallelLinear(middle, hidden, **how), ()
            # A norm is whole on each rank.
            for word in ("input_layernorm", "post_attention_layernorm"):
                found[f"{prefix}.{word}.weight"] = torch.nn.RMSNorm(hidden, dtype=torch.bfloat16), ()
        found["lm_head.weight"] = linear.ColumnParallelLinear(hidden, families.VOCAB, **how), ()
        return found

    def loaded(self, weights):
        """The parameters of a rank after SGLang's own functions have put the weights there."""
        layers = self.layers()
        for layer, _ in layers.values():
            layer.weight.data.zero_()
        for name, weight in weights:
            if name in layers:
                layer, part = layers[name]
                getattr(layer.weight, "weight_loader", weight_utils.default_weight_loader)(layer.weight, weight, *part)
        return {name: layer.weight.data for name, (layer, _) in layers.items()}

    def test_ranks_get_their_parts_and_with_lazy_they_read_no_others(self):
        folder = self.tmp / "llama"
        tensors = families.write(folder, "llama")
        for size in (1, 2):
            for rank in range(size):
                with self.subTest(size=size, rank=rank), get_parallel().override(tp_size=size, tp_rank=rank):
                    right = self.loaded(genuine(folder))
                    own = sum({weight.data_ptr(): weight.nbytes for weight in right.values()}.values())
                    self.assertLess(own, 1.1 / size * sum(made.nbytes for made in tensors.values()))
                    for extra in ({}, {**LAZY, "source": "direct"}):
                        with Recorded() as recorded:
                            found = self.loaded(made(extra=extra)._get_weights_iterator(source(folder)))
                        self.assertEqual(families.differences(found.items(), right.items()), [])
                        answer = recorded.answer()
                        if extra:
                            self.assertEqual((answer["lazy"], answer["read"]), (len(tensors), own))
