"""Slow answers, refusals and settings of object stores, and servers with habits of their own."""

import http.server
import json
import os
import threading
import time

from object_server import ACCESS_KEY, SECRET_KEY, Handler, ObjectServer
from test_object_stores import FILE, SHARD, URL, RemoteCase


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Redirects each request to itself."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(302)
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET


class Renewals(Handler):
    """A service of keys that end soon. While `store.slow` is set, it does not answer."""

    def do_GET(self):
        self.store.requests.append(self.path)
        if self.store.slow:
            self.store.over.wait(1.5)
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.store.seconds))
        keys = {"AccessKeyId": ACCESS_KEY, "SecretAccessKey": SECRET_KEY, "Token": "a session", "Expiration": ends}
        self.answer(200, json.dumps(keys).encode())


class Retries(RemoteCase):
    def test_an_answer_that_trickles_is_asked_for_again(self):
        self.server.faults = [{"kind": "trickle", "match": SHARD, "method": "GET"}]
        outcome, data = self.consolidated(URL, "-o", "io-timeout=8")
        self.assert_done(outcome)
        self.assertTrue(data == self.whole)

    def test_io_timeout_is_the_limit_of_each_request_of_a_command(self):
        for command in ("ls", "verify", "load"):
            self.server.faults = [{"kind": "busy", "count": 10**9, "match": "model-"}]
            outcome = self.tensorfs(command, "-o", "io-timeout=2", URL)
            self.assert_refused(outcome, "answers 503 SlowDown; given up after", seconds=20)

    def test_a_server_that_redirects_without_end_is_named_after_few_requests(self):
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            outcome = self.tensorfs("ls", f"http://127.0.0.1:{server.server_address[1]}/x.safetensors")
            self.assert_refused(outcome, "redirects without end; given up after 4 tries")
            server.shutdown()

    def test_many_opens_ask_for_each_shard_once(self):
        with self.mount() as mount:
            self.server.requests.clear()
            with open(mount.path / FILE, "rb"):
                asked = [line for line in self.server.requests if line["method"] == "HEAD"]
            self.assertEqual(len(asked), 3)


class Refusals(RemoteCase):
    def test_the_reason_of_a_refusal_is_told_of_a_single_object_too(self):
        for url in (URL, f"{URL}/{SHARD}"):
            outcome = self.tensorfs("ls", url, AWS_SECRET_ACCESS_KEY="x")
            self.assert_refused(outcome, "the secret key is wrong")

    def test_names_that_no_file_can_have_do_not_hide_a_folder(self):
        for name in ("", "/x", "./y"):
            self.server.put("bucket", f"models/tiny/{name}", b"")
        self.server.page = 2
        self.assert_whole()

    def test_listings_without_etags_are_completed_without_an_error_in_the_log(self):
        self.server.lists_tags = False
        # An object that the server refuses does not hide the others.
        self.server.put("bucket", "models/tiny/notes.txt", b"notes")
        self.server.faults = [{"kind": "error", "status": 403, "match": "notes.txt", "count": 10**9}]
        outcome = self.tensorfs("verify", URL)
        self.assert_done(outcome)
        self.assertEqual(outcome.stderr, "")
        with self.mount() as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            self.assertNotIn("ERROR", mount.log())

    def test_objects_without_any_mark_of_their_version_are_warned_of(self):
        self.server.public.add("bucket")
        (self.server.tags, self.server.dates) = ("none", False)
        outcome = self.tensorfs("ls", f"{self.server.url}/bucket/models/tiny")
        self.assertEqual(outcome.code, 0, outcome.stderr)
        self.assertEqual(outcome.stderr.count("neither an ETag nor a time"), 1, outcome.stderr)


class Settings(RemoteCase):
    def test_the_signature_is_not_over_headers_that_proxies_change(self):
        self.assert_whole()
        signed = {line["Authorization"].split("SignedHeaders=")[1].split(",")[0] for line in self.server.requests}
        self.assertFalse([names for names in signed if "accept-encoding" in names])

    def test_the_reader_pays_if_the_variable_says_so(self):
        self.assert_done(self.tensorfs("ls", URL))
        self.assertEqual({line["x-amz-request-payer"] for line in self.server.requests}, {None})
        self.server.requests.clear()
        self.assert_done(self.tensorfs("ls", URL, AWS_REQUEST_PAYER="requester"))
        self.assertEqual({line["x-amz-request-payer"] for line in self.server.requests}, {"requester"})

    def test_a_profile_gives_the_server_and_the_region(self):
        config = self.tmp / "config"
        config.write_text(
            f"[default]\nregion = eu-west-9\n[profile lab]\nregion = eu-central-7\nendpoint_url = {self.server.url}\n"
        )
        none = {"AWS_ENDPOINT_URL": "", "AWS_REGION": "", "AWS_PROFILE": "lab", "AWS_CONFIG_FILE": str(config)}
        self.assert_whole(**none)
        self.assertTrue(all("/eu-central-7/s3/" in line["Authorization"] for line in self.server.requests))

    def renewals(self, seconds):
        """A service of keys that end after `seconds`, and the variables for it."""
        services = ObjectServer(handler=Renewals)
        (services.slow, services.seconds) = (False, seconds)
        self.enterContext(services)
        self.server.session_token = "a session"
        keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        return services, {**keys, "AWS_CONTAINER_CREDENTIALS_FULL_URI": services.url + "/keys"}

    def test_keys_that_end_soon_are_used_while_their_service_does_not_answer(self):
        services, keys = self.renewals(100)
        with self.mount("cache-dir=none", **keys) as mount:
            services.slow = True
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            self.assertNotIn("ERROR", mount.log())

    def test_keys_that_have_ended_are_waited_for(self):
        services, keys = self.renewals(15)
        with self.mount("cache-dir=none", **keys) as mount:
            with open(mount.path / FILE, "rb", buffering=0) as file:
                services.slow = True
                time.sleep(4)
                threading.Timer(1, setattr, (services, "slow", False)).start()
                self.assertTrue(os.pread(file.fileno(), 100, 5000) == self.whole[5000:5100])
