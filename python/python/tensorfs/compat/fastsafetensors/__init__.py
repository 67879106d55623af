"""Loads safetensors files with the names and arguments of the fastsafetensors package.

    from tensorfs.compat.fastsafetensors import ParallelLoader, SingleGroup

    loader = ParallelLoader(SingleGroup(), files, device="cuda:0")
    for name, tensor in loader.iterate_weights():
        ...
    loader.close()

The modules `common`, `loader`, `file_buffer`, `parallel_loader`, `auto_loader`, `config`, `ep_slice`, `frameworks` and
`st_types` have the same names as the modules of that package.
"""

from .auto_loader import AutoLoader
from .common import SafeTensorsMetadata, SingleGroup, TensorFrame
from .config import LoaderConfig, load_config
from .ep_slice import expert_parallel_filter, expert_parallel_filter_from_env, owned_expert_range
from .file_buffer import FilesBufferOnDevice
from .loader import SafeTensorsFileLoader, fastsafe_open
from .parallel_loader import BudgetInfeasibleError, ParallelLoader

__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "load_config",
    "owned_expert_range",
]
