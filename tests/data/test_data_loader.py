"""The stream of batches, from any step on."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.units import Progress
from gristmill.data.dataset import Part
from gristmill.data.loader import READ_AHEAD, Batch, Loader, make_batch, validation_batches
from gristmill.data.sampling import Stretch, build_index

SEQUENCE = 8


@dataclass
class Numbers:
    """A token set in memory whose every token is its position; it fails after some reads."""

    length: int = 1000
    fails_after: int | None = None
    reads: int = 0

    def __len__(self) -> int:
        return self.length

    def read(self, start: int, count: int) -> np.ndarray:
        if self.reads == self.fails_after:
            raise OSError("the disk is gone")
        self.reads += 1
        assert 0 <= start <= start + count <= self.length
        return np.arange(start, start + count, dtype=np.uint16)


def make_loader(
    *,
    micro_batch: int = 2,
    accumulate: int = 3,
    order: Literal["shuffled", "random"] = "shuffled",
    reader: Numbers | None = None,
) -> Loader:
    reader = reader or Numbers()
    stretch = Stretch(100, len(reader))
    index = build_index(order, stretch, sequence=SEQUENCE, seed=7)
    part = Part(reader, stretch)  # type: ignore[arg-type]
    return Loader(part, index, SEQUENCE, micro_batch, accumulate)


def rows(step: list[Batch]) -> list[list[int]]:
    return [row for batch in step for row in batch.tokens_BT.tolist()]


def take(loader: Loader, steps: int, *, start: int = 0) -> list[list[list[int]]]:
    samples = start * loader.batch
    stream = loader.starting_at(Progress(start, samples, samples * SEQUENCE))
    taken = [rows(step) for step in itertools.islice(stream, steps)]
    stream.close()  # type: ignore[attr-defined]
    return taken


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "loader"]


# ------------------------------------------------------------------ batches


def test_targets_are_the_inputs_shifted_by_one() -> None:
    batch = make_batch(np.arange(18, dtype=np.int64).reshape(2, 9))
    assert batch.tokens_BT.tolist() == [list(range(8)), list(range(9, 17))]
    assert batch.targets_BT.tolist() == [list(range(1, 9)), list(range(10, 18))]
    assert batch.weights_BT is None
    assert (batch.samples, batch.tokens, batch.counted) == (2, 16, 16.0)
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.tokens_BT.is_contiguous() and batch.targets_BT.is_contiguous()


def test_a_batch_moves_whole() -> None:
    weights = torch.ones(1, 2)
    batch = Batch(torch.zeros(1, 2), torch.ones(1, 2), weights, 2.0).to(torch.device("meta"))
    assert {batch.tokens_BT.device.type, batch.targets_BT.device.type} == {"meta"}
    assert batch.weights_BT is not None and batch.weights_BT.device.type == "meta"
    assert batch.counted == 2.0


def test_a_step_is_accumulate_micro_batches() -> None:
    step = make_loader(micro_batch=2, accumulate=3).step_batches(0)
    assert [tuple(batch.tokens_BT.shape) for batch in step] == [(2, SEQUENCE)] * 3
    for batch in step:
        assert (batch.targets_BT - batch.tokens_BT).unique().tolist() == [1]


@settings(deadline=None)
@given(
    first=st.integers(0, 500),
    micro_batch=st.integers(1, 5),
    accumulate=st.integers(1, 5),
    order=st.sampled_from(["shuffled", "random"]),
)
def test_micro_batches_only_divide_the_batch(
    first: int, micro_batch: int, accumulate: int, order: Literal["shuffled", "random"]
) -> None:
    divided = make_loader(micro_batch=micro_batch, accumulate=accumulate, order=order)
    whole = make_loader(micro_batch=micro_batch * accumulate, accumulate=1, order=order)
    assert rows(divided.step_batches(first)) == rows(whole.step_batches(first))


# ------------------------------------------------------------------ the stream


@pytest.mark.parametrize("order", ["shuffled", "random"])
def test_the_stream_goes_on_from_any_step(order: Literal["shuffled", "random"]) -> None:
    loader = make_loader(order=order)
    whole = take(loader, 60)
    for start in (0, 1, 17, 18, 19, 37, 55):
        assert take(loader, 5, start=start) == whole[start : start + 5], start


def test_the_stream_holds_every_sample_once_an_epoch() -> None:
    loader = make_loader(micro_batch=2, accumulate=1)
    windows = (900 - 1) // SEQUENCE - 1
    starts = [row[0] for step in take(loader, windows) for row in step]
    for number in range(2):
        visited = sorted(starts[number * windows : (number + 1) * windows])
        assert len(visited) == windows
        assert set(np.diff(visited)) == {SEQUENCE}
    assert min(starts) >= 100


def test_a_batch_divided_otherwise_is_the_same_stream() -> None:
    assert take(make_loader(micro_batch=4, accumulate=3), 9) == take(
        make_loader(micro_batch=12, accumulate=1), 9
    )


def test_closing_the_stream_ends_its_thread() -> None:
    before = len(loader_threads())
    stream = make_loader().starting_at(Progress())
    next(stream)
    assert len(loader_threads()) == before + 1
    stream.close()  # type: ignore[attr-defined]
    assert len(loader_threads()) == before


def test_a_stream_that_was_never_read_starts_no_thread() -> None:
    before = len(loader_threads())
    stream = make_loader().starting_at(Progress())
    assert len(loader_threads()) == before
    stream.close()  # type: ignore[attr-defined]


def test_an_error_in_the_consumer_ends_the_thread() -> None:
    before = len(loader_threads())

    def consume() -> None:
        for _ in make_loader().starting_at(Progress()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        consume()
    assert len(loader_threads()) == before


def test_an_error_while_reading_reaches_the_consumer_after_the_good_steps() -> None:
    before = len(loader_threads())
    loader = make_loader(micro_batch=2, accumulate=1, reader=Numbers(fails_after=7))
    stream = loader.starting_at(Progress())
    seen = [rows(next(stream)) for _ in range(3)]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)
    assert seen == take(make_loader(micro_batch=2, accumulate=1), 3)
    assert len(loader_threads()) == before


def test_reading_ahead_is_bounded() -> None:
    reader = Numbers()
    stream = make_loader(micro_batch=1, accumulate=1, reader=reader).starting_at(Progress())
    next(stream)
    deadline = time.monotonic() + 5
    while reader.reads < READ_AHEAD + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)
    assert reader.reads == READ_AHEAD + 2
    stream.close()  # type: ignore[attr-defined]


# ------------------------------------------------------------------ validation


def test_validation_is_the_same_every_time_and_however_it_is_divided() -> None:
    part = Part(Numbers(), Stretch(500, 1000))  # type: ignore[arg-type]

    def read(batch: int) -> list[list[int]]:
        batches = validation_batches(part, sequence=SEQUENCE, windows=10, batch=batch)
        return rows(list(batches))

    first = read(4)
    assert len(first) == 10
    assert first == read(4) == read(3) == read(100)
    tokens = [token for row in first for token in row]
    assert len(set(tokens)) == len(tokens)
    assert min(tokens) == 500 and max(tokens) < 999


def test_the_last_validation_batch_may_be_smaller() -> None:
    part = Part(Numbers(), Stretch(0, 1000))  # type: ignore[arg-type]
    batches = validation_batches(part, sequence=SEQUENCE, windows=10, batch=4)
    assert [batch.samples for batch in batches] == [4, 4, 2]
