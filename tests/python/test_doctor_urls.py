"""`tensorfs doctor URL`: what it finds of servers that keep to the rules, and of those that do not."""

from cloud_server import AzureServer, GoogleServer
from hub_server import TOKEN as HUB_TOKEN
from hub_server import HubServer
from object_server import ACCESS_KEY, SECRET_KEY
from test_object_stores import FILE, URL, RemoteCase
from web_server import LoginServer


class Doctor(RemoteCase):
    def doctor(self, url=URL, code=0, **environment):
        """The checks by name."""
        outcome = self.tensorfs("doctor", "--json", url, **environment)
        self.assertEqual(outcome.code, code, outcome.stderr)
        report = outcome.json()
        self.assertEqual((report["source"], report["ok"]), (url, code == 0))
        self.report = report
        return {check["name"]: check for check in report["checks"]}

    def assert_finds(self, checks, **expected):
        for name, (state, text) in expected.items():
            check = checks[name.replace("_", " ")]
            self.assertEqual(check["state"], state, check)
            self.assertIn(text, check["found"])

    def test_a_server_of_s3_that_keeps_to_the_rules(self):
        checks = self.doctor()
        self.assertTrue(all(check["state"] == "ok" for check in checks.values()), checks)
        self.assert_finds(
            checks,
            credentials=("ok", "from the environment"),
            server=("ok", f"s3 at 127.0.0.1:{self.server.port} answers in"),
            listing=("ok", "1 request"),
            versions=("ok", "strong"),
            ranges=("ok", "obeyed"),
            conditions=("ok", "obeyed"),
            first_byte=("ok", "ms"),
            speed=("ok", "/s: "),
            checkpoint=("ok", "tensors"),
        )
        text = self.tensorfs("doctor", URL)
        self.assert_done(text)
        self.assertIn("ok        credentials  from the environment\n", text.stdout)
        one = self.doctor(f"{URL}/model-00001-of-00003.safetensors")
        self.assertNotIn("listing", one)

    def test_the_profile_is_named_and_its_keys_are_not(self):
        (self.tmp / ".aws").mkdir()
        (self.tmp / ".aws/credentials").write_text(
            f"[work]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(self.tmp)}
        checks = self.doctor(AWS_PROFILE="work", **none)
        self.assert_finds(checks, credentials=("ok", "from the profile work"))
        self.assertNotIn(SECRET_KEY, str(self.report))
        self.assert_finds(self.doctor(code=1, **none), credentials=("ok", "none were found"), source=("missing", "403 AccessDenied"))
        self.assertEqual(self.report["class"], "io")

    def test_a_server_that_ignores_conditions_or_has_weak_etags(self):
        self.server.faults = [{"kind": "ignores-conditions", "count": 1000}]
        self.assert_finds(self.doctor(), conditions=("ok", "ignored"))
        self.server.faults = []
        self.server.tags = "weak"
        self.assert_finds(self.doctor(), versions=("degraded", "weak ETags"), conditions=("ok", "obeyed"))
        self.server.tags = "none"
        self.assert_finds(self.doctor(), versions=("degraded", "time of the last change"))

    def test_a_server_that_ignores_ranges_cannot_be_read(self):
        self.server.faults = [{"kind": "ignores-range", "count": 1000, "match": "0000"}]
        checks = self.doctor(code=1)
        self.assert_finds(checks, ranges=("missing", "not obeyed"), source=("missing", "it has to serve ranges"))
        self.assertNotIn("speed", checks)

    def test_what_is_no_checkpoint_can_be_read_all_the_same(self):
        self.server.put("notes", "some/folder/notes.txt", b"x" * 100)
        checks = self.doctor("s3://notes")
        self.assert_finds(checks, speed=("ok", "100 B of notes.txt"))
        self.assertNotEqual(checks["checkpoint"]["state"], "ok")

    def test_a_server_that_is_not_there(self):
        self.server.stop()
        self.assert_finds(self.doctor(code=1), source=("missing", "no connection to 127.0.0.1"))

    def test_logins_tokens_and_keys_are_told_by_where_they_come_from(self):
        web = self.enterContext(LoginServer("me", "p"))
        web.put_folder("bucket", "tiny", self.source)
        netrc = self.tmp / "netrc"
        netrc.write_text("machine 127.0.0.1 login me password p\n")
        checks = self.doctor(f"{web.url}/bucket/tiny", NETRC=str(netrc))
        self.assert_finds(checks, credentials=("ok", "the login of .netrc"), checkpoint=("ok", "tensors"))
        hub = self.enterContext(HubServer())
        hub.commit("models/org/tiny", self.source)
        token = self.tmp / "token"
        token.write_text(HUB_TOKEN)
        environment = {**hub.environment(), "HF_TOKEN_PATH": str(token)}
        checks = self.doctor("hf://org/tiny", **environment)
        self.assert_finds(checks, credentials=("ok", f"the token of the file {token}"), conditions=("ok", "not sent"))
        for url, kind, name in (("gs://bucket/tiny", GoogleServer, "the machine"), ("az://bucket/tiny", AzureServer, "the key of the environment")):
            server = self.enterContext(kind())
            server.put_folder("bucket", "tiny", self.source)
            checks = self.doctor(url, **server.environment())
            self.assert_finds(checks, credentials=("ok", name), conditions=("ok", "obeyed"), versions=("ok", "strong"))

    def test_a_file_can_be_tried_alone(self):
        self.server.public.add("bucket")
        self.server.put("bucket", "one/" + FILE, self.whole)
        checks = self.doctor(f"{self.server.url}/bucket/one/{FILE}")
        self.assert_finds(checks, credentials=("ok", "none"), checkpoint=("ok", "tensors"))
