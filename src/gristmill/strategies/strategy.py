"""The interface of strategies, which run training steps.

    accumulate          forward and backward over the micro-batches of a step
    update              one decision for all ranks: overflow, norm, clip, step or skip
    evaluate            forward only
    gather_full_model   the whole model on rank 0, to generate samples
    state, load         further checkpoint state, as JSON
    tensors             further checkpoint state, as tensors
    published_weights   a context in which the weights are those of the model that the run publishes
    weights_changed     called after weights were loaded
    close               after the last step

Losses are summed and tokens counted over the whole step, then divided once. Results stay on the
device: reading one as a Python float waits for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from gristmill.base.units import Progress
from gristmill.data.loader import Batch
from gristmill.distributed.device import Mark
from gristmill.models.spec import CausalLM
from gristmill.optim.spec import CheckpointState, Optimizer
from gristmill.strategies.sharding import ShardedParameters

REQUEST = 1 << 20
"""Rank 0's signal that it has a request for all processes: larger than any number of processes, and
small enough for an exact sum in fp32."""


class StepLimits(NamedTuple):
    """A step with a larger loss or gradient norm does not change the weights."""

    loss: float
    norm: float


class ExchangeReport(NamedTuple):
    """The exchange of a decentralized worker in a step."""

    sent_bytes: int
    """Bytes that this process has sent so far."""
    mixing: float
    """How far workers move towards the result."""


@dataclass(frozen=True)
class StepResult:
    """The result of one step; tensors are scalars on the device."""

    samples: int
    tokens: int
    loss: torch.Tensor
    """Mean over the counted tokens, in nats. A strategy whose step is one function knows it after
    the update."""
    grad_norm: torch.Tensor | None = None
    """Norm of the whole gradient before clipping."""
    skipped: torch.Tensor | None = None
    """1 if the update was skipped: loss or gradient was not finite, or above its limit."""
    loss_scale: torch.Tensor | None = None
    """The loss scale of this step, in fp16."""
    next_loss_scale: torch.Tensor | None = None
    """The loss scale of the next step, in fp16."""
    signals: torch.Tensor | None = None
    """The sum of the processes' signals before this step's update; None if the strategy does not
    exchange them in every step."""
    stop_step: int | None = None
    """The step after which all processes stop, where they agreed on it without a collective."""
    waited: Callable[[], float] | None = None
    """Seconds this process waited for the others; call it after the step is done."""
    computed: Mark | None = None
    """When this process's own gradients were computed; None if no other process waits for them."""
    synced: Mark | None = None
    """When the gradients of all processes were available."""
    by_source: torch.Tensor | None = None
    """The sum of losses of each source, and its counted tokens, over all processes; None if batches
    do not record sources."""
    exchange: ExchangeReport | None = None
    """None if all processes hold the same weights."""
    notes: tuple[str, ...] = ()
    """Messages for the log about this step."""


@dataclass(frozen=True)
class CompiledStep:
    """Statistics of a step that is compiled as a whole."""

    versions: int = 0
    """How many versions were compiled; more than one if the shapes of batches change."""
    seconds: float = 0.0
    """How long compilation took, in seconds."""
    flops: float | None = None
    """Operations of the newest version on one device, as the compiler counts them."""


class StepStatistics(NamedTuple):
    """The facts about a step that a preconditioner needs."""

    skip: torch.Tensor
    """1 if the step will not change the weights."""
    positions: int
    """Positions in the micro-batches of all processes."""
    loss_tokens: torch.Tensor
    """Counted tokens, by whose number the loss is divided."""
    loss_scale: torch.Tensor | None
    """The loss scale, by which gradients are already divided."""
    lr: float


class Preconditioner(CheckpointState, Protocol):
    """Replaces gradients before they are clipped."""

    def begin(self, progress: Progress) -> None:
        """Called before the forward passes of a step."""
        ...

    def apply(self, parameters: ShardedParameters, step: StepStatistics) -> None:
        """Change this process's gradients in place."""
        ...


class Strategy(Protocol):
    """Runs steps. It owns this process's shard of the model and its parameters, and the
    optimizer."""

    @property
    def model(self) -> CausalLM:
        """This process's shard of the model."""
        ...

    @property
    def parameters(self) -> ShardedParameters:
        """What the optimizer updates and checkpoints save."""
        ...

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def distance(self) -> float | None:
        """The distance of workers to their average when it was last computed, relative to its
        norm; None if all have the same weights."""
        ...

    @property
    def tensors(self) -> CheckpointState | None:
        """The strategy's own tensors to save, which may differ between processes."""
        ...

    @property
    def compiled(self) -> CompiledStep | None:
        """None unless the whole step is one compiled function."""
        ...

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult: ...

    def update(
        self, result: StepResult, *, signals: int = 0, limits: StepLimits | None = None
    ) -> StepResult:
        """`signals`: 1 if this process asks to stop, plus `REQUEST` if it has a request; the result
        has the sum over all processes. `limits`: skip the update if the step exceeds them."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float: ...

    def gather_full_model(self) -> CausalLM | None:
        """The whole model on rank 0, for use between steps; None on the others."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...

    def published_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which workers with weights of their own hold the average."""
        ...

    def weights_changed(self) -> None: ...

    def close(self) -> None: ...
