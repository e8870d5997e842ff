"""Mixtures whose weights change over a run, and sources with a maximum number of epochs.

    stages      web 0.8, code 0.2        | gradually to web 0.4, code 0.2, math 0.4 |
    segments    |------------------------|-----------------|------------------------|--> after the
                                               code is used up here                      run

Sample i falls on place i p of a circle of M = 2^63 places, with p about M / 1.618 and odd, and each
source owns an arc. Within a segment the length of every arc is a linear function of i in whole
numbers: constant, or changing by the same number of places for each sample. So the source of a
sample is arithmetic on i alone, and the number of that source's samples before i is a count of the
points below a line, a floor sum, which takes logarithmic time. Only the segments are stored,
however long the run, and any range of samples contains the sources very nearly in proportion.

When a source reaches its limit, the others divide its arc in proportion to theirs: a new segment
begins with the first sample that the source cannot provide, which is found by bisection with exact
counts. In a gradual stage the others then change linearly to the weights that they have at its end
without that source.

After the last stage its weights remain, so that batches can be read ahead. If every source is used
up by then, limits no longer apply.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from gristmill.base.errors import Exit, UserError
from gristmill.config.mixture import Stage
from gristmill.data.blend import floor_sum

CIRCLE = 1 << 63
STEP = 0x4F1BBCDCBFA53E0B
"""The step between samples on the circle: odd, and near the golden section."""
_FOREVER = 1 << 62
"""More samples than any run has."""
_WORD = 1 << 64

Shares = Sequence[Fraction]


@dataclass(frozen=True)
class Segment:
    """Consecutive samples over which arcs change linearly, or not at all."""

    begin: int
    arcs: tuple[int, ...]
    """The places that each source owns at the first sample; they add up to the circle."""
    slopes: tuple[int, ...]
    """How many places each source gains with every sample; they add up to 0."""

    @classmethod
    def between(cls, begin: int, samples: int, first: Shares, last: Shares) -> Segment:
        """A segment that changes from one set of shares to another over so many samples."""
        arcs, ends = _arcs(first), _arcs(last)
        # Rounded towards zero, so that no arc becomes negative.
        slopes = [
            abs(end - arc) // samples * (1 if end > arc else -1)
            for arc, end in zip(arcs, ends, strict=True)
        ]
        while over := sum(slopes):
            sign = 1 if over > 0 else -1
            steepest = max(range(len(slopes)), key=lambda source: sign * slopes[source])
            slopes[steepest] -= sign * min(abs(over), abs(slopes[steepest]))
        return cls(begin, tuple(arcs), tuple(slopes))

    def counts(self, end: int) -> list[int]:
        """Samples of each source in the segment before sample `end`."""
        count, start = end - self.begin, STEP * self.begin
        whole = floor_sum(count, CIRCLE, STEP, start)
        # Place x lies below a border if floor((x - border) / M) is one less than floor(x / M).
        below = [
            whole - floor_sum(count, CIRCLE, STEP - slope, start - border)
            for border, slope in zip(*self._borders, strict=True)
        ]
        return [after - before for before, after in pairwise([0, *below, count])]

    @property
    def _borders(self) -> tuple[list[int], list[int]]:
        """Where the arcs of all sources but the last end, and how far that moves with a sample."""
        return list(accumulate(self.arcs[:-1])), list(accumulate(self.slopes[:-1]))

    def sources(self, begin: int, end: int) -> np.ndarray:
        """The sources of samples `begin` to `end` (exclusive), which lie in the segment."""
        samples = np.arange(begin, end, dtype=np.uint64)
        # Modulo 2^64, which the circle divides.
        places = samples * np.uint64(STEP) & np.uint64(CIRCLE - 1)
        since, found = samples - np.uint64(self.begin), np.zeros(end - begin, np.int64)
        for border, slope in zip(*self._borders, strict=True):
            found += places >= np.uint64(border) + since * np.uint64(slope % _WORD)
        return found

    def shares_at(self, sample: int) -> list[Fraction]:
        since = sample - self.begin
        return [
            Fraction(arc + slope * since, CIRCLE)
            for arc, slope in zip(self.arcs, self.slopes, strict=True)
        ]


def _arcs(shares: Shares) -> list[int]:
    """Shares that add up to one, in places; the largest gets the rounding error."""
    arcs = [int(share * CIRCLE) for share in shares]
    arcs[max(range(len(arcs)), key=lambda source: arcs[source])] += CIRCLE - sum(arcs)
    return arcs


@dataclass(frozen=True)
class Staged:
    """A blend by segments."""

    segments: tuple[Segment, ...]
    before: tuple[tuple[int, ...], ...]
    """Samples of each source before every segment."""

    def sets(self, begin: int, end: int) -> np.ndarray:
        found, first, last = [], self.segment_of(begin), self.segment_of(end - 1)
        for segment, after in pairwise([*self.segments[first : last + 1], None]):
            assert segment is not None
            stop = end if after is None else after.begin
            found.append(segment.sources(begin, stop))
            begin = stop
        return np.concatenate(found)

    def taken(self, begin: int) -> np.ndarray:
        number = self.segment_of(begin)
        counts = self.segments[number].counts(begin)
        return np.array(self.before[number], np.int64) + counts

    def first_beyond(self, source: int, count: int, *, end: int) -> int | None:
        """The first sample of a source that comes after `count` others of it; None if there is
        none before `end`."""
        if self.taken(end)[source] <= count:
            return None
        found = bisect.bisect_right(range(end), count, key=lambda i: int(self.taken(i)[source]))
        return found - 1

    def segment_of(self, sample: int) -> int:
        """The number of the segment in which a sample lies."""
        return bisect.bisect_right(self.segments, sample, key=lambda one: one.begin) - 1


@dataclass(frozen=True)
class RunDry:
    """A source that has reached its limit."""

    source: int
    sample: int
    """The first sample that it could not provide."""
    stage: int


@dataclass(frozen=True)
class MixturePlan:
    """The mixture of a run, worked out from its stages and limits."""

    blend: Staged
    stages: tuple[Stage, ...]
    dry: tuple[RunDry, ...]
    """Sources that run dry before the end of the run, in this order."""

    @property
    def end(self) -> int:
        return self.stages[-1].end


def plan_mixture(
    stages: Sequence[Stage], limits: Sequence[int | None], *, names: Sequence[str]
) -> MixturePlan:
    """Plan the stages, with at most `limits` samples of each source. Refuses stages in which every
    source is used up."""
    planner = _Planner(limits, names)
    for number, stage in enumerate(stages):
        before = stages[number - 1].weights if stage.gradual else stage.weights
        planner.follow(number, stage.begin, stage.end, _exact(before), _exact(stage.weights))
    dry, last = tuple(planner.dry), stages[-1]
    planner.follow(None, last.end, _FOREVER, _exact(last.weights), _exact(last.weights))
    blend = Staged(tuple(planner.segments), tuple(planner.before))
    return MixturePlan(blend, tuple(stages), dry)


class _Planner:
    def __init__(self, limits: Sequence[int | None], names: Sequence[str]) -> None:
        self.limits, self.names = list(limits), names
        self.taken = [0] * len(limits)
        self.segments = list[Segment]()
        self.before = list[tuple[int, ...]]()
        self.dry = list[RunDry]()

    def follow(self, stage: int | None, begin: int, end: int, first: Shares, last: Shares) -> None:
        """Plan the samples `begin` to `end`, whose shares change from `first` to `last`. A stage of
        None is the time after the run."""
        while begin < end:
            left, aim = self._left(first), self._left(last)
            if left is None and aim is None:
                if stage is not None:
                    raise self._nothing_left(stage, begin)
                self.limits, first = [None] * len(self.limits), last
                self.dry.clear()
                continue
            # If all sources of one end are used up, the shares of the other apply throughout.
            left, aim = left or aim, aim or left
            assert left is not None and aim is not None
            segment = Segment.between(begin, end - begin, left, aim)
            stop, source = self._first_unmet(segment, end)
            self.segments.append(segment)
            self.before.append(tuple(self.taken))
            counted = zip(self.taken, segment.counts(stop), strict=True)
            self.taken = [taken + count for taken, count in counted]
            if source is not None:
                self.dry.append(RunDry(source, stop, -1 if stage is None else stage))
            first, begin = segment.shares_at(stop), stop

    def _left(self, shares: Shares) -> list[Fraction] | None:
        """The shares of sources that are not used up; None if all are."""
        used_up = {one.source for one in self.dry}
        kept = [Fraction(0) if number in used_up else one for number, one in enumerate(shares)]
        total = sum(kept)
        return [share / total for share in kept] if total else None

    def _first_unmet(self, segment: Segment, end: int) -> tuple[int, int | None]:
        """The first sample that a source cannot provide, and the source; `end` if all can."""
        stop, dry, used_up = end, None, {one.source for one in self.dry}
        whole = segment.counts(end)
        for source, limit in enumerate(self.limits):
            if limit is None or source in used_up or self.taken[source] + whole[source] <= limit:
                continue
            room = limit - self.taken[source]
            samples = range(segment.begin, end)

            def given(sample: int, source: int = source) -> int:
                return segment.counts(sample)[source]

            unmet = segment.begin + bisect.bisect_right(samples, room, key=given) - 1
            if unmet < stop:
                stop, dry = unmet, source
        return stop, dry

    def _nothing_left(self, stage: int, sample: int) -> UserError:
        read = [self.names[one.source] for one in self.dry]
        return UserError(
            f"from sample {sample} on, in stage {stage + 1}, nothing is left to read: "
            f"{and_list(read)} {'has' if len(read) == 1 else 'have'} been read as often as "
            "data.max_epochs allows",
            where="data.max_epochs",
            remedy="raise it, prepare more text, or shorten train.until",
            exit=Exit.DATA,
        )


def _exact(weights: Sequence[float]) -> list[Fraction]:
    """Weights as fractions that add up to exactly one."""
    fractions = [Fraction(weight) for weight in weights]
    return [weight / sum(fractions) for weight in fractions]


def and_list(words: Sequence[str]) -> str:
    """Words joined as in a sentence: "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# ------------------------------------------------------------------ comparing and describing plans


