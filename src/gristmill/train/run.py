"""A run from start to end: lock the folder, build, resume, train, report the outcome.

Rank 0 locks the folder and writes everything in it, except the other ranks' checkpoint shards and
logs.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gristmill.base.errors import Exit, UserError
from gristmill.base.locks import FolderLock
from gristmill.base.process import ProcessInfo
from gristmill.base.units import format_seconds, parse_seconds
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.data.intact import ContentCheck
from gristmill.distributed.control import ControlGroup
from gristmill.distributed.device import memory_explained
from gristmill.distributed.monitor import Monitor
from gristmill.distributed.verdict import Limits
from gristmill.distributed.world import World
from gristmill.optim.schedule import build_schedule
from gristmill.strategies.compiling import CompileClock
from gristmill.strategies.decentralized.membership import ViewChangedError
from gristmill.strategies.strategy import Strategy
from gristmill.track.folder import RunFolder, move_aside, run_folder
from gristmill.train.announce import announce
from gristmill.train.assemble import (
    Assembly,
    assemble,
    build_content_check,
    build_health,
    build_hooks,
    build_loader,
    build_meter,
    build_validate,
)
from gristmill.train.build import close_run_world, device_mesh, open_run_world
from gristmill.train.elastic import ElasticMonitor, ElasticRun
from gristmill.train.elastic_records import is_saved, is_validated, make_up
from gristmill.train.health import Rollback, RunHealth
from gristmill.train.hooks import Hooks, RollbackError
from gristmill.train.loop import train
from gristmill.train.resume import Resumed, resume
from gristmill.train.rollback import choose_step, roll_back
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker, build_tracker

AnyMonitor = Monitor | ElasticMonitor


@dataclass(frozen=True)
class Outcome:
    """How a call of `run_training` ended."""

    folder: Path
    exit: Exit
    step: int
    best_loss: float | None


def run_training(
    config: RunConfig,
    *,
    fresh: bool = False,
    start_from: str | None = None,
    stop: StopRequest | None = None,
    translation: str = "",
) -> Outcome:
    """Train, or resume the run in the folder: from its newest checkpoint, or from the one that
    `start_from` names. `stop`: handles signals already; if None, signals are handled while this
    runs. `translation`: what the command of another program amounts to, for origin.txt."""
    place, folder = ProcessInfo.current(), run_folder(config, translation=translation)
    mesh = device_mesh(config, place)
    handler = contextlib.nullcontext(stop) if stop is not None else StopRequest()
    if config.parallel.elastic and place.world > 1:
        with handler as stop:
            return _elastic_training(config, folder, place, mesh, stop, fresh, start_from)
    limits = Limits.of(config.parallel, save=config.checkpoint.timeout)
    monitor = Monitor(place, limits=limits, log=folder.rank_log(place.rank))
    with _located_errors(folder, monitor), handler as stop, monitor:
        world = open_run_world(config, mesh, place)
        control = world.control_group("run")
        lock, new = FolderLock(folder.path), False
        try:
            claim = partial(_claim, folder, lock, fresh=fresh, start_from=start_from)
            new = control.on_rank0(claim)
            with memory_explained("free some, or use a machine with more"):
                outcome = _locked_training(config, folder, world, control, stop, monitor)
        except UserError:
            if new and control.is_rank0:
                folder.remove_unused()
            raise
        finally:
            lock.release()
    # Not after an error: the other ranks may never answer.
    close_run_world(world)
    return outcome


def _claim(folder: RunFolder, lock: FolderLock, *, fresh: bool, start_from: str | None) -> bool:
    """Make the folder this run's own; returns whether it is new."""
    if fresh:
        move_aside(folder)
    step = None if start_from is None else choose_step(folder, start_from)
    new = folder.create()
    lock.acquire()
    folder.held = lock
    if step is not None:
        roll_back(folder, step)
    return new


def _take_over(folder: RunFolder, lock: FolderLock) -> bool:
    """Lead a run that another worker has led."""
    if not lock.held:
        folder.create()
        # A worker that is frozen, or behind a broken network, holds its lock for ever.
        with contextlib.suppress(UserError):
            lock.acquire()
            folder.held = lock
    return False


