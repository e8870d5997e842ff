"""The files of the page, which come with the program.

The page loads nothing from elsewhere, and the browser is told to see to that.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import mimetypes
import re
from functools import lru_cache
from typing import NamedTuple

from gristmill.serve.call import Call
from gristmill.serve.refusals import RefusalError

FOLDER = "pages"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_PAGE = "chat.html"
_KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
          ".html": "text/html; charset=utf-8", ".svg": "image/svg+xml"}  # fmt: skip


class _File(NamedTuple):
    content: bytes
    kind: str
    tag: str


@lru_cache(maxsize=64)
def _read(name: str) -> _File | None:
    """A file of the folder; None if there is none of this name."""
    if not _NAME.fullmatch(name) or name.endswith(".py"):
        return None
    file = importlib.resources.files("gristmill.serve") / FOLDER / name
    if not file.is_file():
        return None
    content = file.read_bytes()
    ending = f".{name.rpartition('.')[2]}"
    kind = _KINDS.get(ending) or mimetypes.guess_type(name)[0] or "application/octet-stream"
    return _File(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def send_page(call: Call, name: str) -> None:
    """Send a file; only those of one folder can be named."""
    file = _read(name)
    if file is None and name == _PAGE:
        text = b"This server has OpenAI's interface; its models are listed at /v1/models.\n"
        await call.reply(text, kind="text/plain; charset=utf-8", headers=HEADERS)
        return
    if file is None:
        raise RefusalError(404, "there is no such file", code="not_found")
    headers = {**HEADERS, "ETag": file.tag}
    tags = [
        tag.strip().removeprefix("W/") for tag in call.headers.get("if-none-match", "").split(",")
    ]
    if file.tag in tags:
        await call.reply(b"", status=304, kind=file.kind, headers=headers)
        return
    await call.reply(file.content, kind=file.kind, headers=headers)
