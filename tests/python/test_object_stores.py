"""Object stores and HTTP servers as sources, by URL: with a real server, and with one that misbehaves."""

import contextlib
import json
import os
import shutil
import subprocess
import time
import unittest
from pathlib import Path

import checkpoints
from manifest import by_id
from mounts import BIN, HELPER, Mount, MountFailed, TestCase, detach, find_mount, needs_root, run, tensorfs, wait_until
from object_server import ACCESS_KEY, SECRET_KEY, Handler, ObjectServer

FILE = "model.safetensors"
URL = "s3://bucket/models/tiny"
SHARD = "model-00002-of-00003.safetensors"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

NGINX_CONFIG = """
daemon off; master_process off; pid {tmp}/nginx.pid; error_log {tmp}/error.log;
events {{}}
http {{
    access_log off; client_body_temp_path {tmp}; proxy_temp_path {tmp}; fastcgi_temp_path {tmp};
    uwsgi_temp_path {tmp}; scgi_temp_path {tmp};
    server {{ listen 127.0.0.1:{port}; root {root}; gzip on; gzip_types *; gzip_min_length 1; }}
}}
"""


class Services(Handler):
    """The services of a machine, of a container and of AWS that give credentials for a session."""

    KEYS = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Expiration": "2099-01-01T00:00:00Z"}

    def do_PUT(self):
        self.answer(200, b"a-token-of-the-machine")

    def do_GET(self):
        is_machine = self.headers.get("x-aws-ec2-metadata-token") == "a-token-of-the-machine"
        if not is_machine and self.headers.get("Authorization") != "an-identity":
            return self.answer(401)
        keys = {"Code": "Success", "Token": "a session", **self.KEYS}
        return self.answer(200, b"reader" if self.path.endswith("/") else json.dumps(keys).encode())

    def do_POST(self):
        if b"WebIdentityToken=an-identity" not in self.body():
            return self.answer(403)
        keys = "".join(f"<{name}>{value}</{name}>" for name, value in {"SessionToken": "a session", **self.KEYS}.items())
        name = "AssumeRoleWithWebIdentity"
        text = f"<{name}Response><{name}Result><Credentials>{keys}</Credentials></{name}Result></{name}Response>"
        return self.answer(200, text.encode())


class RemoteCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.server = self.enterContext(ObjectServer())
        self.server.put_folder("bucket", "models/tiny", self.source)
        self.env = {**os.environ, **self.server.environment(), "TENSORFS_INDEX_DIR": "none"}
        self.whole = checkpoints.hf_whole(self.source)

    def enterContext(self, context):
        # Python 3.10 has no method of this name.
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def tensorfs(self, *words, **environment):
        return tensorfs(*words, env={**self.env, **environment})

    def consolidated(self, url=URL, *words, **environment):
        """The outcome of consolidating, and the bytes that it wrote."""
        out = self.tmp / f"out-{time.monotonic_ns()}.safetensors"
        outcome = self.tensorfs("consolidate", *words, url, out, **environment)
        return outcome, out.read_bytes() if out.exists() else None

    def assert_whole(self, url=URL, **environment):
        outcome, found = self.consolidated(url, **environment)
        self.assert_done(outcome)
        self.assertTrue(found == self.whole)

    def assert_refused(self, outcome, text, seconds=20):
        self.assertEqual(outcome.code, 1, outcome.stderr)
        # A change is logged besides.
        lines = [line for line in outcome.stderr.splitlines() if " ERROR " not in line]
        self.assertEqual(len(lines), 1, outcome.stderr)
        self.assertIn(text, lines[0])
        self.assertLess(outcome.seconds, seconds)

    def reads(self, path, expected):
        with contextlib.suppress(OSError):
            return path.read_bytes() == expected
        return False

    def mount(self, *options, url=URL, **environment):
        return Mount(url, *options, env={**self.env, **environment})


