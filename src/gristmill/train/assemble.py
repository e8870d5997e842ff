"""The place where data, model, optimizer and strategy meet: from settings to a finished run.

    lock the folder -> open data and tokenizer -> build -> resume or start -> loop -> status

Everything a user can get wrong is found before the first step; nothing that exists is overwritten.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import FolderLock, write_atomic, write_json
from gristmill.base.process import Place
from gristmill.base.units import format_count, format_seconds, parse_seconds
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import fill_model
from gristmill.checkpoint.state import TrainState, restore
from gristmill.checkpoint.writer import CheckpointWriter, require_room
from gristmill.config.load import changed_settings, dump_run
from gristmill.config.resolve import SHAPE_FREE, Resolved, resolve
from gristmill.config.schema import RunConfig
from gristmill.data.dataset import Parts, open_parts
from gristmill.data.loader import Loader, validation_batches
from gristmill.data.sampling import build_index
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.optim.build import build_optimizer
from gristmill.optim.schedule import build_schedule
from gristmill.parallel.build import build_strategy
from gristmill.parallel.strategy import Strategy
from gristmill.parallel.world import World, memory_explained, open_world
from gristmill.plan.arithmetic import count_parameters, token_cost
from gristmill.text.tokenizers import Tokenizer, open_tokenizer
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics
from gristmill.train.environment import describe_environment
from gristmill.train.hooks import Checkpoint, Hook, Hooks, Sample, StopRequest, Validate
from gristmill.train.loop import train
from gristmill.train.meter import Meter
from gristmill.train.tracker import Tracker, build_tracker


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended."""

    folder: Path
    exit: Exit
    step: int
    best_loss: float | None


@dataclass(frozen=True)
class _Parts:
    """Everything that was built for a run."""

    config: RunConfig
    numbers: Resolved
    folder: RunFolder
    data: Parts
    tokenizer: Tokenizer
    world: World
    model: GPT
    state: TrainState
    strategy: Strategy


def run_folder(config: RunConfig) -> RunFolder:
    """Where a run keeps its files."""
    return RunFolder(Path(config.folder or f"runs/{config.name}"))


