"""Hooks: validation, samples, comparisons and checkpoints, which run periodically and at the end.

    order   stop on damage -> validate -> sample -> compare -> checkpoint

A checkpoint includes the newest validation loss. None is saved after token files were found damaged
or copies of the weights differ.

Hooks run after all pending step results are read. Their time does not count as training time. A
signal or the time limit ends the loop after the current step, with a checkpoint. Any process may
receive such a request. It is all-reduced in every step, and all processes stop after the same step:
the first one by which all of them have read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from gristmill.base.errors import DataError
from gristmill.base.units import Duration, Progress, format_bytes
from gristmill.checkpoint.state import TrainState
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.resolve import Resolved
from gristmill.data.intact import ContentCheck
from gristmill.distributed.control import ControlGroup
from gristmill.strategies.strategy import REQUEST, StepLimits
from gristmill.track.account import WallAccount
from gristmill.track.requests import RequestBox, RunRequest, as_message
from gristmill.train.checkpoints import Checkpoint
from gristmill.train.health import Rollback
from gristmill.train.meter import Meter, StepEvent
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker


class Hook(Protocol):
    """Something that runs periodically."""

    phase: str
    """The phase that the run is in while the hook acts, for the monitor."""

    def at_start(self) -> None:
        """Called before the first step of a new run."""
        ...

    def due(self, event: StepEvent) -> bool: ...

    def act(self, event: StepEvent) -> None: ...

    def at_end(self, *, finished: bool) -> None:
        """Called after the last step; `finished` is False if the run stops before its horizon."""
        ...


class PhaseMonitor(Protocol):
    """Receives the phases of this process."""

    def phase(self, name: str, step: int = 0) -> None: ...


class RollbackError(Exception):
    """The run must be rolled back to a checkpoint; raised on all processes after the same step."""

    def __init__(self, back: Rollback, checkpoint: int) -> None:
        super().__init__(f"going back to step {checkpoint}")
        self.back, self.checkpoint = back, checkpoint


class Hooks:
    """Runs the hooks that are due, and decides whether to stop or to roll back."""

    def __init__(
        self,
        hooks: Sequence[Hook],
        *,
        meter: Meter,
        tracker: Tracker,
        stop: StopRequest,
        writer: CheckpointWriter,
        resolved: Resolved,
        control: ControlGroup,
        monitor: PhaseMonitor | None = None,
        account: WallAccount | None = None,
        requests: RequestBox | None = None,
        tells_others: bool = True,
        horizon_problem: Callable[[str], str | None] = lambda until: None,
        exit_every: Duration | None = None,
        steps_done: Callable[[], None] = lambda: None,
    ) -> None:
        """`steps_done` is called after the last step, before the hooks that are due then.
        `tells_others`: whether the strategy carries the signals of a process to all others.
        `horizon_problem` returns why the run cannot change to a horizon, or None if it can."""
        self.hooks, self.meter, self.tracker, self.stop = hooks, meter, tracker, stop
        self.monitor, self.account = monitor, account
        self.requests, self.tells_others = requests or RequestBox(), tells_others
        self.horizon_problem = horizon_problem
        self.steps_done = steps_done
        # Signals sent before a restart of the loop are lost.
        self.requests.unflag()
        self._asked = set[str]()
        """Phases of hooks to run after the next step, whether they are due or not."""
        self._asked_stop: str | None = None
        """The request to stop, if there was one."""
        self.until: str | None = None
        """The requested horizon."""
        self.writer, self.resolved, self.control = writer, resolved, control
        self.exit_every, self._exits = exit_every, False
        self._progress = Progress()
        """The progress after the last step taken."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop.reason is not None

    def signals(self) -> int:
        """The signals of this process in this step, which are summed over all processes."""
        if self.tells_others:
            return int(self.asked_to_stop) + REQUEST * self.requests.flag()
        request = self.requests.take()
        if request is not None and request.action == "stop":
            self.stop.reason = self.stop.reason or str(request)
        elif request is not None:
            what = f"{request}, but workers with weights of their own can only be asked to stop"
            self.tracker.say(what, level="warning")
        return int(self.asked_to_stop)

    def _fulfil_request(self) -> None:
        """Broadcast the request that rank 0 has received, and carry it out, on all processes after
        the same step."""
        self.meter.request_step = None
        message = self.control.broadcast(as_message(self.requests.take()))
        if message is None:
            return
        request = RunRequest(**message)
        refused = self._refused(request)
        if refused is not None:
            self.tracker.say(f"{request}: {refused}", level="warning")
            return
        self.tracker.say(str(request))
        if request.action in ("stop", "until"):
            self.until, self._asked_stop = request.until, str(request)
        elif request.action == "validate":
            # The validation may find a new best loss, which is then saved.
            self._asked = {"validation", "save"}
        for hook in self.hooks:
            if request.action == "save" and isinstance(hook, Checkpoint):
                hook.put_off()

    def _refused(self, request: RunRequest) -> str | None:
        """Why a request cannot be carried out, the same on all processes; None if it can."""
        if request.action == "validate" and all(h.phase != "validation" for h in self.hooks):
            return "this run has no validation"
        if request.until is None:
            return None
        if self._progress.reached(Duration.parse(request.until)):
            return f"the run is past that, at step {self._progress.steps}"
        return self.horizon_problem(request.until)

    @property
    def stopping(self) -> bool:
        """Whether the loop should end now."""
        if self._exits or self._asked_stop is not None:
            return True
        if self.meter.world.mesh.processes == 1:
            return self.asked_to_stop
        return self.meter.stop_step is not None and self._progress.steps >= self.meter.stop_step

    def skip_limits(self, step: int) -> StepLimits | None:
        """The limits above which a step must not change the weights."""
        return self.meter.health.skip_limits(step)

    def skip_batches(self, before: Progress) -> Progress | None:
        """The progress after the next step if its batch is to be skipped, else None."""
        if not self.meter.health.skips_batch(before.samples):
            return None
        # Processes may have read the results of different steps so far.
        self.meter.drain()
        samples = self.resolved.ramp.batch_at(before.samples)
        return before.after(samples=samples, tokens=samples * self.resolved.sequence)

    def at_start(self) -> None:
        for hook in self.hooks:
            self._phase(hook.phase)
            hook.at_start()
        # The first step may compile the model, so the start limit applies to it.
        self._phase("start")
        self.meter.restart_clock()

    def begin_steps(self) -> None:
        """Count time as that of steps from now on."""
        if self.account is not None:
            self.account.phase("steps")

    def _phase(self, phase: str) -> None:
        """Report this process's phase to the others, and charge the time to it."""
        if self.account is not None:
            self.account.phase(phase)
        self.tracker.phase(phase)
        if self.monitor is not None:
            self.monitor.phase(phase, self._progress.steps)

    def after_step(self, event: StepEvent) -> None:
        self._progress = event.after
        # All processes decide this alike, without communication.
        self._exits = self.exit_every is not None and self.exit_every.due(event.before, event.after)
        for note in event.result.notes:
            self.tracker.say(note)
        self.meter.add(event)
        asked, self._asked = self._asked, set()
        hooks = [hook for hook in self.hooks if hook.due(event) or hook.phase in asked]
        if hooks:
            self.meter.drain()
            for hook in hooks:
                self._phase(hook.phase)
                hook.act(event)
            self.meter.restart_clock()
        self._phase("step")
        if self.account is not None:
            # The record at a checkpoint is kept in case later steps are lost.
            saved = any(hook.phase == "save" for hook in hooks)
            self.account.note(event.after.steps, keep=saved)
        # The next step may be the first of a larger batch.
        batch = self.resolved.ramp.batch_at(event.after.samples)
        step_seconds = self.meter.sample_seconds * batch
        self.stop.check_time(reserve=2 * (step_seconds + self.writer.seconds))
        asked_at = self.meter.request_step
        if asked_at is not None and asked_at <= event.after.steps:
            self._fulfil_request()
        due = self.meter.health.rollback_at
        if due is not None and due <= event.after.steps:
            self._roll_back()

    def _roll_back(self) -> None:
        """Roll back to before the spike, if there is a checkpoint from before it."""
        health = self.meter.health
        self.meter.drain()
        self.writer.wait()
        back = health.roll_back(self._progress.samples)
        # The update before the first bad step may be the cause.
        step = self.control.on_rank0(lambda: self.writer.folder.newest_before(back.step - 1))
        if step is None:
            health.rollback_at = None
            text = f"cannot go back: there is no checkpoint from before step {back.step - 1}"
            self.tracker.say(text, level="warning")
            return
        most = health.most_rollbacks
        if back.rollbacks > most:
            raise health.failure(f"it went back {most} times in a row, which did not help")
        if self.account is not None:
            self.account.note(self._progress.steps, keep=True)
        raise RollbackError(back, step)

    def at_end(self, *, finished: bool) -> None:
        self.meter.drain()
        self.steps_done()
        health = self.meter.health
        if finished and health.rollback_at is not None:
            self._roll_back()
        self.tracker.flush()
        if finished and health.non_finite:
            # This state is not worth saving.
            health.check_end(uniform=math.log(self.resolved.vocab))
        if not finished:
            reason = self.stop.reason or self._asked_stop or "a request to another process"
            if self._exits and not self.stop.reason:
                reason = f"train.exit_every = {self.exit_every}"
            self.tracker.say(f"stopping after {reason}")
        for hook in self.hooks:
            self._phase(hook.phase)
            hook.at_end(finished=finished)
        self._phase("end")
        self.tracker.flush()
        if finished:
            health.check_end(uniform=math.log(self.resolved.vocab))


class StopOnDamage:
    """Ends the run once a token file is found damaged, before anything else is saved."""

    phase = "content check"

    def __init__(self, check: ContentCheck, *, tracker: Tracker, state: TrainState) -> None:
        self.check, self.tracker, self.state = check, tracker, state
        self._first_step = state.progress.steps
        self._reported = False

    def at_start(self) -> None:
        self._report()

    def due(self, event: StepEvent) -> bool:
        return self.check.done and not self._reported

    def act(self, event: StepEvent) -> None:
        self._report()

    def at_end(self, *, finished: bool) -> None:
        self._report()

    def _report(self) -> None:
        damage, step = self.check.damage, self.state.progress.steps
        if damage is not None:
            read = f"steps {self._first_step} to {step} may have trained on it"
            raise DataError([replace(damage, what=f"{damage.what}; {read}")])
        if self.check.done and not self._reported:
            self._reported = True
            size = format_bytes(self.check.bytes)
            self.tracker.say(f"the token files are intact: {size} agree with their checksums")
