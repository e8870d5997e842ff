"""Files that are written under hidden names, with checksums that another thread may compute.

The content of a large file has one checksum, which only one thread at a time can compute. But
hashing releases the interpreter, so that others can read and write meanwhile.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_file
from gristmill.tokens.format import FileFacts

_BUFFER = 1 << 20
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


class HashedFile:
    """A file that is written under a hidden name beside its final place, with its checksum."""

    def __init__(
        self,
        final: Path,
        *,
        ending: str,
        saved: Mapping[str, Any] | None = None,
        header: bytes = b"",
        hash: Hash | None = None,
    ) -> None:
        """Begin the file with a header, or resume what `state` described; `ending` hides it."""
        self._final = final
        self.path = final.with_name(f".{final.name}.{ending}")
        self.bytes = int(saved["bytes"]) if saved is not None else 0
        if saved is not None:
            # It may be in its final place already.
            published = not self.path.is_file() and final.is_file()
            if published and final.stat().st_size == self.bytes:
                os.replace(final, self.path)
            if not self.path.is_file() or self.path.stat().st_size < self.bytes:
                raise _changed(self.path)
        self._flushed = -1
        """The length at the last flush."""
        self._file = self._open()
        self._file.truncate(self.bytes)
        self.hash: Hash = hash or hashlib.sha256()
        if saved is None:
            self.write(header)
        else:
            # `close_with` may have replaced the header.
            self._file.write(header)
            self._hash_content()
            if self.hash.hexdigest() != saved.get("sha256", self.hash.hexdigest()):
                raise _changed(self.path)
        self.mark()

    def _open(self) -> io.BufferedRandom:
        raw = io.FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
        return io.BufferedRandom(raw, _BUFFER)

    def _hash_content(self) -> None:
        self.hash = hashlib.sha256()
        for piece in self.content():
            self.hash.update(piece)

    def content(self, begin: int = 0) -> Iterator[bytes]:
        """What was written so far, piece by piece."""
        self._file.seek(begin)
        while piece := self._file.read(_BUFFER):
            yield piece

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.bytes += len(data)
        self.hash.update(data)

    def state(self) -> dict[str, Any]:
        """Its length and checksum."""
        return {"bytes": self.bytes, "sha256": self.hash.hexdigest()}

    def flush(self) -> None:
        """Flush the content to the disk."""
        if not self._file.closed and self._flushed != self.bytes:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._flushed = self.bytes

    def mark(self) -> None:
        """Make it cheap to rewind to this place."""
        if not self._file.closed:
            self._mark = self.bytes, self.hash.copy()

    def rewind(self, size: int) -> None:
        """Cut the file back to its first bytes, even if it was closed."""
        if self._file.closed:
            self._file = self._open()
        self._file.truncate(size)
        self._flushed = -1
        self.bytes, marked = size, self._mark
        if marked[0] == size:
            self.hash = marked[1].copy()
            self._file.seek(size)
        else:
            self._hash_content()

    def close(self) -> FileFacts:
        self.flush()
        self._file.close()
        return FileFacts(**self.state())

    def close_with(self, header: bytes) -> FileFacts:
        """Replace the header and close; reads the file once more for its checksum."""
        self._file.seek(0)
        self._file.write(header)
        self._flushed = -1
        self.close()
        return FileFacts(bytes=self.bytes, sha256=sha256_file(self.path))

    def publish(self) -> None:
        os.replace(self.path, self._final)

    def release(self) -> None:
        """Close the file without flushing it: nobody needs the rest, and the disk may be full."""
        if not self._file.raw.closed:
            self._file.raw.close()

    def discard(self) -> None:
        self.release()
        self.path.unlink(missing_ok=True)


def _changed(path: Path) -> UserError:
    return UserError(
        "this file of the unfinished set is not what was saved",
        where=str(path),
        remedy="start it again with --overwrite",
        exit=Exit.STORAGE,
    )
