"""Batches in the order of the samples, read ahead by a thread.

    samples n ... n + batch - 1       of the step that begins at sample n

    micro-batch 0                     micro-batch 1                    accumulate times
    rank 0 | rank 1 | rank 2 ...      rank 0 | rank 1 | rank 2 ...     micro_batch samples each

The loader keeps no state: `starting_at(progress)` computes the stream from the number of samples
already consumed, and so is the batch where it grows: there are then fewer micro-batches at first,
never smaller ones. Which samples a step consists of does not depend on how it is divided over ranks
and micro-batches, so a run may go on with another number of either. Reading ahead hides the time of
gathering; on a GPU batches are written into pinned memory at once, so that the copy to the device
overlaps with computation (torch keeps that memory for the next batch).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.base.units import Progress
from gristmill.config.ramp import BatchRamp
from gristmill.data.dataset import Mixture, Part
from gristmill.data.documents import (
    JOINED,
    DocumentRules,
    document_numbers,
    marks_behind,
    restarted_positions,
)
from gristmill.data.sampling import Pieces, spread_windows
from gristmill.data.stream import Samples, SampleStream, read_pieces

READ_AHEAD = 4


@dataclass(frozen=True)
class Batch:
    """What travels from the loader to the loss: B samples of T positions."""

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    weights_BT: torch.Tensor | None
    """How much each target counts; None if all count one."""
    counted: float
    """Sum of the weights, known without asking the device."""
    positions_BT: torch.Tensor | None = None
    """Where each token stands; None if positions are those in the sample."""
    documents_BT: torch.Tensor | None = None
    """The document of each token, between which there is no attention; None if all see all."""

    @property
    def samples(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def tokens(self) -> int:
        return self.tokens_BT.numel()

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; returns before the copy is done if the memory is pinned."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        def move_any(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else move(tensor)

        return Batch(
            move(self.tokens_BT),
            move(self.targets_BT),
            move_any(self.weights_BT),
            self.counted,
            move_any(self.positions_BT),
            move_any(self.documents_BT),
        )


def make_batch(
    ids_BS: np.ndarray,
    *,
    marks_BS: np.ndarray | None = None,
    rules: DocumentRules = JOINED,
    pin: bool = False,
) -> Batch:
    """Inputs and targets from samples of T + 1 tokens, and what the rules ask for."""
    inputs_BT = ids_BS[:, :-1]
    weights = positions = documents = None
    counted = float(inputs_BT.size)
    if rules.unweighted:
        weights = _tensor(inputs_BT != rules.end_of_text, torch.float32, pin)
        counted = float(weights.sum())
    marks_BT = None if marks_BS is None else marks_BS[:, :-1]
    if rules.marks == "ids":
        assert rules.end_of_text is not None
        marks_BT = marks_behind(inputs_BT, end_of_text=rules.end_of_text)
    if marks_BT is not None and rules.positions:
        positions = _tensor(restarted_positions(marks_BT), torch.int64, pin)
    if marks_BT is not None and rules.attention:
        documents = _tensor(document_numbers(marks_BT), torch.int32, pin)
    return Batch(
        _tensor(inputs_BT, torch.int64, pin),
        _tensor(ids_BS[:, 1:], torch.int64, pin),
        weights,
        counted,
        positions,
        documents,
    )


def _tensor(values: np.ndarray, dtype: torch.dtype, pin: bool) -> torch.Tensor:
    """A tensor of its own, converted while it is copied."""
    tensor = torch.empty(values.shape, dtype=dtype, pin_memory=pin)
    tensor.numpy()[...] = values
    return tensor


@dataclass(frozen=True)
class Loader:
    """The endless stream of training batches, or one rank's share of it."""

    stream: SampleStream
    micro_batch: int
    accumulate: int
    rules: DocumentRules = JOINED
    rank: int = 0
    ranks: int = 1
    pin: bool = False
    ramp: BatchRamp | None = None
    """How the batch grows to its full size; all steps have that if not given."""

    def __post_init__(self) -> None:
        if self.ramp is not None:
            assert self.ramp.full == self.batch
            portion = self.micro_batch * self.ranks
            assert all(step.batch % portion == 0 for step in self.ramp.ramp_steps)

    @property
    def batch(self) -> int:
        """Samples of a step of the full size, over all ranks."""
        return self.micro_batch * self.accumulate * self.ranks

    def batch_at(self, first_sample: int) -> int:
        """Samples of the step that begins with a sample, over all ranks."""
        return self.batch if self.ramp is None else self.ramp.batch_at(first_sample)

    def step_batches(self, first_sample: int) -> list[Batch]:
        """This rank's micro-batches of the step that begins with a sample."""
        self.stream.check_files()
        end = first_sample + self.batch_at(first_sample)
        step = np.arange(first_sample, end, dtype=np.int64)
        mine = step.reshape(-1, self.ranks, self.micro_batch)[:, self.rank]
        samples = self.stream.read(mine.reshape(-1), marks=self.rules.marks == "files")
        return [
            make_batch(part.ids_BS, marks_BS=part.marks_BS, rules=self.rules, pin=self.pin)
            for part in _cut(samples, self.micro_batch)
        ]

    def starting_at(self, progress: Progress) -> Generator[list[Batch]]:
        """Micro-batches of one step after the other, read ahead."""
        ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(READ_AHEAD)
        done = threading.Event()
        reader = threading.Thread(
            target=self._read, args=(progress.samples, ready, done), name="loader", daemon=True
        )
        reader.start()
        try:
            while True:
                item = ready.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            done.set()
            while not ready.empty():
                ready.get_nowait()
            reader.join()

    def _read(
        self,
        first_sample: int,
        ready: queue.Queue[list[Batch] | BaseException],
        done: threading.Event,
    ) -> None:
        try:
            while not done.is_set():
                _offer(ready, self.step_batches(first_sample), done)
                first_sample += self.batch_at(first_sample)
        except Exception as error:  # handed to the training loop, which raises it
            _offer(ready, error, done)


