"""Object servers for tests, with the interfaces of Google Cloud Storage (its XML API) and of Azure Blob Storage. They
check tokens and signatures, and have the faults of `ObjectServer`. As a program, `cloud_server.py google` or
`cloud_server.py azure` prints its port."""

import base64
import hashlib
import hmac
import json
import sys
import time
import urllib.parse
from xml.sax.saxutils import escape

from object_server import Handler, ObjectServer

TOKEN = "ya29.a-token-of-the-tests"
ACCOUNT = "testaccount"
ACCOUNT_KEY = base64.b64encode(b"a key of the tests that nobody shows").decode()
SAS = "sv=2021-12-02&sp=rl&sig=a%2Fsignature%2Bof%2Fthe%2Ftests"


class GoogleServer(ObjectServer):
    def __init__(self, page=1000):
        super().__init__(page, GoogleHandler)
        self.tokens = {TOKEN}
        # Bodies of the requests that exchange a token.
        self.exchanges = []

    def environment(self):
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "GCE_METADATA_HOST": f"127.0.0.1:{self.port}",
            "GOOGLE_APPLICATION_CREDENTIALS": "",
            "NO_PROXY": "127.0.0.1",
        }


class GoogleHandler(Handler):
    def do_POST(self):
        if self.path != "/exchange":
            return super().do_POST()
        self.store.exchanges.append(self.body().decode())
        return self.token()

    def token(self):
        body = {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}
        body["issued_token_type"] = "urn:ietf:params:oauth:token-type:access_token"
        self.answer(200, json.dumps(body).encode())

    def do_GET(self):
        if not self.path.startswith("/computeMetadata/"):
            return super().do_GET()
        self.store.exchanges.append(self.path)
        is_meant = self.headers.get("Metadata-Flavor") == "Google"
        return self.token() if is_meant else self.answer(403)

    def refusal(self, bucket):
        token = self.headers.get("Authorization")
        if token is None:
            return None if bucket in self.store.public else "AccessDenied"
        return None if token.removeprefix("Bearer ") in self.store.tokens else "AuthenticationRequired"

    def condition_holds(self, stored):
        wanted = self.headers.get("x-goog-if-generation-match")
        self.line["If-Match"] = wanted
        return wanted in (None, str(stored.number))

    def more_headers(self, stored):
        return [("x-goog-generation", str(stored.number))]

    def more_listed(self, stored):
        return f"<Generation>{stored.number}</Generation><MetaGeneration>1</MetaGeneration>"


class AzureServer(ObjectServer):
    def __init__(self, page=1000):
        super().__init__(page, AzureHandler)
        self.tokens = {TOKEN}

    def environment(self):
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.url}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT": ACCOUNT,
            "AZURE_STORAGE_KEY": ACCOUNT_KEY,
            "NO_PROXY": "127.0.0.1",
        }


class AzureHandler(Handler):
    NO_BUCKET = "ContainerNotFound"

    def where(self):
        path, _, query = self.path.partition("?")
        parts = urllib.parse.unquote(path).lstrip("/").removeprefix(f"{ACCOUNT}/").split("/", 1)
        return parts[0], (parts[1] if len(parts) > 1 else ""), urllib.parse.parse_qs(query)

    def do_GET(self):
        if not self.path.startswith("/metadata/identity/"):
            return super().do_GET()
        body = {"access_token": TOKEN, "expires_on": str(int(time.time()) + 3600)}
        return self.answer(200, json.dumps(body).encode())

    def error(self, status, code, headers=()):
        code = "BlobNotFound" if code == "NoSuchKey" else code
        super().error(status, code, [("x-ms-error-code", code), *headers])

    def refusal(self, bucket):
        if not self.headers.get("x-ms-version"):
            return "InvalidHeaderValue"
        given = self.headers.get("Authorization")
        if given and given.startswith("Bearer "):
            return None if given.removeprefix("Bearer ") in self.store.tokens else "InvalidAuthenticationInfo"
        if given:
            expected = f"SharedKey {ACCOUNT}:{self.signature()}"
            return None if hmac.compare_digest(given, expected) else "AuthenticationFailed"
        if "sig=" in self.path:
            return None if self.path.endswith(SAS) else "AuthenticationFailed"
        return None if bucket in self.store.public else "NoAuthenticationInformation"

    def signature(self):
        """The signature that the request must have, by the rules of Azure for a shared key."""
        path, _, query = self.path.partition("?")
        lines = [self.command]
        names = ["Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"]
        names += ["If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"]
        lines += [self.headers.get(name, "") for name in names]
        own = sorted((name.lower(), value) for name, value in self.headers.items() if name.lower().startswith("x-ms-"))
        lines += [f"{name}:{value}" for name, value in own]
        lines.append(f"/{ACCOUNT}{path}")
        pairs = sorted(urllib.parse.parse_qsl(query, keep_blank_values=True))
        lines += [f"{name.lower()}:{value}" for name, value in pairs]
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        return base64.b64encode(digest).decode()

    def is_listing(self, query):
        return query.get("comp") == ["list"]

    def listing(self, bucket, query):
        one = lambda name, default="": query.get(name, [default])[0]
        most = min(int(one("maxresults", "5000")), self.store.page)
        keys = [entry for entry in self.entries(bucket, one("prefix"), one("delimiter")) if entry[0] > one("marker")]
        page, rest = keys[:most], keys[most:]
        lines = ["\ufeff<?xml version='1.0' encoding='utf-8'?><EnumerationResults><Blobs>"]
        for key, stored in page:
            if stored is None:
                lines.append(f"<BlobPrefix><Name>{escape(key)}</Name></BlobPrefix>")
                continue
            when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(stored.date))
            lines.append(
                f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{when}</Last-Modified><Etag>{stored.tag}</Etag>"
                f"<Content-Length>{len(stored.data)}</Content-Length><BlobType>BlockBlob</BlobType></Properties></Blob>"
            )
        lines.append(f"</Blobs><NextMarker>{escape(page[-1][0]) if rest else ''}</NextMarker></EnumerationResults>")
        self.answer(200, "".join(lines).encode(), [("Content-Type", "application/xml")])


def main():
    server = {"google": GoogleServer, "azure": AzureServer}[sys.argv[1]]()
    server.start()
    print(server.port, flush=True)
    # The input ends when the program that has started this one ends.
    sys.stdin.read()


if __name__ == "__main__":
    main()
