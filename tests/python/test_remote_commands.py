"""Each command that reads takes a URL where it takes a path, with views and encryption, or says in one line why not."""

import json
import shutil

import checkpoints
from mounts import Mount, tensorfs, visible_files, wait_until
from object_server import ObjectServer
from services import ServiceCase, mount_config
from tensorizer_files import Stored, encrypted_file_of
from test_object_stores import FILE, URL, RemoteCase


class Commands(RemoteCase):
    def same(self, *words, out=None):
        """Runs a command with the URL and with the folder, and compares what they say or write."""
        results = []
        for source in (URL, self.source):
            outcome = self.tensorfs(*(source if word is None else word for word in words))
            self.assert_done(outcome)
            written = None
            if out is not None:
                written = {name: (out / name).read_bytes() for name in visible_files(out)}
                shutil.rmtree(out)
            results.append((outcome.stdout.replace(URL, str(self.source)), written))
        if out is None:
            self.assertEqual(results[0][0], results[1][0])
        self.assertTrue(results[0][1] == results[1][1])

    def test_views_of_a_url_are_those_of_the_folder(self):
        for view in ("dtype=bf16", "layout=shards=2", "format=bintensors"):
            with self.subTest(view=view):
                out = self.tmp / "out"
                self.same("consolidate", "-o", view, None, out, out=out)
        self.same("ls", "-o", "dtype=f16", None)

    def test_an_index_is_made_and_shown(self):
        index = self.tmp / "index"
        made = self.tensorfs("index", "--index-dir", index, URL)
        self.assert_done(made)
        self.assertIn(URL, made.stdout)
        self.assertTrue(list(index.rglob("*")))

    def test_a_report_has_the_tensors_of_a_url(self):
        page = self.tmp / "page.html"
        self.assert_done(self.tensorfs("report", URL, "--html", page))
        listed = json.loads(self.tensorfs("ls", "--json", URL).stdout)
        name = listed["sets"][0]["tensors"][0]["name"]
        self.assertIn(name, page.read_text())

    def test_heat_of_a_mount_of_a_url_warms_the_disk_cache(self):
        options = (f"cache-dir={self.tmp}/cache", "cache-dir-size=64M", "watch=off")
        heat = self.tmp / "heat.json"
        with self.mount(*options) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            outcome = tensorfs("heat", "--json", mount.path)
            self.assert_done(outcome)
            heat.write_text(outcome.stdout)
        shutil.rmtree(self.tmp / "cache")
        warmed = self.tensorfs("warm", URL, "--heat", heat, "--json", "-o", ",".join(options[:2]))
        self.assert_done(warmed)
        self.assertGreater(json.loads(warmed.stdout)["bytes"], 0)

    def test_top_shows_the_servers_and_the_disk_cache_of_a_mount(self):
        with self.mount(f"cache-dir={self.tmp}/cache", "cache-dir-size=64M", "watch=off") as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            outcome = tensorfs("top", "--once", "--interval", "0.1", mount.path)
            self.assert_done(outcome)
            rows = [line.split() for line in outcome.stdout.splitlines() if line]
        titles = [row[0] for row in rows]
        server, disk = rows[titles.index("SERVER") + 1], rows[titles.index("DISK") + 1]
        self.assertEqual((server[0], server[-1]), (self.server.url.removeprefix("http://"), str(mount.path)))
        self.assertEqual((disk[0], disk[-1]), (f"{self.tmp}/cache", str(mount.path)))
        with Mount(self.source) as local:
            self.assertNotIn("SERVER", tensorfs("top", "--once", "--interval", "0.1", local.path).stdout)

    def test_what_cannot_be_at_a_url_is_one_line(self):
        for words, why in (
            (["consolidate", self.source, URL], "is a URL; only local files are written"),
            (["convert", self.source, "s3://bucket/x.tensors"], "is a URL; only local files are written"),
            (["report", self.source, "--html", "s3://bucket/x.html"], "is a URL; only local files are written"),
        ):
            with self.subTest(words=words):
                outcome = self.tensorfs(*words)
                self.assertIn(outcome.code, (1, 2))
                self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
                self.assertIn(why, outcome.stderr)
        self.assertEqual([key for key in self.server.objects["bucket"] if "models/tiny/" not in key], [])

    def test_a_url_in_place_of_a_path_of_this_machine_is_refused_and_nothing_is_made(self):
        here, target, config = self.tmp / "here", self.tmp / "target", self.tmp / "config.toml"
        here.mkdir()
        target.mkdir()
        config.write_text(f"[defaults]\noptions = 'cache-dir={URL}'\n")
        options = ("cache-dir", "index-dir", "config", "reference", "follow", "log", "key-file", "rename", "views", "tp-rules")
        for words in (
            *(["mount", self.source, target, "-o", f"{option}={URL}"] for option in options),
            ["ls", self.source, "-o", f"dtype=like:{URL}"],
            ["ls", "--json", self.source, "--index-dir", URL],
            ["cache", "ls", "--cache-dir", URL],
            ["cache", "prune", "--cache-dir", URL],
            ["bench", URL],
            ["serve", "--config", URL],
            ["serve", "--check", "--config", config],
            ["warm", self.source, "--heat", URL],
            ["mount", self.source, URL],
            ["load", self.source, "--trace", URL],
            ["status", URL],
        ):
            with self.subTest(words=words):
                outcome = tensorfs(*words, env=self.env, cwd=here)
                self.assertEqual(outcome.code, 2, outcome.stderr)
                self.assertEqual(len(outcome.stderr.splitlines()), 1, outcome.stderr)
                self.assertIn(f"{URL}: is a URL, and only paths of this machine are possible here", outcome.stderr)
        for variable in ("TENSORFS_INDEX_DIR", "TENSORFS_CACHE_DIR"):
            outcome = self.tensorfs("ls", self.source, **{variable: URL})
            self.assertEqual(outcome.code, 2)
            self.assertIn(f"{variable}: {URL}: is a URL", outcome.stderr)
        self.assertEqual(list(here.iterdir()), [])

    def test_a_misspelled_url_is_refused_with_the_way_to_spell_it(self):
        for url, hint in (
            (URL.replace("s3", "S3"), "write s3:// in lower case"),
            (URL.replace("//", "/"), "a URL begins with s3://"),
            (URL.replace("s3", "ftp"), "ftp:// is none of the URLs that are read"),
        ):
            for words in (["ls", url], ["load", url], ["mount", url, self.tmp], ["consolidate", url, self.tmp / "out"]):
                self.assert_refused(self.tensorfs(*words), f"{url}: cannot open: {hint}")


