"""Stragglers: which process slows the others down, and in which part of a step.

All processes of a run are synchronized in every step, so their steps take equally long; the fast
ones wait. What differs is how long each is busy. Every process adds that up and notes the sums
after every five steps (`Pace`). The newest notes are sent with its heartbeat, so they cost no extra
message. Rank 0 compares the same steps of all processes (`StragglerDetector`).

    data       until the batch is available
    compute    forward and backward, until this process's own gradients are computed
    optimizer  from the synchronized gradients to the end of the step
    link       how long the store, which holds the heartbeats, takes to answer

A process is slow if it was busy a fifth longer than the median over the last 30 steps, and also in
most of their windows of five steps, and if the difference matters compared with a whole step. The
report names the part in which it loses most. The stages of a pipeline have different work, so a
process is compared with those of its own stage.

A limitation: inside a pass that communicates weights or activations (fsdp, tensor, context and
pipeline parallelism), waiting for others counts as computing, so all processes look alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

STRETCH = 5
"""Steps between two notes."""
COMPARED = 6
"""Windows of `STRETCH` steps that are compared together."""
MOST = 4
"""In this many of them a process must be slow: a single delay does not count."""
CALM = 10
"""Windows in a row in which a process was not slow, after which it no longer counts as slow."""
KEPT = 24
"""Notes sent with a heartbeat; there are many between two heartbeats if steps are fast."""
SLOWER = 1.2
"""From this multiple of the median on, a process counts as slow."""
MATTERS = 0.05
"""The minimum excess of a slow process over the median, as a share of a whole step."""
SLOW_LINK = 5.0
"""From this multiple of the median answer time on, a link counts as slow."""
_LEAST_LINK = 0.005
"""Seconds; faster answers of the store are never reported."""
PARTS = ("data", "compute", "optimizer")
Note = tuple[int, float, float, float, float]
"""A step, and the seconds spent until then, in total and in each part."""


class Pace:
    """Adds up how long this process was busy with each part of its steps."""

    def __init__(self, *, stage: int = 0) -> None:
        self.stage = stage
        """Its stage of a pipeline."""
        self._step = 0
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._notes: deque[Note] = deque(maxlen=KEPT)

    def add(
        self, step: int, *, seconds: float, data: float, compute: float, optimizer: float
    ) -> None:
        """Add a step."""
        if step != self._step + 1:
            # Steps were skipped, or the run was rolled back.
            self._notes.clear()
        self._step = step
        for number, value in enumerate((seconds, data, compute, optimizer)):
            self._sums[number] += value
        if step % STRETCH == 0:
            whole, waited, computed, updated = (round(value, 6) for value in self._sums)
            self._notes.append((step, whole, waited, computed, updated))

    @property
    def waiting(self) -> tuple[float, float]:
        """Seconds of all steps so far, and those spent waiting for data."""
        return (self._sums[0], self._sums[1])

    @property
    def notes(self) -> list[Note]:
        """The newest notes."""
        return list(self._notes)


@dataclass(frozen=True)
class ProcessPace:
    """The pace of a process, as in its heartbeat."""

    rank: int
    host: str
    stage: int
    notes: Sequence[Note]
    link: float | None = None
    """Seconds that the store took to answer."""


@dataclass(frozen=True)
class Busy:
    """How long a process was busy, in seconds per step of a window."""

    step_seconds: float
    parts: Mapping[str, float]

    @property
    def own(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Straggler:
    """A process that slows the others down, or (`over`) no longer does."""

    rank: int
    host: str
    part: str
    ratio: float
    """Its busy time as a multiple of the median."""
    seconds: float
    """Its busy time above the median, per step."""
    step: int
    over: bool = False


class StragglerDetector:
    """Compares the paces of all processes, window by window."""

    def __init__(self) -> None:
        self.slow: dict[int, Straggler] = {}
        """The current stragglers, by rank."""
        self._done = 0
        """The last step that was compared."""
        self._calm: dict[int, int] = defaultdict(int)
        self._last: deque[Mapping[int, Busy]] = deque(maxlen=COMPARED)
        """How busy each rank was in the last stretches."""

    def compare(self, paces: Iterable[ProcessPace]) -> list[Straggler]:
        """Compare the windows that all have completed since the last call; returns what changed."""
        known, changes = list(paces), list[Straggler]()
        if len(known) < 2:
            return changes
        if any(pace.notes and pace.notes[-1][0] < self._done for pace in known):
            # The run was rolled back and repeats steps.
            self._done = 0
        stretches = {pace.rank: _stretches(pace) for pace in known}
        ends = set[int].intersection(*map(set, stretches.values()))
        for end in sorted(end for end in ends if end > self._done):
            if end != self._done + STRETCH:
                self._last.clear()
            self._done = end
            self._last.append({rank: busy[end] for rank, busy in stretches.items()})
            if len(self._last) == COMPARED:
                changes += self._changes(end, known)
        return changes

    def _changes(self, step: int, paces: Sequence[ProcessPace]) -> list[Straggler]:
        changes = list[Straggler]()
        for pace in paces:
            peers = [other.rank for other in paces if other.stage == pace.stage]
            whole = {rank: _together([one[rank] for one in self._last]) for rank in self._last[0]}
            found = _slow(step, pace, whole, peers)
            times = sum(_slow(step, pace, busy, peers) is not None for busy in self._last)
            if found is None or times < MOST:
                found = _slow_link(step, pace, paces, whole)
            before = self.slow.get(pace.rank)
            self._calm[pace.rank] = 0 if found is not None else self._calm[pace.rank] + 1
            if before is None and found is not None:
                self.slow[pace.rank] = found
                changes.append(found)
            elif before is not None and self._calm[pace.rank] >= CALM:
                del self.slow[pace.rank]
                changes.append(replace(before, ratio=1.0, seconds=0.0, step=step, over=True))
        return changes


def _together(busy: Sequence[Busy]) -> Busy:
    """The mean of some windows."""
    parts = {name: statistics.fmean(one.parts[name] for one in busy) for name in PARTS}
    return Busy(statistics.fmean(one.step_seconds for one in busy), parts)


def _stretches(pace: ProcessPace) -> dict[int, Busy]:
    """How busy a process was in each window of its notes, by the window's last step."""
    found = {}
    for before, after in zip(pace.notes, pace.notes[1:], strict=False):
        if after[0] == before[0] + STRETCH:
            whole, *parts = (
                (late - early) / STRETCH for early, late in zip(before[1:], after[1:], strict=True)
            )
            found[int(after[0])] = Busy(whole, dict(zip(PARTS, parts, strict=True)))
    return found


