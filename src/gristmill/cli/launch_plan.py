"""The plan of a job: how many nodes it needs for a time, and whether its time is enough.

Devices are those of `launch.gpu`. Time is planned with a fifth on top, for validation, saves,
compilation and what plans leave out. What a run has done already is not planned again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import described_span, parse_seconds
from gristmill.cli.planning import (
    PlanRequest,
    own_layout,
    parse_hours,
    plan_request,
)
from gristmill.config.launch import LaunchConfig
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.plan.hardware import open_hardware
from gristmill.track.folder import run_folder

RESERVE = 1.2
"""What is asked for, over what is planned."""
_QUARTER = 15 * 60
"""Wall times are rounded up to quarters of an hour."""
_MOST_NODES = 4096


@dataclass(frozen=True)
class _NodePlan:
    """A job on some nodes."""

    nodes: int
    seconds: float
    """That it takes, as planned."""
    left: float
    """The share of the run that is not done yet."""


def with_hours(config: RunConfig, hours: str) -> tuple[RunConfig, str]:
    """The run with the fewest nodes that end it in this time by plan, and with a wall time; and
    what was chosen, in words."""
    limit = parse_hours(hours, where="--hours")
    launch = config.launch or LaunchConfig()
    best: _NodePlan | None = None
    why: list[str] = []
    for nodes in _node_counts():
        plan = _on_nodes(config, nodes)
        if isinstance(plan, Problem):
            why.append(f"{nodes} {_nodes(nodes)}: {plan.what}")
            continue
        if best is not None and plan.seconds > 1.5 * best.seconds:
            break  # more nodes only make it slower
        best = plan if best is None or plan.seconds < best.seconds else best
        if _asked(plan, launch) <= limit:
            return _filled(config, plan, limit=limit)
    if best is None:
        what = "no number of nodes can train this run: " + "; ".join(why[:3])
        raise UserError(what, where="--hours", remedy="see gristmill plan", exit=Exit.REFUSED)
    raise UserError(
        f"no number of nodes ends this run in {described_span(limit)}: the best of them, "
        f"{best.nodes}, would need {described_span(_asked(best, launch))}",
        where="--hours",
        remedy="give more time, a larger batch, or another layout: see gristmill plan",
        exit=Exit.REFUSED,
    )


def _node_counts() -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, …"""
    yield 1
    power = 2
    while power <= _MOST_NODES:
        yield power
        yield power * 3 // 2
        power *= 2


def _on_nodes(config: RunConfig, nodes: int) -> _NodePlan | Problem:
    request = _request(config, nodes=nodes)
    layout = own_layout(request)
    if isinstance(layout, Problem):
        return layout
    if not layout.fits:
        return Problem(layout.why_not or "does not fit")
    left = _left(request)
    return _NodePlan(nodes, left * request.cost(layout).seconds, left)


def _request(config: RunConfig, *, nodes: int) -> PlanRequest:
    launch = config.launch or LaunchConfig()
    if launch.gpu is None:
        raise UserError(
            "nothing says which GPUs the nodes have",
            where="launch.gpu",
            remedy='set it to their kind, such as launch.gpu="h100-80gb"',
        )
    each = _each(config)
    return plan_request(config, gpus=nodes * each, per_node=each)


def _each(config: RunConfig) -> int:
    """Processes on a node: those that are asked for, or one for each device that nodes usually
    have."""
    launch = config.launch or LaunchConfig()
    if launch.processes_per_node or launch.gpus_per_node or launch.gpu is None:
        return launch.each
    return open_hardware(launch.gpu, where="launch.gpu").per_node


def _left(request: PlanRequest) -> float:
    """The share of a run that it has not saved yet."""
    resolved = resolve(request.config, vocab=request.vocab)
    done = run_folder(request.config).newest_step() or 0
    return max(0.0, 1 - done / resolved.steps)


def _asked(plan: _NodePlan, launch: LaunchConfig) -> float:
    """The wall time for a job."""
    seconds = RESERVE * plan.seconds + parse_seconds(launch.stop_early)
    return math.ceil(seconds / _QUARTER) * _QUARTER


def _filled(config: RunConfig, plan: _NodePlan, *, limit: float) -> tuple[RunConfig, str]:
    launch, each = config.launch or LaunchConfig(), _each(config)
    wall = min(limit, _asked(plan, launch))
    time = f"{int(wall // 3600)}h{int(wall // 60 % 60):02d}m"
    changes: dict[str, object] = {"nodes": plan.nodes, "time": time}
    if launch.processes_per_node is None and launch.gpus_per_node is None:
        changes["processes_per_node"] = each
    made = config.model_copy(update={"launch": launch.model_copy(update=changes)})
    words = (
        f"planned: {described_span(plan.seconds)} on {plan.nodes} {_nodes(plan.nodes)} of {each} "
        f"{launch.gpu}; launch.nodes = {plan.nodes}, launch.time = {time}"
    )
    return made, words


def _nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


def time_warning(config: RunConfig) -> str | None:
    """What to say if the time of a job is shorter than planned; None without `launch.gpu`."""
    launch = config.launch
    if launch is None or launch.gpu is None or launch.time is None:
        return None
    plan = _on_nodes(config, launch.nodes)
    if isinstance(plan, Problem):
        return f"this job is not planned to work: {plan.what}"
    there = parse_seconds(launch.time) - parse_seconds(launch.stop_early)
    if plan.seconds <= there:
        return None
    text = f"launch.time is {launch.time}, and the run is planned to need "
    text += described_span(plan.seconds)
    if launch.requeue:
        jobs = math.ceil(plan.seconds / max(there, 1.0))
        return f"{text}: it will take about {jobs} jobs, one after the other"
    reached = 1 - plan.left * (1 - there / plan.seconds)
    return f"{text}: it will stop after {reached:.0%} of its steps (launch.requeue is false)"
