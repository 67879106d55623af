"""No secret is shown: keys, tokens, signatures, passwords and links of each kind of remote source are looked for in
arguments, logs, status, errors, attributes, indexes, and in all that a mount shows."""

import base64
import contextlib
import os
from pathlib import Path

from cloud_server import ACCOUNT, ACCOUNT_KEY, SAS, TOKEN, AzureServer, GoogleServer
from hub_server import TOKEN as HUB_TOKEN
from hub_server import HubServer
from manifest import by_id
from mounts import Mount, TestCase, tensorfs
from object_server import ACCESS_KEY, SECRET_KEY, ObjectServer
from web_server import LoginServer

FILE = "model.safetensors"
SESSION = "a-session-token-of-the-tests"
PASSWORD = "a-password-of-the-tests"


class Secrets(TestCase):
    def setUp(self):
        super().setUp()
        self.source = by_id("hf_three_shards").source
        self.broken = by_id("bad_hf_missing_shard").source

    def started(self, server):
        server.start()
        self.addCleanup(server.stop)
        for prefix, folder in (("good", self.source), ("good/broken", self.broken)):
            if not isinstance(server, HubServer):
                server.put_folder("bucket", prefix, folder)
        return server

    def shown(self, url, environment, faults, options):
        """All that a mount of `url` and commands about it show, with faults on the way."""
        index, log = self.tmp / "index", self.tmp / "log"
        env = {**os.environ, "HOME": str(self.tmp), "TENSORFS_LOG": "trace", **environment}
        shown = []
        with Mount(url, f"index-dir={index}", f"log={log}", "watch=off", *options, env=env) as mount:
            faults()
            for path in sorted(mount.path.rglob("*")):
                if path.is_file():
                    with contextlib.suppress(OSError):
                        shown.append(path.read_bytes())
                    with contextlib.suppress(OSError):
                        shown += [os.getxattr(path, name) for name in os.listxattr(path)]
            self.assertTrue(any(path.name == "TENSORFS-ERROR.txt" for path in mount.path.rglob("*")))
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    shown.append(path.read_bytes())
            for words in (["status", "--json", mount.path], ["status"], ["ls", "--json", mount.path]):
                shown += streams(tensorfs(*words, env=env))
            shown.append(mount.log().encode())
        shown.append(log.read_bytes())
        given = [word for option in options for word in ("-o", option)]
        for words in (["doctor", url], ["doctor", "--json", url], ["ls", url], ["ls", f"{url}/none"], ["-vvv", "inspect", f"{url}/broken"]):
            faults()
            shown += streams(tensorfs(*words, *given, env=env))
        shown += [path.read_bytes() for path in self.tmp.rglob("*") if path.is_file() and path.name not in KEPT]
        return b"\0".join(shown)

    def assert_none_is_shown(self, url, environment, faults, secrets, options=()):
        shown = self.shown(url, environment, faults, options)
        # It has what is no secret.
        self.assertIn(b"127.0.0.1", shown)
        self.assertIn(url.encode(), shown)
        for secret in secrets:
            found = shown.find(secret.encode())
            self.assertEqual(found, -1, shown[max(found - 200, 0) : found + 40])

    def faults_of(self, server):
        def plant():
            server.faults = [{"kind": "busy", "count": 2}, {"kind": "short"}, {"kind": "hang-up"}, {"kind": "error", "status": 409}]

        return plant

    def test_the_keys_of_s3(self):
        server = self.started(ObjectServer())
        server.session_token = SESSION
        environment = {**server.environment(), "AWS_SESSION_TOKEN": SESSION}
        self.assert_none_is_shown("s3://bucket/good", environment, self.faults_of(server), [SECRET_KEY, SESSION])

    def test_the_keys_of_a_file_that_an_option_names(self):
        server = self.started(ObjectServer())
        keys = self.tmp / "keys"
        keys.write_text(f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n")
        environment = {"AWS_EC2_METADATA_DISABLED": "true", "NO_PROXY": "127.0.0.1"}
        options = [f"credentials-file={keys}", "profile=work", f"endpoint={server.url}"]
        self.assert_none_is_shown("s3://bucket/good", environment, self.faults_of(server), [SECRET_KEY], options)

    def test_the_token_of_google(self):
        server = self.started(GoogleServer())
        self.assert_none_is_shown("gs://bucket/good", server.environment(), self.faults_of(server), [TOKEN])

    def test_the_key_the_signature_and_the_token_of_azure(self):
        server = self.started(AzureServer())
        no_key = {**server.environment(), "AZURE_STORAGE_KEY": ""}
        for environment in (
            server.environment(),
            {**no_key, "AZURE_STORAGE_SAS_TOKEN": SAS},
            {**no_key, "AZURE_IMDS_ENDPOINT": f"{server.url}/metadata/identity/oauth2/token"},
        ):
            server.faults = []
            secrets = [ACCOUNT_KEY, "signature%2Bof", "signature+of", TOKEN]
            self.assert_none_is_shown("az://bucket/good", environment, self.faults_of(server), secrets)

    def test_the_token_and_the_links_of_the_hub(self):
        hub = self.started(HubServer())
        hub.small = 64
        extra = {f"broken/{path.name}": path.read_bytes() for path in self.broken.iterdir()}
        hub.commit("models/org/good", self.source, extra=extra)
        hub.repositories["models/org/good"].access = "private"
        environment = {**hub.environment(), "HF_TOKEN": HUB_TOKEN}

        def faults():
            hub.faults = [{"kind": "busy", "match": "resolve"}]
            hub.links.faults = [{"kind": "error", "status": 403}, {"kind": "short"}, {"kind": "hang-up"}]

        self.assert_none_is_shown("hf://org/good", environment, faults, [HUB_TOKEN, "-secret"])

    def test_the_password_of_netrc(self):
        server = self.started(LoginServer("someone", PASSWORD))
        netrc = self.tmp / ".netrc"
        netrc.write_text(f"machine 127.0.0.1 login someone password {PASSWORD}\n")
        netrc.chmod(0o600)
        encoded = base64.b64encode(f"someone:{PASSWORD}".encode()).decode()
        url = f"{server.url}/bucket/good"
        self.assert_none_is_shown(url, {"NO_PROXY": "127.0.0.1"}, self.faults_of(server), [PASSWORD, encoded])

    def test_a_secret_in_a_url_is_shown_by_no_command(self):
        target, config = self.tmp / "target", self.tmp / "config.toml"
        target.mkdir()
        for url in (
            "s3://AKID:SE/CRET@b/gpt2",
            "s3://AKID:SE+CRET@b/gpt2",
            "https://user:SE/CRET@h/x",
            "redis://:SE/CRET@h",
            "https://h/x#sig=SE/CRET",
        ):
            with self.subTest(url=url):
                config.write_text(f"[[mount]]\nname = 'a'\nsource = '{url}'\ntarget = '{target}'\n")
                commands = (
                    ["ls", url],
                    ["ls", "--json", url],
                    ["ls", "-o", f"endpoint={url}", "s3://b/x"],
                    ["doctor", url],
                    ["doctor", "--json", url],
                    ["mount", url, target],
                    ["serve", "--check", "--config", config],
                )
                for words in commands:
                    outcome = tensorfs(*words)
                    self.assertNotEqual(outcome.code, 0, words)
                    self.assertNotIn("CRET", outcome.stdout + outcome.stderr)
                    self.assertIn("***", outcome.stdout + outcome.stderr)
                self.assertIn(tensorfs("mount", url, target).stderr.removeprefix("tensorfs: "), outcome.stderr)


# Files in which the user keeps secrets.
KEPT = {".netrc", "keys"}


def streams(outcome):
    return [outcome.stdout.encode(), outcome.stderr.encode()]
