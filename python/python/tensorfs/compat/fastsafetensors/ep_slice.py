"""Filters for the experts that a rank of an expert-parallel group holds."""

from __future__ import annotations

import os
import re
import sys
from typing import Callable, Pattern

DEFAULT_EXPERT_PATTERN: Pattern[str] = re.compile(r"\.experts\.(\d+)\.")
"""Finds the number of the expert in the name of a tensor."""


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The consecutive experts of a rank, as first expert and end. If the experts do not divide evenly, each of the
    first ranks has one expert more."""
    if ep_size <= 0:
        raise ValueError(f"ep_size={ep_size}: expected a number from 1 on")
    if not 0 <= ep_rank < ep_size:
        raise ValueError(f"ep_rank={ep_rank}: expected a number from 0 to {ep_size - 1}")
    each, more = divmod(num_experts, ep_size)
    first = ep_rank * each + min(ep_rank, more)
    return first, first + each + (ep_rank < more)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """A filter that keeps the tensors of the experts of a rank, and all tensors that belong to no expert."""
    first, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or first <= int(found.group(1)) < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """The filter that FASTSAFETENSORS_EP_SLICE=1, FASTSAFETENSORS_EP_NUM_EXPERTS, FASTSAFETENSORS_EP_SIZE and
    FASTSAFETENSORS_EP_RANK configure. Without the last two variables, size and rank are those of the default group of
    torch, or else WORLD_SIZE and RANK. None if there is only one rank, or if the number of experts is not set."""
    experts = int(os.environ.get("FASTSAFETENSORS_EP_NUM_EXPERTS", "0"))
    if os.environ.get("FASTSAFETENSORS_EP_SLICE", "0") != "1" or experts <= 0:
        return None
    size = int(os.environ.get("FASTSAFETENSORS_EP_SIZE", "0"))
    rank = int(os.environ.get("FASTSAFETENSORS_EP_RANK", "-1"))
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        size = size if size > 0 else distributed.get_world_size()
        rank = rank if rank >= 0 else distributed.get_rank()
    size = size if size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
    return expert_parallel_filter(experts, size, rank) if size > 1 else None
