"""Metrics and health of `tensorfs serve`, by HTTP."""

import contextlib
import http.client
import os
import re
import signal
import socket
import threading

from checkpoints import hf_set
from mounts import find_mount, needs_root, stop_process, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model.safetensors"
SAMPLE = re.compile(r"(?P<name>[a-z_]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path, timeout=30):
        super().__init__("localhost", timeout=timeout)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@needs_root
class Metrics(ServiceCase):
    def setUp(self):
        super().setUp()
        self.source = hf_set(self.tmp / "source-of-secret-name")
        self.a, self.b = self.target("a"), self.target("b")
        self.socket = self.tmp / "metrics.sock"

    def config(self, service="", options="", **more):
        mounts = mount_config("a", self.source, self.a, **more) + mount_config("b", self.source, self.b)
        return f'[service]\nmetrics = "unix:{self.socket}"\n{service}\n' + mounts

    def started(self, config=None):
        service = self.serve(config or self.config())
        service.wait_until_ready()
        return service

    def get(self, path, method="GET"):
        connection = UnixConnection(self.socket)
        with contextlib.closing(connection):
            connection.request(method, path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), reply

    def samples(self):
        status, text, _ = self.get("/metrics")
        self.assertEqual(status, 200)
        found = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                match = SAMPLE.fullmatch(line)
                self.assertTrue(match, line)
                self.assertNotIn((match["name"], match["labels"]), found, line)
                found[match["name"], match["labels"]] = float(match["value"])
        return found

    def test_reads_of_a_mount_are_counted_with_its_name_and_without_its_paths(self):
        self.started()
        size = len((self.a / FILE).read_bytes())
        found = self.samples()
        self.assertEqual(found["tensorfs_mounts", None], 2)
        self.assertEqual(found["tensorfs_mount_up", 'mount="a"'], 1)
        read = sum(v for (name, labels), v in found.items() if name == "tensorfs_read_bytes_total" and 'mount="a"' in labels)
        self.assertEqual(read, size)
        self.assertGreater(found["tensorfs_fuse_requests_total", 'mount="a",op="read",result="ok"'], 0)
        self.assertEqual(found["tensorfs_fuse_requests_total", 'mount="b",op="read",result="error"'], 0)
        name = "tensorfs_fuse_request_duration_seconds"
        count = found[f"{name}_count", 'mount="a",op="read"']
        self.assertEqual(found[f"{name}_bucket", 'mount="a",op="read",le="+Inf"'], count)
        _, text, reply = self.get("/metrics")
        self.assertTrue(reply.headers["Content-Type"].startswith("text/plain; version=0.0.4"))
        for secret in ("secret-name", str(self.tmp), FILE):
            self.assertNotIn(secret, text)

    def test_buckets_grow_and_each_family_has_a_type_once(self):
        self.started()
        (self.a / FILE).read_bytes()
        _, text, _ = self.get("/metrics")
        types = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
        self.assertEqual(len({name for name, _ in types}), len(types))
        buckets = [float(v) for v in re.findall(r'seconds_bucket\{mount="a",op="read",le="[^"]+"\} (\S+)', text)]
        self.assertEqual(buckets, sorted(buckets))
        for name, kind in types:
            self.assertEqual(name.endswith("_total"), kind == "counter", name)

    def test_health_and_readiness_tell_a_mount_that_is_not_there(self):
        service = self.started()
        self.assertEqual(self.get("/healthz")[:2], (200, "ok\n"))
        wait_until(lambda: self.get("/readyz")[0] == 200, PATIENCE, "ready")
        gone = self.tmp / "gone-secret"
        service.reload(self.config() + mount_config("c", gone, self.target("c")))
        service.wait_for_status("c failed: ")
        status, text, _ = self.get("/readyz")
        self.assertEqual((status, text), (503, "c: failed\n"))
        self.assertEqual(self.samples()["tensorfs_mount_up", 'mount="c"'], 0)
        self.assertEqual(self.get("/healthz")[0], 200)

    def test_a_stopped_worker_is_down_and_does_not_block_the_page(self):
        service = self.started(self.config("watchdog = 0"))
        pid = service.workers()["a"]
        stop_process(pid)
        try:
            found = self.samples()
        finally:
            os.kill(pid, signal.SIGCONT)
        self.assertEqual(found["tensorfs_mount_up", 'mount="a"'], 0)
        self.assertEqual(found["tensorfs_mount_up", 'mount="b"'], 1)
        wait_until(lambda: self.samples()["tensorfs_mount_up", 'mount="a"'] == 1, PATIENCE, "the worker is back")

    def test_a_refused_config_is_told(self):
        service = self.started()
        self.assertEqual(self.samples()["tensorfs_config_last_reload_successful", None], 1)
        service.reload("[service]\nmetrix = 3\n")
        wait_until(
            lambda: self.samples()["tensorfs_config_last_reload_successful", None] == 0, PATIENCE, "the refusal"
        )

    def test_clients_that_say_nothing_or_too_much_keep_nobody_out(self):
        self.started()
        silent = []
        try:
            for _ in range(100):
                s = socket.socket(socket.AF_UNIX)
                s.settimeout(30)
                s.connect(str(self.socket))
                s.send(b"GET /met")
                silent.append(s)
            self.assertEqual(self.get("/healthz")[0], 200)
            # The oldest are disconnected.
            self.assertEqual(silent[0].recv(1), b"")
        finally:
            for s in silent:
                s.close()
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(30)
            s.connect(str(self.socket))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                s.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000)
            with contextlib.suppress(ConnectionResetError):
                self.assertIn(s.recv(100)[:12], (b"HTTP/1.1 431", b""))
        self.assertEqual(self.get("/metrics")[0], 200)

    def test_requests_of_other_kinds_get_an_error_of_http(self):
        self.started()
        self.assertEqual(self.get("/nothing")[0], 404)
        self.assertEqual(self.get("/metrics", method="POST")[0], 405)
        status, text, reply = self.get("/metrics?x=1", method="HEAD")
        self.assertEqual((status, text), (200, ""))
        self.assertGreater(int(reply.headers["Content-Length"]), 1000)
        for garbage in (b"\r\n\r\n", b"\xff\xff\r\n\r\n", b"GET /\r\n\r\n", b"GET / HTTP/2.0\r\n\r\n"):
            with socket.socket(socket.AF_UNIX) as s:
                s.settimeout(30)
                s.connect(str(self.socket))
                s.sendall(garbage)
                self.assertEqual(s.recv(12), b"HTTP/1.1 400", garbage)

    def test_many_scrapes_at_once_are_all_answered(self):
        self.started()
        results = []
        threads = [threading.Thread(target=lambda: results.append(self.get("/metrics")[0])) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(results, [200] * 8)

    def test_a_port_is_served_and_a_reload_changes_it(self):
        port, other = free_port(), free_port()
        config = self.config().replace(f"unix:{self.socket}", "127.0.0.1:%d")
        service = self.started(config % port)

        def answers(number):
            connection = http.client.HTTPConnection("127.0.0.1", number, timeout=10)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                connection.request("GET", "/healthz")
                return connection.getresponse().status == 200
            return False

        self.assertTrue(answers(port))
        service.reload(config % other)
        wait_until(lambda: answers(other), PATIENCE, "the new port")
        self.assertFalse(answers(port))

    def test_an_address_that_is_taken_stops_no_mount(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            service = self.started(self.config().replace(f"unix:{self.socket}", f"127.0.0.1:{port}"))
            self.assertTrue(find_mount(self.a))
            self.assertIn("there are no metrics until a reload", service.log())

    def test_the_socket_file_of_a_killed_service_is_replaced_and_goes_with_the_service(self):
        old = socket.socket(socket.AF_UNIX)
        old.bind(str(self.socket))
        old.close()
        service = self.started()
        self.assertEqual(self.get("/healthz")[0], 200)
        self.assertEqual(self.socket.stat().st_mode & 0o777, 0o660)
        self.assertEqual(service.stop(), 0)
        self.assertFalse(self.socket.exists())

    def test_no_metrics_are_served_unless_the_config_has_an_address(self):
        service = self.started(self.config().partition("\n\n")[2])
        self.assertFalse(self.socket.exists())
        self.assertNotIn("metrics at", service.log())
