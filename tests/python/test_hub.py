"""Repositories of the hub as sources, with a stand-in of the hub that obeys its protocol and misbehaves on command."""

import hashlib
import os
import time
from pathlib import Path

import checkpoints
from hub_server import TOKEN, HubServer, git_hash_of
from manifest import by_id
from mounts import Mount, TestCase, tensorfs

FILE = "model.safetensors"
URL = "hf://org/tiny"
SHARD = "model-00002-of-00003.safetensors"


class HubCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.hub = HubServer()
        # The shards of the fixture are small.
        self.hub.small = 64
        self.hub.start()
        self.addCleanup(self.hub.stop)
        self.extra = {"config.json": b"{}", "tokenizer.json": bytes(range(60))}
        self.sha = self.hub.commit("models/org/tiny", self.source, extra=self.extra)
        self.whole = checkpoints.hf_whole(self.source)
        self.env = {**os.environ, **self.hub.environment(), "TENSORFS_INDEX_DIR": "none"}

    def tensorfs(self, *words, **environment):
        return tensorfs(*words, env={**self.env, **environment})

    def consolidated(self, url=URL, **environment):
        out = self.tmp / f"out-{time.monotonic_ns()}.safetensors"
        outcome = self.tensorfs("consolidate", url, out, **environment)
        return outcome, out.read_bytes() if out.exists() else None

    def assert_whole(self, url=URL, **environment):
        outcome, found = self.consolidated(url, **environment)
        self.assert_done(outcome)
        self.assertTrue(found == self.whole)

    def assert_refused(self, outcome, text, seconds=20):
        self.assertEqual(outcome.code, 1, outcome.stderr)
        lines = [line for line in outcome.stderr.splitlines() if " ERROR " not in line]
        self.assertEqual(len(lines), 1, outcome.stderr)
        self.assertIn(text, lines[0])
        self.assertLess(outcome.seconds, seconds)

    def asked(self, word):
        return [request for request in self.hub.requests if word in request["path"]]

    def hub_cache(self, shared=False):
        """A cache as huggingface_hub makes it, with all files of the repository."""
        model = self.tmp / "hub/models--org--tiny"
        snapshot = model / "snapshots" / self.sha
        for folder in (model / "refs", model / "blobs", snapshot):
            folder.mkdir(parents=True)
        (model / "refs/main").write_text(self.sha)
        for key, data in self.hub.repositories["models/org/tiny"].commits[self.sha].items():
            is_large = len(data) > self.hub.small
            tag = hashlib.sha256(data).hexdigest() if is_large else git_hash_of(data)
            blob = model / "blobs" / tag
            if shared and is_large:
                place = self.tmp / "hub/blobs" / tag[:2]
                place.mkdir(parents=True, exist_ok=True)
                (place / tag).write_bytes(data)
                blob.symlink_to(Path("../../blobs") / tag[:2] / tag)
            else:
                blob.write_bytes(data)
            (snapshot / key).symlink_to(Path("../../blobs") / tag)
        return {"HF_HUB_CACHE": str(self.tmp / "hub")}