def _cut(samples: Samples, size: int) -> Iterator[Samples]:
    for first in range(0, len(samples.ids_BS), size):
        part = slice(first, first + size)
        yield Samples(
            samples.ids_BS[part], None if samples.marks_BS is None else samples.marks_BS[part]
        )


def _offer(
    ready: queue.Queue[list[Batch] | BaseException],
    item: list[Batch] | BaseException,
    done: threading.Event,
) -> None:
    while not done.is_set():
        try:
            ready.put(item, timeout=0.1)
            return
        except queue.Full:
            continue


# ------------------------------------------------------------------ validation


def validation_batches(
    held: Mixture, *, sequence: int, windows: int, batch: int, rules: DocumentRules = JOINED
) -> Iterator[Batch]:
    """The fixed validation windows, in order: those of the first set first."""
    held.check_files()
    length = sequence + 1
    for part, count in zip(held.parts, window_shares(held, sequence, windows), strict=True):
        starts = spread_windows(part.stretch, sequence=sequence, windows=count)
        for first in range(0, len(starts), batch):
            begins = starts[first : first + batch]
            pieces = Pieces(begins, np.full(len(begins), length))
            samples = read_pieces(part.text, pieces, length=length, marks=rules.marks == "files")
            yield make_batch(samples.ids_BS, marks_BS=samples.marks_BS, rules=rules)


def window_shares(held: Mixture, sequence: int, windows: int) -> list[int]:
    """Windows of each set, by weight or size; at least one of each."""
    if len(held.parts) == 1:
        return [windows]
    weights: Sequence[float] = held.weights or [_fitting(part, sequence) for part in held.parts]
    total = sum(weights)
    return [max(1, round(windows * weight / total)) for weight in weights]


def _fitting(part: Part, sequence: int) -> int:
    return (len(part.stretch) - 1) // sequence
