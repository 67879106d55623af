"""A whole hub cache as source: each snapshot has one merged file, and no blob shows the bytes of it again."""

import hashlib
import json
import os
import pwd
import re
import shutil
import unittest

import checkpoints
from mounts import Mount, TestCase, needs_root, tensorfs, visible_files, wait_until
from services import PATIENCE, ServiceCase, mount_config
from test_consolidate import content

MODEL = "models--ORG--NAME"


class HubCache(TestCase):
    def setUp(self):
        super().setUp()
        self.hub = self.tmp / "hub"
        self.checkpoint = checkpoints.hf_set(self.tmp / "checkpoint", megabytes=1)
        self.snapshot = checkpoints.hub_cache(self.hub / MODEL, self.checkpoint)
        self.blobs = sorted(blob.name for blob in (self.hub / MODEL / "blobs").iterdir())
        self.shards = {hashlib.sha256(file.read_bytes()).hexdigest() for file in self.checkpoint.glob("*.safetensors")}

    def shown(self, source, *options):
        """Names in the snapshot and among the blobs of a mount of `source`."""
        with Mount(source, *options) as m:
            model = m.path / MODEL if source == self.hub else m.path
            snapshot = model / "snapshots" / self.snapshot.name
            if not options:
                self.assert_same((snapshot / "model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))
                self.assertEqual((model / "refs/main").read_text(), self.snapshot.name)
            return visible_files(snapshot), visible_files(model / "blobs")

    # systemd sets HOME only for units with `User=`, and the login of a hub was not found at boot.
    def test_without_the_variable_the_home_folder_is_that_of_the_user(self):
        told = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "XDG_"))}
        del told["HOME"]
        home = pwd.getpwuid(os.geteuid()).pw_dir
        outcome = tensorfs("ls", "ORG/NO-SUCH-MODEL", env=told, cwd=self.tmp)
        self.assertIn(f"the hub cache {home}/.cache/huggingface/hub ", outcome.stderr)

    # `blobs` showed the shards beside the merged file of the snapshot, so that copies took their bytes twice.
    def test_blobs_show_no_shard_that_a_snapshot_shows_merged(self):
        self.assertEqual(len(self.shards), 3)
        for source in (self.hub, self.hub / MODEL):
            snapshot, blobs = self.shown(source)
            self.assertEqual(snapshot, ["config.json", "model.safetensors", "model.safetensors.index.json"])
            self.assertEqual(blobs, [name for name in self.blobs if name not in self.shards])

    def test_blobs_show_every_file_where_shards_are_shown_as_they_are(self):
        snapshot, blobs = self.shown(self.hub, "layout=original")
        self.assertEqual(snapshot, visible_files(self.checkpoint))
        self.assertEqual(blobs, self.blobs)

    def test_blobs_of_other_files_and_of_no_snapshot_are_shown(self):
        name = "b" * 64
        (self.hub / MODEL / "blobs" / name).write_bytes(b"of no snapshot")
        whole = checkpoints.hf_whole(self.checkpoint)
        blob = self.hub / MODEL / "blobs" / hashlib.sha256(whole).hexdigest()
        blob.write_bytes(whole)
        other = self.snapshot.with_name("c" * 40)
        other.mkdir()
        (other / "model.safetensors").symlink_to(f"../../blobs/{blob.name}")
        shown = self.shown(self.hub)[1]
        self.assertIn(name, shown)
        self.assertIn(blob.name, shown)


def models_of(hub):
    """Model -> the folder of its snapshot, as huggingface_hub finds it: by the revision in refs/main."""
    found = {}
    for folder in sorted(hub.iterdir()):
        kind, *names = folder.name.split("--")
        assert kind == "models", folder
        found["/".join(names)] = folder / "snapshots" / (folder / "refs/main").read_text()
    return found


