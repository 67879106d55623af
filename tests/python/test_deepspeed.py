"""Checkpoints of DeepSpeed ZeRO: runs with `latest`, weights of the model and of the optimizer, files that do not fit."""

import collections
import json
import os
import shutil

import numpy as np

import oracle
import torch_files
from mounts import FIXTURES, Mount, TestCase, tensorfs
from test_live_store import Store
from torch_files import Object, Tensor

FILE = "model.safetensors"
STEP = "global_step1"


def fixture(folder, stage):
    shutil.copytree(FIXTURES / f"torch/deepspeed_zero{stage}", folder)
    return folder


def size(shape):
    return torch_files.Object("torch", "Size", args=(tuple(shape),))


def tensor(array):
    return Tensor(np.ascontiguousarray(array).reshape(-1), np.shape(array))


def tensor_of(array):
    """The array in BF16, cut off."""
    short = (np.ascontiguousarray(array).reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor(short, np.shape(array), "BF16")


def write_zero(run, stage, ranks, groups, frozen=(), name=STEP):
    """A checkpoint of `ranks` ranks with random weights. `groups` are dicts of shapes. Returns the weights by name."""
    rng = np.random.default_rng(ranks * 10 + stage)
    folder = run / name
    folder.mkdir(parents=True)
    (run / "latest").write_text(name)
    weights = {n: rng.random(shape, np.float32) for group in groups for n, shape in group.items()}
    still = {n: rng.random(shape, np.float32) for n, shape in dict(frozen).items()}
    shapes = [collections.OrderedDict((n, size(shape)) for n, shape in group.items()) for group in groups]
    common = {
        "ds_version": "0.19.8", "param_shapes": shapes, "dp_world_size": ranks, "mp_world_size": 1, "shared_params": {},
        "frozen_param_shapes": collections.OrderedDict((n, size(array.shape)) for n, array in still.items()),
    }
    for rank in range(ranks):
        if stage < 3 and rank > 0:
            break
        module = collections.OrderedDict(buffer=tensor(np.arange(3, dtype=np.float32)))
        fragments = collections.OrderedDict()
        for n, array in {**weights, **still}.items():
            module[n] = tensor(np.zeros(0, np.float32) if stage == 3 else array)
        for n, array in still.items():
            fragments[n] = tensor(parts_of(array, ranks)[rank] if stage == 3 else array)
        file = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch_files.save(folder / file, {**common, "module": module, "frozen_param_fragments": fragments})
    for rank in range(ranks):
        state = (partitions if stage < 3 else flat_groups)(weights, groups, ranks, rank)
        stage_of = Object("deepspeed.runtime.zero.config", "ZeroStageEnum", args=(stage,))
        root = {"optimizer_state_dict": {"zero_stage": stage_of, **state}, "ds_version": "0.19.8"}
        torch_files.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", root)
    return {"buffer": np.arange(3, dtype=np.float32), **weights, **still}


def parts_of(array, ranks):
    """The elements of each rank, padded to the same number."""
    each = -(-array.size // ranks)
    padded = np.zeros(each * ranks, np.float32)
    padded[: array.size] = array.reshape(-1)
    return padded.reshape(ranks, each)


def partitions(weights, groups, ranks, rank):
    """The state of a rank of stages 1 and 2: its partition of each group, without padding at the end."""
    own, mappings, paddings = [], [], []
    for group in groups:
        flat = np.concatenate([weights[n].reshape(-1) for n in group])
        each = 2 * -(-flat.size // (2 * ranks))
        part = flat[rank * each : (rank + 1) * each]
        own.append(tensor(part))
        paddings.append(each - part.size if rank == ranks - 1 else 0)
        mapping, at = collections.OrderedDict(), 0
        for n in group:
            first, end = max(at, rank * each), min(at + weights[n].size, (rank + 1) * each)
            if first < end:
                address = {"numel": end - first, "start": first - rank * each}
                mapping[n] = Object("deepspeed.utils.tensor_fragment", "fragment_address", state=address)
            at += weights[n].size
        mappings.append(mapping)
    return {
        "single_partition_of_fp32_groups": own, "partition_count": [ranks] * len(groups), "group_paddings": paddings,
        "param_slice_mappings": mappings,
    }


def flat_groups(weights, groups, ranks, rank):
    """The state of a rank of stage 3: its parts of all weights, cut into groups of any length."""
    flat = np.concatenate([parts_of(weights[n], ranks)[rank] for group in groups for n in group])
    cuts = [flat.size // 3, flat.size // 3 + 1, flat.size // 2]
    return {"fp32_flat_groups": [tensor(part) for part in np.split(flat, cuts)], "partition_count": ranks}


SHAPES = [
    {"embed": (11, 7), "conv": (3, 2, 3, 5), "scale": (), "row": (1, 13)},
    {"bias": (5,), "norm": (2,), "wide": (2, 37)},
]


class DeepSpeed(TestCase):
    def found(self, source, *options):
        out = self.tmp / "out.safetensors"
        options = [word for option in options for word in ("-o", option)]
        self.assert_done(tensorfs("verify", source, *options))
        self.assert_done(tensorfs("consolidate", source, out, "--force", *options))
        return oracle.tensor_bytes(out)

    def assert_says(self, source, *words, options=()):
        outcome = tensorfs("verify", source, *[word for option in options for word in ("-o", option)])
        self.assert_refused(outcome)
        self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
        for word in words:
            self.assertIn(word, outcome.stderr)

    def test_ranges_of_any_number_of_ranks_are_joined_to_the_weights(self):
        for stage, ranks in ((1, 1), (1, 3), (2, 5), (2, 16), (3, 1), (3, 2), (3, 3), (3, 7), (3, 40)):
            with self.subTest(stage=stage, ranks=ranks):
                run = self.tmp / f"run-{stage}-{ranks}"
                weights = write_zero(run, stage, ranks, SHAPES, {"still": (4, 5)})
                found = self.found(run, "zero=fp32")
                self.assertEqual(set(found), set(weights))
                for name, array in weights.items():
                    self.assertEqual(found[name], ("F32", list(array.shape), array.tobytes()), name)

    def test_a_mount_reads_any_part_of_joined_weights(self):
        weights = write_zero(self.tmp / "run", 3, 6, [{"large": (700, 313), "small": (9,)}])
        with Mount(self.tmp / "run") as m:
            path = m.path / FILE
            whole = path.read_bytes()
            header = oracle.read_header(whole)
            at = header.data_start + header.tensors["large"]["data_offsets"][0]
            data = weights["large"].tobytes()
            self.assert_same(whole[at : at + len(data)], data)
            rng = np.random.default_rng(1)
            with open(path, "rb", buffering=0) as file:
                for first, length in zip(rng.integers(0, len(whole), 200), rng.integers(1, 9000, 200)):
                    file.seek(int(first))
                    self.assert_same(file.read(int(length)), whole[first : first + length])

    def test_a_run_shows_its_last_checkpoint_beside_its_config(self):
        run = fixture(self.tmp / "run", 2)
        (run / "config.json").write_text("{}")
        write_zero(self.tmp / "run", 1, 2, SHAPES, name="global_step0")
        (run / "latest").write_text(f"{STEP}\n")
        with Mount(run) as m:
            self.assertEqual(sorted(path.name for path in m.path.iterdir()), ["config.json", "global_step0", STEP, "latest", FILE])
            self.assert_same((m.path / FILE).read_bytes(), oracle.from_deepspeed(run, False))
            # The states of the optimizer stay visible.
            beside = sorted(path.name for path in (m.path / STEP).iterdir())
            self.assertEqual(beside, [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)])
            self.assertIn("mp_rank_00_model_states.pt", [path.name for path in (m.path / "global_step0").iterdir()])
        outcome = tensorfs("ls", run, "--json")
        self.assert_done(outcome)
        self.assertEqual([(one["name"], one["kind"]) for one in outcome.json()["sets"]], [(FILE, "deepspeed")])
        self.assertIn("`latest` does not name the checkpoint in `global_step0`", json.dumps(outcome.json()["notes"]))

    def test_the_folder_of_any_checkpoint_can_be_named(self):
        run = fixture(self.tmp / "run", 1)
        weights = write_zero(run, 2, 3, SHAPES, name="global_step7")
        (run / "latest").write_text(STEP)
        self.assertIn("a.weight", self.found(run))
        found = self.found(run / "global_step7", "zero=fp32")
        self.assertEqual(set(found), set(weights))

    def test_a_mount_with_fp32_shows_it_and_commands_on_it_too(self):
        run = fixture(self.tmp / "run", 2)
        with Mount(run, "zero=fp32") as m:
            self.assert_same((m.path / FILE).read_bytes(), oracle.from_deepspeed(run, True))
            outcome = tensorfs("ls", m.path, "--json")
            self.assert_done(outcome)
            dtypes = {one["name"]: one["dtype"] for one in outcome.json()["sets"][0]["tensors"]}
            self.assertEqual((dtypes["a.weight"], dtypes["buf"]), ("F32", "BF16"))
            self.assert_done(tensorfs("verify", m.path))

    def test_weights_that_old_versions_share_without_a_record_have_the_f32_of_both_names(self):
        # DeepSpeed before 0.9.2 has no `shared_params`: only the bytes in the model states tell.
        run = self.tmp / "run"
        weights = write_zero(run, 2, 2, [{"embed": (6, 4), "bias": (6,)}])
        short = tensor_of(weights["embed"])
        module = {
            "embed": short, "head": Tensor(short.storage, (6, 4), "BF16"), "same.values": tensor_of(weights["embed"]),
            "rows": Tensor(short.storage, (5, 4), "BF16"), "bias": tensor_of(weights["bias"]),
        }
        shapes = [collections.OrderedDict((name, size(weights[name].shape)) for name in ("embed", "bias"))]
        state = {"ds_version": "0.8.3", "param_shapes": shapes, "buffer_names": [], "dp_world_size": 2, "mp_world_size": 1}
        torch_files.save(run / STEP / "mp_rank_00_model_states.pt", {**state, "module": collections.OrderedDict(module)})
        found = self.found(run, "zero=fp32")
        self.assertEqual(found["embed"], ("F32", [6, 4], weights["embed"].tobytes()))
        self.assertEqual(found["head"], found["embed"])
        self.assertEqual({name: dtype for name, (dtype, _, _) in found.items() if dtype != "F32"}, {"rows": "BF16", "same.values": "BF16"})
        outcome = tensorfs("ls", run, "-o", "zero=fp32", "--json")
        self.assertIn("rows, same.values come from the model states, in 16 bits, because the optimizer states have no such weights", outcome.stdout)
        self.assertEqual(self.found(run)["head"], self.found(run)["embed"])
        self.assertEqual({dtype for dtype, _, _ in self.found(run).values()}, {"BF16"})
        self.assertNotIn("16 bits", tensorfs("ls", run, "--json").stdout)

    def test_latest_leads_nowhere_else(self):
        for text, word in [
            ("../../x", "no folder beside it"), ("/etc", "no folder beside it"), ("..", "no folder beside it"),
            ("", "is empty"), ("global_step9", "`global_step9`, which is not here"), (STEP + "/..", "no folder beside it"),
        ]:
            with self.subTest(text):
                run = fixture(self.tmp / f"run-{len(text)}", 2)
                (run / "latest").write_text(text)
                self.assert_says(run, f"{run.name}/latest: ", word)

    def test_files_of_ranks_that_are_missing_or_too_many_are_refused(self):
        optimizer = f"{STEP}/bf16_zero_pp_rank_%d_mp_rank_00_optim_states.pt"
        for stage, options in ((1, ["zero=fp32"]), (2, ["zero=fp32"]), (3, [])):
            with self.subTest(stage):
                run = fixture(self.tmp / f"less-{stage}", stage)
                (run / (optimizer % 1)).unlink()
                self.assert_says(run, "optimizer states", options=options)
                run = fixture(self.tmp / f"more-{stage}", stage)
                shutil.copy(run / (optimizer % 0), run / (optimizer % 2))
                self.assert_says(run, "states", options=options)
                # Also where the weights of the model are shown: files of two runs are mixed.
                self.assert_says(run, "3")
        run = fixture(self.tmp / "double", 2)
        shutil.copy(run / (optimizer % 1), run / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
        self.assert_says(run, "is of the same rank as", options=["zero=fp32"])
        run = fixture(self.tmp / "model", 3)
        (run / STEP / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        self.assert_says(run, "1 model states found, those of rank 1 are missing")
        run = fixture(self.tmp / "no-model", 2)
        (run / STEP / "mp_rank_00_model_states.pt").unlink()
        self.assert_says(run, "no mp_rank_00_model_states.pt")

    def test_a_partition_of_another_rank_is_refused_by_what_it_tells(self):
        run = fixture(self.tmp / "run", 2)
        first, second = [run / STEP / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1)]
        content = first.read_bytes(), second.read_bytes()
        for files in ((content[0], content[0]), (content[1], content[0])):
            first.write_bytes(files[0])
            second.write_bytes(files[1])
            self.assert_says(run, "tells other ranges", options=["zero=fp32"])
        # The weights of the model need no partition.
        self.assertIn("a.weight", self.found(run))

    def test_partitions_that_do_not_have_the_elements_of_the_shapes_are_refused(self):
        for stage, options in ((2, ["zero=fp32"]), (3, [])):
            with self.subTest(stage):
                run, other = self.tmp / f"run-{stage}", self.tmp / f"other-{stage}"
                write_zero(run, stage, 2, SHAPES)
                write_zero(other, stage, 2, [{"embed": (12, 7)}, *SHAPES[1:]])
                for path in (other / STEP).glob("*optim_states.pt"):
                    shutil.copy(path, run / STEP / path.name)
                self.assert_says(run, "restore the files of this checkpoint", options=options)

    def test_one_file_of_zero_3_is_no_model(self):
        for name in ("zero_pp_rank_0_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            self.assert_says(FIXTURES / "torch/deepspeed_zero3" / STEP / name, "name the folder of all files")

    def test_models_that_are_cut_in_layers_or_tensors_or_have_experts_are_refused_by_name(self):
        for name, word in [
            ("layer_00-model_00-model_states.pt", "one layer of a model"),
            ("layer_0_expert_3_mp_rank_00_model_states.pt", "one expert"),
            ("mp_rank_01_model_states.pt", "a part of a model that is cut in tensors"),
            ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "a part of a model that is cut in tensors"),
        ]:
            with self.subTest(name):
                run = fixture(self.tmp / name, 2)
                shutil.copy(run / STEP / "mp_rank_00_model_states.pt", run / STEP / name)
                self.assert_says(run, name, word)

    def test_a_run_with_weights_of_its_own_shows_those_and_the_checkpoint_in_its_folder(self):
        run = fixture(self.tmp / "run", 2)
        shutil.copy(FIXTURES / "hf/gpt2_tiny/model-00001-of-00003.safetensors", run / FILE)
        with Mount(run) as m:
            self.assert_same((m.path / FILE).read_bytes(), (run / FILE).read_bytes())
            self.assert_same((m.path / STEP / FILE).read_bytes(), oracle.from_deepspeed(run, False))



class LiveRuns(Store):
    """A run that goes on while it is mounted with `watch=`."""

    def test_the_next_checkpoint_is_shown_once_latest_names_it(self):
        run = self.store / "run"
        fixture(run, 2)
        self.mounted()
        path = f"run/{FILE}"
        self.assert_same(self.shown(path), oracle.from_deepspeed(run, False))
        step = self.tmp / "next"
        write_zero(step, 2, 3, SHAPES, name="global_step2")
        (step / "global_step2").rename(run / "global_step2")
        (run / "latest.new").write_text("global_step2")
        (run / "latest.new").rename(run / "latest")
        self.wait_for(path, oracle.from_deepspeed(run, False))
        # The files of the checkpoint before are shown as they are.
        self.assertIn("mp_rank_00_model_states.pt", os.listdir(self.mount / "run" / STEP))
        (run / "latest.new").write_text(STEP)
        (run / "latest.new").rename(run / "latest")
        self.wait_for(path, oracle.from_deepspeed(run, False))