class EncryptedFiles(RemoteCase):
    def test_an_encrypted_file_at_a_url_needs_its_key(self):
        key = self.tmp / "key"
        key.write_bytes(checkpoints.random_bytes(0, 32))
        tensors = [Stored.of("w", "F32", [100, 257], checkpoints.random_bytes(1, 100 * 257 * 4))]
        self.server.put("bucket", "secret/model.tensors", encrypted_file_of(tensors, key.read_bytes(), 64 << 10))
        url, out = "s3://bucket/secret", self.tmp / "out.safetensors"
        for words in (["load"], ["verify"]):
            self.assert_done(self.tensorfs(*words, "-o", f"key-file={key}", url))
        self.assert_done(self.tensorfs("consolidate", "-o", f"key-file={key}", url, out))
        self.assertTrue(out.read_bytes().endswith(tensors[0].data))
        self.assert_refused(self.tensorfs("load", url), "encrypted")
        with Mount(url, f"key-file={key}", "watch=off", env=self.env) as mount:
            self.assertTrue((mount.path / FILE).read_bytes().endswith(tensors[0].data))


class Serve(ServiceCase):
    def test_a_mount_of_the_service_may_be_a_url(self):
        source = checkpoints.hf_set(self.tmp / "set")
        server = self.enter(ObjectServer())
        server.put_folder("bucket", "models/one", source)
        variables = {**server.environment(), "TENSORFS_INDEX_DIR": "none", "TENSORFS_CACHE_DIR": "none"}
        target = self.target("one")
        self.serve(mount_config("one", "s3://bucket/models/one", target), env=variables)
        wait_until(lambda: (target / FILE).exists(), 60, "the mount")
        self.assertTrue((target / FILE).read_bytes() == checkpoints.hf_whole(source))
