"""`safe_open`: an open checkpoint."""

from __future__ import annotations

import errno
import json
import operator
import os
from typing import Any, Iterator, Mapping, NamedTuple, Sequence, Union

from . import _device, _frameworks, _indexing, _settings, _tails
from ._errors import SafetensorError, error, not_found, shown
from ._names import Names, select
from ._prefetch import PrefetchLoader
from ._reader import Info, Part, Reader, reader_for
from ._requests import chunk_of
from ._settings import RemoteSource, Unpack
from ._share import Team
from ._tails import Proof
from ._tensorfs import Cancel, Checkpoint, Loader, load_indexed, real_name

StrPath = Union[str, os.PathLike[str]]
Source = Union[StrPath, Sequence[StrPath], Mapping[str, StrPath]]
"""The sources of a checkpoint: a path, a list of files, or a mapping from tensor names to files."""

_BATCH_MAX = 512 << 20
"""The most bytes of a batch, which `tensors` and `prefetch` load at a time. A longer tensor is loaded alone."""

_BATCH_FIRST = 16 << 20
"""The most bytes of the first batch. It is small so that the first tensor is there soon. The limit doubles from batch
to batch."""


class TensorMetadata(NamedTuple):
    """The facts about a tensor that its header states."""

    dtype: str
    shape: list[int]
    nbytes: int
    data_offsets: tuple[int, int] | None
    """First byte and end of the tensor in the data section. None if the checkpoint has several files, or if the stored
    bytes differ from those that are loaded."""
    pieces: list[tuple[str, int, int]]
    """File, first byte and end of each piece of the tensor. With a view, a piece may be rows with other bytes between
    them."""


Globs = Union[str, Sequence[str], None]
"""A glob for names of tensors, or several of them."""