class Commands(RemoteCase):
    def test_each_command_says_of_a_bucket_what_it_says_of_a_folder(self):
        for words in (["ls"], ["ls", "--json"], ["inspect"], ["inspect", "--json"]):
            remote, local = self.tensorfs(*words, URL), self.tensorfs(*words, self.source)
            self.assert_done(remote)
            self.assertEqual(remote.stdout.replace(URL, str(self.source)), local.stdout)
        self.assert_whole()
        self.assert_whole(URL + "/")
        self.assert_done(self.tensorfs("verify", URL))
        self.assert_done(self.tensorfs("load", URL))
        self.assert_done(self.tensorfs("diff", URL, self.source))
        out = self.tmp / "converted.tensors"
        self.assert_done(self.tensorfs("convert", URL, out))
        self.assert_done(self.tensorfs("diff", out, self.source))

    def test_one_shard_is_a_source_too(self):
        listed, local = (self.tensorfs("ls", f"{source}/{SHARD}") for source in (URL, self.source))
        self.assert_done(listed)
        self.assertEqual(listed.stdout.replace(URL, str(self.source)), local.stdout)

    def test_a_url_of_a_plain_server_is_a_source_by_its_weight_map_and_by_its_file(self):
        self.server.public.add("bucket")
        self.server.put("bucket", "one/" + FILE, self.whole)
        for url in ("bucket/models/tiny", "bucket/one", "bucket/one/" + FILE):
            self.assert_whole(f"{self.server.url}/{url}")
        self.server.put("bucket", "one/other.safetensors", self.whole)
        self.assert_whole(f"{self.server.url}/bucket/one/other.safetensors")

    def test_an_index_of_a_bucket_saves_reading_its_headers_until_an_object_is_replaced(self):
        index = self.tmp / "index"
        words = ["ls", "--index-dir", index, URL]
        ranges = []
        # It counts only for files that had not just been written.
        for stored in self.server.objects["bucket"].values():
            stored.date -= 3600
        for _ in range(2):
            self.server.requests.clear()
            self.assert_done(self.tensorfs(*words))
            ranges.append(sum(request["Range"] is not None for request in self.server.requests))
        self.assertGreater(ranges[0], 3)
        self.assertEqual(ranges[1], 0)
        self.server.put("bucket", f"models/tiny/{SHARD}", (self.source / SHARD).read_bytes())
        self.server.requests.clear()
        self.assert_done(self.tensorfs(*words))
        self.assertTrue(any(request["Range"] for request in self.server.requests))

    def test_a_long_listing_is_read_page_by_page_and_every_range_names_the_version(self):
        self.server.page = 1
        self.assert_whole()
        pages = [request["path"] for request in self.server.requests if "continuation-token" in request["path"]]
        self.assertGreaterEqual(len(pages), 2)
        ranged = [request for request in self.server.requests if request["Range"]]
        self.assertTrue(ranged and all(request["If-Match"] for request in ranged))

    def test_names_with_any_characters_are_read(self):
        prefix = "a b/\u00fc+%20&=?#'(~)/d.e"
        self.server.put_folder("bucket", prefix, self.source)
        self.assert_whole(f"s3://bucket/{prefix}")

    def test_a_url_with_secrets_or_dots_is_refused_and_its_secrets_are_not_shown(self):
        for url, why in (
            (f"http://user:hunter2@127.0.0.1:{self.server.port}/bucket", "user names and passwords"),
            (f"{self.server.url}/bucket/{FILE}?X-Amz-Signature=hunter2", "`?`"),
            ("s3://bucket/../x", "`..`"),
            ("s3://", "no bucket"),
        ):
            outcome = self.tensorfs("ls", url)
            self.assert_refused(outcome, why)
            self.assertNotIn("hunter2", outcome.stderr)


