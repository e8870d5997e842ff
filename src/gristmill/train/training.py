"""Training of an assembled run: resume, then the loop; again after each rollback.

    resume -> tracker, health -> hooks around the loop -> Outcome
                 ^                                  |
                 '------- RollbackError ------------'

The caller has opened the world and locked the folder: `Run.train`, or `train_elastic` for each view
of its workers.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo, job_began
from gristmill.base.units import format_seconds, parse_seconds
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.load import load_run
from gristmill.config.resolve import resolve
from gristmill.config.schema import RunConfig
from gristmill.data.intact import ContentCheck
from gristmill.distributed.device import memory_explained
from gristmill.distributed.liveness.heartbeat import Heartbeat
from gristmill.hub.downloads import settings_folder
from gristmill.launch.jobs.batch import read_record
from gristmill.optim.schedule import build_schedule
from gristmill.plan.explain import TooLittleMemory
from gristmill.strategies.compiling import CompileClock, stop_compile_workers
from gristmill.strategies.decentralized.membership import ViewChangedError
from gristmill.track.account import RunTime, WallAccount, read_run_time
from gristmill.track.folder import RunFolder
from gristmill.train.announce import announce
from gristmill.train.assemble import (
    BuiltRun,
    build_health,
    build_hooks,
    build_loader,
    build_meter,
    build_validate,
)
from gristmill.train.claim import roll_back
from gristmill.train.elastic_records import is_saved, is_validated, make_up
from gristmill.train.health import DivergedError, Rollback, RunHealth
from gristmill.train.hooks import Hooks, RollbackError
from gristmill.train.loop import train
from gristmill.train.memory import explainer, may_change, note_of
from gristmill.train.observer import RunObserver
from gristmill.train.order import order_problem
from gristmill.train.resume import Resumed, resume
from gristmill.train.sources import run_sources
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker, build_alerts, build_tracker

if TYPE_CHECKING:
    from gristmill.track.alerts import Rule

_LAST_WORDS = 4.0
"""Seconds for the delivery of an alert before this process is ended."""


@dataclass(frozen=True)
class Outcome:
    """How training ended."""

    folder: Path
    exit: Exit
    step: int
    best_loss: float | None
    until: str | None = None
    """The new horizon, if the run stopped to change it."""


class PeerMonitor(Protocol):
    """The interface of the monitor of other processes: `Monitor`, or `ElasticMonitor` in an elastic
    run."""

    @property
    def place(self) -> ProcessInfo: ...

    @property
    def active(self) -> bool: ...

    @property
    def where(self) -> str:
        """This process and its phase, for messages."""
        ...

    @property
    def others_continue(self) -> bool:
        """Whether the others continue the run if this process fails."""
        ...

    facts: Callable[[], Mapping[str, Any]]
    """Returns further content of this process's heartbeats."""

    everyone: tuple[Heartbeat, ...]
    """The last heartbeats of all processes, on the leading one."""

    on_exit: Callable[[str], None] | None
    """Called with the reason, when this process is about to be ended."""

    def phase(self, name: str, step: int = 0) -> None:
        """Report the phase that this process enters."""
        ...

    def explain(self, error: BaseException) -> BaseException | None:
        """The error of another process that caused this one, if one did."""
        ...


@contextlib.contextmanager
def located_errors(folder: RunFolder, monitor: PeerMonitor) -> Iterator[None]:
    """Add to unexpected errors where they happened, and which log has details."""
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


