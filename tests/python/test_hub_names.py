"""ORG/NAME instead of a path: the model of that name in the local hub cache."""

import json
import os
import shutil

import checkpoints
from mounts import HELPER, Mount, TestCase, needs_root, run, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config

MODEL = "models--acme--tiny"
NAME = "acme/tiny"


class Cache(TestCase):
    def setUp(self):
        super().setUp()
        self.hub = self.tmp / "hub"
        self.checkpoint = checkpoints.hf_set(self.tmp / "checkpoint", megabytes=1)
        self.snapshot = checkpoints.hub_cache(self.hub / MODEL, self.checkpoint)
        self.env = {**os.environ, "HF_HUB_CACHE": str(self.hub)}
        self.work = self.tmp / "work"
        self.work.mkdir()

    def tensorfs(self, *words, **popen):
        return tensorfs(*words, env=self.env, cwd=self.work, **popen)

    def add_revision(self, name="next", commit="b" * 40):
        """Another snapshot, with other weights."""
        other = self.snapshot.with_name(commit)
        other.mkdir()
        checkpoints.write_shard(other / "model.safetensors", [("w", "U8", [1], b"7")])
        (self.hub / MODEL / "refs" / name).write_text(commit)
        return other


class Names(Cache):
    def test_every_command_takes_a_name_where_a_source_stands(self):
        out = self.tmp / "out"
        for words in (
            ["ls", NAME],
            ["inspect", NAME],
            ["index", NAME],
            ["load", NAME],
            ["verify", NAME],
            ["warm", NAME],
            ["diff", NAME, f"{NAME}@{self.snapshot.name}"],
            ["report", NAME, "--html", out / "page.html"],
            ["consolidate", NAME, out / "folder"],
            ["convert", NAME, out / "model.bt"],
        ):
            out.mkdir(exist_ok=True)
            outcome = self.tensorfs(*words)
            self.assertEqual(outcome.code, 0, (words, outcome))
        self.assert_same((out / "folder/model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))
        found = self.tensorfs("ls", NAME, "--json").json()
        self.assertEqual(found["source"], str(self.snapshot))

    def test_a_path_wins_over_a_model_of_that_name(self):
        here = self.work / NAME
        here.mkdir(parents=True)
        checkpoints.write_shard(here / "model.safetensors", [("here", "U8", [1], b"7")])
        self.assertIn("here", self.tensorfs("ls", NAME).stdout)
        shutil.rmtree(here)
        # Also a link that leads nowhere.
        here.symlink_to("nowhere")
        self.assertEqual(self.tensorfs("ls", NAME).code, 1)

    def test_a_revision_is_a_reference_or_a_whole_commit(self):
        other = self.add_revision("refs/pr/1".replace("/", "-"))
        for revision in (other.name, "refs-pr-1"):
            self.assertEqual(self.tensorfs("ls", f"{NAME}@{revision}", "--json").json()["source"], str(other))
        outcome = self.tensorfs("ls", f"{NAME}@v9")
        self.assertEqual(outcome.code, 1)
        for word in ("no revision v9", "main", "refs-pr-1", str(self.hub / MODEL)):
            self.assertIn(word, outcome.stderr)
        self.assertEqual(len(outcome.stderr.splitlines()), 1)

    def test_an_error_says_where_was_looked_and_has_a_class(self):
        outcome = self.tensorfs("verify", "acme/huge", "--json")
        self.assertEqual((outcome.code, outcome.json()["ok"]), (1, False))
        self.assertIn(str(self.hub), outcome.json()["error"])
        self.assertIn(str(self.hub), outcome.stderr)
        self.assertEqual(self.tensorfs("diff", NAME, "acme/huge").code, 2)

    def test_the_cache_of_hf_home_is_found(self):
        self.env.pop("HF_HUB_CACHE")
        self.env["HF_HOME"] = str(self.tmp)
        self.assertEqual(self.tensorfs("ls", NAME).code, 0)


class Mounts(Cache):
    def mounted(self, program, *words):
        target = self.mount_point()
        outcome = run(program, *words, NAME, target, env=self.env, cwd=self.work)
        self.assertEqual(outcome.code, 0, outcome)
        return target

    def test_a_mount_shows_the_snapshot_and_status_names_it(self):
        target = self.mounted(HELPER.with_name("tensorfs"), "mount")
        self.assert_same((target / "model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))
        [status] = json.loads(tensorfs("status", target, "--json").stdout)
        self.assertEqual(status["source"], str(self.snapshot))
        # The name leads to another snapshot now: the mount stays at its own.
        other = self.add_revision()
        (self.hub / MODEL / "refs/main").write_text(other.name)
        self.assert_same((target / "model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))

    @needs_root
    def test_the_helper_of_mount_takes_a_name(self):
        self.assertTrue((self.mounted(HELPER) / "model.safetensors").is_file())

    def test_a_name_that_is_not_there_mounts_nothing(self):
        target = self.mount_point("other")
        outcome = self.tensorfs("mount", "acme/huge", target)
        self.assertEqual(outcome.code, 1)
        self.assertIn(str(self.hub), outcome.stderr)

    def test_a_name_in_a_cache_on_a_mount_is_read_from_its_source(self):
        with Mount(self.hub) as m:
            self.env["HF_HUB_CACHE"] = str(m.path)
            self.assertEqual(self.tensorfs("load", NAME).code, 0)
            target = self.mounted(HELPER.with_name("tensorfs"), "mount")
            self.assert_same((target / "model.safetensors").read_bytes(), checkpoints.hf_whole(self.checkpoint))


@needs_root
class Service(Cache, ServiceCase):
    def test_a_mount_of_a_name_keeps_its_snapshot_over_a_restart(self):
        target = self.target("a")
        service = self.serve(mount_config("a", NAME, target), env={"HF_HUB_CACHE": str(self.hub)})
        service.wait_until_ready()
        right = checkpoints.hf_whole(self.checkpoint)
        held = self.open(target / "model.safetensors")
        other = self.add_revision()
        (self.hub / MODEL / "refs/main").write_text(other.name)
        ready = service.manager.count("READY=1")
        service.restart()
        wait_until(lambda: service.manager.count("READY=1") > ready, PATIENCE, "the service is ready")
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        self.assert_same(os.pread(held, len(right), 0), right)
        self.assert_same((target / "model.safetensors").read_bytes(), right)
        [status] = json.loads(tensorfs("status", target, "--json").stdout)
        self.assertEqual(status["source"], str(self.snapshot))

    def test_a_config_refuses_other_relative_sources(self):
        for source in ("data", "acme/tiny/x", "./acme/tiny"):
            config = self.tmp / "config.toml"
            config.write_text(mount_config("a", source, self.tmp / "t"))
            outcome = tensorfs("serve", "--check", "--config", config)
            self.assertNotEqual(outcome.code, 0, source)
            self.assertIn("expected an absolute path, a URL, or ORG/NAME", outcome.stderr)