def _elastic_training(
    config: RunConfig,
    folder: RunFolder,
    place: ProcessInfo,
    mesh: Mesh,
    stop: StopRequest,
    fresh: bool,
    start_from: str | None,
) -> Outcome:
    """Train with workers that may die and come back: a round for each view of who is there."""
    lock, new = FolderLock(folder.path), False
    run = ElasticRun(config, folder, place, mesh)
    check = build_content_check(run.parts)
    check.start()
    with _located_errors(folder, run.monitor), run:
        try:
            while True:
                try:
                    if (end := run.ended()) is None:
                        control = run.next_view(asked_to_stop=lambda: stop.reason is not None)
                        end = run.ended()
                    if end is not None:
                        return _left_behind(folder, place, end)
                    if control is None:
                        return Outcome(folder.path, Exit.STOPPED, folder.newest_step() or 0, None)
                    if not control.is_rank0:
                        lock.release()
                        folder.held = None
                    control.barrier()
                    claim = partial(_claim, folder, lock, fresh=fresh, start_from=start_from)
                    if run.view.number:
                        # The run goes on, and another worker may lead it now.
                        claim = partial(_take_over, folder, lock)
                    new = control.on_rank0(claim) and control.is_rank0
                    run.keep_key()
                    parts = run.connect()
                    with memory_explained("free some, or use a machine with more"):
                        outcome = _train(
                            parts, stop, run.monitor, check, run.begin, tracked=run.tracked
                        )
                    run.done(complete=outcome.exit is Exit.DONE)
                    return outcome
                except ViewChangedError:
                    continue
                except Exception as error:
                    cause = run.monitor.explain(error)
                    if cause is None:
                        raise
                    if not isinstance(cause, ViewChangedError):
                        raise cause from error
        except UserError:
            if new:
                folder.remove_unused()
            raise
        finally:
            lock.release()
            check.stop()


def _left_behind(folder: RunFolder, place: ProcessInfo, end: Exit) -> Outcome:
    """The outcome of a worker that wakes when the others have ended the run."""
    how = "complete" if end is Exit.DONE else "stopped and saved"
    step = folder.read_status().get("step", 0)
    print(
        f"info: the run is {how} at step {step} by the other workers; worker {place.rank} on "
        f"{place.host} leaves, and nothing was changed",
        flush=True,
    )
    return Outcome(folder.path, end, step, None)


