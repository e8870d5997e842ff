"""What the log says when a run begins."""

from __future__ import annotations

from gristmill.config.resolve import Resolved
from gristmill.config.rules import config_warnings
from gristmill.models.spec import linear_shapes
from gristmill.plan.preconditioner import describe_preconditioner
from gristmill.train.assemble import Assembly
from gristmill.train.resume import Resumed
from gristmill.train.tracker import Tracker

_AXES = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of the model",
    "dp_shard": "shards of the weights and the batch",
    "cp": "shards of every sequence",
    "tp": "shards of every layer",
}


def announce(parts: Assembly, tracker: Tracker, resumed: Resumed) -> None:
    """Write the first lines of the log, and that the run is running."""
    resolved, state = parts.resolved, parts.state
    if resumed.continues:
        for note in resumed.notes:
            tracker.say(note, level="warning")
        if parts.control.is_rank0:
            # The worker that led before may have noted that it failed.
            parts.folder.write_status("running", step=state.progress.steps, steps=resolved.steps)
        return
    tracker.say(
        f"{parts.config.name}: {parts.described_size}, "
        f"vocabulary {resolved.vocab}, "
        f"batch {_describe_batch(resolved)}, "
        f"{parts.config.precision.described} on {parts.world.device.name}"
    )
    if parts.world.layout.processes > 1:
        tracker.say(_mesh_table(parts))
    if parts.state.workers:
        tracker.say(parts.config.parallel.described_exchange)
    if (cost := _preconditioner_cost(parts)) is not None:
        tracker.say(cost)
    if resumed.checkpoint is not None:
        own = resumed.checkpoint.parent == parts.folder.checkpoints
        tracker.say(f"resuming from {resumed.checkpoint.name if own else resumed.checkpoint}")
    elif parts.config.model.initial_weights is not None:
        tracker.say(f"starting from the weights in {parts.config.model.initial_weights}")
    for note in parts.data.notes:
        tracker.say(note)
    starting = () if resumed.checkpoint is not None else parts.notes
    for note in (
        *parts.data.warnings,
        *starting,
        *resumed.notes,
        *config_warnings(parts.config, resolved),
    ):
        tracker.say(note, level="warning")
    if parts.control.is_rank0:
        parts.folder.write_status("running", step=state.progress.steps, steps=resolved.steps)


def _preconditioner_cost(parts: Assembly) -> str | None:
    """Memory and communication of the preconditioner, in words."""
    mesh, alone = parts.world.mesh, parts.config.parallel.decentralized
    processes = mesh.processes // mesh.pp // (mesh.dp_replicate if alone else 1)
    linears = linear_shapes(parts.strategy.model)
    return describe_preconditioner(parts.config.optim, linears, processes=processes)


def _mesh_table(parts: Assembly) -> str:
    """The mesh as a small table, with this process's coordinates."""
    mesh, at, devices = parts.world.mesh, parts.world.at, parts.world.devices
    if devices is not None:
        sizes = [f"    {axis:<13}{size:>4}  {_AXES[axis]}" for axis, size in devices.sizes.items()]
        head = f"{devices.processes} devices, driven by {mesh.processes} processes"
        return "\n".join([head, *(one for one in sizes if " 1  " not in one)])
    apart = {"dp_replicate": "workers with weights of their own"}
    words = _AXES | (apart if parts.state.workers else {})
    rows = [
        f"    {axis:<13}{size:>4}   {at[axis]:>4}  {words[axis]}"
        for axis, size in mesh.sizes.items()
        if size > 1
    ]
    head = (
        f"{mesh.processes} processes; this is rank {parts.world.rank} on {parts.world.place.host}"
    )
    return "\n".join([head, "    axis         size   here", *rows])


def _describe_batch(resolved: Resolved) -> str:
    first, sizes, times = resolved.ramp.first, str(resolved.batch), str(resolved.accumulate)
    if first < resolved.batch:
        sizes, times = f"{first} to {sizes}", f"{first // resolved.micro_batch} to {times}"
    batch = f"{sizes} x {resolved.sequence} tokens"
    return f"{batch} in {times} micro-batches" if resolved.accumulate > 1 else batch
