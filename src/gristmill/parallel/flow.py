"""How the micro-batches of a step go through a model that every process runs as a whole: one after
the other, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from gristmill.data.loader import Batch
from gristmill.models.spec import Loss
from gristmill.parallel.replicas import Replicas
from gristmill.parallel.waiting import backward


class Flow(Protocol):
    """A way of micro-batches through a model; batches are on the device."""

    def train(
        self, batches: Sequence[Batch], scale: torch.Tensor, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Gradients of the scaled loss; returns the sum of the plain losses that were computed
        here. `done` is called when this process's own gradients are there."""
        ...

    def measure(self, batches: Iterable[Batch]) -> torch.Tensor:
        """The sum of the losses, forward only."""
        ...


class Straight:
    """Every micro-batch through the whole model."""

    def __init__(self, replicas: Replicas, forward: Callable[..., Any]) -> None:
        self.replicas, self.forward = replicas, forward

    def train(
        self, batches: Sequence[Batch], scale: torch.Tensor, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        total = torch.zeros((), device=scale.device)
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            with self.replicas.summing(last):
                with record_function("gristmill::forward"):
                    loss = _loss(self.forward, batch, scale)
                with record_function("gristmill::backward"):
                    if last and done is not None:
                        backward(loss.scaled, done)
                    else:
                        loss.scaled.backward()
            total += loss.total
        return total

    def measure(self, batches: Iterable[Batch]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total += _loss(self.replicas.model, batch, None).total.cpu().double()
        return total


def _loss(model: Callable[..., Any], batch: Batch, scale: torch.Tensor | None) -> Loss:
    loss = model(
        batch.tokens_BT,
        targets_BT=batch.targets_BT,
        weights_BT=batch.weights_BT,
        scale=scale,
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
    )
    assert isinstance(loss, tuple)
    return Loss(*loss)
