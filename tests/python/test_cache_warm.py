"""`tensorfs cache warm URL` and `tensorfs warm URL`: the disk cache is filled before anybody reads."""

import json
import struct
import subprocess

from mounts import BIN, Mount
from test_disk_cache import FILE, SIZE, URL, DiskCacheCase, weights
from test_object_stores import SHARD, RemoteCase
from test_object_stores import URL as SHARDED


class Warm(DiskCacheCase):
    def words(self, *words):
        return ("cache", "warm", URL, "--cache-dir", self.cache, "-o", SIZE, *words)

    def test_it_leaves_nothing_to_ask_the_server_for_but_the_version(self):
        warmed = self.tensorfs(*self.words("--progress"))
        self.assert_done(warmed)
        self.assertIn("1 object kept", warmed.stdout)
        # Bytes, rate and time left.
        self.assertRegex(warmed.stderr, r"/1\.\d+ MiB .*/s ")
        self.assert_each_block_once()
        (kept,) = self.listed()
        self.assertEqual(kept["cached_bytes"], len(self.data))
        self.server.requests.clear()
        self.assert_whole()
        self.assert_done(self.tensorfs(*self.words("--json")))
        self.assertEqual(self.ranges(), [])

    def test_it_shares_its_fetches_with_a_mount_that_reads_meanwhile(self):
        self.server.delay = 0.05
        with self.mount("watch=off") as mount:
            warming = subprocess.Popen([str(word) for word in (BIN, *self.words())], env=self.env, stdout=subprocess.DEVNULL)
            self.assertTrue((mount.path / FILE).read_bytes() == self.data)
            self.assertEqual(warming.wait(60), 0)
        self.assert_each_block_once()

    def test_a_view_takes_gaps_of_up_to_64_kib_between_its_tensors_too(self):
        # The tensors 0 and 2 lie in gaps: behind the header, and between the tensors 1 and 3.
        for each, taken in ((32 << 10, 4), (64 << 10, 4), (80 << 10, 2)):
            self.put(weights(1, 5, each))
            warmed = self.tensorfs(*self.words("-o", "include=layer.[13]", "--json"))
            self.assert_done(warmed)
            # The header is shorter than a tensor.
            self.assertEqual(json.loads(warmed.stdout)["bytes"] // each, taken, each)

    def test_a_cache_that_cannot_keep_it_is_an_error(self):
        self.cache.write_bytes(b"")
        outcome = self.tensorfs(*self.words())
        self.assertEqual(outcome.code, 1)
        self.assertIn("Not a directory", outcome.stderr)
        self.cache.unlink()
        outcome = self.tensorfs("cache", "warm", "s3://bucket/none", "--cache-dir", self.cache)
        self.assertEqual(outcome.code, 1)
        self.assertIn("nothing is there", outcome.stderr)

    def test_what_has_no_versions_or_no_room_is_not_said_to_be_kept(self):
        self.server.tags = "none"
        self.server.public.add("bucket")
        url = f"{self.server.url}/bucket/models/one/{FILE}"
        outcome = self.tensorfs("warm", url, "-o", f"cache-dir={self.cache},{SIZE}")
        self.assertEqual(outcome.code, 1)
        self.assertIn("kept 0 B of", outcome.stderr)
        # A version before that is kept does not count for the one that was read.
        self.server.tags = "quoted"
        self.assert_done(self.tensorfs("warm", url, "-o", f"cache-dir={self.cache},{SIZE}"))
        self.server.tags = "none"
        again = self.tensorfs("warm", url, "-o", f"cache-dir={self.cache},{SIZE}")
        self.assertEqual(again.code, 1)
        self.assertIn("kept 0 B of", again.stderr)
        none = self.tensorfs("warm", URL, "-o", "cache-dir=none")
        self.assertIn("there is no disk cache to fill", none.stderr)

    def test_arguments_that_do_not_fit_are_refused(self):
        for words in (["warm"], ["warm", self.tmp], ["ls", URL], ["warm", URL, "--keep", "0"], ["prune", "-o", "cache=1G"]):
            self.assertEqual(self.tensorfs("cache", *words).code, 2, words)


class WarmOfShards(RemoteCase):
    def test_a_view_takes_the_bytes_of_its_tensors_and_all_shards_else(self):
        cache = self.tmp / "cache"
        with open(self.source / SHARD, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            name = next(name for name in json.loads(file.read(length)) if name != "__metadata__")
        words = ("-o", f"cache-dir={cache},cache-dir-size=64M", SHARDED, "--json")
        one = json.loads(self.tensorfs("warm", "-o", f"include={name}", *words).stdout)
        every = json.loads(self.tensorfs("warm", *words).stdout)
        self.assertTrue(one["ok"] and every["ok"], (one, every))
        self.assertEqual(every["files"], 3)
        self.assertLess(one["bytes"], every["bytes"])
        self.server.requests.clear()
        options = (f"cache-dir={cache}", "cache-dir-size=64M", "watch=off")
        with Mount(SHARDED, *options, env=self.env) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
        of_shards = [request for request in self.server.requests if request["path"].endswith(".safetensors")]
        self.assertEqual([request for request in of_shards if request["Range"]], [])
