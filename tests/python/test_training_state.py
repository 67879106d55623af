"""`state=`: which tensors of a training are shown, and what is told of the others."""

import collections
import json
import shutil

import numpy as np

import oracle
import torch_files
from manifest import by_id
from mounts import FIXTURES, Mount, TestCase, tensorfs
from torch_files import Tensor

ACTOR = FIXTURES / "torch/rank_verl_ws4"


def tensor(*shape):
    return Tensor(np.arange(np.prod(shape, dtype=int), dtype=np.float32), shape)


def names_of(source, *options):
    outcome = tensorfs("ls", source, "--json", *[word for option in options for word in ("-o", option)])
    assert outcome.code == 0, outcome
    (found,) = outcome.json()["sets"]
    return {t["name"] for t in found["tensors"]}, outcome.json()["notes"]


class State(TestCase):
    def saved(self, root):
        path = self.tmp / "last.pt"
        torch_files.save(path, root)
        return path

    def test_the_state_of_a_training_is_shown_under_full_names_if_all_is_asked_for(self):
        path = self.saved({
            "model": collections.OrderedDict({"fc.weight": tensor(3, 4)}),
            "optimizer": {"state": {0: {"exp_avg": tensor(3, 4), "step": tensor()}}, "param_groups": [{"lr": 1}]},
            "torch_rng_state": tensor(7),
            "epoch": 3,
        })
        shown, notes = names_of(path)
        self.assertEqual(shown, {"fc.weight"})
        (note,) = notes
        self.assertIn("`optimizer`, `torch_rng_state` of the file are not shown; state=all shows their tensors", note)
        shown, notes = names_of(path, "state=all")
        state = {"optimizer.state.0.exp_avg", "optimizer.state.0.step", "torch_rng_state"}
        self.assertEqual((shown, notes), ({"model.fc.weight", *state}, []))
        with Mount(path, "state=all") as m:
            found = oracle.tensor_bytes(m.path / "last.safetensors")
            # These commands read the source behind the mount. An earlier version read it without the state.
            for command in ("verify", "index"):
                self.assertIn(": 4 tensors", tensorfs(command, m.path).stdout)
        self.assertEqual(found["optimizer.state.0.exp_avg"][2], np.arange(12, dtype=np.float32).tobytes())

    def test_ls_and_inspect_print_the_note(self):
        path = self.saved({"model": {"w": tensor(2)}, "optimizer_states": [{"state": {0: tensor(2)}}]})
        for words in (("ls",), ("ls", "--short"), ("inspect",)):
            outcome = tensorfs(*words, path)
            self.assert_done(outcome)
            self.assertRegex(outcome.stdout, r"(?m)^note: .*`optimizer_states` of the file are not shown; state=all", words)

    def test_parts_of_a_model_that_are_called_like_a_state_are_shown(self):
        modules = {"scaler": tensor(2), "rng_net": tensor(2), "trainer": tensor(2), "optimizer_net": tensor(2), "train": tensor(2)}
        self.assertEqual(names_of(self.saved(modules))[0], set(modules))
        nested = {name: {"weight": value} for name, value in modules.items()}
        self.assertEqual(names_of(self.saved(nested))[0], {f"{name}.weight" for name in modules})

    def test_states_are_known_by_whole_words(self):
        states = ["optim", "optimizer_0", "optimizers", "optimizer_state_dict", "lr_schedulers", "lr_scheduler_state", "rng",
                  "rng_states", "cuda_rng_state_all", "numpy_rng_state", "train_state", "dataloader", "callbacks", "loops"]
        path = self.saved({"fc": {"weight": tensor(2)}, **{name: {"x": tensor(2)} for name in states}})
        self.assertEqual(names_of(path)[0], {"fc.weight"})
        self.assertEqual(len(names_of(path, "state=all")[0]), 1 + len(states))

    def test_a_distributed_checkpoint_shows_its_optimizer_too(self):
        source = FIXTURES / "torch/dcp_torch22"
        model, notes = names_of(source)
        self.assertEqual(model, set(by_id("torch_dcp_torch22").tensors))
        self.assertIn("are not shown; state=all shows their tensors", json.dumps(notes))
        every, _ = names_of(source, "state=all")
        self.assertTrue({name for name in every if name.startswith("optimizer.")}, every)
        self.assertTrue(model <= {name.removeprefix("model.") for name in every}, every)


class ModelFolder(TestCase):
    def test_the_config_beside_the_files_of_ranks_is_shown_with_the_weights(self):
        run = self.copy(ACTOR, "actor")
        (run / "huggingface/tokenizer.json").write_text("{}")
        (run / "huggingface/pytorch_model.bin").write_bytes(b"other weights")
        config = (run / "huggingface/config.json").read_bytes()
        with Mount(run) as m:
            names = {path.name for path in m.path.iterdir()}
            self.assertEqual(names, {"config.json", "fsdp_config.json", "huggingface", "model.safetensors", "tokenizer.json"})
            self.assertEqual((m.path / "config.json").read_bytes(), config)
            (run / "huggingface/config.json").write_text('{"a": 1}')
            self.assertEqual((m.path / "config.json").read_text(), '{"a": 1}')
        self.assert_done(tensorfs("consolidate", run, self.tmp / "out"))
        self.assertEqual((self.tmp / "out/config.json").read_text(), '{"a": 1}')
        self.assertIn("model.safetensors", [path.name for path in (self.tmp / "out").iterdir()])

    def test_files_of_the_folder_itself_win(self):
        run = self.copy(ACTOR, "actor")
        (run / "config.json").write_text("own")
        with Mount(run) as m:
            self.assertEqual((m.path / "config.json").read_text(), "own")

    def test_a_folder_without_a_config_and_one_beside_other_weights_are_not_looked_at(self):
        run = self.copy(ACTOR, "actor")
        (run / "huggingface/config.json").rename(run / "huggingface/tokenizer.json")
        with Mount(run) as m:
            self.assertFalse((m.path / "tokenizer.json").exists())
        plain = self.tmp / "plain"
        shutil.copytree(FIXTURES / "hf/gpt2_tiny", plain)
        (plain / "config.json").unlink(missing_ok=True)
        shutil.copytree(ACTOR / "huggingface", plain / "huggingface")
        with Mount(plain) as m:
            self.assertFalse((m.path / "config.json").exists())
