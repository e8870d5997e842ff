"""The data loader: batches in sample order, read ahead by a thread.

    samples n ... n + batch - 1       of the step that begins at sample n

    micro-batch 0                     micro-batch 1                    accumulate times
    rank 0 | rank 1 | rank 2 ...      rank 0 | rank 1 | rank 2 ...     micro_batch samples each

The loader keeps no state: `starting_at(progress)` computes the stream, and a ramped batch size,
from the number of samples already consumed. While the batch size ramps up, a step has fewer
micro-batches, never smaller ones. Which samples form a step does not depend on how it is divided
over ranks and micro-batches, so a run may resume with a different number of either. Reading ahead
hides the time that reading takes. On a GPU, batches are written to pinned memory, so that the copy
to the device overlaps with computation (torch reuses that memory for the next batch).
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from gristmill.base.units import Progress
from gristmill.config.resolve import BatchRamp
from gristmill.data.dataset import Mixture
from gristmill.data.sampling import spread_samples
from gristmill.data.stream import SampleStream

READ_AHEAD = 4


@dataclass(frozen=True)
class Batch:
    """The input of model and loss: B samples of T positions."""

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    loss_weights_BT: torch.Tensor | None
    """The weight of each target in the loss; None if all are 1."""
    loss_tokens: float
    """Sum of the weights, known on the host."""
    positions_BT: torch.Tensor | None = None
    """Position of each token; None if that is its position in the sample."""
    documents_BT: torch.Tensor | None = None
    """Document number of each token, for attention within documents; None if it crosses them."""
    sources_B: torch.Tensor | None = None
    """The source of each sample, where losses are summed by source."""
    source_tokens_K: torch.Tensor | None = None
    """`loss_tokens` of each of K sources, where losses are summed by source."""

    @property
    def samples(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def tokens(self) -> int:
        return self.tokens_BT.numel()

    def sample(self, number: int) -> Batch:
        """A batch of one of the samples; totals such as `loss_tokens` stay those of all samples."""
        of_samples: dict[str, Any] = {
            name: value[number : number + 1]
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor) and name != "source_tokens_K"
        }
        return replace(self, **of_samples)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; returns before the copy is done if the memory is pinned."""
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return replace(self, **moved)


# ------------------------------------------------------------------ documents of a sample
#
# Attention, positions and weights can separate the documents of one sample. `doc_starts` marks
# where a document begins inside a sample:
#
#     tokens      a b c . d e . f         . ends a text
#     doc_starts  0 0 0 0 1 0 0 1
#     documents   0 0 0 0 1 1 1 2         attention stays between equal numbers
#     positions   0 1 2 3 0 1 2 0         restart at each mark
#     weights     1 1 1 0 1 1 0 1         if the token after an end of text is masked from the loss
#
# Marks come from the token files, which know where documents begin, or as in Megatron from the ids:
# after each end-of-text id. A sample that begins inside a document counts positions from its own
# beginning.


@dataclass(frozen=True)
class DocumentRules:
    """How document boundaries inside a sample are treated."""

    doc_starts: Literal["none", "files", "ids"] = "none"
    """Where document starts come from: the token files, end-of-text ids, or not needed."""
    attention: bool = False
    """Attention does not cross a boundary."""
    positions: bool = False
    """Positions restart at a boundary."""
    unweighted: bool = False
    """Targets predicted from an end-of-text id have no weight."""
    end_of_text: int | None = None

    def __post_init__(self) -> None:
        assert self.end_of_text is not None or not (self.unweighted or self.doc_starts == "ids")


JOINED = DocumentRules()


def doc_starts_after(tokens_BT: np.ndarray, *, end_of_text: int) -> np.ndarray:
    """Marks after each end-of-text id."""
    doc_starts = np.zeros(tokens_BT.shape, bool)
    doc_starts[:, 1:] = tokens_BT[:, :-1] == end_of_text
    return doc_starts


