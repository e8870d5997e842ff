"""The hook that saves checkpoints: when to save, and what each one includes.

    due      every interval (of steps, samples, tokens or wall time), and on request
             when validation finds a new best loss
             always at the end of a run

`checkpoint/writer.py` writes the files in the background. If it is still busy with the save before,
a periodic save is skipped instead of delaying the steps.
"""

from __future__ import annotations

from collections.abc import Callable

from gristmill.base.units import Duration, Progress, parse_seconds
from gristmill.checkpoint.layout import Best
from gristmill.checkpoint.state import TrainState, capture, state_bytes
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.distributed.control import ControlGroup
from gristmill.strategies.strategy import Strategy
from gristmill.track.folder import RunFolder
from gristmill.train.health import RunHealth
from gristmill.train.meter import StepEvent
from gristmill.train.validation import Validate
from gristmill.train.wall_clock import WallClock


class Checkpoint:
    """Saves the state periodically, and whenever validation finds a new best loss. After a
    non-finite step it waits for a good one. A save is skipped while the previous one is still being
    written. The end of a run is always saved."""

    phase = "save"

    def __init__(
        self,
        every: Duration | str,
        *,
        writer: CheckpointWriter,
        state: TrainState,
        strategy: Strategy,
        validate: Validate | None,
        keep_best: bool,
        health: RunHealth,
        control: ControlGroup,
        folder: RunFolder,
        agreed_at: Callable[[], int] | None = None,
    ) -> None:
        """`agreed_at` returns the last step after which all copies of the weights were found
        equal. Checkpoints up to there are kept until the copies agree again."""
        self.every, self.writer, self.state, self.strategy = every, writer, state, strategy
        self.control, self.folder, self.agreed_at = control, folder, agreed_at
        self.validate, self.keep_best, self.health = validate, keep_best, health
        self._late = False
        """Whether a save was postponed."""
        self._clock: WallClock | None = None
        if isinstance(every, str):
            seconds, step = parse_seconds(every), state.progress.steps
            self._clock = WallClock(seconds, step=step, control=control)
        self._reserved = False
        resumed = writer.folder.path(state.progress.steps).is_dir()
        self._saved_at = state.progress.steps if resumed else None

    def at_start(self) -> None:
        """Nothing to save: initial weights follow from the settings."""

    def due(self, event: StepEvent) -> bool:
        self._reserve()
        if self._late or self._maybe_over(event):
            return True
        return self.keep_best and self.validate is not None and self.validate.due(event)

    def act(self, event: StepEvent) -> None:
        over = self._maybe_over(event)
        if over and self._clock is not None:
            over = self._clock.over(event.after.steps)
        best = self._best_now()
        if best is None and not self._late and not over:
            return
        if self.control.any(not self.writer.ready()):
            self.writer.skip(event.after.steps)
            return
        self._late = self.health.non_finite > 0
        if self.state.workers:
            # Workers judge their own steps; in other runs all processes judge the same ones.
            self._late = self.control.any(self._late)
        if not self._late:
            self._save(best)

    def at_end(self, *, finished: bool) -> None:
        best = self._best_now()
        if self._saved_at != self.state.progress.steps:
            self._save(best)
        self.writer.finish()
        if best is not None:
            # The final validation may find the best loss at a step that was already saved.
            self.writer.mark_best(best)

    def _reserve(self) -> None:
        """Reserve host memory for the first copy after the first step, when the state has its full
        size. The state of a decentralized run is complete only while it is saved."""
        if not self._reserved and not self.state.workers:
            self.writer.host.reserve(state_bytes(self.state))
        self._reserved = True

    def _maybe_over(self, event: StepEvent) -> bool:
        """Whether the interval is over; with a wall-clock interval, whether it is time to ask."""
        if self._clock is not None:
            return self._clock.asks(event.after.steps)
        assert isinstance(self.every, Duration)
        return self.every.due(event.before, event.after)

    def missed_since(self, last: Progress) -> bool:
        """Whether a save was due since the last one."""
        return isinstance(self.every, Duration) and self.every.due(last, self.state.progress)

    def put_off(self) -> None:
        """Save after the next step."""
        self._late = True

    def _best_now(self) -> Best | None:
        """The best loss, if it is this step's."""
        best = self.state.best if self.keep_best and self.validate is not None else None
        return best if best is not None and best.step == self.state.progress.steps else None

    def _save(self, best: Best | None) -> None:
        self.control.on_rank0(self.folder.require_here)
        self._saved_at = self.state.progress.steps
        health, good_before = self.health.state(), self.health.good_before
        if self.state.workers:
            # Rank 0, which writes the file and deletes old checkpoints, acts for all workers.
            reports = self.control.gather([self.state.worker, health, good_before])
            health = {str(worker): own for worker, own, _ in reports}
            spikes = [step for *_, step in reports if step is not None]
            good_before = min(spikes, default=None)
        if self.agreed_at is not None:
            first = self.agreed_at() + 1
            good_before = first if good_before is None else min(good_before, first)
        with self.strategy.published_weights():
            self.state.strategy = self.strategy.state()
            self.state.health = health
            # The previous checkpoint may still be written from the same memory.
            self.writer.wait()
            snapshot = capture(self.state, self.writer.host)
        if self._clock is not None:
            self._clock.restart()
        self.writer.save(snapshot, best=best, good_before=good_before)
