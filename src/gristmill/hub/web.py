"""Ranges of files on web servers, over connections that are kept open.

    GET /file    Range: bytes=8-15    If-Match: "etag"
    206          Content-Range: bytes 8-15/100    ETag: "etag"

A server has to send ranges, and to say which version of the file it sends (ETag or Last-Modified).
Every answer is compared with the first one, whether or not the server minds `If-Match`. The
standard library is enough: the clients of Hugging Face's libraries differ between their versions,
and none gives what it had received before a connection broke. Proxies are those of the
environment. Names and passwords in a URL, and headers with a token, are sent to the host of the URL
only, never to one that it redirects to.
"""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from gristmill.base.errors import DataError
from gristmill.hub.objects import (
    RemoteObject,
    TransientError,
    changed,
    forbidden,
    missing,
    shown,
)

TIMEOUT = 30.0
"""Seconds without a byte, after which a connection is given up."""
_REDIRECTS = {301, 302, 303, 307, 308}
_MOST_REDIRECTS = 8
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_PIECE = 1 << 18
_KEPT = 8
"""Connections to one host that wait for the next request."""
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_BROKEN = (OSError, http.client.HTTPException)
_BY_DATE = "date "
"""Begins a version that is not an ETag."""


class WebStore:
    """Files of web servers, one for each URL."""

    def find(self, url: str) -> list[RemoteObject]:
        if any(sign in urlsplit(url).path for sign in "*[") or urlsplit(url).path.endswith("/"):
            raise DataError(
                "the web has no folders that could be listed",
                where=shown(url),
                remedy="name each file; the shell expands {00..31} in a URL",
            )
        with asked(url, {"Range": "bytes=0-0"}) as answer:
            if answer.status == 416 or answer.headers.get("Content-Length") == "0":
                size = 0
            elif (found := _RANGE.fullmatch(answer.headers.get("Content-Range", ""))) is None:
                raise no_ranges(shown(url))
            else:
                size = int(found[3])
                try:
                    answer.body.read()
                except _BROKEN as error:
                    raise broken(error) from error
            version = _version(answer.headers)
        if version is None and size:
            raise DataError(
                "this server does not say which version of the file it sends (ETag, Last-Modified)",
                where=shown(url),
                remedy="download the file, and give its path",
            )
        return [RemoteObject(url, shown(url), size, version or "empty")]

    def read(self, item: RemoteObject, begin: int, end: int) -> Iterator[bytes]:
        headers = {"If-Match": item.version} if item.version.startswith('"') else {}
        return read_range(item.address, item, begin, end, headers=headers, compare=True)


def read_range(
    url: str,
    item: RemoteObject,
    begin: int,
    end: int,
    *,
    headers: Mapping[str, str],
    compare: bool,
) -> Iterator[bytes]:
    """The bytes of a range of an object that is at a URL; `compare` the version that is sent."""
    with asked(url, {"Range": f"bytes={begin}-{end - 1}", **headers}, name=item.name) as answer:
        if answer.status in (412, 416):
            raise changed(item.name)
        if answer.status == 200:
            raise no_ranges(item.name)
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if found is None or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise no_ranges(item.name)
        version = _version(answer.headers)
        if int(found[3]) != item.size or (compare and version != item.version):
            raise changed(item.name)
        length = answer.headers.get("Content-Length", str(end - begin))
        if (int(found[1]), int(found[2]) + 1) != (begin, end) or length != str(end - begin):
            raise DataError(
                f"the server sends bytes {found[1]} to {found[2]} ({length} of them) where {begin} "
                f"to {end - 1} were asked for",
                where=item.name,
                remedy="download the file, and give its path",
            )
        left = end - begin
        while left:
            try:
                piece = answer.body.read(min(left, _PIECE))
            except _BROKEN as error:
                raise broken(error) from error
            if not piece:
                raise TransientError("the connection broke")
            left -= len(piece)
            yield piece


def no_ranges(name: str) -> DataError:
    """The error for a server that sends files as a whole only."""
    return DataError(
        "this server does not send parts of a file, so nothing could resume where it broke off",
        where=name,
        remedy="download the file, and give its path",
    )


def broken(error: BaseException) -> TransientError:
    """A failure of a connection."""
    if isinstance(error, TimeoutError):
        return TransientError(f"no answer for {TIMEOUT:.0f} seconds")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TransientError(f"its certificate is not valid: {error.verify_message}")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else None
    return TransientError(f"the connection broke{f': {reason}' if reason else ''}")


