"""Reads a growing file of lines from where it was left, and sees when what was read has changed.

    appended to         the new complete lines are read; a cut last line waits for its end
    another inode       the file was replaced (rotated, or the folder made anew)
    smaller             it was cut
    other last bytes    a run went back to a checkpoint and wrote on

In the last three cases all is read again.

The last bytes that were read are kept and compared before every read. Records hold the time to the
microsecond, so lines that were written again differ from those before.

Where lines begin is kept for some places all over the file, so that a part can be read by step,
tokens or seconds. Whenever there are too many, every second is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gristmill.report.thinning import Doubles
from gristmill.watch.regular import open_regular

_FINGERPRINT = 1 << 12
"""Bytes: more than a record of a step, so that its time is among them."""
_LONGEST = 1 << 24
"""A line that is longer is skipped."""
_SAMPLE = 1 << 11
_FIRST_PLACES, _MOST_PLACES = 16, 1024


@dataclass(frozen=True)
class NewLines:
    """Complete lines that were added to a file."""

    offset: int
    data: bytes
    restarted: bool = False
    """Whether what was read before no longer counts: this is the beginning of the file."""

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


@dataclass(frozen=True)
class _Identity:
    """What tells whether a file has changed."""

    device: int
    inode: int
    size: int
    changed: int

    @classmethod
    def of(cls, facts: os.stat_result) -> _Identity:
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)


class Follower:
    """A file that is read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Up to here it was read."""
        self.size = 0
        self.changed = 0.0
        """When it was written to last, in seconds since 1970."""
        self.skipped = 0
        """Lines that were too long."""
        self._seen: _Identity | None = None
        self._file: tuple[int, int] | None = None
        self._tail = b""
        self._in_long_line = False

    def look(self) -> bool:
        """Whether there may be something to read; asks only for the file's size and time."""
        try:
            now = _Identity.of(self.path.stat())
        except OSError:
            gone = self._file is not None
            self.size, self._seen = 0, None
            return gone
        self.size, self.changed = now.size, now.changed / 1e9
        return now != self._seen

    def read(self, limit: int) -> NewLines | None:
        """The next complete lines, about so many bytes; None if there are none. Call it until it
        returns None."""
        try:
            handle = open_regular(self.path)
        except OSError:
            return self._gone()
        try:
            return self._read(handle, limit)
        except OSError:
            return None
        finally:
            os.close(handle)

    def _gone(self) -> NewLines | None:
        if self._file is None:
            return None
        self._restart(None)
        return NewLines(0, b"", restarted=True)

    def _restart(self, file: tuple[int, int] | None) -> None:
        self.offset, self._tail, self._in_long_line, self._file = 0, b"", False, file
        self._seen, self.skipped = None, 0

    def _read(self, handle: int, limit: int) -> NewLines | None:
        facts = os.fstat(handle)
        file = (facts.st_dev, facts.st_ino)
        self.size = facts.st_size
        restarted = self._file is not None and not (
            file == self._file and facts.st_size >= self.offset and self._tail_is_there(handle)
        )
        if restarted or self._file is None:
            self._restart(file)
        data = self._lines(handle, limit)
        if not data and not restarted:
            if not self._in_long_line:
                self._seen = _Identity.of(facts)
            return None
        piece = NewLines(self.offset, data, restarted)
        self.offset += len(data)
        self._tail = (self._tail + data)[-_FINGERPRINT:]
        return piece

    def _tail_is_there(self, handle: int) -> bool:
        """Whether the last bytes that were read still stand where they stood."""
        begin = self.offset - len(self._tail)
        return os.pread(handle, len(self._tail), begin) == self._tail

    def _lines(self, handle: int, limit: int) -> bytes:
        """Complete lines from the offset on."""
        while True:
            data = os.pread(handle, limit, self.offset)
            end = data.rfind(b"\n") + 1
            if self._in_long_line:
                end = data.find(b"\n") + 1
                self._pass(data[: end or len(data)])
                if end:
                    self._in_long_line = False
                    self.skipped += 1
                elif not data:
                    return b""
                continue
            if end or len(data) < limit:
                return data[:end]
            if limit > _LONGEST:
                self._in_long_line = True
                continue
            limit *= 2

    def _pass(self, data: bytes) -> None:
        self.offset += len(data)
        self._tail = (self._tail + data)[-_FINGERPRINT:]

    # ------------------------------------------------------------------ parts

    def sampled(self, places: int, tail: int) -> Iterator[bytes]:
        """Complete lines from places all over the file, then those at its end."""
        try:
            handle = open_regular(self.path)
        except OSError:
            return
        try:
            size = os.fstat(handle).st_size
            begin = max(0, size - tail)
            for place in range(places):
                data = os.pread(handle, _SAMPLE, begin * place // places)
                first = 0 if place == 0 else data.find(b"\n") + 1
                yield data[first : data.rfind(b"\n") + 1]
            data = os.pread(handle, size - begin, begin)
            yield data[data.find(b"\n") + 1 if begin else 0 : data.rfind(b"\n") + 1]
        except OSError:
            return
        finally:
            os.close(handle)

    def part(self, begin: int, end: int) -> bytes | None:
        """Bytes that were read before; None if they are no longer those."""
        try:
            handle = open_regular(self.path)
        except OSError:
            return None
        try:
            facts = os.fstat(handle)
            same = self._file == (facts.st_dev, facts.st_ino)
            if not same or not self._tail_is_there(handle):
                return None
            return os.pread(handle, end - begin, begin)
        except OSError:
            return None
        finally:
            os.close(handle)


class LineIndex:
    """Where lines begin, for some places all over a file."""

    def __init__(self, most: int = _MOST_PLACES) -> None:
        self._most = most
        self._rows_PF = np.zeros((min(most, _FIRST_PLACES), 5))
        self._count = self._seen = 0
        self._stride = 1

    def add(self, offset: int, place: tuple[float, float, float], clock: float | None) -> None:
        """Lines that begin here come after a record at these steps, tokens and seconds, written at
        that time."""
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        if self._count == len(self._rows_PF) < self._most:
            grown = np.zeros((min(self._most, 2 * self._count), 5))
            grown[: self._count] = self._rows_PF
            self._rows_PF = grown
        elif self._count == self._most:
            self._count //= 2
            self._rows_PF[: self._count] = self._rows_PF[::2][: self._count].copy()
            self._stride *= 2
            if (self._seen - 1) % self._stride:
                return
        row = (offset, *place, np.nan if clock is None else clock)
        self._rows_PF[self._count] = row
        self._count += 1

    @property
    def nbytes(self) -> int:
        return self._rows_PF.nbytes

    def _rows(self) -> Doubles:
        rows: Doubles = self._rows_PF[: self._count]
        return rows

    def span(self, column: int, low: float, high: float, end: int) -> IndexedPart:
        """The part of a file of `end` bytes that has everything between two values of one of
        step, tokens or seconds (columns 0, 1, 2)."""
        rows = self._rows()
        if not len(rows):
            return IndexedPart(0, end, 0.0, None)
        # A run that went back has been read again, so these grow, but for records that came a few
        # steps early or late: hence one place more on both sides.
        values = np.maximum.accumulate(rows[:, 1 + column])
        first = max(0, int(np.searchsorted(values, low, side="left")) - 2)
        last = int(np.searchsorted(values, high, side="right")) + 1
        stop = int(rows[last, 0]) if last < len(rows) else end
        clock = None if np.isnan(rows[first, 4]) else float(rows[first, 4])
        return IndexedPart(int(rows[first, 0]), stop, float(rows[first, 3]), clock)


@dataclass(frozen=True)
class IndexedPart:
    """Lines of a file."""

    begin: int
    end: int
    seconds: float
    """Of the run, before the first of these lines."""
    clock: float | None
    """The time then; None if nothing was recorded before."""
