"""Options about the credentials and the server of one remote source."""

from cloud_server import ACCOUNT, ACCOUNT_KEY, AzureServer, GoogleServer
from hub_server import TOKEN as HUB_TOKEN
from hub_server import HubServer
from mounts import find_mount, tensorfs
from object_server import ACCESS_KEY, SECRET_KEY
from test_object_stores import FILE, URL, RemoteCase
from web_server import LoginServer


class RemoteOptions(RemoteCase):
    def setUp(self):
        super().setUp()
        # Keys of the environment that nobody takes.
        self.env.update(AWS_ENDPOINT_URL="", AWS_ACCESS_KEY_ID="another", AWS_SECRET_ACCESS_KEY="another", AWS_REGION="")

    def written(self, name, text):
        path = self.tmp / name
        path.write_text(text)
        path.chmod(0o600)
        return path

    def profiles(self):
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        return self.written("profiles", f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[work]\n{keys}")

    def test_a_profile_of_a_file_goes_before_the_keys_of_the_environment(self):
        endpoint = f"endpoint={self.server.url},region=us-east-1"
        file = f"credentials-file={self.profiles()}"
        self.assert_refused(self.tensorfs("ls", URL, "-o", endpoint), "the access key is unknown there")
        self.assert_refused(self.tensorfs("ls", URL, "-o", f"{endpoint},{file}"), "the access key is unknown there")
        for words in (["ls"], ["verify"], ["inspect"]):
            self.assert_done(self.tensorfs(*words, URL, "-o", f"{endpoint},{file},profile=work"))
        self.assert_done(self.tensorfs("diff", URL, self.source, "-o", f"{endpoint},{file},profile=work"))
        found = self.tensorfs("doctor", URL, "-o", f"{endpoint},{file},profile=work")
        self.assert_done(found)
        self.assertIn("from the profile work", found.stdout)

    def test_credentials_that_are_named_and_not_there_are_not_replaced_by_others(self):
        # The server accepts the keys of the environment.
        self.env.update(self.server.environment())
        empty, file = self.written("empty", ""), self.profiles()
        for option in (f"credentials-file={empty}", f"credentials-file={file},profile=none", "profile=none"):
            with self.subTest(option=option):
                self.server.requests.clear()
                outcome = self.tensorfs("ls", URL, "-o", option, HOME=str(self.tmp))
                self.assertEqual(outcome.code, 1)
                self.assertIn("requests are not signed", outcome.stderr)
                self.assertTrue(self.server.requests)
                self.assertFalse([request for request in self.server.requests if request["signed"]])
        self.assert_done(self.tensorfs("ls", URL, HOME=str(self.tmp)))

    def test_a_mount_has_them_and_shows_the_files_alone(self):
        file = self.profiles()
        options = [f"endpoint={self.server.url}", f"credentials-file={file}", "profile=work"]
        with self.mount(*options) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            status = tensorfs("status", "--json", mount.path).stdout
            self.assertIn(str(file), status)
            self.assertIn('"profile":"work"', status.replace(" ", ""))
            shown = [status, find_mount(mount.path).options, mount.log()]
            self.assertNotIn(SECRET_KEY, "".join(map(str, shown)))
            listed = self.tensorfs("ls", mount.path, "-o", ",".join(options))
            self.assert_done(listed)

    def test_each_kind_of_source_takes_a_file(self):
        google, azure = self.enterContext(GoogleServer()), self.enterContext(AzureServer())
        web, hub = self.enterContext(LoginServer("me", "p")), self.enterContext(HubServer())
        for server in (google, azure, web):
            server.put_folder("bucket", "tiny", self.source)
        hub.commit("models/org/tiny", self.source)
        hub.repositories["models/org/tiny"].access = "private"
        account = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={azure.url}/{ACCOUNT}"
        netrc = self.written("netrc", "machine 127.0.0.1 login me password p")
        for url, options, environment in (
            ("az://bucket/tiny", f"credentials-file={self.written('account', account)}", {"AZURE_STORAGE_KEY": "bm8="}),
            (f"{web.url}/bucket/tiny", f"credentials-file={netrc}", {}),
            ("hf://org/tiny", f"endpoint={hub.url},credentials-file={self.written('token', HUB_TOKEN)}", {"HF_TOKEN": "hf_other"}),
            ("gs://bucket/tiny", f"endpoint={google.url}", {"GCE_METADATA_HOST": f"127.0.0.1:{google.port}"}),
        ):
            with self.subTest(url=url):
                outcome = self.tensorfs("ls", url, "-o", options, **environment)
                self.assert_done(outcome)
                self.assertIn(FILE, outcome.stdout)

    def test_what_cannot_be_read_or_may_be_secret_is_refused(self):
        self.assert_refused(self.tensorfs("ls", URL, "-o", f"ca-file={self.tmp}/none"), "none: No such file")
        for option in ("endpoint=http://user:hunter2@host", "endpoint=host", "endpoint=https://h?sig=hunter2"):
            outcome = self.tensorfs("ls", URL, "-o", option)
            self.assertEqual(outcome.code, 2)
            self.assertIn("expected http(s)://HOST[:PORT]", outcome.stderr)
        self.assertEqual(self.tensorfs("doctor", URL, "-o", "cache=1G").code, 2)
        self.assertEqual(self.tensorfs("doctor", "-o", "profile=x").code, 2)
