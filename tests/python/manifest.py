"""The manifest of the fixtures: the checkpoints, the way in which each one is mounted, and its expected result."""

import json
import os
import shutil
from pathlib import Path

import oracle
from mounts import FIXTURES

KINDS = {"safetensors", "hf_single", "hf_sharded", "hf_shards_without_index", "dcp", "bintensors", "tensorizer", "torch"}


class Entry:
    """One fixture. `source` is the path that tensorfs gets, and `shown` is the name of the virtual file in the
    mount."""

    def __init__(self, fields):
        self.fields = fields
        self.id = fields["id"]
        self.kind = fields["kind"]
        self.tensors = fields.get("tensors")

    def __repr__(self):
        return self.id

    @property
    def source(self):
        path = FIXTURES / self.fields["path"]
        return path / self.fields["shards"] if self.kind == "dcp" and "shards" in self.fields else path

    @property
    def shown(self):
        if self.kind == "safetensors":
            return self.source.name
        if self.kind in ("bintensors", "tensorizer"):
            return f"{self.source.stem}.safetensors"
        if self.kind == "torch" and self.fields["path"] and self.source.is_file():
            return f"{self.source.stem}.safetensors"
        if self.kind == "hf_single":
            return self.fields["single"]
        if self.kind == "hf_sharded" and "index" in self.fields:
            stem, variant = split_index_name(self.fields["index"])
            return f"{stem}{variant}.safetensors"
        return "model.safetensors"

    @property
    def weight_map(self):
        """Name of the weight map in the mount, or None."""
        return self.fields.get("index")

    @property
    def options(self):
        """The mount options. Two entries use the folder `single_and_index`, and the option `prefer` selects the file of
        each."""
        if self.fields["path"].endswith("single_and_index"):
            return ["prefer=shards" if self.kind == "hf_sharded" else "prefer=file"]
        return self.fields.get("options", [])

    def whole_file(self):
        """The expected bytes of the virtual file: made from the shards, or the stored file itself if it is a whole file
        already."""
        if self.kind == "dcp":
            return oracle.from_dcp(self.source)
        if self.kind == "hf_sharded":
            return oracle.from_weight_map(self.source / self.weight_map)
        if self.kind == "hf_shards_without_index":
            return oracle.whole_tensors(list(self.source.glob("*.safetensors")))
        if self.kind == "bintensors":
            return oracle.from_bintensors(self.source, older=self.fields["layout"].startswith("legacy"))
        if self.kind == "tensorizer":
            return oracle.from_tensorizer(self.source)
        if (self.source / ".metadata").exists():
            return oracle.from_distcp(self.source)
        if self.kind == "torch" and (self.source / "latest").is_file():
            return oracle.from_deepspeed(self.source, "zero=fp32" in self.options)
        if self.kind == "torch":
            paths = [self.source] if self.source.is_file() else [
                path for pattern in ("*.bin", "model_world_size_*.pt") for path in self.source.glob(pattern)
            ]
            return oracle.from_torch(paths)
        return (self.source / self.shown if self.source.is_dir() else self.source).read_bytes()


class BadEntry(Entry):
    """A broken checkpoint: `expect` is `error` or `either`."""

    @property
    def expect(self):
        return self.fields["expect"]

    @property
    def classes(self):
        return {self.fields["class"], *(self.fields.get("also") or [])}

    def build(self, folder):
        """Returns the path to mount. A case that cannot be stored is made in `folder`."""
        if "setup" not in self.fields:
            return self.source
        target = Path(folder) / self.id
        for step in self.fields["setup"]:
            _build_step(step, target)
        return target

    def names(self, source):
        """Names that a message may contain: the files of the case, and the shards that its weight map names."""
        if source.is_file():
            return {source.name}
        names = {path.name for path in source.iterdir()} | {step["remove"] for step in self.fields.get("setup", []) if "remove" in step}
        for path in source.glob("*.index.json"):
            names |= _names_in_weight_map(path)
        return names


def split_index_name(name):
    """`model.safetensors.index.fp16.json` -> ("model", ".fp16")."""
    stem, _, rest = name.partition(".safetensors.")
    variant = rest.removesuffix(".json").replace("index", "").strip(".")
    return stem, f".{variant}" if variant else ""


def _build_step(step, target):
    if "copy" in step:
        shutil.copytree(FIXTURES / step["copy"], target, symlinks=True, copy_function=shutil.copyfile)
    elif "symlink" in step:
        os.symlink(step["target"], target / step["symlink"])
    elif "fifo" in step:
        os.mkfifo(target / step["fifo"])
    elif "write" in step:
        shutil.copyfile(FIXTURES / step["of"], target / step["write"])
    elif "remove" in step:
        (target / step["remove"]).unlink()
    elif "truncate" in step:
        os.truncate(target / step["truncate"], step["length"])
    else:
        raise ValueError(f"unknown step {step}")


def _names_in_weight_map(path):
    try:
        shards = json.loads(path.read_bytes())["weight_map"].values()
        return {name for name in shards if isinstance(name, str) and name}
    except (ValueError, KeyError, TypeError, AttributeError):
        return set()


def _load(section, kind):
    entries = json.loads((FIXTURES / "manifest.json").read_text())[section]
    return [kind(fields) for fields in entries if fields["kind"] in KINDS]


GOOD = _load("good", Entry)
BAD = _load("bad", BadEntry)


def by_id(name):
    return next(entry for entry in GOOD + BAD if entry.id == name)
