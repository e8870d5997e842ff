"""Sorting rows of numbers that do not fit into memory.

    rows ──> runs, each sorted in memory, one after the other in a file ──> merged, piece by piece

Rows are compared by all of their numbers, from the first on. A piece of the merged rows is found
without a loop over rows: each run has the next of its rows in a buffer, and what is not above the
smallest of the buffers' last rows can follow now. Many runs are first merged into fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from gristmill.base.files import storage_errors

Rows = npt.NDArray[np.uint64]
"""A number of rows by a number of columns."""

_COPIES = 6
"""How many times its size sorting some rows takes: the rows, the order, and copies of them."""
_MOST_RUNS = 256
"""Runs that are merged at once."""
_WIDTH = 8


def sort_rows(rows: Rows) -> Rows:
    """Some rows in order."""
    if len(rows) < 2:
        return rows
    order = np.argsort(rows[:, 0], kind="stable")
    rows = rows[order]
    first = rows[:, 0]
    if np.any(first[1:] == first[:-1]):
        same = np.zeros(len(rows), np.bool_)
        same[1:] = first[1:] == first[:-1]
        same[:-1] |= same[1:]
        # Only rows that share their first number are compared by the others.
        part = rows[same]
        rows[same] = part[np.lexsort(part.T[::-1])]
    return rows


@dataclass(frozen=True)
class _Run:
    """Sorted rows in a file."""

    begin: int
    count: int


class RowSorter:
    """Takes rows in any order and gives them back sorted, with bounded memory."""

    def __init__(self, file: Path, *, columns: int, memory: int) -> None:
        """`file` holds what does not fit into `memory` bytes."""
        self._path = file
        self._columns = columns
        self._most = max(memory // (_WIDTH * columns * _COPIES), 64)
        """Rows that are sorted in memory."""
        self._waiting: list[Rows] = []
        self._count = 0
        self._runs: list[_Run] = []
        self._file: IO[bytes] | None = None

    def add(self, rows: Rows) -> None:
        """Add some rows."""
        for begin in range(0, len(rows), self._most):
            piece = rows[begin : begin + self._most]
            if self._count + len(piece) > self._most:
                self._write_run()
            self._waiting.append(piece.copy())
            self._count += len(piece)

    def _sorted_waiting(self) -> Rows:
        empty = np.empty((0, self._columns), np.uint64)
        rows = np.concatenate([empty, *self._waiting])
        self._waiting, self._count = [], 0
        return sort_rows(rows)

    def _write_run(self) -> None:
        with storage_errors(self._path):
            if self._file is None:
                self._file = self._path.open("w+b")
            begin = self._file.seek(0, 2) // (_WIDTH * self._columns)
            rows = self._sorted_waiting()
            self._file.write(rows.tobytes())
            self._runs.append(_Run(begin, len(rows)))

    def sorted(self) -> Iterator[Rows]:
        """All rows in order, in pieces; the file is removed after the last of them."""
        if not self._runs:
            if self._count:
                yield self._sorted_waiting()
            return
        try:
            if self._count:
                self._write_run()
            while len(self._runs) > _MOST_RUNS:
                first, self._runs = self._runs[:_MOST_RUNS], self._runs[_MOST_RUNS:]
                self._runs.insert(0, self._merge_into_one(first))
            yield from self._merged(self._runs)
        finally:
            self.close()

    def _merge_into_one(self, runs: Sequence[_Run]) -> _Run:
        assert self._file is not None
        begin = self._file.seek(0, 2) // (_WIDTH * self._columns)
        end = begin
        for rows in self._merged(runs):
            with storage_errors(self._path):
                self._file.seek(_WIDTH * self._columns * end)
                self._file.write(rows.tobytes())
            end += len(rows)
        return _Run(begin, end - begin)

    def _read(self, run: _Run, count: int) -> tuple[Rows, _Run]:
        """The next rows of a run, and what is left of it."""
        assert self._file is not None
        count = min(count, run.count)
        self._file.seek(_WIDTH * self._columns * run.begin)
        content = self._file.read(_WIDTH * self._columns * count)
        rows = np.frombuffer(content, np.uint64).reshape(-1, self._columns)
        return rows, _Run(run.begin + count, run.count - count)

    def _merged(self, runs: Sequence[_Run]) -> Iterator[Rows]:
        room = max(self._most // len(runs), 1)
        left = list(runs)
        buffers = [np.empty((0, self._columns), np.uint64) for _ in runs]
        while True:
            for number, run in enumerate(left):
                if run.count and not len(buffers[number]):
                    buffers[number], left[number] = self._read(run, room)
            active = [number for number, buffer in enumerate(buffers) if len(buffer)]
            if not active:
                return
            unfinished = [tuple(buffers[n][-1].tolist()) for n in active if left[n].count]
            bound = min(unfinished, default=None)
            taken = []
            for number in active:
                buffer = buffers[number]
                count = len(buffer) if bound is None else _count_up_to(buffer, bound)
                taken.append(buffer[:count])
                buffers[number] = buffer[count:]
            yield sort_rows(np.concatenate(taken))

    def close(self) -> None:
        """Remove the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


def _count_up_to(rows: Rows, bound: Sequence[int]) -> int:
    """How many of some sorted rows are not above a row."""
    low, high = 0, len(rows)
    for column, value in enumerate(bound):
        part = rows[low:high, column]
        below, until = (
            np.searchsorted(part, np.uint64(value), side="left"),
            np.searchsorted(part, np.uint64(value), side="right"),
        )
        low, high = low + int(below), low + int(until)
        if low == high:
            return low
    return high


def write_rows(path: Path, pieces: Iterable[Rows]) -> None:
    """Write rows to a file that is there as a whole or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    with storage_errors(path):
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece.astype("<u8", copy=False).tobytes())
        unfinished.replace(path)


def read_rows(path: Path, *, columns: int, most: int, offset: int = 0) -> Iterator[Rows]:
    """The rows of a file after some bytes, in pieces of some rows."""
    with path.open("rb") as file:
        file.seek(offset)
        while content := file.read(_WIDTH * columns * most):
            yield np.frombuffer(content, np.uint64).reshape(-1, columns)
