"""Faults of remote sources: right bytes or one clear error, and no storm of requests."""

import os
import subprocess
import sys
import threading
import time

from mounts import tensorfs, wait_until
from object_server import ACCESS_KEY, SECRET_KEY
from test_object_stores import FILE, SHARD, URL, RemoteCase

# More of them are for a person who waits.
OBJECTS = int(os.environ.get("TENSORFS_TEST_OBJECTS", "3000"))

# Reads all of a mapped file when a line comes.
MAPPED = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    print("mapped", flush=True)
    sys.stdin.readline()
    sys.stdout.buffer.write(mapped[:])
"""


class Outages(RemoteCase):
    def test_a_server_that_is_gone_for_a_while_gives_the_bytes_once_it_is_back_and_gets_no_storm(self):
        with self.mount("watch=off", "io-timeout=60", "cache-dir=none") as mount:
            self.server.requests.clear()
            self.server.faults = [{"kind": "hang-up", "count": 1 << 40}]
            found, started = [], time.monotonic()
            readers = [threading.Thread(target=lambda: found.append((mount.path / FILE).read_bytes())) for _ in range(4)]
            for reader in readers:
                reader.start()
            wait_until(lambda: len(self.server.requests) >= 6, 60, "tries")
            asked, seconds = len(self.server.requests), time.monotonic() - started
            # The file has a few ranges; pauses grow from a fraction of a second.
            self.assertLess(asked, 60 + 40 * seconds)
            self.server.faults = []
            for reader in readers:
                reader.join(60)
            self.assertEqual(len(found), 4)
            self.assertTrue(all(data == self.whole for data in found))

    def test_a_host_without_an_address_is_one_line(self):
        outcome = self.tensorfs("ls", URL, AWS_ENDPOINT_URL="http://tensorfs.invalid:1")
        self.assert_refused(outcome, "no connection to tensorfs.invalid:1", seconds=60)
        self.assertIn("4 tries", outcome.stderr)

    def test_a_clock_that_is_wrong_is_named(self):
        self.server.faults = [{"kind": "error", "status": 403, "code": "RequestTimeTooSkewed", "count": 100}]
        self.assert_refused(self.tensorfs("ls", URL), "the clock of this machine is wrong")
        self.assertLess(len(self.server.requests), 8)


class Expiry(RemoteCase):
    def setUp(self):
        super().setUp()
        (self.tmp / ".aws").mkdir()
        self.token, self.runs = self.tmp / "token", self.tmp / "runs"
        program = self.tmp / "program"
        keys = f'"AccessKeyId": "{ACCESS_KEY}", "SecretAccessKey": "{SECRET_KEY}"'
        program.write_text(
            f'#!/bin/sh\necho run >> {self.runs}\n'
            f"""printf '{{"Version": 1, {keys}, "SessionToken": "%s", "Expiration": "2099-01-01T00:00:00Z"}}' "$(cat {self.token})"\n"""
        )
        program.chmod(0o755)
        (self.tmp / ".aws/config").write_text(f"[default]\ncredential_process = {program}\n")
        self.env |= {"HOME": str(self.tmp), "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}

    def expire(self, token):
        """From now on only `token` is valid."""
        self.server.session_token = token

    def test_credentials_that_end_in_the_middle_are_asked_for_anew_and_the_bytes_are_right(self):
        self.token.write_text("first")
        self.expire("first")
        with self.mount("watch=off", "cache-dir=none") as mount:
            self.token.write_text("second")
            self.expire("second")
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            # Reads that fail together may ask one after the other.
            self.assertLess(len(self.runs.read_text().splitlines()), 12)

    def test_credentials_that_have_ended_for_good_are_an_error_within_the_deadline_and_no_storm(self):
        self.token.write_text("first")
        self.expire("first")
        with self.mount("watch=off", "cache-dir=none", "io-timeout=3") as mount:
            self.expire("second")
            self.server.requests.clear()
            started = time.monotonic()
            with self.assertRaises(OSError):
                (mount.path / FILE).read_bytes()
            seconds = time.monotonic() - started
            self.assertLess(seconds, 30)
            mount.wait_for_log("the credentials have expired")
            self.assertLess(len(self.server.requests), 60 + 40 * seconds)
            self.expire("first")
            wait_until(lambda: self.reads(mount.path / FILE, self.whole), 30, "the bytes")


class Mapped(RemoteCase):
    def look(self, change):
        """Maps a file in a program, and lets it read once `change` has happened. Returns its exit status and the bytes."""
        with self.mount("watch=off", "cache-dir=none") as mount:
            words = [sys.executable, "-c", MAPPED, mount.path / FILE]
            program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            self.assertEqual(program.stdout.readline(), b"mapped\n")
            change()
            data, _ = program.communicate(b"\n", timeout=60)
            # The mount is there all the same.
            self.assertGreater((mount.path / FILE).stat().st_size, 0)
            self.assertTrue(tensorfs("status", "--json", mount.path).code == 0)
        self.server.put_folder("bucket", "models/tiny", self.source)
        return program.returncode, data

    def test_an_object_that_is_replaced_truncated_or_deleted_while_it_is_mapped_gives_no_other_bytes(self):
        shard, key = (self.source / SHARD).read_bytes(), f"models/tiny/{SHARD}"
        changes = {
            "replaced": lambda: self.server.put("bucket", key, bytes(len(shard))),
            "truncated": lambda: self.server.put("bucket", key, shard[: len(shard) // 2]),
            "deleted": lambda: self.server.delete("bucket", key),
        }
        for name, change in changes.items():
            with self.subTest(name=name):
                code, data = self.look(change)
                # The kernel ends a program that reads a page which does not come.
                self.assertTrue((code, data) == (-7, b"") or (code, data) == (0, self.whole), code)


class Names(RemoteCase):
    def test_a_folder_of_very_many_objects_is_listed_page_by_page(self):
        stored = dict(self.server.objects["bucket"])
        number = len(stored)
        one = next(iter(stored.values()))
        stored.update((f"models/tiny/notes/{index:06}.txt", one) for index in range(OBJECTS))
        self.server.objects["bucket"] = stored
        with self.mount("watch=off") as mount:
            self.server.requests.clear()
            self.assertEqual(len(os.listdir(mount.path / "notes")), OBJECTS)
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
        pages = -(-(OBJECTS + number) // self.server.page)
        self.assertLess(len(self.server.requests), 3 * pages + 40)

    def test_names_of_objects_that_are_no_names_of_files_are_left_out(self):
        for name in ("..", ".", "a//b", "x/../y", "new\nline.txt", "back\\slash.txt", "\u2028.txt", "%2e%2e"):
            self.server.put("bucket", f"models/tiny/{name}", b"text")
        with self.mount("watch=off") as mount:
            listed = set(os.listdir(mount.path))
            self.assertFalse({"..", "."} & listed)
            self.assertLessEqual({"new\nline.txt", "back\\slash.txt", "\u2028.txt", "%2e%2e"}, listed)
            for name in ("new\nline.txt", "back\\slash.txt", "\u2028.txt", "%2e%2e"):
                self.assertEqual((mount.path / name).read_bytes(), b"text")
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
