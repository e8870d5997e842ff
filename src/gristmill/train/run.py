"""A run from start to end: lock the folder, build, resume, train, say how it ended.

Of several processes the first speaks: it holds the folder, and writes all but its share of the
checkpoints and the others' logs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import FolderLock
from gristmill.base.process import Place
from gristmill.base.units import format_count, format_seconds, parse_seconds
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter, require_checkpoint_room
from gristmill.config.resolve import Resolved
from gristmill.config.rules import check_mesh, doubts
from gristmill.config.schema import RunConfig
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.device import memory_explained
from gristmill.parallel.liveness.monitor import Monitor
from gristmill.parallel.liveness.verdict import Limits
from gristmill.parallel.world import World, close_world, open_world
from gristmill.track.folder import RunFolder, move_aside, run_folder
from gristmill.track.metrics import ValidationRecord, read_metrics
from gristmill.train.assemble import (
    Assembly,
    assemble,
    build_hooks,
    build_loader,
    build_meter,
    build_validate,
)
from gristmill.train.hooks import Hooks, Validate
from gristmill.train.loop import train
from gristmill.train.resume import Resumed, resume
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker, build_tracker


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended."""

    folder: Path
    exit: Exit
    step: int
    best_loss: float | None


def run_training(
    config: RunConfig, *, fresh: bool = False, stop: StopRequest | None = None
) -> Outcome:
    """Train, or go on with the run that the folder holds. `stop`: who listens for signals already;
    if nobody does, this does while it runs."""
    place, folder = Place.current(), run_folder(config)
    mesh = check_mesh(config, processes=place.world)
    listening = contextlib.nullcontext(stop) if stop is not None else StopRequest()
    limits = Limits.of(config.parallel, save=config.checkpoint.timeout)
    monitor = Monitor(place, limits=limits, log=folder.rank_log(place.rank))
    with _placed(folder, monitor), listening as stop, monitor:
        if config.train.time_limit is not None:
            stop.time_limit = parse_seconds(config.train.time_limit)
        world = open_world(
            config.runtime,
            tf32=config.precision.tf32,
            mesh=mesh,
            parallel=config.parallel,
            place=place,
        )
        control = world.control_group("run")
        lock = FolderLock(folder.path)
        new = control.on_rank0(lambda: _take(folder, lock, fresh=fresh))
        try:
            outcome = _locked_training(config, folder, world, control, stop, monitor)
        except UserError:
            if new and world.is_rank0:
                folder.remove_unused()
            raise
        finally:
            lock.release()
    # Not on the way out of an error: the others may never answer.
    close_world()
    return outcome


@contextlib.contextmanager
def _placed(folder: RunFolder, monitor: Monitor) -> Iterator[None]:
    """Let an error that nobody expected say where it happened, and where more is written."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        rank = monitor.place.rank
        log = folder.rank_log(rank) if rank else folder.log
        words = [monitor.where] if monitor.active else []
        words += [f"the log is {log}"] if log.is_file() else []
        if words:
            error.add_note("; ".join(words))
        raise


def _take(folder: RunFolder, lock: FolderLock, *, fresh: bool) -> bool:
    """Make the folder this run's; whether it is new."""
    if fresh:
        move_aside(folder)
    new = folder.create()
    lock.acquire()
    return new


def _locked_training(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    control: ControlGroup,
    stop: StopRequest,
    monitor: Monitor,
) -> Outcome:
    parts = assemble(config, folder, world, control)
    require_checkpoint_room(folder.path, parts.checkpoint_bytes)
    resumed = resume(parts)
    monitor.phase("start", parts.state.progress.steps)
    tracker = build_tracker(
        config,
        folder,
        steps=parts.numbers.steps,
        samples=parts.numbers.samples_at_end(parts.state.progress),
        clock=lambda: parts.state.progress,
        rank=world.rank,
    )
    monitor.on_exit = lambda message: _note_failure(parts, tracker, UserError(message))
    try:
        _announce(parts, tracker, resumed)
        outcome = _run(parts, tracker, stop, monitor)
    except BaseException as error:
        # When another process is lost, what fails here is only a consequence.
        cause = monitor.explain(error) or error
        _note_failure(parts, tracker, cause)
        if cause is not error:
            raise cause from error
        raise
    finally:
        tracker.close()
    return outcome


def _announce(parts: Assembly, tracker: Tracker, resumed: Resumed) -> None:
    numbers, state = parts.numbers, parts.state
    tracker.say(
        f"{parts.config.name}: {format_count(parts.parameters)} parameters, "
        f"vocabulary {numbers.vocab}, "
        f"batch {_batch_words(numbers)}, "
        f"{parts.config.precision.described} on {parts.world.device.name}"
    )
    if parts.world.mesh.processes > 1:
        tracker.say(_mesh_words(parts))
    if resumed.checkpoint is not None:
        tracker.say(f"resuming from {resumed.checkpoint.name}")
    elif parts.config.model.start is not None:
        tracker.say(f"starting from the weights in {parts.config.model.start}")
    for note in (*resumed.notes, *doubts(parts.config, numbers)):
        tracker.say(note, level="warning")
    if parts.world.is_rank0:
        parts.folder.write_status("running", step=state.progress.steps, steps=numbers.steps)