class Training:
    """Trains an assembled run, from the state that `resume` loads to the end, a stop or an
    error."""

    def __init__(
        self,
        run: BuiltRun,
        *,
        stop: StopRequest,
        monitor: PeerMonitor,
        check: ContentCheck,
        began: float,
        given: RunConfig | None = None,
        fit: bool = False,
        ends_process: bool = False,
    ) -> None:
        """`began`: when this start of the run began, in seconds since 1970. If the first step runs
        out of memory, the run starts again with settings that need less: those that `given`, the
        user's settings, leaves open or, with `fit`, others too. `ends_process`: nothing is
        compiled afterwards."""
        self.fit, self._first_step = fit, -1
        self.ends_process = ends_process
        self.given = run.config if given is None else given
        self.run, self.stop, self.monitor, self.check = run, stop, monitor, check
        if run.config.train.time_limit is not None:
            stop.time_limit = parse_seconds(run.config.train.time_limit)
        leads = run.control.is_rank0
        queued = _queued_since(run.folder) if leads else None
        # An interactive job may have done other things before.
        job = job_began(of_scheduler=queued is not None)
        self.account = WallAccount(
            run.folder.time if leads else None, began=job or began, queued=queued
        )
        self.observer = RunObserver(
            run.config,
            run.folder,
            run.world.place,
            gpus=run.world.place.local_world if run.world.device.kind == "cuda" else 0,
            stage=run.world.at["pp"],
            leads=leads,
        )
        self.alerts = None
        if leads:
            self.alerts = build_alerts(run.config, run.folder, steps=run.resolved.steps)
        monitor.facts, self.account.joules = self.observer.facts, self.observer.joules
        self._done_before = run.control.on_rank0(partial(_done_step, run.folder))
        """The step at which an earlier start completed the run, according to its status. A start
        that was lost before that may lack the last evaluation or samples."""

    def to_the_end(
        self,
        resume: Callable[[BuiltRun], Resumed] = resume,
        *,
        track: Callable[[Tracker], Tracker] = lambda tracker: tracker,
    ) -> Outcome:
        """Resume and train, and again after each rollback. `resume` loads the state from which
        training continues; `track` may wrap the tracker."""
        with self.observer:
            return self._to_the_end(resume, track=track)

    def _to_the_end(
        self, resume: Callable[[BuiltRun], Resumed], *, track: Callable[[Tracker], Tracker]
    ) -> Outcome:
        run, notes = self.run, list[str]()
        rolled_back: tuple[Rollback, RunHealth] | None = None
        while True:
            resumed = resume(run)
            resumed.notes.extend(notes)
            self.monitor.phase("start", run.state.progress.steps)
            tracker = track(
                build_tracker(
                    run.config,
                    run.folder,
                    steps=run.resolved.steps,
                    samples=run.resolved.samples_at_end(run.state.progress),
                    clock=lambda: run.state.progress,
                    rank=run.world.rank,
                    leads=run.control.is_rank0,
                    alerts=self.alerts,
                )
            )
            self.observer.start(self.monitor, tracker)
            self.monitor.on_exit = partial(self._lost, tracker)
            health = build_health(run, tracker)
            if rolled_back is not None:
                health.rolled_back(*rolled_back)
            try:
                announce(run, tracker, resumed)
                return self._train(tracker, health, continues=resumed.continues)
            except RollbackError as error:
                aside = run.control.on_rank0(partial(_move_later, run.folder, error.checkpoint))
                rolled_back = (error.back, health)
                # For the next iteration, whose records begin at that step.
                where = f"went back to step {error.checkpoint}; what came after it is in {aside}"
                notes = [f"{error.back}; {where}"]
            except BaseException as error:
                # If another process was lost, this error is only a consequence.
                cause = self.monitor.explain(error) or error
                if isinstance(cause, ViewChangedError):
                    run.state.health = health.state()
                elif isinstance(cause, TooLittleMemory) and cause.retries:
                    assert cause.change is not None
                    note = note_of(cause.change, run.config)
                    tracker.say(f"the first step ran out of memory; {note}", level="warning")
                else:
                    self._failed(tracker, str(cause) or type(cause).__name__, rule=_rule(cause))
                if cause is not error:
                    raise cause from error
                raise
            finally:
                tracker.close()

    def _train(self, tracker: Tracker, health: RunHealth, *, continues: bool) -> Outcome:
        """The loop and everything around it. `continues`: from memory after a change of workers,
        which may have interrupted a validation or a save."""
        run, config, state = self.run, self.run.config, self.run.state
        reached = state.progress.reached(config.train.until)
        validated = (reached or continues) and is_validated(run)
        if reached and validated and self._done_before == state.progress.steps and is_saved(run):
            health.check_end(uniform=math.log(run.resolved.vocab))
            if not continues:
                tracker.say(
                    f"nothing to do: the run is complete at step {state.progress.steps}; "
                    "raise train.until to train further"
                )
            return self._ended(finished=True)
        self._first_step = state.progress.steps
        self.account.begin(state.progress.steps)
        with contextlib.ExitStack() as cleanup:
            writer = CheckpointWriter(
                CheckpointFolder(run.folder.checkpoints),
                config.checkpoint,
                progress_at=run.resolved.progress_at,
                say=tracker.say,
                warn=partial(tracker.say, level="warning"),
                control=run.world.control_group(
                    "checkpoints", timeout=parse_seconds(config.checkpoint.timeout)
                ),
                device=run.world.device.torch_device,
            )
            cleanup.callback(writer.close)
            validate = build_validate(run, tracker)
            if validate is not None and reached and validated:
                validate.skip_end()
            periodic = build_hooks(run, tracker, writer, validate, health, self.check)
            hooks = Hooks(
                periodic,
                meter=build_meter(
                    run,
                    tracker,
                    health,
                    _compile_clock(run, tracker, cleanup),
                    account=self.account,
                    pace=self.observer.pace,
                ),
                tracker=tracker,
                stop=self.stop,
                writer=writer,
                resolved=run.resolved,
                control=run.control,
                monitor=self.monitor,
                account=self.account,
                requests=self.observer.requests,
                tells_others=not state.workers,
                horizon_problem=partial(_horizon_problem, run),
                exit_every=config.train.exit_every,
                steps_done=stop_compile_workers if self.ends_process else lambda: None,
            )
            loader = build_loader(run)
            self.observer.effort, hooks.meter.sources = loader.effort, run_sources(config, loader)
            batches = loader.starting_at(state.progress)
            cleanup.callback(batches.close)
            advice = 'set train.micro_batch lower (and train.batch), or train.recompute = "full"'
            try:
                with memory_explained(advice, self.out_of_memory):
                    if continues and state.progress.steps > 0:
                        make_up(run, periodic, validated=validated)
                    finished = train(
                        state,
                        batches=batches,
                        strategy=run.strategy,
                        schedule=build_schedule(config, run.resolved),
                        hooks=hooks,
                        until=config.train.until,
                    )
                run.strategy.close()
            except BaseException:
                if self.monitor.others_continue:
                    # The others may continue from here: record what has been computed.
                    with contextlib.suppress(Exception):
                        hooks.meter.drain()
                raise
        self.observer.finish()
        self.account.write(state.progress.steps, end="done" if finished else "stopped")
        spent, rate = read_run_time(run.folder.time), hooks.meter.steady.tokens_per_second
        text = _described(run, spent, rate, finished=finished)
        tracker.say(text)
        if finished:
            tracker.alert("done", text)
        return replace(self._ended(finished=finished), until=hooks.until)

    def out_of_memory(self, what: str) -> UserError | None:
        """The error to raise when memory runs out; it says whether the run starts again."""
        run = self.run
        error = explainer(run.config, run.resolved, run.world, run.folder.path)(what)
        first = run.state.progress.steps == self._first_step
        if first and run.world.mesh.processes == 1 and error is not None:
            change, given = error.change, self.given
            error.retries = change is not None and may_change(change, given, fit=self.fit)
        return error

    def _ended(self, *, finished: bool) -> Outcome:
        """The outcome, which is also written to the status of the run folder."""
        run, best = self.run, self.run.best_loss
        step, exit = run.state.progress.steps, Exit.DONE if finished else Exit.STOPPED
        if run.control.is_rank0:
            facts = {"step": step, "steps": run.resolved.steps, "best_loss": best}
            run.folder.write_status("done" if finished else "stopped", **facts)
        return Outcome(run.folder.path, exit, step, best)

    def _lost(self, tracker: Tracker, why: str) -> None:
        """Called when this process is about to be ended because of another."""
        self._failed(tracker, why, rule="rank_lost", wait=_LAST_WORDS)

    def _failed(self, tracker: Tracker, why: str, *, rule: Rule, wait: float = 0.0) -> None:
        step = self.run.state.progress.steps
        # First, since a disk that hangs would block everything else.
        tracker.alert(rule, why, wait=wait)
        self.account.write(step, end="failed")
        tracker.say(f"failed at step {step}: {why}", level="error")
        if self.run.control.is_rank0:
            self.run.folder.write_status("failed", step=step, error=why, time=time.time())


