"""Curves that grow: what was drawn stays true, and nothing is lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.report.thinning import Buckets, Curves

VALUES = st.lists(
    st.one_of(st.floats(-1e6, 1e6, width=32), st.sampled_from([np.nan, np.inf, -np.inf])),
    min_size=1,
    max_size=400,
)


def grown(curves: Curves, values: list[float]) -> None:
    numbers = np.arange(curves.count + 1, curves.count + len(values) + 1, dtype=np.float64)
    places = np.stack([numbers, 10 * numbers, numbers / 2], axis=1)
    curves.add(["loss"], np.array(values, dtype=np.float64)[:, None], places)


def same(one: Buckets, other: Buckets) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


def first(buckets: Buckets, count: int) -> Buckets:
    places, *values = vars(buckets).values()
    return Buckets(places[:count], *(array[:, :count] for array in values))


@given(VALUES, st.integers(1, 20), st.integers(1, 30), st.lists(st.integers(1, 60), max_size=8))
def test_full_buckets_never_change_but_for_another_size(
    values: list[float], most: int, points: int, sizes: list[int]
) -> None:
    curves, begin, drawn = Curves(most), 0, None
    for take in [*sizes, len(values)]:
        piece = values[begin : begin + take]
        begin += len(piece)
        grown(curves, piece)
        size = curves.size_for(points)
        assert size & (size - 1) == 0 and -(-curves.count // size) <= points
        now = curves.thinned(["loss"], size=size)
        if drawn is not None and drawn[0] == size:
            full = drawn[2] // size
            assert same(first(now, full), first(drawn[1], full))
            # What is sent from the last one on makes the same as all.
            rest = curves.thinned(["loss"], size=size, first=max(0, full - 1))
            assert same(rest, Buckets(*_from(now, max(0, full - 1))))
        drawn = (size, now, curves.count)
    assert curves.count == len(values) and curves.used <= curves.most


def _from(buckets: Buckets, begin: int) -> list[np.ndarray]:  # type: ignore[type-arg]
    places, *values = vars(buckets).values()
    return [places[begin:], *(array[:, begin:] for array in values)]


@given(VALUES, st.integers(1, 40), st.integers(1, 50))
def test_buckets_are_what_their_records_are(values: list[float], most: int, at_a_time: int) -> None:
    curves = Curves(most)
    for begin in range(0, len(values), at_a_time):
        grown(curves, values[begin : begin + at_a_time])
    kept, size = curves.stored(["loss"]), curves.size
    for number in range(curves.used):
        part = np.array(values[number * size : (number + 1) * size])
        finite = part[np.isfinite(part)]
        assert kept.counts_CB[0, number] == len(finite)
        assert kept.places_BP[number, 0] == min(len(values), (number + 1) * size)
        if len(finite):
            assert np.isclose(kept.means_CB[0, number], finite.mean(), rtol=1e-9, atol=1e-6)
            assert kept.lows_CB[0, number] == np.float32(finite.min())
            assert kept.highs_CB[0, number] == np.float32(finite.max())
        else:
            assert np.isnan(kept.means_CB[0, number])


def test_a_name_that_comes_later_has_gaps_before() -> None:
    curves = Curves(8)
    grown(curves, [1.0] * 20)
    places = np.array([[21.0, 210.0, 10.5], [22.0, 220.0, 11.0]])
    curves.add(["loss", "loss_scale"], np.array([[2.0, 64.0], [2.0, 32.0]]), places)
    assert curves.names == ["loss", "loss_scale"]
    means = curves.stored(["loss_scale"]).means_CB[0]
    assert np.isnan(means[:-1]).all() and means[-1] == 48.0
    grown(curves, [3.0] * 40)
    assert np.nanmax(curves.stored(["loss_scale"]).highs_CB[0]) == 64.0


def test_memory_is_bounded_and_small_runs_take_little() -> None:
    small, long = Curves(1536), Curves(1536)
    grown(small, [1.0] * 10)
    assert small.nbytes < 4096
    for _ in range(200):
        grown(long, [1.0] * 1000)
    assert long.nbytes == 1536 * (3 * 8 + 20)