def _slow(
    step: int, pace: ProcessPace, busy: Mapping[int, Busy], peers: Sequence[int]
) -> Straggler | None:
    """Whether a process is busy for much longer than its peers."""
    if len(peers) < 2:
        return None
    own = busy[pace.rank]
    # Of two, the faster one is the norm.
    median = statistics.median_low(busy[peer].own for peer in peers)
    excess = own.own - median
    if own.own < SLOWER * median or excess < MATTERS * own.step_seconds or median <= 0:
        return None
    over = {
        name: seconds - statistics.median_low(busy[peer].parts[name] for peer in peers)
        for name, seconds in own.parts.items()
    }
    part = max(over, key=lambda name: over[name])
    return Straggler(pace.rank, pace.host, part, own.own / median, excess, step)


def _slow_link(
    step: int, pace: ProcessPace, paces: Sequence[ProcessPace], busy: Mapping[int, Busy]
) -> Straggler | None:
    """Whether all processes wait for each other while the store answers this one late."""
    others = [other.link for other in paces if other.rank != pace.rank and other.link is not None]
    if pace.link is None or len(others) < 2:
        return None
    median = statistics.median(others)
    if pace.link < max(SLOW_LINK * median, _LEAST_LINK):
        return None
    waiting = [one.step_seconds - one.own for one in busy.values()]
    if statistics.median(waiting) < (SLOWER - 1) * busy[pace.rank].step_seconds:
        return None
    ratio = pace.link / max(median, 1e-6)
    return Straggler(pace.rank, pace.host, "link", ratio, pace.link, step)
