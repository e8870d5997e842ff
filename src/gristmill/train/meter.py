"""Turns step results on the device into records without stalling the device.

On a GPU the host runs ahead. Each step queues an asynchronous copy of its scalars to pinned memory,
and the host reads them when the copy is done, so a record is written at most two steps late.
`drain` waits for all of them: before a validation, a save, or the end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from gristmill.base.units import Duration, Progress, format_seconds
from gristmill.checkpoint.state_file import Counters
from gristmill.distributed.device import Mark
from gristmill.distributed.liveness.stragglers import Pace
from gristmill.distributed.world import World
from gristmill.plan.arithmetic import TokenCost
from gristmill.strategies.strategy import REQUEST, StepResult
from gristmill.track.account import WallAccount
from gristmill.track.records import StepRecord
from gristmill.train.health import RunHealth, StepOutcome
from gristmill.train.sources import RunSources
from gristmill.train.tracker import Tracker

AHEAD = 2
"""How many steps the host may run ahead of the results it has read."""


@dataclass(frozen=True)
class StepEvent:
    """A completed step, as the hooks see it."""

    before: Progress
    after: Progress
    result: StepResult
    lr: float
    data_wait: float
    """Seconds spent waiting for the batch."""
    begun: Mark | None = None
    """When the batch was available; None if a step cannot be timed inside."""
    computed: Mark | None = None
    """When the gradients of this process were computed."""


@dataclass(frozen=True)
class _Pending:
    event: StepEvent
    scalars: Callable[[], torch.Tensor]
    end: Mark
    compiled: float
    """Seconds of compilation in this step, and between it and the step before."""


@dataclass
class Steady:
    """Totals over the steps of this process, except the first one and those that compiled."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


