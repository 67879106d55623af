"""The entry point of SGLang: `--load-format tensorfs`."""

from __future__ import annotations

import logging
from typing import Any, Callable

_LOAD_FORMAT = "tensorfs"
_HOOKED = (
    "sglang.srt.configs.load_config.LoadConfig._verify_load_format",
    "sglang.srt.model_loader.loader.get_model_loader",
)


def register() -> None:
    """Adds the load format to SGLang. SGLang calls this function in each of its processes, possibly several times."""
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if _LOAD_FORMAT not in choices.LOAD_FORMAT_CHOICES:
            choices.add_load_format_choices([_LOAD_FORMAT])
        for target, hook in zip(_HOOKED, (_verify_load_format, _get_model_loader)):
            if all(registered is not hook for _, registered, _ in HookRegistry._hooks.get(target, ())):
                HookRegistry.register(target, hook, HookType.AROUND)
    # An error here must not affect users of other load formats.
    except Exception as failed:
        logging.getLogger("sglang.tensorfs").warning(
            "load format tensorfs is not available: this version of SGLang does not fit tensorfs (%s: %s)",
            type(failed).__name__,
            failed,
        )


def is_ours(load_format: object) -> bool:
    """Whether `load_format`, a value of SGLang, is the load format of tensorfs."""
    return isinstance(load_format, str) and load_format.lower() == _LOAD_FORMAT


def _verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Wraps the check of load formats in SGLang, which accepts only the members of an enum."""
    if not is_ours(config.load_format):
        original(config)
        return
    from ._options import options_of

    config.load_format = _LOAD_FORMAT
    options_of(config.model_loader_extra_config)


def _get_model_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """Wraps the choice of a loader in SGLang, which also accepts only the members of the enum of load formats."""
    if not is_ours(load_config.load_format):
        return original(load_config, model_config)
    from ._sglang_loader import loader_for

    return loader_for(original, load_config, model_config)
