#!/usr/bin/env python3
"""Times `from_pretrained` with and without `tensorfs.patched()`, `load_file`, and a loop of `get_tensor`, in turns.

    python tests/bench/patched.py --dir /scratch

Needs torch, transformers and tensorfs (`pip install ./python`). The models `accelerate`, `diffusers` and `peft` also
need the packages of these names, and load with them in place of `AutoModel.from_pretrained`. Each run is a process of
its own. The time with the touch includes a read of one byte in every page after the load, because mapped tensors are
read only then. Processor time and page faults include the touch too. The sums of all bytes are compared. With `cached`,
all files are in the page cache. With `cold` none are, and with `half` every other tensor is. With `touched`, the free
memory was in use a moment ago. With `untouched` it was not in use for a while, so that its first use is slower on
virtual machines.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import time
import traceback
from pathlib import Path

import loaders


def expert_shapes(layers, experts, hidden, inner):
    """Names and shapes of a mixture of experts like Mixtral."""
    shapes = {"model.embed_tokens.weight": [4096, hidden], "model.norm.weight": [hidden], "lm_head.weight": [4096, hidden]}
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name in ("q", "k", "v", "o"):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = [hidden, hidden]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = [hidden]
        shapes[f"{layer}.block_sparse_moe.gate.weight"] = [experts, hidden]
        for expert in range(experts):
            for name, shape in (("w1", [inner, hidden]), ("w2", [hidden, inner]), ("w3", [inner, hidden])):
                shapes[f"{layer}.block_sparse_moe.experts.{expert}.{name}.weight"] = shape
    return shapes


def make_experts(folder, layers, experts, hidden, inner):
    loaders.make_shards(folder, expert_shapes(layers, experts, hidden, inner), 4)
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_attention_heads": max(hidden // 64, 1),
        "num_key_value_heads": max(hidden // 64, 1),
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_llama(folder, size):
    loaders.make_shards(folder, loaders.llama_shapes(size), 4)
    made = loaders.model_folder(folder)
    (made / "config.json").rename(folder / "config.json")


def make_unet(folder, size):
    """A UNet of diffusers of 1.7 GB."""
    import torch
    from diffusers import UNet2DConditionModel

    unet = UNet2DConditionModel(block_out_channels=(320, 640, 1280, 1280), cross_attention_dim=768)
    unet.to(torch.bfloat16).save_pretrained(folder)


def base_of_adapter():
    import torch
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16, "num_attention_heads": 16}
    with torch.device("meta"):
        return LlamaModel(LlamaConfig(vocab_size=4096, num_key_value_heads=16, **sizes)).to(torch.bfloat16)


def make_adapter(folder, size):
    """An adapter of peft of 1.1 GB, of rank 512."""
    import torch
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base_of_adapter().to_empty(device="cpu"), LoraConfig(r=512, target_modules=targets))
    model.to(torch.bfloat16).save_pretrained(folder)


def by_transformers(folder):
    import torch
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(folder), dtype=torch.bfloat16)


def by_accelerate(folder):
    import torch
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)), dtype=torch.bfloat16)
    model.tie_weights()
    model.model.norm.to_empty(device="cpu").weight.data.fill_(1)  # which the files lack
    return load_checkpoint_and_dispatch(model, str(folder), device_map={"": "cpu"}, dtype=torch.bfloat16)


def by_diffusers(folder):
    import torch
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(str(folder), torch_dtype=torch.bfloat16, low_cpu_mem_usage=True)


def by_peft(folder):
    from peft import PeftModel

    model = PeftModel.from_pretrained(base_of_adapter().to_empty(device="cpu"), str(folder), low_cpu_mem_usage=True)
    return {name: tensor for name, tensor in model.named_parameters() if "lora" in name}


# Name of a model -> its folder, the function that makes it, and the function that loads it. `experts` has 5,000 tensors
# of 0.5 MiB, and `tiny` has 60,000 tensors of 4 KiB.
MODELS = {
    "llama": ("llama", make_llama, by_transformers),
    "experts": ("experts", lambda folder, size: make_experts(folder, 16, 102, 1024, 256), by_transformers),
    "tiny": ("tiny", lambda folder, size: make_experts(folder, 10, 2000, 64, 32), by_transformers),
    "accelerate": ("llama", make_llama, by_accelerate),
    "diffusers": ("diffusers", make_unet, by_diffusers),
    "peft": ("peft", make_adapter, by_peft),
}


def program(block):
    def load(folder, by_program):
        import tensorfs

        with block(tensorfs):
            model = by_program(folder)
        return model if isinstance(model, dict) else dict(model.named_parameters())

    return load


def load_file(folder, _):
    import tensorfs

    return tensorfs.load_file(str(folder))


def loop(folder, _):
    import tensorfs

    with tensorfs.safe_open(str(folder), "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


WAYS = {
    "load_file": load_file,
    "loop of get_tensor": loop,
    "plain": program(lambda tensorfs: contextlib.nullcontext()),
    "patched()": program(lambda tensorfs: tensorfs.patched()),
    "patched(copy=True)": program(lambda tensorfs: tensorfs.patched(copy=True)),
    "patched(copy=False)": program(lambda tensorfs: tensorfs.patched(copy=False)),
}


def import_all():
    """Imports the packages that the runs need. This takes longer than most runs, and does not count."""
    import torch
    import transformers.core_model_loading
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral

    import tensorfs

    transformers.utils.logging.disable_progress_bar()


def one_run(task):
    import_all()
    import torch
    import transformers

    transformers.core_model_loading.GLOBAL_WORKERS = task["workers"]
    folder = Path(task["folder"])
    length = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if task["memory"] == "untouched":
        time.sleep(loaders.UNTOUCHED_SECONDS)
    elif length > loaders.TOUCH_MIN:
        loaders.touch_memory(2e9 + 2 * length)
    before, read_before = resource.getrusage(resource.RUSAGE_SELF), loaders.bytes_read()
    start = time.perf_counter()
    tensors = WAYS[task["way"]](folder, MODELS[task["model"]][2])
    loaded = time.perf_counter()
    for tensor in tensors.values():
        tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum()
    touched = time.perf_counter()
    after = resource.getrusage(resource.RUSAGE_SELF)
    facts = {
        "load": loaded - start,
        "touch": touched - loaded,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "faults": after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt,
        "read": loaders.bytes_read() - read_before,
        "sum": loaders.total_of({name: tensor.detach() for name, tensor in tensors.items()}),
    }
    return facts


def prepare(folder, state):
    """Brings the files into the page cache, or out of it."""
    if state == "cached":
        return loaders.warm(folder)
    os.sync()
    for path in folder.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if state == "half":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                start = int.from_bytes(file.read(8), "little") + 8
                entries = [entry for name, entry in loaders.header_of(path).items() if name != "__metadata__"]
                for first, end in [entry["data_offsets"] for entry in entries][::2]:
                    file.seek(start + first)
                    file.read(end - first)


def in_child(work, *arguments):
    """Runs `work` in a process of its own, and returns its result. The parent must not import large packages: the child
    would share their memory, and each access to an object would copy a page."""
    output, input = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(input, "w") as pipe:
                json.dump(work(*arguments), pipe)
            status = 0
        finally:
            traceback.print_exc() if status else None
            os._exit(status)
    os.close(input)
    with os.fdopen(output) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{work.__name__}{arguments} failed")
    return json.loads(text)


def spread(values, form):
    middle = statistics.median(values)
    return f"{middle:{form}} ({min(values):{form}} to {max(values):{form}})"


def table(results):
    plain = results.get("plain")
    total = lambda run: run["load"] + run["touch"]
    lines = ["| way | s | with touch | of plain | user + sys, s | page faults | MB read |", "|---|---|---|---|---|---|---|"]
    for way, runs in results.items():
        median = statistics.median(map(total, runs))
        share = f"{median / statistics.median(map(total, plain)):.2f}" if plain and "patched" in way else ""
        cells = [way, spread([run["load"] for run in runs], ".2f"), spread([total(run) for run in runs], ".2f"), share]
        cells += [spread([run["cpu"] for run in runs], ".1f"), f"{statistics.median(run['faults'] for run in runs):,.0f}"]
        cells += [f"{statistics.median(run['read'] for run in runs) / 1e6:,.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="folder for the models; kept and used again where it has them")
    parser.add_argument("--size", type=float, default=4.5e9, help="bytes of the llama (default 4.5e9)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--models", default="llama,experts,tiny", help=f"of {','.join(MODELS)}")
    parser.add_argument("--states", default="cached,cold", help="of cached,cold,half")
    parser.add_argument("--memory", default="touched,untouched")
    parser.add_argument("--workers", default="2,4", help="loader threads of transformers")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by ;")
    parser.add_argument("--json", help="file for every single run")
    options = parser.parse_args()
    if not options.dir:
        parser.error("--dir is missing")
    ways, everything = options.ways.split(";"), {}
    for model in options.models.split(","):
        name, make, _ = MODELS[model]
        folder, sums = Path(options.dir, name), {}
        if not (folder / "made").exists():
            folder.mkdir(parents=True, exist_ok=True)
            in_child(make, folder, options.size)
            (folder / "made").touch()
        for case in [
            (state, memory, int(workers))
            for state in options.states.split(",")
            for memory in options.memory.split(",")
            for workers in options.workers.split(",")
        ]:
            results = {way: [] for way in ways}
            for number in range(options.runs):
                for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                    prepare(folder, case[0])
                    task = {"folder": str(folder), "model": model, "way": way, "memory": case[1], "workers": case[2]}
                    run = in_child(one_run, task)
                    results[way].append(run)
                    is_whole = way in ("load_file", "loop of get_tensor")
                    if sums.setdefault(is_whole, run["sum"]) != run["sum"]:
                        raise SystemExit(f"{task}: other bytes than the runs before")
                    print(f"{model} {case} {way}: {json.dumps(run)}", file=sys.stderr)
            print(f"\n{model}, {case[0]}, memory {case[1]}, {case[2]} loader threads\n\n{table(results)}", flush=True)
            everything[f"{model} {case}"] = results
            if options.json:
                Path(options.json).write_text(json.dumps(everything, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
