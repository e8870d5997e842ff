"""One HTTP request, and the answer to it.

A handler that runs for a client that has left is cancelled, and its `finally` blocks free what it
holds. So are those that take longer than they may.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from gristmill.web.fields import parse_json
from gristmill.web.refusals import RefusalError

CLIENT_LEFT = 499
"""The status of a request whose client left before its answer was complete."""
STALL_SECONDS = 60.0
"""A client that reads nothing for so long has left."""
MOST_DISCARDED = 2**28
"""Bytes of a body that is refused that are read nevertheless."""
Scope = Any
Receive = Any
Send = Any


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


def encode_json(value: object) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class Call:
    """A request, and what is sent back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.status = 0
        """What was answered; 0 while nothing is."""
        self.streams = False
        self.ended = False
        self._receive, self._send = receive, send

    @property
    def headers(self) -> dict[str, str]:
        """By their names in small letters."""
        return {name.decode("latin-1"): value.decode("latin-1")
                for name, value in self.scope["headers"]}  # fmt: skip

    async def body(self, limit: int) -> bytes:
        """All of the body, unless it is larger than it may be."""
        stated, body, read = self.headers.get("content-length", "0"), bytearray(), 0
        refused = stated.isdigit() and len(stated) < 16 and int(stated) > limit
        while True:
            # The rest of a body that is too large is thrown away: many clients read the answer only
            # when they have sent everything.
            if refused and max(read, int(stated)) > MOST_DISCARDED:
                break
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeftError
            content = message.get("body", b"")
            read += len(content)
            refused = refused or read > limit
            body = bytearray() if refused else body + content
            if not message.get("more_body", False):
                break
        if refused:
            raise RefusalError(413, f"the body is larger than {limit} bytes")
        return bytes(body)

    async def json(self, limit: int) -> dict[str, Any]:
        """The JSON object in the body."""
        return parse_json(await self.body(limit))

    async def left(self) -> None:
        """Wait until the client leaves; the body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ------------------------------------------------------------------ answers

    async def reply(
        self,
        content: bytes,
        *,
        status: int = 200,
        kind: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """A whole answer."""
        sent = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
        await self._start(status, sent)
        if self.scope["method"] == "HEAD":
            content = b""
        await self._write(content, more=False)

    async def reply_json(self, value: object, *, status: int = 200) -> None:
        await self.reply(encode_json(value), status=status)

    async def refuse(self, error: RefusalError) -> None:
        """Say why there is no answer; in the stream, if one has begun."""
        if self.ended:
            return
        if self.streams:
            await self._write(_event(error.body), more=False)
            self.status = error.status
            return
        if not self.status:
            headers = {name.lower(): value for name, value in error.headers.items()}
            if error.status == 413:
                # Otherwise the rest of the body would be read as the next request.
                headers["connection"] = "close"
            await self.reply(encode_json(error.body), status=error.status, headers=headers)

    async def begin_stream(self) -> None:
        """Begin an answer of events."""
        self.streams = True
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            # nginx would collect events before it passes them on.
            "x-accel-buffering": "no",
        }
        await self._start(200, headers)

    async def events(self, values: list[object]) -> None:
        """Send some events."""
        await self._write(b"".join(map(_event, values)), more=True)

    async def end_stream(self, values: list[object]) -> None:
        """Send the last events."""
        await self._write(b"".join(map(_event, values)) + b"data: [DONE]\n\n", more=False)

    async def send_chunk(self, content: bytes) -> None:
        """Send events that are encoded already."""
        await self._write(content, more=True)

    async def end_chunks(self) -> None:
        """End a stream of such events."""
        await self._write(b"", more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        message = {"type": "http.response.start", "status": status, "headers": raw}
        await self._send(message)

    async def _write(self, content: bytes, *, more: bool) -> None:
        self.ended = not more
        try:
            async with asyncio.timeout(STALL_SECONDS):
                # Waits while the client does not read.
                await self._send({"type": "http.response.body", "body": content, "more_body": more})
        except (TimeoutError, OSError) as error:
            self.status = CLIENT_LEFT
            raise ClientLeftError from error


def _event(value: object) -> bytes:
    return b"data: " + encode_json(value) + b"\n\n"
