"""Writing a checkpoint as real files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from . import _settings, _tails, _tensorfs
from ._errors import error
from ._open import Globs, proof_of, secret_of, view_words
from ._settings import RemoteSource, Unpack
from ._tails import UnprovenTail

Path = Union[str, os.PathLike[str]]


class _Written(NamedTuple):
    files: int
    """Number of files."""
    bytes: int
    """Bytes of all files."""


class Consolidated(_Written):
    """The files that `consolidate` has written: a pair of their number and their bytes, with one more attribute."""

    unproven_tails: list[str]
    """The folders of checkpoints whose last pieces nothing proves; empty if there are none. A lost last shard would
    only have made their tensors smaller."""


def consolidate(
    source: Path | Sequence[Path],
    out: Path,
    *,
    numbers: Mapping[str, int] | None = None,
    layout: str | None = None,
    format: str | None = None,
    weight_map: str | None = None,
    config: Path | None = None,
    include: Globs = None,
    exclude: Globs = None,
    rename: Path | None = None,
    dtype: Any = None,
    keep: Globs = None,
    tp: int | None = None,
    rank: int | None = None,
    tp_rules: Path | None = None,
    zero: str | None = None,
    state: str | None = None,
    key: str | bytes | None = None,
    passphrase: str | bytes | None = None,
    key_file: Path | None = None,
    passphrase_file: Path | None = None,
    expect_shards: int | None = None,
    reference: Path | None = None,
    unproven_tail: str | None = None,
    cache_dir: Path | None = None,
    cache_dir_size: int | str | None = None,
    overwrite: bool = False,
    verify: bool = False,
    io_timeout: float | None = None,
    **remote: Unpack[RemoteSource],
) -> Consolidated:
    """Writes the files that a mount of `source` shows into the folder `out`, as `tensorfs consolidate` does.

    If the name of `out` ends in `.safetensors`, `.bt` or `.tensors`, `out` becomes one file with all tensors instead.
    `format="bintensors"` is needed for `.bt`.

    `numbers` gives the number of a file for each tensor. Then `out` is always a folder, and the files are
    `model-0000I-of-0000N.safetensors` and `model.safetensors.index.json`, as from the consolidation of torch, and
    `source` may be several files of one checkpoint.

    The other arguments up to `state` are the options of `tensorfs mount`: `layout` is "shards=8", "shards=5GB",
    "map=FILE" or "original", `format` is "bintensors", `weight_map` is "hide", `config` is a folder whose small files
    are written beside the weights, or one such file, and those of `safe_open` are as there. If `source` is on a mount,
    they apply to what the mount shows.

    `key`, `passphrase`, `key_file`, `passphrase_file`, `expect_shards`, `reference`, `unproven_tail`, `cache_dir`,
    `cache_dir_size` and `remote` are those of `safe_open`; they are about the files of `source`, as the options of
    `tensorfs mount` are. The warning, or error, about a checkpoint whose last pieces nothing proves comes before anything
    is written. The files that are written are not encrypted.

    `overwrite` replaces files that are there. `verify` reads the files back and compares them.

    `io_timeout`, or TENSORFS_IO_TIMEOUT, is the number of seconds until opening `source`, or a read of it, fails.

    Each file appears whole or not at all. An error or Ctrl-C leaves nothing.
    """
    arguments = dict(locals())
    files = [("layout", layout), ("format", format), ("weight-map", weight_map)]
    words = [(key, value) for key, value in files if value is not None]
    named = [*words, *([("config", config)] if config is not None else [])]
    if numbers is not None and named:
        raise error(f"numbers says which files are written: give no {named[0][0].replace('-', '_')} with it")
    words += view_words(arguments)
    secret = secret_of(key, passphrase, key_file, passphrase_file)
    paths = [source] if isinstance(source, (str, os.PathLike)) else list(source)
    listed = None if numbers is None else dict(numbers)
    sources = [os.fspath(path) for path in paths]
    proof = proof_of(expect_shards, reference, unproven_tail, cache_dir, cache_dir_size, **remote)
    unproven: list[str] = []

    def judge(found: list[UnprovenTail]) -> None:
        unproven.extend(sorted({path for path, *_ in found}))
        _tails.judge(found, proof)

    given = None if config is None else os.fspath(config)
    timeout = _settings.loader(io_timeout=io_timeout).timeout
    to = os.fspath(out)
    written = Consolidated(
        *_tensorfs.consolidate(sources, to, listed, words, overwrite, verify, secret, proof.demands, given, timeout, judge)
    )
    written.unproven_tails = unproven
    return written