def run_training(config: RunConfig, *, fresh: bool = False) -> Outcome:
    """Train, or go on with the run that the folder holds."""
    folder = run_folder(config)
    if fresh:
        _move_aside(folder)
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
        parts = _build(config, folder)
        resumed = _resume(parts)
        tracker = build_tracker(
            config, folder, steps=parts.numbers.steps, clock=lambda: parts.state.progress
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


# ------------------------------------------------------------------ building


def _build(config: RunConfig, folder: RunFolder) -> _Parts:
    data = open_parts(config.data, sequence=config.data.sequence or config.model.context)
    tokenizer = _open_tokenizer(config, data)
    numbers = resolve(config, vocab=tokenizer.size)
    world = open_world(config.runtime, tf32=config.precision.tf32)
    with memory_explained("the model itself does not fit: choose a smaller one"):
        model = build_model(
            config.model,
            vocab=numbers.vocab,
            device=world.device,
            recompute=config.train.recompute == "full",
        )
    if config.model.start is not None:
        fill_model(model, config.model.start)
    else:
        model.initialise(config.train.seed)
    optimizer = build_optimizer(config.optim, model)
    strategy = build_strategy(
        config, model=model, optimizer=optimizer, world=world, place=Place.current()
    )
    state = TrainState(
        model=model,
        optimizer=optimizer,
        identity=_identity(config, numbers, data, tokenizer),
        settings={"model": config.model.model_dump(exclude_none=True), "vocab": numbers.vocab},
        strategy=strategy.state(),
    )
    require_room(folder.path, 12 * count_parameters(config.model, rows=numbers.padded_vocab))
    return _Parts(config, numbers, folder, data, tokenizer, world, model, state, strategy)


def _open_tokenizer(config: RunConfig, data: Parts) -> Tokenizer:
    """The tokenizer the token files were made with, proven by its fingerprint."""
    tokenizer = open_tokenizer(config.data.tokenizer or f"{config.data.paths}.tokenizer")
    made_with = data.train.reader.info.tokenizer
    if tokenizer.fingerprint != made_with:
        raise UserError(
            f"the token files were made with tokenizer {made_with[:12]}, and this one is "
            f"{tokenizer.fingerprint[:12]}",
            where=f"data.tokenizer {config.data.tokenizer or config.data.paths + '.tokenizer'}",
            remedy="give the tokenizer that `gristmill prepare` used, or prepare again",
            exit=Exit.DATA,
        )
    if config.model.vocab is not None and config.model.vocab < tokenizer.size:
        raise UserError(
            f"the tokenizer has {tokenizer.size} ids, and the model only {config.model.vocab}",
            where="model.vocab",
            remedy="leave model.vocab out, or prepare the text with a smaller tokenizer",
        )
    return tokenizer


def _identity(
    config: RunConfig, numbers: Resolved, data: Parts, tokenizer: Tokenizer
) -> dict[str, Any]:
    """What must stay the same for a run to go on exactly."""
    model = config.model.model_dump(exclude_none=True, exclude=SHAPE_FREE)
    stretch = data.train.stretch
    return {
        **{f"model.{name}": value for name, value in model.items()},
        "model.vocab": numbers.vocab,
        "tokenizer": tokenizer.fingerprint,
        "data.paths (content)": data.train.reader.info.fingerprint,
        "data.split (tokens)": [stretch.begin, stretch.end],
        "data.order": config.data.order,
        "data.sequence": numbers.sequence,
        "train.seed": config.train.seed,
        "optim.type": config.optim.type,
    }


# ------------------------------------------------------------------ resuming


@dataclass(frozen=True)
class _Resumed:
    """What was found in the run folder."""

    checkpoint: Path | None
    notes: list[str]


def _resume(parts: _Parts) -> _Resumed:
    """Load the newest intact checkpoint, if there is one, and make the folder fit it."""
    folder, notes = parts.folder, []
    checkpoints = CheckpointFolder(folder.checkpoints)
    checkpoints.clean()
    found = checkpoints.newest_intact()
    if found.path is None and found.damaged:
        raise UserError(
            [
                Problem("every checkpoint of this run is damaged", str(folder.checkpoints)),
                *(problem for _, problems in found.damaged for problem in problems),
                Problem(
                    "nothing was changed",
                    str(folder.path),
                    "restore one from a backup, or start anew with --fresh, which moves the old "
                    "run aside",
                ),
            ],
            exit=Exit.STORAGE,
        )
    if found.path is not None:
        saved = restore(parts.state, found.path)
        parts.strategy.load(parts.state.strategy)
        notes += _resume_differences(saved)
    for path, problems in found.damaged:
        aside = checkpoints.set_aside(path)
        what = "; ".join(str(problem) for problem in problems)
        notes.append(f"skipped damaged checkpoint {path.name} ({what}); it is now {aside.name}")
    cut_metrics(folder.metrics, after=parts.state.progress.steps if found.path else -1)
    if folder.holds_run():
        notes += [f"changed: {line}" for line in changed_settings(folder.settings, parts.config)]
    _write_run_files(parts)
    return _Resumed(found.path, notes)


def _resume_differences(saved: dict[str, Any]) -> list[str]:
    """Reasons why the rest of the run may not be bit-identical to an uninterrupted one."""
    now = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    return [
        f"{name} was {saved.get(name)} and is now {value}: losses agree only within rounding"
        for name, value in now.items()
        if saved.get(name) != value
    ]


def _write_run_files(parts: _Parts) -> None:
    folder = parts.folder
    write_atomic(folder.settings, dump_run(parts.config))
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    before = folder.origin.read_text() if folder.origin.is_file() else ""
    write_atomic(folder.origin, f"{before}{when}  {shlex.join(sys.argv)}\n")
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    write_json(folder.environment, describe_environment(parts.world, parameters=parameters))
    parts.tokenizer.save(folder.tokenizer)


def _move_aside(folder: RunFolder) -> None:
    """Give an existing run another name, so that nothing is lost."""
    if not folder.holds_run():
        return
    lock = FolderLock(folder.path)
    lock.acquire()
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    os.rename(folder.path, folder.path.with_name(f"{folder.path.name}.old-{stamp}"))
    lock.release()


# ------------------------------------------------------------------ running


def _announce(parts: _Parts, tracker: Tracker, resumed: _Resumed) -> None:
    numbers, state = parts.numbers, parts.state
    parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    tracker.say(
        f"{parts.config.name}: {format_count(parameters)} parameters, vocabulary {numbers.vocab}, "
        f"batch {numbers.batch} x {numbers.sequence} tokens"
        f"{f' in {numbers.accumulate} parts' if numbers.accumulate > 1 else ''}, "
        f"{parts.config.precision.compute} on {parts.world.name}"
    )
    if resumed.checkpoint is not None:
        tracker.say(f"resuming from {resumed.checkpoint.name}")
    elif parts.config.model.start is not None:
        tracker.say(f"starting from the weights in {parts.config.model.start}")
    for note in resumed.notes:
        tracker.say(note, level="warning")
    parts.folder.write_status("running", step=state.progress.steps, steps=numbers.steps)


def _run(parts: _Parts, tracker: Tracker, stop: StopRequest) -> Outcome:
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
        per_step=numbers.progress_at(1),
        say=tracker.say,
    )
    validate = _build_validate(parts, tracker)
    meter = Meter(
        tracker,
        counters=state.counters,
        every=config.track.every,
        cost=token_cost(config.model, rows=numbers.padded_vocab, sequence=numbers.sequence),
        world=parts.world,
        bad_steps=config.train.bad_steps,
    )
    hooks = Hooks(
        _build_hooks(parts, tracker, writer, validate),
        meter=meter,
        tracker=tracker,
        stop=stop,
        writer=writer,
    )
    batches = _build_loader(parts).starting_at(state.progress)
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


