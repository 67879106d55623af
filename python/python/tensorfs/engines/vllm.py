"""The entry point of vLLM: `--load-format tensorfs`."""

from __future__ import annotations

import logging

_LOAD_FORMAT = "tensorfs"


def register() -> None:
    """Adds the load format to vLLM. vLLM calls this function in each of its processes, possibly several times."""
    try:
        from vllm.model_executor import model_loader

        if _LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
            return
        from ._vllm_loader import TensorfsModelLoader

        model_loader.register_model_loader(_LOAD_FORMAT)(TensorfsModelLoader)
    # An error here would end the process, even for users of other load formats.
    except Exception as failed:
        logging.getLogger("vllm.tensorfs").warning(
            "load format tensorfs is not available: this version of vLLM does not fit tensorfs (%s: %s)",
            type(failed).__name__,
            failed,
        )
