"""HTTP servers for tests: one lists folders as WebDAV does, and one asks for a login. They have the faults of
`ObjectServer`. As a program, this is the WebDAV server, and prints its port."""

import base64
import email.utils
import sys
import urllib.parse
from xml.sax.saxutils import escape

from object_server import REFUSALS, Handler, ObjectServer


class DavServer(ObjectServer):
    def __init__(self, page=1000, handler=None):
        super().__init__(page, handler or DavHandler)
        # Whether listings have the same ETags as answers.
        self.lists_tags = True
        # Whether listings have properties that only this server has, and entries without properties.
        self.has_own_properties = False


class DavHandler(Handler):
    def refusal(self, bucket):
        return None

    def do_PROPFIND(self):
        bucket, key, _ = self.where()
        self.store.requests.append({"method": self.command, "path": self.path, "Range": None})
        fault = self.store.fault(self.command, self.path)
        if fault and self.disturb(fault):
            return None
        refusal = self.refusal(bucket)
        if refusal:
            return self.error(REFUSALS[refusal], refusal)
        objects = self.store.objects.get(bucket, {})
        key = key.strip("/")
        prefix = f"{key}/" if key else ""
        if key not in objects and not any(name.startswith(prefix) for name in objects):
            return self.answer(404)
        found = [(key, objects.get(key))]
        if self.headers.get("Depth") == "1" and key not in objects:
            found += [(name.rstrip("/"), stored) for name, stored in self.entries(bucket, prefix, "/")]
        lines = ['<?xml version="1.0"?><D:multistatus xmlns:D="DAV:" xmlns:own="urn:own">']
        if self.store.has_own_properties:
            places = "".join(f"<D:href>/{bucket}/{name}</D:href>" for name in ("one", "another"))
            lines.append(f"<D:response>{places}<D:status>HTTP/1.1 423 Locked</D:status></D:response>")
        lines += [self.response(bucket, *entry) for entry in found]
        return self.answer(207, "".join([*lines, "</D:multistatus>"]).encode(), [("Content-Type", "text/xml")])

    def response(self, bucket, key, stored):
        href = urllib.parse.quote(f"/{bucket}/{key}") + ("" if stored else "/")
        kind = "" if stored else "<D:collection/>"
        properties = f"<D:resourcetype>{kind}</D:resourcetype>"
        if stored:
            tag = self.tag(stored) if self.store.lists_tags else '"another"'
            date = email.utils.formatdate(stored.date, usegmt=True)
            properties += f"<D:getcontentlength>{len(stored.data)}</D:getcontentlength><D:getetag>{escape(tag or '')}</D:getetag>"
            properties += f"<D:getlastmodified>{date}</D:getlastmodified>"
        if self.store.has_own_properties:
            properties = "<own:getcontentlength>1</own:getcontentlength><own:getetag>1</own:getetag>" + properties
        status = "<D:status>HTTP/1.1 200 OK</D:status>"
        return f"<D:response><D:href>{href}</D:href><D:propstat><D:prop>{properties}</D:prop>{status}</D:propstat></D:response>"


class LoginServer(DavServer):
    """A WebDAV server that requires the login of one user."""

    def __init__(self, user, password):
        super().__init__(handler=LoginHandler)
        self.login = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


class LoginHandler(DavHandler):
    def refusal(self, bucket):
        return None if self.headers.get("Authorization") == self.store.login else "AuthenticationRequired"


if __name__ == "__main__":
    server = DavServer()
    server.start()
    print(server.port, flush=True)
    # The input ends when the program that has started this one ends.
    sys.stdin.read()
