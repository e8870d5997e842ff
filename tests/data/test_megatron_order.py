"""Megatron's order against arrays that megatron-core made, and against its own definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.data.blend import Greedy, choose, greedy_by_weight, greedy_exhaustive
from gristmill.data.megatron_order import (
    MegatronOrder,
    RowTable,
    build_indices,
    plan_epochs,
    sample_index,
    split_rows,
)

FROZEN = json.loads((Path(__file__).parent / "megatron_core_0_16_1.json").read_text())


def order_of(
    lengths: list[int], *, rows: range, sequence: int, seed: int, samples: int | None
) -> MegatronOrder:
    array = np.array(lengths, np.int32)
    epochs = plan_epochs(int(array[list(rows)].sum()), sequence=sequence, samples=samples)
    table = RowTable(np.cumsum(array) - array, array)
    indices = build_indices(array, epochs, rows=rows, sequence=sequence, seed=seed)
    return MegatronOrder(table, **indices)


@pytest.mark.parametrize("case", FROZEN["orders"], ids=lambda case: str(case["samples"]))
def test_the_indices_are_those_of_the_package(case: dict[str, Any]) -> None:
    shares = [float(share) for share in case["split"].split(",")]
    train, held, _ = split_rows(len(case["lengths"]), shares=shares)
    assert [held.start, held.stop] == case["validation_rows"]
    wanted = {name: case[name] for name in ("sequence", "seed", "samples")}
    order = order_of(case["lengths"], rows=train, **wanted)
    assert order.documents.dtype == order.samples.dtype == np.int32
    assert order.shuffle.dtype == np.uint32
    assert order.documents.tolist() == case["document_index"]
    assert order.samples.tolist() == case["sample_index"]
    assert order.shuffle.tolist() == case["shuffle_index"]
    pieces = order.spans(np.array([0]))
    # Every token of these sets is the number of its row.
    row_of_token = np.repeat(np.arange(len(case["lengths"])), case["lengths"])
    tokens = [
        row_of_token[begin : begin + count]
        for begin, count in zip(pieces.begins, pieces.counts, strict=True)
    ]
    assert np.concatenate(tokens)[:-1].tolist() == case["first_sample_rows"]


@pytest.mark.parametrize("case", FROZEN["blends"], ids=lambda case: str(case.get("weights")))
def test_the_blends_are_those_of_the_package(case: dict[str, Any]) -> None:
    fused = case["machine"] == "aarch64"
    if "sizes" in case:
        choices, sets = greedy_exhaustive(case["sizes"], fused=fused), len(case["sizes"])
    else:
        sets = len(case["weights"])
        choices = greedy_by_weight(case["weights"], size=len(case["sets"]), fused=fused)
    choice = choose(Greedy(choices, sets=sets), np.arange(len(choices)))
    assert choice.sets.tolist() == case["sets"]
    assert choice.samples.tolist() == case["samples"]


# ------------------------------------------------------------------ the definition


def plain_sample_index(
    lengths: np.ndarray, documents: np.ndarray, *, sequence: int, samples: int
) -> list[list[int]]:
    """Row and offset of every sequence-th token, by writing the whole text down."""
    places = [
        [place, offset]
        for place, row in enumerate(documents.tolist())
        for offset in range(lengths[row])
    ]
    return [[0, 0], *(places[number * sequence] for number in range(1, samples + 1))]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda n: sum(n) > 1),
    sequence=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
    epochs=st.integers(1, 4),
)
def test_the_sample_index_marks_every_sequence_th_token(
    lengths: list[int], sequence: int, seed: int, epochs: int
) -> None:
    array = np.array(lengths, np.int32)
    documents = np.random.RandomState(seed).randint(0, len(array), epochs * len(array))
    tokens = int(array[documents].sum())
    samples = max(0, tokens - 1) // sequence
    found = sample_index(array, documents, sequence=sequence, samples=samples)
    assert found.tolist() == plain_sample_index(
        array, documents, sequence=sequence, samples=samples
    )


def test_the_sample_index_is_the_same_across_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(0, 20, 1000).astype(np.int32)
    documents = draw.permutation(1000).astype(np.int32)
    samples = (int(lengths.sum()) - 1) // 16
    whole = sample_index(lengths, documents, sequence=16, samples=samples)
    for block in (1, 7, 64, 999):
        monkeypatch.setattr("gristmill.data.megatron_order._BLOCK", block)
        part = sample_index(lengths, documents, sequence=16, samples=samples)
        assert np.array_equal(whole, part)


def test_long_rows_make_the_index_wide() -> None:
    lengths = np.array([2**31 + 10, 5])
    found = sample_index(lengths, np.array([1, 0]), sequence=2**30, samples=2)
    assert found.dtype == np.int64
    assert found.tolist() == [[0, 0], [1, 2**30 - 5], [1, 2**31 - 5]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=30).filter(lambda n: sum(n) > 40),
    sequence=st.integers(1, 30),
    samples=st.integers(1, 200),
    seed=st.integers(0, 2**32 - 1),
)
def test_samples_cover_the_shuffled_text_once(
    lengths: list[int], sequence: int, samples: int, seed: int
) -> None:
    rows = range(len(lengths))
    order = order_of(lengths, rows=rows, sequence=sequence, seed=seed, samples=samples)
    assert order.epoch >= samples
    pieces = order.spans(np.arange(order.epoch))
    assert (pieces.counts > 0).all()
    ids = np.concatenate(
        [
            np.arange(begin, begin + count)
            for begin, count in zip(pieces.begins, pieces.counts, strict=True)
        ]
    ).reshape(order.epoch, sequence + 1)
    in_text_order = ids[np.argsort(order.shuffle)]
    assert (in_text_order[1:, 0] == in_text_order[:-1, -1]).all()
    array, documents = np.array(lengths), order.documents
    begins = np.cumsum(array) - array
    text = np.concatenate([np.arange(begins[row], begins[row] + array[row]) for row in documents])
    read = np.concatenate([in_text_order[:, :-1].reshape(-1), in_text_order[-1, -1:]])
    assert np.array_equal(read, text[: len(read)])
    assert len(text) - len(read) < sequence


@given(tokens=st.integers(2, 5000), sequence=st.integers(1, 300), samples=st.integers(1, 2000))
def test_epochs_are_the_fewest_that_suffice(tokens: int, sequence: int, samples: int) -> None:
    epochs = plan_epochs(tokens, sequence=sequence, samples=samples)
    assert epochs.number * tokens >= samples * sequence + 1
    assert epochs.number == 1 or (epochs.number - 1) * tokens < samples * sequence + 1
    assert epochs.samples >= samples


def test_a_run_longer_than_the_order_begins_it_again() -> None:
    order = order_of([30] * 4, rows=range(4), sequence=10, seed=1, samples=5)
    first, again = (order.spans(np.arange(3) + begin) for begin in (0, order.epoch))
    assert first.begins.tolist() == again.begins.tolist()


def test_asking_for_more_samples_changes_the_order() -> None:
    few, many = (
        order_of([30] * 40, rows=range(40), sequence=10, seed=1, samples=samples)
        for samples in (100, 130)
    )
    assert few.spans(np.arange(5)).begins.tolist() != many.spans(np.arange(5)).begins.tolist()


@pytest.mark.parametrize(
    ("rows", "shares", "cuts"),
    [
        (79_000, [949, 50, 1], [0, 74971, 78921, 79000]),
        (500, [949, 50, 1], [0, 474, 500, 500]),
        (10, [99, 1], [0, 10, 10, 10]),
        (5, [1, 1], [0, 2, 5, 5]),
    ],
)
def test_rows_are_divided_as_in_megatron(rows: int, shares: list[float], cuts: list[int]) -> None:
    parts = split_rows(rows, shares=shares)
    assert [parts[0].start, *(part.stop for part in parts)] == cuts


@pytest.mark.parametrize(
    ("rows", "shares", "cuts"),
    [
        (79_000, [949, 50, 1], [0, 74971, 78921, 79000]),
        (500, [949, 50, 1], [0, 475, 500, 500]),
        # 2 + 2 + 2 rows of 5: one too many, which every boundary gives up.
        (5, [1, 1, 1], [0, 1, 3, 5]),
    ],
)
def test_rows_are_divided_as_in_megatron_deepspeed(
    rows: int, shares: list[float], cuts: list[int]
) -> None:
    parts = split_rows(rows, shares=shares, order="megatron-deepspeed")
    assert [parts[0].start, *(part.stop for part in parts)] == cuts


@pytest.mark.parametrize(
    ("needed", "orders"),
    [(79, ("megatron", "megatron-deepspeed")), (80, ("megatron-deepspeed",)),
     (94, ("megatron-deepspeed",)), (95, ())],
)  # fmt: skip
def test_when_the_last_epoch_is_separate(needed: int, orders: tuple[str, ...]) -> None:
    """An epoch has 100 samples of 10 tokens here, and two are before the last one."""
    found = [
        order
        for order in ("megatron", "megatron-deepspeed")
        if plan_epochs(1001, sequence=10, samples=200 + needed, order=order).last_separate
    ]
    assert tuple(found) == orders
