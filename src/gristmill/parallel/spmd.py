"""One program on one device: the plain way to run a step.

The global norm n, the clipping limit c and the loss scale s meet in one factor: gradients are
divided by s max(1, n / c) inside the fused optimizer kernel, which also leaves everything
untouched when the norm is not finite. No step waits for the host.

Dropout draws from a generator seeded anew for every step by the run's seed and the step's number,
so there is no random state to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from gristmill.base.units import Progress
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.models.gpt import GPT
from gristmill.models.spec import Loss
from gristmill.optim.build import decide_step
from gristmill.parallel.precision import Precision
from gristmill.parallel.strategy import StepResult
from gristmill.parallel.world import World


class SingleDevice:
    """Runs steps of one model on one device."""

    def __init__(
        self, config: RunConfig, *, model: GPT, optimizer: torch.optim.Optimizer, world: World
    ) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.clip, self.seed = config.train.clip, config.train.seed
        self.precision = Precision(config.precision, world.device)
        self.loss_scale = self.precision.loss_scale()
        model.compute = self.precision.dtype
        model.kernels = self.precision.kernels(wanted=config.runtime.kernels)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        wanted = config.runtime.compile
        compiles = world.device.type == "cuda" if wanted is None else wanted
        self.forward = torch.compile(model, dynamic=False, fullgraph=True) if compiles else model

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult:
        """Gradients of the mean loss over all counted tokens of the step."""
        self.model.train()
        if self.model.config.dropout:
            torch.manual_seed(_step_seed(self.seed, progress.steps))
        counted = sum(batch.counted for batch in batches)
        total = torch.zeros((), device=self.world.device)
        scale = torch.full((), 1.0 / counted, device=self.world.device)
        if self.loss_scale is not None:
            scale = scale * self.loss_scale.scale
        for batch in batches:
            with record_function("gristmill::forward"):
                loss = self._loss(self.forward, batch, scale)
            with record_function("gristmill::backward"):
                loss.scaled.backward()
            total += loss.total
        return StepResult(
            samples=sum(batch.samples for batch in batches),
            tokens=sum(batch.tokens for batch in batches),
            loss=total / counted,
            loss_scale=None if self.loss_scale is None else self.loss_scale.scale,
        )

    @record_function("gristmill::update")
    def update(self, result: StepResult) -> StepResult:
        """Clip and step, or skip where the gradient is not finite."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        scale = result.loss_scale if result.loss_scale is not None else norms.new_ones(())
        norm = torch.linalg.vector_norm(norms) / scale
        bad = ~(torch.isfinite(norm) & torch.isfinite(result.loss))
        excess = (norm / self.clip).clamp(min=1.0) if self.clip else norms.new_ones(())
        decide_step(self.optimizer, divisor=scale * torch.where(bad, 1.0, excess), skip=bad.float())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.loss_scale is not None:
            self.loss_scale.update(bad)
        return StepResult(
            result.samples,
            result.tokens,
            result.loss,
            grad_norm=norm,
            skipped=bad.float(),
            loss_scale=result.loss_scale,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the counted tokens of all batches."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        counted = 0.0
        for batch in batches:
            total += self._loss(self.model, batch, None).total.cpu().double()
            counted += batch.counted
        return total.item() / counted

    def state(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    def load(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])

    def _loss(self, model: Any, batch: Batch, scale: torch.Tensor | None) -> Loss:
        batch = batch.to(self.world.device)
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


def _step_seed(seed: int, step: int) -> int:
    digest = hashlib.sha256(f"{seed}:step:{step}".encode()).digest()
    return int.from_bytes(digest[:7], "little")
