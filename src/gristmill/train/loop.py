"""The training loop."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence

from gristmill.base.units import Duration
from gristmill.checkpoint.state import TrainState
from gristmill.data.loader import Batch
from gristmill.optim.schedule import Schedule
from gristmill.strategies.strategy import Strategy
from gristmill.train.hooks import Hooks
from gristmill.train.meter import StepEvent


def train(
    state: TrainState,
    *,
    batches: Iterator[Sequence[Batch]],
    strategy: Strategy,
    schedule: Schedule,
    hooks: Hooks,
    until: Duration,
) -> bool:
    """Run steps until the horizon, or until a stop is requested; everything periodic is a hook.
    Returns whether the horizon was reached, even if a stop was requested as well."""
    if state.progress.steps == 0:
        hooks.at_start()
    hooks.begin_steps()
    while not state.progress.reached(until) and not hooks.stopping:
        started = time.monotonic()
        micro_batches = next(batches)
        waited, begun = time.monotonic() - started, hooks.meter.mark()
        before = state.progress
        if (after := hooks.skip_batches(before)) is not None:
            state.progress = after
            continue
        if schedule.holds:
            # The rate depends on whether the last step was skipped.
            hooks.meter.drain()
        skipped = state.counters.skipped_samples
        lr = schedule.apply(state.optimizer, before, skipped_samples=skipped)
        result = strategy.accumulate(micro_batches, before)
        computed = hooks.meter.mark()
        result = strategy.update(
            result, signals=hooks.signals(), limits=hooks.skip_limits(before.steps + 1)
        )
        state.progress = before.after(samples=result.samples, tokens=result.tokens)
        hooks.after_step(
            StepEvent(
                before,
                state.progress,
                result,
                lr=lr,
                data_wait=waited,
                begun=begun,
                computed=computed,
            )
        )
        gc.enable()  # not until the first step has compiled everything: see `cli/train.py`
    finished = state.progress.reached(until)
    hooks.at_end(finished=finished)
    return finished
