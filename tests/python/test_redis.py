"""Checkpoints in Redis, in tensorizer's layout, with a real server."""

import os
import random
import shutil
import socket
import struct
import subprocess
import unittest
from pathlib import Path

from mounts import Mount, TestCase, tensorfs, wait_until
from tensorizer_files import Stored, encrypted_file_of, file_of

SERVER = shutil.which("redis-server")
# The package redis-tools has the server too, under the name of a tool.
TOOL = shutil.which("redis-check-rdb")
FILE = "model.safetensors"
BIG = 3 << 20


class Redis:
    """A server, and a connection to it."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        self.process = subprocess.Popen(words, executable=SERVER or TOOL, stdout=subprocess.DEVNULL)
        wait_until(self.connected, 20, "Redis")

    def connected(self):
        try:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        except OSError:
            return False
        return True

    def stop(self):
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def send(self, *words):
        words = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        text = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
        self.connection.sendall(text)
        answer = b""
        while not answer.endswith(b"\r\n"):
            answer += self.connection.recv(4096)
        assert answer[:1] in b"+:$", answer
        return answer

    def put(self, prefix, data):
        """Stores a file as `TensorDeserializer.to_redis` does."""
        count, area = struct.unpack_from("<QQ", data, 57)
        self.send("SET", f"{prefix}:header:0", data[: 73 + area])
        for name, header, start, length in entries(data, count):
            key = prefix.encode() + b":" + name + b":"
            self.send("SET", key + str(header).encode(), data[header:start])
            if length:
                self.send("SET", key + str(start).encode(), data[start : start + length])


def entries(data, count):
    """Name, place of the header, place and length of the data of each tensor."""
    at = 73
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, at)
        name = data[at + 2 : at + 2 + length]
        at += 2 + length + 1
        at += 1 + data[at]
        at += 1 + 4 * data[at]
        yield (name, *struct.unpack_from("<QQQ", data, at))
        at += 24


@unittest.skipUnless(SERVER or TOOL, "needs redis-server or redis-tools")
class RedisCase(TestCase):
    def setUp(self):
        super().setUp()
        self.redis = Redis(self.tmp)
        self.addCleanup(self.redis.stop)
        big = random.Random(1).randbytes(BIG)
        self.tensors = [
            Stored.of("model.big", "U8", [BIG], big),
            Stored.of("model.none", "F32", [0, 3], b""),
            Stored.of(["nested", 0, "x"], "I16", [2], b"abcd"),
            Stored.of("last", "F32", [2, 2], bytes(range(16))),
        ]
        self.data = file_of(self.tensors)
        self.redis.put("a/model", self.data)
        self.url = f"redis://127.0.0.1:{self.redis.port}/a/model"
        self.local = self.tmp / "local.tensors"
        self.local.write_bytes(self.data)
        self.env = {**os.environ, "TENSORFS_INDEX_DIR": "none"}

    def tensorfs(self, *words):
        return tensorfs(*words, env=self.env)

    def consolidated(self, source):
        out = self.tmp / "out.safetensors"
        out.unlink(missing_ok=True)
        self.assert_done(self.tensorfs("consolidate", source, out))
        return out.read_bytes()

    def assert_refused(self, outcome, text):
        self.assertEqual(outcome.code, 1, outcome.stdout)
        self.assertIn(text, outcome.stderr)

    def big_key(self):
        name, _, start, _ = next(iter(entries(self.data, 4)))
        return f"a/model:{name.decode()}:{start}"

    def test_each_command_says_of_the_keys_what_it_says_of_the_file(self):
        self.assertEqual(self.consolidated(self.url), self.consolidated(self.local))
        for words in (["ls"], ["inspect"], ["verify"], ["load"], ["doctor"]):
            self.assert_done(self.tensorfs(*words, self.url))
        self.assert_done(self.tensorfs("diff", self.url, self.local))
        self.assert_done(self.tensorfs("ls", f"{self.url}/model.tensors"))

    def test_a_mount_reads_any_part(self):
        whole = self.consolidated(self.local)
        with Mount(self.url, env=self.env) as mount, open(mount.path / FILE, "rb") as file:
            chance = random.Random(2)
            for _ in range(50):
                offset = chance.randrange(len(whole))
                length = chance.randrange(1, 200_000)
                self.assertTrue(os.pread(file.fileno(), length, offset) == whole[offset : offset + length])
            status = tensorfs("status", "--json", mount.path).stdout
            self.assertIn(f"redis at 127.0.0.1:{self.redis.port}", status)

    def test_a_value_that_is_not_what_its_hash_says_is_refused(self):
        self.redis.send("SETRANGE", self.big_key(), BIG - 1, b"\0" if self.tensors[0].data[-1] else b"\1")
        self.assert_refused(self.tensorfs("load", self.url), "is not what the hash in its header says")
        self.redis.send("SETRANGE", self.big_key(), BIG, b"more")
        self.assert_refused(self.tensorfs("ls", self.url), f"has {BIG + 4} bytes, its header says {BIG}")

    def test_a_value_that_changes_after_it_was_checked_gives_the_error_of_a_replaced_shard(self):
        with Mount(self.url, "watch=off", "cache=64M", "cache-dir=none", env=self.env) as mount:
            with open(mount.path / FILE, "rb") as file:
                # The kernel does not keep what it was not asked for.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                os.pread(file.fileno(), 1, 4096)
                self.redis.send("SETRANGE", self.big_key(), BIG // 2, bytes(1 << 20))
                with self.assertRaises(OSError):
                    for offset in range(0, BIG, 1 << 16):
                        os.pread(file.fileno(), 1 << 16, offset)

    def test_what_is_not_there_or_is_no_server_is_told_in_one_line(self):
        base = f"redis://127.0.0.1:{self.redis.port}"
        self.assert_refused(self.tensorfs("ls", f"{base}/none"), "no such prefix of keys")
        self.assert_refused(self.tensorfs("ls", base), "names no prefix of keys")
        outcome = self.tensorfs("ls", f"redis://me:hunter2@127.0.0.1:{self.redis.port}/a")
        self.assert_refused(outcome, "do not belong into a URL")
        self.assertNotIn("hunter2", outcome.stderr)
        self.redis.send("SET", "broken:header:0", b"|TZR|")
        self.assert_refused(self.tensorfs("ls", f"{base}/broken"), "the head of a tensorizer file takes 73")
        self.redis.send("CONFIG", "SET", "requirepass", "x")
        self.assert_refused(self.tensorfs("ls", self.url), "asks for a password")
        self.redis.process.kill()
        self.redis.process.wait()
        self.assert_refused(self.tensorfs("ls", self.url), "no connection to 127.0.0.1")

    def test_encrypted_values_need_their_key(self):
        key = self.tmp / "key"
        key.write_bytes(bytes(range(32)))
        self.redis.put("secret", encrypted_file_of(self.tensors, bytes(range(32))))
        url = self.url.replace("a/model", "secret")
        self.assert_done(self.tensorfs("load", url, "-o", f"key-file={key}"))
        self.assertEqual(self.tensorfs("load", url).code, 1)