class Access(RemoteCase):
    NONE = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}

    def test_what_the_server_refuses_is_told_apart(self):
        for environment, url, why in (
            ({}, "s3://bucket/none", "404: nothing is there"),
            ({}, "s3://none/models", "there is no such bucket"),
            ({"AWS_SECRET_ACCESS_KEY": "x"}, URL, "the secret key is wrong"),
            ({"AWS_ACCESS_KEY_ID": "x"}, URL, "the access key is unknown"),
            ({"AWS_SKIP_SIGNATURE": "true"}, URL, "AWS_SKIP_SIGNATURE is set"),
            (self.NONE, URL, "no credentials were found"),
            ({}, f"{self.server.url}/bucket/{FILE}", "it is not public"),
            ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, URL, "Connection refused"),
            ({"AWS_ENDPOINT_URL": "127.0.0.1"}, URL, "AWS_ENDPOINT_URL is no URL"),
        ):
            with self.subTest(why=why):
                self.assert_refused(self.tensorfs("ls", url, HOME=str(self.tmp), **environment), why)
        self.server.faults = [{"kind": "error", "status": 401}]
        self.assert_refused(self.tensorfs("ls", URL), "401 Refused: the credentials do not allow it")

    def test_a_public_bucket_needs_no_credentials(self):
        self.server.public.add("bucket")
        self.assert_whole(HOME=str(self.tmp), **self.NONE)
        self.assert_whole(AWS_SKIP_SIGNATURE="1")
        self.assertFalse(self.server.requests[-1]["signed"])

    def test_without_credentials_and_without_a_service_for_them_the_error_comes_at_once(self):
        # Nobody answers there: the address is for documentation.
        environment = {"AWS_EC2_METADATA_DISABLED": "", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://192.0.2.1"}
        outcome = self.tensorfs("ls", URL, HOME=str(self.tmp), **self.NONE, **environment)
        self.assert_refused(outcome, "no credentials were found", seconds=8)

    def test_a_profile_and_a_program_give_credentials(self):
        (self.tmp / ".aws").mkdir()
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        (self.tmp / ".aws/credentials").write_text(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[own]\n{keys}")
        self.assert_whole(HOME=str(self.tmp), AWS_PROFILE="own", **self.NONE)
        self.assert_refused(self.tensorfs("ls", URL, HOME=str(self.tmp), **self.NONE), "access key is unknown")
        program = self.tmp / "program"
        program.write_text(f"#!/bin/sh\necho '{{\"Version\": 1, \"AccessKeyId\": \"{ACCESS_KEY}\", \"SecretAccessKey\": \"{SECRET_KEY}\"}}'\n")
        program.chmod(0o755)
        (self.tmp / ".aws/config").write_text(f"[profile by-program]\ncredential_process = {program}\n")
        self.assert_whole(HOME=str(self.tmp), AWS_PROFILE="by-program", **self.NONE)

    def test_the_machine_the_container_and_a_web_identity_give_credentials(self):
        services = self.enterContext(ObjectServer(handler=Services))
        identity = self.tmp / "identity"
        identity.write_text("an-identity")
        self.env |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(self.tmp)}
        self.server.session_token = "a session"
        role = "arn:aws:iam::123456789012:role/reader"
        for way, environment in {
            "the machine": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": services.url, "AWS_EC2_METADATA_DISABLED": ""},
            "the container": {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": services.url + "/container",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(identity),
            },
            "a web identity": {
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(identity),
                "AWS_ROLE_ARN": role,
                "AWS_ENDPOINT_URL_STS": services.url,
            },
        }.items():
            with self.subTest(way=way):
                outcome = self.tensorfs("doctor", URL, **environment)
                self.assert_done(outcome)
                self.assertIn(way, outcome.stdout)
                self.assert_whole(**environment)

    def test_no_secret_is_in_arguments_logs_status_attributes_or_the_index(self):
        index, log = self.tmp / "index", self.tmp / "log"
        secrets = [SECRET_KEY, "token-of-the-tests"]
        self.server.session_token = "token-of-the-tests"
        environment = {"AWS_SESSION_TOKEN": "token-of-the-tests", "TENSORFS_LOG": "trace"}
        with self.mount(f"index-dir={index}", f"log={log}", **environment) as mount:
            self.server.faults = [{"kind": "busy", "count": 2}, {"kind": "short"}]
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            shown = [Path(f"/proc/{mount.pid}/cmdline").read_text(), mount.log(), log.read_text()]
            shown.append(tensorfs("status", "--json", mount.path).stdout)
            shown.append(os.getxattr(mount.path / FILE, "user.tensorfs.source").decode())
        shown += [path.read_bytes().decode(errors="replace") for path in index.rglob("*") if path.is_file()]
        self.assertIn("127.0.0.1", "".join(shown))
        for secret in secrets:
            self.assertFalse([text for text in shown if secret in text])


class Misbehaviour(RemoteCase):
    def test_what_passes_is_tried_again_and_the_bytes_are_right(self):
        for kind in ("busy", "hang-up", "reset", "short", "short-chunked", "wrong-range", "ignores-range", "gzip"):
            for method in ("GET", "HEAD") if kind in ("busy", "hang-up") else ("GET",):
                with self.subTest(kind=kind, method=method):
                    faults = [{"kind": kind, "match": SHARD, "method": method} for _ in range(2)]
                    self.server.faults = faults
                    self.assert_whole()
                    self.assertEqual(self.server.faults, [])

    def test_what_stays_wrong_is_refused_in_one_line(self):
        for kind, why in (
            ("wrong-range", "the server answers"),
            ("ignores-range", "answers 200 to a range"),
            ("gzip", "as \"gzip\""),
            ("other-tag", "was replaced while it was in use"),
        ):
            with self.subTest(kind=kind):
                self.server.faults = [{"kind": kind, "match": SHARD, "method": "GET", "count": 1000}]
                outcome, found = self.consolidated()
                self.assert_refused(outcome, why)
                self.assertIsNone(found)

    def test_a_server_that_asks_to_wait_is_asked_again_then(self):
        self.server.faults = [{"kind": "busy", "after": 1, "match": SHARD, "method": "GET"}]
        started = time.monotonic()
        self.assert_whole()
        self.assertGreaterEqual(time.monotonic() - started, 1)
        self.server.faults = [{"kind": "busy", "after": 3600, "match": SHARD, "method": "GET"}]
        self.assert_refused(self.consolidated()[0], "asks to wait 3600 s")

    def test_a_server_that_ignores_conditions_and_has_other_bytes_is_found_out(self):
        with self.mount("watch=off") as mount, open(mount.path / FILE, "rb") as file:
            shard = bytearray((self.source / SHARD).read_bytes())
            shard[-1] ^= 1
            self.server.put("bucket", f"models/tiny/{SHARD}", bytes(shard))
            self.server.faults = [{"kind": "ignores-conditions", "count": 1000}]
            with self.assertRaises(OSError):
                file.read()
            mount.wait_for_log("was replaced while it was in use")

    def test_each_form_of_etag_and_none_is_understood(self):
        for form in ("quoted", "bare", "weak", "none"):
            with self.subTest(form=form):
                self.server.tags = form
                self.assert_whole()
                conditions = {request["If-Match"] or request["If-Unmodified-Since"] for request in self.server.requests if request["Range"]}
                self.assertNotIn(None, conditions)
                self.server.requests.clear()

    def test_a_server_that_stalls_fails_a_read_at_its_deadline(self):
        with self.mount("watch=off", "io-timeout=2") as mount:
            for kind in ("stall", "stall-in-body"):
                self.server.faults = [{"kind": kind, "match": SHARD, "method": "GET", "count": 1000}]
                started = time.monotonic()
                with self.assertRaises(OSError):
                    (mount.path / FILE).read_bytes()
                self.assertLess(time.monotonic() - started, 15)
            self.server.faults = []
            wait_until(lambda: self.reads(mount.path / FILE, self.whole), 20, "the bytes")

    def test_a_stall_that_ends_before_the_deadline_is_no_error(self):
        self.server.faults = [{"kind": "stall", "match": SHARD, "method": "GET"}]
        with self.mount("watch=off", "io-timeout=8") as mount:
            self.server.faults = [{"kind": "stall-in-body", "match": SHARD, "method": "GET"}]
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)

    def test_a_server_that_stalls_at_the_start_is_named(self):
        self.server.delay = -1
        outcome = self.tensorfs("ls", "-o", "io-timeout=1", URL)
        self.assert_refused(outcome, "no answer from 127.0.0.1", seconds=10)

    def test_a_bucket_of_another_region_is_found(self):
        header = {"x-amz-bucket-region": "eu-north-1"}
        fault = {"kind": "error", "status": 301, "code": "PermanentRedirect", "headers": header}
        self.server.faults = [fault]
        self.assert_whole()


