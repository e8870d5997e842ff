"""The stream of batches, from any step on."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.units import Progress
from gristmill.config.resolve import BatchRamp, RampStep
from gristmill.config.schema import DataConfig
from gristmill.data.build import OrderSpec, build_stream
from gristmill.data.dataset import DatasetSplit, Mixture
from gristmill.data.intact import TokenFileWatch
from gristmill.data.loader import (
    READ_AHEAD,
    Batch,
    DocumentRules,
    Loader,
    make_batch,
    validation_batches,
    window_shares,
)
from gristmill.data.megatron_order import RowTable
from gristmill.data.stream import OpenTokenSet
from gristmill.tokens.format import TokenSetInfo

SEQUENCE = 8
ORDERS = ["shuffled", "random", "sequential", "megatron"]


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

    @property
    def document_starts(self) -> np.ndarray:
        return np.arange(0, self.length, 25)

    @property
    def info(self) -> TokenSetInfo:
        return TokenSetInfo("test", "uint16", self.length, 40, None, None, None, "0123")


def make_split(reader: Numbers, begin: int, end: int) -> DatasetSplit:
    starts = reader.document_starts
    rows = RowTable(starts, np.full(len(starts), 25, np.int32))
    source = OpenTokenSet("numbers", reader, None, TokenFileWatch(()), rows)  # type: ignore[arg-type]
    return DatasetSplit(source, range(begin, end), range(begin // 25, end // 25))


def make_loader(
    *,
    micro_batch: int = 2,
    accumulate: int = 3,
    order: str = "shuffled",
    reader: Numbers | None = None,
    rank: int = 0,
    ranks: int = 1,
    sets: int = 1,
    ramp: BatchRamp | None = None,
) -> Loader:
    reader = reader or Numbers()
    parts = tuple(make_split(reader, 100 * number, len(reader)) for number in range(1, sets + 1))
    paths = tuple(map(str, range(sets)))
    config = DataConfig.model_validate({"paths": paths, "order": order})
    stream = build_stream(config, Mixture(parts), OrderSpec(SEQUENCE, 7, 400, None))
    return Loader(stream, micro_batch, accumulate, rank=rank, ranks=ranks, ramp=ramp)


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
    batch = make_batch(np.arange(18, dtype=np.uint16).reshape(2, 9))
    assert batch.tokens_BT.tolist() == [list(range(8)), list(range(9, 17))]
    assert batch.targets_BT.tolist() == [list(range(1, 9)), list(range(10, 18))]
    assert batch.loss_weights_BT is batch.positions_BT is batch.documents_BT is None
    assert (batch.samples, batch.tokens, batch.loss_tokens) == (2, 16, 16.0)
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.tokens_BT.is_contiguous() and batch.targets_BT.is_contiguous()


def test_a_batch_moves_whole() -> None:
    weights = torch.ones(1, 2)
    batch = Batch(torch.zeros(1, 2), torch.ones(1, 2), weights, 2.0, weights, weights)
    batch = batch.to(torch.device("meta"))
    assert batch.positions_BT is not None and batch.positions_BT.device.type == "meta"
    assert batch.documents_BT is not None and batch.documents_BT.device.type == "meta"
    assert {batch.tokens_BT.device.type, batch.targets_BT.device.type} == {"meta"}
    assert batch.loss_weights_BT is not None and batch.loss_weights_BT.device.type == "meta"
    assert batch.loss_tokens == 2.0


def test_a_step_is_accumulate_micro_batches() -> None:
    step = make_loader(micro_batch=2, accumulate=3).step_batches(0)
    assert [tuple(batch.tokens_BT.shape) for batch in step] == [(2, SEQUENCE)] * 3
    for batch in step:
        assert (batch.targets_BT - batch.tokens_BT).unique().tolist() == [1]


def test_rules_give_positions_documents_and_weights() -> None:
    ids = np.array([[5, 9, 7, 9, 9, 4]])
    rules = DocumentRules("ids", attention=True, positions=True, unweighted=True, end_of_text=9)
    batch = make_batch(ids, rules=rules)
    assert batch.positions_BT is not None and batch.positions_BT.tolist() == [[0, 1, 0, 1, 0]]
    assert batch.documents_BT is not None and batch.documents_BT.tolist() == [[0, 0, 1, 1, 2]]
    assert batch.loss_weights_BT is not None and batch.loss_weights_BT.tolist() == [[1, 0, 1, 0, 0]]
    assert batch.loss_tokens == 2.0


@pytest.mark.parametrize("order", ORDERS)
def test_documents_come_from_the_files_and_not_from_the_ids(order: str) -> None:
    loader = make_loader(order=order, micro_batch=6, accumulate=1)
    rules = DocumentRules("files", attention=True, positions=True)
    (batch,) = replace(loader, rules=rules).step_batches(0)
    assert batch.documents_BT is not None and batch.positions_BT is not None
    for tokens, documents in zip(batch.tokens_BT, batch.documents_BT, strict=True):
        # Documents have 25 tokens, so tokens of one document have the same number div 25.
        changes = (tokens[1:] // 25 != tokens[:-1] // 25).int()
        assert (documents[1:] - documents[:-1]).tolist() == changes.tolist()
    assert (batch.positions_BT[:, 0] == 0).all()


@settings(deadline=None)
@given(
    first=st.integers(0, 500),
    micro_batch=st.integers(1, 5),
    accumulate=st.integers(1, 5),
    order=st.sampled_from(ORDERS),
)
def test_micro_batches_only_divide_the_batch(
    first: int, micro_batch: int, accumulate: int, order: str
) -> None:
    divided = make_loader(micro_batch=micro_batch, accumulate=accumulate, order=order)
    whole = make_loader(micro_batch=micro_batch * accumulate, accumulate=1, order=order)
    assert rows(divided.step_batches(first)) == rows(whole.step_batches(first))


# ------------------------------------------------------------------ the stream


@pytest.mark.parametrize("order", ORDERS)
def test_the_stream_goes_on_from_any_step(order: str) -> None:
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
    stream = make_loader(order="shuffled", micro_batch=1, accumulate=1, reader=reader).starting_at(
        Progress()
    )
    next(stream)
    deadline = time.monotonic() + 60
    while reader.reads < READ_AHEAD + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.15)
    assert reader.reads == READ_AHEAD + 2
    stream.close()  # type: ignore[attr-defined]


# ------------------------------------------------------------------ ranks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sets", [1, 3])
def test_no_sample_is_lost_or_repeated_when_the_ranks_change(order: str, sets: int) -> None:
    """The same global batch of 8 on 1, 2, 4 and again 1 process, 5 steps each."""
    alone = make_loader(order=order, sets=sets, micro_batch=8, accumulate=1)
    expected = [rows(alone.step_batches(8 * step)) for step in range(20)]
    found, progress = [], Progress()
    for ranks, accumulate in ((1, 1), (2, 2), (4, 1), (1, 4)):
        micro_batch = 8 // ranks // accumulate
        loaders = [
            make_loader(
                order=order,
                sets=sets,
                micro_batch=micro_batch,
                accumulate=accumulate,
                rank=rank,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]
        streams = [loader.starting_at(progress) for loader in loaders]
        for _ in range(5):
            steps = [next(stream) for stream in streams]
            # Micro-batch by micro-batch, the ranks' shares side by side.
            found.append([row for shares in zip(*steps, strict=True) for row in rows(list(shares))])
            progress = progress.after(samples=8, tokens=8 * SEQUENCE)
        for stream in streams:
            stream.close()
    assert found == expected


@pytest.mark.parametrize("order", ORDERS)
def test_the_ranks_of_a_step_share_nothing(order: str) -> None:
    loaders = [make_loader(order=order, rank=rank, ranks=4) for rank in range(4)]
    assert {loader.batch for loader in loaders} == {24}
    shares = [rows(loader.step_batches(48)) for loader in loaders]
    whole = rows(make_loader(order=order, micro_batch=24, accumulate=1).step_batches(48))
    assert sorted(row for share in shares for row in share) == sorted(whole)


@settings(deadline=None, max_examples=40)
@given(
    order=st.sampled_from(ORDERS),
    sets=st.integers(1, 3),
    calls=st.lists(st.integers(0, 1500), min_size=1, max_size=5),
)
def test_a_step_does_not_depend_on_what_was_read_before(
    order: str, sets: int, calls: list[int]
) -> None:
    used = make_loader(order=order, sets=sets)
    for first in calls:
        fresh = make_loader(order=order, sets=sets)
        assert rows(used.step_batches(first)) == rows(fresh.step_batches(first))


# ------------------------------------------------------------------ validation


def test_validation_is_the_same_every_time_and_however_it_is_divided() -> None:
    part = make_split(Numbers(), 500, 1000)

    def read(batch: int) -> list[list[int]]:
        batches = validation_batches(Mixture((part,)), sequence=SEQUENCE, windows=10, batch=batch)
        return rows(list(batches))

    first = read(4)
    assert len(first) == 10
    assert first == read(4) == read(3) == read(100)
    tokens = [token for row in first for token in row]
    assert len(set(tokens)) == len(tokens)
    assert min(tokens) == 500 and max(tokens) < 999


def test_the_last_validation_batch_may_be_smaller() -> None:
    part = make_split(Numbers(), 0, 1000)
    batches = validation_batches(Mixture((part,)), sequence=SEQUENCE, windows=10, batch=4)
    assert [batch.samples for batch in batches] == [4, 4, 2]


def test_validation_windows_are_shared_out_by_weight_or_size() -> None:
    parts = (make_split(Numbers(), 0, 1000), make_split(Numbers(), 500, 1000))
    assert window_shares(Mixture(parts), SEQUENCE, 30) == [20, 10]
    assert window_shares(Mixture(parts, (1.0, 9.0)), SEQUENCE, 20) == [2, 18]
    assert window_shares(Mixture(parts, (1.0, 9999.0)), SEQUENCE, 20) == [1, 20]
    mixture = Mixture(parts, (1.0, 2.0))
    batches = validation_batches(mixture, sequence=SEQUENCE, windows=30, batch=8)
    assert [batch.samples for batch in batches] == [8, 2, 8, 8, 4]


def test_validation_keeps_documents_apart_too() -> None:
    mixture = Mixture((make_split(Numbers(), 0, 1000),))
    rules = DocumentRules("files", attention=True, positions=True)
    (batch,) = validation_batches(mixture, sequence=60, windows=2, batch=2, rules=rules)
    assert batch.documents_BT is not None
    assert batch.documents_BT[0].tolist() == [0] * 25 + [1] * 25 + [2] * 10


# ------------------------------------------------------------------ a batch that grows

GROWING = BatchRamp((RampStep(0, 4), RampStep(10, 8), RampStep(20, 12)))
"""Steps at samples 0, 4, 8, 12, 20, 32, ...; two edges lie inside a step or at its end."""


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_step_takes_the_batch_of_its_first_sample(micro_batch: int) -> None:
    accumulate = 12 // micro_batch
    loader = make_loader(micro_batch=micro_batch, accumulate=accumulate, ramp=GROWING)
    stream = loader.starting_at(Progress())
    steps = list(itertools.islice(stream, 6))
    stream.close()
    assert [sum(batch.samples for batch in step) for step in steps] == [4, 4, 4, 8, 12, 12]
    assert {batch.samples for step in steps for batch in step} == {micro_batch}
    constant = make_loader(micro_batch=44, accumulate=1).step_batches(0)
    assert [row for step in steps for row in rows(step)] == rows(constant)


@pytest.mark.parametrize(("steps", "samples"), [(2, 8), (3, 12), (4, 20), (5, 32)])
def test_a_growing_stream_begins_anywhere(steps: int, samples: int) -> None:
    loader = make_loader(micro_batch=4, accumulate=3, ramp=GROWING)
    whole = take(loader, 8)
    stream = loader.starting_at(Progress(steps, samples, samples * SEQUENCE))
    rest = [rows(step) for step in itertools.islice(stream, 8 - steps)]
    stream.close()
    assert rest == whole[steps:]


def test_ranks_divide_every_stage() -> None:
    for first in (0, 12, 20):
        whole = rows(make_loader(micro_batch=4, accumulate=3, ramp=GROWING).step_batches(first))
        shares = [
            make_loader(micro_batch=1, accumulate=3, rank=rank, ranks=4, ramp=GROWING)
            .step_batches(first)
            for rank in range(4)
        ]  # fmt: skip
        assert {len(share) for share in shares} == {len(whole) // 4}
        together = [rows([batch])[0] for parts in zip(*shares, strict=True) for batch in parts]
        assert together == whole


def test_a_stage_that_cannot_be_divided_is_our_mistake() -> None:
    with pytest.raises(AssertionError):
        make_loader(micro_batch=3, accumulate=4, ramp=GROWING)
    with pytest.raises(AssertionError):
        make_loader(micro_batch=4, accumulate=4, ramp=GROWING)
