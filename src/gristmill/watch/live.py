"""Server-sent events: what is new in the rows, once for all who listen.

    id: 17
    event: runs
    data: {"rows": [{"id": …, "step": 1200, …}], "gone": [], "version": 17}

Whoever has just come, or reads too slowly to follow, is sent all rows; nothing is queued for
anybody. A stream ends after some minutes, and the browser comes again with the last id it saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from functools import lru_cache

from gristmill.watch.watcher import RowChanges, Watcher
from gristmill.web.call import Call, encode_json

STREAM_SECONDS = 300.0
ALIVE_SECONDS = 15.0
_MOST_ENCODED = 8
_RETRY = b"retry: 1000\n\n"
_ALIVE = b": still here\n\n"


class Broadcast:
    """Wakes all who listen when there is a new version."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._closed = asyncio.Event()
        watcher.changed = self._wake_soon
        self._snapshot = lru_cache(maxsize=1)(self._encode_snapshot)
        self._encoded = lru_cache(maxsize=_MOST_ENCODED)(_encode)

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        self._wake()

    def _wake_soon(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may end before the thread
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def stream(self, call: Call, version: int | None) -> None:
        """Send what became new after a version, as it comes."""
        await call.begin_stream()
        await call.send_chunk(_RETRY)
        ends = time.monotonic() + STREAM_SECONDS
        while not self._closed.is_set() and time.monotonic() < ends:
            news = self._news
            content, version = self._content(version)
            if content:
                await call.send_chunk(content)
                # At most one for each interval.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), min(1.0, self._watcher.interval))
                continue
            try:
                await asyncio.wait_for(news.wait(), ALIVE_SECONDS)
            except TimeoutError:
                await call.send_chunk(_ALIVE)
        await call.end_chunks()

    def _content(self, version: int | None) -> tuple[bytes, int]:
        changes = None if version is None else self._watcher.since(version)
        if changes is None:
            now, _ = self._watcher.rows()
            return self._snapshot(now)
        last = changes[-1].version if changes else version
        assert last is not None
        return b"".join(map(self._encoded, changes)), last

    def _encode_snapshot(self, version: int) -> tuple[bytes, int]:
        now, rows = self._watcher.rows()
        return _event({"rows": rows, "gone": [], "version": now, "all": True}, now), now


def _event(value: object, version: int) -> bytes:
    return b"id: %d\nevent: runs\ndata: %b\n\n" % (version, encode_json(value))


def _encode(changes: RowChanges) -> bytes:
    value = {"rows": changes.rows, "gone": changes.gone, "version": changes.version}
    return _event(value, changes.version)
