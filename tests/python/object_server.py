"""An object server for tests. It has the part of S3 that reads need, checks signatures, serves plain HTTP, and has
faults on command. It runs in a thread of a test, or as a program: `object_server.py` prints its port.

    PUT, DELETE /BUCKET/KEY   change the objects
    POST /-/faults            a JSON list of faults, which take the place of those before
    POST /-/public            a JSON list of buckets that need no signature
    POST /-/delay             seconds that each answer takes; -1: there is none
    GET /-/requests           what was asked so far, as JSON
"""

import bisect
import contextlib
import email.utils
import gzip
import hashlib
import hmac
import json
import socket
import struct
import sys
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

ACCESS_KEY = "AKIDTESTACCESSKEY"
SECRET_KEY = "a-secret-key-of-the-tests/that+nobody=shows"
CHUNK = 1 << 16
# Refusals whose status is not 403.
REFUSALS = {"AuthenticationRequired": 401, "InvalidAuthenticationInfo": 401, "InvalidHeaderValue": 400}


class Stored:
    def __init__(self, data, number, date=None):
        self.data = data
        self.number = number
        self.tag = hashlib.md5(data).hexdigest() + f"-{number}"
        self.date = int(date or time.time())


class ObjectServer:
    """Objects by bucket and key. `faults` is a list of dicts with `kind`, `count` (default 1), and optionally `match`
    (a part of the path), `method` and `seconds`. The first fault that fits a request is applied to it."""

    def __init__(self, page=1000, handler=None):
        self.objects = {}
        self.faults = []
        self.requests = []
        self.public = set()
        self.page = page
        self.number = 0
        # The form of ETags: "quoted", "bare", "weak" or "none".
        self.tags = "quoted"
        # Whether listings have ETags.
        self.lists_tags = True
        # Whether answers have the time of the last change.
        self.dates = True
        # The shortest time that an answer takes, in seconds.
        self.delay = 0
        # Requests for ranges, or HEAD requests, that wait for each other: a part of the path, and a threading.Barrier.
        self.barrier = None
        self.barrier_method = "GET"
        self.session_token = None
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.httpd = Listener(("127.0.0.1", 0), handler or Handler)
        self.httpd.store = self
        self.port = self.httpd.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        threading.Thread(target=self.httpd.serve_forever, daemon=True).start()
        return self

    def stop(self):
        self.over.set()
        self.httpd.shutdown()
        self.httpd.server_close()

    __enter__ = start

    def __exit__(self, *_):
        self.stop()

    def put(self, bucket, key, data, date=None):
        with self.lock:
            self.number += 1
            self.objects.setdefault(bucket, {})[key] = Stored(data, self.number, date)

    def put_folder(self, bucket, prefix, folder):
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                self.put(bucket, f"{prefix}/{name}" if prefix else name, path.read_bytes())

    def delete(self, bucket, key):
        with self.lock:
            self.objects.get(bucket, {}).pop(key, None)

    def environment(self):
        """The environment variables with which a program reads from this server."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                if fault.get("method") in (None, method) and fault.get("match", "") in path:
                    fault["count"] = fault.get("count", 1) - 1
                    if fault["count"] <= 0:
                        self.faults.remove(fault)
                    return fault
        return None


def signature(store, request, secret=SECRET_KEY):
    """The signature that the request must have, by the rules of AWS for version 4."""
    fields = request.headers["Authorization"].removeprefix("AWS4-HMAC-SHA256").split(",")
    parts = dict(part.strip().split("=", 1) for part in fields)
    key, date, region, service, last = parts["Credential"].split("/")
    path, _, query = request.path.partition("?")
    pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
    quote = lambda text: urllib.parse.quote(text, safe="-_.~")
    pairs = sorted((quote(name), quote(value)) for name, value in pairs)
    headers = parts["SignedHeaders"].split(";")
    lines = [request.command, urllib.parse.quote(urllib.parse.unquote(path), safe="/-_.~")]
    lines.append("&".join(f"{name}={value}" for name, value in pairs))
    lines += [f"{name}:{' '.join(request.headers[name].split())}" for name in headers]
    lines += ["", ";".join(headers), request.headers["x-amz-content-sha256"]]
    scope = f"{date}/{region}/{service}/{last}"
    hashed = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, hashed])
    secret = ("AWS4" + secret).encode()
    for word in [date, region, service, last, text]:
        secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
    return key, parts["Signature"], secret.hex()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        # A client may close its connection at any time.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # The head of an answer and its first bytes are sent at once, without a buffer.
    wbufsize = -1
    NO_BUCKET = "NoSuchBucket"

    @property
    def store(self):
        return self.server.store

    def log_message(self, *_):
        pass

    def answer(self, status, body=b"", headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status, code, headers=()):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
        self.answer(status, body.encode(), [("Content-Type", "application/xml"), *headers])

    def where(self):
        path, _, query = self.path.partition("?")
        parts = urllib.parse.unquote(path).lstrip("/").split("/", 1)
        return parts[0], (parts[1] if len(parts) > 1 else ""), urllib.parse.parse_qs(query)

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        bucket, key, _ = self.where()
        self.store.put(bucket, key, self.body())
        self.answer(200)

    def do_DELETE(self):
        bucket, key, _ = self.where()
        self.store.delete(bucket, key)
        self.answer(204)

    def do_POST(self):
        data = json.loads(self.body())
        if self.path == "/-/faults":
            self.store.faults = data
        elif self.path == "/-/delay":
            self.store.delay = data
        else:
            self.store.public = set(data)
        self.answer(200)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self.path == "/-/requests":
            return self.answer(200, json.dumps(self.store.requests).encode())
        bucket, key, query = self.where()
        names = ["Range", "If-Match", "If-Unmodified-Since", "Authorization", "x-amz-request-payer"]
        asked = {name: self.headers.get(name) for name in names}
        is_signed = "Authorization" in self.headers
        line = {"method": self.command, "path": self.path, "signed": is_signed, **asked}
        self.line = line
        self.store.requests.append(line)
        while self.store.delay < 0 and not self.store.over.wait(0.05):
            pass
        time.sleep(max(self.store.delay, 0))
        self.wait_for_others()
        fault = self.store.fault(self.command, self.path)
        if fault and self.disturb(fault):
            return None
        refusal = self.refusal(bucket)
        if refusal:
            return self.error(REFUSALS.get(refusal, 403), refusal)
        if bucket not in self.store.objects:
            return self.error(404, self.NO_BUCKET)
        if self.is_listing(query):
            return self.listing(bucket, query)
        stored = self.store.objects[bucket].get(key)
        if not stored:
            return self.error(404, "NoSuchKey")
        return self.send_object(stored, fault or {})

    def wait_for_others(self):
        with self.store.lock:
            part, barrier = self.store.barrier or (None, None)
            is_waited_for = self.command == self.store.barrier_method and (self.command == "HEAD" or "Range" in self.headers)
            waits = barrier is not None and part in self.path and is_waited_for
        if waits:
            # A client that sends the requests one after the other gets no answer.
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(30)
            with self.store.lock:
                self.store.barrier = None

    def refusal(self, bucket):
        """The reason why the request is not allowed, or None."""
        if "Authorization" not in self.headers:
            return None if bucket in self.store.public else "AccessDenied"
        key, found, expected = signature(self.store, self)
        if key != ACCESS_KEY:
            return "InvalidAccessKeyId"
        token = self.headers.get("x-amz-security-token")
        if self.store.session_token is not None and token != self.store.session_token:
            return "ExpiredToken"
        return None if hmac.compare_digest(found, expected) else "SignatureDoesNotMatch"

    def disturb(self, fault):
        """Carries out a fault that replaces the answer. Returns whether `fault` is such a fault."""
        kind = fault["kind"]
        if kind == "busy":
            after = [("Retry-After", str(fault["after"]))] if "after" in fault else []
            self.error(fault.get("status", 503), "SlowDown", after)
        elif kind == "error":
            self.error(fault["status"], fault.get("code", "Refused"), fault.get("headers", {}).items())
        elif kind == "stall":
            self.store.over.wait(fault.get("seconds"))
            self.close_connection = True
        elif kind == "hang-up":
            self.reset()
        else:
            return False
        return True

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def is_listing(self, query):
        return query.get("list-type") == ["2"]

    def more_headers(self, stored):
        """Headers of an object that a derived server adds."""
        return []

    def more_listed(self, stored):
        return ""

    def entries(self, bucket, prefix, delimiter, after="", most=None):
        """Pairs of name and object in a folder, with `None` for subfolders. At most `most` entries after the name
        `after`."""
        found, last = [], None
        names = sorted(self.store.objects[bucket])
        for key in names[bisect.bisect_left(names, max(prefix, after)) :]:
            if len(found) == most or not key.startswith(prefix):
                break
            inner = key.find(delimiter, len(prefix)) if delimiter else -1
            name = key if inner < 0 else key[: inner + 1]
            if name > after and name != last:
                found.append((name, self.store.objects[bucket][key] if inner < 0 else None))
            last = name
        return found

    def listing(self, bucket, query):
        one = lambda name, default="": query.get(name, [default])[0]
        most = min(int(one("max-keys", "1000")), self.store.page)
        token = one("continuation-token").removeprefix("token ")
        keys = self.entries(bucket, one("prefix"), one("delimiter"), token, most + 1)
        page, rest = keys[:most], keys[most:]
        lines = ["<?xml version='1.0'?><ListBucketResult>"]
        lines.append(f"<IsTruncated>{'true' if rest else 'false'}</IsTruncated>")
        if rest:
            lines.append(f"<NextContinuationToken>token {escape(page[-1][0])}</NextContinuationToken>")
        for key, stored in page:
            if stored is None:
                lines.append(f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>")
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.123Z", time.gmtime(stored.date))
            tag = f"<ETag>{escape(self.tag(stored) or '')}</ETag>" if self.store.lists_tags else ""
            lines.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>{tag}"
                f"<Size>{len(stored.data)}</Size>{self.more_listed(stored)}</Contents>"
            )
        body = "".join([*lines, "</ListBucketResult>"]).encode()
        self.answer(200, body, [("Content-Type", "application/xml")])

    def tag(self, stored):
        form = {"quoted": '"{}"', "bare": "{}", "weak": 'W/"{}"', "none": ""}[self.store.tags]
        return form.format(stored.tag) or None

    def condition_holds(self, stored):
        match, before = self.headers.get("If-Match"), self.headers.get("If-Unmodified-Since")
        if match is not None:
            return self.store.tags in ("quoted", "bare") and match.strip('"') == stored.tag
        if before is not None:
            return stored.date <= email.utils.parsedate_to_datetime(before).timestamp()
        return True

    def send_object(self, stored, fault):
        kind = fault.get("kind")
        if kind != "ignores-conditions" and not self.condition_holds(stored):
            return self.error(412, "PreconditionFailed")
        data, status = stored.data, 200
        headers = [("Accept-Ranges", "bytes")]
        if self.store.dates:
            headers.append(("Last-Modified", email.utils.formatdate(stored.date, usegmt=True)))
        if self.tag(stored):
            headers.append(("ETag", self.tag(stored)))
        headers += self.more_headers(stored)
        wanted = self.headers.get("Range")
        if wanted and kind != "ignores-range" and self.command == "GET":
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            start, last = int(start), min(int(last or len(data) - 1), len(data) - 1)
            if start >= len(data):
                return self.error(416, "InvalidRange")
            status, data = 206, data[start : last + 1]
            shift = 1 if kind == "wrong-range" else 0
            headers.append(("Content-Range", f"bytes {start + shift}-{last + shift}/{len(stored.data)}"))
        if kind == "other-tag":
            headers = [("ETag", '"other"') if name == "ETag" else (name, value) for name, value in headers]
        if kind == "gzip":
            data = gzip.compress(data)
            headers.append(("Content-Encoding", "gzip"))
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        chunked = kind == "short-chunked"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if kind in ("reset", "short", "short-chunked", "stall-in-body"):
            half = data[: len(data) // 2]
            self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(half), half) if chunked and half else half)
            self.wfile.flush()
            if kind == "reset":
                self.reset()
            elif kind == "stall-in-body":
                self.store.over.wait(fault.get("seconds"))
            self.close_connection = True
            return None
        if kind == "trickle":
            for index in range(0, len(data), 16):
                self.wfile.write(data[index : index + 16])
                if self.store.over.wait(0.1):
                    break
            self.close_connection = True
            return None
        if kind == "flipped":
            data = bytes([data[0] ^ 1]) + data[1:]
        self.wfile.write(data)
        return None


def main():
    server = ObjectServer(page=int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
    server.start()
    print(server.port, flush=True)
    # The input ends when the program that has started this one ends.
    sys.stdin.read()


if __name__ == "__main__":
    main()
