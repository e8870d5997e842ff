"""Messages of the log about the mixture of a run, before it trains."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from gristmill.base.units import Progress
from gristmill.config.mixture import source_names
from gristmill.config.resolve import Resolved
from gristmill.data.build import build_plan, epoch_limits, epochs_of
from gristmill.data.mixture import describe_plan, plan_warnings
from gristmill.train.assemble import BuiltRun
from gristmill.train.order import order_spec


def mixture_notes(run: BuiltRun) -> tuple[list[str], list[str]]:
    """What a run reads in each stage, and warnings about sources that run dry or repeat from now
    on. Empty for a run without stages and limits."""
    data, resolved, progress = run.config.data, run.resolved, run.state.progress
    train, spec = run.data.train, order_spec(data, resolved)
    plan = build_plan(data, train, spec)
    if plan is None:
        return [], absence(run)
    names, epochs = source_names(data.sources), epochs_of(data, train, spec)
    step_of = steps_by_sample(resolved, progress)
    warnings = plan_warnings(
        plan,
        names,
        epochs,
        epoch_limits(data, epochs),
        step_of=step_of,
        since=progress.samples,
    )
    return describe_plan(plan, names, epochs, step_of=step_of), [*warnings, *absence(run)]


def absence(run: BuiltRun) -> list[str]:
    """Why the losses of single sources are not recorded, if the settings ask for them."""
    asked = run.config.track.sources and len(run.config.data.sources) > 1
    if not asked or run.config.recorded_sources:
        return []
    return [
        "the losses of single sources are not recorded: a step on XLA devices is one function, "
        "which computes that of the whole batch"
    ]


def steps_by_sample(resolved: Resolved, progress: Progress) -> Callable[[int], int]:
    """A function from a sample to the step that trains on it, for a run at this progress. Earlier
    steps may have had a different batch size."""

    def step_of(sample: int) -> int:
        if sample < progress.samples:
            return resolved.ramp.steps_to(sample + 1)

        def done(steps: int) -> int:
            return resolved.ramp.samples_after(steps, start=progress.samples)

        return progress.steps + bisect.bisect_right(range(sample + 2), sample, key=done)

    return step_of
