"""Curves for the report: the records of a run, thinned to what a screen can show.

A run has up to millions of steps and a chart about a thousand pixels. Consecutive records are put
into at most `LIMIT` buckets of nearly equal size; of each bucket a curve keeps

    mean   of the finite values, null when there is none: the line breaks there
    low    the least of them    } only when buckets hold more than one record,
    high   the greatest         } so that a single spike is still seen

at the place (step, tokens, seconds) of the bucket's last record. Seconds are wall clock since the
run's first record, pauses between a stop and a resume included: the records do not say which gaps
were pauses, and guessing would falsify comparisons. Smoothing is left to the page, where the reader
can change it. Values keep six significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gristmill.track.metrics import StepRecord, ValidationRecord

LIMIT = 1000
STEP_CURVES = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "loss_scale",
)
VALIDATION_CURVES = ("loss", "perplexity")


@dataclass(frozen=True)
class Curve:
    """One quantity over the buckets of a plot."""

    mean: list[float | None]
    low: list[float | None] | None
    high: list[float | None] | None


@dataclass(frozen=True)
class Plot:
    """Several curves over the same places."""

    step: list[int]
    tokens: list[int]
    seconds: list[float]
    curves: dict[str, Curve]


def buckets(count: int, *, limit: int = LIMIT) -> list[range]:
    """Split `count` records into at most `limit` runs whose sizes differ by one at most."""
    parts = min(count, limit)
    edges = [count * part // parts for part in range(parts + 1)] if parts else [0]
    return [range(first, last) for first, last in pairwise(edges)]


def make_plot(
    records: Sequence[StepRecord] | Sequence[ValidationRecord],
    *,
    names: Sequence[str],
    start: float,
    limit: int = LIMIT,
) -> Plot:
    """Thin the named fields of the records; fields without any finite value give no curve."""
    groups = buckets(len(records), limit=limit)
    places = [records[group[-1]] for group in groups]
    curves = {}
    for name in names:
        values = [_finite(getattr(record, name)) for record in records]
        if any(value is not None for value in values):
            curves[name] = _curve(values, groups)
    return Plot(
        step=[record.step for record in places],
        tokens=[record.tokens for record in places],
        seconds=[_rounded(record.time - start) for record in places],
        curves=curves,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _curve(values: Sequence[float | None], groups: Sequence[range]) -> Curve:
    present = [[v for i in group if (v := values[i]) is not None] for group in groups]
    mean = [_rounded(math.fsum(group) / len(group)) if group else None for group in present]
    if len(groups) == len(values):
        return Curve(mean, None, None)
    return Curve(
        mean,
        low=[_rounded(min(group)) if group else None for group in present],
        high=[_rounded(max(group)) if group else None for group in present],
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