class Mounts(RemoteCase):
    def test_a_mount_of_a_bucket_shows_its_url_and_its_bytes(self):
        self.server.put("bucket", "models/tiny/notes.txt", b"notes")
        with self.mount() as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            self.assertEqual((mount.path / "notes.txt").read_bytes(), b"notes")
            self.assertGreater((mount.path / FILE).stat().st_mtime, 0)
            self.assertEqual(find_mount(mount.path).device, URL)
            status = tensorfs("status", "--json", mount.path).stdout
            self.assertIn(f'"{URL}"', status)
            self.assertIn(f"s3 at 127.0.0.1:{self.server.port}", status)
            self.assertIn(f'"source":"{URL}"', os.getxattr(mount.path / FILE, "user.tensorfs.source").decode())
            # The mount is a source too.
            self.assert_done(self.tensorfs("verify", mount.path / FILE))
            self.assert_done(tensorfs("load", mount.path))

    def test_a_mount_of_a_plain_server_shows_the_same_bytes(self):
        self.server.public.add("bucket")
        with self.mount(url=f"{self.server.url}/bucket/models/tiny") as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)

    def test_new_objects_and_new_versions_are_found(self):
        with self.mount("watch=poll,watch-interval=1,watch-grace=1") as mount:
            self.server.put("bucket", "models/tiny/new.json", b"{}")
            wait_until(lambda: (mount.path / "new.json").exists(), 20, "the new file")
            self.server.put("bucket", "models/tiny/new.json", b"[1]")
            wait_until(lambda: self.reads(mount.path / "new.json", b"[1]"), 20, "the new bytes")
            self.server.delete("bucket", "models/tiny/new.json")
            wait_until(lambda: not (mount.path / "new.json").exists(), 20, "its end")

    def test_a_shard_that_is_replaced_gives_the_error_of_a_local_one(self):
        with self.mount("watch=off") as mount, open(mount.path / FILE, "rb") as file:
            self.server.put("bucket", f"models/tiny/{SHARD}", (self.source / SHARD).read_bytes())
            with self.assertRaises(OSError):
                file.read()
            mount.wait_for_log("was replaced while it was in use")

    def test_a_mount_of_a_local_folder_starts_nothing_for_remote_sources(self):
        def names(pid):
            return {path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")}

        with Mount(self.source) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            self.assertNotIn("tensorfs-remote", names(mount.pid))
        with self.mount() as mount:
            self.assertIn("tensorfs-remote", names(mount.pid))

    def test_nothing_stays_mounted_if_the_server_refuses(self):
        with self.assertRaises(MountFailed) as failed, self.mount(AWS_SECRET_ACCESS_KEY="x"):
            pass
        self.assertIn("the secret key is wrong", failed.exception.stderr)

    @needs_root
    def test_the_helper_of_mount_takes_a_url(self):
        place = self.tmp / "mnt"
        place.mkdir()
        self.addCleanup(detach, place)
        for program in (HELPER, BIN):
            outcome = run(program, URL, place, "-o", "ro,_netdev", env=self.env)
            self.assert_done(outcome)
            self.assertEqual(find_mount(place).device, URL)
            self.assertTrue((place / FILE).read_bytes() == self.whole)
            self.assert_done(run(shutil.which("umount"), place))


@unittest.skipUnless(NGINX, "needs nginx")
class Nginx(RemoteCase):
    def test_a_folder_of_nginx_is_a_source_and_a_replaced_file_is_found_out(self):
        root = self.tmp / "www"
        shutil.copytree(self.source, root / "a model")
        self.tmp.chmod(0o755)
        port = self.server.port
        self.server.stop()
        config = self.tmp / "nginx.conf"
        config.write_text(NGINX_CONFIG.format(tmp=self.tmp, port=port, root=root))
        process = subprocess.Popen([NGINX, "-c", config, "-p", self.tmp], stderr=subprocess.DEVNULL)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        url = f"http://127.0.0.1:{port}/a%20model"
        wait_until(lambda: self.tensorfs("ls", url).code == 0, 20, "nginx answers")
        self.assert_whole(url)
        self.assert_done(self.tensorfs("verify", url))
        with self.mount("watch=off", url=url) as mount, open(mount.path / FILE, "rb") as file:
            shard = root / "a model" / SHARD
            shard.write_bytes(shard.read_bytes())
            os.utime(shard, (1, 1))
            with self.assertRaises(OSError):
                file.read()
            mount.wait_for_log("was replaced while it was in use")