def restarted_positions(doc_starts_BT: np.ndarray) -> np.ndarray:
    """The position of each token in its document, or in the part of it inside the sample."""
    places = np.arange(doc_starts_BT.shape[1], dtype=np.int32)
    begins_BT = doc_starts_BT * places
    np.maximum.accumulate(begins_BT, axis=1, out=begins_BT)
    return np.subtract(places, begins_BT, out=begins_BT)


def make_batch(
    ids_BS: np.ndarray,
    *,
    doc_starts_BS: np.ndarray | None = None,
    loss_mask_BS: np.ndarray | None = None,
    sources_B: np.ndarray | None = None,
    sources: int = 0,
    rules: DocumentRules = JOINED,
    pin: bool = False,
) -> Batch:
    """Inputs and targets from samples of T + 1 tokens, and whatever the rules require.
    `sources_B`: which of so many `sources` each is from, if losses are to be summed by source."""
    inputs_BT = ids_BS[:, :-1]
    weights = positions = documents = None
    loss_tokens = float(inputs_BT.size)
    if rules.unweighted:
        weights = _tensor(inputs_BT != rules.end_of_text, torch.float32, pin)
    elif loss_mask_BS is not None:
        weights = _tensor(loss_mask_BS[:, 1:], torch.float32, pin)
    if weights is not None:
        loss_tokens = float(weights.sum())
    doc_starts_BT = None if doc_starts_BS is None else doc_starts_BS[:, :-1]
    if rules.doc_starts == "ids":
        assert rules.end_of_text is not None
        doc_starts_BT = doc_starts_after(inputs_BT, end_of_text=rules.end_of_text)
    if doc_starts_BT is not None and rules.positions:
        positions = _tensor(restarted_positions(doc_starts_BT), torch.int64, pin)
    if doc_starts_BT is not None and rules.attention:
        documents = _tensor(np.cumsum(doc_starts_BT, axis=1, dtype=np.int32), torch.int32, pin)
    of_samples = of_sources = None
    if sources_B is not None:
        counts_B: np.ndarray = np.full(len(ids_BS), inputs_BT.shape[1], np.float64)
        if weights is not None:
            counts_B = weights.numpy().sum(axis=1, dtype=np.float64)
        counts_K = np.bincount(sources_B, counts_B, minlength=sources)
        of_samples = _tensor(sources_B, torch.int64, pin)
        of_sources = _tensor(counts_K, torch.float32, pin)
    return Batch(
        _tensor(inputs_BT, torch.int64, pin),
        _tensor(ids_BS[:, 1:], torch.int64, pin),
        weights,
        loss_tokens,
        positions,
        documents,
        of_samples,
        of_sources,
    )