def _build_loader(parts: _Parts) -> Loader:
    numbers, config = parts.numbers, parts.config
    index = build_index(
        config.data.order,
        parts.data.train.stretch,
        sequence=numbers.sequence,
        seed=config.train.seed,
    )
    return Loader(
        parts.data.train,
        index,
        sequence=numbers.sequence,
        micro_batch=numbers.micro_batch,
        accumulate=numbers.accumulate,
        pin=parts.world.device.type == "cuda",
    )


def _build_validate(parts: _Parts, tracker: Tracker) -> Validate | None:
    held = parts.data.validation
    if held is None:
        return None
    checkpoints = CheckpointFolder(parts.folder.checkpoints)
    best = checkpoints.best()
    return Validate(
        parts.numbers.validate_every,
        strategy=parts.strategy,
        batches=lambda: validation_batches(
            held,
            sequence=parts.numbers.sequence,
            windows=parts.config.validation.windows,
            batch=parts.numbers.micro_batch,
        ),
        tracker=tracker,
        state=parts.state,
        best=best if best and checkpoints.path(best.step).is_dir() else None,
    )


def _build_hooks(
    parts: _Parts, tracker: Tracker, writer: CheckpointWriter, validate: Validate | None
) -> list[Hook]:
    config, hooks = parts.config, list[Hook]()
    if validate is not None:
        hooks.append(validate)
    if config.sample is not None:
        hooks.append(
            Sample(
                config.sample,
                model=parts.model,
                tokenizer=parts.tokenizer,
                tracker=tracker,
                state=parts.state,
                seed=config.train.seed,
                folder=parts.folder.samples,
            )
        )
    hooks.append(
        Checkpoint(
            parts.numbers.checkpoint_every,
            writer=writer,
            state=parts.state,
            strategy=parts.strategy,
            validate=validate,
            keep_best=config.checkpoint.keep_best,
        )
    )
    return hooks


def _closing_words(parts: _Parts, validate: Validate | None, *, stopped: bool) -> str:
    counters = dataclasses.asdict(parts.state.counters)
    words = "stopped and saved; the same command goes on" if stopped else "done"
    words += f" at step {parts.state.progress.steps} after {format_seconds(counters['seconds'])}"
    if validate is not None and validate.best is not None:
        words += f", best validation loss {validate.best.loss:.4f} at step {validate.best.step}"
    return words


def _finish(parts: _Parts, exit: Exit, best_loss: float | None) -> Outcome:
    step = parts.state.progress.steps
    facts = {"step": step, "steps": parts.numbers.steps, "best_loss": best_loss}
    parts.folder.write_status("done" if exit is Exit.DONE else "stopped", **facts)
    return Outcome(parts.folder.path, exit, step, best_loss)


def _note_failure(parts: _Parts, tracker: Tracker, error: BaseException) -> None:
    step = parts.state.progress.steps
    what = str(error) or type(error).__name__
    tracker.say(f"failed at step {step}: {what}", level="error")
    parts.folder.write_status("failed", step=step, error=what, time=time.time())
