"""A rank of a gloo group. It makes calls with one of two packages, and writes their results.

    python peer_ranks.py fastsafetensors|ours RANK SIZE STORE OUT CALLS

`CALLS` is a JSON list of `{"do": NAME, ...}`. `OUT` gets a pickle that has, for each call, its value, or the class of
its exception and the bases of this class.
"""

import contextlib
import importlib
import io
import json
import pickle
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from peers import plain


def module_of(word, name=""):
    root = "fastsafetensors" if word == "fastsafetensors" else "tensorfs.compat.fastsafetensors"
    return importlib.import_module(root + name)


class Calls:
    """The calls, by name."""

    def __init__(self, word, pg):
        self.word, self.pg, self.module = word, pg, module_of(word)
        self.types = module_of(word, ".st_types")

    def loader(self, files):
        loader = self.module.SafeTensorsFileLoader(self.pg, "cpu", nogds=True)
        loader.add_filenames({int(rank): paths for rank, paths in files.items()})
        return loader

    @contextlib.contextmanager
    def buffer(self, files):
        loader = self.loader(files)
        buffer = loader.copy_files_to_device()
        try:
            yield buffer
        finally:
            buffer.close()
            loader.close()

    def tensors(self, files, names, dim):
        with self.buffer(files) as buffer:
            places = dict(buffer.key_to_rank_lidx)
            return places, [buffer.get_sharded(name, dim) for name in names], [buffer.get_filename(name) for name in names]

    def whole(self, files, names):
        with self.buffer(files) as buffer:
            # Each tensor is taken once: when all tensors of a file were taken, the package frees the file, and would
            # send other memory the second time.
            ask = (buffer.get_tensor, buffer.get_tensor_wrapped)
            return [ask[number % 2](name) for number, name in enumerate(names)]

    def twice(self, files, name):
        with self.buffer(files) as buffer:
            return buffer.get_tensor(name), buffer.get_tensor(name)

    def cast(self, files, name, dtype):
        with self.buffer(files) as buffer:
            return buffer.get_tensor(name, dtype=self.types.DType[dtype])

    def push(self, files, names, rank):
        with self.buffer(files) as buffer:
            return [buffer.push_tensor(name, rank) for name in names]

    def columns(self, files, names, dim):
        with self.buffer(files) as buffer:
            return buffer.get_multi_cols(names, dim)

    def all_of(self, files, dims):
        with self.buffer(files) as buffer:
            return list(buffer.as_dict(dims).items())

    def local(self, files, names):
        with self.buffer(files) as buffer:
            return list(buffer.iter_local_tensors(names))

    def weights(self, files, **arguments):
        if arguments.pop("keep", None):
            arguments["tensor_filter"] = lambda name: "w" in name
        loader = self.module.ParallelLoader(self.pg, files, nogds=True, use_tqdm_on_load=False, **arguments)
        try:
            return [(name, tensor.clone()) for name, tensor in loader.iterate_weights()]
        finally:
            loader.close()

    def leave(self, files):
        """Only rank 0 leaves the loop."""
        loader = self.module.ParallelLoader(self.pg, files, use_tqdm_on_load=False, max_batch_bytes=96)
        with contextlib.closing(loader.iterate_weights()) as weights:
            for name, _ in weights:
                if self.pg.rank() == 0:
                    return name
        return "the end"

    def missing(self, files):
        """One file is there for rank 0 only."""
        return self.weights([files[0], files[1] + ("" if self.pg.rank() == 0 else "x")])

    def instant(self, files, **arguments):
        opened = importlib.import_module("tensorfs.compat.instanttensor").safe_open
        with opened(files, "pt", "cpu", self.pg, **arguments) as f:
            return f.keys(), list(f.tensors())


    def held(self, files):
        """Rank 0 ends the context, and keeps the iterator."""
        opened = importlib.import_module("tensorfs.compat.instanttensor").safe_open
        with opened(files, "pt", "cpu", self.pg, chunk_size=4096, buffer_size=8192) as f:
            tensors = f.tensors()
            names = [next(tensors)[0]] if self.pg.rank() == 0 else [name for name, _ in tensors]
        return names + [name for name, _ in tensors]


def main(word, rank, size, store, out, calls):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=timedelta(seconds=20)
    )
    made = Calls(word, dist.group.WORLD)
    outcomes = []
    for call in json.loads(calls):
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                outcomes.append((plain(getattr(made, call.pop("do"))(**call)), None, ""))
            except Exception as e:
                outcomes.append((None, [cls.__name__ for cls in type(e).__mro__], str(e)))
    with open(out, "wb") as file:
        pickle.dump(outcomes, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
