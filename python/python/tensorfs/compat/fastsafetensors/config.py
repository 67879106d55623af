"""The configuration of `AutoLoader`, from a JSON file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, fields
from typing import Any, Mapping

CONFIG_ENV_VAR = "FASTSAFETENSORS_CONFIG"
"""The environment variable with the path of the configuration file."""
DEFAULT_CONFIG_PATH = "fastsafetensors.json"
"""The configuration file if the environment variable is not set and this file exists."""

_GROUPS = ("parallel", "debug")
_OF_ALL_LOADERS = ("framework", "debug_log", "set_numa", "disable_cache")


@dataclass
class LoaderConfig:
    """The configuration of `AutoLoader`. `set_numa`, `disable_cache` and `debug_log` have no effect."""

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True

    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True

    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None

    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_concurrent_producers != 1:
            raise ValueError(f"max_concurrent_producers={self.max_concurrent_producers}: expected 1")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LoaderConfig:
        """Takes fields from the top level of `data`, and from its objects "parallel" and "debug". Any other object is
        the section of a loader. Unknown fields are ignored."""
        known = {one.name for one in fields(cls) if not one.name.startswith("_")}
        values: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in data.items():
            if isinstance(value, dict) and key not in _GROUPS:
                sections[key] = dict(value)
                continue
            for name, one in value.items() if isinstance(value, dict) else ((key, value),):
                if name in known:
                    values[name] = one
        return cls(**values, _extensions=sections)

    @classmethod
    def from_file(cls, path: str) -> LoaderConfig:
        """The configuration in a JSON file."""
        with open(path, encoding="utf-8") as opened:
            return cls.from_dict(json.load(opened))

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """The section of a loader, without the fields that belong to all loaders."""
        section = self._extensions.get(name, {})
        return {key: value for key, value in section.items() if key not in _OF_ALL_LOADERS}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """The arguments for `PipelineParallel`. Without `use_pipeline` nothing is loaded ahead."""
        names = ["max_batch_bytes", "use_chunk_budget_as_allocation_size", "device_memory_budget"]
        if self.use_pipeline:
            names += ["max_concurrent_producers", "queue_size", "use_tqdm_on_load"]
        found = {name: getattr(self, name) for name in names}
        return found if self.use_pipeline else {"queue_size": -1, **found}


def load_config() -> LoaderConfig:
    """The file that FASTSAFETENSORS_CONFIG names, or `fastsafetensors.json` in the current folder, or the defaults."""
    named = os.environ.get(CONFIG_ENV_VAR)
    if named is not None and not os.path.isfile(named):
        raise FileNotFoundError(f"{CONFIG_ENV_VAR}={named}: no such file")
    path = named if named is not None else DEFAULT_CONFIG_PATH
    return LoaderConfig.from_file(path) if os.path.isfile(path) else LoaderConfig()