class Commands(HubCase):
    def test_each_command_says_of_a_repository_what_it_says_of_a_folder(self):
        for words in (["ls"],):
            remote, local = self.tensorfs(*words, URL), self.tensorfs(*words, self.source)
            self.assert_done(remote)
            self.assertEqual(remote.stdout.replace(URL, str(self.source)), local.stdout)
        self.assert_whole()
        for url in ("hf://models/org/tiny", "hf://org/tiny@main/", f"hf://org/tiny@{self.sha}"):
            self.assert_whole(url)
        listed = self.tensorfs("ls", f"{URL}/{SHARD}")
        self.assert_done(listed)
        self.assert_done(self.tensorfs("load", URL))
        self.assert_done(self.tensorfs("diff", URL, self.source))

    def test_datasets_other_revisions_and_folders_of_a_repository_are_sources(self):
        self.hub.commit("datasets/org/set", self.source.parent, "refs/pr/1")
        self.assert_whole(f"hf://datasets/org/set@refs/pr/1/{self.source.name}")
        self.hub.commit("models/org/tiny", self.source.parent, "b/c")
        self.assert_whole(f"hf://org/tiny@b%2Fc/{self.source.name}")

    def test_a_start_takes_few_requests_and_one_link_for_each_file(self):
        self.assert_whole()
        paths = [request["path"] for request in self.hub.requests]
        self.assertEqual(sum("/api/" in path for path in paths), 2, paths)
        resolved = [path for path in paths if "/resolve/" in path and "cached" not in path]
        self.assertEqual(len(resolved), len(set(resolved)), paths)

    def test_a_long_listing_is_read_page_by_page(self):
        self.hub.page = 2
        self.assert_whole()
        self.assertGreaterEqual(len(self.asked("cursor=")), 2)

    def test_a_renamed_repository_is_followed(self):
        self.hub.renamed["models/old/name"] = "org/tiny"
        self.assert_whole("hf://old/name")

    def test_verify_compares_the_hashes_that_the_hub_lists(self):
        outcome = self.tensorfs("verify", URL)
        self.assert_done(outcome)
        self.assertIn("3 blobs match their sha256", outcome.stdout + outcome.stderr)
        self.hub.links.flips = True
        self.assert_refused(self.tensorfs("verify", URL), "its store has listed")


class Access(HubCase):
    def test_what_the_hub_refuses_is_told_apart(self):
        for name in ("gated", "private"):
            self.hub.commit(f"models/org/{name}", self.source)
            self.hub.repositories[f"models/org/{name}"].access = name
        other = "hf_of_nobody"
        self.hub.tokens.add(other)
        for environment, url, why in (
            ({}, "hf://org/none", "there is no org/none, or it is private: then set HF_TOKEN"),
            ({"HF_TOKEN": TOKEN}, "hf://org/none", "there is no org/none, or the token does not allow"),
            ({}, "hf://org/tiny@v9", "org/tiny has no revision \"v9\""),
            ({}, "hf://org/tiny/none", "nothing is there"),
            ({}, "hf://org/gated", "org/gated is gated: set HF_TOKEN"),
            ({"HF_TOKEN": other}, "hf://org/gated", "has no access yet: ask for it on"),
            ({}, "hf://org/private", "or it is private"),
            ({"HF_TOKEN": other}, "hf://org/private", "the token does not allow to see it"),
            ({"HF_TOKEN": "hf_wrong"}, URL, "the token of the hub is not valid"),
            ({}, "hf://gpt2", "names no repository"),
            ({}, "hf://spaces/a/b", "only models and datasets"),
            ({"HF_ENDPOINT": "http://127.0.0.1:1"}, URL, "Connection refused"),
        ):
            with self.subTest(url=url, why=why):
                self.assert_refused(self.tensorfs("ls", url, **environment), why)

    def test_the_token_goes_to_the_hub_alone(self):
        self.hub.repositories["models/org/tiny"].access = "private"
        self.assert_whole(HF_TOKEN=TOKEN)
        path = self.tmp / "token"
        path.write_text(TOKEN + "\n")
        self.assert_whole(HF_TOKEN_PATH=str(path))
        self.assertTrue(all(request["token"] for request in self.hub.requests))
        self.assertTrue(self.hub.links.requests)
        self.assertEqual(self.hub.links.tokens_seen, 0)
        self.assertFalse(any(request["signed"] for request in self.hub.links.requests))