class FolderOfModels(TestCase):
    """`layout=hub`: a folder of models as a hub cache."""

    def setUp(self):
        super().setUp()
        self.root = self.tmp / "models"
        self.whole = {}
        for seed, (name, place) in enumerate({"org/one": "org/one", "org/two": "org/two", "three": "three"}.items(), 1):
            folder = checkpoints.hf_set(self.root / place, megabytes=1, seed=seed)
            (folder / "config.json").write_text(json.dumps({"name": name}))
            self.whole[name] = checkpoints.hf_whole(folder)
        (self.root / "org/README.md").write_text("about the organization")
        (self.root / "org/two/onnx").mkdir()
        (self.root / "org/two/onnx/model.onnx").write_bytes(b"onnx")
        (self.root / ".cache").mkdir()
        (self.root / ".cache/x.json").write_text("{}")
        (self.root / "note.txt").write_text("text")
        # A file of weights beside the models does not make one model of all.
        shutil.copy(min((self.root / "three").glob("*.safetensors")), self.root / "stray.safetensors")
        checkpoints.row_wise(self.root / "rank/shards")
        with Mount(self.root / "rank/shards") as m:
            self.whole["rank/shards"] = (m.path / "model.safetensors").read_bytes()
        cached = checkpoints.hf_set(self.tmp / "checkpoint", megabytes=1, seed=9)
        self.snapshot = checkpoints.hub_cache(self.root / "models--else--where", cached)
        self.whole["else/where"] = checkpoints.hf_whole(cached)

    def assert_is_hub(self, path):
        models = models_of(path)
        self.assertEqual(sorted(models), sorted(self.whole))
        for name, snapshot in models.items():
            self.assertRegex(snapshot.name, re.compile("^[0-9a-f]{40}$"))
            self.assert_same((snapshot / "model.safetensors").read_bytes(), self.whole[name], name)
            self.assertEqual(sorted(os.listdir(snapshot.parents[1])), ["refs", "snapshots"])
            self.assertEqual(os.listdir(snapshot.parent), [snapshot.name])
        self.assertEqual(json.loads((models["org/two"] / "config.json").read_text()), {"name": "org/two"})
        self.assertEqual((models["org/two"] / "onnx/model.onnx").read_bytes(), b"onnx")
        self.assertEqual(models["else/where"].name, self.snapshot.name)
        for entry in path.rglob("*"):
            self.assertFalse(entry.is_symlink(), entry)

    def test_each_model_is_one_snapshot_with_one_merged_file(self):
        with Mount(self.root, "layout=hub") as m:
            self.assert_is_hub(m.path)
            first = content(m.path)
            snapshot = models_of(m.path)["org/one"]
            known = json.loads(os.getxattr(snapshot, "user.tensorfs.source"))
            self.assertEqual((known["source"], known["view"]["layout"]), (str(self.root / "org/one"), "single"))
            self.assertNotIn("hub", known["view"])
            self.assert_done(tensorfs("ls", snapshot, "--json"))
        with Mount(self.root, "layout=hub") as m:
            # The revisions of a folder are the same at each mount.
            self.assertEqual(content(m.path), first)

    def test_consolidate_writes_a_cache_and_other_commands_refuse(self):
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", self.root, out, "-o", "layout=hub"))
        self.assert_is_hub(out)
        for command in (("verify", self.root), ("load", self.root), ("bench", "--source", self.root)):
            self.assertNotEqual(tensorfs(*command, "-o", "layout=hub").code, 0, command)
        target = self.mount_point()
        for option, said in (("layout=hub,watch=auto", "give watch=off"), ("layout=hubs", "or hub")):
            outcome = tensorfs("mount", self.root, target, "-o", option)
            self.assert_refused(outcome, 2)
            self.assertIn(said, outcome.stderr)

    def test_a_model_by_itself_is_a_cache_and_a_file_is_refused(self):
        with Mount(self.root / "org/one", "layout=hub") as m:
            self.assertEqual(list(models_of(m.path)), ["one"])
            self.assert_same((models_of(m.path)["one"] / "model.safetensors").read_bytes(), self.whole["org/one"])
        file = self.root / "three" / min(os.listdir(self.root / "three"))
        self.assertIn("needs a folder of models", tensorfs("ls", file, "-o", "layout=hub").stderr)

    def listed(self, root):
        """Names in a mount of `root`, and what the log says about the rest."""
        outcome = tensorfs("ls", root, "-o", "layout=hub", "--json")
        self.assert_done(outcome)
        return sorted({one["directory"].split("/")[0] for one in outcome.json()["sets"]}), outcome.stderr

    # The mount of a whole folder of models was refused.
    def test_a_model_of_a_cache_is_shown_rather_than_a_folder_of_the_same_model(self):
        cached = self.root / "models--org--one"
        shutil.copytree(self.root / "models--else--where", cached, symlinks=True)
        self.whole["org/one"] = self.whole["else/where"]
        with Mount(self.root, "layout=hub") as m:
            models = models_of(m.path)
            self.assertEqual(sorted(models), sorted(self.whole))
            self.assert_same((models["org/one"] / "model.safetensors").read_bytes(), self.whole["org/one"])
            self.assertEqual(models["org/one"].name, self.snapshot.name)
        said = self.listed(self.root)[1]
        self.assertIn(f"{self.root / 'org/one'}: not shown: {cached} is models--org--one too", said)

    # `sharded` was shown as a model of its own.
    def test_shards_in_a_folder_sharded_belong_to_the_model_above(self):
        model = self.tmp / "dcpsh"
        checkpoints.grid_2d(model / "sharded")
        (model / "sharded/config.json").write_text("{}")
        self.assertEqual(self.listed(model)[0], ["models--dcpsh"])
        (self.tmp / "above").mkdir()
        model.rename(self.tmp / "above/dcpsh")
        self.assertEqual(self.listed(self.tmp / "above")[0], ["models--dcpsh"])

    # `from_pretrained` found no weights.
    def test_weights_in_a_folder_sharded_are_shown_in_the_snapshot_itself(self):
        model = self.tmp / "dcpsh"
        checkpoints.grid_2d(model / "sharded")
        (model / "config.json").write_text("{}")
        with Mount(model) as m:
            whole = (m.path / "sharded/model.safetensors").read_bytes()
        store = self.tmp / "index"
        tensorfs("verify", model / "sharded", "--index-dir", store)
        for option in (None, "verify=read"):
            with self.subTest(option), Mount(model, "layout=hub", *([option, f"index-dir={store}"] if option else [])) as m:
                [snapshot] = models_of(m.path).values()
                self.assertEqual(sorted(os.listdir(snapshot)), ["config.json", "model.safetensors", "model.safetensors.index.json"])
                self.assert_same((snapshot / "model.safetensors").read_bytes(), whole)
                source = json.loads(os.getxattr(snapshot / "model.safetensors", "user.tensorfs.source"))
                self.assertEqual(source["source"], str(model / "sharded"))

    # The snapshots were shown as the models of an organization.
    def test_a_model_of_a_cache_by_itself_is_a_cache(self):
        with Mount(self.root / "models--else--where", "layout=hub") as m:
            models = models_of(m.path)
            self.assertEqual((list(models), models["else/where"].name), (["else/where"], self.snapshot.name))
            self.assertEqual(sorted(os.listdir(m.path / "models--else--where")), ["refs", "snapshots"])
            self.assert_same((models["else/where"] / "model.safetensors").read_bytes(), self.whole["else/where"])

    # Only the subfolder was shown, and nothing was said.
    def test_a_set_is_one_model_whatever_its_subfolders_have(self):
        for name in ("weight-map", "numbered"):
            model = checkpoints.hf_set(self.tmp / "sets" / name, megabytes=1)
            (model / "config.json").unlink(missing_ok=True)
            if name == "numbered":
                (model / "model.safetensors.index.json").unlink()
            (model / "original").mkdir()
            (model / "original/params.json").write_text("{}")
            self.assertEqual(self.listed(model)[0], [f"models--{name}"])
        self.assertEqual(self.listed(self.tmp / "sets")[0], ["models--numbered", "models--weight-map"])
        self.assertIn(f"{self.root / 'stray.safetensors'}: not shown", self.listed(self.root)[1])

    # `org` was shown as a model without weights, and its models were not.
    def test_a_json_file_beside_models_hides_none_and_folders_without_a_model_are_named(self):
        for place in (".", "org", "rank"):
            (self.root / place / "collection.json").write_text("{}")
        for place in ("empty", "org/notes", "deep/er/model"):
            (self.root / place).mkdir(parents=True)
        shutil.copytree(self.root / "three", self.root / "deep/er/model", dirs_exist_ok=True)
        shutil.copytree(self.root / "three", self.root / "three.git")
        with Mount(self.root, "layout=hub") as m:
            self.assert_is_hub(m.path)
        said = self.listed(self.root)[1]
        for place in ("empty", "org/notes", "deep", "three.git"):
            self.assertIn(f"{self.root / place}: not shown", said)

    # `models--org--one` was written with the snapshots of a cache one folder too deep.
    def test_the_folders_above_a_snapshot_are_read_through_the_mount(self):
        with Mount(self.root, "layout=hub") as m:
            expected = content(m.path)
            for model in ("models--org--one", "models--else--where"):
                folder = m.path / model
                for path in (folder, *([folder / "refs", folder / "refs/main", folder / "snapshots"] if "one" in model else [])):
                    self.assertNotIn("user.tensorfs.source", os.listxattr(path))
                self.assert_done(tensorfs("consolidate", folder, self.tmp / model))
                self.assertEqual(content(self.tmp / model), content(folder))
            self.assert_done(tensorfs("consolidate", m.path, self.tmp / "all"))
            self.assertEqual(content(self.tmp / "all"), expected)


@needs_root
class ServedHub(ServiceCase):
    def test_the_service_shows_a_folder_of_models_as_a_cache(self):
        source = checkpoints.hf_set(self.tmp / "models/org/one", megabytes=1)
        target = self.target("hub")
        self.serve(mount_config("hub", self.tmp / "models", target, "layout=hub")).wait_until_ready()
        wait_until(lambda: os.listdir(target) == ["models--org--one"], PATIENCE, "the model")
        snapshot = models_of(target)["org/one"]
        self.assert_same((snapshot / "model.safetensors").read_bytes(), checkpoints.hf_whole(source))


if __name__ == "__main__":
    unittest.main()
