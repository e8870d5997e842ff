"""Batches in the order of the sample index, read ahead by a thread.

    samples n ... n + batch - 1  ->  accumulate x Batch(micro_batch)      for step n / batch

The loader keeps no state: `starting_at(progress)` computes the stream from the number of samples
already consumed. Reading ahead hides the time of gathering windows; on a GPU the host memory is
pinned, so that the copy to the device overlaps with computation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gristmill.base.units import Progress
from gristmill.data.dataset import Part
from gristmill.data.sampling import SampleIndex, spread_windows

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

    @property
    def samples(self) -> int:
        return self.tokens_BT.shape[0]

    @property
    def tokens(self) -> int:
        return self.tokens_BT.numel()

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; returns before the copy is done if the memory is pinned."""
        weights = self.weights_BT
        return Batch(
            self.tokens_BT.to(device, non_blocking=True),
            self.targets_BT.to(device, non_blocking=True),
            None if weights is None else weights.to(device, non_blocking=True),
            self.counted,
        )


def make_batch(windows_BS: np.ndarray, *, pin: bool = False) -> Batch:
    """Inputs and targets from windows of T + 1 tokens."""
    tokens = torch.from_numpy(np.ascontiguousarray(windows_BS[:, :-1]))
    targets = torch.from_numpy(np.ascontiguousarray(windows_BS[:, 1:]))
    if pin:
        tokens, targets = tokens.pin_memory(), targets.pin_memory()
    return Batch(tokens, targets, None, float(tokens.numel()))


@dataclass(frozen=True)
class Loader:
    """The endless stream of training batches."""

    part: Part
    index: SampleIndex
    sequence: int
    micro_batch: int
    accumulate: int
    pin: bool = False

    @property
    def batch(self) -> int:
        return self.micro_batch * self.accumulate

    def step_batches(self, first_sample: int) -> list[Batch]:
        """The micro-batches of the step that begins with a sample."""
        samples = np.arange(first_sample, first_sample + self.batch, dtype=np.int64)
        starts = self.index.starts(samples).reshape(self.accumulate, self.micro_batch)
        return [
            make_batch(self.part.windows(row, sequence=self.sequence), pin=self.pin)
            for row in starts
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
                first_sample += self.batch
        except Exception as error:  # handed to the training loop, which raises it
            _offer(ready, error, done)


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


def validation_batches(part: Part, *, sequence: int, windows: int, batch: int) -> Iterator[Batch]:
    """The fixed validation windows, in order."""
    starts = spread_windows(part.stretch, sequence=sequence, windows=windows)
    for first in range(0, len(starts), batch):
        yield make_batch(part.windows(starts[first : first + batch], sequence=sequence))
