"""One of three ranks: loads with the group that `load_group` names, which is all ranks, the first two, or none.

Usage: sglang_rank.py RANK MODEL INIT_METHOD. Prints how many ranks loaded together.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.model_loader import get_model_loader, loader, weight_utils  # noqa: E402

import families  # noqa: E402
from tensorfs.engines import _sglang_loader  # noqa: E402


def coordinator(ranks):
    """A replacement for a group of SGLang, with the parts that a loader uses."""
    group = torch.distributed.new_group(ranks, backend="gloo")
    return SimpleNamespace(world_size=len(ranks), cpu_group=group, device_group=group)


def main():
    rank, folder, init_method = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    torch.distributed.init_process_group("gloo", init_method=init_method, rank=rank, world_size=3)
    world, pair, alone = (coordinator(ranks) for ranks in ([0, 1, 2], [0, 1], [2]))
    files = [str(file) for file in sorted(Path(folder).glob("model*.safetensors"))]
    right = list(weight_utils.safetensors_weights_iterator(files))
    sizes = {}
    opened = _sglang_loader.weights

    def counted(*args, process_group=None, **how):
        sizes[word] = 1 if process_group is None else process_group.size()
        return opened(*args, process_group=process_group, **how)

    parallel = SimpleNamespace(world_group=world, tp_size=1, tp_rank=0)
    with (
        mock.patch.object(_sglang_loader, "weights", counted),
        mock.patch.object(_sglang_loader, "get_parallel", lambda: parallel),
        mock.patch.object(loader, "get_server_args", lambda: None),
    ):
        for word, how in (
            ("world", {}),
            ("pair", {"load_group": pair if rank < 2 else alone}),
            ("none", {"load_group": None}),
        ):
            made = get_model_loader(LoadConfig(load_format="tensorfs", **how))
            found = made._get_weights_iterator(loader.DefaultModelLoader.Source(folder, None))
            differing = families.differences(found, right)
            assert not differing, differing
    print("ANSWER", json.dumps(sizes), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
