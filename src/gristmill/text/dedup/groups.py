"""Which of many records are dropped, since an earlier one stands for them.

    records    numbered from 1 in the order of the work; 0 stands for all of the older sets
    exact      records with equal hashes are a group
    minhash    records that match in a bucket, or are equal, are joined by an edge; a group is
               whatever edges join (a connected component)

The first record of a group stays; if older sets belong to it, none does. Nothing is held in memory
but what `RowSorter` holds, so groups are found by sorting edges, over and over (large-star and
small-star; Kiveris et al., Connected Components in MapReduce and Beyond, 2014):

    large star   each record u: its neighbors above u are joined to the smallest of u and all of
                 its neighbors
    small star   each record u: u and its neighbors below u are joined to the smallest of them

until nothing changes, which takes a few rounds. Then each edge leads from a record to the first of
its group.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gristmill.text.dedup.sorting import Rows, RowSorter, read_rows, write_rows

OLDER = 0
"""The number that stands for all records of older sets."""
_EDGE = 2
_PIECE = 1 << 18
"""Edges that are read at a time."""


class DropCode(enum.IntEnum):
    """Why a record is dropped, in files."""

    EQUAL = 0
    NEAR = 1
    OLDER = 2


@dataclass
class Grouping:
    """Finds the groups of records, with files in a folder; what is done there is not done again."""

    folder: Path
    memory: int
    step: Callable[[str], None] = lambda name: None
    """Is told what begins."""
    _sorters: int = field(default=0, init=False)

    def exact(self, records: Iterable[Rows]) -> Path:
        """The edges between equal records: the file of pairs (record, first of its group), sorted.
        Rows of `records` are two hashes and a number."""
        edges = self.folder / "exact.edges"
        if not edges.exists():
            self.step("comparing documents")
            sorter, pairs = self._sorter(3, share=2), self._sorter(_EDGE, share=2)
            _add_all(sorter, records)
            _add_all(pairs, _joined_to_first(sorter.sorted(), keys=2))
            write_rows(edges, _distinct(pairs.sorted()))
        return edges

    def bucket(self, number: int, of: int, records: Callable[[], Iterable[Rows]]) -> Path:
        """The edges between records of equal buckets. Rows are a key and a number."""
        edges = self.folder / f"bucket-{number}.edges"
        if not edges.exists():
            self.step(f"comparing bucket {number + 1} of {of}")
            sorter = self._sorter(_EDGE)
            _add_all(sorter, records())
            write_rows(edges, _joined_to_first(sorter.sorted(), keys=1))
        return edges

    def components(self, files: Iterable[Path]) -> Path:
        """The pairs (record, first of its group) for the groups that edges form, sorted."""
        result = self.folder / "components.edges"
        if result.exists():
            return result
        self.step("joining groups")
        sorter = self._sorter(_EDGE)
        for file in files:
            _add_all(sorter, self._rows(file))
        current, following = self.folder / "edges.now", self.folder / "edges.next"
        write_rows(current, _distinct(sorter.sorted()))
        while True:
            write_rows(following, self._star(current, large=True))
            write_rows(following, self._star(following, large=False))
            if _same(current, following):
                break
            following.replace(current)
        following.unlink()
        current.replace(result)
        return result

    def _rows(self, file: Path) -> Iterator[Rows]:
        return read_rows(file, columns=_EDGE, most=min(self.memory // 256, _PIECE))

    def _star(self, file: Path, *, large: bool) -> Iterator[Rows]:
        """The edges after one step, each (larger, smaller), sorted."""
        # Half of the memory for what is sorted into neighborhoods, half for what comes of them.
        neighbors, output = self._sorter(_EDGE, share=2), self._sorter(_EDGE, share=2)
        for edges in self._rows(file):
            neighbors.add(edges)
            if large:
                neighbors.add(edges[:, ::-1])
        last, smallest = None, np.uint64(0)
        for rows in neighbors.sorted():
            nodes, others = rows[:, 0], rows[:, 1]
            new = np.ones(len(rows), np.bool_)
            new[1:] = nodes[1:] != nodes[:-1]
            new[0] = last is None or nodes[0] != last
            # The first neighbor is the smallest one; the first group may have begun before.
            group = np.cumsum(new) - (1 if new[0] else 0)
            firsts = others[new] if new[0] else np.concatenate([[smallest], others[new]])
            least = np.minimum(firsts[group], nodes)
            if large:
                above = others > nodes
                output.add(np.stack([others[above], least[above]], axis=1))
            else:
                # The neighbors are all below the node.
                other = others != least
                output.add(np.stack([others[other], least[other]], axis=1))
                output.add(np.stack([nodes[new], least[new]], axis=1))
            last, smallest = nodes[-1], firsts[group[-1]]
        return _distinct(output.sorted())

    def drops(self, groups: Path, equal: Path | None) -> Iterator[Rows]:
        """Each dropped record with the code of why, sorted; `equal` are edges between equal ones,
        if groups are not of those alone."""
        same = _Membership(self._rows(equal)) if equal else None
        for rows in self._rows(groups):
            codes = np.full(len(rows), DropCode.NEAR if same else DropCode.EQUAL, np.uint64)
            if same:
                codes[same.of(rows[:, 0])] = DropCode.EQUAL
            codes[rows[:, 1] == OLDER] = DropCode.OLDER
            yield np.stack([rows[:, 0], codes], axis=1)

    def _sorter(self, columns: int, *, share: int = 1) -> RowSorter:
        self._sorters += 1
        path = self.folder / f"rows-{self._sorters}"
        return RowSorter(path, columns=columns, memory=self.memory // share)


def _add_all(sorter: RowSorter, pieces: Iterable[Rows]) -> None:
    for piece in pieces:
        sorter.add(piece)


def _joined_to_first(pieces: Iterable[Rows], *, keys: int) -> Iterator[Rows]:
    """Of sorted rows, keys before a number: each number with the first one of the same keys."""
    last: Rows | None = None
    first = np.uint64(0)
    for rows in pieces:
        new = np.ones(len(rows), np.bool_)
        new[1:] = np.any(rows[1:, :keys] != rows[:-1, :keys], axis=1)
        new[0] = last is None or bool(np.any(rows[0, :keys] != last))
        group = np.cumsum(new) - (1 if new[0] else 0)
        numbers = rows[:, keys]
        firsts = numbers[new] if new[0] else np.concatenate([[first], numbers[new]])
        pairs = np.stack([numbers, firsts[group]], axis=1)
        yield pairs[pairs[:, 0] != pairs[:, 1]]
        last, first = rows[-1, :keys], firsts[group[-1]]


def _distinct(pieces: Iterable[Rows]) -> Iterator[Rows]:
    """Sorted rows, each once."""
    last: Rows | None = None
    for rows in pieces:
        new = np.ones(len(rows), np.bool_)
        new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
        new[0] = last is None or bool(np.any(rows[0] != last))
        last = rows[-1]
        yield rows[new]


def _same(first: Path, second: Path) -> bool:
    """Whether two files of edges have the same content."""
    if first.stat().st_size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as other:
        while piece := one.read(1 << 20):
            if piece != other.read(1 << 20):
                return False
    return True


class _Membership:
    """Which of some ascending numbers are among the first ones of sorted rows."""

    def __init__(self, pieces: Iterator[Rows]) -> None:
        self._pieces = pieces
        self._numbers = np.empty(0, np.uint64)

    def of(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(numbers), np.bool_)
        while True:
            found |= np.isin(numbers, self._numbers)
            if len(self._numbers) and self._numbers[-1] >= numbers[-1]:
                return found
            piece = next(self._pieces, None)
            if piece is None:
                return found
            self._numbers = piece[:, 0].copy()
