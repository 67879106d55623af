"""The model loader for SGLang. Importing it needs SGLang."""

from __future__ import annotations

import copy
import functools
import os
import time
from typing import Any, Callable, Iterator

import torch
from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_parallel
from tqdm.auto import tqdm

from ._options import Options, options_of
from ._weights import device_of, group_of, sorted_files, weights


def loader_for(original: Callable[..., Any], load_config: Any, model_config: Any) -> Any:
    """A loader that gets its weights from tensorfs. Its class is derived from the class that SGLang chooses for the
    format `safetensors`."""
    options, _ = options_of(load_config.model_loader_extra_config)
    plain = copy.copy(load_config)
    plain.load_format, plain.model_loader_extra_config = LoadFormat.SAFETENSORS, {}
    chosen = type(original(plain, model_config))
    if not issubclass(chosen, DefaultModelLoader):
        raise ValueError(f"load format tensorfs does not work with {chosen.__name__}, which SGLang needs for this model")
    loader = _class_over(chosen)(plain)
    loader.options, loader.model_path = options, getattr(model_config, "model_path", None)
    return loader


@functools.cache
def _class_over(chosen: type) -> Any:
    return type(f"Tensorfs{chosen.__name__}", (_Weights, chosen), {})


class _Weights(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights with tensorfs. SGLang decides which files belong to a model, as it does for its own format."""

    options: Options
    model_path: str | None
    """The model whose checkpoint the option `path` replaces."""

    def download_model(self, model_config: Any) -> None:
        if self.options.path is None and not os.path.isdir(model_config.model_path):
            super().download_model(model_config)

    def _get_weights_iterator(self, source: Any, *, resolved_source: Any = None, **_: Any) -> Iterator[tuple[str, Any]]:
        pairs = self._iterate(source, resolved_source)
        if self.load_config.draft_model_idx is not None:
            found: Iterator[tuple[str, Any]] = self._filter_mtp_weights(pairs, source.prefix, self.load_config.draft_model_idx)
            return found
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return ((source.prefix + name, tensor) for name, tensor in pairs)

    def _iterate(self, source: Any, resolved_source: Any) -> Iterator[tuple[str, Any]]:
        is_model = not source.prefix and source.model_or_path == self.model_path
        has_own = self.options.path is not None and is_model
        found: Any = self.options.path if has_own else self._files_of(source, resolved_source)
        yield from weights(
            found,
            self._device(),
            self.options,
            is_model=is_model,
            process_group=self._group(),
            bar=_bar if _is_first() else None,
        )

    def _files_of(self, source: Any, resolved_source: Any) -> Any:
        """The files of a source that SGLang chooses, or the folder of the source if it has no safetensors files."""
        if resolved_source is not None:
            return sorted_files(resolved_source.weight_files)
        folder = source.model_or_path
        if source.allow_patterns_overrides is None and os.path.isdir(folder) and not _has_safetensors(folder):
            return folder
        folder, files, _ = self._prepare_weights(
            folder, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
        )
        if source.model_config is not None:
            hf_config = source.model_config.hf_config
            files = maybe_add_mtp_safetensors(files, folder, "model.safetensors.index.json", hf_config)
        # SGLang may give each rank another order, but the ranks of a group have to name the same files in the same
        # order.
        return sorted_files(files)

    def _device(self) -> str:
        return device_of(None if current_platform.device_type == "cuda" else "cpu")

    def _group(self) -> Any:
        """The group of the ranks that load at the same time. SGLang may name it. By default it is the group of all
        ranks."""
        if not self.options.process_group or not torch.distributed.is_initialized():
            return None
        group = self.load_config.load_group
        return group_of(get_parallel().world_group if group is _DEFAULT_LOAD_GROUP else group)


def _has_safetensors(folder: str) -> bool:
    return any(name.endswith(".safetensors") for name in os.listdir(folder))


def _is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _bar(total: int) -> Any:
    return tqdm(total=total, desc="Loading weights with tensorfs", unit="B", unit_scale=True, unit_divisor=1024)
