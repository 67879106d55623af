"""A server for tests that behaves like the hub of Hugging Face: pinned revisions, listings in pages, links to another
host that expire, tokens, gated and private repositories, renames, limits, and faults on command. As a program it prints
its port. A PUT of a file makes a commit of `tests/NAME`, and a DELETE removes the repository."""

import hashlib
import json
import sys
import urllib.parse

from object_server import Handler, ObjectServer

TOKEN = "hf_a_token_of_the_tests"
PLACE = "files"


class Repository:
    def __init__(self):
        self.commits = {}
        self.revisions = {}
        # "open", "gated" or "private".
        self.access = "open"


class HubServer(ObjectServer):
    """The hub, with a second server for large files in `links`. Each of the two servers has its own `faults`, as in
    `ObjectServer`."""

    def __init__(self, page=1000):
        super().__init__(page, HubHandler)
        self.repositories = {}
        self.renamed = {}
        self.tokens = {TOKEN}
        self.allowed = {TOKEN}
        # Files with more bytes than this are served by links.
        self.small = 4096
        # Whether ranges of small files are served.
        self.ranges = True
        self.links = LinkServer()

    def start(self):
        self.links.start()
        return super().start()

    __enter__ = start

    def stop(self):
        self.links.stop()
        super().stop()

    def commit(self, name, folder, revision="main", extra=()):
        """Makes a commit of the files in `folder`, as a repository of this name: `models/ORG/NAME`."""
        paths = sorted(folder.rglob("*")) if folder else []
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths if path.is_file()}
        files.update(extra)
        repository = self.repositories.setdefault(name, Repository())
        sha = hashlib.sha1(repr(sorted((path, hash_of(data)) for path, data in files.items())).encode()).hexdigest()
        repository.commits[sha] = files
        repository.revisions[revision] = sha
        return sha

    def environment(self):
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "",
            "HF_TOKEN": "",
            "HF_TOKEN_PATH": "/nonexistent/token",
            "HF_HUB_CACHE": "/nonexistent/hub",
            "NO_PROXY": "127.0.0.1",
        }


class LinkServer(ObjectServer):
    def __init__(self):
        super().__init__(handler=LinkHandler)
        self.links = set()
        self.tokens_seen = 0
        # Whether the last byte of each shard is wrong.
        self.flips = False

    def link(self, data):
        """A new link to these bytes, for one use."""
        key = hash_of(data)
        flips = self.flips and not data.startswith(b"{")
        self.put(PLACE, key, data[:-1] + bytes([data[-1] ^ 1]) if flips else data)
        self.number += 1
        target = f"/{PLACE}/{key}?Signature=s{self.number}-secret"
        self.links.add(target)
        return self.url + target


class LinkHandler(Handler):
    def refusal(self, bucket):
        if "Authorization" in self.headers:
            self.store.tokens_seen += 1
            return "InvalidArgument"
        return None if self.path in self.store.links else "AccessDenied"


def hash_of(data):
    return hashlib.sha256(data).hexdigest()


