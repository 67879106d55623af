"""One rank of a tensor-parallel group of vLLM. It makes a model, and loads it with each of several configurations.

Usage: vllm_rank.py RANK MODEL SIZE INIT_METHOD CONFIGS. Prints the hash of each parameter, the length of all
parameters, and the number of bytes that were read.
"""

import hashlib
import json
import sys

import torch
from recorded import Recorded
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.torch_utils import set_default_torch_dtype


def hashed(tensor):
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def load(vllm_config, load_format, extra):
    vllm_config.load_config.load_format = load_format
    vllm_config.load_config.model_loader_extra_config = extra
    vllm_config.load_config.use_tqdm_on_load = False
    vllm_config.compilation_config.static_forward_context.clear()
    loader = get_model_loader(vllm_config.load_config)
    model_config = vllm_config.model_config
    with set_default_torch_dtype(model_config.dtype):
        model = loader.create_model(vllm_config, model_config)
        for parameter in model.parameters():
            parameter.data.zero_()
        with Recorded() as recorded:
            loader.load_weights(model, model_config)
    parameters = dict(model.named_parameters())
    return {
        "loader": type(loader).__name__,
        "parameters": {name: hashed(made) for name, made in parameters.items()},
        "own": sum(made.nbytes for made in parameters.values()),
        **recorded.answer(),
    }


def main():
    rank, model, size, init_method, configs = sys.argv[1:]
    rank, size = int(rank), int(size)
    args = EngineArgs(
        model=model,
        load_format="tensorfs",
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else None,
        enforce_eager=True,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(size, rank, init_method, rank, backend="gloo")
        initialize_model_parallel(size)
        answers = [load(vllm_config, load_format, extra) for load_format, extra in json.loads(configs)]
    print("ANSWER", json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
