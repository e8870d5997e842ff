"""Training steps in SPMD style: every process runs the same step on its shard of model and batch.

    accumulate   forward and backward over the micro-batches, with gradient synchronisation
    update       reduce         the gradients that synchronisation does not cover
                 norm           of the whole gradient, all-reduced with loss and stop requests
                 unscale, precondition, and the norm of the result, if there is a preconditioner
                 clip           as a divisor
                 step           or skip, if loss or gradient is not finite or above its limit

The loss is the sum over all counted tokens of the step divided by their number, so gradients are
summed over processes, not averaged. Loss and norm are all-reduced in one collective, so all
processes make the same decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.profiler import record_function

from gristmill.base.units import Progress
from gristmill.config.model import Ability
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.device import Device
from gristmill.distributed.world import World
from gristmill.models.fp8 import Fp8Scales
from gristmill.models.loss_terms import PLAIN_LOSS, LossTerms, training_terms
from gristmill.models.spec import CausalLM, Loss, StagedModel
from gristmill.optim.spec import Optimizer
from gristmill.strategies.compiling import CompileAhead
from gristmill.strategies.data_parallel import GradientSync, sum_together
from gristmill.strategies.precision import LossScale
from gristmill.strategies.sharding import Offload, ShardedParameters, gather_model, owned_squares
from gristmill.strategies.step import (
    Decision,
    clip_preconditioned,
    count_tokens,
    decide,
    divide_batches,
    shard_sequences,
    step_seed,
)
from gristmill.strategies.strategy import Preconditioner, StepLimits, StepResult, StepStatistics


class SyncTimer:
    """Measures how long a process waits for the others in a step, which starts now.

        on the CPU   collectives block the computing thread: the step's wall time minus its thread
                     time
        on a GPU     collectives have their own streams, and most overlap with the backward pass:
                     from the end of this process's backward pass to that of the last collective

    A limitation: on a GPU, waiting inside a pass (for gathered weights, or another pipeline stage)
    counts as computing, since only a profiler can tell them apart. On the CPU, waiting for a core
    counts as waiting for others.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._computed = time.thread_time()
        self._begin = device.mark()
        self.computed = self._begin
        """When this process's own gradients were computed."""
        self.synced = self._begin

    def done(self) -> None:
        """This process's own gradients are computed."""
        self.computed = self.device.mark()

    def end(self) -> Callable[[], float]:
        """Gradients are synchronised. Returns a function that returns the seconds waited, to be
        called once the device has finished."""
        computed, end = self.computed, self.device.mark()
        self.synced = end
        if self.device.is_async:
            return lambda: end.seconds_since(computed)
        waited = end.seconds_since(self._begin) - (time.thread_time() - self._computed)
        return lambda: max(0.0, waited)


class MicroBatches(Protocol):
    """Runs micro-batches, which are already on the device."""

    def forward_backward(
        self, batches: Sequence[Batch], terms: LossTerms, done: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Accumulate gradients of the scaled loss that `terms` describe. Returns the sum of this
        process's unscaled losses and, if `terms` ask for it, the sum for each source. `done` is
        called when this process's own gradients are computed."""
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
        total = torch.zeros(terms.totals, device=terms.scale.device)
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
        terms=terms._replace(
            loss_weights_BT=batch.loss_weights_BT,
            sources_B=batch.sources_B if terms.sources else None,
        ),
        positions_BT=batch.positions_BT,
        documents_BT=batch.documents_BT,
    )
    assert isinstance(loss, tuple)
    return Loss(*loss)


def backward(loss: torch.Tensor, done: Callable[[], None]) -> None:
    """Run the backward pass; `done` is called at its end, before it waits for collectives."""
    # FSDP hooks the loss and queues its waiting as a callback at the end of the pass. This tensor's
    # hook runs before it, so its callback comes first.
    start = loss.clone()
    engine = torch.autograd.Variable._execution_engine
    start.register_hook(lambda gradient: engine.queue_callback(done))
    start.backward()


