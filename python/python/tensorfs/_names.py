"""Selects tensors by a glob, a regular expression, or their names."""

from __future__ import annotations

import fnmatch
import re
from typing import Iterable, Union

from ._errors import error

Names = Union[str, "re.Pattern[str]", Iterable[str], None]
"""A glob such as `"model.layers.0.*"`, a compiled regular expression that is searched for, or exact names."""


def select(names: Names, every: list[str]) -> list[str]:
    """The names of `every` that are meant, in its order; exact names have to be there."""
    if names is None:
        return every
    if isinstance(names, str):
        matches = re.compile(fnmatch.translate(names)).match
        return [name for name in every if matches(name)]
    if isinstance(names, re.Pattern):
        return [name for name in every if names.search(name)]
    wanted = set(names)
    for name in wanted.difference(every):
        raise error(f"File does not contain tensor {name}", tensor=str(name))
    return [name for name in every if name in wanted]
