"""Google Cloud Storage and Azure Blob Storage as sources, with servers that check tokens and signatures and misbehave."""

import json

from cloud_server import ACCOUNT, ACCOUNT_KEY, SAS, TOKEN, AzureServer, GoogleServer
from object_server import ObjectServer
from test_object_stores import FILE, SHARD, RemoteCase


class CloudCase(RemoteCase):
    SERVER = ObjectServer
    URL = "s3://bucket/models/tiny"

    def setUp(self):
        super().setUp()
        self.server = self.enterContext(self.SERVER())
        self.server.put_folder("bucket", "models/tiny", self.source)
        self.env |= {**self.server.environment(), "HOME": str(self.tmp), "AZURE_STORAGE_CONNECTION_STRING": ""}

    def assert_all_is_well(self):
        for words in (["ls"], ["inspect"]):
            remote, local = self.tensorfs(*words, self.URL), self.tensorfs(*words, self.source)
            self.assert_done(remote)
            self.assertEqual(remote.stdout.replace(self.URL, str(self.source)), local.stdout)
        self.assert_whole(self.URL)
        self.assert_done(self.tensorfs("verify", f"{self.URL}/{SHARD}"))
        ranged = [request for request in self.server.requests if request["Range"]]
        self.assertTrue(ranged and all(request["If-Match"] for request in ranged))

    def assert_faults_pass_or_are_refused(self):
        for kind in ("hang-up", "short", "wrong-range", "gzip"):
            with self.subTest(kind=kind):
                self.server.faults = [{"kind": kind, "match": SHARD, "method": "GET"} for _ in range(2)]
                self.assert_whole(self.URL)
                self.assertEqual(self.server.faults, [])
        for kind, why in (("wrong-range", "the server answers"), ("ignores-range", "answers 200 to a range")):
            self.server.faults = [{"kind": kind, "match": SHARD, "method": "GET", "count": 1000}]
            outcome, found = self.consolidated(self.URL)
            self.assert_refused(outcome, why)
            self.assertIsNone(found)
        self.server.faults = []

    def assert_a_replaced_object_is_refused(self):
        for ignores in (False, True):
            with self.mount("watch=off", url=self.URL) as mount, open(mount.path / FILE, "rb") as file:
                shard = bytearray((self.source / SHARD).read_bytes())
                shard[-1] ^= 1
                self.server.put("bucket", f"models/tiny/{SHARD}", bytes(shard))
                if ignores:
                    self.server.faults = [{"kind": "ignores-conditions", "count": 1000}]
                with self.assertRaises(OSError):
                    file.read()
                mount.wait_for_log("was replaced while it was in use")
            self.server.put_folder("bucket", "models/tiny", self.source)

    def assert_pages_and_names(self, scheme):
        self.server.page = 1
        self.assert_whole(self.URL)
        self.server.page = 1000
        prefix = "a b/\u00fc+%20&=?#'(~)/d.e"
        self.server.put_folder("bucket", prefix, self.source)
        self.assert_whole(f"{scheme}://bucket/{prefix}")


