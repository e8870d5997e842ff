"""Curves for the report: the records of a run, thinned to what a screen can show.

A run has up to millions of steps and a chart about a thousand pixels. Consecutive records are put
into at most `LIMIT` buckets of nearly equal size; of each bucket a curve keeps

    mean   of the finite values, null if there is none: the line breaks there
    low    the smallest         } only if buckets hold more than one record,
    high   the largest          } so that a single spike is still visible

at the place (step, tokens, seconds) of the bucket's last record. Seconds are wall clock since the
run's first record, pauses between a stop and a resume included: the records do not say which gaps
were pauses, and guessing would falsify comparisons. Smoothing is left to the page, where the reader
can change it. Values keep six significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from gristmill.track.metrics import StepRecord, ValidationRecord

LIMIT = 1000
STEP_CURVES = (
    *("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory_bytes", "loss_scale"),
    *("sent_bytes", "mixing", "sync_wait"),
)
VALIDATION_CURVES = ("loss", "perplexity", "bits_per_byte", "consensus_distance")


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
) -> dict[str, Any]:
    """The named fields of the records as thinned curves, as the page reads them; a field without
    any finite value gives no curve."""
    groups = buckets(len(records), limit=limit)
    places = [records[group[-1]] for group in groups]
    curves = {}
    for name in names:
        values = [getattr(record, name) for record in records]
        finite = [
            [value for i in group if (value := values[i]) is not None and math.isfinite(value)]
            for group in groups
        ]
        if any(finite):
            thinned = len(groups) < len(records)
            curves[name] = {
                "mean": [_rounded(math.fsum(g) / len(g)) if g else None for g in finite],
                "low": [_rounded(min(g)) if g else None for g in finite] if thinned else None,
                "high": [_rounded(max(g)) if g else None for g in finite] if thinned else None,
            }
    return {
        "step": [record.step for record in places],
        "tokens": [record.tokens for record in places],
        "seconds": [_rounded(record.time - start) for record in places],
        "curves": curves,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
