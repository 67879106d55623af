"""A weight loader for TensorRT-LLM. Importing it needs TensorRT-LLM.

    LLM(model=folder, checkpoint_loader=HfCheckpointLoader(weight_loader=TensorfsWeightLoader()))
"""

from __future__ import annotations

import os
from typing import Any

from tensorrt_llm._torch.models.checkpoints import base_weight_loader

from ._options import options_of_weight_loader
from ._weights import weights_by_name

# Old versions of TensorRT-LLM take a plain dict.
_Weights: Any = getattr(base_weight_loader, "ConsumableWeightsDict", dict)


class TensorfsWeightLoader(base_weight_loader.BaseWeightLoader):  # type: ignore[misc]
    """Loads the weights with tensorfs. A tensor is read when the model uses it, and only the part that the model uses.
    So each rank reads only its own layers, experts and parts of tensors, for every mapping of the ranks. The arguments
    are the options of the load format. With `lazy=False`, tensors are views of mapped files."""

    def __init__(self, **options: Any) -> None:
        self.options = options_of_weight_loader(options)
        self._model: str | None = None

    def load_weights(
        self, checkpoint_dir: str, mapping: Any = None, use_consolidated: bool = False, **_: Any
    ) -> dict[str, Any]:
        """All tensors of a folder by name. TensorRT-LLM calls this method for the model, and then for its draft
        model."""
        folder = os.fspath(checkpoint_dir)
        if self._model is None:
            self._model = folder
        is_model = folder == self._model
        path = self.options.path if is_model else None
        source = _files_in(folder, use_consolidated) if path is None else path
        found: dict[str, Any] = _Weights(weights_by_name(source, self.options, is_model=is_model))
        return found

    def cleanup(self) -> None:
        """Forgets the model: the next call of `load_weights` is for a model, not for a draft model. Tensors that are
        still used stay valid."""
        self._model = None


def _files_in(folder: str, use_consolidated: bool) -> Any:
    """The files of a folder that TensorRT-LLM would choose, or the folder if it has no safetensors files."""
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    # Some repositories have the weights twice: once in files whose names contain "consolidated".
    chosen = [name for name in files if ("consolidated" in name) == use_consolidated] or files
    return [os.path.join(folder, name) for name in chosen] or folder
