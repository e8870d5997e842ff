"""Slow processes: which one holds the others up, and in which part of a step.

All processes of a run take the same steps, so their steps take the same time; the fast ones wait.
What differs is how long each is busy with its own part. Every process sums that up and notes the
sums whenever it has taken five more steps (`Pace`). The newest notes travel with its heartbeat, so
this costs no message. Rank 0 compares the same steps of all (`StragglerDetector`).

    data       until the batch was there
    compute    forward and backward, until this process's own gradients were computed
    optimizer  from the gradients of all to the end of the step
    link       the time in which the store answers, which holds the heartbeats

A process is slow if in the last 30 steps it was busy for a fifth longer than the median, and so in
most stretches of five, and if that much matters in a whole step. It is named with the part in which
it loses most. Stages of a pipeline have different work, so a process is compared with those of its
own stage.

Given up: inside a pass that exchanges weights or activations (fsdp, tensor, context and pipeline
parallelism), waiting for others counts as computing, so all processes look alike.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

STRETCH = 5
"""Steps between two notes."""
COMPARED = 6
"""Stretches that are compared together."""
MOST = 4
"""A process must be slow in so many of them: one that was held up once is not slow."""
CALM = 10
"""After so many stretches in which it was not, a process is no longer slow."""
KEPT = 24
"""Notes that travel with a heartbeat: of fast steps there are many between two of them."""
SLOWER = 1.2
"""How much longer than the median a slow process is busy."""
MATTERS = 0.05
"""The least excess of a slow process, as a share of a whole step."""
SLOW_LINK = 5.0
"""How much longer than the median the store takes to answer over a slow link."""
_LEAST_LINK = 0.005
"""Seconds below which an answer of the store is no sign of anything."""
PARTS = ("data", "compute", "optimizer")
Note = tuple[int, float, float, float, float]
"""A step, and the seconds up to it: in all, and of each part."""


class Pace:
    """How long this process was busy with the parts of its steps."""

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
            # Steps were passed over, or the run went back.
            self._notes.clear()
        self._step = step
        for number, value in enumerate((seconds, data, compute, optimizer)):
            self._sums[number] += value
        if step % STRETCH == 0:
            whole, waited, computed, updated = (round(value, 6) for value in self._sums)
            self._notes.append((step, whole, waited, computed, updated))

    @property
    def waiting(self) -> tuple[float, float]:
        """Seconds of all steps so far, and those in which data was waited for."""
        return (self._sums[0], self._sums[1])

    @property
    def notes(self) -> list[Note]:
        """The newest notes."""
        return list(self._notes)


@dataclass(frozen=True)
class ProcessPace:
    """What a heartbeat says about the pace of a process."""

    rank: int
    host: str
    stage: int
    notes: Sequence[Note]
    link: float | None = None
    """Seconds in which the store answered."""


@dataclass(frozen=True)
class Busy:
    """How long a process was busy, in seconds for each step of a stretch."""

    step_seconds: float
    parts: Mapping[str, float]

    @property
    def own(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Straggler:
    """A process that holds the others up, or (`over`) no longer does."""

    rank: int
    host: str
    part: str
    ratio: float
    """How long it is busy, compared with the median."""
    seconds: float
    """How much longer, for each step."""
    step: int
    over: bool = False


class StragglerDetector:
    """Compares the paces of all processes, stretch by stretch."""

    def __init__(self) -> None:
        self.slow: dict[int, Straggler] = {}
        """Those that are slow now, by rank."""
        self._done = 0
        """The last step that was compared."""
        self._calm: dict[int, int] = defaultdict(int)
        self._last: deque[Mapping[int, Busy]] = deque(maxlen=COMPARED)
        """How busy each rank was in the last stretches."""

    def compare(self, paces: Iterable[ProcessPace]) -> list[Straggler]:
        """Compare the stretches that all have taken since the last call; returns what changed."""
        known, changes = list(paces), list[Straggler]()
        if len(known) < 2:
            return changes
        if any(pace.notes and pace.notes[-1][0] < self._done for pace in known):
            # The run went back: its steps are taken again.
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
    """The mean of some stretches."""
    parts = {name: statistics.fmean(one.parts[name] for one in busy) for name in PARTS}
    return Busy(statistics.fmean(one.step_seconds for one in busy), parts)


def _stretches(pace: ProcessPace) -> dict[int, Busy]:
    """How busy a process was in each stretch that its notes tell of, by the stretch's last step."""
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
    # Of two, the faster one tells what is normal.
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
    """Whether all wait for each other while the store answers this process late."""
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
