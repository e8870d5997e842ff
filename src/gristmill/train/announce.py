"""The first lines of the log: what a run trains, on what, and how."""

from __future__ import annotations

from gristmill.config.resolve import Resolved
from gristmill.config.rules import config_warnings
from gristmill.distributed.device import Device
from gristmill.models.spec import linear_shapes
from gristmill.plan.preconditioner import describe_preconditioner
from gristmill.train.assemble import BuiltRun
from gristmill.train.mixture import mixture_notes
from gristmill.train.resume import Resumed
from gristmill.train.tracker import Tracker

_AXES = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of the model",
    "dp_shard": "shards of the weights and the batch",
    "cp": "shards of every sequence",
    "tp": "shards of every layer",
}


def announce(run: BuiltRun, tracker: Tracker, resumed: Resumed) -> None:
    """Write the first lines of the log, and set the status to running."""
    resolved, state = run.resolved, run.state
    if resumed.continues:
        for note in resumed.notes:
            tracker.say(note, level="warning")
        if run.control.is_rank0:
            # The previous leading worker may have recorded its failure.
            run.folder.write_status("running", step=state.progress.steps, steps=resolved.steps)
        return
    tracker.say(
        f"{run.config.name}: {run.described_size}, "
        f"vocabulary {resolved.vocab}, "
        f"batch {_describe_batch(resolved)}, "
        f"{run.config.precision.described} on {describe_device(run.world.device)}"
    )
    if run.world.layout.processes > 1:
        tracker.say(_mesh_table(run))
    elif (gpus := run.world.device.visible) > 1:
        tracker.say(f"this run uses one of {gpus} GPUs; all train with --processes {gpus}")
    if run.state.workers:
        tracker.say(run.config.parallel.described_exchange)
    if (cost := _preconditioner_cost(run)) is not None:
        tracker.say(cost)
    if resumed.checkpoint is not None:
        own = resumed.checkpoint.parent == run.folder.checkpoints
        tracker.say(f"resuming from {resumed.checkpoint.name if own else resumed.checkpoint}")
    elif run.config.model.initial_weights is not None:
        tracker.say(f"starting from the weights in {run.config.model.initial_weights}")
    mixture, mixture_warnings = mixture_notes(run)
    for note in (*run.data.notes, *mixture, *run.changes):
        tracker.say(note)
    if (expected := run.expected) is not None:
        left = resolved.samples_at_end(state.progress) - state.progress.samples
        tracker.say(f"planned: {expected.described(tokens=max(0, left) * resolved.sequence)}")
    starting = () if resumed.checkpoint is not None else run.notes
    for note in (
        *run.data.warnings,
        *mixture_warnings,
        *starting,
        *resumed.notes,
        *config_warnings(run.config, resolved),
    ):
        tracker.say(note, level="warning")
    if run.control.is_rank0:
        run.folder.write_status("running", step=state.progress.steps, steps=resolved.steps)


def _preconditioner_cost(run: BuiltRun) -> str | None:
    """Memory and communication of the preconditioner, in words."""
    mesh, alone = run.world.mesh, run.config.parallel.decentralized
    processes = mesh.processes // mesh.pp // (mesh.dp_replicate if alone else 1)
    linears = linear_shapes(run.strategy.model)
    return describe_preconditioner(run.config.optim, linears, processes=processes)


def _mesh_table(run: BuiltRun) -> str:
    """The mesh as a small table, with this process's coordinates."""
    mesh, at, devices = run.world.mesh, run.world.at, run.world.devices
    if devices is not None:
        sizes = [f"    {axis:<13}{size:>4}  {_AXES[axis]}" for axis, size in devices.sizes.items()]
        head = f"{devices.processes} devices, driven by {mesh.processes} processes"
        return "\n".join([head, *(size for size in sizes if " 1  " not in size)])
    apart = {"dp_replicate": "workers with weights of their own"}
    words = _AXES | (apart if run.state.workers else {})
    rows = [
        f"    {axis:<13}{size:>4}   {at[axis]:>4}  {words[axis]}"
        for axis, size in mesh.sizes.items()
        if size > 1
    ]
    head = f"{mesh.processes} processes; this is rank {run.world.rank} on {run.world.place.host}"
    return "\n".join([head, "    axis         size   here", *rows])


def describe_device(device: Device) -> str:
    """The device of a process, and the number of processes."""
    if device.sharers is None or device.sharers == 1:
        return device.name
    return f"{device.name}, which {device.sharers} processes share, exchanging through host memory"


def _describe_batch(resolved: Resolved) -> str:
    first, sizes, times = resolved.ramp.first, str(resolved.batch), str(resolved.accumulate)
    if first < resolved.batch:
        sizes, times = f"{first} to {sizes}", f"{first // resolved.micro_batch} to {times}"
    batch = f"{sizes} x {resolved.sequence} tokens"
    return f"{batch} in {times} micro-batches" if resolved.accumulate > 1 else batch
