"""How few round trips a remote source takes, what is counted of it, and second requests for slow ones."""

import json
import os
import random
import struct
import threading

from mounts import Mount, TestCase, tensorfs, wait_until
from object_server import ObjectServer

URL = "s3://bucket/models/many"
FILE = "model.safetensors"
SHARDS = 60
EACH = 3000


def shard(number):
    header = {f"layer.{number}": {"dtype": "U8", "shape": [EACH], "data_offsets": [0, EACH]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + random.Random(number).randbytes(EACH)


def name_of(number):
    return f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"


class RemoteSpeedCase(TestCase):
    def setUp(self):
        super().setUp()
        self.server = ObjectServer().start()
        self.addCleanup(self.server.stop)
        for number in range(SHARDS):
            self.put(name_of(number), shard(number))
        weight_map = {f"layer.{number}": name_of(number) for number in range(SHARDS)}
        self.put(f"{FILE}.index.json", json.dumps({"metadata": {}, "weight_map": weight_map}).encode())
        self.put("config.json", b"{}")
        for stored in self.server.objects["bucket"].values():
            stored.date -= 3600
        self.index = self.tmp / "index"
        self.env = {**os.environ, **self.server.environment()}

    def put(self, name, data):
        self.server.put("bucket", f"models/many/{name}", data)

    def mount(self, *options):
        return Mount(URL, f"index-dir={self.index}", "watch=off", *options, env=self.env)

    def others(self):
        """The requests but for the ranges of shards."""
        return [line for line in self.server.requests if not (line["Range"] and "-of-" in line["path"])]


class RoundTrips(RemoteSpeedCase):
    def test_the_first_mount_of_many_shards_takes_five_round_trips_and_the_second_two(self):
        # All headers are asked for before the first one is answered.
        self.server.barrier = ("-of-", threading.Barrier(SHARDS))
        with self.mount(f"cache-dir={self.tmp}/cache,cache-dir-size=1G") as mount:
            asked = list(self.server.requests)
            self.assertEqual((mount.path / FILE).stat().st_size > SHARDS * EACH, True)
        self.assertIsNone(self.server.barrier)
        self.server.requests[:] = asked
        ranges = [line for line in asked if line["Range"] and "-of-" in line["path"]]
        self.assertEqual(len(ranges), SHARDS)
        self.assertLessEqual(len(self.others()) + 1, 5, self.others())
        self.server.requests.clear()
        with self.mount(f"cache-dir={self.tmp}/cache,cache-dir-size=1G"):
            asked = list(self.server.requests)
        self.assertLessEqual(len(asked), 2, asked)

    def test_a_command_reads_all_headers_at_once_too(self):
        self.server.barrier = ("-of-", threading.Barrier(SHARDS))
        self.assert_done(tensorfs("ls", "--index-dir", self.index, URL, env=self.env))
        self.assertIsNone(self.server.barrier)
        ranges = [line for line in self.server.requests if line["Range"] and "-of-" in line["path"]]
        self.assertEqual(len(ranges), SHARDS)
        self.assertLessEqual(len(self.others()) + 1, 6, self.others())

    def test_an_open_asks_for_the_states_of_all_shards_at_once(self):
        with self.mount("cache-dir=none") as mount:
            self.server.barrier_method = "HEAD"
            counts = []
            for look in [lambda: (mount.path / FILE).stat(), lambda: open(mount.path / FILE, "rb").close()]:
                self.server.requests.clear()
                self.server.barrier = ("-of-", threading.Barrier(SHARDS))
                look()
                asked = [line for line in self.server.requests if line["method"] == "HEAD"]
                if asked:
                    self.assertIsNone(self.server.barrier)
                counts.append(len(asked))
            self.assertLessEqual(set(counts), {0, SHARDS})
            self.assertIn(SHARDS, counts)

    def test_a_shard_that_is_replaced_after_the_listing_is_read_as_it_is_now(self):
        name = name_of(7)
        self.server.faults = [{"kind": "error", "status": 412, "match": name, "method": "GET"}]
        self.assert_done(tensorfs("ls", "--index-dir", "none", URL, env=self.env))
        self.assertEqual(self.server.faults, [])


class Counters(RemoteSpeedCase):
    def remote(self, mount):
        outcome = tensorfs("status", "--json", mount.path)
        return json.loads(outcome.stdout)[0]["remote"]

    def test_status_has_requests_bytes_retries_and_the_disk_cache(self):
        with self.mount(f"cache-dir={self.tmp}/cache,cache-dir-size=1G") as mount:
            self.server.faults = [{"kind": "busy", "match": name_of(3)}]
            (mount.path / FILE).read_bytes()
            remote = self.remote(mount)
            (endpoint,), (disk,) = remote["endpoints"], remote["disk_caches"]
            self.assertEqual(endpoint["host"], f"127.0.0.1:{self.server.port}")
            self.assertEqual(endpoint["requests"], len(self.server.requests))
            self.assertGreater(endpoint["bytes"], SHARDS * EACH)
            self.assertGreater(endpoint["first_byte_us"]["p99"], 0)
            self.assertEqual(disk["folder"], f"{self.tmp}/cache")
            self.assertGreater(disk["found_bytes"] + disk["missed_bytes"], 0)
            text = tensorfs("status", mount.path).stdout
            self.assertIn(f"server    127.0.0.1:{self.server.port}: ", text)
            self.assertIn(f"disk      {self.tmp}/cache: ", text)

    def test_a_mount_of_a_folder_of_this_machine_says_nothing_of_servers(self):
        folder = self.tmp / "local"
        folder.mkdir()
        (folder / FILE).write_bytes(shard(1))
        with Mount(folder) as mount:
            self.assertIsNone(self.remote(mount))

    def test_a_request_that_takes_much_longer_than_others_is_sent_twice(self):
        data = random.Random(1).randbytes(4_000_000)
        header = json.dumps({"x": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        header += b" " * (-len(header) % 8)
        whole = struct.pack("<Q", len(header)) + header + data
        self.server.put("bucket", f"models/one/{FILE}", whole)
        with Mount("s3://bucket/models", "watch=off", "io-timeout=0", f"index-dir={self.index}", env=self.env) as mount:
            # The usual time is known after the headers.
            (mount.path / "many" / FILE).read_bytes()
            # It never ends by itself, and the deadline of the read is far away.
            self.server.faults = [{"kind": "stall", "match": f"one/{FILE}", "method": "GET"}]
            self.assertTrue((mount.path / "one" / FILE).read_bytes() == whole)
            wait_until(lambda: not self.server.faults, 20, "the stall")
            (endpoint,) = self.remote(mount)["endpoints"]
            self.assertGreaterEqual(endpoint["hedges"], 1)
            self.assertEqual(endpoint["retries"], 0)
            self.assertLessEqual(endpoint["hedges"] * 20, endpoint["requests"])
