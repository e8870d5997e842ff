"""The files of a page, which come with the program.

The page loads nothing from elsewhere, and the browser is told to see to that.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import mimetypes
import re
from functools import lru_cache
from typing import NamedTuple

from gristmill.web.call import Call
from gristmill.web.refusals import RefusalError

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


class PageFiles:
    """The page of a server and its scripts, from the folders `pages` of some packages."""

    def __init__(self, *packages: str, page: str, instead: str) -> None:
        """`instead` is the text that is sent where the program was installed without its page."""
        self._packages, self._page, self._instead = packages, page, instead

    async def send_page(self, call: Call) -> None:
        """Send the page itself."""
        if (file := _read(self._packages, self._page)) is None:
            text = f"{self._instead}\n".encode()
            await call.reply(text, kind="text/plain; charset=utf-8", headers=HEADERS)
            return
        await _send(call, file)

    async def send_named(self, call: Call) -> None:
        """Send the file that the path names; only those of these folders can be named."""
        if (file := _read(self._packages, call.scope["path_params"]["name"])) is None:
            raise RefusalError(404, "there is no such file", code="not_found")
        await _send(call, file)


@lru_cache(maxsize=64)
def _read(packages: tuple[str, ...], name: str) -> _File | None:
    """The first file of this name; None if there is none."""
    if not _NAME.fullmatch(name) or name.endswith(".py"):
        return None
    places = (importlib.resources.files(package) / "pages" / name for package in packages)
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return None
    content = file.read_bytes()
    ending = f".{name.rpartition('.')[2]}"
    kind = _KINDS.get(ending) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def _send(call: Call, file: _File) -> None:
    headers = {**HEADERS, "ETag": file.tag}
    tags = [
        tag.strip().removeprefix("W/") for tag in call.headers.get("if-none-match", "").split(",")
    ]
    if file.tag in tags:
        await call.reply(b"", status=304, kind=file.kind, headers=headers)
        return
    await call.reply(file.content, kind=file.kind, headers=headers)
