"""Writes the files that a mount of a checkpoint would show."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from . import _settings, _tails, _tensorfs
from ._errors import error
from ._open import Globs, proof_arguments, secret_of, view_words
from ._settings import RemoteSource, Unpack
from ._tails import UnprovenTail

Path = Union[str, os.PathLike[str]]


class _Written(NamedTuple):
    files: int
    """Number of written files."""
    bytes: int
    """Length of all written files together, in bytes."""


class Consolidated(_Written):
    """The result of `consolidate`: a pair of the number of written files and their length in bytes, with the attribute
    `unproven_tails`."""

    unproven_tails: list[str]
    """The folders of checkpoints without a proof that their last pieces are there. If the last shard of such a
    checkpoint was lost, its tensors only look smaller. The list is empty if every checkpoint is proved."""


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

    `numbers` maps the name of each tensor to the number of the file that it is written to. With `numbers`, `out` is
    always a folder. Its files have the names that the consolidation of torch uses: `model-0000I-of-0000N.safetensors`
    and `model.safetensors.index.json`. `source` may then be a list of several files of one checkpoint.

    The other arguments up to `state` are options of `tensorfs mount`. `layout` is "shards=8", "shards=5GB", "map=FILE"
    or "original". `format` is "bintensors". `weight_map` is "hide". `config` is a small file, or a folder of small
    files, that is written beside the weights. The other options mean the same as in `safe_open`. If `source` is on a
    mount, all these options apply to the files that the mount shows.

    `key`, `passphrase`, `key_file`, `passphrase_file`, `expect_shards`, `reference`, `unproven_tail`, `cache_dir`,
    `cache_dir_size` and `remote` mean the same as in `safe_open`, and apply to the files of `source`. If there is no
    proof that the last pieces of a checkpoint are there, the warning or the error comes before the first file is
    written. The written files are not encrypted.

    With `overwrite`, existing files are replaced. With `verify`, the written files are read back from the disk, and
    compared with hashes of the bytes that were written.

    `io_timeout` is a deadline in seconds for opening `source`, and for each read of it. By default it is the
    environment variable TENSORFS_IO_TIMEOUT.

    A file appears under its name only when it is complete. After an error or Ctrl-C, none of the files is left.
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
    proof = proof_arguments(expect_shards, reference, unproven_tail, cache_dir, cache_dir_size, **remote)
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
