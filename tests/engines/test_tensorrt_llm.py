"""The weight loader for TensorRT-LLM, against its interface as published: `published.py` says how."""

import importlib.util
import inspect
import os
import pickle
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest import mock

if importlib.util.find_spec("vllm") or importlib.util.find_spec("sglang"):
    raise unittest.SkipTest("this is the environment of another engine")

import torch
from safetensors.torch import save_file

import families
import published
from package import TestCase
from tensorfs.engines import _weights
from tensorfs.engines.tensorrt_llm import TensorfsWeightLoader

HIDDEN, KV, MIDDLE, EXPERTS, LAYERS = 1024, 512, 1536, 4, 2
ROWS, COLUMNS = published.TensorParallelMode.COLUMN, published.TensorParallelMode.ROW

LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN, ROWS),
    "self_attn.k_proj": (KV, HIDDEN, ROWS),
    "self_attn.o_proj": (HIDDEN, HIDDEN, COLUMNS),
    "mlp.gate_proj": (MIDDLE, HIDDEN, ROWS),
    "mlp.down_proj": (HIDDEN, MIDDLE, COLUMNS),
}


def mapping(tp=1, tp_rank=0, pp=1, pp_rank=0, ep=1, ep_rank=0):
    facts = {"tp_size": tp, "tp_rank": tp_rank, "pp_size": pp, "pp_rank": pp_rank, "moe_ep_size": ep, "moe_ep_rank": ep_rank}
    return SimpleNamespace(**facts, to_dict=lambda: facts)


def modules(ranks):
    """Name of each module that a rank has -> how its weight is cut."""
    for layer in range(LAYERS):
        if layer * ranks.pp_size // LAYERS != ranks.pp_rank:
            continue
        for name, (_, _, mode) in LINEAR.items():
            yield f"model.layers.{layer}.{name}", mode
        yield f"model.layers.{layer}.input_layernorm", None
        for expert in range(EXPERTS):
            if expert * ranks.moe_ep_size // EXPERTS == ranks.moe_ep_rank:
                yield f"model.layers.{layer}.mlp.experts.{expert}.w1", None


