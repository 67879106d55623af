"""Selects tensors by a glob, a regular expression, or their names."""

from __future__ import annotations

import fnmatch
import re
from typing import Iterable, Union

from ._errors import error

Names = Union[str, re.Pattern[str], Iterable[str], None]
"""A glob such as `"model.layers.0.*"`, a compiled regular expression that is searched for, or exact names."""


def select(names: Names, every: list[str]) -> list[str]:
    """The names in `every` that `names` selects, in the order of `every`. Raises an error if a glob or an expression
    matches no name, or if an exact name is missing."""
    if names is None:
        return every
    if isinstance(names, (str, re.Pattern)):
        matches = re.compile(fnmatch.translate(names)).match if isinstance(names, str) else names.search
        found = [name for name in every if matches(name)]
        if not found:
            shown = names if isinstance(names, str) else names.pattern
            raise error(f"names={shown!r} matches none of the {len(every)} tensors{_such_as(every)}")
        return found
    if isinstance(names, (bytes, bytearray)):
        raise TypeError(f"names: expected a glob, a compiled expression or a list of names, all of str, not {type(names).__name__}")
    wanted = set(names)
    for name in wanted:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor is a str, not {type(name).__name__}")
    for name in wanted.difference(every):
        raise error(f"File does not contain tensor {name}", tensor=str(name))
    return [name for name in every if name in wanted]


def _such_as(every: list[str]) -> str:
    return f": {', '.join(every[:3])}{', ...' if len(every) > 3 else ''}" if every else ""
