"""Replaces `consolidate_safetensors_files` of torch.distributed.checkpoint and of NeMo AutoModel.

In code that imports the function from torch or NeMo, import it from this file instead:

    from consolidate_safetensors_files import consolidate_safetensors_files

Run: `python examples/consolidate_safetensors_files.py SHARDS OUT [MAPPING.json]`
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping

import tensorfs

logger = logging.getLogger(__name__)

# The dtypes between which tensors are cast, with their names in torch and in safetensors.
FLOATS = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float64": "F64"}


def consolidate_safetensors_files(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int] | None = None,
    num_threads: int = 1,
    use_staging: bool = False,
    staging_dir: str | None = None,
    cast_dtype: object = None,
    fqn_to_dtype_mapping: Mapping[str, str] | None = None,
    *,
    ignore_missing: bool = False,
) -> None:
    """Writes the shards in `input_dir` as `model-0000I-of-0000N.safetensors` with a weight map into `output_dir`.

    Without a mapping all tensors go into one file. `cast_dtype` and `fqn_to_dtype_mapping` cast as in NeMo, but nothing
    is cast to F64. `ignore_missing` leaves out names of the mapping that are in no shard, with a warning, as NeMo does.
    Without it such names are an error, because a shard may be missing.

    `num_threads`, `use_staging` and `staging_dir` have no effect. They exist so that callers need not change: tensorfs
    chooses its number of threads, and a file gets its name once it is whole.
    """
    del num_threads, use_staging, staging_dir
    with tensorfs.safe_open(input_dir, framework="np") as opened:
        dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}
    numbers = dict.fromkeys(dtypes, 1) if fqn_to_index_mapping is None else dict(fqn_to_index_mapping)
    missing = sorted(numbers.keys() - dtypes.keys())
    if ignore_missing and missing:
        logger.warning("%s: %d names of the mapping are in no shard, as %s", input_dir, len(missing), missing[0])
        numbers = {name: number for name, number in numbers.items() if name in dtypes}
    casts = _casts(dtypes, cast_dtype, fqn_to_dtype_mapping or {})
    # `tensorfs.consolidate` takes a list of casts as a file.
    with tempfile.TemporaryDirectory(prefix="tensorfs-") as folder:
        list_of_casts = os.path.join(folder, "dtypes.json")
        with open(list_of_casts, "w") as file:
            json.dump(casts, file)
        dtype = f"map={list_of_casts}" if casts else None
        tensorfs.consolidate(input_dir, output_dir, numbers=numbers, dtype=dtype, overwrite=True)


def _casts(dtypes: Mapping[str, str], cast_dtype: object, listed: Mapping[str, str]) -> dict[str, str]:
    """The new dtype of each tensor that is cast. As in NeMo, `cast_dtype` takes precedence over `listed`, except where
    that says F32."""
    if cast_dtype is not None and str(cast_dtype) not in FLOATS:
        raise ValueError(f"cast_dtype={cast_dtype}: expected one of {', '.join(FLOATS)}")
    casts = {}
    for name, dtype in dtypes.items():
        target = listed.get(name)
        if cast_dtype is not None and target != "F32":
            target = FLOATS[str(cast_dtype)]
        if dtype not in FLOATS.values() or target in (None, dtype):
            continue
        if target in FLOATS.values():
            casts[name] = target
        else:
            logger.warning("tensor %s: stays %s, because it cannot be cast to %s", name, dtype, target)
    return casts


def consolidate_safetensors_files_on_every_rank(
    input_dir: str,
    output_dir: str,
    fqn_to_index_mapping: Mapping[str, int],
    num_threads: int = 1,
    process_group: object = None,
    *args: object,
    **kwargs: object,
) -> None:
    """Like `consolidate_safetensors_files`, called by every rank: the first rank writes, and the others wait for it.

    If the first rank fails, all ranks raise its error. Without a process group the caller writes.
    """
    from torch import distributed as dist

    def write() -> None:
        consolidate_safetensors_files(input_dir, output_dir, fqn_to_index_mapping, num_threads, *args, **kwargs)

    if not (dist.is_available() and dist.is_initialized()):
        return write()
    failure: list[object] = [None]
    if dist.get_rank(process_group) == 0:
        try:
            write()
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