class Spmd:
    """Runs training steps of one model on all processes."""

    tensors = None
    distance = None
    compiled = None

    def __init__(
        self,
        config: RunConfig,
        *,
        model: CausalLM,
        parameters: ShardedParameters,
        sync: GradientSync,
        micro_batches: MicroBatches,
        optimizer: Optimizer,
        world: World,
        control: ControlGroup,
        loss_scale: LossScale | None = None,
        offload: Offload | None = None,
        preconditioner: Preconditioner | None = None,
        worker: int = 0,
        ahead: CompileAhead | None = None,
        cuda_graphs: bool = False,
        fp8: Fp8Scales | None = None,
    ) -> None:
        self.model, self.optimizer, self.sync = model, optimizer, sync
        self.parameters = parameters if offload is None else offload.parameters
        """What the optimizer updates and checkpoints save."""
        self.micro_batches, self.loss_scale, self.offload = micro_batches, loss_scale, offload
        self.preconditioner = preconditioner
        self.world, self.control = world, control
        self._ahead, self._cuda_graphs, self._fp8 = ahead, cuda_graphs, fp8
        self.train, self.worker = config.train, worker
        # The second target of a shard's last token would be on another process.
        self._everyone = world.groups.along(*world.mesh.sizes)
        self._timer: SyncTimer | None = None
        self._loss_tokens: torch.Tensor | None = None
        self._by_source: torch.Tensor | None = None
        """Losses and counted tokens of each source in this step, if the batches record sources."""
        # All tp ranks compute the same loss: one of them reports it.
        self._reports_loss = model.shard.last and world.at["tp"] == 0
        self._partial = self._partial_gradients()

    def _partial_gradients(self) -> list[tuple[list[torch.nn.Parameter], dist.ProcessGroup]]:
        """Parameters whose gradients are summed after the backward pass, with the group."""
        groups, tied = self.world.groups, list[str]()
        wanted = [(self.model.partial_gradients(), groups.along("tp"))]
        if Ability.PIPELINE in self.model.config.abilities:
            tied = cast(StagedModel, self.model).tied_across_stages()
        if tied:
            stages = self.world.mesh.group(self.world.rank, "pp")
            wanted.append((tied, groups.of([stages[0], stages[-1]])))
        sharded = self.sync.parameters
        return [
            ([sharded[name].local for name in names if name in sharded], group)
            for names, group in wanted
            if group is not None
        ]

    def accumulate(self, batches: Sequence[Batch], progress: Progress) -> StepResult:
        """Gradients of the mean loss over all counted tokens of the step."""
        if self._ahead is not None:
            self._ahead.wait()
            self._ahead = None
        if self._cuda_graphs:
            # The outputs of the last step's CUDA graphs are no longer needed.
            torch.compiler.cudagraph_mark_step_begin()
        self._timer = None if self._everyone is None else SyncTimer(self.world.device)
        done = None if self._timer is None else self._timer.done
        self.model.train()
        if self.preconditioner is not None:
            self.preconditioner.begin(progress)
        if self.model.config.drops:
            # tp ranks draw the same numbers, unless they have different positions.
            at = self.world.at
            place = [at["dp_replicate"] + self.worker, at["dp_shard"], at["cp"], at["pp"]]
            place.append(at["tp"] * self.model.comm.sequence_parallel)
            torch.manual_seed(step_seed(self.train.seed, progress.steps, place))
        data_ranks = self.world.mesh.data
        loss_tokens = count_tokens(
            batches,
            ranks=data_ranks,
            group=self.world.groups.along("dp_replicate", "dp_shard"),
            device=self.world.device.torch_device,
        )
        self._loss_tokens = loss_tokens
        scale = 1.0 / loss_tokens
        if self.loss_scale is not None:
            scale = scale * self.loss_scale.scale
        terms = training_terms(self.train, progress, scale, mtp=self.world.mesh.cp == 1)
        known = batches[0].source_tokens_K
        terms = terms._replace(sources=0 if known is None else len(known))
        local = [self._on_device(batch) for batch in batches]
        if self._fp8 is not None and not self._fp8.calibrated:
            self._calibrate_fp8(self._fp8, local[0], terms)
        total = self.micro_batches.forward_backward(local, terms, done)
        self._by_source = None
        if terms.sources:
            self._by_source, total = self._sums_by_source(local, total[1:]), total[0]
        return StepResult(
            samples=data_ranks * sum(batch.samples for batch in batches),
            tokens=data_ranks * sum(batch.tokens for batch in batches),
            loss=total / loss_tokens,
            loss_scale=None if self.loss_scale is None else self.loss_scale.scale,
        )

    @record_function("gristmill::update")
    def update(
        self, result: StepResult, *, signals: int = 0, limits: StepLimits | None = None
    ) -> StepResult:
        """The phases listed above, in order."""
        self.sync.finish()
        for parameters, group in self._partial:
            sum_together([p.grad for p in parameters if p.grad is not None], group)
        loss, squares, signalled, *by_source = self._agree(result.loss, signals)
        timer = self._timer
        waited = None if timer is None else timer.end()
        decision = decide(
            loss, squares, scale=result.loss_scale, clip=self.train.clip, limits=limits
        )
        if self.preconditioner is not None:
            squares = self._precondition(self.preconditioner, result, decision)
            decision = clip_preconditioned(decision, squares, clip=self.train.clip)
        if self.offload is not None:
            self.offload.step(self.optimizer, divisor=decision.divisor, skip=decision.skip)
        else:
            self.optimizer.step(divisor=decision.divisor, skip=decision.skip)
        self.sync.clear()
        if self._fp8 is not None:
            self._fp8.update(self._reduce_max, skip=decision.skip)
        if self.loss_scale is not None:
            self.loss_scale.update(decision.overflow)
        return dataclasses.replace(
            result,
            next_loss_scale=None if self.loss_scale is None else self.loss_scale.scale,
            loss=loss,
            by_source=torch.stack(by_source) if by_source else None,
            grad_norm=decision.norm,
            skipped=decision.skip,
            signals=signalled,
            waited=waited,
            computed=None if timer is None else timer.computed,
            synced=None if timer is None else timer.synced,
        )

    def _calibrate_fp8(self, fp8: Fp8Scales, batch: Batch, terms: LossTerms) -> None:
        """Calibrate the scales of the first step, on each process's sample with the most counted
        tokens."""
        weights_BT = batch.loss_weights_BT
        chosen = 0 if weights_BT is None else int(weights_BT.sum(1).argmax())
        with fp8.calibrating():
            self.micro_batches.forward_backward([batch.sample(chosen)], terms)
        self.sync.finish()
        self.sync.clear()
        fp8.update(self._reduce_max)

    def _reduce_max(self, numbers: torch.Tensor) -> None:
        if self._everyone is not None:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._everyone)

    def _precondition(
        self, preconditioner: Preconditioner, result: StepResult, decision: Decision
    ) -> torch.Tensor:
        """Replace the gradients; returns the squared norm of the new ones."""
        scale, parameters = result.loss_scale, self.sync.parameters
        if scale is not None:
            local = [parameter.local.grad for parameter in parameters.values()]
            torch._foreach_div_([gradient for gradient in local if gradient is not None], scale)
        assert self._loss_tokens is not None
        lr = self.optimizer.param_groups[0]["lr"]
        step = StepStatistics(decision.skip, result.tokens, self._loss_tokens, scale, lr)
        preconditioner.apply(parameters, step)
        squares = owned_squares(parameters)
        if self._everyone is not None:
            dist.all_reduce(squares, group=self._everyone)
        return squares

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean loss over the counted tokens of all batches."""
        self.model.eval()
        loss_tokens = 0.0

        def local() -> Iterator[Batch]:
            nonlocal loss_tokens
            ranks, rank = self.world.mesh.data, self.world.data_rank
            for batch in divide_batches(batches, rank=rank, ranks=ranks):
                loss_tokens += batch.loss_tokens
                yield self._on_device(batch)

        total = self.micro_batches.forward(local()).item()
        # cp ranks have different losses, but all of them count the tokens of a sequence.
        sums = [total, loss_tokens / self.world.mesh.cp] if self._reports_loss else [0.0, 0.0]
        totals, counts = zip(*self.control.all_gather(sums), strict=True)
        return float(sum(totals) / sum(counts))

    def gather_full_model(self) -> CausalLM | None:
        if self._everyone is None:
            return self.model
        return gather_model(self.model, self.sync.parameters, self.world, self.control)

    def state(self) -> dict[str, Any]:
        parts = {"loss_scale": self.loss_scale, "fp8": self._fp8}
        return {name: part.state() for name, part in parts.items() if part is not None}

    def load(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])
        if self._fp8 is not None and "fp8" in state:
            self._fp8.load(state["fp8"])
        self.weights_changed()

    def published_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def weights_changed(self) -> None:
        if self.offload is not None:
            self.offload.send_weights()

    def close(self) -> None:
        """Nothing to close: all processes end after the same step."""

    def _on_device(self, batch: Batch) -> Batch:
        """This process's shard of a batch's sequences, on the device."""
        shard = shard_sequences(batch, rank=self.world.at["cp"], ranks=self.world.mesh.cp)
        return shard.to(self.world.device.torch_device)

    def _sums_by_source(self, batches: Sequence[Batch], losses: torch.Tensor) -> torch.Tensor:
        """Losses and counted tokens of each source that this process reports."""
        counts = [one.source_tokens_K for one in batches if one.source_tokens_K is not None]
        # cp ranks have different losses, but all of them count the tokens of a sequence.
        sums = torch.stack([losses, torch.stack(counts).sum(dim=0) / self.world.mesh.cp])
        return sums if self._reports_loss else torch.zeros_like(sums)

    def _agree(self, loss: torch.Tensor, signals: int) -> tuple[torch.Tensor, ...]:
        """Loss, squared norm and signals, summed over all processes and, if known, the losses and
        counted tokens of each source."""
        squares, signalled = owned_squares(self.sync.parameters), torch.full_like(loss, signals)
        if self._everyone is None:
            return loss, squares, signalled, *(() if self._by_source is None else self._by_source)
        reported = loss if self._reports_loss else torch.zeros_like(loss)
        sums = torch.stack([reported, squares, signalled])
        if self._by_source is None:
            dist.all_reduce(sums, group=self._everyone)
            return tuple(sums)
        sums = torch.cat([sums, self._by_source.flatten()])
        dist.all_reduce(sums, group=self._everyone)
        return *sums[:3], *sums[3:].view_as(self._by_source)
