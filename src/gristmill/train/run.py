"""A run from start to end: lock the folder, build, resume, train, say how it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import Exit
from gristmill.base.files import FolderLock
from gristmill.base.units import format_count, format_seconds, parse_seconds
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter, require_room
from gristmill.config.resolve import Resolved
from gristmill.config.schema import RunConfig
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.world import memory_explained
from gristmill.plan.arithmetic import count_parameters
from gristmill.track.folder import RunFolder
from gristmill.train.assemble import (
    Assembly,
    assemble,
    build_hooks,
    build_loader,
    build_meter,
    build_validate,
)
from gristmill.train.hooks import Hooks, StopRequest, Validate
from gristmill.train.loop import train
from gristmill.train.resume import Resumed, move_aside, resume
from gristmill.train.tracker import Tracker, build_tracker


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended."""

    folder: Path
    exit: Exit
    step: int
    best_loss: float | None


def run_folder(config: RunConfig) -> RunFolder:
    """Where a run keeps its files."""
    return RunFolder(Path(config.folder or f"runs/{config.name}"))


def run_training(config: RunConfig, *, fresh: bool = False) -> Outcome:
    """Train, or go on with the run that the folder holds."""
    folder = run_folder(config)
    if fresh:
        move_aside(folder)
    folder.create()
    lock = FolderLock(folder.path)
    lock.acquire()
    try:
        return _locked_training(config, folder)
    finally:
        lock.release()


def _locked_training(config: RunConfig, folder: RunFolder) -> Outcome:
    with StopRequest(
        time_limit=parse_seconds(config.train.time_limit) if config.train.time_limit else None
    ) as stop:
        parts = assemble(config, folder)
        rows = parts.numbers.padded_vocab
        require_room(folder.path, 12 * count_parameters(config.model, rows=rows))
        resumed = resume(parts)
        tracker = build_tracker(
            config,
            folder,
            steps=parts.numbers.steps,
            samples=parts.numbers.samples_at_end(parts.state.progress),
            clock=lambda: parts.state.progress,
        )
        try:
            _announce(parts, tracker, resumed)
            outcome = _run(parts, tracker, stop)
        except BaseException as error:
            _note_failure(parts, tracker, error)
            raise
        finally:
            tracker.close()
        return outcome


def _announce(parts: Assembly, tracker: Tracker, resumed: Resumed) -> None:
    numbers, state = parts.numbers, parts.state
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    tracker.say(
        f"{parts.config.name}: {format_count(parameters)} parameters, vocabulary {numbers.vocab}, "
        f"batch {_batch_words(numbers)}, "
        f"{parts.config.precision.described} on {parts.world.name}"
    )
    if resumed.checkpoint is not None:
        tracker.say(f"resuming from {resumed.checkpoint.name}")
    elif parts.config.model.start is not None:
        tracker.say(f"starting from the weights in {parts.config.model.start}")
    for note in resumed.notes:
        tracker.say(note, level="warning")
    parts.folder.write_status("running", step=state.progress.steps, steps=numbers.steps)


def _batch_words(numbers: Resolved) -> str:
    first, sizes, times = numbers.stages.first, str(numbers.batch), str(numbers.accumulate)
    if first < numbers.batch:
        sizes, times = f"{first} to {sizes}", f"{first // numbers.micro_batch} to {times}"
    words = f"{sizes} x {numbers.sequence} tokens"
    return f"{words} in {times} parts" if numbers.accumulate > 1 else words


def _run(parts: Assembly, tracker: Tracker, stop: StopRequest) -> Outcome:
    config, state, numbers = parts.config, parts.state, parts.numbers
    if state.progress.reached(config.train.until):
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
    )
    validate = build_validate(parts, tracker)
    meter = build_meter(parts, tracker)
    hooks = Hooks(
        build_hooks(parts, tracker, writer, validate),
        meter=meter,
        tracker=tracker,
        stop=stop,
        writer=writer,
        batch_at=numbers.stages.batch_at,
    )
    batches = build_loader(parts).starting_at(state.progress)
    advice = 'set train.micro_batch lower, or train.recompute = "full"'
    try:
        with memory_explained(advice):
            train(
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
    tracker.say(_closing_words(parts, validate, stopped=hooks.stopping))
    best = validate.best if validate is not None else None
    exit = Exit.STOPPED if hooks.stopping else Exit.DONE
    return _finish(parts, exit, best.loss if best else None)


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
    parts.folder.write_status("done" if exit is Exit.DONE else "stopped", **facts)
    return Outcome(parts.folder.path, exit, step, best_loss)


def _note_failure(parts: Assembly, tracker: Tracker, error: BaseException) -> None:
    step = parts.state.progress.steps
    what = str(error) or type(error).__name__
    tracker.say(f"failed at step {step}: {what}", level="error")
    parts.folder.write_status("failed", step=step, error=what, time=time.time())
