"""Thinning: few points, nothing lost that a reader would miss."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.report.plots import FINER, LIMIT, buckets, plotted
from gristmill.report.thinning import Curves


def plot_of(losses: list[float], *, limit: int = LIMIT, block: int = 7) -> dict[str, Any]:
    """The plot of some losses, added a few at a time."""
    curves = Curves(FINER * limit)
    rows = np.array([[loss, np.nan] for loss in losses]).reshape(-1, 2)
    places = np.array([[i + 1, (i + 1) * 10, i] for i in range(len(losses))], float).reshape(-1, 3)
    for begin in range(0, len(rows), block):
        curves.add(["loss", "mfu"], rows[begin : begin + block], places[begin : begin + block])
    assert curves.count == len(losses)
    return plotted(curves, ["loss", "mfu"], limit=limit)


@given(count=st.integers(0, 5000), limit=st.integers(1, 300))
def test_buckets_cover_everything_once_and_evenly(count: int, limit: int) -> None:
    parts = buckets(count, limit=limit)
    assert len(parts) == min(count, limit)
    assert [index for part in parts for index in part] == list(range(count))
    sizes = {len(part) for part in parts}
    assert not parts or max(sizes) - min(sizes) <= 1


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50), st.integers(1, 99)
)
def test_thinned_curves_keep_extremes_and_the_end(
    losses: list[float], limit: int, block: int
) -> None:
    plot = plot_of(losses, limit=limit, block=block)
    curve = plot["curves"]["loss"]
    assert len(plot["step"]) == len(curve["mean"]) <= limit
    assert plot["step"][-1] == len(losses)
    assert plot["tokens"][-1] == 10 * len(losses)
    assert all(before < after for before, after in pairwise(plot["step"]))
    low = [v for v in curve["low"] or curve["mean"] if v is not None]
    high = [v for v in curve["high"] or curve["mean"] if v is not None]
    assert math.isclose(min(low), min(losses), rel_tol=1e-5, abs_tol=1e-37)
    assert math.isclose(max(high), max(losses), rel_tol=1e-5, abs_tol=1e-37)


def test_means_ignore_what_is_not_finite_and_leave_gaps() -> None:
    losses = [1.0, math.nan, math.inf, math.nan, 4.0, 6.0]
    plot = plot_of(losses, limit=3)
    assert plot["curves"]["loss"]["mean"] == [1.0, None, 5.0]
    assert plot["curves"]["loss"]["high"] == [1.0, None, 6.0]
    assert plot["seconds"] == [1.0, 3.0, 5.0]


def test_few_records_have_no_band_and_absent_quantities_no_curve() -> None:
    plot = plot_of([3.0, 2.0])
    assert list(plot["curves"]) == ["loss"]
    assert plot["curves"]["loss"]["mean"] == [3.0, 2.0]
    assert plot["curves"]["loss"]["low"] is None


def test_no_records_give_an_empty_plot() -> None:
    plot = plot_of([])
    assert plot["step"] == []
    assert plot["curves"] == {}


def test_buckets_of_a_long_run_are_of_nearly_equal_size() -> None:
    plot = plot_of([float(i) for i in range(10_000)], limit=10, block=64)
    lengths = [after - before for before, after in pairwise([0, *plot["step"]])]
    assert len(lengths) == 10 and sum(lengths) == 10_000
    assert max(lengths) <= 1.3 * min(lengths)
    curve = plot["curves"]["loss"]
    begins = [0, *plot["step"][:-1]]
    for begin, end, low, mean, high in zip(
        begins, plot["step"], curve["low"], curve["mean"], curve["high"], strict=True
    ):
        assert (low, high) == (begin, end - 1)
        assert math.isclose(mean, (begin + end - 1) / 2, rel_tol=1e-5)
