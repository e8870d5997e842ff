"""The verbs behind which all ways of running a step hide.

    accumulate   forward and backward over the micro-batches of a step
    update       one decision for all: overflow, norm, clip, step or skip
    evaluate     forward only
    whole        the model in one place, to write samples with
    state, load  what a checkpoint must keep besides weights, optimizer and progress

Losses are summed and tokens counted over everything that belongs to the step, then divided once.
Results stay on the device: whoever needs a number as a Python float pays for the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gristmill.base.units import Progress
from gristmill.data.loader import Batch
from gristmill.models.gpt import GPT


@dataclass(frozen=True)
class StepResult:
    """What one step did; tensors are scalars on the device."""

    samples: int
    tokens: int
    loss: torch.Tensor
    """Mean over the counted tokens, in nats."""
    grad_norm: torch.Tensor | None = None
    """Norm of the whole gradient before clipping."""
    skipped: torch.Tensor | None = None
    """1 if the weights were left as they were, because loss or gradient was not finite."""
    loss_scale: torch.Tensor | None = None
    """The scale this step was computed with, in fp16."""
    stops: torch.Tensor | None = None
    """How many processes asked for an end before this step's update."""
    waited: Callable[[], float] | None = None
    """Seconds that this process waited for the others, to be asked when the step is over."""


class Strategy(Protocol):
    """How a step is run."""

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult: ...

    def update(self, result: StepResult, *, stop: bool = False) -> StepResult:
        """`stop`: this process asks for an end; every process hears of it in the result."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float: ...

    def whole(self) -> GPT | None:
        """All of the model on the first process, for use between steps; None on the others."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...
