"""An object elsewhere as a file: reads ahead, and goes on where a connection broke.

    requests   128 KiB | 512 KiB | 2 MiB | 8 MiB | 8 MiB …      as long as reads follow each other

One that reads from here and there, such as the footer of a table, costs little; one that reads to
the end has the next pieces under way while it works on this one. What arrived before a connection
broke is kept. After several attempts in a row without a byte reading ends with an error, and the
command that is given again resumes.
"""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gristmill.hub.objects import RemoteObject, TransientError
from gristmill.hub.retry import Retries
from gristmill.hub.stores import store_of

_FIRST, _GROWTH, _LARGEST = 1 << 17, 4, 1 << 23
_AHEAD = 2
"""Pieces that are asked for before they are needed."""
_MORE = 1 << 17
"""Bytes after a large read, which seldom ends where its reader does."""
_BUFFER = 1 << 17


def open_remote(item: RemoteObject) -> io.BufferedReader:
    """The content of an object as a file that can seek."""
    return io.BufferedReader(_RemoteFile(item), _BUFFER)


def fetch(
    item: RemoteObject, begin: int, end: int, *, unwanted: Callable[[], bool] = lambda: False
) -> bytes:
    """A range of an object, in as many requests as it takes."""
    content, store, retries = bytearray(), store_of(item.address), Retries(item.name)
    while len(content) < end - begin and not unwanted():
        try:
            for piece in store.read(item, begin + len(content), end):
                content += piece
                retries.renew()
        except TransientError as error:
            retries.wait(error)
    return bytes(content)


class _RemoteFile(io.RawIOBase):
    """Reads pieces of growing size."""

    def __init__(self, item: RemoteObject) -> None:
        self._item = item
        self._position = 0
        self._begin, self._piece = 0, b""
        self._size = _FIRST
        self._waiting: deque[tuple[int, Future[bytes]]] = deque()
        """Pieces under way, each with the place where it begins."""
        self._next = 0
        """Where the one after them begins."""
        self._cancelled = threading.Event()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._item.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._item.size - self._position)
        if wanted <= 0:
            return 0
        if not self._begin <= self._position < self._begin + len(self._piece):
            self._load(wanted)
        start = self._position - self._begin
        found = memoryview(self._piece)[start : start + wanted]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def _load(self, wanted: int) -> None:
        """Get the piece that holds the position."""
        follows = bool(self._piece) and self._position == self._begin + len(self._piece)
        if self._waiting and self._waiting[0][0] == self._position:
            self._begin, future = self._waiting.popleft()
            self._piece = future.result()
        else:
            self._cancel()
            self._size = min(self._size * _GROWTH, _LARGEST) if follows else _FIRST
            count = max(self._size, wanted + _MORE if wanted > _FIRST else wanted)
            self._begin, self._next = self._position, self._position
            end = self._advance(count)
            self._piece = fetch(self._item, self._begin, end)
        if follows:
            self._size = min(self._size * _GROWTH, _LARGEST)
            while len(self._waiting) < _AHEAD and self._next < self._item.size:
                begin = self._next
                self._waiting.append((begin, self._start(begin, self._advance(self._size))))

    def _advance(self, count: int) -> int:
        self._next = min(self._next + count, self._item.size)
        return self._next

    def _start(self, begin: int, end: int) -> Future[bytes]:
        """Begin to get a piece. Its thread is no one's worry when the program ends."""
        future: Future[bytes] = Future()
        unwanted = self._cancelled.is_set

        def run() -> None:
            try:
                future.set_result(fetch(self._item, begin, end, unwanted=unwanted))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="read ahead", daemon=True).start()
        return future

    def _cancel(self) -> None:
        self._cancelled.set()
        self._cancelled = threading.Event()
        self._waiting.clear()

    def close(self) -> None:
        self._cancel()
        super().close()