def _tensor(values: np.ndarray, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """A copy as a tensor of another type."""
    tensor = torch.empty(values.shape, dtype=dtype, pin_memory=pin)
    tensor.numpy()[...] = values
    return tensor


class LoaderEffort:
    """The time that a loader thread has spent so far, in seconds by activity."""

    def __init__(self) -> None:
        self.computing = self.queued = self.blocked = 0.0
        """Running on a core; ready but without a core (where the system reports that); waiting for
        storage."""

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time that this thread spends in the context."""
        began, computed, queued = time.monotonic(), time.thread_time(), _queued_seconds()
        yield
        computing, waited = time.thread_time() - computed, _queued_seconds() - queued
        self.computing += computing
        self.queued += waited
        self.blocked += max(0.0, time.monotonic() - began - computing - waited)

    def as_dict(self) -> dict[str, float]:
        return {name: round(seconds, 6) for name, seconds in vars(self).items()}


def _queued_seconds() -> float:
    """How long this thread was ready to run but had no core; 0 where the system does not report
    it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(frozen=True)
class Loader:
    """The endless stream of training batches, or one rank's shard of it."""

    stream: SampleStream
    micro_batch: int
    accumulate: int
    rules: DocumentRules = JOINED
    rank: int = 0
    ranks: int = 1
    pin: bool = False
    vocab: int | None = None
    """Every id must be below this number; None disables the check."""
    ramp: BatchRamp | None = None
    """The batch-size ramp; None for a constant size."""
    notes_sources: bool = False
    """Whether batches record the source of each sample."""
    effort: LoaderEffort = field(default_factory=LoaderEffort, compare=False)

    def __post_init__(self) -> None:
        if self.ramp is not None:
            assert self.ramp.full == self.batch
            portion = self.micro_batch * self.ranks
            assert all(step.batch % portion == 0 for step in self.ramp.ramp_steps)

    @property
    def batch(self) -> int:
        """Samples in a step at the full batch size, over all ranks."""
        return self.micro_batch * self.accumulate * self.ranks

    def batch_at(self, first_sample: int) -> int:
        """Samples in the step that begins with this sample, over all ranks."""
        return self.batch if self.ramp is None else self.ramp.batch_at(first_sample)

    def step_batches(self, first_sample: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins with this sample."""
        self.stream.check_files()
        end = first_sample + self.batch_at(first_sample)
        step = np.arange(first_sample, end, dtype=np.int64)
        mine = step.reshape(-1, self.ranks, self.micro_batch)[:, self.rank]
        doc_starts = self.rules.doc_starts == "files"
        samples = self.stream.read(mine.reshape(-1), doc_starts=doc_starts, vocab=self.vocab)
        shape = (-1, self.micro_batch, self.stream.sequence + 1)
        sources_B = samples.sources_B if self.notes_sources else None

        def part(values_BS: np.ndarray | None, number: int) -> np.ndarray | None:
            return None if values_BS is None else values_BS.reshape(shape)[number]

        return [
            make_batch(
                ids_BS,
                doc_starts_BS=part(samples.doc_starts_BS, number),
                loss_mask_BS=part(samples.loss_mask_BS, number),
                sources_B=None if sources_B is None else sources_B.reshape(shape[:2])[number],
                sources=len(self.stream.sets),
                rules=self.rules,
                pin=self.pin,
            )
            for number, ids_BS in enumerate(samples.ids_BS.reshape(shape))
        ]

    def starting_at(self, progress: Progress) -> Generator[list[Batch]]:
        """The micro-batches of one step after another, read ahead."""
        ready: queue.Queue[list[Batch] | Exception] = queue.Queue(READ_AHEAD)
        done = threading.Event()

        def offer(item: list[Batch] | Exception) -> None:
            while not done.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    return

        def read(first_sample: int) -> None:
            try:
                while not done.is_set():
                    with self.effort.measured():
                        batches = self.step_batches(first_sample)
                    offer(batches)
                    first_sample += self.batch_at(first_sample)
            except Exception as error:  # handed to the training loop, which raises it
                offer(error)

        reader = threading.Thread(target=read, args=(progress.samples,), name="loader", daemon=True)
        reader.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            done.set()
            while not ready.empty():
                ready.get_nowait()
            reader.join()


# ------------------------------------------------------------------ validation


def validation_batches(
    held: Mixture,
    *,
    sequence: int,
    windows: int,
    batch: int,
    rules: DocumentRules = JOINED,
    vocab: int | None = None,
    pin: bool = False,
) -> Iterator[Batch]:
    """The fixed validation windows, in order: those of the first set first."""
    for split in held.splits:
        split.source.watch.check_all()
    length = sequence + 1
    for split, count in zip(held.splits, window_shares(held, sequence, windows), strict=True):
        index = split.in_order(sequence)
        chosen = spread_samples(index.epoch, most=count)
        for first in range(0, len(chosen), batch):
            spans = index.spans(chosen[first : first + batch])
            doc_starts = rules.doc_starts == "files"
            samples = split.source.read(spans, length=length, doc_starts=doc_starts, vocab=vocab)
            yield make_batch(
                samples.ids_BS,
                doc_starts_BS=samples.doc_starts_BS,
                loss_mask_BS=samples.loss_mask_BS,
                rules=rules,
                pin=pin,
            )


def window_shares(held: Mixture, sequence: int, windows: int) -> list[int]:
    """Windows of each set, by weight or size; at least one of each."""
    if len(held.splits) == 1:
        return [windows]
    fitting = [split.in_order(sequence).epoch for split in held.splits]
    weights: Sequence[float] = held.weights or fitting
    return [max(1, round(windows * weight / sum(weights))) for weight in weights]