def plan_identity(plan: MixturePlan) -> list[list[Any]]:
    """Plain numbers that determine the order of the samples."""
    return [[one.begin, list(one.arcs), list(one.slopes)] for one in plan.blend.segments]


def same_until(one: Any, other: Any, samples: int) -> bool:
    """Whether two plans, given by `plan_identity`, agree on the first samples."""
    if one is None or other is None:
        return samples == 0 or one is other
    return [part for part in one if part[0] < samples] == [
        part for part in other if part[0] < samples
    ]


def describe_plan(
    plan: MixturePlan, names: Sequence[str], epochs: Sequence[int], *, step_of: Callable[[int], int]
) -> list[str]:
    """One line per stage with the samples that it reads. `epochs`: samples of each source in one
    epoch; `step_of`: the step that trains on a sample."""
    lines = []
    for number, stage in enumerate(plan.stages):
        before, after = plan.blend.taken(stage.begin), plan.blend.taken(stage.end)
        parts = [
            f"{name} {count:,}"
            for name, count in zip(names, (after - before).tolist(), strict=True)
            if count
        ]
        named = f"stage {number + 1} of {len(plan.stages)}" if len(plan.stages) > 1 else "the run"
        first, last = step_of(stage.begin), step_of(stage.end - 1)
        how = ", gradually" if stage.gradual else ""
        lines.append(f"{named}, steps {first} to {last}{how}: {', '.join(parts)} samples")
    total = plan.blend.taken(plan.end).tolist()
    read = [
        f"{name} {count / epoch:.3g} times"
        for name, count, epoch in zip(names, total, epochs, strict=True)
        if count
    ]
    return [*lines, f"by the end of the run it reads {', '.join(read)}"]


