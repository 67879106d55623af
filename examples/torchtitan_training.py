"""Loads the checkpoints of a torchtitan training through a tensorfs mount with plain transformers.

Four processes train a small Qwen3 of torchtitan for two steps with FSDP2. The checkpoint manager of torchtitan saves a
checkpoint after each step: `step-1` with optimizer and scheduler, and `step-2`, the last one, with the weights only.
The example mounts both with the names of transformers, which `torchtitan_qwen3.toml` gives, and the `config.json` of
another folder. `from_pretrained` reads the mounts with its default settings. The example compares every weight, bit for
bit, with the model that was trained. It removes the mounts, then all files that it made.

Run:   python examples/torchtitan_training.py [--tensorfs PATH]
Needs: Linux with FUSE, the `tensorfs` binary, and `pip install torch transformers torchtitan`.
       No network, no GPU.
"""

import tempfile
from pathlib import Path

# This import comes first, because it sets a variable that transformers reads when it is imported.
from transformers_mount import check_weights, mounted, parse_args, show

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, qwen3_configs
from transformers import Qwen3Config, Qwen3ForCausalLM

RANKS = 4
STEPS = 2
LAYERS = 2
RULES = Path(__file__).with_name("torchtitan_qwen3.toml")


def small_config():
    """The config of torchtitan's small Qwen3, with fewer layers and an attention that runs on a CPU."""
    config = qwen3_configs["debugmodel"]("flex")
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def transformers_model(config, weights):
    """The model in transformers, with these weights after the conversion that torchtitan itself has."""
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=feed_forward.w1.out_features,
        num_hidden_layers=len(config.layers),
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        max_position_embeddings=attention.rope.max_seq_len,
        tie_word_embeddings=config.enable_weight_tying,
        dtype=torch.float32,
    ))
    named = Qwen3StateDictAdapter(config, None).to_hf(weights)
    if config.enable_weight_tying:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]
    model.load_state_dict(named)
    return model


def train_rank(rank, folder, rendezvous):
    """Trains and saves the part of one rank. Runs in a separate process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (RANKS,))
        torch.manual_seed(0)
        model = small_config().build()
        model.init_states()
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
        optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(model_parts=[model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=STEPS)
        manager = CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
            dataloader=None, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
            states={}, sd_adapter=None, base_folder=folder,
        )
        torch.manual_seed(rank)
        for step in range(1, STEPS + 1):
            tokens = torch.randint(model.config.vocab_size, (2, 16))
            logits = model(tokens)
            torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            manager.save(step, last_step=step == STEPS)
            # All ranks call this, because it gathers the parts of all ranks.
            full = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            if rank == 0:
                torch.save(full, Path(folder, f"whole-{step}.pt"))
        manager.close()
    finally:
        dist.destroy_process_group()


def main():
    args = parse_args(__doc__.splitlines()[0])
    with tempfile.TemporaryDirectory(prefix="tensorfs-example-") as work:
        mp.spawn(train_rank, args=(work, str(Path(work, "rendezvous"))), nprocs=RANKS)
        for step in range(1, STEPS + 1):
            saved = Path(work, "checkpoint", f"step-{step}")
            model = transformers_model(small_config(), torch.load(Path(work, f"whole-{step}.pt")))
            # torchtitan saves no `config.json`. The mount shows the one of the folder in its option `config`.
            base = Path(work, "base")
            model.config.save_pretrained(base)
            show("saved", saved)
            with mounted(args.tensorfs, saved, Path(work, f"mnt-{step}"), f"rename={RULES}", f"config={base}") as mount:
                show("mounted", mount)
                check_weights(model, mount)


if __name__ == "__main__":
    main()
