"""Writing a checkpoint as real files."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from . import _tensorfs
from ._errors import error
from ._open import Globs, secret_of, view_words

Path = Union[str, "os.PathLike[str]"]


# The names that this module gives to consolidated files.
_WRITTEN = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


class Consolidated(NamedTuple):
    """The files that `consolidate` has written."""

    files: int
    """Number of files."""
    bytes: int
    """Bytes of all files."""


def consolidate(
    source: Path | Sequence[Path],
    out: Path,
    *,
    numbers: Mapping[str, int] | None = None,
    layout: str | None = None,
    format: str | None = None,
    weight_map: str | None = None,
    include: Globs = None,
    exclude: Globs = None,
    rename: Path | None = None,
    dtype: Any = None,
    keep: Globs = None,
    tp: int | None = None,
    rank: int | None = None,
    tp_rules: Path | None = None,
    key: str | bytes | None = None,
    passphrase: str | bytes | None = None,
    key_file: Path | None = None,
    passphrase_file: Path | None = None,
    overwrite: bool = False,
    verify: bool = False,
) -> Consolidated:
    """Writes the files that a mount of `source` shows into the folder `out`, as `tensorfs consolidate` does.

    If the name of `out` ends in `.safetensors`, `.bt` or `.tensors`, `out` becomes one file with all tensors instead.
    `format="bintensors"` is needed for `.bt`.

    `numbers` gives the number of a file for each tensor. Then `out` is always a folder, and the files are
    `model-0000I-of-0000N.safetensors` and `model.safetensors.index.json`, as from the consolidation of torch, and
    `source` may be several files of one checkpoint.

    The other arguments up to `tp_rules` are the options of `tensorfs mount`: `layout` is "shards=8", "shards=5GB",
    "map=FILE" or "original", `format` is "bintensors", `weight_map` is "hide", and those of `safe_open` are as there.
    If `source` is on a mount, they apply to what the mount shows.

    `key`, `passphrase`, `key_file` and `passphrase_file` are those of `safe_open`. The files that are written are not
    encrypted.

    `overwrite` replaces files that are there. `verify` reads the files back and compares them.

    Each file appears whole or not at all. An error or Ctrl-C leaves nothing.
    """
    files = [("layout", layout), ("format", format), ("weight-map", weight_map)]
    words = [(key, value) for key, value in files if value is not None]
    if numbers is not None and words:
        raise error(f"numbers says which files are written: give no {words[0][0].replace('-', '_')} with it")
    words += view_words(include, exclude, rename, dtype, keep, tp, rank, tp_rules)
    secret = secret_of(key, passphrase, key_file, passphrase_file)
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    listed = None if numbers is None else dict(numbers)
    if listed is not None and len(paths) == 1 and os.path.isdir(paths[0]):
        folder = os.fspath(paths[0])
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
        # A folder may hold its consolidated files beside its shards.
        shards = [name for name in names if not _WRITTEN.fullmatch(name)]
        paths = [os.path.join(folder, name) for name in shards or names] or paths
    sources = [os.fspath(path) for path in paths]
    return Consolidated(*_tensorfs.consolidate(sources, os.fspath(out), listed, words, overwrite, verify, secret))
