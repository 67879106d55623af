"""`tp=N` without `rank=`: the slices of all ranks, each rank in a folder of one mount."""

import json
import os
import shutil

import numpy as np
from safetensors.numpy import load_file

import checkpoints
import oracle
import views
from mounts import HANGS, Mount, TestCase, needs_root, read_or_none, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config
from test_consolidate import content
from test_view_layouts import Refusals
from test_view_ranks import DENSE, model, slices

FILE = "model.safetensors"


def proved(mount):
    """Number of checkpoints that a mount has laid out."""
    index = tensorfs("status", mount.path, "--json").json()[0]["index"]
    return index["sets_from_headers"] + index["sets_from_index"]


class RankFolders(TestCase):
    def setUp(self):
        super().setUp()
        self.source = model(self.tmp / "llama", "llama")

    def alone(self, source, ranks, *options):
        """The content of a mount of each rank by itself."""
        found = {}
        for rank in range(ranks):
            with Mount(source, f"tp={ranks}", f"rank={rank}", *options) as m:
                found[f"rank-{rank}"] = content(m.path)
        return found

    def assert_shows(self, folder, expected):
        self.assertEqual(sorted(os.listdir(folder)), sorted(expected))
        for rank, files in expected.items():
            found = content(folder / rank)
            self.assertEqual(list(found), list(files), rank)
            for name, data in files.items():
                self.assert_same(found[name], data, f"{rank}/{name}")

    def test_each_folder_has_the_slices_of_its_rank_and_nothing_else(self):
        tensors, _ = oracle.tensors_of(self.source)
        with Mount(self.source, "tp=4") as m:
            self.assertEqual(os.listdir(m.path), ["tp-4"])
            self.assertEqual(sorted(os.listdir(m.path / "tp-4")), [f"rank-{rank}" for rank in range(4)])
            for rank in range(4):
                folder = m.path / f"tp-4/rank-{rank}"
                self.assertEqual(sorted(os.listdir(folder)), ["config.json", FILE])
                self.assertEqual((folder / "config.json").read_text(), (self.source / "config.json").read_text())
                self.assertEqual(oracle.tensor_bytes(folder / FILE), views.contents(slices(tensors, DENSE, 4, rank)))

    def test_the_safetensors_package_reads_uneven_slices_as_torch_chunk_cuts_them(self):
        rng = np.random.default_rng(4)
        whole = {"three": rng.random((3, 5), np.float32), "wide": rng.random((4, 11), np.float32), "norm": rng.random(7, np.float32)}
        shards = [[("three", "F32", [3, 5], whole["three"].tobytes())],
                  [(name, "F32", list(whole[name].shape), whole[name].tobytes()) for name in ("wide", "norm")]]
        source = self.tmp / "uneven"
        source.mkdir()
        for number, tensors in enumerate(shards, 1):
            checkpoints.write_shard(source / checkpoints.shard_name(number, 2), tensors)
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nfrom = 'three'\ncut = 0\n[[rule]]\nfrom = 'wide'\ncut = -1\n")
        with Mount(source, "tp=4", f"tp-rules={rules}") as m:
            for rank in range(4):
                found = load_file(m.path / f"tp-4/rank-{rank}" / FILE)
                # Slices of ceil(size / ranks), as long as there is something left.
                expected = {"three": whole["three"][rank : rank + 1], "wide": whole["wide"][:, 3 * rank : 3 * rank + 3], "norm": whole["norm"]}
                self.assertEqual(set(found), set(expected))
                for name, array in expected.items():
                    self.assertEqual((found[name].shape, found[name].tobytes()), (array.shape, array.tobytes()), (rank, name))

    def test_a_tree_of_models_is_in_the_folder_of_each_rank_with_the_other_options(self):
        root = self.tmp / "tree"
        shutil.copytree(self.source, root / "org/one")
        model(root / "two", "qwen2")
        (root / "README").write_text("text")
        options = ["dtype=f16", "layout=shards=2", "exclude=*layers.1*"]
        expected = self.alone(root, 2, *options)
        with Mount(root, "tp=2", *options) as m:
            self.assert_shows(m.path / "tp-2", expected)
            inodes = [path.stat().st_ino for path in m.path.rglob("*")]
            self.assertEqual(len(inodes), len(set(inodes)))
        one = self.tmp / "one.safetensors"
        with Mount(self.source) as m:
            one.write_bytes((m.path / FILE).read_bytes())
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nregex = 'mlp'\ncut = 0\n")
        expected = self.alone(one, 2, f"tp-rules={rules}")
        with Mount(one, "tp=2", f"tp-rules={rules}") as m:
            self.assert_shows(m.path / "tp-2", expected)

    # They read the slices, recorded checksums of those, and said ok.
    def test_verify_and_index_find_the_source_of_every_folder_although_the_rules_have_changed(self):
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nregex = 'mlp'\ncut = 0\n")
        self.assert_done(tensorfs("verify", self.source))
        with Mount(self.source, "tp=2", f"tp-rules={rules}") as m:
            places = [m.path, m.path / "tp-2", m.path / "tp-2/rank-1", m.path / "tp-2/rank-1" / FILE]
            os.listdir(places[2])
            rules.write_text("[[rule]]\nregex = 'mlp'\ncut = 1\n")
            for place in places[:3]:
                found = tensorfs("index", place, "--json").json()["indexes"]
                self.assertEqual([one["directory"] for one in found], [str(self.source)], place)
            shard = min(self.source.glob("*.safetensors"))
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
            for place in places:
                outcome = tensorfs("verify", place)
                self.assert_refused(outcome)
                self.assertIn(str(shard), outcome.stderr)

    # `ls` cut the tensors by the new text.
    def test_the_folders_above_a_rank_are_read_as_mounted_after_its_config_changed(self):
        config = self.source / "config.json"
        with Mount(self.source, "tp=2") as m:
            for rank in range(2):
                (m.path / f"tp-2/rank-{rank}" / FILE).read_bytes()
            config.write_text(config.read_text().replace('heads": 4', 'heads": 1'))
            outcome = tensorfs("ls", m.path)
            self.assert_done(outcome)
            self.assertIn("config.json has changed since the mount", outcome.stderr)
            self.assertIn(f"name the mount point {m.path}", tensorfs("heat", m.path / "tp-2").stderr)

    def test_a_listing_lays_out_no_rank(self):
        root = self.tmp / "tree"
        for name in ("one", "two", "three"):
            shutil.copytree(self.source, root / name)
        with Mount(root, "tp=4") as m:
            # One is proved before the mount is there.
            self.assertEqual(proved(m), 1)
            for rank in range(4):
                folder = m.path / f"tp-4/rank-{rank}"
                self.assertEqual(sorted(os.listdir(folder)), ["one", "three", "two"])
                for entry in folder.iterdir():
                    entry.stat()
            self.assertEqual(proved(m), 1)
            (m.path / "tp-4/rank-3/two" / FILE).read_bytes()
            self.assertEqual(proved(m), 2)

    def test_consolidate_writes_the_folders_and_ls_lists_them(self):
        expected = self.alone(self.source, 2)
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", self.source, out, "-o", "tp=2", "--verify"))
        self.assertEqual(os.listdir(out), ["tp-2"])
        self.assert_shows(out / "tp-2", expected)
        listed = tensorfs("ls", self.source, "-o", "tp=2", "--json").json()
        self.assertEqual([one["directory"] for one in listed["sets"]], ["tp-2/rank-0", "tp-2/rank-1"])
        with Mount(self.source, "tp=2") as m:
            known = json.loads(os.getxattr(m.path, "user.tensorfs.source"))["view"]
            self.assertEqual((known["tp"], known.get("rank")), ("2", None))
            self.assertEqual(tensorfs("status", m.path, "--json").json()[0]["options"]["tp"], "2")
            # Behind the mount lie its source and its ranks.
            self.assert_done(tensorfs("consolidate", m.path, self.tmp / "behind"))
            self.assert_shows(self.tmp / "behind/tp-2", expected)
            self.assert_done(tensorfs("consolidate", m.path / "tp-2/rank-1", self.tmp / "one"))
            self.assertEqual(content(self.tmp / "one"), expected["rank-1"])
            self.assert_done(tensorfs("consolidate", m.path / "tp-2", self.tmp / "both"))
            self.assert_shows(self.tmp / "both", expected)
            self.assert_done(tensorfs("convert", m.path / "tp-2/rank-0", self.tmp / "zero.safetensors", "--to", "safetensors"))
            out = self.tmp / "none.safetensors"
            for command in (("convert", m.path, out, "--to", "safetensors"), ("load", m.path)):
                outcome = tensorfs(*command)
                self.assert_refused(outcome, 2)
                self.assertIn(f"several views here, name the folder of one: {m.path / 'tp-2/rank-0'}", outcome.stderr)
            self.assertFalse(out.exists())

    def test_commands_for_one_checkpoint_need_a_rank(self):
        out = self.tmp / "out.safetensors"
        for command in (("convert", self.source, out, "--to", "safetensors"), ("load", self.source), ("warm", self.source)):
            outcome = tensorfs(*command, "-o", "tp=2")
            self.assert_refused(outcome, 2)
            self.assert_one_line(outcome)
            self.assertIn("option tp needs rank=", outcome.stderr)
        self.assertFalse(out.exists())

    def test_a_refusal_of_all_ranks_is_printed_once(self):
        rules = self.tmp / "tp.toml"
        rules.write_text("[[rule]]\nfrom = 'none'\ncut = 0\n")
        for command in ("ls", "inspect"):
            outcome = tensorfs(command, self.source, "-o", f"tp=5,tp-rules={rules}")
            self.assert_refused(outcome)
            self.assert_one_line(outcome)
        self.assertEqual(len(tensorfs("ls", self.source, "--json", "-o", f"tp=5,tp-rules={rules}").json()["refused"]), 5)

    def test_checksums_guard_each_rank(self):
        index = self.tmp / "index"
        self.assert_done(tensorfs("verify", self.source, "--index-dir", index))
        expected = self.alone(self.source, 2)
        shard = min(self.source.glob("*.safetensors"))
        times, data = shard.stat(), bytearray(shard.read_bytes())
        options = ["tp=2", "verify=read", f"index-dir={index}"]
        with Mount(self.source, *options) as m:
            self.assert_shows(m.path / "tp-2", expected)
        with open(shard, "r+b") as file:
            file.seek(len(data) - 1)
            file.write(bytes([data[-1] ^ 1]))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        with Mount(self.source, *options) as m, self.assertRaises(OSError):
            for rank in range(2):
                (m.path / f"tp-2/rank-{rank}" / FILE).read_bytes()

    def test_models_come_and_go_in_the_folder_of_each_rank(self):
        store = self.tmp / "store"
        store.mkdir()
        expected = self.alone(self.source, 2)
        with Mount(store, "tp=2", "watch=auto", "watch-grace=1") as m:
            self.assertEqual(sorted(os.listdir(m.path / "tp-2")), ["rank-0", "rank-1"])
            shutil.copytree(self.source, self.tmp / "coming")
            os.rename(self.tmp / "coming", store / "model")
            for rank, files in expected.items():
                path = m.path / "tp-2" / rank / "model" / FILE
                wait_until(lambda path=path, data=files[FILE]: read_or_none(path) == data, HANGS, f"{rank} shows the model")
            # It decides how tensors are cut.
            config = store / "model/config.json"
            (store / "model/new").write_text(config.read_text().replace('heads": 4', 'heads": 1'))
            os.rename(store / "model/new", config)
            for rank in expected:
                error = m.path / "tp-2" / rank / "model/TENSORFS-ERROR.txt"
                wait_until(error.exists, HANGS, f"{rank} refuses the model")
                self.assertIn("1 units (num_key_value_heads)", error.read_text())
            shutil.rmtree(store / "model")
            for rank in expected:
                wait_until(lambda rank=rank: os.listdir(m.path / "tp-2" / rank) == [], HANGS, f"the model leaves {rank}")