def plan_warnings(
    plan: MixturePlan,
    names: Sequence[str],
    epochs: Sequence[int],
    limits: Sequence[int | None],
    *,
    step_of: Callable[[int], int],
    since: int = 0,
) -> list[str]:
    """Warnings about sources that run dry or, without a limit, are repeated, from sample `since`
    on."""
    found = list[tuple[int, str]]()
    for number, one in enumerate(plan.dry):
        used_up = {other.source for other in plan.dry[: number + 1]}
        shares = plan.blend.segments[plan.blend.segment_of(one.sample)].arcs
        heirs = [names[n] for n, arc in enumerate(shares) if arc and n not in used_up]
        limit, later = limits[one.source], plan.stages[one.stage + 1 :]
        assert limit is not None
        text = (
            f"{names[one.source]} runs dry at step {step_of(one.sample)} (sample {one.sample}), "
            f"before the end of stage {one.stage + 1}: it has then been read "
            f"{limit / epochs[one.source]:.3g} times, and its share goes to {and_list(heirs)}"
        )
        missing = [
            str(one.stage + 2 + n) for n, stage in enumerate(later) if stage.weights[one.source]
        ]
        if missing:
            text += f"; stage {and_list(missing)} is without it too"
        found.append((one.sample, text))
    for source, (limit, epoch) in enumerate(zip(limits, epochs, strict=True)):
        again = None
        if limit is None:
            again = plan.blend.first_beyond(source, epoch, end=plan.end)
        if again is not None:
            times = int(plan.blend.taken(plan.end)[source]) / epoch
            found.append(
                (
                    again,
                    f"{names[source]} has been read once by step {step_of(again)} (sample {again}) "
                    f"and repeats from there on: {times:.3g} times by the end of the run; "
                    "data.max_epochs says how often is too often",
                )
            )
    return [text for sample, text in sorted(found) if sample >= since]