class Google(CloudCase):
    SERVER = GoogleServer
    URL = "gs://bucket/models/tiny"

    def test_commands_pages_and_names_are_those_of_a_folder(self):
        self.assert_all_is_well()
        self.assert_pages_and_names("gs")

    def test_faults_pass_or_are_refused(self):
        self.assert_faults_pass_or_are_refused()

    def test_a_replaced_object_is_found_out_by_its_generation(self):
        self.assert_a_replaced_object_is_refused()

    def test_the_token_of_the_machine_is_asked_for_once(self):
        self.assert_whole(self.URL)
        self.assertEqual(len(self.server.exchanges), 1)

    def test_a_workload_identity_gives_a_token(self):
        (self.tmp / "subject").write_text("a-subject-token")
        identity = {
            "type": "external_account",
            "audience": "//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": self.server.url + "/exchange",
            "credential_source": {"file": str(self.tmp / "subject"), "format": {"type": "text"}},
        }
        path = self.tmp / "identity.json"
        path.write_text(json.dumps(identity))
        self.assert_whole(self.URL, GOOGLE_APPLICATION_CREDENTIALS=str(path), GCE_METADATA_HOST="")
        self.assertIn("a-subject-token", self.server.exchanges[0])

    def test_what_is_refused_is_told_apart_and_a_public_bucket_needs_nothing(self):
        none = {"GCE_METADATA_HOST": ""}
        for environment, url, why in (
            (none, self.URL, "no credentials were found"),
            ({}, "gs://bucket/none", "404: nothing is there"),
            ({}, "gs://none/models", "there is no such bucket"),
            ({"STORAGE_EMULATOR_HOST": "127.0.0.1:1"}, self.URL, "Connection refused"),
        ):
            with self.subTest(why=why):
                self.assert_refused(self.tensorfs("ls", url, **environment), why)
        self.server.tokens = {"another"}
        self.assert_refused(self.tensorfs("ls", self.URL), "the credentials")
        self.server.public.add("bucket")
        self.assert_whole(self.URL, **none)

    def test_without_a_service_of_the_machine_the_error_comes_at_once(self):
        # Nobody answers there: the address is for documentation.
        outcome = self.tensorfs("ls", self.URL, GCE_METADATA_HOST="192.0.2.1")
        self.assert_refused(outcome, "no credentials were found", seconds=8)


class Azure(CloudCase):
    SERVER = AzureServer
    URL = "az://bucket/models/tiny"
    NO_KEY = {"AZURE_STORAGE_KEY": ""}

    def test_commands_pages_and_names_are_those_of_a_folder(self):
        self.assert_all_is_well()
        self.assert_pages_and_names("az")
        self.assert_whole("abfs://bucket/models/tiny")
        self.assert_whole(f"abfss://bucket@{ACCOUNT}.dfs.core.windows.net/models/tiny")

    def test_faults_pass_or_are_refused(self):
        self.assert_faults_pass_or_are_refused()

    def test_a_replaced_object_is_found_out(self):
        self.assert_a_replaced_object_is_refused()

    def test_a_signature_a_connection_string_and_the_machine_let_in(self):
        self.assert_whole(self.URL, AZURE_STORAGE_SAS_TOKEN=SAS, **self.NO_KEY)
        endpoint = f"BlobEndpoint={self.server.url}/{ACCOUNT}"
        none = {"AZURE_STORAGE_ENDPOINT": "", "AZURE_STORAGE_ACCOUNT": "", **self.NO_KEY}
        for rest in (f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY}", f"SharedAccessSignature={SAS}"):
            text = f"DefaultEndpointsProtocol=http;{rest};{endpoint}"
            self.assert_whole(self.URL, AZURE_STORAGE_CONNECTION_STRING=text, **none)
        identity = {"AZURE_IMDS_ENDPOINT": f"{self.server.url}/metadata/identity/oauth2/token"}
        self.assert_whole(self.URL, **identity, **self.NO_KEY)

    def test_what_is_refused_is_told_apart_and_a_public_container_needs_nothing(self):
        other_key = "b3RoZXI="
        for environment, url, why in (
            ({"AZURE_STORAGE_KEY": other_key}, self.URL, "the key or the signature is wrong"),
            ({**self.NO_KEY, "AZURE_SKIP_SIGNATURE": "1"}, self.URL, "AZURE_SKIP_SIGNATURE is set"),
            ({}, "az://bucket/none", "404 BlobNotFound: nothing is there"),
            ({}, "az://none/models", "there is no such container"),
            ({"AZURE_STORAGE_ACCOUNT": "", "AZURE_STORAGE_ENDPOINT": ""}, self.URL, "set AZURE_STORAGE_ACCOUNT"),
            ({}, "abfss://bucket@evil.example.com/x", "names no account of Azure"),
            ({"AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/x"}, self.URL, "Connection refused"),
        ):
            with self.subTest(why=why):
                self.assert_refused(self.tensorfs("ls", url, **environment), why)
        self.server.public.add("bucket")
        self.assert_whole(self.URL, AZURE_SKIP_SIGNATURE="1")
