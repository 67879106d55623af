"""Universal checkpoints of DeepSpeed: the weights in F32 of a folder for each tensor, under the names of the model."""

import json
import os
import shutil

import numpy as np

import oracle
import torch_files
from mounts import FIXTURES, HANGS, Mount, TestCase, tensorfs, wait_until
from test_live_store import Store
from universal_files import STATES, model_states, save_tensor, save_tensors, some_weights, write_rank_states, write_universal

FILE = "model.safetensors"
STEP = "global_step4_universal"
MODEL = "mp_rank_00_model_states.pt"


class Universal(TestCase):
    def found(self, source, *options, index="none"):
        out = self.tmp / "out.safetensors"
        words = [word for option in options for word in ("-o", option)] + ["--index-dir", index]
        self.assert_done(tensorfs("verify", source, *words))
        self.assert_done(tensorfs("load", source, *words))
        self.assert_done(tensorfs("consolidate", source, out, "--force", *words))
        return oracle.tensor_bytes(out)

    def assert_arrays(self, found, arrays):
        self.assertEqual(set(found), set(arrays))
        for name, array in arrays.items():
            self.assertEqual(found[name], ("F32", list(array.shape), array.tobytes()), name)

    def assert_says(self, source, *words):
        outcome = tensorfs("verify", source)
        self.assert_refused(outcome)
        self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
        for word in words:
            self.assertIn(word, outcome.stderr)

    def test_the_weights_of_all_stages_are_shown_under_the_names_of_the_model(self):
        for stage in (1, 2, 3):
            with self.subTest(stage):
                run = self.tmp / f"run-{stage}"
                tensors = write_universal(run, stage)
                self.assert_arrays(self.found(run / STEP), tensors)
                with Mount(run / STEP) as m:
                    self.assert_arrays(oracle.tensor_bytes(m.path / FILE), tensors)
                    # The state of the optimizer stays visible, and the shown files are gone.
                    beside = sorted(os.listdir(m.path / "zero/scale"))
                    self.assertEqual(beside, ["exp_avg.pt", "exp_avg_sq.pt", "step.pt"])
                    self.assertEqual(sorted(os.listdir(m.path)), [FILE, "zero"])

    def test_what_deepspeed_has_converted_has_the_weights_of_its_optimizer(self):
        for universal, run in (("deepspeed_universal", "deepspeed_zero2"), ("deepspeed_universal3", "deepspeed_zero3")):
            with self.subTest(universal):
                expected = self.found(FIXTURES / "torch" / run, "zero=fp32")
                self.assertEqual(self.found(FIXTURES / "torch" / universal), expected)

    def test_a_run_shows_the_checkpoint_that_latest_universal_names(self):
        run = self.tmp / "run"
        tensors = write_universal(run)
        write_universal(run, name="global_step2_universal")
        (run / "latest_universal").write_text(STEP)
        with Mount(run) as m:
            self.assert_arrays(oracle.tensor_bytes(m.path / FILE), tensors)
            self.assertIn(MODEL, os.listdir(m.path / "global_step2_universal"))
        outcome = tensorfs("ls", run, "--json")
        self.assert_done(outcome)
        (one,) = outcome.json()["sets"]
        self.assertEqual((one["name"], one["kind"]), (FILE, "deepspeed"))
        notes = json.dumps(outcome.json()["notes"])
        self.assertIn("`latest_universal` does not name the checkpoint in `global_step2_universal`", notes)
        self.assertIn("state=all shows the state of the optimizer too", notes)
        # A universal checkpoint is made of another one, which goes first.
        (run / "latest").write_text("global_step4_universal/..")
        self.assert_says(run, "run/latest: ", "no folder beside it")

    def test_the_state_of_the_optimizer_is_shown_if_all_is_asked_for(self):
        for stage in (2, 3):
            with self.subTest(stage):
                run = self.tmp / f"run-{stage}"
                tensors = write_universal(run, stage)
                found = self.found(run / STEP, "state=all")
                weights = some_weights()
                for name, array in weights.items():
                    self.assertEqual(found[name][2], array.tobytes(), name)
                    for number, state in enumerate(STATES):
                        self.assertEqual(found[f"{name}.{state}"][2], (array + number + 1).tobytes(), name)
                self.assertEqual(found["head"][2], tensors["head"].tobytes())
                self.assertNotIn("scale.step", found)
                with Mount(run / STEP, "state=all") as m:
                    self.assertEqual(os.listdir(m.path / "zero/scale"), ["step.pt"])

    def test_inspect_tells_the_file_of_each_tensor(self):
        run = self.tmp / "run"
        write_universal(run)
        (one,) = tensorfs("inspect", run, "norm.bias", "--json").json()["sets"][0]["tensors"]
        self.assertEqual(one["pieces"][0]["shard"], "zero/norm.bias/fp32.pt")

    def test_tensors_that_were_merged_from_tensor_parallel_ranks_are_shown_whole(self):
        folder = self.tmp / STEP
        folder.mkdir()
        whole = some_weights(rows=10)
        whole["column"] = np.random.default_rng(4).random((6, 8), np.float32)
        padded = np.concatenate([whole["embed.weight"], np.zeros((2, 7), np.float32)])
        for rank in (0, 1):
            part = {**whole, "embed.weight": padded[rank * 6 : rank * 6 + 6], "column": whole["column"][:, rank * 4 : rank * 4 + 4]}
            module = {**part, "rope": np.arange(3, dtype=np.float32)}
            torch_files.save(folder / f"mp_rank_{rank:02}_model_states.pt", model_states(part, module, slices=2))
        parts = torch_files.Object("deepspeed.checkpoint.universal_checkpoint", "SubparamShape", state={"shape": (2, 13)})
        marks = {
            "embed.weight": {"cat_dim": 0, "vocab_tensor": True}, "column": {"cat_dim": 1}, "scale": {},
            "row": {"sub_param_shape": parts}, "conv.weight": {"cat_dim": 0, "param_n_sub_params": 2},
        }
        save_tensors(folder, whole, marks=marks)
        self.assert_arrays(self.found(folder), whole)
        notes = json.dumps(tensorfs("ls", folder, "--json").json()["notes"])
        self.assertIn("rope of the model states are of one of several ranks each", notes)
        (folder / "mp_rank_01_model_states.pt").unlink()
        self.assert_says(folder, "is of 2 ranks, model states of 1 are here")
        # A part of the model is no model.
        shutil.rmtree(folder / "zero")
        self.assert_says(folder, "is the file of one of 2 ranks")

    def test_what_does_not_fit_is_refused(self):
        def changed(name, change, *words):
            with self.subTest(name):
                run = self.tmp / name
                write_universal(run)
                change(run / STEP)
                self.assert_says(run, *words)

        changed("missing", lambda at: (at / "zero/row/fp32.pt").unlink(), "tensor `row`: ", "zero/row/fp32.pt is missing")
        changed("no-model", lambda at: (at / MODEL).unlink(), "no model states are beside `zero`")
        changed("another", lambda at: save_tensor(at, "other", "fp32", np.zeros(3, np.float32)),
                "tensor `other`", "does not name")
        changed("shape", lambda at: save_tensor(at, "row", "fp32", np.zeros((2, 13), np.float32)), "has the shape [2, 13]")
        changed("rows", lambda at: save_tensor(at, "embed.weight", "fp32", np.zeros((10, 7), np.float32)),
                "has the shape [10, 7] in its file and [[11, 7]]")
        changed("dtype", lambda at: torch_files.save(
            at / "zero/row/fp32.pt", {"param": torch_files.Tensor(np.zeros(13, np.float16), (1, 13), "F16")}), "F16, not F32")
        changed("two", lambda at: torch_files.save(
            at / "zero/row/fp32.pt", {"param": torch_files.Tensor(np.zeros(13, np.float32)), "x": torch_files.Tensor(np.zeros(1, np.float32))}),
            "does not hold one tensor, `param`")
        changed("cut", lambda at: os.truncate(at / "zero/row/fp32.pt", 300), "zero/row/fp32.pt")

    def test_model_states_of_zero_3_of_a_tensor_parallel_rank_are_refused(self):
        run = self.tmp / "run"
        write_universal(run, 3)
        write_rank_states(run / STEP, some_weights(), {}, {}, slices=2)
        self.assert_says(run, "zero_pp_rank_0_mp_rank_00_model_states.pt: ", "is the file of one of 2 ranks", "mp_world_size")

    def test_a_tensor_of_zero_3_that_is_not_trained_may_have_two_names_and_is_no_trained_one(self):
        run = self.tmp / "run"
        tensors = write_universal(run, 3)
        still, weights = tensors["still"], some_weights()
        write_rank_states(run / STEP, weights, {"still": still}, {"head": "embed.weight", "twin": "still"})
        self.assert_arrays(self.found(run / STEP), {**tensors, "twin": still})
        write_rank_states(run / STEP, weights, {"still": still, "conv.weight": weights["conv.weight"]}, {})
        self.assert_says(run, "tensor `conv.weight`: stands twice in the shapes of the model states")

    def test_a_tensor_that_is_not_trained_in_any_tensor_parallel_rank_is_refused(self):
        folder = self.tmp / STEP
        folder.mkdir()
        weights = some_weights()
        for rank in (0, 1):
            frozen = {"still": np.ones(3, np.float32)} if rank else {}
            states = model_states(weights, {**weights, **frozen}, slices=2, frozen=frozen)
            torch_files.save(folder / f"mp_rank_{rank:02}_model_states.pt", states)
        save_tensors(folder, weights)
        self.assert_says(folder, "mp_rank_01_model_states.pt: tensor `still`: is not trained")

    def test_the_index_gives_what_the_files_give(self):
        run, index = self.tmp / "run", self.tmp / "index"
        write_universal(run)
        before = tensorfs("ls", run, "--json", "--index-dir", "none").stdout
        for state in ("built", "fresh"):
            (one,) = tensorfs("index", run, "--json", "--index-dir", index).json()["indexes"]
            self.assertEqual((one["state"], one["shards"]), (state, 6))
            self.assertEqual(tensorfs("ls", run, "--json", "--index-dir", index).stdout, before)
        save_tensor(run / STEP, "row", "fp32", np.ones((1, 13), np.float32))
        found = self.found(run, index=index)
        self.assertEqual(found["row"][2], np.ones(13, np.float32).tobytes())


class LiveUniversal(Store):
    """A run whose checkpoint is converted while it is mounted with `watch=`."""

    def test_the_checkpoint_is_shown_once_all_its_tensors_are_there(self):
        (self.store / "run").mkdir()
        self.mounted()
        made = self.tmp / "made"
        tensors = write_universal(made)
        run = self.store / "run"
        shutil.copytree(made / STEP, run / STEP)
        (run / "latest_universal").write_text(STEP)
        wait_until(lambda: self.shown(f"run/{FILE}"), HANGS, "the checkpoint is shown")
        path = self.tmp / "shown.safetensors"
        path.write_bytes(self.shown(f"run/{FILE}"))
        self.assertEqual(set(oracle.tensor_bytes(path)), set(tensors))
