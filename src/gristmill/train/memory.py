"""The memory of a run: advice when it runs out, and settings chosen so that the run fits.

    before the run    compare the planned memory with the device's; if the run does not fit, make
                      the smallest change with which it does
    in the first step the same once more, if memory ran out although the plan predicted a fit

A micro-batch size that the run file leaves open may always be chosen; with `train --fit` a given
one and recomputation may change too. The global batch size and the seeds stay, and so do the
samples and their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from gristmill.base.errors import UserError
from gristmill.config.resolve import Resolved, leaves_micro_batch
from gristmill.config.schema import RunConfig
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.world import World
from gristmill.plan.explain import (
    Change,
    Situation,
    TooLittleMemory,
    available,
    described_change,
    explained,
    smallest_change,
)

FITTED = "train"
"""The table whose settings `--fit` may change."""
_PORTIONS = {("train", "batch"), ("train", "micro_batch")}


def situation_of(config: RunConfig, resolved: Resolved, world: World) -> Situation:
    """The run on this process's device, as the planner needs it."""
    stage = world.at["pp"] if world.devices is None else None
    return Situation(config, world.layout, resolved.vocab, world.device.kind, stage)


def explainer(
    config: RunConfig, resolved: Resolved, world: World, folder: Path
) -> Callable[[str], TooLittleMemory | None]:
    """A function that explains why a run ran out of memory."""

    def explain(what: str) -> TooLittleMemory | None:
        measured = world.device.measured_memory(processes=world.place.local_world or 1)
        if measured is None:
            return None
        situation = situation_of(config, resolved, world)
        return explained(what, situation, measured, source=str(folder))

    return explain


def fitted(
    config: RunConfig, resolved: Resolved, world: World, control: ControlGroup, *, fit: bool
) -> Change | None:
    """The change with which a run fits the devices of all processes, the same on all; None if the
    run fits as it is, or if only changes that are not allowed would help. `fit`: whether settings
    given in the run file may be changed."""
    measured = world.device.measured_memory(processes=world.place.local_world or 1)
    known = control.all_gather(0 if measured is None else available(measured))
    capacity = min(known)
    if not capacity or world.device.kind in ("meta", "xla"):
        return None
    situation = replace(situation_of(config, resolved, world), stage=None)
    try:
        if situation.plan().total <= capacity:
            return None
    except UserError:  # a model whose shape the plan does not know
        if fit:
            raise
        return None
    change = smallest_change(situation, capacity=capacity)
    return change if change is not None and may_change(change, config, fit=fit) else None


def may_change(change: Change, config: RunConfig, *, fit: bool) -> bool:
    """Whether a run may make a change without being asked."""
    open_settings = _PORTIONS if leaves_micro_batch(config.train) else set()
    return all(path in open_settings or (fit and path[0] == FITTED) for path in change.settings)


def note_of(change: Change, config: RunConfig) -> str:
    """The log message about a change."""
    note = f"to fit into memory: {described_change(change)}; the batch and seeds stay"
    draws = [
        name
        for name, acts in (
            ("dropout", config.model.drops),
            ("the sampled softmax", config.train.sampled_softmax is not None),
        )
        if acts
    ]
    if draws and ("train", "micro_batch") in change.settings:
        note += f", but {' and '.join(draws)} draw other random numbers"
    return note
