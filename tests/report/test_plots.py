"""Thinning: few points, nothing lost that a reader would miss."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gristmill.report.plots import buckets, make_plot
from gristmill.track.metrics import StepRecord

STEP = StepRecord(
    step=0,
    samples=0,
    tokens=0,
    time=100.0,
    loss=1.0,
    lr=1e-3,
    grad_norm=1.0,
    tokens_per_second=1.0,
    step_seconds=1.0,
    tflops=1.0,
    tflops_causal=1.0,
)


def steps(losses: list[float]) -> list[StepRecord]:
    return [
        replace(STEP, step=i + 1, tokens=(i + 1) * 10, time=100.0 + i, loss=loss)
        for i, loss in enumerate(losses)
    ]


@given(count=st.integers(0, 5000), limit=st.integers(1, 300))
def test_buckets_cover_everything_once_and_evenly(count: int, limit: int) -> None:
    parts = buckets(count, limit=limit)
    assert len(parts) == min(count, limit)
    assert [index for part in parts for index in part] == list(range(count))
    sizes = {len(part) for part in parts}
    assert not parts or max(sizes) - min(sizes) <= 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 50))
def test_thinned_curves_keep_extremes_and_the_end(losses: list[float], limit: int) -> None:
    plot = make_plot(steps(losses), names=["loss"], start=100.0, limit=limit)
    curve = plot["curves"]["loss"]
    assert len(plot["step"]) == len(curve["mean"]) <= limit
    assert plot["step"][-1] == len(losses)
    assert plot["tokens"][-1] == 10 * len(losses)
    assert all(before < after for before, after in pairwise(plot["step"]))
    low = [v for v in curve["low"] or curve["mean"] if v is not None]
    high = [v for v in curve["high"] or curve["mean"] if v is not None]
    assert math.isclose(min(low), min(losses), rel_tol=1e-5)
    assert math.isclose(max(high), max(losses), rel_tol=1e-5)


def test_means_ignore_what_is_not_finite_and_leave_gaps() -> None:
    losses = [1.0, math.nan, math.inf, math.nan, 4.0, 6.0]
    plot = make_plot(steps(losses), names=["loss"], start=100.0, limit=3)
    assert plot["curves"]["loss"]["mean"] == [1.0, None, 5.0]
    assert plot["curves"]["loss"]["high"] == [1.0, None, 6.0]
    assert plot["seconds"] == [1.0, 3.0, 5.0]


def test_few_records_have_no_band_and_absent_quantities_no_curve() -> None:
    plot = make_plot(steps([3.0, 2.0]), names=["loss", "mfu"], start=100.0)
    assert list(plot["curves"]) == ["loss"]
    assert plot["curves"]["loss"]["mean"] == [3.0, 2.0]
    assert plot["curves"]["loss"]["low"] is None


def test_no_records_give_an_empty_plot() -> None:
    plot = make_plot(list[StepRecord](), names=["loss"], start=0.0)
    assert plot["step"] == []
    assert plot["curves"] == {}