def _queued_since(folder: RunFolder) -> float | None:
    """When the job of this process was queued; None without a job."""
    if job_began(of_scheduler=True) is None:
        return None
    with contextlib.suppress(UserError, ValueError):
        record = read_record(folder.job)
        if record is not None:
            return datetime.fromisoformat(record.submitted).timestamp()
    return None


def with_horizon(folder: RunFolder, until: str) -> RunConfig:
    """The settings of a run, with another horizon."""
    return load_run(folder.path, [f"train.until={until}"], find_model=settings_folder)


def _horizon_problem(run: BuiltRun, until: str) -> str | None:
    """Why a run cannot change its horizon; None if it can."""
    try:
        config = with_horizon(run.folder, until)
        resolved = resolve(config, vocab=run.tokenizer.size, mesh=run.world.layout)
    except UserError as error:
        return " ".join(str(error).split())
    return order_problem(config.data, resolved, run.data.train, run.state)


def _rule(error: BaseException) -> Rule:
    """The alert for an error."""
    if isinstance(error, DivergedError):
        return "diverged"
    return "rank_lost" if isinstance(error, UserError) and error.exit is Exit.PEER else "failed"


def _done_step(folder: RunFolder) -> int | None:
    """The step at which a run is complete, according to its status."""
    status = folder.read_status()
    return status.get("step") if status.get("state") == "done" else None


