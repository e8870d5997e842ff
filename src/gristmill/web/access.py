"""Who may ask: checks that come before a request is looked at.

Host             on a local server only names of this machine: another name may belong to a web
                 page that makes browsers ask here (DNS rebinding)
Sec-Fetch-Site   a browser says that a page of another site asks; no such page is answered
Authorization    one of the keys, if there are any; for all but the page and /health
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from gristmill.base.errors import DataError, UserError
from gristmill.web.call import Call
from gristmill.web.refusals import RefusalError

_OPEN = ("/", "/health")
_OPEN_FOLDER = "/static/"
_LARGEST = 2**20


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_keys(file: Path) -> tuple[list[bytes], list[str]]:
    """The keys in a file, one on each line, and what is to be said about the file."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_LARGEST + 1)
        others = file.stat().st_mode & 0o077
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise DataError(what, where=file) from error
    lines = (line.strip() for line in content.splitlines())
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys or len(content) > _LARGEST:
        raise DataError("holds no API keys", where=file, remedy="write one on each line")
    notes = [f"{file}: others may read the API keys; chmod 600 it"] if others else []
    return keys, notes


def require_keys(host: str, keys: Sequence[bytes]) -> None:
    """Refuse to let everybody in."""
    if not is_local(host) and not keys:
        raise UserError(
            f"a server at {host} is open to other machines, so it needs API keys",
            where="--host",
            remedy="give --api-key-file FILE, with a key on each line, or --host 127.0.0.1",
        )


class Access:
    """Checks the headers of requests."""

    def __init__(self, keys: Sequence[bytes], *, local: bool) -> None:
        """`local`: the server is reached from this machine only."""
        self._keys, self._local = list(keys), local

    def check(self, call: Call) -> None:
        """Refuse who may not ask."""
        headers, path = call.headers, call.scope["path"]
        if self._local and not is_local(_host_name(headers.get("host", ""))):
            what = "this server is local, and the Host header names another machine"
            raise RefusalError(403, what, code="wrong_host")
        if headers.get("sec-fetch-site") == "cross-site" and path not in _OPEN:
            raise RefusalError(403, "pages of other sites may not ask", code="cross_site")
        if self._keys and path not in _OPEN and not path.startswith(_OPEN_FOLDER):
            self._check_key(headers.get("authorization", ""))

    def _check_key(self, header: str) -> None:
        scheme, _, given = header.partition(" ")
        key, matches = given.strip().encode("latin-1"), False
        # All of them, so that the time says nothing about which was nearly right.
        for known in self._keys:
            matches |= hmac.compare_digest(key, known)
        if not (matches and scheme.lower() == "bearer"):
            what = "a valid API key is needed: Authorization: Bearer KEY"
            raise RefusalError(
                401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
            )


def _host_name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0].removeprefix("[")
    return host.partition(":")[0]