class Refused(Refusals):
    def test_ranks_that_no_mount_shows_are_refused_before_the_source_is_read(self):
        source = self.tmp / "gone"
        views_file = self.tmp / "views.toml"
        views_file.write_text("[view.a]\n")
        bad = self.tmp / "bad.toml"
        bad.write_text("[view.a]\ntp = 2\n")
        for option, said in (
            ("tp=257", "at most 256 ranks"), ("layout=hub,tp=2", "needs rank="), ("layout=original,tp=2", "layout=original shows files"),
            (f"views={views_file},tp=2", "needs rank="), (f"views={bad}", "view `a`: option tp=2 needs rank="), ("tp=2,keep=x", "keep needs dtype="),
        ):
            outcome = self.refused(source, option)
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn(said, outcome.stderr)

    def test_a_rank_that_does_not_fit_is_refused_with_its_numbers(self):
        source = model(self.tmp / "llama", "llama")
        outcome = self.refused(source, "tp=3")
        self.assertEqual(outcome.code, 1, outcome.stderr)
        self.assertIn("4 units (num_key_value_heads) cannot be given to 3 ranks", outcome.stderr)
        outcome = tensorfs("consolidate", source, self.tmp / "out", "-o", "tp=3")
        self.assert_refused(outcome)
        self.assertFalse((self.tmp / "out").exists())


@needs_root
class ServedRanks(ServiceCase):
    def test_the_service_shows_all_ranks_and_goes_on_with_them_over_a_restart(self):
        source = model(self.tmp / "llama", "llama")
        with Mount(source, "tp=2", "rank=1") as m:
            right = (m.path / FILE).read_bytes()
        target = self.target("a")
        service = self.serve(mount_config("a", source, target, "tp=2"))
        service.wait_until_ready()
        path = target / "tp-2/rank-1" / FILE
        wait_until(path.exists, PATIENCE, "the checkpoint is shown")
        held = self.open(path)
        self.assert_same(os.pread(held, 1000, 0), right[:1000])
        ready = service.manager.count("READY=1")
        service.restart()
        service.wait_until_ready(ready + 1)
        self.assert_same(os.pread(held, len(right), 0), right)
        self.assert_same(path.read_bytes(), right)
        self.assertEqual(sorted(os.listdir(target / "tp-2")), ["rank-0", "rank-1"])
