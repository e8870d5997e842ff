"""Curves as bytes: what `/api/curves` answers.

    uint32          length of the header, so that 4 and it are a multiple of 8
    header          JSON: runs, revisions, names, and for each curve an entry
                    [run, name, generation, first, points, band]
    arrays          for each entry: x float64, mean float32, with a band also low and high float32;
                    filled up to a multiple of 8

A page that has drawn so many points of a generation is sent those from its last one on, which may
have grown; of another generation all. A part between two places is cut out of the buckets where
they are fine enough, and otherwise read from the file, so that a part of a few hundred records
shows each of them.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.report.plots import DigestLimits, RunDigest
from gristmill.report.reading import ERROR, STEPS, VALUE
from gristmill.report.thinning import PLACES, Buckets, Curves
from gristmill.watch.run import SLICE, WatchedRun

AXES = (*PLACES, "flops")
MOST_POINTS = 20_000
_ZOOM_BYTES = 16 << 20
"""That are read from files for one answer, over all its runs."""
_SPREAD = (VALUE, ERROR)
_EVERY_RECORD = DigestLimits(steps=1 << 20, others=1 << 20, values=1, samples=0)
_EXACT = 1 << 40
"""Added to generations of parts that were cut out."""


@dataclass(frozen=True)
class Held:
    """What a page has of a curve."""

    generation: int
    count: int
    revision: int = -1


@dataclass(frozen=True)
class CurveQuery:
    """What a page asks for."""

    names: Sequence[str]
    axis: str = "step"
    points: int = 600
    low: float | None = None
    high: float | None = None
    held: Mapping[tuple[str, str], Held] = field(default_factory=dict)
    """By run id and name."""


@dataclass(frozen=True)
class _Entry:
    name: int
    generation: int
    first: int
    arrays: tuple[npt.NDArray[Any], ...]


def answer(runs: Sequence[WatchedRun], query: CurveQuery) -> bytes:
    """The bytes of an answer."""
    parts, entries, revisions = list[bytes](), list[list[int]](), list[int]()
    zooms = query.low is not None or query.high is not None
    for number, run in enumerate(runs):
        with run.lock:
            revisions.append(run.revision)
            if not zooms:
                found = _whole(run, query)
        if zooms:
            found = _part(run, query, budget=_ZOOM_BYTES // len(runs))
        for entry in _news(run, query, found):
            x, *values = entry.arrays
            band = int(len(values) > 1)
            entries.append([number, entry.name, entry.generation, entry.first, len(x), band])
            content = b"".join(
                [x.astype("<f8").tobytes(), *(array.astype("<f4").tobytes() for array in values)]
            )
            parts.append(content + b"\0" * (-len(content) % 8))
    header = json.dumps(
        {
            "runs": [run.id for run in runs],
            "revisions": revisions,
            "names": list(query.names),
            "entries": entries,
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-(4 + len(header)) % 8)
    return b"".join([struct.pack("<I", len(header)), header, *parts])


def _news(run: WatchedRun, query: CurveQuery, found: Sequence[_Entry | int]) -> Iterator[_Entry]:
    """The entries that are new; and empty ones for curves that the page has and that are gone, as
    after a run went back. A number instead of an entry is a name whose curve is as the page has
    it."""
    known = {entry if isinstance(entry, int) else entry.name for entry in found}
    yield from (entry for entry in found if not isinstance(entry, int))
    for number, name in enumerate(query.names):
        held = query.held.get((run.id, name))
        if number not in known and held is not None and held.count:
            yield _Entry(number, 0, 0, (np.zeros(0), np.zeros(0)))


# ------------------------------------------------------------------ whole curves


def _whole(run: WatchedRun, query: CurveQuery) -> list[_Entry | int]:
    """Whole curves, or what is new of them."""
    found = list[_Entry | int]()
    for curves, numbers, columns in _wanted(run.digest, query.names):
        size = curves.size_for(query.points)
        generation = _generation(run, size, query.axis)
        total = -(-curves.count // size)
        for number, column in zip(numbers, columns, strict=True):
            held = query.held.get((run.id, query.names[number]))
            first = 0
            if held is not None and held.generation == generation and 0 < held.count <= total:
                if held.revision >= run.revision:
                    found.append(number)
                    continue
                first = held.count - 1
            names = _SPREAD if column == _SPREAD[0] and curves.knows(_SPREAD[1]) else (column,)
            buckets = curves.thinned(names, size=size, first=first)
            arrays = _arrays(buckets, run, query.axis, single=size == 1, first=first)
            if arrays is not None:
                found.append(_Entry(number, generation, first, arrays))
    return found


def _wanted(
    digest: RunDigest, names: Sequence[str]
) -> Iterable[tuple[Curves, list[int], list[str]]]:
    """The curves that are asked for and are there, by groups."""
    groups: dict[str, tuple[list[int], list[str]]] = {}
    for number, name in enumerate(names):
        group, column = _split(name)
        if group in digest.groups and digest.groups[group].knows(column):
            numbers, columns = groups.setdefault(group, ([], []))
            numbers.append(number)
            columns.append(column)
    for group, (numbers, columns) in groups.items():
        yield digest.groups[group], numbers, columns


def _split(name: str) -> tuple[str, str]:
    """The group and the column of a curve."""
    if name.startswith("evaluation."):
        return f"{name}.", _SPREAD[0]
    group, dot, column = name.rpartition(".")
    return group + dot, column


def _generation(run: WatchedRun, size: int, axis: str) -> int:
    return (run.generation * 64 + size.bit_length()) * len(AXES) + AXES.index(axis)


def _arrays(
    buckets: Buckets, run: WatchedRun, axis: str, *, single: bool, first: int = 0
) -> tuple[npt.NDArray[Any], ...] | None:
    """x and the values of the first curve in some buckets; None if it has none."""
    x = _places(buckets, run, axis)
    # What is sent later must go on where this ends, so only whole curves may be left out.
    if x is None or (not first and not buckets.counts_CB[0].any()):
        return None
    mean = buckets.means_CB[0]
    if len(buckets.sums_CB) > 1:
        error = np.nan_to_num(buckets.means_CB[1])
        return x, mean, mean - error, mean + error
    if single:
        return x, mean
    nothing = buckets.counts_CB[0] == 0
    low, high = (np.where(nothing, np.nan, v[0]) for v in (buckets.lows_CB, buckets.highs_CB))
    return x, mean, low, high


def _places(buckets: Buckets, run: WatchedRun, axis: str) -> npt.NDArray[np.float64] | None:
    if axis != "flops":
        return buckets.places_BP[:, PLACES.index(axis)]
    if run.flops_per_token is None:
        return None
    tokens: npt.NDArray[np.float64] = buckets.places_BP[:, PLACES.index("tokens")]
    return tokens * run.flops_per_token


# ------------------------------------------------------------------ parts of curves


def _part(run: WatchedRun, query: CurveQuery, *, budget: int) -> list[_Entry | int]:
    """The part of curves between two places, as finely as the answer and the budget allow."""
    with run.lock:
        bounds = _bounds(run, query)
        if bounds is None:
            return []
        source: RunDigest | None = None
        if _buckets_between(run.digest, *bounds) < query.points // 2:
            source = _read_part(run, bounds, budget=budget)
        entries = list(_cut(source or run.digest, run, query, bounds))
    return [
        entry.name
        if (held := query.held.get((run.id, query.names[entry.name]))) is not None
        and held.generation == entry.generation
        else entry
        for entry in entries
    ]


def _bounds(run: WatchedRun, query: CurveQuery) -> tuple[int, float, float] | None:
    """The column of places that is cut, and from where to where."""
    low = -np.inf if query.low is None else query.low
    high = np.inf if query.high is None else query.high
    if query.axis != "flops":
        return PLACES.index(query.axis), low, high
    if run.flops_per_token is None:
        return None
    return PLACES.index("tokens"), low / run.flops_per_token, high / run.flops_per_token


def _buckets_between(digest: RunDigest, column: int, low: float, high: float) -> float:
    """How many points the curves of steps have there; infinitely many if each is a record."""
    curves = digest.groups.get(STEPS)
    if curves is None:
        return 0
    if curves.size == 1:
        return np.inf
    places = curves.stored([]).places_BP[:, column]
    return int(np.count_nonzero((places >= low) & (places <= high)))


def _read_part(
    run: WatchedRun, bounds: tuple[int, float, float], *, budget: int
) -> RunDigest | None:
    """The records of a part of the file; None if it is too long, or no longer there."""
    span = run.index.span(*bounds, run.follower.offset)
    if span.end - span.begin > budget or run.read_share < 1.0:
        return None
    data = run.follower.part(span.begin, span.end)
    if not data:
        return None
    part = RunDigest(limits=_EVERY_RECORD)
    part.seconds, part.time = span.seconds, span.clock
    begin = 0
    while end := data.rfind(b"\n", begin, begin + SLICE) + 1 or data.find(b"\n", begin) + 1:
        part.add_lines(data[begin:end])
        begin = end
    return part


def _cut(
    digest: RunDigest, run: WatchedRun, query: CurveQuery, bounds: tuple[int, float, float]
) -> Iterable[_Entry]:
    column, low, high = bounds
    for curves, numbers, columns in _wanted(digest, query.names):
        for number, name in zip(numbers, columns, strict=True):
            names = _SPREAD if name == _SPREAD[0] and curves.knows(_SPREAD[1]) else (name,)
            buckets = curves.stored(names)
            inside = np.flatnonzero(
                (buckets.places_BP[:, column] >= low) & (buckets.places_BP[:, column] <= high)
            )
            if not len(inside):
                continue
            # One more on both sides, so that lines reach the edges.
            begin, end = max(0, inside[0] - 1), min(len(buckets.places_BP), inside[-1] + 2)
            part, single = _between(buckets, int(begin), int(end)), curves.size == 1
            while len(part.places_BP) > query.points + 2:
                part, single = part.in_pairs(), False
            arrays = _arrays(part, run, query.axis, single=single)
            if arrays is not None:
                yield _Entry(number, _fingerprint(arrays), 0, arrays)


def _between(buckets: Buckets, begin: int, end: int) -> Buckets:
    part = slice(begin, end)
    return Buckets(
        buckets.places_BP[part],
        buckets.sums_CB[:, part],
        buckets.counts_CB[:, part],
        buckets.lows_CB[:, part],
        buckets.highs_CB[:, part],
    )


def _fingerprint(arrays: tuple[npt.NDArray[Any], ...]) -> int:
    """A generation for a part: the same part has the same."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return _EXACT + value
