"""The released vLLM, without its kernels, on the CPU."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import torch

import families
from package import TestCase

if importlib.util.find_spec("vllm") is None:
    raise unittest.SkipTest("vLLM is not installed")

from vllm.config.load import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.plugins import load_general_plugins

load_general_plugins()

from tensorfs.engines._vllm_loader import TensorfsModelLoader  # noqa: E402
from tensorfs.engines.vllm import register  # noqa: E402

HERE = Path(__file__).parent
LAZY = {"lazy": True}


def loader(load_format="tensorfs", extra=None, **how):
    how = {"use_tqdm_on_load": False, **how}
    return model_loader.get_model_loader(LoadConfig(load_format=load_format, model_loader_extra_config=extra or {}, **how))


def iterate(of, folder, **source):
    return of._get_weights_iterator(DefaultModelLoader.Source(str(folder), None, **source))


class Registration(TestCase):
    def test_the_plugin_registers_once_and_changes_no_other_format(self):
        formats = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
        self.assertIs(formats["tensorfs"], TensorfsModelLoader)
        before = dict(formats)
        with self.assertNoLogs("vllm", "WARNING"):
            register()
        self.assertEqual(formats, before)
        self.assertIs(formats["safetensors"], DefaultModelLoader)

    def test_the_command_line_takes_the_format_and_its_options(self):
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        families.write(self.tmp / "model", "llama")
        given = ["--model", str(self.tmp / "model"), "--load-format", "tensorfs", "--model-loader-extra-config", '{"path": "/x", "lazy": true}']
        args = EngineArgs.from_cli_args(parser.parse_args(given))
        made = model_loader.get_model_loader(args.create_load_config())
        self.assertEqual((made.options.path, made.options.lazy), ("/x", True))

    def test_mistakes_in_the_options_are_refused_before_the_model_is_made(self):
        for extra, message in (
            ({"pth": "x"}, "there is no option 'pth'; expected one of path, .*, enable_weights_track"),
            ({"path": 5}, "path: expected text, not 5"),
            ({"io_depth": 0}, "io_depth=0: expected a number from 1 to 4096"),
            ({"lazy": True, "share": "host"}, "share is about a process group"),
        ):
            with self.subTest(extra), self.assertRaisesRegex(ValueError, f"^load format tensorfs, model_loader_extra_config: {message}"):
                loader(extra=extra)

    def test_the_strategy_of_vllm_is_said_to_have_no_effect(self):
        with self.assertLogs("vllm.tensorfs", "WARNING"):
            loader(safetensors_load_strategy="prefetch")


class Iterators(TestCase):
    def test_every_family_comes_as_vllm_iterates_over_it(self):
        for family in families.FAMILIES:
            folder = self.tmp / family
            tensors = families.write(folder, family)
            right = list(iterate(loader("safetensors"), folder))
            self.assertEqual({name for name, _ in right}, tensors.keys())
            for extra in (None, {"process_group": False, "engine": "threads"}, LAZY):
                with self.subTest(family, extra=extra):
                    self.assertEqual(families.differences(iterate(loader(extra=extra), folder), right), [])

    def test_long_tensors_are_lazy_and_the_same(self):
        from safetensors.torch import save_file

        folder = self.tmp / "long"
        folder.mkdir()
        save_file({"a": families.of(1, 2048, 640), "b": families.of(2, 7)}, folder / "model.safetensors")
        found = dict(iterate(loader(extra=LAZY), folder))
        self.assertEqual([type(found[name]).__name__ for name in "ab"], ["LazyTensor", "Tensor"])
        self.assertEqual(families.differences(found.items(), iterate(loader("safetensors"), folder)), [])

    def test_experts_of_other_ranks_are_left_out_as_vllm_leaves_them_out(self):
        for family in ("qwen_moe", "mixtral", "deepseek"):
            folder = self.tmp / family
            everything = families.write(folder, family)
            for ids in ({0, 1}, {3}, set()):
                pair = [loader("safetensors"), loader(), loader(extra=LAZY)]
                for one in pair:
                    one.local_expert_ids = ids
                right = list(iterate(pair[0], folder))
                self.assertLess(len(right), len(everything))
                for one in pair[1:]:
                    with self.subTest(family, ids=ids, lazy=one.options.lazy):
                        self.assertEqual(families.differences(iterate(one, folder), right), [])

    def test_sources_of_a_model_keep_their_prefix_folder_patterns_and_unused_weights(self):
        folder = self.tmp / "whole"
        families.write(folder, "llama")
        families.write(folder / "vision", "gemma", shards=2)
        first = "model-00001-of-00003.safetensors"
        for source in (
            {"prefix": "vision.", "subfolder": "vision"},
            {"allow_patterns_overrides": [first]},
            {"is_unused_weight": lambda name: name.startswith("model.layers.0.")},
        ):
            with self.subTest(source.keys()):
                right = list(iterate(loader("safetensors"), folder, **source))
                self.assertEqual(families.differences(iterate(loader(), folder, **source), right), [])

    def test_files_of_the_encoder_alone_are_read_if_vllm_wants_no_others(self):
        from safetensors.torch import save_file

        folder = self.tmp / "encoder"
        folder.mkdir()
        weight_map = {}
        for number, name in enumerate(("language_model.a", "visual.b")):
            file = f"model-0000{number + 1}-of-00002.safetensors"
            save_file({name: families.of(number, 5, 4)}, folder / file)
            weight_map[name] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        pair = [loader("safetensors"), loader()]
        for one in pair:
            one._encoder_only_lm_prefixes = ("language_model.",)
        right, found = (list(iterate(one, folder)) for one in pair)
        self.assertEqual([name for name, _ in right], ["visual.b"])
        self.assertEqual(families.differences(found, right), [])

    def test_a_path_stands_for_the_checkpoint_of_the_model_only(self):
        model, other, extra = self.tmp / "model", self.tmp / "other", self.tmp / "extra"
        families.write(model, "gemma")
        right = list(families.write(other, "llama").items())
        families.write(extra, "mixtral")
        # Beside it lies a second checkpoint, so that the folder alone would be refused.
        made = loader(extra={"path": str(other / "model.safetensors.index.json")})
        made._replaced = str(model)
        self.assertEqual(families.differences(iterate(made, model), right), [])
        with_prefix = iterate(made, extra, prefix="x.")
        self.assertEqual(families.differences(with_prefix, iterate(loader("safetensors"), extra, prefix="x.")), [])

    def test_a_path_may_be_a_url(self):
        from object_server import ObjectServer

        right = families.write(self.tmp / "served/llama", "llama")
        server = self.enter(ObjectServer())
        for file in sorted((self.tmp / "served/llama").iterdir()):
            server.put("models", f"llama/{file.name}", file.read_bytes())
        server.public.add("models")
        made = loader(extra={"path": f"{server.url}/models/llama/model.safetensors.index.json"})
        made._replaced = "some/model"
        self.assertEqual(families.differences(iterate(made, "some/model"), right.items()), [])

    def test_a_folder_without_weights_is_refused_in_one_line(self):
        (self.tmp / "config.json").write_text("{}")
        with self.assertRaises(Exception) as caught:
            list(iterate(loader(), self.tmp))
        self.assertNotIn("\n", str(caught.exception))

    def test_rank_shards_come_as_whole_tensors(self):
        from checkpoints import column_wise
        from tensorfs import load_file

        made = column_wise(self.tmp / "run7")
        found = dict(iterate(loader(), self.tmp / "run7"))
        self.assertEqual(families.differences(found.items(), load_file(self.tmp / "run7").items()), [])
        pieces = dict(iterate(loader("safetensors"), self.tmp / "run7"))
        self.assertTrue(any(pieces[name].shape != tensor.shape for name, tensor in found.items()), made)

    def test_a_truncated_file_is_an_error_that_names_it(self):
        folder = self.tmp / "cut"
        families.write(folder, "llama")
        last = folder / "model-00003-of-00003.safetensors"
        os.truncate(last, last.stat().st_size - 10)
        with self.assertRaisesRegex(Exception, last.name):
            list(iterate(loader(), folder))


class Models(TestCase):
    """Models that vLLM makes and loads, one and two ranks of a tensor-parallel group."""

    def ranks(self, folder, size, *configs):
        rendezvous = self.tmp / f"rendezvous-{size}-{len(list(self.tmp.iterdir()))}"
        words = [str(folder), str(size), f"file://{rendezvous}", json.dumps(configs)]
        path = os.pathsep.join(place for place in sys.path if place)
        started = [
            subprocess.Popen(
                [sys.executable, str(HERE / "vllm_rank.py"), str(rank), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "WARNING"},
            )
            for rank in range(size)
        ]
        answers = []
        for one in started:
            out, err = one.communicate(timeout=300)
            self.assertEqual(one.returncode, 0, err[-3000:])
            answers.append(json.loads(re.findall(r"(?m)^ANSWER (.*)$", out)[-1]))
        return answers

    def check(self, family, size):
        folder = self.tmp / family
        tensors = families.write(folder, family)
        # Copies out of the page cache are not counted.
        lazily = {**LAZY, "source": "direct"}
        plain, *others = configs = (["safetensors", {}], ["tensorfs", {}], ["tensorfs", lazily], ["tensorfs", {"process_group": False}])
        for rank, answer in enumerate(self.ranks(folder, size, *configs)):
            right = answer[0]
            self.assertGreater(len(right["parameters"]), 10)
            for config, found in zip(others, answer[1:]):
                with self.subTest(family, size=size, rank=rank, config=config):
                    self.assertEqual(found["loader"], "TensorfsModelLoader")
                    self.assertEqual(found["parameters"], right["parameters"])
                    self.assertEqual(found["lazy"], len(tensors) if config[1] is lazily else 0)
            # Every tensor was lazy, and the rank has read its own part of each, once.
            self.assertEqual(answer[configs.index(["tensorfs", lazily])]["read"], right["own"])
            self.assertLess(right["own"], (0.6 if size == 2 else 1.1) * sum(made.nbytes for made in tensors.values()))

    def test_llama_loads_as_with_safetensors(self):
        self.check("llama", 1)

    def test_ranks_load_as_with_safetensors(self):
        self.check("llama", 2)

    def test_other_families_load_as_with_safetensors(self):
        self.check("gemma", 2)
        self.check("mixtral", 2)
        self.check("qwen_moe", 2)
