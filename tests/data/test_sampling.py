"""Which tokens form sample i."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data.sampling import (
    RandomWindows,
    SequentialWindows,
    ShuffledWindows,
    Windows,
    spread_samples,
)

KINDS = (ShuffledWindows, RandomWindows, SequentialWindows)
ORDERS = st.sampled_from(KINDS)
SEEDS = st.integers(0, 2**63 - 1)


@st.composite
def texts(draw: st.DrawFn) -> tuple[range, int]:
    """A tokens of text and a sequence length of which at least one window fits."""
    sequence = draw(st.integers(1, 20))
    begin = draw(st.integers(0, 100))
    return range(begin, begin + sequence + 1 + draw(st.integers(0, 300))), sequence


def epoch(index: ShuffledWindows, number: int) -> np.ndarray:
    return index.starts(np.arange(index.epoch) + number * index.epoch)


# ------------------------------------------------------------------ shuffled


@given(text=texts(), seed=SEEDS, number=st.integers(0, 10**6))
def test_an_epoch_visits_every_window_once(text: tuple[range, int], seed: int, number: int) -> None:
    tokens, sequence = text
    starts = np.sort(epoch(ShuffledWindows(tokens, sequence, seed), number))
    assert (np.diff(starts) == sequence).all()
    assert starts[0] >= tokens.start
    assert starts[-1] + sequence + 1 <= tokens.stop
    read = len(starts) * sequence
    assert len(tokens) - 1 - read < 2 * sequence


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    tokens = range(10_001)
    orders = [
        tuple(epoch(ShuffledWindows(tokens, 10, seed), number))
        for seed in (0, 1, 2**62)
        for number in (0, 1, 2)
    ]
    assert len(set(orders)) == len(orders)
    assert all(list(order) != sorted(order) for order in orders)


def test_epochs_cut_the_text_at_different_offsets() -> None:
    index = ShuffledWindows(range(1001), 50, 3)
    offsets = {int(epoch(index, number).min()) for number in range(40)}
    assert len(offsets) > 20
    assert offsets <= set(range(51))


def test_all_tokens_are_targets_over_the_epochs() -> None:
    index = ShuffledWindows(range(5, 120), 16, 9)
    seen = {
        int(start) + place
        for number in range(200)
        for start in epoch(index, number)
        for place in range(1, 17)
    }
    assert seen == set(range(6, 120))


# ------------------------------------------------------------------ random


@given(text=texts(), seed=SEEDS, first=st.integers(0, 2**40))
def test_random_windows_lie_inside_the_stretch(
    text: tuple[range, int], seed: int, first: int
) -> None:
    tokens, sequence = text
    starts = RandomWindows(tokens, sequence, seed).starts(np.arange(first, first + 50))
    assert starts.dtype == np.int64
    assert (starts >= tokens.start).all()
    assert (starts + sequence + 1 <= tokens.stop).all()


@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_random_windows_start_everywhere_alike(seed: int) -> None:
    starts = RandomWindows(range(7, 67), 10, seed).starts(np.arange(20_000))
    counts = np.bincount(starts - 7, minlength=50)
    assert len(counts) == 50
    assert counts.min() > 300 and counts.max() < 500
    steps = np.bincount((np.diff(starts) % 50), minlength=50)
    assert steps.min() > 300 and steps.max() < 500


def test_every_seed_has_its_own_random_windows() -> None:
    tokens, samples = range(10**6), np.arange(200)
    rows = {tuple(RandomWindows(tokens, 8, seed).starts(samples)) for seed in range(20)}
    assert len(rows) == 20


# ------------------------------------------------------------------ sequential


def test_sequential_windows_follow_one_another_and_begin_again() -> None:
    index = SequentialWindows(range(100, 131), 10, 0)
    assert index.epoch == 3
    assert index.starts(np.arange(7)).tolist() == [100, 110, 120, 100, 110, 120, 100]
    assert SequentialWindows(range(100, 130), 10, 0).epoch == 2


# ------------------------------------------------------------------ all


@given(
    order=ORDERS,
    text=texts(),
    seed=SEEDS,
    calls=st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=8), min_size=1, max_size=6),
)
def test_the_index_is_pure(
    order: type[Windows], text: tuple[range, int], seed: int, calls: list[list[int]]
) -> None:
    tokens, sequence = text
    whole = order(tokens, sequence, seed).starts(np.arange(501))
    used = order(tokens, sequence, seed)
    for samples in calls:
        assert (used.starts(np.array(samples)) == whole[samples]).all()


@given(
    order=ORDERS,
    text=texts(),
    first=st.integers(0, 200),
    batch=st.integers(1, 6),
    times=st.integers(1, 6),
)
def test_samples_do_not_depend_on_how_they_are_grouped(
    order: type[Windows], text: tuple[range, int], first: int, batch: int, times: int
) -> None:
    tokens, sequence = text
    index = order(tokens, sequence, 1)
    whole = index.starts(np.arange(first, first + batch * times))
    grouped = [
        index.starts(np.arange(first + batch * time, first + batch * (time + 1)))
        for time in range(times)
    ]
    assert np.concatenate(grouped).tolist() == whole.tolist()


@pytest.mark.parametrize("order", KINDS)
def test_a_text_of_one_window_is_enough(order: type[Windows]) -> None:
    index = order(range(40, 57), 16, 0)
    assert index.starts(np.arange(5)).tolist() == [40] * 5
    assert index.epoch == 1


@pytest.mark.parametrize("order", KINDS)
def test_a_window_is_one_piece_of_one_token_more(order: type[Windows]) -> None:
    pieces = order(range(40, 140), 16, 0).spans(np.arange(5))
    assert pieces.counts.tolist() == [17] * 5
    assert pieces.begins.tolist() == order(range(40, 140), 16, 0).starts(np.arange(5)).tolist()


# ------------------------------------------------------------------ validation


@given(text=texts(), windows=st.integers(1, 50))
def test_validation_windows_do_not_overlap_and_spread_over_the_text(
    text: tuple[range, int], windows: int
) -> None:
    tokens, sequence = text
    index = SequentialWindows(tokens, sequence, seed=0)
    fitting = (len(tokens) - 1) // sequence
    assert index.epoch == fitting
    starts = index.starts(spread_samples(fitting, most=windows))
    assert len(starts) == min(windows, fitting)
    assert starts[0] == tokens.start
    assert (np.diff(starts) >= sequence).all()
    assert starts[-1] + sequence + 1 <= tokens.stop
    largest_gap = np.diff(np.append(starts, tokens.start + fitting * sequence)).max()
    assert largest_gap <= sequence * -(-fitting // len(starts))