def git_hash_of(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubHandler(Handler):
    def refuse(self, status, code, message="no"):
        headers = [("X-Error-Message", message)] + ([("X-Error-Code", code)] if code else [])
        self.answer(status, b"{}", headers)

    def do_PUT(self):
        name, key, _ = self.where()
        repository = self.store.repositories.get(f"models/tests/{name}", Repository())
        files = repository.commits.get(repository.revisions.get("main"), {})
        self.store.commit(f"models/tests/{name}", None, extra={**files, key: self.body()})
        self.answer(200)

    def do_DELETE(self):
        name, _, _ = self.where()
        del self.store.repositories[f"models/tests/{name}"]
        self.answer(204)

    def do_GET(self):
        store = self.store
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        store.requests.append({"method": self.command, "path": self.path, "Range": self.headers.get("Range"), "token": bool(token)})
        fault = store.fault(self.command, self.path)
        if fault and fault["kind"] == "limit":
            limit = [("ratelimit", f'"resolvers";r=0;t={fault["seconds"]}')]
            return self.answer(429, b"", limit)
        if fault and self.disturb(fault):
            return None
        if token and token not in store.tokens:
            return self.refuse(401, "", "Invalid credentials in Authorization header")
        path, _, query = self.path.partition("?")
        parts = path.lstrip("/").split("/")
        if parts[0] == "api":
            kind, name, rest = parts[1], "/".join(parts[2:4]), parts[4:]
        else:
            kind = "datasets" if parts[0] == "datasets" else "models"
            parts = parts[kind == "datasets":]
            name, rest = "/".join(parts[:2]), parts[2:]
        if f"{kind}/{name}" in store.renamed:
            return self.answer(307, b"", [("Location", self.path.replace(name, store.renamed[f"{kind}/{name}"]))])
        repository = store.repositories.get(f"{kind}/{name}")
        if repository is None or (repository.access == "private" and token not in store.allowed):
            return self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        if repository.access == "gated" and token not in store.allowed and rest[0] != "revision":
            return self.refuse(403 if token else 401, "GatedRepo", "Access is restricted")
        revision = urllib.parse.unquote(rest[1])
        sha = repository.revisions.get(revision, revision)
        if sha not in repository.commits:
            return self.refuse(404, "RevisionNotFound")
        files = repository.commits[sha]
        if rest[0] == "revision":
            about = {"id": name, "sha": sha, "lastModified": "2024-05-06T07:08:09.000Z"}
            return self.answer(200, json.dumps(about).encode())
        if rest[0] == "tree":
            return self.tree(files, path, urllib.parse.parse_qs(query))
        key = urllib.parse.unquote("/".join(rest[2:]))
        if key not in files:
            return self.refuse(404, "EntryNotFound")
        return self.file(files[key], sha, fault or {})

    def tree(self, files, path, query):
        start = int(query.get("cursor", ["0"])[0])
        entries = []
        for key in sorted(files):
            data = files[key]
            entry = {"type": "file", "path": key, "size": len(data), "oid": git_hash_of(data)}
            if len(data) > self.store.small:
                entry |= {"oid": git_hash_of(b"pointer"), "xetHash": "x" * 64}
                entry["lfs"] = {"oid": hash_of(data), "size": len(data), "pointerSize": 134}
            entries.append(entry)
        folders = sorted({key.rsplit("/", 1)[0] for key in files if "/" in key})
        entries += [{"type": "directory", "path": folder, "size": 0, "oid": "0" * 40} for folder in folders]
        end = start + self.store.page
        headers = []
        if end < len(entries):
            headers.append(("Link", f'<{self.store.url}{path}?recursive=true&cursor={end}>; rel="next"'))
        self.answer(200, json.dumps(entries[start:end]).encode(), headers)

    def file(self, data, sha, fault):
        headers = [("X-Repo-Commit", "1" * 40 if fault.get("kind") == "other-commit" else sha)]
        if len(data) > self.store.small:
            tag = "0" * 64 if fault.get("kind") == "other-hash" else hash_of(data)
            headers += [("X-Linked-Etag", f'"{tag}"'), ("X-Linked-Size", str(len(data)))]
            return self.answer(302, b"", [*headers, ("Location", self.store.links.link(data))])
        if not self.path.endswith("?cached"):
            return self.answer(307, b"", [*headers, ("Location", self.path + "?cached")])
        headers.append(("ETag", f'"{git_hash_of(data)}"'))
        wanted = self.headers.get("Range")
        if wanted and self.store.ranges:
            start, last = wanted.removeprefix("bytes=").split("-")
            start, last = int(start), min(int(last or len(data) - 1), len(data) - 1)
            headers.append(("Content-Range", f"bytes {start}-{last}/{len(data)}"))
            return self.answer(206, data[start : last + 1], headers)
        return self.answer(200, data, headers)


if __name__ == "__main__":
    server = HubServer()
    server.start()
    print(server.port, flush=True)
    # The input ends when the program that has started this one ends.
    sys.stdin.read()
