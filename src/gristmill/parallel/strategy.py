"""The verbs behind which all ways of running a step hide.

    accumulate        forward and backward over the micro-batches of a step
    update            one decision for all: overflow, norm, clip, step or skip
    evaluate          forward only
    whole             the model in one place, to write samples with
    state, load       what a checkpoint must keep besides weights, optimizer and progress, as JSON
    tensors           the same, as tensors
    weights_changed   weights were loaded from outside

Losses are summed and tokens counted over everything that belongs to the step, then divided once.
Results stay on the device: reading one as a Python float waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from gristmill.base.units import Progress
from gristmill.data.loader import Batch
from gristmill.models.spec import CausalLM
from gristmill.optim.spec import CheckpointState, Optimizer
from gristmill.parallel.sharding import ShardedParameters


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
    """How many processes asked to stop before this step's update; None where a strategy does not
    agree on that in every step."""
    stop_step: int | None = None
    """The step after which all processes stop, where they agreed on it without a collective."""
    waited: Callable[[], float] | None = None
    """Seconds that this process waited for the others, to be asked when the step is over."""


class Preconditioner(Protocol):
    """Replaces gradients before their norm is taken."""

    def apply(self, parameters: ShardedParameters) -> None:
        """Change the gradients of what this process holds, in place."""
        ...


class Strategy(Protocol):
    """How a step is run. It owns the model, what this process keeps of its parameters, and the
    optimizer."""

    @property
    def model(self) -> CausalLM:
        """This process's shard of the model."""
        ...

    @property
    def parameters(self) -> ShardedParameters:
        """What the optimizer moves and checkpoints hold."""
        ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def tensors(self) -> CheckpointState | None:
        """Tensors of its own that belong in a checkpoint, for each process if it likes."""
        ...

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult: ...

    def update(self, result: StepResult, *, stop: bool = False) -> StepResult:
        """`stop`: this process asks to stop; every process hears of it in the result."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float: ...

    def whole(self) -> CausalLM | None:
        """All of the model on rank 0, for use between steps; None on the others."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...

    def weights_changed(self) -> None: ...
