"""A small Hugging Face Hub on 127.0.0.1, for the real client libraries.

    GET  /api/models/NAME[/revision/REVISION]      facts, the commit and the names of files
    GET  /api/models/NAME/tree/REVISION[/FOLDER]   files with sizes and ids
    POST /api/models/NAME/paths-info/REVISION      the same for given paths
    GET  /api/models/NAME/refs                     branches and tags
    GET  /api/models/NAME/auth-check               whether the caller may read a gated repository
    HEAD, GET /NAME/resolve/REVISION/FILE          content; Range is honoured

and the same for /api/datasets/NAME and /datasets/NAME/resolve. As on the Hub, large files are
redirected to another host (here another port), renamed repositories to their new name, a repository
that is unknown answers an anonymous caller with 401, and the facts of a gated one are public while
its files are not. Faults are asked for with `refuse` and `cut`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".safetensors", ".parquet")
"""Files that the Hub keeps in LFS."""
TOKEN = "hf_reader"
"""The token of a user who has accepted all licences."""
WRONG_TOKEN = "hf_wrong"
"""A token that nobody has."""
_API = re.compile(r"/api/(models|datasets)/(.+)")
_FILE = re.compile(r"/(datasets/)?(.+?)/resolve/([^/]+)/(.+)")
_VERBS = ("revision", "tree", "paths-info", "refs", "auth-check")


def _id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repository:
    """Files by commit, and the names of commits."""

    kind: str
    name: str
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes | str], *, branch: str = "main") -> str:
        """Replace the files on a branch; returns the commit."""
        content = {p: c.encode() if isinstance(c, str) else c for p, c in sorted(files.items())}
        facts = [len(self.commits), *((path, _id(one)) for path, one in content.items())]
        commit = hashlib.sha1(repr(facts).encode()).hexdigest()
        self.commits[commit] = content
        self.branches[branch] = commit
        return commit

    def tag(self, name: str) -> None:
        """Name the commit of the main branch."""
        self.tags[name] = self.branches["main"]

    def find(self, revision: str) -> str | None:
        """The commit of a branch, a tag, or (the beginning of) a commit."""
        named = self.branches.get(revision) or self.tags.get(revision)
        begins = [one for one in self.commits if len(revision) >= 7 and one.startswith(revision)]
        return named or next(iter(begins), None)


@dataclass
class _Fault:
    path: str
    times: int

    def strikes(self, path: str) -> bool:
        if self.times > 0 and self.path in path:
            self.times -= 1
            return True
        return False


@dataclass
class _Refusal(_Fault):
    status: int
    headers: dict[str, str]


@dataclass
class _Cut(_Fault):
    after: int
    reset: bool


def reserve_port() -> socket.socket:
    """Hold a port of this machine. Without a server there, connections are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


class _Server(ThreadingHTTPServer):
    allow_reuse_port = True
    daemon_threads = True