def _mesh_words(parts: Assembly) -> str:
    """The mesh as a small table, and where this process stands in it."""
    mesh, at = parts.world.mesh, parts.world.at
    rows = [
        f"    {axis:<13}{size:>4}   {at[axis]:>4}  {_AXIS_WORDS[axis]}"
        for axis, size in mesh.sizes.items()
        if size > 1
    ]
    head = (
        f"{mesh.processes} processes; this is rank {parts.world.rank} on {parts.world.place.host}"
    )
    return "\n".join([head, "    axis         size   here", *rows])


_AXIS_WORDS = {
    "pp": "stages of layers",
    "dp_replicate": "copies of the model",
    "dp_shard": "shares of weights and of the batch",
    "cp": "parts of every sequence",
    "tp": "parts of every layer",
}


def _batch_words(numbers: Resolved) -> str:
    first, sizes, times = numbers.ramp.first, str(numbers.batch), str(numbers.accumulate)
    if first < numbers.batch:
        sizes, times = f"{first} to {sizes}", f"{first // numbers.micro_batch} to {times}"
    words = f"{sizes} x {numbers.sequence} tokens"
    return f"{words} in {times} parts" if numbers.accumulate > 1 else words


def _run(parts: Assembly, tracker: Tracker, stop: StopRequest, monitor: Monitor) -> Outcome:
    config, state, numbers = parts.config, parts.state, parts.numbers
    if state.progress.reached(config.train.until) and _validated(parts):
        tracker.say(
            f"nothing to do: the run is complete at step {state.progress.steps}; "
            "raise train.until to go on"
        )
        best = CheckpointFolder(parts.folder.checkpoints).best()
        return _finish(parts, Exit.DONE, best.loss if best else None)
    writer = CheckpointWriter(
        CheckpointFolder(parts.folder.checkpoints),
        config.checkpoint,
        progress_at=numbers.progress_at,
        say=tracker.say,
        control=parts.world.control_group(
            "checkpoints", timeout=parse_seconds(config.checkpoint.timeout)
        ),
    )
    validate = build_validate(parts, tracker)
    meter = build_meter(parts, tracker)
    hooks = Hooks(
        build_hooks(parts, tracker, writer, validate),
        meter=meter,
        tracker=tracker,
        stop=stop,
        writer=writer,
        batch_at=numbers.ramp.batch_at,
        monitor=monitor,
    )
    batches = build_loader(parts).starting_at(state.progress)
    advice = 'set train.micro_batch lower, or train.recompute = "full"'
    try:
        with memory_explained(advice):
            finished = train(
                state,
                batches=batches,
                strategy=parts.strategy,
                schedule=build_schedule(config, numbers),
                hooks=hooks,
                until=config.train.until,
            )
    finally:
        batches.close()
        writer.wait()
    tracker.say(_closing_words(parts, validate, stopped=not finished))
    best = validate.best if validate is not None else None
    exit = Exit.DONE if finished else Exit.STOPPED
    return _finish(parts, exit, best.loss if best else None)


def _validated(parts: Assembly) -> bool:
    """Whether the last validation of a finished run was made: one may have been stopped before."""

    def recorded() -> bool:
        step, records = parts.state.progress.steps, read_metrics(parts.folder.metrics)
        return any(isinstance(one, ValidationRecord) and one.step == step for one in records)

    return parts.data.validation is None or bool(parts.control.on_rank0(recorded))


def _closing_words(parts: Assembly, validate: Validate | None, *, stopped: bool) -> str:
    words = "stopped and saved; the same command goes on" if stopped else "done"
    state = parts.state
    words += f" at step {state.progress.steps} after {format_seconds(state.counters.seconds)}"
    if validate is not None and validate.best is not None:
        words += f", best validation loss {validate.best.loss:.4f} at step {validate.best.step}"
    return words


def _finish(parts: Assembly, exit: Exit, best_loss: float | None) -> Outcome:
    step = parts.state.progress.steps
    facts = {"step": step, "steps": parts.numbers.steps, "best_loss": best_loss}
    if parts.world.is_rank0:
        parts.folder.write_status("done" if exit is Exit.DONE else "stopped", **facts)
    return Outcome(parts.folder.path, exit, step, best_loss)


def _note_failure(parts: Assembly, tracker: Tracker, error: BaseException) -> None:
    step = parts.state.progress.steps
    what = str(error) or type(error).__name__
    tracker.say(f"failed at step {step}: {what}", level="error")
    if parts.world.is_rank0:
        parts.folder.write_status("failed", step=step, error=what, time=time.time())
