"""Runs the micro-batches of a step, one after the other or as a pipeline (`pipeline.py`).

Measures how long a process waits for the others in a step.

    on the CPU   collectives block the computing thread: the step's wall time minus its thread time
    on a GPU     collectives have their own streams, and most overlap with the backward pass: from
                 the end of this process's backward pass to the end of the last collective

Given up: on a GPU, waiting inside a pass (for gathered weights, for another pipeline stage) counts
as computing, since only a profiler can tell them apart. On the CPU, waiting for a core counts as
waiting for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from gristmill.data.loader import Batch
from gristmill.distributed.device import Device
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms
from gristmill.models.spec import CausalLM, Loss
from gristmill.strategies.data_parallel import GradientSync


class SyncTimer:
    """Measures the wait of one step, which starts now."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._computed = time.thread_time()
        self._begin = device.mark()
        self._done = self._begin

    def done(self) -> None:
        """This process's own gradients are computed."""
        self._done = self.device.mark()

    def end(self) -> Callable[[], float]:
        """Gradients are synchronised. Returns a function for the seconds waited, to call once the
        device has finished."""
        end = self.device.mark()
        if self.device.is_async:
            return lambda: end.seconds_since(self._done)
        waited = end.seconds_since(self._begin) - (time.thread_time() - self._computed)
        return lambda: max(0.0, waited)


def backward(loss: torch.Tensor, done: Callable[[], None]) -> None:
    """Run the backward pass; `done` is called at its end, before it waits for collectives."""
    # FSDP hooks the loss and queues its waiting as a callback at the end of the pass. This tensor's
    # hook runs before it, so its callback comes first.
    start = loss.clone()
    engine = torch.autograd.Variable._execution_engine
    start.register_hook(lambda gradient: engine.queue_callback(done))
    start.backward()


class MicroBatches(Protocol):
    """A way to run micro-batches, which are already on the device."""

    def forward_backward(
        self, batches: Sequence[Batch], terms: LossTerms, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Accumulate gradients of the scaled loss that `terms` describe; returns the sum of this
        process's unscaled losses. `done` is called when this process's own gradients are
        computed."""
        ...

    def forward(self, batches: Iterable[Batch]) -> torch.Tensor:
        """The sum of the losses."""
        ...


class SequentialMicroBatches:
    """Runs every micro-batch through the whole model; training calls `compiled` if given."""

    def __init__(
        self, model: CausalLM, sync: GradientSync, compiled: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.sync = model, sync
        self.train_forward = model if compiled is None else compiled

    def forward_backward(
        self, batches: Sequence[Batch], terms: LossTerms, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        assert terms.scale is not None
        total = torch.zeros((), device=terms.scale.device)
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with self.sync.micro_batch(last=last):
                with record_function("gristmill::forward"):
                    loss = _loss(self.train_forward, batch, terms)
                with record_function("gristmill::backward"):
                    if last and done is not None:
                        backward(loss.scaled, done)
                    else:
                        loss.scaled.backward()
            total += loss.total
        return total

    def forward(self, batches: Iterable[Batch]) -> torch.Tensor:
        return sum_at_end(_loss(self.model, batch, PLAIN_LOSS).total for batch in batches)


def sum_at_end(totals: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum on the host, in fp64. All are read at the end, so that the host prepares batches
    while the device computes."""
    computed = list(totals)
    read = torch.stack(computed).tolist() if computed else []
    return torch.tensor(sum(read), dtype=torch.float64)


def _loss(model: Callable[..., Any], batch: Batch, terms: LossTerms) -> Loss:
    loss = model(
        batch.tokens_BT,
        targets_BT=batch.targets_BT,
        terms=terms._replace(loss_weights_BT=batch.loss_weights_BT),
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
    )
    assert isinstance(loss, tuple)
    return Loss(*loss)