def _version(headers: http.client.HTTPMessage) -> str | None:
    if tag := headers.get("ETag"):
        return tag
    date = headers.get("Last-Modified")
    return f"{_BY_DATE}{date}" if date else None


# ------------------------------------------------------------------ requests


class ServerResponse(NamedTuple):
    """The response of a server."""

    status: int
    headers: http.client.HTTPMessage
    body: http.client.HTTPResponse


@contextmanager
def asked(
    url: str, headers: Mapping[str, str], *, name: str | None = None
) -> Iterator[ServerResponse]:
    """Ask for a URL, wherever it redirects to; what is no content is an error."""
    name = name or shown(url)
    home = urlsplit(url)
    own = {**headers, **_login(home)}
    for _ in range(_MOST_REDIRECTS):
        parts = urlsplit(url)
        at_home = (parts.scheme, parts.hostname, parts.port) == (
            home.scheme, home.hostname, home.port,
        )  # fmt: skip
        sent = own if at_home else {k: v for k, v in own.items() if k != "Authorization"}
        connection, response = _send(parts, sent)
        kept = False
        try:
            if response.status in _REDIRECTS and (place := response.headers.get("Location")):
                url = urljoin(url, place)
                if parts.scheme == "https" and urlsplit(url).scheme != "https":
                    raise DataError(
                        "this address redirects to one without encryption",
                        where=name,
                        remedy="give that address itself, if you trust it",
                    )
                continue
            _check(response, name)
            yield ServerResponse(response.status, response.headers, response)
            kept = response.isclosed() and not response.will_close
        finally:
            if kept:
                _keep(parts, connection)
            else:
                connection.close()
        return
    raise DataError("this address redirects in a circle", where=name)


def _check(response: http.client.HTTPResponse, name: str) -> None:
    status = response.status
    if status in (200, 206, 412, 416):
        return
    if status in (404, 410):
        raise missing(name)
    if status in (401, 403):
        raise forbidden(
            name,
            f"status {status}",
            "check the address; if it is a signed one, its time may be over: give a new one, and "
            "the same command resumes",
        )
    if status in _PASSING:
        wait = response.headers.get("Retry-After", "")
        raise TransientError(f"status {status}", wait=float(wait) if wait.isdigit() else None)
    raise DataError(f"the server answers with status {status}", where=name)


def _login(parts: SplitResult) -> dict[str, str]:
    """The header for a name and password in a URL."""
    if parts.username is None:
        return {}
    text = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}


_idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
_idle_lock = threading.Lock()


def _place(parts: SplitResult) -> tuple[str, str]:
    return parts.scheme, parts.netloc.rpartition("@")[2]


def _keep(parts: SplitResult, connection: http.client.HTTPConnection) -> None:
    with _idle_lock:
        waiting = _idle.setdefault(_place(parts), [])
        if len(waiting) < _KEPT:
            waiting.append(connection)
            return
    connection.close()


def _send(
    parts: SplitResult, headers: Mapping[str, str]
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Send a request over a connection that waits, or over a new one."""
    with _idle_lock:
        waiting = _idle.get(_place(parts))
        connection = waiting.pop() if waiting else None
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
        f"?{parts.query}" if parts.query else ""
    )
    common = {"User-Agent": "gristmill", "Accept-Encoding": "identity", **headers}
    if connection is not None:
        # The server may have closed it meanwhile.
        with suppress(*_BROKEN):
            connection.request("GET", path, headers=common)
            return connection, connection.getresponse()
        connection.close()
    connection, target, more = _connect(parts, path)
    try:
        connection.request("GET", target, headers={**common, **more})
        return connection, connection.getresponse()
    except _BROKEN as error:
        connection.close()
        raise broken(error) from error


def _connect(
    parts: SplitResult, path: str
) -> tuple[http.client.HTTPConnection, str, Mapping[str, str]]:
    """A new connection, what to ask it for, and with which headers more: through the proxy of the
    environment if there is one."""
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(host):
        if secure:
            return (
                http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_context()),
                path,
                {},
            )
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT), path, {}
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    login = {f"Proxy-{key}": value for key, value in _login(via).items()}
    via_host, via_port = via.hostname or "", via.port or 80
    if not secure:
        target = f"http://{_place(parts)[1]}{path}"
        return http.client.HTTPConnection(via_host, via_port, timeout=TIMEOUT), target, login
    tunnel = http.client.HTTPSConnection(via_host, via_port, timeout=TIMEOUT, context=_context())
    tunnel.set_tunnel(host, port, headers=login)
    return tunnel, path, {}


@cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()