class Misbehaviour(HubCase):
    def test_what_passes_is_tried_again_and_the_bytes_are_right(self):
        for kind in ("hang-up", "short", "ignores-range", "gzip"):
            with self.subTest(kind=kind):
                self.hub.links.faults = [{"kind": kind} for _ in range(2)]
                self.assert_whole()
                self.assertEqual(self.hub.links.faults, [])
        for kind in ("busy", "hang-up"):
            self.hub.faults = [{"kind": kind, "match": word} for word in ("/revision/", "/tree/", "/resolve/")]
            self.assert_whole()
            self.assertEqual(self.hub.faults, [])

    def test_a_link_that_has_ended_is_asked_for_again(self):
        with Mount(URL, "watch=off", env=self.env) as mount, open(mount.path / FILE, "rb") as file:
            before = len(self.asked("/resolve/"))
            self.hub.links.links.clear()
            self.assertTrue(file.read() == self.whole)
            self.assertGreater(len(self.asked("/resolve/")), before)

    def test_a_limit_of_the_hub_is_obeyed_with_its_time(self):
        self.hub.faults = [{"kind": "limit", "seconds": 1, "match": SHARD}]
        started = time.monotonic()
        self.assert_whole()
        self.assertGreaterEqual(time.monotonic() - started, 1)
        self.hub.faults = [{"kind": "limit", "seconds": 3600, "match": "/tree/"}]
        self.assert_refused(self.tensorfs("ls", URL), "asks to wait 3600 s")

    def test_a_file_of_another_commit_or_hash_is_refused(self):
        for kind in ("other-commit", "other-hash"):
            with self.subTest(kind=kind):
                self.hub.faults = [{"kind": kind, "match": SHARD, "count": 1000}]
                outcome, found = self.consolidated()
                self.assert_refused(outcome, "was replaced while it was in use")
                self.assertIsNone(found)

    def test_a_hub_without_ranges_for_small_files_serves_them_too(self):
        self.hub.ranges = False
        with Mount(URL, env=self.env) as mount, open(mount.path / "tokenizer.json", "rb", buffering=0) as file:
            file.seek(13)
            self.assertEqual(file.read(7), self.extra["tokenizer.json"][13:20])


class Mounts(HubCase):
    def test_a_mount_stays_at_the_commit_of_its_start(self):
        with Mount(URL, "watch=poll,watch-interval=1", env=self.env) as mount:
            self.hub.commit("models/org/tiny", self.source.parent)
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            for name, data in self.extra.items():
                self.assertEqual((mount.path / name).read_bytes(), data)
            self.assertIn("hf at 127.0.0.1", tensorfs("status", "--json", mount.path).stdout)
            self.assertIn(f'"source":"{URL}"', os.getxattr(mount.path / FILE, "user.tensorfs.source").decode())

    def test_no_token_and_no_link_is_in_arguments_logs_status_or_attributes(self):
        self.hub.repositories["models/org/tiny"].access = "private"
        log = self.tmp / "log"
        with Mount(URL, f"log={log}", env={**self.env, "HF_TOKEN": TOKEN, "TENSORFS_LOG": "trace"}) as mount:
            self.hub.links.faults = [{"kind": "busy", "count": 2}, {"kind": "short"}, {"kind": "error", "status": 403}]
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            shown = [Path(f"/proc/{mount.pid}/cmdline").read_text(), mount.log(), log.read_text()]
            shown.append(tensorfs("status", "--json", mount.path).stdout)
            shown.append(os.getxattr(mount.path / FILE, "user.tensorfs.source").decode())
        self.assertIn("127.0.0.1", "".join(shown))
        for secret in (TOKEN, "-secret"):
            self.assertFalse([text for text in shown if secret in text])


class Cache(HubCase):
    def test_blobs_of_the_hub_cache_are_read_from_there(self):
        for shared in (False, True):
            with self.subTest(shared=shared):
                self.tmp = self.tmp / str(shared)
                self.tmp.mkdir()
                cache = self.hub_cache(shared)
                self.hub.links.requests.clear()
                self.assert_whole(**cache)
                self.assertEqual(self.hub.links.requests, [])

    def test_offline_a_snapshot_of_the_cache_is_the_source_and_nothing_is_asked(self):
        cache = self.hub_cache()
        offline = {**cache, "HF_HUB_OFFLINE": "1"}
        self.assert_whole(**offline)
        self.assert_done(self.tensorfs("verify", URL, **offline))
        self.assertEqual(self.hub.requests, [])
        self.assert_refused(self.tensorfs("ls", "hf://org/tiny@v2", **offline), "HF_HUB_OFFLINE is set, and the hub cache")