class Meter:
    """Turns step results into records, and counts skipped and NaN steps."""

    def __init__(
        self,
        tracker: Tracker,
        *,
        counters: Counters,
        every: Duration,
        cost: TokenCost,
        world: World,
        peak_flops: float | None,
        health: RunHealth,
        bad_steps: int,
        compile_seconds: Callable[[], float] = float,
        marks_steps: bool = True,
        account: WallAccount | None = None,
        pace: Pace | None = None,
        next_lr: Callable[[Progress, int], float] | None = None,
    ) -> None:
        """`account` (where the time went) and `pace` (to detect stragglers) receive the times of
        the parts of each step, if a step can be timed inside (`marks_steps`). `next_lr` returns the
        learning rate after a progress and a number of skipped samples, for logs that show it."""
        self.tracker, self.counters, self.every = tracker, counters, every
        self.cost, self.world, self.bad_steps = cost, world, bad_steps
        self.peak, self.health, self.compile_seconds = peak_flops, health, compile_seconds
        self.marks_steps = marks_steps
        self.account, self.pace, self.next_lr = account, pace, next_lr
        self.sources: RunSources | None = None
        """The breakdown of step records by source; None if it is not recorded."""
        self._compiled = 0.0
        """Seconds of compilation up to the last step."""
        self._pending: deque[_Pending] = deque()
        self._last = world.device.mark()
        self._is_warm = False
        self.step_seconds = 0.0
        self.sample_seconds = 0.0
        self.steady = Steady()
        self.stop_step: int | None = None
        """The step after which all processes stop: the first one by which all have read the
        request."""
        self.request_step: int | None = None
        """The step after which all processes carry out a request that rank 0 has received."""

    def mark(self) -> Mark | None:
        """A mark inside a step; None if the step is a single compiled function."""
        return self.world.device.mark() if self.marks_steps else None

    def add(self, event: StepEvent) -> None:
        """Queue one step's result, and record all steps whose results have arrived."""
        device = self.world.device
        if self.stop_step is None:
            self.stop_step = event.result.stop_step
        scalars = device.read_later(partial(_scalars, event.result))
        self._pending.append(_Pending(event, scalars, device.mark(), self._compile_seconds()))
        if len(self._pending) > AHEAD:
            self._pending[-AHEAD - 1].end.wait()
        self._report()

    def _compile_seconds(self) -> float:
        """Seconds of compilation since the last call."""
        before, self._compiled = self._compiled, self.compile_seconds()
        return self._compiled - before

    def drain(self) -> None:
        """Wait for all steps and record them."""
        self.world.device.synchronize()
        self._report()

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the next step's time."""
        self._last = self.world.device.mark()

    def _report(self) -> None:
        while self._pending and self._pending[0].end.reached():
            pending = self._pending.popleft()
            self.step_seconds = pending.end.seconds_since(self._last)
            trained = max(0.0, self.step_seconds - pending.compiled)
            self.sample_seconds = trained / pending.event.result.samples
            self.counters.seconds += self.step_seconds
            if not pending.compiled and self._is_warm:
                self.steady.tokens += pending.event.result.tokens
                self.steady.seconds += self.step_seconds
            self._is_warm = True
            self._note_parts(pending)
            self._last = pending.end
            # A strategy that compiles its step as a whole says so itself.
            if pending.compiled and not pending.event.result.notes:
                self.tracker.say(f"compiled in {format_seconds(pending.compiled)}")
            self._record(pending.event, pending.scalars().tolist(), compiled=pending.compiled > 0)

    def _note_parts(self, pending: _Pending) -> None:
        """Report how the time of a step divides into parts."""
        event, result = pending.event, pending.event.result
        compiled = min(pending.compiled, self.step_seconds)
        whole = self.step_seconds - compiled
        synced, data, optimizer = result.synced or event.computed, event.data_wait, 0.0
        if event.begun is not None and synced is not None:
            # A host that runs ahead may wait while the device still computes earlier steps.
            data = min(data, max(0.0, event.begun.seconds_since(self._last)))
            optimizer = max(0.0, pending.end.seconds_since(synced))
        data, optimizer = min(data, whole), min(optimizer, max(0.0, whole - data))
        waited = 0.0 if result.waited is None else min(result.waited(), whole - data)
        compute = whole - data - optimizer - waited
        if compute < 0:
            # Waiting for an exchange of workers is partly behind the gradients.
            compute, optimizer = 0.0, optimizer + compute
        if self.account is not None:
            parts = {"compute": compute, "communication": waited, "optimizer": optimizer}
            self.account.add_step({**parts, "data": data, "compile": compiled})
        computed = result.computed or event.computed
        if self.pace is not None and event.begun is not None and computed is not None:
            # By the wall clock, which includes waiting for a busy core, and a suspended process.
            own = max(0.0, computed.seconds_since(event.begun) - compiled)
            parts = {"data": data, "compute": own, "optimizer": optimizer}
            self.pace.add(event.after.steps, seconds=whole, **parts)

    def _record(self, event: StepEvent, scalars: list[float], *, compiled: bool) -> None:
        loss, norm, skipped, _, _, signals, *_ = scalars
        # The first step by which all processes have read this.
        known_at = event.after.steps + (AHEAD if self.world.device.is_async else 0)
        requests, stops = divmod(round(signals), REQUEST)
        if stops and self.stop_step is None:
            self.stop_step = known_at
        if requests:
            self.request_step = known_at
        self.counters.skipped += int(skipped)
        self.counters.nan += int(not math.isfinite(loss))
        before, after = event.before, event.after
        self.counters.skipped_samples += (after.samples - before.samples) if skipped else 0
        # An fp16 overflow only means that the loss scale is still too high.
        fp16 = event.result.loss_scale is not None
        overflow = bool(skipped) and math.isfinite(loss) and not math.isfinite(norm) and fp16
        if self.every.due(before, after) or after.steps == 1:
            self.tracker.write(self._step_record(event, scalars, compiled=compiled))
        self.health.observe(
            StepOutcome(
                after.steps, before.samples, after.samples, loss, norm, bool(skipped), overflow
            )
        )
        if self.health.bad >= self.bad_steps:
            raise self.health.failure(
                f"{self.health.bad} steps in a row, up to step {after.steps}, were not finite or "
                "above the guard's limits"
            )

    def _step_record(self, event: StepEvent, scalars: list[float], *, compiled: bool) -> StepRecord:
        loss, norm, _, scale, next_scale, _, *by_source = scalars
        rate = event.result.tokens / self.step_seconds if self.step_seconds else math.inf
        per_device = rate / self.world.layout.processes
        palm, causal = per_device * self.cost.palm, per_device * self.cost.causal
        exchange, next_lr, sources = event.result.exchange, None, self.sources
        if self.next_lr is not None:
            next_lr = self.next_lr(event.after, self.counters.skipped_samples)
        return StepRecord(
            step=event.after.steps,
            samples=event.after.samples,
            tokens=event.after.tokens,
            time=time.time(),
            loss=loss,
            lr=event.lr,
            grad_norm=norm,
            tokens_per_second=None if compiled else rate,
            step_seconds=self.step_seconds,
            tflops=None if compiled else palm / 1e12,
            tflops_causal=None if compiled else causal / 1e12,
            mfu=palm / self.peak if self.peak and not compiled else None,
            mfu_causal=causal / self.peak if self.peak and not compiled else None,
            memory_bytes=self.world.device.memory_peak(),
            loss_scale=None if event.result.loss_scale is None else scale,
            next_lr=next_lr,
            next_loss_scale=None if event.result.next_loss_scale is None else next_scale,
            skipped=self.counters.skipped,
            nan=self.counters.nan,
            # A host that runs ahead may wait while the device still computes earlier steps.
            data_wait=min(event.data_wait, self.step_seconds),
            sync_wait=event.result.waited() if event.result.waited is not None else None,
            sent_bytes=None if exchange is None else exchange.sent_bytes,
            mixing=None if exchange is None else exchange.mixing,
            sources=None if sources is None else sources.told(event.after.samples, by_source),
        )


def _scalars(result: StepResult) -> torch.Tensor:
    assert result.grad_norm is not None and result.skipped is not None, "called after the update"
    one, signals = result.loss.new_ones(()), result.signals
    scale, following = (
        one if scale is None else scale for scale in (result.loss_scale, result.next_loss_scale)
    )
    signals = result.loss.new_zeros(()) if signals is None else signals
    loss = result.loss.detach()
    known = torch.stack((loss, result.grad_norm, result.skipped, scale, following, signals))
    return known if result.by_source is None else torch.cat((known, result.by_source.flatten()))
