"""How several sets are mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.data.blend import (
    Blend,
    Greedy,
    Rotation,
    choose,
    greedy_by_weight,
    greedy_exhaustive,
    proportional,
)

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


def counted(blend: Blend, samples: int) -> list[list[int]]:
    """Set and number of each sample, by counting from the first."""
    taken: dict[int, int] = {}
    result = []
    for number in blend.sets(0, samples).tolist():
        result.append([number, taken.get(number, 0)])
        taken[number] = taken.get(number, 0) + 1
    return result


# ------------------------------------------------------------------ the rotation


@settings(deadline=None)
@given(
    places=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    begin=st.integers(0, 400),
    count=st.integers(1, 60),
)
def test_numbers_within_a_set_are_counted_without_going_through_all(
    places: list[int], begin: int, count: int
) -> None:
    rotation = Rotation(tuple(places))
    choice = choose(rotation, np.arange(begin, begin + count))
    found = np.stack([choice.sets, choice.samples], axis=1).tolist()
    assert found == counted(rotation, begin + count)[begin:]


@settings(deadline=None)
@given(places=st.lists(st.integers(1, 50), min_size=1, max_size=6), epoch=st.integers(0, 10**6))
def test_a_round_holds_every_sample_of_every_set_once(places: list[int], epoch: int) -> None:
    rotation = Rotation(tuple(places))
    begin = epoch * rotation.round
    choice = choose(rotation, np.arange(begin, begin + rotation.round))
    for number, size in enumerate(places):
        samples = np.sort(choice.samples[choice.sets == number])
        assert samples.tolist() == list(range(epoch * size, (epoch + 1) * size))


@settings(deadline=None)
@given(weights=WEIGHTS, begin=st.integers(0, 2**50))
def test_every_stretch_holds_the_sets_in_proportion(weights: list[float], begin: int) -> None:
    shares = np.array(weights) / sum(weights)
    sets = proportional(weights).sets(begin, begin + 1000)
    counts = np.bincount(sets, minlength=len(weights))
    assert np.abs(counts - 1000 * shares).max() < 8


def test_far_into_a_run_the_count_is_still_exact() -> None:
    blend = proportional([0.9, 0.07, 0.03])
    begin = 10**14
    before, after = blend.taken(begin), blend.taken(begin + 5000)
    found = np.bincount(blend.sets(begin, begin + 5000), minlength=3)
    assert before.sum() == begin
    assert (after - before).tolist() == found.tolist()


def test_samples_need_not_be_neighbours() -> None:
    blend = proportional([3, 2, 1])
    whole = choose(blend, np.arange(100, 164))
    chosen = np.array([3, 40, 41, 7, 63])
    some = choose(blend, 100 + chosen)
    assert some.sets.tolist() == whole.sets[chosen].tolist()
    assert some.samples.tolist() == whole.samples[chosen].tolist()


# ------------------------------------------------------------------ Megatron's way


def plain_greedy(
    weights: list[float], size: int, *, fused: bool, limits: list[int] | None = None
) -> list[int]:
    """The rule as it is written, one sample after the other. Python rounds a quotient of integers
    once, so a weight as such a quotient gives what a fused multiply-add does."""
    taken, result = [0] * len(weights), []
    quotients = [weight.as_integer_ratio() for weight in weights]
    for sample in range(size):
        step = max(sample, 1)
        if fused:
            pairs = zip(quotients, taken, strict=True)
            deficits = [(above * step - t * below) / below for (above, below), t in pairs]
        else:
            deficits = [w * float(step) - float(t) for w, t in zip(weights, taken, strict=True)]
        if limits is not None:
            for number, limit in enumerate(limits):
                if taken[number] >= limit:
                    deficits[number] = -np.inf
        best = deficits.index(max(deficits))
        result.append(best)
        taken[best] += 1
    return result


@settings(deadline=None, max_examples=60)
@given(weights=WEIGHTS, size=st.integers(1, 600), fused=st.booleans())
def test_lanes_follow_the_rule_of_one_sample_after_the_other(
    weights: list[float], size: int, fused: bool
) -> None:
    shares = [weight / sum(weights) for weight in weights]
    found = greedy_by_weight(shares, size=size, fused=fused)
    assert found.tolist() == plain_greedy(shares, size, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weights", [[0.5, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4], [0.05] * 20], ids=str)
def test_ties_are_broken_alike_far_into_the_run(weights: list[float], fused: bool) -> None:
    found = greedy_by_weight(weights, size=20_000, fused=fused)
    assert found.tolist() == plain_greedy(weights, 20_000, fused=fused)


def test_rounding_once_or_twice_gives_two_orders() -> None:
    once, twice = (greedy_by_weight([0.5, 0.3, 0.2], size=100, fused=f) for f in (True, False))
    assert once.tolist() != twice.tolist()


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 120), min_size=1, max_size=6), fused=st.booleans())
def test_the_exhaustive_blend_leaves_spent_sets_out(sizes: list[int], fused: bool) -> None:
    found = greedy_exhaustive(sizes, fused=fused)
    assert np.bincount(found, minlength=len(sizes)).tolist() == sizes
    weights = [size / sum(sizes) for size in sizes]
    assert found.tolist() == plain_greedy(weights, sum(sizes), fused=fused, limits=sizes)


@settings(deadline=None)
@given(begin=st.integers(0, 30_000), count=st.integers(1, 300))
def test_a_greedy_blend_is_counted_from_any_sample_and_begins_again(begin: int, count: int) -> None:
    choices = greedy_by_weight([0.6, 0.3, 0.1], size=9000, fused=False)
    blend = Greedy(choices, sets=3)
    choice = choose(blend, np.arange(begin, begin + count))
    found = np.stack([choice.sets, choice.samples], axis=1).tolist()
    assert found == counted(blend, begin + count)[begin:]