def checkpoint(folder):
    """A checkpoint whose matrices are long enough to be lazy."""
    tensors = {}
    for layer in range(LAYERS):
        for name, (rows, columns, _) in LINEAR.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = families.of(len(tensors), rows, columns)
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = families.of(len(tensors), HIDDEN)
        for expert in range(EXPERTS):
            tensors[f"model.layers.{layer}.mlp.experts.{expert}.w1.weight"] = families.of(len(tensors), 600, HIDDEN)
    folder.mkdir()
    names = list(tensors)
    for number in range(2):
        mine = names[number * len(names) // 2 : (number + 1) * len(names) // 2]
        save_file({name: tensors[name] for name in mine}, folder / f"model-{number + 1:05}-of-00002.safetensors")
    return tensors


def load(folder, how=None, ranks=None, **options):
    loader = published.HfCheckpointLoader(weight_loader=TensorfsWeightLoader(**options))
    return loader.load_weights(str(folder), mapping=ranks or mapping(), **(how or {}))


class Interface(TestCase):
    def test_the_loader_has_the_methods_of_the_published_class(self):
        made = TensorfsWeightLoader()
        self.assertIsInstance(made, published.BaseWeightLoader)
        theirs = inspect.signature(published.BaseWeightLoader.load_weights).parameters
        ours = inspect.signature(TensorfsWeightLoader.load_weights).parameters
        self.assertEqual(list(ours)[:3], list(theirs)[:3])
        self.assertEqual(ours[list(ours)[-1]].kind, inspect.Parameter.VAR_KEYWORD)

    def test_the_loader_travels_to_the_workers_in_a_pickle(self):
        again = pickle.loads(pickle.dumps(TensorfsWeightLoader(path="s3://models/llama", io_depth=4)))
        self.assertEqual((again.options.path, again.options.reading, again.options.lazy), ("s3://models/llama", {"io_depth": 4}, True))

    def test_mistakes_in_the_options_are_refused_in_one_line(self):
        for options, message in (
            ({"pth": "x"}, "there is no option 'pth'; expected one of path, lazy, chunk, "),
            ({"process_group": False}, "there is no option 'process_group'"),
            ({"io_depth": 0}, "io_depth=0: expected a number from 1 to 4096"),
        ):
            with self.subTest(options), self.assertRaisesRegex(ValueError, f"^TensorfsWeightLoader: {message}[^\n]*$"):
                TensorfsWeightLoader(**options)

    def test_a_version_without_a_dict_of_its_own_and_without_a_mapping_gets_a_dict(self):
        families.write(self.tmp / "model", "llama")
        with mock.patch("tensorfs.engines.tensorrt_llm._Weights", dict):
            self.assertIs(type(TensorfsWeightLoader().load_weights(str(self.tmp / "model"))), dict)


class Weights(TestCase):
    def check(self, found, right):
        self.assertIsInstance(found, published.ConsumableWeightsDict)
        self.assertEqual(families.differences(found.items(), right.items()), [])

    def test_every_family_comes_as_it_is_stored(self):
        for family in families.FAMILIES:
            right = families.write(self.tmp / family, family)
            for options in ({}, {"lazy": False}, {"engine": "threads"}):
                with self.subTest(family, options=options):
                    self.check(load(self.tmp / family, **options), right)

    def test_weights_that_a_repository_has_twice_are_chosen_as_published(self):
        right = families.write(self.tmp / "model", "llama")
        self.check(load(self.tmp / "model"), right)
        self.check(load(self.tmp / "model", {"use_consolidated": True}), {"decoy": torch.zeros(3)})
        self.check(load(self.tmp / "model", {"model": object(), "use_consolidated": False}), right)

    def test_a_path_stands_for_the_model_and_not_for_its_draft(self):
        families.write(self.tmp / "model", "gemma")
        right, draft = families.write(self.tmp / "other", "llama"), families.write(self.tmp / "draft", "gptq")
        loader = TensorfsWeightLoader(path=str(self.tmp / "other/model.safetensors.index.json"), exclude="lm_head.*")
        for _ in range(2):
            self.check(loader.load_weights(str(self.tmp / "model"), mapping()), {n: t for n, t in right.items() if n != "lm_head.weight"})
            self.check(loader.load_weights(str(self.tmp / "draft"), mapping()), draft)
            loader.cleanup()

    def test_rank_shards_and_other_formats_come_as_whole_tensors(self):
        from checkpoints import column_wise
        from tensorfs import load_file

        column_wise(self.tmp / "run7")
        self.check(load(self.tmp / "run7"), load_file(self.tmp / "run7"))
        right = {"a": families.of(1, 2048, 640), "b": families.of(2, 7)}
        (self.tmp / "pickled").mkdir()
        torch.save(right, self.tmp / "pickled/pytorch_model.bin")
        self.check(load(self.tmp / "pickled"), right)

    def test_a_truncated_file_and_an_empty_folder_are_errors_that_name_them(self):
        families.write(self.tmp / "cut", "llama")
        last = self.tmp / "cut/model-00003-of-00003.safetensors"
        os.truncate(last, last.stat().st_size - 10)
        (self.tmp / "empty").mkdir()
        for folder, name in (("cut", last.name), ("empty", "empty")):
            with self.assertRaisesRegex(Exception, name) as caught:
                load(self.tmp / folder)
            self.assertNotIn("\n", str(caught.exception))


class Ranks(TestCase):
    def setUp(self):
        super().setUp()
        self.tensors = checkpoint(self.tmp / "model")
        self.opened = []
        safe_open = _weights.safe_open

        def recorded(*arguments, **options):
            self.opened.append(safe_open(*arguments, **options))
            return self.opened[-1]

        self.enter(mock.patch.object(_weights, "safe_open", recorded))

    def materialize(self, weights, ranks):
        """Loads the modules of a rank side by side, as TensorRT-LLM does, and returns their parameters."""
        parameters = {}

        def one(name, mode):
            part = published.load_weight_shard(weights[f"{name}.weight"], ranks.tp_size, ranks.tp_rank, mode)
            parameters[name] = torch.nn.Parameter(torch.empty(part.shape, dtype=part.dtype), requires_grad=False)
            parameters[name].data.copy_(part[:])
            weights.mark_consumed(name)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, *zip(*modules(ranks))))
        return parameters

    def test_each_rank_gets_its_part_and_reads_no_other_one(self):
        layouts = [mapping(2, rank, 2, stage, 2, rank) for rank in range(2) for stage in range(2)]
        for ranks in (mapping(), *layouts, *(mapping(3, rank, ep=4, ep_rank=rank) for rank in range(3))):
            # Copies out of the page cache are not counted.
            for options in ({"source": "direct"}, {"lazy": False}):
                with self.subTest(ranks.to_dict(), options=options):
                    weights = load(self.tmp / "model", ranks=ranks, **options)
                    short = sum(t.nbytes for _, t in weights.items() if type(t) is torch.Tensor)
                    found = self.materialize(weights, ranks)
                    self.check_parts(found, ranks)
                    self.assertEqual(len(weights), len(self.tensors) - len(found))
                    if "lazy" not in options:
                        long = sum(made.nbytes for made in found.values() if made.dim() == 2)
                        self.assertEqual(self.opened[-1].stats["bytes"], long + short)

    def check_parts(self, found, ranks):
        wanted = dict(modules(ranks))
        self.assertEqual(found.keys(), wanted.keys())
        for name, mode in wanted.items():
            right = self.tensors[f"{name}.weight"]
            if mode is not None:
                parts = right.chunk(ranks.tp_size, 0 if mode == ROWS else 1)
                right = parts[ranks.tp_rank]
            self.assertTrue(families.same(found[name].data, right), name)

    def test_a_consumed_weight_frees_its_memory(self):
        weights = load(self.tmp / "model")
        name = "model.layers.0.self_attn.q_proj"
        value = weakref.ref(weights[f"{name}.weight"].value())
        self.assertIsNotNone(value())
        self.assertEqual(weights.mark_consumed(name), 1)
        self.assertIsNone(value())

    def test_weights_that_a_model_changes_are_mapped_ones(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        with self.assertRaisesRegex(RuntimeError, "load without the option lazy"):
            load(self.tmp / "model")[name].add_(1)
        changed = load(self.tmp / "model", lazy=False)[name]
        changed.zero_()
        self.assertTrue(families.same(load(self.tmp / "model", lazy=False)[name], self.tensors[name]))