class HubServer:
    """Serves repositories until it is closed, at a reserved port; large files at another."""

    def __init__(self, port: int, storage_port: int) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.moved: dict[tuple[str, str], str] = {}
        self.requests: list[str] = []
        """Every request in order, as METHOD PATH and, if there is one, its Range."""
        self.faults: list[_Fault] = []
        handler = _handler(self)
        self._servers = [_Server(("127.0.0.1", one), handler) for one in (port, storage_port)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def storage_url(self) -> str:
        """Where large files are."""
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def model(self, name: str, files: Mapping[str, bytes | str], **facts: Any) -> Repository:
        return self._add("models", name, files, facts)

    def dataset(self, name: str, files: Mapping[str, bytes | str], **facts: Any) -> Repository:
        return self._add("datasets", name, files, facts)

    def _add(self, kind: str, name: str, files: Any, facts: dict[str, Any]) -> Repository:
        added = self.repositories[kind, name] = Repository(kind, name, **facts)
        added.commit(files)
        return added

    def move(self, kind: str, old: str, *, to: str) -> None:
        """Rename a repository; its old name leads to the new one."""
        self.moved[kind, old] = to

    def refuse(
        self, path: str, *, times: int, status: int = 429, retry_after: int | None = 0
    ) -> None:
        """Refuse the next requests whose path holds this text."""
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        self.faults.append(_Refusal(path, times, status, headers))

    def cut(self, path: str, *, times: int, after: int, reset: bool = False) -> None:
        """Cut the connection after some bytes of a file: close it, or reset it."""
        self.faults.append(_Cut(path, times, after, reset))

    def asked(self, *words: str) -> list[str]:
        """The requests that hold all of these words."""
        return [one for one in self.requests if all(word in one for word in words)]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            self.form = parse_qs(self.rfile.read(length).decode())
            url = urlsplit(self.path)
            self.query = parse_qs(url.query)
            range_ = self.headers.get("Range")
            if url.path == "/api/agent-harnesses":
                # Whether a program or a person asks is no concern of ours.
                return self._send(404)
            hub.requests.append(f"{self.command} {url.path}" + (f" {range_}" if range_ else ""))
            if self.headers.get("Authorization") == f"Bearer {WRONG_TOKEN}":
                what = "Invalid credentials in Authorization header"
                return self._send(401, {"X-Error-Message": what})
            for fault in hub.faults:
                if isinstance(fault, _Refusal) and fault.strikes(url.path):
                    return self._send(fault.status, fault.headers)
            if found := _API.fullmatch(url.path):
                return self._api(found[1], found[2])
            if found := _FILE.fullmatch(url.path):
                kind = "datasets" if found[1] else "models"
                return self._file(kind, found[2], unquote(found[3]), unquote(found[4]))
            return self._send(404)

        # -------------------------------------------------------------- the API

        def _api(self, kind: str, rest: str) -> None:
            parts = rest.split("/")
            verbs = [n for n, part in enumerate(parts) if n in (1, 2) and part in _VERBS]
            end = verbs[0] if verbs else len(parts)
            name, verb, *more = ["/".join(parts[:end]), *(parts[end:] or [""])]
            if new := hub.moved.get((kind, name)):
                place = "/".join(["/api", kind, new, *parts[end:]])
                return self._send(307, {"Location": place})
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self._unknown()
            if verb == "refs":
                groups = {"branches": repository.branches, "tags": repository.tags}
                answer = {
                    group: [{"name": n, "ref": n, "targetCommit": c} for n, c in refs.items()]
                    for group, refs in groups.items()
                }
                return self._json({**answer, "converts": []})
            if verb == "auth-check":
                return None if self._barred(repository) else self._json({})
            revision = unquote(more[0]) if more else "main"
            commit = repository.find(revision)
            if commit is None:
                return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            files = repository.commits[commit]
            if verb == "tree":
                below = "/".join(map(unquote, more[1:]))
                recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
                entries = _tree(files, below, recursive=recursive)
                if below and not entries:
                    return self._error(404, "EntryNotFound", f"{below} does not exist")
                return self._json(entries)
            if verb == "paths-info":
                wanted = set(self.form.get("paths", ()))
                entries = _tree(files, "", recursive=True)
                return self._json([entry for entry in entries if entry["path"] in wanted])
            return self._json(
                {
                    "_id": commit[:24],
                    "id": name,
                    "modelId": name,
                    "sha": commit,
                    "private": False,
                    "disabled": False,
                    "gated": "manual" if repository.gated else False,
                    "downloads": 0,
                    "likes": 0,
                    "tags": [],
                    "lastModified": "2024-05-01T12:00:00.000Z",
                    "createdAt": "2024-05-01T12:00:00.000Z",
                    "siblings": [{"rfilename": path} for path in files],
                }
            )

        # -------------------------------------------------------------- files

        def _file(self, kind: str, name: str, revision: str, path: str) -> None:
            if new := hub.moved.get((kind, name)):
                above = "/datasets" if kind == "datasets" else ""
                place = f"{above}/{new}/resolve/{quote(revision, safe='')}/{quote(path)}"
                return self._send(307, {"Location": place})
            repository = hub.repositories.get((kind, name))
            if repository is None:
                return self._unknown()
            commit = repository.find(revision)
            if commit is None:
                return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            stored = self.server.server_port == urlsplit(hub.storage_url).port
            if not stored and self._barred(repository):
                return None
            content = repository.commits[commit].get(path)
            common = {"X-Repo-Commit": commit}
            if content is None:
                return self._error(404, "EntryNotFound", "Entry not found", common)
            if path.endswith(LARGE):
                etag = f'"{hashlib.sha256(content).hexdigest()}"'
                if not stored:
                    facts = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content))}
                    return self._send(
                        302, {**common, **facts, "Location": hub.storage_url + self.path}
                    )
            else:
                etag = f'"{_id(content)}"'
            return self._content(content, {**common, "ETag": etag})

        def _content(self, content: bytes, headers: dict[str, str]) -> None:
            begin, end, status = 0, len(content), 200
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin = int(found[1])
                end = min(int(found[2]) + 1, end) if found[2] else end
                if begin >= len(content):
                    return self._send(416, {"Content-Range": f"bytes */{len(content)}"})
                status = 206
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            headers["Accept-Ranges"] = "bytes"
            body = content[begin:end]
            if self.command == "GET":
                for fault in hub.faults:
                    if isinstance(fault, _Cut) and fault.strikes(self.path):
                        return self._send_part(status, headers, body, fault)
            return self._send(status, headers, body)

        def _send_part(self, status: int, headers: Any, body: bytes, cut: _Cut) -> None:
            self._head(status, headers, len(body))
            self.wfile.write(body[: cut.after])
            self.close_connection = True
            if cut.reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                os.close(self.connection.detach())

        # -------------------------------------------------------------- answers

        def _barred(self, repository: Repository) -> bool:
            """Refuse who may not read the repository."""
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not repository.gated or token == TOKEN:
                return False
            what = f"Access to {repository.kind} {repository.name} is restricted"
            self._error(403 if token else 401, "GatedRepo", what)
            return True

        def _unknown(self) -> None:
            status = 404 if self.headers.get("Authorization") else 401
            self._error(status, "RepoNotFound", "Repository not found")

        def _error(self, status: int, code: str, what: str, headers: Any = None) -> None:
            facts = {"X-Error-Code": code, "X-Error-Message": what, **(headers or {})}
            self._send(status, facts, json.dumps({"error": what}).encode())

        def _json(self, value: Any) -> None:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def _send(self, status: int, headers: Any = None, body: bytes = b"") -> None:
            self._head(status, headers or {}, len(body))
            if self.command != "HEAD":
                self.wfile.write(body)

        def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(length)}.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler


def _tree(files: Mapping[str, bytes], below: str, *, recursive: bool) -> list[dict[str, Any]]:
    """The entries of a folder, or of all folders below it."""
    start = f"{below}/" if below else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        if not path.startswith(start):
            continue
        parts = path.removeprefix(start).split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            folder = start + "/".join(parts[:depth])
            entries[folder] = {"type": "directory", "path": folder, "oid": "0" * 40, "size": 0}
        if recursive or len(parts) == 1:
            entry = {"type": "file", "path": path, "oid": _id(content), "size": len(content)}
            if path.endswith(LARGE):
                oid = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 134}
            entries[path] = entry
    return list(entries.values())
