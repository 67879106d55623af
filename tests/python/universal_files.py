"""Writes universal checkpoints of DeepSpeed like `ds_to_universal`, but without DeepSpeed."""

import collections

import numpy as np

import torch_files
from torch_files import Object, Tensor

# The states of the optimizer that each tensor has beside its weights.
STATES = ("exp_avg", "exp_avg_sq")


def tensor(array):
    return Tensor(np.ascontiguousarray(array).reshape(-1), np.shape(array))


def shapes_of(arrays):
    return collections.OrderedDict((name, Object("torch", "Size", args=(tuple(np.shape(a)),))) for name, a in arrays.items())


def model_states(weights, module, slices=1, ranks=2, frozen=None, fragments=None, shared=None):
    """The content of a file of model states. `module` has the tensors of the model, and `weights` those that are
    trained."""
    return {
        "module": collections.OrderedDict((name, tensor(array)) for name, array in module.items()),
        "param_shapes": [shapes_of(weights)], "frozen_param_shapes": shapes_of(frozen or {}),
        "frozen_param_fragments": collections.OrderedDict((n, tensor(a)) for n, a in (fragments or {}).items()),
        "shared_params": shared or {}, "dp_world_size": ranks, "mp_world_size": slices, "ds_version": "0.19.8",
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def save_tensor(folder, name, state, array, flat=False, **marks):
    place = folder / "zero" / name
    place.mkdir(parents=True, exist_ok=True)
    # The older form of ZeRO-3 has only the elements, without marks.
    root = Tensor(np.ascontiguousarray(array).reshape(-1)) if flat else {**marks, "param": tensor(array)}
    torch_files.save(place / f"{state}.pt", root)


def save_tensors(folder, weights, flat=False, marks=None):
    """Writes the weights and their states. Returns all of them by the names that `state=all` shows."""
    every = {}
    for name, array in weights.items():
        every[name] = array
        save_tensor(folder, name, "fp32", array, flat, **(marks or {}).get(name, {"cat_dim": 0}))
        for number, state in enumerate(STATES):
            every[f"{name}.{state}"] = array + number + 1
            save_tensor(folder, name, state, array + number + 1, flat, **(marks or {}).get(name, {"cat_dim": 0}))
        torch_files.save(folder / "zero" / name / "step.pt", 7)
    torch_files.save(folder / "zero/optimizer_state.pt", {"param_groups": [{"lr": 0.1}], "zero_stage": 2})
    return every


def some_weights(seed=1, rows=11):
    rng = np.random.default_rng(seed)
    shapes = {"embed.weight": (rows, 7), "conv.weight": (3, 2, 3, 5), "scale": (), "norm.bias": (5,), "row": (1, 13)}
    return {name: rng.random(shape, np.float32) for name, shape in shapes.items()}


def write_rank_states(folder, weights, frozen, shared, ranks=2, slices=1):
    """Writes the model states of the ranks of ZeRO-3. Each rank has a part of the tensors that are not trained."""
    empty = np.zeros(0, np.float32)
    module = {"buffer": np.arange(4, dtype=np.float32), **{name: empty for name in (*frozen, *weights, *shared)}}
    for rank in range(ranks):
        parts = {name: array.reshape(ranks, -1)[rank] for name, array in frozen.items()}
        states = model_states(weights, module, slices, ranks, frozen, parts, shared)
        torch_files.save(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", states)


def write_universal(run, stage=2, name="global_step4_universal", ranks=2):
    """Writes a universal checkpoint of one tensor-parallel rank. Returns the tensors of its model."""
    folder, weights = run / name, some_weights()
    folder.mkdir(parents=True)
    buffer = np.arange(4, dtype=np.float32)
    still = np.random.default_rng(9).random((3, 4), np.float32)
    frozen, module = {"still": still}, {"buffer": buffer, "still": still, **weights, "head": weights["embed.weight"]}
    shared = {"head": "embed.weight"}
    if stage == 3:
        write_rank_states(folder, weights, frozen, shared, ranks)
    else:
        states = model_states(weights, module, 1, ranks, frozen, frozen, shared)
        torch_files.save(folder / "mp_rank_00_model_states.pt", states)
    save_tensors(folder, weights, flat=stage == 3)
    (run / "latest_universal").write_text(name)
    return {**weights, "head": weights["embed.weight"], "buffer": buffer, "still": still}
