"""The model loader for vLLM. Importing it needs vLLM."""

from __future__ import annotations

import os
import time
from typing import Any, Iterator

from vllm.config import get_current_vllm_config_or_none
from vllm.config.load import LoadConfig
from vllm.config.utils import replace
from vllm.distributed import parallel_state
from vllm.logger import init_logger
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.platforms import current_platform

from ._options import options_of
from ._weights import device_of, group_of, sorted_files, weights

# The name begins with `vllm`, so that the logging settings of vLLM apply.
logger = init_logger("vllm.tensorfs")

_ENGINE_WORDS = ("enable_weights_track",)
"""Options that vLLM's own loader handles."""


class TensorfsModelLoader(DefaultModelLoader):
    """Loads the weights with tensorfs. vLLM decides which files belong to a model, and which weights a rank skips, as
    it does for its own format `safetensors`."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.options, of_engine = options_of(load_config.model_loader_extra_config, _ENGINE_WORDS)
        super().__init__(replace(load_config, load_format="safetensors", model_loader_extra_config=of_engine))
        if load_config.safetensors_load_strategy not in (None, "torchao"):
            logger.warning("load format tensorfs: safetensors_load_strategy has no effect")
        # The model that is being loaded, if `path` replaces its checkpoint.
        self._replaced: str | None = None

    def download_model(self, model_config: Any) -> None:
        if self._path_of(model_config) is None and not os.path.isdir(model_config.model):
            super().download_model(model_config)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        self._replaced = None if self._path_of(model_config) is None else model_config.model
        weights_of_model: Iterator[tuple[str, Any]] = super().get_all_weights(model_config, model)
        return weights_of_model

    def _path_of(self, model_config: Any) -> str | None:
        """The option `path`. None for a draft model, which has weights of its own, and for other weights that a running
        engine is told to load."""
        vllm_config = get_current_vllm_config_or_none()
        speculative = getattr(vllm_config, "speculative_config", None)
        target = getattr(speculative, "target_model_config", None)
        is_draft = target is not None and target.model != model_config.model
        # When vLLM loads other weights, it changes the name of the model in its configuration.
        first = vars(model_config).setdefault("_tensorfs_first", model_config.model)
        return None if is_draft or first != model_config.model else self.options.path

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        if self.load_config.safetensors_load_strategy == "torchao":
            # vLLM itself joins the tensors of such a checkpoint, by the metadata of each file.
            logger.warning("load format tensorfs: vLLM itself loads checkpoints of torchao")
            return super()._get_weights_iterator(source)
        if self.counter_before_loading_weights == 0.0:
            self.counter_before_loading_weights = time.perf_counter()
        return self._iterate(source)

    def _iterate(self, source: Any) -> Iterator[tuple[str, Any]]:
        replaced = self.options.path if source.model_or_path == self._replaced else None
        if replaced is None:
            found: Any = self._files_of(source)
        else:
            found = replaced if source.subfolder is None else f"{replaced.rstrip('/')}/{source.subfolder}"

        def wanted(name: str) -> bool:
            # vLLM leaves out files that have only unused weights. It does not choose the files of `path`, so unused
            # weights are left out here.
            is_unused = replaced is not None and source.is_unused_weight is not None and source.is_unused_weight(name)
            return not is_unused and not should_skip_weight(name, self.local_expert_ids)

        pairs = weights(
            found,
            self._device(),
            self.options,
            is_model=source.subfolder is None and not source.prefix,
            wanted=wanted,
            process_group=self._group(),
            bar=_bar if weight_utils.enable_tqdm(self.load_config.use_tqdm_on_load) else None,
        )
        for name, tensor in pairs:
            yield source.prefix + name, tensor

    def _files_of(self, source: Any) -> Any:
        """The files of a source that vLLM chooses, or the folder of the source if it has no safetensors files."""
        folder = source.model_or_path if source.subfolder is None else os.path.join(source.model_or_path, source.subfolder)
        if source.allow_patterns_overrides is None and os.path.isdir(folder) and not _has_safetensors(folder):
            return folder
        folder, files, _, index = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if self._encoder_only_lm_prefixes is not None:
            files = weight_utils.filter_mm_encoder_only_safetensors_files(
                files,
                folder,
                index,
                self._encoder_only_lm_prefixes,
                weights_mapper=self._encoder_only_weights_mapper,
            )
            if not files:
                raise RuntimeError(f"`{source.model_or_path}` has no file with weights of the encoder (mm-encoder-only)")
        if source.is_unused_weight is not None:
            files = weight_utils.filter_safetensors_files_by_weight_name(files, source.is_unused_weight)
        return sorted_files(files)

    def _device(self) -> str:
        vllm_config = get_current_vllm_config_or_none()
        engrams = getattr(vllm_config, "engram_config", None)
        # With `cpu_offload`, a table of engrams may be larger than the memory of the GPU.
        on_cpu = not current_platform.is_cuda() or (engrams is not None and engrams.cpu_offload)
        return device_of("cpu" if on_cpu else self.load_config.device)

    def _group(self) -> Any:
        """The group of the ranks that load the same model at the same time. It has only the ranks of one stage of a
        pipeline, because only one stage loads the draft model."""
        return group_of(parallel_state._TP) if self.options.process_group else None


def _has_safetensors(folder: str) -> bool:
    return any(name.endswith(".safetensors") for name in os.listdir(folder))


def _bar(total: int) -> Any:
    return weight_utils.tqdm(total=total, desc="Loading weights with tensorfs", unit="B", unit_scale=True, unit_divisor=1024)
