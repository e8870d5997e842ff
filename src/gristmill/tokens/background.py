"""A SHA-256 that another thread computes, so that writing need not wait for it.

The content of a large file has one checksum, which only one thread at a time can compute. But
hashing releases the interpreter, so that others can read and write meanwhile.
"""

from __future__ import annotations

import hashlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

_AHEAD = 8
"""Pieces that may wait, since they are kept in memory."""


class Hash(Protocol):
    """What is used of the objects of `hashlib`."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...

    def copy(self) -> Hash: ...


class BackgroundHash:
    """Like `hashlib.sha256()`; what it is given must not change afterwards."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: deque[Future[None]] = deque()

    def update(self, data: Any, /) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "sha256")
        self._waiting.append(self._thread.submit(self._hash.update, data))
        if len(self._waiting) > _AHEAD:
            self._waiting.popleft().result()

    def hexdigest(self) -> str:
        self._settle()
        return self._hash.hexdigest()

    def copy(self) -> Hash:
        self._settle()
        return self._hash.copy()

    def _settle(self) -> None:
        """Wait for all that was given, and let the thread end: a set may have many files."""
        while self._waiting:
            self._waiting.popleft().result()
        if self._thread:
            self._thread.shutdown()
            self._thread = None