def view_words(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The options of a view that are among `arguments`, as pairs of a name and a value of `mount -o`."""
    words = []
    if arguments["keep"] and arguments["dtype"] is None:
        raise error("keep needs dtype")
    for key in ("include", "exclude", "keep"):
        given = arguments[key]
        globs = [given] if isinstance(given, (str, bytes)) else list(given or ())
        for glob in globs:
            if not isinstance(glob, str):
                raise TypeError(f"{key}: expected a glob or a list of them, not {type(glob).__name__}")
            words.append((key, glob))
    to_word = {"tp": _number, "rank": _number, "tp_rules": _path, "rename": _path, "dtype": dtype_word}
    others = [(key, word) for key, word in to_word.items() if arguments[key] is not None]
    words += [(key.replace("_", "-"), word(arguments[key])) for key, word in others]
    return words + choice_words(arguments["zero"], arguments["state"])


def choice_words(zero: str | None = None, state: str | None = None) -> list[tuple[str, str]]:
    """The options that choose which tensors a view shows, as pairs of a name and a value of `mount -o`."""
    words = []
    for key, word in (("zero", zero), ("state", state)):
        if word is not None:
            if not isinstance(word, str):
                raise TypeError(f"{key}: expected a str, not {type(word).__name__}")
            words.append((key, word))
    return words


def _number(number: Any) -> str:
    return str(operator.index(number))


def dtype_word(dtype: Any) -> str:
    """The dtype of a view in the form of the option: torch.bfloat16 becomes bf16."""
    word = str(dtype).removeprefix("torch.")
    return {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(word, word)


Secret = Union[tuple[str, bytes], None]
"""The key or the passphrase of encrypted files: its kind, and its bytes or the path of its file. None means the secret
that the environment names."""


def secret_of(
    key: str | bytes | None,
    passphrase: str | bytes | None,
    key_file: StrPath | None,
    passphrase_file: StrPath | None,
) -> Secret:
    """The argument that is given, checked. More than one is an error."""
    given: list[tuple[str, bytes]] = []
    if key is not None:
        if not isinstance(key, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"key: expected bytes or a str of hexadecimal digits, not {type(key).__name__}")
        if isinstance(key, str) and len(key.strip()) != 64:
            raise error(f"key: expected 64 hexadecimal digits, found a str of {len(key.strip())} characters")
        given.append(("key", key.strip().encode() if isinstance(key, str) else bytes(key)))
    if passphrase is not None:
        if not isinstance(passphrase, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"passphrase: expected a str or bytes, not {type(passphrase).__name__}")
        given.append(("passphrase", passphrase.encode() if isinstance(passphrase, str) else bytes(passphrase)))
    for word, path in (("key-file", key_file), ("passphrase-file", passphrase_file)):
        if path is not None:
            given.append((word, os.fsencode(_path(path))))
    if len(given) > 1:
        names = " and ".join(word.replace("-", "_") for word, _ in given)
        raise error(f"{names} exclude each other: give one")
    return given[0] if given else None


PROOF_WORDS = ("expect_shards", "reference", "unproven_tail", "cache_dir", "cache_dir_size")
"""The arguments of `proof_arguments`, except those of a remote source."""


def proof_arguments(
    expect_shards: int | None = None,
    reference: StrPath | None = None,
    unproven_tail: str | None = None,
    cache_dir: StrPath | None = None,
    cache_dir_size: int | str | None = None,
    **remote: Any,
) -> Proof:
    """Checks the arguments about the proof of the last pieces of a checkpoint, and about remote sources, and combines
    them."""
    if expect_shards is not None:
        number = -1 if isinstance(expect_shards, bool) else operator.index(expect_shards)
        if not 1 <= number < 1 << 64:
            raise ValueError(f"expect_shards={expect_shards}: expected a number from 1 on")
        expect_shards = number
    reference = None if reference is None else _path(reference)
    cache = _settings.disk_cache(None if cache_dir is None else _path(cache_dir), cache_dir_size)
    files = {word: path if path is None else _path(path) for word, path in remote.items() if word.endswith("_file")}
    settings = _settings.remote({**remote, **files})
    return Proof((expect_shards, reference, *cache, settings), _settings.unproven_tail(unproven_tail))


def open_checkpoint(
    source: Source,
    loader: Loader,
    view: Sequence[tuple[str, str]] = (),
    secret: Secret = None,
    proof: Proof | None = None,
) -> Checkpoint:
    """Opens `source` within the deadline of `loader`. `view` has the options of a view, and `secret` the key of
    encrypted files. Warns, or raises an error, if neither the files nor `proof` prove that the last pieces are
    there."""
    proof = proof_arguments() if proof is None else proof
    checkpoint = _open_checkpoint(source, loader, list(view), secret, proof)
    if checkpoint.unproven_tail is not None:
        _tails.judge([checkpoint.unproven_tail], proof)
    return checkpoint


def _open_checkpoint(
    source: Source, loader: Loader, words: list[tuple[str, str]], secret: Secret, proof: Proof
) -> Checkpoint:
    files: str | list[str] | dict[str, str]
    if isinstance(source, (str, os.PathLike)):
        files = _path(source)
    elif isinstance(source, Mapping):
        files = {name: _path(path) for name, path in source.items()}
    elif isinstance(source, (list, tuple)):
        files = [_path(path) for path in source]
    else:
        raise TypeError(f"expected a path, a list of files or a mapping to files, not {type(source).__name__}")
    # The native part opens files on another thread, because a file system may never answer.
    try:
        return Checkpoint.open(files, loader.timeout, words, secret, proof.demands)
    except FileNotFoundError as e:
        if os.strerror(errno.ENOENT) in str(e):
            raise not_found(e.filename) from None
        raise


def _path(path: StrPath) -> str:
    decoded = os.fsdecode(path)
    if "\0" in decoded:
        raise ValueError(shown(f"{real_name(decoded)}: a path holds no NUL byte"))
    return decoded


class safe_open:
    """An open checkpoint, with all methods of `safetensors.safe_open`, and more.

    `filename` is a safetensors file, a folder with a checkpoint in shards of any supported kind, a weight map, a list
    of files, or a mapping from tensor names to files. If these are on a mount of tensorfs, the source of the mount is
    read directly. `framework` is "pt", "np", "flax", "mlx", "paddle", "tensorflow", or "dlpack" for objects that all
    frameworks with DLPack accept.

    By default each tensor has memory of its own. With `copy=False`, a tensor that lies in its file in one piece shares
    the memory of the mapped file. A write to such a tensor does not change the file. If the file is truncated later, a
    read of the tensor ends the process. With `copy=None`, tensors share the mapped file only if the page cache holds
    them when they are requested, or if the checkpoint has only small tensors.

    `include` and `exclude` are globs that select tensors by name. `rename` is a file with rules that rename, split or
    join tensors. They are like the mount options of these names. `dtype` is "bf16", "f16", "f32" or a dtype of torch,
    to which floating point tensors are cast while they are read. Quantized tensors, their scales, and tensors that
    match a glob in `keep` are not cast. With "like:FILE" each tensor gets the dtype that it has in the checkpoint FILE.
    If the source is on a mount, these arguments apply to the tensors that the mount shows.

    `tp` is the number of ranks of a tensor-parallel group, and `rank` is the number of one of them, from 0. Each tensor
    is then the slice that this rank needs. `tp_rules` is a file with rules that say how tensors are cut. Without it,
    built-in rules apply, which the `config.json` beside the shards selects by the family of the model.

    `zero="fp32"` shows the F32 weights of the optimizer of a DeepSpeed checkpoint, in place of the weights of the
    model. `state="all"` shows all tensors of distributed checkpoints and of files of `torch.save`, including the
    training state, under their full names.

    Encrypted tensorizer files need one of `key` (32 bytes, or 64 hexadecimal digits), `key_file`, `passphrase` and
    `passphrase_file`. Without these arguments, the environment variable TENSORFS_KEY_FILE, TENSORFS_PASSPHRASE_FILE or
    TENSORFS_KEY_COMMAND has to be set.

    `expect_shards` is the number of shard files, and `reference` is a file with the names, dtypes and shapes of all
    tensors: a safetensors file, a manifest, or a weight map. A checkpoint that differs is refused. Each of these two
    arguments proves that the last shard is not lost. Without a proof there is an `UnprovenTailWarning`, once for each
    checkpoint. With `unproven_tail="error"`, or TENSORFS_UNPROVEN_TAIL=error, there is an error in its place.

    With a `process_group` of torch.distributed, all its ranks open the same files. The methods `get_tensors`,
    `tensors`, `get_sharded` and `push_tensor` are collective then: all ranks call them, each rank for the tensors that
    it wants, and each byte is read once. With `share="host"`, the ranks of one host share their reads. This is the
    default if all ranks are on one host. With `share="network"`, all ranks exchange bytes by gloo. All other methods
    load for the calling rank only.

    `cache_dir` is the folder of a disk cache, which stores blocks of remote sources for later runs and for other
    processes. `cache_dir_size` is the most disk space that it may take, such as "100G". By default the folder is the
    one in TENSORFS_CACHE_DIR. If neither is set, there is no disk cache.

    `credentials_file`, `profile`, `endpoint`, `region` and `ca_file` say where a remote source lies, and from which
    file or profile its credentials come. They are like the options of `tensorfs mount`, apply to this checkpoint only,
    and take precedence over environment variables.

    The other arguments control reading. Their defaults are the environment variables TENSORFS_CHUNK, TENSORFS_IO_DEPTH,
    TENSORFS_PINNED_MAX, TENSORFS_SOURCE, TENSORFS_ENGINE and TENSORFS_IO_TIMEOUT.
    """

    def __init__(
        self,
        filename: Source,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        copy: bool | None = True,
        include: Globs = None,
        exclude: Globs = None,
        rename: StrPath | None = None,
        dtype: Any = None,
        keep: Globs = None,
        tp: int | None = None,
        rank: int | None = None,
        tp_rules: StrPath | None = None,
        zero: str | None = None,
        state: str | None = None,
        key: str | bytes | None = None,
        passphrase: str | bytes | None = None,
        key_file: StrPath | None = None,
        passphrase_file: StrPath | None = None,
        expect_shards: int | None = None,
        reference: StrPath | None = None,
        unproven_tail: str | None = None,
        cache_dir: StrPath | None = None,
        cache_dir_size: int | str | None = None,
        chunk: int | str | None = None,
        io_depth: int | None = None,
        pinned_max: int | str | None = None,
        source: str | None = None,
        engine: str | None = None,
        io_timeout: float | None = None,
        process_group: Any = None,
        share: str | None = None,
        **remote: Unpack[RemoteSource],
    ) -> None:
        # All arguments, because unpickling opens the checkpoint again with them.
        arguments = {word: value for word, value in locals().items() if word not in ("self", "remote")} | dict(remote)
        self._filename, self._framework, self._gpu = filename, framework, _device.parse(device)
        self._how = {word: arguments[word] for word in _settings.WORDS}
        self._remote = remote
        self._open: Reader | None = None
        if process_group is not None and _frameworks.is_from_numpy(framework):
            raise error(f'framework {framework} has no loads of a process group: open with "pt", "np" or "dlpack"')
        self._team = None if process_group is None else Team(process_group, share, self._how)
        self._arguments = arguments
        if self._team is None:
            self._begin()
            return
        try:
            with self._team.group.operation() as operation:
                self._team.group.agree(operation, self._begin().checkpoint)
        except BaseException:
            self.__exit__()
            raise

    def _begin(self) -> Reader:
        """Opens the checkpoint in this process, without the other ranks."""
        given = self._arguments
        framework, backend, copy = (given[word] for word in ("framework", "backend", "copy"))
        if backend not in ("mmap", "pread"):
            raise error(f'backend {json.dumps(backend)} is invalid (expected one of: "mmap", "pread")')
        if self._team is not None and copy is not True:
            raise error("with a process group tensors own their memory: give no copy=")
        found = _frameworks.find(framework, self._gpu)
        loader = _settings.loader(**self._how, gpu=self._gpu)
        strict = backend == "pread" or not found.indexes_itself
        view = view_words(given)
        secret = secret_of(*(given[word] for word in ("key", "passphrase", "key_file", "passphrase_file")))
        proof = proof_arguments(*(given[word] for word in PROOF_WORDS), **self._remote)
        checkpoint = open_checkpoint(self._filename, loader, view, secret, proof)
        self._open = reader_for(checkpoint, found, loader, strict, copy)
        return self._open

    def __enter__(self) -> safe_open:
        return self

    def __exit__(self, *_: object) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.close()
        if self._team is not None:
            self._team.group.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the arguments. Unpickling opens the checkpoint again, with the content that its files have then."""
        self._reader()
        if self._team is not None:
            raise TypeError("a safe_open of a process group is not pickled: other processes are not in the group")
        for word in ("key", "passphrase"):
            if self._arguments[word] is not None:
                raise TypeError(f"a safe_open with {word}= is not pickled, since the pickle would hold it: give {word}_file=")
        return _opened_again, (type(self), self._arguments)

    def __repr__(self) -> str:
        state = "closed" if self._open is None else f"{len(self._open.checkpoint)} tensors"
        return f"<tensorfs.safe_open {self._shown_name()!r}: {state}>"

    def _shown_name(self) -> str:
        """The path or the URL, or the list of them, without the parts that may be secret."""
        if isinstance(self._filename, (str, os.PathLike)):
            return real_name(os.fsdecode(self._filename))
        files = self._filename.values() if isinstance(self._filename, Mapping) else self._filename
        return str([real_name(os.fsdecode(file)) for file in files])

    def keys(self) -> list[str]:
        """The names of the tensors, sorted."""
        return [facts[0] for facts in self._checkpoint().tensors()]

    def offset_keys(self) -> list[str]:
        """The names of the tensors, in file order."""
        names = self.keys()
        return [names[position] for position in self._checkpoint().file_order()]

    def metadata(self) -> dict[str, str] | None:
        """The metadata in the header. If there are several files, their metadata are merged."""
        return self._checkpoint().metadata()

    def nbytes(self, names: Names = None) -> int:
        """Length in bytes of all tensors together, or of the selected tensors."""
        return sum(info.nbytes for info in self._infos(names))

    def get_tensor_metadata(self, name: str) -> TensorMetadata:
        """The facts about a tensor that its header states."""
        checkpoint, info = self._checkpoint(), self._info(name)
        pieces, offsets = checkpoint.pieces(info.position), checkpoint.data_offsets(info.position)
        return TensorMetadata(info.dtype, info.shape, info.nbytes, offsets, pieces)

    get_tensor_meta = get_tensor_metadata

    def get_tensor(self, name: str) -> Any:
        """The tensor of this name."""
        return self._reader().whole(self._info(name))

    def get_tensors(self, names: Names = None) -> dict[str, Any]:
        """A dict of all tensors, or the selected tensors, in file order. They are read together. In a process group all
        ranks call this method, each with its own `names`."""
        if self._team is not None:
            return self._team.load(self._reader(), self._gpu, lambda: [(info, None) for info in self._infos(names)])
        if not self._reader().copy:
            return self._reader().all_shared(self._infos(names))
        if names is None:
            return self._reader().load_all()
        return self._reader().load([(info, None) for info in self._infos(names)])

    def get_slice(self, name: str) -> Slice:
        """The tensor of this name as a `Slice`. Indexing it reads only the bytes of the requested part."""
        return Slice(self, self._info(name))

    def get_sharded(self, name: str, dim: int) -> Any:
        """The part of a tensor that belongs to this rank of the process group. The dimension `dim` is cut as
        `torch.chunk` cuts it: the last ranks may get fewer indices than the others, or none. All ranks call this
        method."""
        return self._group().load(self._reader(), self._gpu, lambda: [self._shard(self._info(name), dim)])[name]

    def push_tensor(self, name: str, rank: int) -> Any:
        """Returns the tensor on the rank `rank` of the process group, and None on all other ranks. All ranks call this
        method."""
        team = self._group()

        def wanted() -> list[tuple[Info, Part]]:
            info = self._info(name)
            if not 0 <= operator.index(rank) < team.group.size:
                raise error(f"rank {rank} is invalid: the process group has {team.group.size}")
            return [(info, None)] if rank == team.group.rank else []

        return team.load(self._reader(), self._gpu, wanted).get(name)

    def _group(self) -> Team:
        if self._team is None:
            raise error("this needs a process group: open with process_group=")
        return self._team

    def _shard(self, info: Info, dim: int) -> tuple[Info, Part]:
        """The part of a tensor that belongs to this rank."""
        group, dims = self._group().group, len(info.shape)
        if not -dims <= operator.index(dim) < dims:
            raise error(f"tensor `{info.name}` of shape {info.shape} has no dimension {dim}", tensor=info.name)
        part = [(0, size) for size in info.shape]
        part[dim] = chunk_of(info.shape[dim], group.size, group.rank)
        return info, part

    def tensors(
        self, names: Names = None, *, shard: int | Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Yields pairs of name and tensor in file order. While the caller uses a tensor, the next ones are loaded, in
        bounded memory.

        In a process group all ranks iterate, each with its own `names`. With `shard`, each rank gets its part of each
        tensor, as from `get_sharded`. `shard` is one dimension for all tensors, or a mapping from names to dimensions.
        A tensor that lacks the dimension, or is not in the mapping, is returned whole.
        """
        if shard is not None or self._team is not None:
            return self._group().iterate(self._reader(), self._gpu, lambda: self._sharded(names, shard), _batches)
        wanted: list[tuple[Info, Part]] = [(info, None) for info in self._infos(names)]
        _refuse_unfit(self._reader(), wanted)
        if not self._reader().copy:
            return _one_by_one(self._reader(), wanted)
        batches = _batches(wanted)
        if len(batches) > 1:
            return _stream(self._reader(), batches)
        return iter(list(self._reader().load(wanted).items()))

    def _sharded(self, names: Names, shard: int | Mapping[str, int] | None) -> list[tuple[Info, Part]]:
        wanted: list[tuple[Info, Part]] = []
        for info in self._infos(names):
            dim = shard.get(info.name) if isinstance(shard, Mapping) else shard
            is_whole = dim is None or (not isinstance(shard, Mapping) and not -len(info.shape) <= dim < len(info.shape))
            wanted.append((info, None) if is_whole else self._shard(info, dim))
        return wanted

    def prefetch(
        self, plan: Mapping[str, slice | None] | None = None, *, device: Any = None, threads: int = 8
    ) -> PrefetchLoader:
        """Begins to load tensors, or rows of them, in the background.

        `plan` maps each name to the requested rows as a slice, or to None for all rows. `threads` exists because
        safetensors has this argument. It does not change the number of threads.
        """
        reader = self._reader()
        gpu = self._gpu if device is None else _device.parse(device)
        if gpu != self._gpu:
            framework, loader = _frameworks.find(self._framework, gpu), _settings.loader(**self._how, gpu=gpu)
            reader = reader_for(reader.checkpoint, framework, loader, reader.strict)
        if threads < 1:
            raise error(f"threads has to be 1 or more, got {threads}")
        infos = self._infos(None if plan is None else list(plan))
        wanted: list[tuple[Info, Part]] = [(info, _part_of_rows(info, plan and plan[info.name])) for info in infos]
        if not wanted:
            raise error("prefetch plan selects no tensors")
        _refuse_unfit(reader, wanted)
        return _background(reader, _batches(wanted), None)

    @property
    def stats(self) -> dict[str, Any]:
        """The cost of all loads of this checkpoint so far: bytes requested, bytes read, number of reads, and seconds.
        Small tensors and parts that were copied from the page cache are not counted."""
        reader = self._reader()
        ahead, unused = reader.ahead
        return {**reader.stats, "bytes_ahead": ahead, "bytes_ahead_unused": unused}

    def _reader(self) -> Reader:
        if self._open is None:
            raise error("File is closed")
        return self._open

    def _checkpoint(self) -> Checkpoint:
        return self._reader().checkpoint

    def _info(self, name: str) -> Info:
        if not isinstance(name, str):
            raise TypeError(f"the name of a tensor is a str, not {type(name).__name__}")
        facts = self._checkpoint().tensor(name)
        if facts is None:
            raise error(f"File does not contain tensor {name}", path=self._shown_name(), tensor=name)
        return Info(*facts)

    def _infos(self, names: Names) -> list[Info]:
        """The facts about the tensors that `names` selects, in file order."""
        checkpoint = self._checkpoint()
        every = [Info(*facts) for facts in checkpoint.tensors()]
        ordered = [every[position] for position in checkpoint.file_order()]
        if names is None:
            return ordered
        meant = set(select(names, [info.name for info in ordered]))
        return [info for info in ordered if info.name in meant]


def _opened_again(cls: type[safe_open], arguments: dict[str, Any]) -> safe_open:
    return cls(**arguments)


class Slice:
    """A tensor that is read by indexing it."""

    def __init__(self, opened: safe_open, info: Info) -> None:
        reader = opened._reader()
        self._opened, self._reader, self._info = opened, reader, info
        # Makes a tensor of a given shape, for parts that are copied from the page cache. None if parts are never copied
        # in this way.
        self._make: Any = reader.framework.maker(info.dtype) if reader.copy and reader.loader.on_cpu else None

    def __reduce__(self) -> tuple[Any, ...]:
        return safe_open.get_slice, (self._opened, self._info.name)

    def get_shape(self) -> list[int]:
        """The shape of the whole tensor."""
        return list(self._info.shape)

    def get_dtype(self) -> str:
        """The dtype of the whole tensor, as in the header."""
        return self._info.dtype

    def __getitem__(self, index: Any) -> Any:
        reader, info = self._reader, self._info
        if self._make is not None:
            made = load_indexed(reader.loader, reader.checkpoint, info.position, index, self._make)
            if made is not None:
                return made
        plain = _indexing.plain(index, info.shape)
        if plain is not None:
            shape = [end - start for start, end in plain]
            return reader.whole(info) if shape == info.shape else reader.part(info, plain, shape)
        if reader.strict:
            cuts = _indexing.strict(index, info.shape)
        else:
            found = _indexing.simple(index, info.shape)
            if found is None:
                reader.framework.refuse(index, info.shape)
                if info.dtype == _frameworks.PACKED:
                    raise _packed_pair_error(info)
                return reader.whole(info)[index]
            cuts = found
        if all(cut == (0, size, 1, False) for cut, size in zip(cuts, info.shape)):
            return reader.whole(info)
        if info.dtype == _frameworks.PACKED and cuts and cuts[-1].step != 1:
            raise _packed_pair_error(info)
        shape = [cut.stop - cut.start for cut in cuts if not cut.single]
        part = reader.part(info, [(cut.start, cut.stop) for cut in cuts], shape)
        if all(cut.step == 1 for cut in cuts):
            return part
        return reader.framework.stepped(part, tuple(slice(None, None, cut.step) for cut in cuts if not cut.single))


def _packed_pair_error(info: Info) -> SafetensorError:
    message = f"tensor `{info.name}`: two elements of {info.dtype} are one of torch, which this index would separate"
    return error(f"{message}; take slices, without a step in the last dimension", tensor=info.name)


def _refuse_unfit(reader: Reader, wanted: list[tuple[Info, Part]]) -> None:
    """Refuses tensors that the framework does not support, before anything is loaded."""
    for info, part in wanted:
        reader.framework.check(info.dtype, info.shape, info.name)
        if part is not None and part[0] != (0, info.shape[0]):
            # Rows of elements that are shorter than a byte may begin within a byte.
            rows = max(info.shape[0], 1)
            if any(info.nbytes * 8 // rows * bound % 8 for bound in part[0]):
                raise error(
                    f"tensor `{info.name}`: rows {part[0][0]} to {part[0][1]} of {info.dtype} {info.shape} do not "
                    "begin and end on bytes",
                    "misaligned",
                    tensor=info.name,
                )


def _background(reader: Reader, batches: list[list[tuple[Info, Part]]], ahead: int | None) -> PrefetchLoader:
    """Loads batches one after the other in the background. At most `ahead` batches are loaded before they are
    requested. None means no limit."""
    by_name = {info.name: (info, part) for batch in batches for info, part in batch}

    def load(names: Sequence[str], cancel: Cancel) -> dict[str, Any]:
        return reader.load([by_name[name] for name in names], cancel)

    return PrefetchLoader([[info.name for info, _ in batch] for batch in batches], load, ahead)


def _stream(reader: Reader, batches: list[list[tuple[Info, Part]]]) -> Iterator[tuple[str, Any]]:
    with _background(reader, batches, 1) as loader:
        yield from loader


def _one_by_one(reader: Reader, wanted: list[tuple[Info, Part]]) -> Iterator[tuple[str, Any]]:
    for info, _ in wanted:
        yield info.name, reader.whole(info)


def _batches(wanted: list[tuple[Info, Part]], most: int | None = None) -> list[list[tuple[Info, Part]]]:
    """Splits `wanted` into batches. The tensors of a batch are loaded together. A batch has at most `most` bytes, or is
    one longer tensor."""
    batches: list[list[tuple[Info, Part]]] = []
    longest = _BATCH_MAX if most is None else most
    length, limit = 0, min(_BATCH_FIRST // 2, longest)
    for entry in wanted:
        nbytes = entry[0].nbytes
        if not batches or length + nbytes > limit:
            batches.append([])
            length, limit = 0, min(limit * 2, longest)
        batches[-1].append(entry)
        length += nbytes
    return batches


def _part_of_rows(info: Info, rows: slice | None) -> Part:
    """The part of a tensor that a plan requests."""
    if rows is None:
        return None
    if not isinstance(rows, slice):
        raise error(f"prefetch plan values must be None or a slice, got {type(rows)} for {info.name}")
    if not info.shape:
        raise error(f"cannot slice rows of the 0-d tensor {info.name}")
    size = info.shape[0]
    for word in ("start", "stop"):
        bound = getattr(rows, word)
        if bound is None:
            continue
        if not isinstance(bound, int):
            raise error(f"prefetch plan slice bounds for {info.name} must be integers or None")
        if not -size <= bound <= size:
            raise error(f"prefetch plan slice {word} {bound} for {info.name} is out of range for {size} rows")
    start, stop, step = rows.indices(size)
    if step != 1:
        raise error(f"prefetch plan slices must have step 1, got {step} for {info.name}")
    return [(start, max(start, stop)), *((0, size) for size in info.shape[1:])]
