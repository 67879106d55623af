"""`tensorfs.consolidate`, and the replacement for the consolidation of torch and NeMo."""

import errno
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import safetensors
from safetensors.numpy import save_file

import checkpoints
import oracle
from faults import FaultFs
from manifest import GOOD
from package import ROOT, Mount, TestCase, has_torch, needs_torch, wait_until

import tensorfs


def drop_in():
    path = ROOT / "examples/consolidate_safetensors_files.py"
    spec = importlib.util.spec_from_file_location("consolidate_safetensors_files", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Consolidate(TestCase):
    def setUp(self):
        super().setUp()
        self.source = checkpoints.grid_2d(self.tmp / "src")
        self.out = self.tmp / "out"

    def tensors(self, path):
        return {name: data for name, (_, _, data) in oracle.tensor_bytes(path).items()}

    def test_a_folder_gets_what_a_mount_shows(self):
        written = tensorfs.consolidate(self.source, self.out, verify=True)
        self.assertEqual(written.files, 2)
        self.assertEqual(written.bytes, sum(path.stat().st_size for path in self.out.iterdir()))
        self.assert_same((self.out / "model.safetensors").read_bytes(), oracle.from_dcp(self.source))
        with self.assertRaisesRegex(tensorfs.SafetensorError, "is there already; .*in Python `overwrite=True`"):
            tensorfs.consolidate(self.source, self.out)
        tensorfs.consolidate(self.source, self.out, overwrite=True)

    def assert_like_mount(self, source, **how):
        """`consolidate` with these arguments writes the files that a mount with these options shows."""
        options = []
        for key, values in how.items():
            values = [values] if isinstance(values, (str, os.PathLike)) else values
            options += [f"{key.replace('_', '-')}={value}" for value in values]
        tensorfs.consolidate(source, self.out, overwrite=True, **how)
        with Mount(source, *options) as m:
            for path in m.path.iterdir():
                self.assert_same((self.out / path.name).read_bytes(), path.read_bytes(), f"{how}: {path.name}")
            self.assertEqual(sorted(os.listdir(self.out)), sorted(os.listdir(m.path)))
        shutil.rmtree(self.out)

    def test_every_option_of_a_view_writes_what_a_mount_with_it_shows(self):
        mapping, rules = self.tmp / "mapping.json", self.tmp / "rules.toml"
        mapping.write_text('{"a": 2, "b": 1}')
        rules.write_text("[[rename]]\nregex = '^'\nto = 'model.'\n")
        for how in (
            {"layout": "shards=2"}, {"layout": "shards=1MB"}, {"layout": f"map={mapping}"}, {"layout": "original"},
            {"format": "bintensors"}, {"weight_map": "hide"}, {"include": "a"}, {"exclude": ["a"]}, {"rename": rules},
            {"dtype": "f16"}, {"dtype": "f32", "keep": ["a", "b"]},
            {"layout": "shards=2", "rename": rules, "dtype": "bf16", "keep": "model.b"},
        ):
            with self.subTest(how):
                self.assert_like_mount(self.source, **how)

    def test_behind_a_mount_the_arguments_apply_to_what_it_shows(self):
        rules, again = self.tmp / "rules.toml", self.tmp / "again.toml"
        rules.write_text("[[rename]]\nregex = '^'\nto = 'x.'\n")
        again.write_text("[[rename]]\nfrom = 'x.a'\nto = 'y.a'\n")
        with Mount(self.source, "layout=shards=2") as m:
            tensorfs.consolidate(m.path, self.out)
            for path in m.path.iterdir():
                self.assert_same((self.out / path.name).read_bytes(), path.read_bytes(), path.name)
            shutil.rmtree(self.out)
            tensorfs.consolidate(m.path, self.tmp / "half", dtype="f16")
        with Mount(self.source, "dtype=f16") as m:
            tensorfs.consolidate(self.source, self.tmp / "source", dtype="f16")
            whole = (m.path / "model.safetensors").read_bytes()
        for folder in ("half", "source"):
            self.assert_same((self.tmp / folder / "model.safetensors").read_bytes(), whole)
        with Mount(self.source, f"rename={rules}") as m:
            tensorfs.consolidate(m.path, self.out, rename=again, layout="shards=2")
            shown = self.tensors(m.path / "model.safetensors")
        found = {}
        for path in self.out.glob("*.safetensors"):
            found |= self.tensors(path)
        self.assertEqual(found, {name.replace("x.a", "y.a"): data for name, data in shown.items()})

    def test_options_that_do_not_fit_are_refused_before_anything_is_written(self):
        for how, said in (
            ({"layout": "double"}, "layout=`double`: expected single"), ({"format": "gguf"}, "format=`gguf`"),
            ({"layout": "original", "dtype": "f16"}, "layout=original shows files as they are"), ({"keep": "a"}, "keep needs dtype"),
            ({"include": "none*"}, "none*"), ({"numbers": {"a": 1, "b": 2}, "layout": "shards=2"}, "give no layout"),
            ({"layout": "shards=7"}, "layout=shards=7 needs a tensor for each file"),
        ):
            with self.subTest(how), self.assertRaisesRegex(tensorfs.SafetensorError, re.escape(said)):
                tensorfs.consolidate(self.source, self.out, **how)
        self.assertEqual(os.listdir(self.tmp), ["src"])

    def test_a_list_of_numbers_is_about_the_tensors_that_the_view_leaves(self):
        rules = self.tmp / "rules.toml"
        rules.write_text("[[rename]]\nregex = '^'\nto = 'x.'\n")
        tensorfs.consolidate(self.source, self.out, numbers={"x.a": 1, "x.b": 2}, rename=rules, dtype="f32")
        with Mount(self.source, f"rename={rules}", "dtype=f32", "layout=shards=2") as m:
            for path in m.path.glob("*.safetensors"):
                self.assert_same((self.out / path.name).read_bytes(), path.read_bytes(), path.name)

    def test_the_drop_in_writes_the_files_of_torch(self):
        consolidate = drop_in().consolidate_safetensors_files
        self.out.mkdir()
        consolidate(str(self.source), str(self.out), {"a": 1, "b": 2}, num_threads=4)
        tensorfs.consolidate(self.source, self.tmp / "whole")
        whole = self.tensors(self.tmp / "whole/model.safetensors")
        for number, name in ((1, "a"), (2, "b")):
            tensors = self.tensors(self.out / f"model-0000{number}-of-00002.safetensors")
            self.assertEqual({key: len(data) for key, data in tensors.items()}, {name: len(whole[name])})
            self.assert_same(tensors[name], whole[name])
        index = json.loads((self.out / "model.safetensors.index.json").read_text())
        self.assertEqual(index["metadata"]["total_size"], sum(map(len, whole.values())))
        self.assertEqual(index["weight_map"]["b"], "model-00002-of-00002.safetensors")
        # Writes beside the shards without a mapping, and does it a second time.
        for _ in range(2):
            consolidate(str(self.source), str(self.source))
        tensors = self.tensors(self.source / "model-00001-of-00001.safetensors")
        self.assertEqual(sorted(tensors), ["a", "b"])

    def test_the_drop_in_casts_by_the_rules_of_nemo(self):
        consolidate = drop_in().consolidate_safetensors_files
        dtypes = {"kept": "F32", "listed": "F32", "wide": "F64", "number": "I64", "small": "F8_E4M3"}
        entries = [(name, dtype, (4, 6), bytes(24 * oracle.BITS[dtype] // 8)) for name, dtype in dtypes.items()]
        info = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(dict.fromkeys(dtypes, {"saved_offsets": [0, 0]}))}
        (self.tmp / "mixed").mkdir()
        checkpoints.write_shard(self.tmp / "mixed" / checkpoints.dcp_name(1), sorted(entries, key=lambda e: -oracle.BITS[e[1]]), info)
        mapping = {"kept": 1, "listed": 1, "wide": 2, "number": 2, "small": 2}

        def found(**how):
            consolidate(str(self.tmp / "mixed"), str(self.out), mapping, **how)
            files = sorted(self.out.glob("*.safetensors"))
            return {name: dtype for file in files for name, (dtype, _, _) in oracle.tensor_bytes(file).items()}

        same = {"number": "I64", "small": "F8_E4M3"}
        listed = {"kept": "F32", "listed": "F16", "number": "F32", "small": "F32", "none": "F32"}
        self.assertEqual(found(), {"kept": "F32", "listed": "F32", "wide": "F64", **same})
        self.assertEqual(found(cast_dtype="torch.bfloat16"), {"kept": "BF16", "listed": "BF16", "wide": "BF16", **same})
        self.assertEqual(found(fqn_to_dtype_mapping=listed), {"kept": "F32", "listed": "F16", "wide": "F64", **same})
        self.assertEqual(
            found(cast_dtype="torch.bfloat16", fqn_to_dtype_mapping=listed, use_staging=True, staging_dir="/none"),
            {"kept": "F32", "listed": "BF16", "wide": "BF16", **same},
        )
        # The original is quantized, and was saved as floats.
        with self.assertLogs("consolidate_safetensors_files", "WARNING"):
            self.assertEqual(found(fqn_to_dtype_mapping={"kept": "F8_E4M3"})["kept"], "F32")
        for word, kind, said in (
            ("torch.float64", tensorfs.SafetensorError, "F32 cannot be cast to F64"),
            ("torch.int8", ValueError, "cast_dtype=torch.int8: expected one of torch.bfloat16"),
        ):
            with self.assertRaisesRegex(kind, said):
                found(cast_dtype=word)

    def test_names_that_no_shard_has_are_refused_unless_the_caller_ignores_them(self):
        consolidate, mapping = drop_in().consolidate_safetensors_files, {"a": 1, "b": 1, "tied": 1}
        with self.assertRaisesRegex(tensorfs.SafetensorError, "`tied`: is not in the checkpoint"):
            consolidate(str(self.source), str(self.out), mapping)
        self.assertFalse(self.out.exists())
        with self.assertLogs("consolidate_safetensors_files", "WARNING") as logged:
            consolidate(str(self.source), str(self.out), mapping, ignore_missing=True)
        self.assertIn("tied", logged.output[0])
        self.assertEqual(sorted(self.tensors(self.out / "model-00001-of-00001.safetensors")), ["a", "b"])

    @needs_torch
    def test_without_a_process_group_the_caller_writes(self):
        drop_in().consolidate_safetensors_files_on_every_rank(str(self.source), str(self.out), {"a": 1, "b": 1})
        self.assertEqual(sorted(self.tensors(self.out / "model-00001-of-00001.safetensors")), ["a", "b"])

    def test_a_mapping_that_misses_or_adds_tensors_is_refused_and_nothing_is_written(self):
        for mapping, word in (({"a": 1}, "`b`: is not in the list"), ({"a": 1, "b": 1, "c": 2}, "`c`: is not in the checkpoint"),
                              ({"a": 0, "b": 1}, "found 0")):
            with self.assertRaisesRegex(tensorfs.SafetensorError, word):
                tensorfs.consolidate(self.source, self.out, numbers=mapping)
        self.assertFalse(self.out.exists())

    def test_every_dtype_and_a_scalar_are_written_as_they_are(self):
        consolidate = drop_in().consolidate_safetensors_files
        for entry in GOOD:
            if entry.kind == "dcp":
                with self.subTest(entry.id):
                    out = self.tmp / entry.id
                    consolidate(str(entry.source), str(out))
                    found = self.tensors(out / "model-00001-of-00001.safetensors")
                    whole = self.tmp / "whole.safetensors"
                    whole.write_bytes(entry.whole_file())
                    self.assertEqual(found, self.tensors(whole))

    def test_the_result_is_read_by_the_genuine_package(self):
        drop_in().consolidate_safetensors_files(str(self.source), str(self.out), None)
        with safetensors.safe_open(self.out / "model-00001-of-00001.safetensors", "np") as read:
            self.assertEqual((read.get_slice("a").get_shape(), read.get_slice("b").get_dtype()), ([1001, 801], "BF16"))

    def test_the_name_of_a_file_gets_one_file_as_from_the_command(self):
        with Mount(self.source) as m, Mount(self.source, "format=bintensors") as bt:
            shown = {".safetensors": (m.path / "model.safetensors").read_bytes(), ".bt": (bt.path / "model.bt").read_bytes()}
        for suffix, how in ((".safetensors", {}), (".bt", {"format": "bintensors"}), (".tensors", {})):
            out = self.tmp / f"one{suffix}"
            written = tensorfs.consolidate(self.source, out, verify=True, **how)
            self.assertEqual(written, (1, out.stat().st_size))
            if suffix in shown:
                self.assert_same(out.read_bytes(), shown[suffix])
            with self.assertRaisesRegex(tensorfs.SafetensorError, "is there already"):
                tensorfs.consolidate(self.source, out, **how)
            tensorfs.consolidate(self.source, out, overwrite=True, **how)
        loaded = tensorfs.safe_open(self.tmp / "one.tensors", "np")
        self.assertEqual(sorted(loaded.keys()), ["a", "b"])
        shard = min(self.source.glob("*.safetensors"))
        before = shard.read_bytes()
        for out, how, said in (
            (self.tmp / "x.safetensors", {"layout": "shards=2"}, "shows 2 weight files"),
            (self.tmp / "x.bt", {}, "the name is one of a bintensors file"),
            (f"{self.tmp}/x.safetensors/", {}, "the name is one of a file, not of a folder"),
            (shard, {"overwrite": True}, "is a file of the source"),
        ):
            with self.assertRaisesRegex(tensorfs.SafetensorError, said):
                tensorfs.consolidate(self.source, out, **how)
        self.assertEqual(shard.read_bytes(), before)
        self.assertEqual(sorted(os.listdir(self.tmp)), ["one.bt", "one.safetensors", "one.tensors", "src"])
        # The source file has no suffix, so its content decides the format.
        blob, tensors = self.tmp / "src/blob", self.tmp / "one.tensors"
        os.rename(self.tmp / "one.safetensors", blob)
        for source, out, how in ((blob, "x.bt", {}), (tensors, "x.safetensors", {"layout": "original"})):
            with self.assertRaisesRegex(tensorfs.SafetensorError, "the name is one of a"):
                tensorfs.consolidate(source, self.tmp / out, **how)
            self.assertFalse((self.tmp / out).exists())
        blob.unlink()
        # A folder with the suffix of a file stays a folder, and with `numbers` the output is always a folder.
        (self.tmp / "x.safetensors").mkdir()
        tensorfs.consolidate(self.source, self.tmp / "x.safetensors")
        self.assertIn("model.safetensors", os.listdir(self.tmp / "x.safetensors"))
        tensorfs.consolidate(self.source, self.tmp / "y.safetensors", numbers={"a": 1, "b": 1})
        self.assertIn("model-00001-of-00001.safetensors", os.listdir(self.tmp / "y.safetensors"))

    def test_a_full_disk_is_an_os_error_with_its_number(self):
        large = self.tmp / "large.safetensors"
        # The file consists of holes, and is much longer than the free space of the disk.
        length = shutil.disk_usage(self.tmp).free + (64 << 30)
        header = json.dumps({"t": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
        large.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(large, 8 + len(header) + length)
        for out in (self.out, self.tmp / "out.safetensors"):
            with self.assertRaises(OSError) as caught:
                tensorfs.consolidate(large, out)
            self.assertEqual(caught.exception.errno, errno.ENOSPC)
            self.assertEqual(caught.exception.filename, str(out))
        self.assertEqual(sorted(os.listdir(self.tmp)), ["large.safetensors", "src"])

    def test_numbered_files_that_would_be_no_checkpoint_are_refused(self):
        mapping = self.tmp / "gap.json"
        mapping.write_text('{"a": 1, "b": 3}')
        for how, said in (
            ({"layout": "shards=2", "format": "bintensors"}, "layout=shards=2 makes numbered files, which are no checkpoint"),
            ({"layout": f"map={mapping}", "weight_map": "hide"}, "has no file 2, and without a weight map"),
        ):
            with self.assertRaisesRegex(tensorfs.SafetensorError, re.escape(said)):
                tensorfs.consolidate(self.source, self.out, **how)
        self.assertFalse(self.out.exists())

    def test_an_interrupted_copy_leaves_nothing(self):
        source, place = self.tmp / "slow", self.tmp / "place"
        for folder in (source, place):
            folder.mkdir()
        large = source / "large.safetensors"
        header = json.dumps({"t": {"dtype": "U8", "shape": [10**9], "data_offsets": [0, 10**9]}}).encode()
        large.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(large, 8 + len(header) + 10**9)
        code = "import sys, tensorfs; tensorfs.consolidate(sys.argv[1], sys.argv[2])"
        with FaultFs(source) as slow, slow.lifted():
            # The source is so slow that the copy cannot end before the signal.
            slow.tell("delay", "*.safetensors", 300)
            words = [sys.executable, "-c", code, slow.path / large.name, place / "out"]
            with subprocess.Popen(words, stderr=subprocess.PIPE) as process:
                wait_until((place / ".out.tensorfs-partial/parts/0").exists, 30, "the partial file")
                process.send_signal(signal.SIGINT)
                _, error = process.communicate(timeout=60)
        self.assertIn(b"KeyboardInterrupt", error)
        self.assertEqual(os.listdir(place), [])

    def test_config_gives_the_small_files_that_a_mount_with_it_shows(self):
        base = self.tmp / "base"
        base.mkdir()
        (base / "config.json").write_text('{"model_type": "llama"}')
        (base / "tokenizer.json").write_text("{}")
        (base / "pytorch_model.bin").write_bytes(b"x")
        for config, names in ((base, ["config.json", "tokenizer.json"]), (base / "tokenizer.json", ["tokenizer.json"])):
            with self.subTest(config):
                self.assert_like_mount(self.source, config=config)
                tensorfs.consolidate(self.source, self.out, config=str(config), overwrite=True)
                self.assertEqual(sorted(os.listdir(self.out)), sorted([*names, "model.safetensors", "model.safetensors.index.json"]))
                shutil.rmtree(self.out)
        for how, cls, said in (
            ({"config": self.tmp / "none"}, FileNotFoundError, "none"),
            ({"config": self.source}, tensorfs.SafetensorError, "no small file there, like config.json"),
            ({"config": base, "numbers": {"a": 1, "b": 1}}, tensorfs.SafetensorError, "give no config"),
        ):
            with self.subTest(how), self.assertRaisesRegex(cls, said):
                tensorfs.consolidate(self.source, self.out, **how)
        self.assertFalse(self.out.exists())

    def test_a_source_that_does_not_answer_is_a_timeout_and_nothing_is_left(self):
        numbers = {"a": 1, "b": 1}
        # With `numbers` the folder is listed, which has the same deadline.
        for request, how in (("", {}), ("-lookup", {}), ("-open", {}), ("-getattr", {"numbers": numbers}), ("-readdir", {"numbers": numbers})):
            with self.subTest(request, **how), FaultFs(self.source) as source, source.lifted():
                source.tell(f"stall{request}", "*")
                with self.assertRaisesRegex(TimeoutError, f"cannot open: the file system does not answer within 0.5 s \\(io_timeout\\): '{source.path}'"):
                    tensorfs.consolidate(source.path, self.out, io_timeout=0.5, **how)
        self.assertEqual(os.listdir(self.tmp), ["src"])

    def in_a_stall(self, action, seconds):
        """Runs a copy whose source stalls in the middle, and calls `action`. Returns the two lines of its output."""
        code = """
import os, sys, tensorfs
try:
    tensorfs.consolidate(sys.argv[1], sys.argv[2], io_timeout=float(sys.argv[3]))
except BaseException as e:
    print(type(e).__name__, e, flush=True)
print(os.listdir(os.path.dirname(sys.argv[2])), flush=True)
os._exit(0)
"""
        large = self.tmp / "large"
        large.mkdir()
        save_file({str(at): np.full(1 << 20, at, np.uint8) for at in range(64)}, large / "model.safetensors")
        place = self.tmp / "place"
        place.mkdir()
        with FaultFs(large) as source, source.lifted():
            source.tell("stall", "*.safetensors", 32 << 20)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
            words = [sys.executable, "-c", code, source.path, place / "out", str(seconds)]
            with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
                wait_until(source.parked, 30, "a read that stalls")
                self.assertTrue((place / ".out.tensorfs-partial").exists())
                action(process)
                said = [process.stdout.readline() for _ in "12"]
                # The process cannot end while the source stalls.
                source.tell("ok")
        return said

    def test_a_copy_whose_source_stalls_ends_at_the_deadline(self):
        said, left = self.in_a_stall(lambda process: None, 2)
        self.assertRegex(said, "TimeoutError .*did not come within 2 s.*model.safetensors")
        self.assertEqual(left, "[]\n")

    def test_a_copy_whose_source_stalls_ends_with_ctrl_c(self):
        said, left = self.in_a_stall(lambda process: process.send_signal(signal.SIGINT), 600)
        self.assertEqual((said.split()[0], left), ("KeyboardInterrupt", "[]\n"))

    def test_torch_and_the_drop_in_write_the_same_tensors_where_torch_is_right(self):
        if not has_torch:
            self.skipTest("needs torch")
        from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

        folder = self.tmp / "floats"
        made = checkpoints.DcpSet(9).cut("rows", (40, 6), (4, 1)).cut("columns", (6, 40), (1, 4)).cut("cube", (4, 6, 8), (1, 1, 4))
        made.save(folder)
        mapping = {"rows": 1, "columns": 2, "cube": 2}
        theirs = self.tmp / "theirs"
        theirs.mkdir()
        consolidate_safetensors_files(str(folder), str(theirs), mapping)
        drop_in().consolidate_safetensors_files(str(folder), str(self.out), mapping)
        self.assertEqual(sorted(os.listdir(theirs)), sorted(os.listdir(self.out)))
        for path in theirs.glob("*.safetensors"):
            self.assertEqual(self.tensors(path), self.tensors(self.out / path.name))
        indexes = [json.loads((at / "model.safetensors.index.json").read_text()) for at in (theirs, self.out)]
        self.assertEqual(*indexes)
