"""The options of the load format, as an engine passes them: the JSON object `model_loader_extra_config`, or arguments."""

from __future__ import annotations

import contextlib
from typing import Any, Collection, Iterator, Mapping, NamedTuple

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
"""Arguments of `safe_open` for the checkpoint of the model itself. They do not apply to other checkpoints, such as that
of its draft model."""

WORDS = (*_OWN, *_READING, *_OF_MODEL)
"""All options."""

_IN_GROUPS = ("process_group", "share")
"""Options about ranks that share their reads."""


class Options(NamedTuple):
    """The options of a loader."""

    path: str | None
    """The checkpoint that is loaded in place of the checkpoint of the model: a folder, a file or a URL."""
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
    """The options of tensorfs in `model_loader_extra_config`, and separately those that belong to the engine. Raises
    `ValueError`, with a message in one line, for an unknown option and for a value that an option does not accept."""
    with _refused_by("load format tensorfs, model_loader_extra_config"):
        if not isinstance(given or {}, Mapping):
            raise ValueError(f"expected a JSON object, not {type(given).__name__}")
        given = dict(given or {})
        of_engine = {word: given.pop(word) for word in engine_words if word in given}
        _check(given, WORDS, engine_words)
        lazy = given.get("lazy", False)
        if lazy and given.get("process_group"):
            raise ValueError("lazy and process_group exclude each other: with lazy each rank reads its own parts")
        if lazy and "share" in given:
            raise ValueError("share is about a process group, which lazy has none of: give one of them")
        return _options(given, lazy, given.get("process_group", not lazy)), of_engine


def options_of_weight_loader(given: Mapping[str, Any]) -> Options:
    """The options of a weight loader, whose ranks do not communicate. Raises `ValueError` like `options_of`."""
    with _refused_by("TensorfsWeightLoader"):
        _check(given, [word for word in WORDS if word not in _IN_GROUPS])
        return _options(given, given.get("lazy", True), False)


def _options(given: Mapping[str, Any], lazy: bool, process_group: bool) -> Options:
    return Options(
        given.get("path"),
        process_group,
        lazy,
        {word: given[word] for word in _READING if word in given},
        {word: given[word] for word in _OF_MODEL if word in given},
    )


def _check(given: Mapping[str, Any], words: Collection[str], engine_words: Collection[str] = ()) -> None:
    kinds = {**_OWN, **_READING, **_OF_MODEL}
    for word, value in given.items():
        if word not in words:
            raise ValueError(f"there is no option {word!r}; expected one of {', '.join((*words, *engine_words))}")
        if not isinstance(value, kinds[word]) or (isinstance(value, bool) and bool not in kinds[word]):
            expected = " or ".join({"str": "text", "bool": "true or false", "list": "a list"}.get(kind.__name__, "a number") for kind in kinds[word])
            raise ValueError(f"{word}: expected {expected}, not {value!r}")
    if given.get("share") not in SHARES:
        raise ValueError(f"share: expected host or network, not {given['share']!r}")
    if given.get("keep") and not given.get("dtype"):
        raise ValueError("keep needs dtype")
    if given.get("path") == "":
        raise ValueError("path: expected a folder, a file or a URL, not nothing")
    # Refuses wrong values now, before the engine makes the model. These calls read nothing.
    _settings.loader(**{word: given[word] for word in _settings.WORDS if word in given})
    _settings.unproven_tail(given.get("unproven_tail"))


@contextlib.contextmanager
def _refused_by(place: str) -> Iterator[None]:
    """Adds `place`, where the options were given, to the message of each refusal within the block."""
    try:
        yield
    except ValueError as refused:
        raise ValueError(shown(f"{place}: {refused}")) from None
