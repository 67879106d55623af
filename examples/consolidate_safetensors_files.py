"""A drop-in for `consolidate_safetensors_files` of torch.distributed.checkpoint and of NeMo AutoModel.

In code that imports it from torch, put this instead:

    from consolidate_safetensors_files import consolidate_safetensors_files

Run: `python examples/consolidate_safetensors_files.py SHARDS OUT [MAPPING.json]`
"""

from __future__ import annotations

import json
import sys

import tensorfs


def consolidate_safetensors_files(
    input_dir: str, output_dir: str, fqn_to_index_mapping: dict[str, int] | None = None, num_threads: int = 1
) -> None:
    """Writes the shards in `input_dir` as `model-0000I-of-0000N.safetensors` with a weight map into `output_dir`.

    Without a mapping all tensors go into one file. `num_threads` is taken for its callers; tensorfs decides itself.
    """
    del num_threads
    if fqn_to_index_mapping is None:
        with tensorfs.safe_open(input_dir, framework="np") as opened:
            fqn_to_index_mapping = dict.fromkeys(opened.keys(), 1)
    tensorfs.consolidate(input_dir, output_dir, numbers=fqn_to_index_mapping, overwrite=True)


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: dict[str, int],
    num_threads: int = 1,
    process_group: object = None,
) -> None:
    """Like `consolidate_safetensors_files`, called by every rank: the first rank writes, and the others wait for it."""
    from torch import distributed as dist

    failure: list[object] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads)
        except Exception as error:
            failure = [error]
    first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
    dist.broadcast_object_list(failure, src=first, group=process_group)
    if failure[0] is not None:
        raise failure[0]


if __name__ == "__main__":
    if not 3 <= len(sys.argv) <= 4:
        sys.exit(f"usage: {sys.argv[0]} SHARDS OUT [MAPPING.json]")
    mapping = None
    if len(sys.argv) == 4:
        with open(sys.argv[3]) as file:
            mapping = json.load(file)
    consolidate_safetensors_files(sys.argv[1], sys.argv[2], mapping)