@contextlib.contextmanager
def _located_errors(folder: RunFolder, monitor: AnyMonitor) -> Iterator[None]:
    """Note on unexpected errors where they happened and which log has more."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        rank = monitor.place.rank
        log = folder.rank_log(rank) if rank else folder.log
        notes = [monitor.where] if monitor.active else []
        notes += [f"the log is {log}"] if log.is_file() else []
        if notes:
            error.add_note("; ".join(notes))
        raise


def _locked_training(
    config: RunConfig,
    folder: RunFolder,
    world: World,
    control: ControlGroup,
    stop: StopRequest,
    monitor: Monitor,
) -> Outcome:
    parts = assemble(config, folder, world, control, saves=True)
    check = build_content_check(parts)
    control.on_all_ranks(check.start)
    try:
        return _train(parts, stop, monitor, check, resume)
    finally:
        check.stop()


def _train(
    parts: Assembly,
    stop: StopRequest,
    monitor: AnyMonitor,
    check: ContentCheck,
    begin: Callable[[Assembly], Resumed],
    tracked: Callable[[Tracker], Tracker] | None = None,
) -> Outcome:
    """Resume and train; again each time that the run goes back to an older checkpoint. `begin`
    brings the state to where training goes on; `tracked` may change where records go."""
    if parts.config.train.time_limit is not None:
        stop.time_limit = parse_seconds(parts.config.train.time_limit)
    rolled_back: tuple[Rollback, RunHealth] | None = None
    notes = list[str]()
    was_done = parts.control.on_rank0(partial(_done_step, parts.folder))
    while True:
        resumed = begin(parts)
        resumed.notes.extend(notes)
        monitor.phase("start", parts.state.progress.steps)
        tracker = build_tracker(
            parts.config,
            parts.folder,
            steps=parts.resolved.steps,
            samples=parts.resolved.samples_at_end(parts.state.progress),
            clock=lambda: parts.state.progress,
            rank=parts.world.rank,
            leads=parts.control.is_rank0,
        )
        if tracked is not None:
            tracker = tracked(tracker)
        monitor.on_exit = partial(_note_exit, parts, tracker)
        health = build_health(parts, tracker)
        if rolled_back is not None:
            health.rolled_back(*rolled_back)
        try:
            announce(parts, tracker, resumed)
            continues = resumed.continues
            return _run(parts, tracker, stop, monitor, health, check, continues, was_done)
        except RollbackError as error:
            move = partial(_move_later, parts.folder, error.checkpoint)
            aside = parts.control.on_rank0(move)
            rolled_back = (error.back, health)
            # For the next round, whose records begin at that step.
            where = f"went back to step {error.checkpoint}; what came after it is in {aside}"
            notes = [f"{error.back}; {where}"]
        except BaseException as error:
            # When another process is lost, this error is only a consequence.
            cause = monitor.explain(error) or error
            if isinstance(cause, ViewChangedError):
                parts.state.health = health.state()
            else:
                _note_failure(parts, tracker, cause)
            if cause is not error:
                raise cause from error
            raise
        finally:
            tracker.close()


def _done_step(folder: RunFolder) -> int | None:
    """The step at which a run is complete by its own account."""
    status = folder.read_status()
    return status.get("step") if status.get("state") == "done" else None


def _move_later(folder: RunFolder, step: int) -> str:
    """Go back to a checkpoint; returns where in the folder everything after it is."""
    return str(roll_back(folder, step).relative_to(folder.path))


def _note_exit(parts: Assembly, tracker: Tracker, message: str) -> None:
    _note_failure(parts, tracker, UserError(message))


def _run(
    parts: Assembly,
    tracker: Tracker,
    stop: StopRequest,
    monitor: AnyMonitor,
    health: RunHealth,
    check: ContentCheck,
    continues: bool,
    was_done: int | None,
) -> Outcome:
    """Train to the end. `continues`: from memory, after a change of workers, which may have
    interrupted a validation or a save. `was_done`: the step at which an earlier call completed the
    run; one that was lost before that may have left its last evaluation or samples out."""
    config, state, resolved = parts.config, parts.state, parts.resolved
    reached = state.progress.reached(config.train.until)
    validated = (reached or continues) and is_validated(parts)
    if reached and validated and was_done == state.progress.steps and is_saved(parts):
        health.check_end(uniform=math.log(resolved.vocab))
        if not continues:
            tracker.say(
                f"nothing to do: the run is complete at step {state.progress.steps}; "
                "raise train.until to train further"
            )
        best = state.best if parts.data.validation is not None else None
        return _finish(parts, Exit.DONE, best.loss if best else None)
    writer = CheckpointWriter(
        CheckpointFolder(parts.folder.checkpoints),
        config.checkpoint,
        progress_at=resolved.progress_at,
        say=tracker.say,
        warn=partial(tracker.say, level="warning"),
        control=parts.world.control_group(
            "checkpoints", timeout=parse_seconds(config.checkpoint.timeout)
        ),
        device=parts.world.device.torch_device,
    )
    validate = build_validate(parts, tracker)
    if validate is not None and reached and validated:
        validate.skip_end()
    all_hooks = build_hooks(parts, tracker, writer, validate, health, check)
    cleanup = contextlib.ExitStack()
    compile_seconds: Callable[[], float] = float
    if parts.strategy.compiled is not None:
        compile_seconds = partial(_step_compiled, parts.strategy)
    elif config.runtime.compiles(parts.world.device.kind):
        clock = cleanup.enter_context(CompileClock(begins=_CompileNotice(tracker)))
        compile_seconds = partial(getattr, clock, "seconds")
    hooks = Hooks(
        all_hooks,
        meter=build_meter(parts, tracker, health, compile_seconds),
        tracker=tracker,
        stop=stop,
        writer=writer,
        resolved=resolved,
        control=parts.control,
        monitor=monitor,
        exit_every=config.train.exit_every,
    )
    batches = build_loader(parts).starting_at(state.progress)
    advice = 'set train.micro_batch lower (and train.batch), or train.recompute = "full"'
    try:
        with memory_explained(advice):
            if continues and state.progress.steps > 0:
                make_up(parts, all_hooks, validated=validated)
            finished = train(
                state,
                batches=batches,
                strategy=parts.strategy,
                schedule=build_schedule(config, resolved),
                hooks=hooks,
                until=config.train.until,
            )
        parts.strategy.close()
    except BaseException:
        if isinstance(monitor, ElasticMonitor):
            # Others may have to continue from here: record what has been computed.
            with contextlib.suppress(Exception):
                hooks.meter.drain()
        raise
    finally:
        batches.close()
        cleanup.close()
        writer.close()
    best = state.best if validate is not None else None
    outcome = "done" if finished else "stopped and saved"
    outcome += f" at step {state.progress.steps} after {format_seconds(state.counters.seconds)}"
    if best is not None:
        outcome += f", best validation loss {best.loss:.4f} at step {best.step}"
    if state.counters.skipped:
        outcome += f", {state.counters.skipped} steps skipped"
    if not finished:
        outcome += "; run the same command again to resume"
    tracker.say(outcome)
    return _finish(parts, Exit.DONE if finished else Exit.STOPPED, best.loss if best else None)


def _step_compiled(strategy: Strategy) -> float:
    """Seconds that it took so far to compile a step that is one function."""
    return 0.0 if strategy.compiled is None else strategy.compiled.seconds


class _CompileNotice:
    """Tells once that the model is being compiled, which may take a while."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker, self.told = tracker, False

    def __call__(self) -> None:
        if not self.told:
            self.told = True
            self.tracker.say("compiling; a minute or so at first, less when the cache has it")


def _finish(parts: Assembly, exit: Exit, best_loss: float | None) -> Outcome:
    step = parts.state.progress.steps
    facts = {"step": step, "steps": parts.resolved.steps, "best_loss": best_loss}
    if parts.control.is_rank0:
        parts.folder.write_status("done" if exit is Exit.DONE else "stopped", **facts)
    return Outcome(parts.folder.path, exit, step, best_loss)


def _note_failure(parts: Assembly, tracker: Tracker, error: BaseException) -> None:
    step = parts.state.progress.steps
    what = str(error) or type(error).__name__
    tracker.say(f"failed at step {step}: {what}", level="error")
    if parts.control.is_rank0:
        parts.folder.write_status("failed", step=step, error=what, time=time.time())
