"""A small server on 127.0.0.1 that keeps objects and sends ranges of them, as web servers, S3 and
Google Cloud Storage do, and that can do so badly.

    GET /FILE                                        a file of the web
    GET, PUT, POST, DELETE, HEAD /BUCKET/KEY         S3, path style; multipart uploads as well
    GET /BUCKET?list-type=2&prefix=…&delimiter=…     S3's lists, a few keys on each page
    GET /storage/v1/b/BUCKET/o[/KEY]                 Google's JSON interface
    GET /download/storage/v1/b/BUCKET/o/KEY          and the content

Every object is under one path, so one that was put by one interface is there for the others. Faults
are asked for with `refuse`, `cut`, `hang`, `spoil`; `on_request` is called before each answer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PAGE = 3
"""Keys on a page of a list."""
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_FACTS = re.compile(r"/storage/v1/b/([^/]+)/o/(.+)")
_MEDIA = re.compile(r"/download/storage/v1/b/([^/]+)/o/(.+)")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


@dataclass
class Fault:
    """Something that goes wrong for requests of a path, a few times."""

    path: str
    times: int
    kind: str
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    after: int = 0
    seconds: float = 0


class StoreServer:
    """Serves objects until it is closed."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        """By path, without the first slash."""
        self.generations: dict[str, int] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.requests: list[str] = []
        """Every request, as METHOD PATH, and its Range if there is one."""
        self.headers: list[Mapping[str, str]] = []
        """And the headers of each."""
        self.faults: list[Fault] = []
        self.barred: set[str] = set()
        """Paths that nobody may read."""
        self.ranges = True
        self.tags = True
        """Whether ETags are sent, and minded."""
        self.moved: dict[str, str] = {}
        """Where paths are redirected to."""
        self.on_request: Callable[[str], None] = lambda path: None
        self._count = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def put(self, path: str, content: bytes) -> str:
        """Keep an object; returns its URL on the web."""
        self.objects[path] = content
        self.generations[path] = next(self._count)
        return f"{self.url}/{path}"

    def refuse(self, path: str, status: int, *, times: int = 1, **headers: str) -> None:
        named = tuple((name.replace("_", "-"), value) for name, value in headers.items())
        self.faults.append(Fault(path, times, "refuse", status, named))

    def cut(self, path: str, *, after: int, times: int = 1) -> None:
        """Close the connection after some bytes of a body."""
        self.faults.append(Fault(path, times, "cut", after=after))

    def hang(self, path: str, seconds: float, *, times: int = 1) -> None:
        """Say nothing for a while."""
        self.faults.append(Fault(path, times, "hang", seconds=seconds))

    def spoil(self, path: str, kind: str, *, times: int = 1) -> None:
        """Send a wrong range (shifted), another length (longer), or no range at all (whole)."""
        self.faults.append(Fault(path, times, kind))

    def fault(self, path: str, *kinds: str) -> Fault | None:
        """A fault that strikes now."""
        for fault in self.faults:
            if fault.kind in kinds and fault.times > 0 and fault.path.lstrip("/") in path:
                fault.times -= 1
                return fault
        return None

    def asked(self, *words: str) -> list[str]:
        """The requests that hold all of these words."""
        return [request for request in self.requests if all(word in request for word in words)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _handler(store: StoreServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer()

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def _answer(self) -> None:
            url = urlsplit(self.path)
            path, self.query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
            body = self._body()
            wanted = self.headers.get("Range")
            store.requests.append(f"{self.command} {self.path}" + (f" {wanted}" if wanted else ""))
            store.headers.append(dict(self.headers))
            store.on_request(path)
            if fault := store.fault(path, "hang"):
                time.sleep(fault.seconds)
            if fault := store.fault(path, "refuse"):
                return self._send(fault.status, dict(fault.headers))
            if place := store.moved.get(path.lstrip("/")):
                return self._send(302, {"Location": place})
            if path.lstrip("/") in store.barred:
                return self._error(403, "AccessDenied")
            if found := _MEDIA.fullmatch(url.path):
                return self._content(f"{found[1]}/{unquote(found[2])}", google=True)
            if found := _UPLOAD.fullmatch(url.path):
                return self._google_upload(found[1], body)
            if found := _LIST.fullmatch(url.path):
                return self._google_list(found[1])
            if found := _FACTS.fullmatch(url.path):
                return self._google_object(f"{found[1]}/{unquote(found[2])}")
            if "list-type" in self.query:
                return self._list(path.strip("/"))
            key = path.lstrip("/")
            if self.command in ("GET", "HEAD"):
                return self._content(key)
            return self._write(key, body)

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
                return body
            # Each piece follows a line with its length, and perhaps a signature.
            content = b""
            while body:
                line, _, body = body.partition(b"\r\n")
                size = int(line.partition(b";")[0], 16)
                if not size:
                    break
                content, body = content + body[:size], body[size + 2 :]
            return content

        # ---------------------------------------------------------- content

        def _content(self, key: str, *, google: bool = False) -> None:
            content = store.objects.get(key)
            wanted = self.query.get("generation", [None])[0]
            generation = str(store.generations.get(key))
            if content is None or (wanted is not None and wanted != generation):
                return self._error(404, "NoSuchKey")
            headers = {"Last-Modified": "Wed, 01 May 2024 12:00:00 GMT"}
            if store.tags:
                headers["ETag"] = _tag(content)
                condition = self.headers.get("If-Match")
                if condition is not None and condition != headers["ETag"]:
                    return self._error(412, "PreconditionFailed")
            if google:
                headers["x-goog-generation"] = generation
            begin, end, status = 0, len(content), 200
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if found and store.ranges and not store.fault(key, "whole"):
                begin = int(found[1])
                end = min(int(found[2]) + 1, end) if found[2] else end
                if begin >= len(content):
                    return self._send(416, {"Content-Range": f"bytes */{len(content)}"})
                status = 206
                if store.fault(key, "shifted"):
                    begin, end = begin + 1, end + 1
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            body = content[begin:end]
            if self.command == "GET" and store.fault(key, "longer"):
                body += b"more"
            if self.command == "GET" and (fault := store.fault(key, "cut")):
                self._head(status, headers, len(body))
                self.wfile.write(body[: fault.after])
                self.wfile.flush()
                self.close_connection = True
                return None
            return self._send(status, headers, body)

        # ---------------------------------------------------------- S3

        def _list(self, bucket: str) -> None:
            prefix = self.query.get("prefix", [""])[0]
            delimiter = self.query.get("delimiter", [""])[0]
            after = self.query.get("continuation-token", [""])[0]
            keys, folders = self._below(bucket, prefix, delimiter)
            names = sorted([*keys, *folders])
            page = [name for name in names if name > after][:_PAGE]
            more = bool(page) and page[-1] != names[-1]
            entries = []
            for name in page:
                if name in folders:
                    entries.append(
                        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
                    )
                    continue
                content = store.objects[f"{bucket}/{name}"]
                entries.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(content)}</Size>"
                    f"<ETag>{escape(_tag(content))}</ETag>"
                    "<LastModified>2024-05-01T12:00:00.000Z</LastModified>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
            last = escape(page[-1]) if page else ""
            token = f"<NextContinuationToken>{last}</NextContinuationToken>"
            self._xml(
                f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
                f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{_PAGE}</MaxKeys>"
                f"<IsTruncated>{str(more).lower()}</IsTruncated>{token if more else ''}"
                f"{''.join(entries)}</ListBucketResult>"
            )

        def _below(self, bucket: str, prefix: str, delimiter: str) -> tuple[list[str], set[str]]:
            keys, folders = [], set()
            for path in store.objects:
                if not path.startswith(f"{bucket}/{prefix}"):
                    continue
                key = path.removeprefix(f"{bucket}/")
                rest = key.removeprefix(prefix)
                if delimiter and delimiter in rest:
                    folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
                else:
                    keys.append(key)
            return keys, folders

        def _write(self, key: str, body: bytes) -> None:
            upload = self.query.get("uploadId", [""])[0]
            if self.command == "POST" and "uploads" in self.query:
                store.uploads[key] = {}
                return self._xml(
                    "<InitiateMultipartUploadResult><UploadId>u</UploadId>"
                    "</InitiateMultipartUploadResult>"
                )
            if self.command == "PUT" and upload:
                store.uploads[key][int(self.query["partNumber"][0])] = body
                return self._send(200, {"ETag": _tag(body)})
            if self.command == "POST" and upload:
                parts = store.uploads.pop(key)
                store.put(key, b"".join(parts[number] for number in sorted(parts)))
                return self._xml(
                    "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
                )
            if self.command == "POST" and "delete" in self.query:
                for name in re.findall(rb"<Key>(.*?)</Key>", body):
                    store.objects.pop(f"{key.strip('/')}/{name.decode()}", None)
                return self._xml("<DeleteResult></DeleteResult>")
            if self.command == "DELETE":
                store.objects.pop(key, None)
                return self._send(204)
            if store.fault(key, "lost"):
                body = body[:-1] + bytes([body[-1] ^ 1])
            store.put(key, body)
            return self._send(200, {"ETag": _tag(body)})

        # ---------------------------------------------------------- Google

        def _google_list(self, bucket: str) -> None:
            prefix = self.query.get("prefix", [""])[0]
            delimiter = self.query.get("delimiter", [""])[0]
            keys, folders = self._below(bucket, prefix, delimiter)
            items = [self._google_facts(f"{bucket}/{key}") for key in sorted(keys)]
            self._json({"kind": "storage#objects", "items": items, "prefixes": sorted(folders)})

        def _google_object(self, path: str) -> None:
            if path not in store.objects:
                return self._error(404, "NotFound")
            if self.command == "DELETE":
                del store.objects[path]
                return self._send(204)
            return self._json(self._google_facts(path))

        def _google_facts(self, path: str) -> dict[str, Any]:
            content, (bucket, _, key) = store.objects[path], path.partition("/")
            return {
                "kind": "storage#object",
                "name": key,
                "bucket": bucket,
                "size": str(len(content)),
                "generation": str(store.generations[path]),
                "etag": _tag(content),
                "updated": "2024-05-01T12:00:00.000Z",
                "timeCreated": "2024-05-01T12:00:00.000Z",
            }

        def _google_upload(self, bucket: str, body: bytes) -> None:
            kind = self.headers.get("Content-Type", "")
            border = kind.partition("boundary=")[2].strip('"').encode()
            pieces = body.split(b"--" + border)
            facts = json.loads(
                pieces[1].partition(b"\n\n")[2] or pieces[1].split(b"\r\n\r\n", 1)[1]
            )
            content = pieces[2].split(b"\n\n", 1)[1].removesuffix(b"\n")
            store.put(f"{bucket}/{facts['name']}", content)
            self._json(self._google_facts(f"{bucket}/{facts['name']}"))

        # ---------------------------------------------------------- answers

        def _error(self, status: int, code: str) -> None:
            body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self._send(status, {"Content-Type": "application/xml"}, body)

        def _xml(self, text: str) -> None:
            body = f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()
            self._send(200, {"Content-Type": "application/xml"}, body)

        def _json(self, value: Any) -> None:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(value).encode())

        def _send(
            self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b""
        ) -> None:
            self._head(status, headers or {}, len(body))
            if self.command != "HEAD":
                self.wfile.write(body)

        def _head(self, status: int, headers: Mapping[str, str], length: int) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(length), **headers}.items():
                self.send_header(name, value)
            self.end_headers()

    return Handler
