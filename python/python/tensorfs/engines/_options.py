"""The options of the load format, as an engine passes them: the JSON object `model_loader_extra_config`."""

from __future__ import annotations

from typing import Any, Collection, Mapping, NamedTuple

from .. import _settings
from .._errors import shown
from .._share import SHARES

_GLOBS = (str, list)

_OWN: dict[str, tuple[type, ...]] = {"path": (str,), "process_group": (bool,), "lazy": (bool,)}

_READING: dict[str, tuple[type, ...]] = {
    "share": (str,),
    **_settings.TYPES,
    "unproven_tail": (str,),
    "key_file": (str,),
    "passphrase_file": (str,),
}
"""Arguments of `safe_open` for every checkpoint of a model."""

_OF_MODEL: dict[str, tuple[type, ...]] = {
    "include": _GLOBS,
    "exclude": _GLOBS,
    "rename": (str,),
    "dtype": (str,),
    "keep": _GLOBS,
    "expect_shards": (int,),
    "reference": (str,),
}
"""Arguments of `safe_open` for the checkpoint of the model itself, and for no other that belongs to it."""

WORDS = (*_OWN, *_READING, *_OF_MODEL)
"""All options."""


class Options(NamedTuple):
    """The options of a loader."""

    path: str | None
    """The checkpoint to load in place of the model's: a folder, a file or a URL."""
    process_group: bool
    """Whether the ranks of a group share their reads."""
    lazy: bool
    """Whether tensors are read when the model uses them, and only the parts that it uses."""
    reading: dict[str, Any]
    of_model: dict[str, Any]

    def arguments(self, is_model: bool) -> dict[str, Any]:
        """The arguments of `safe_open`, for the checkpoint of the model or for another one."""
        return {**self.reading, **(self.of_model if is_model else {})}


def options_of(given: Any, engine_words: Collection[str] = ()) -> tuple[Options, dict[str, Any]]:
    """The options in `model_loader_extra_config`, and those that belong to the engine. Raises `ValueError`, in one line,
    for an option that does not exist and for a value that it does not take."""
    if not isinstance(given or {}, Mapping):
        raise _wrong(f"expected a JSON object, not {type(given).__name__}")
    given = dict(given or {})
    of_engine = {word: given.pop(word) for word in engine_words if word in given}
    kinds = {**_OWN, **_READING, **_OF_MODEL}
    for word, value in given.items():
        if word not in kinds:
            raise _wrong(f"there is no option {word!r}; expected one of {', '.join((*WORDS, *engine_words))}")
        if not isinstance(value, kinds[word]) or (isinstance(value, bool) and bool not in kinds[word]):
            expected = " or ".join({"str": "text", "bool": "true or false", "list": "a list"}.get(kind.__name__, "a number") for kind in kinds[word])
            raise _wrong(f"{word}: expected {expected}, not {value!r}")
    _check_values(given)
    path = given.get("path")
    if path is not None and not path:
        raise _wrong("path: expected a folder, a file or a URL, not nothing")
    if given.get("lazy") and given.get("process_group"):
        raise _wrong("lazy and process_group exclude each other: with lazy each rank reads its own parts")
    lazy = given.get("lazy", False)
    if lazy and "share" in given:
        raise _wrong("share is about a process group, which lazy has none of: give one of them")
    options = Options(
        path,
        given.get("process_group", not lazy),
        lazy,
        {word: given[word] for word in _READING if word in given},
        {word: given[word] for word in _OF_MODEL if word in given},
    )
    return options, of_engine


def _check_values(given: Mapping[str, Any]) -> None:
    if given.get("share") not in SHARES:
        raise _wrong(f"share: expected host or network, not {given['share']!r}")
    if given.get("keep") and not given.get("dtype"):
        raise _wrong("keep needs dtype")
    try:
        # Refuses values before the model is made. No engine is started and nothing is read.
        _settings.loader(**{word: given[word] for word in _settings.WORDS if word in given})
        _settings.unproven_tail(given.get("unproven_tail"))
    except ValueError as refused:
        raise _wrong(str(refused)) from None


def _wrong(what: str) -> ValueError:
    return ValueError(shown(f"load format tensorfs, model_loader_extra_config: {what}"))