def _move_later(folder: RunFolder, step: int) -> str:
    """Roll back to a checkpoint; returns where in the folder everything after it is moved."""
    return str(roll_back(folder, step).relative_to(folder.path))


def _compile_clock(
    run: BuiltRun, tracker: Tracker, cleanup: contextlib.ExitStack
) -> Callable[[], float]:
    """Returns the seconds of compilation so far."""
    if (compiled := run.strategy.compiled) is not None:
        return lambda: compiled.seconds
    if not run.config.runtime.compiles(run.world.device.kind):
        return float
    told = list[str]()

    def say_once() -> None:
        if not told:
            told.append("compiling; a minute or so at first, less when the cache has it")
            tracker.say(told[0])

    clock = cleanup.enter_context(CompileClock(begins=say_once))
    return lambda: clock.seconds


def _described(run: BuiltRun, spent: RunTime | None, rate: float | None, *, finished: bool) -> str:
    """The last line of the log. `rate`: tokens per second since this start."""
    state = run.state
    text = "done" if finished else "stopped and saved"
    text += f" at step {state.progress.steps} after {format_seconds(state.counters.seconds)}"
    if run.best_loss is not None and state.best is not None:
        text += f", best validation loss {run.best_loss:.4f} at step {state.best.step}"
    if spent is not None and spent.goodput is not None:
        text += f", goodput {spent.goodput:.1%} of {format_seconds(spent.wall)}"
    if rate is not None and (expected := run.expected) is not None:
        memory = run.world.device.memory_peak()
        text += f", {expected.seen(tokens_per_second=rate, memory=memory)}"
    if state.counters.skipped:
        text += f", {state.counters.skipped} steps skipped"
    return text if finished else f"{text}; run the same command again to resume"
