"""The hook that scores downstream tasks while a run trains.

The rank that records the run evaluates the whole model, in the run's number format. The others wait
for it, at most for `parallel.timeout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gristmill.base.errors import UserError, on_one_line
from gristmill.base.units import Duration
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.checkpoint.model import LoadedModel
from gristmill.checkpoint.state import TrainState
from gristmill.evaluate.results import EvaluationResult, with_check, write_result
from gristmill.evaluate.tasks import OpenTask
from gristmill.models.spec import CausalLM
from gristmill.strategies.strategy import Strategy
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import records_at
from gristmill.track.records import EvaluationRecord
from gristmill.train.meter import StepEvent
from gristmill.train.tracker import Tracker


class EvaluateTasks:
    """Runs the tasks of the run file."""

    phase = "evaluation"

    def __init__(
        self,
        every: Duration,
        *,
        tasks: Sequence[OpenTask],
        items: int | None,
        precision: str,
        strategy: Strategy,
        tokenizer: Tokenizer,
        tracker: Tracker,
        state: TrainState,
        folder: RunFolder,
    ) -> None:
        """`tasks` are needed only on the rank with the whole model."""
        self.every, self.tasks, self.items, self.precision = every, tasks, items, precision
        self.strategy, self.tokenizer, self.tracker = strategy, tokenizer, tracker
        self.state, self.folder = state, folder
        self._done_at: int | None = None
        self._said = set[str]()

    def at_start(self) -> None:
        """Do nothing: an untrained model only guesses."""

    def due(self, event: StepEvent) -> bool:
        return self.every.due(event.before, event.after)

    def act(self, event: StepEvent) -> None:
        self._evaluate()

    def at_end(self, *, finished: bool) -> None:
        if finished and self._done_at != self.state.progress.steps:
            self._evaluate()

    def _evaluate(self) -> None:
        step = self._done_at = self.state.progress.steps
        model = self.strategy.gather_full_model()
        if model is None:
            return
        was_training = model.training
        # An earlier start may have been lost during this step's evaluation.
        records = records_at(self.folder.metrics, step=step)
        known = {record.name for record in records if isinstance(record, EvaluationRecord)}
        for task in self.tasks:
            if task.name in known:
                continue
            try:
                self._run(task, model.eval())
            except UserError as error:
                self._warn(f"{on_one_line(task.name)} was not evaluated: {error}")
        model.train(was_training)

    def _warn(self, text: str) -> None:
        """Write a message once, not at every evaluation."""
        if text not in self._said:
            self._said.add(text)
            self.tracker.say(text, level="warning")

    def _run(self, task: OpenTask, model: CausalLM) -> None:
        step = self.state.progress.steps
        origin = CheckpointFolder(self.folder.checkpoints).path(step)
        loaded = LoadedModel(model, self.tokenizer, origin, self.folder.path, step)
        for result in task.run(loaded, lambda name, done, total: None):
            for note in result.notes:
                self._warn(on_one_line(note))
            self._record(result)
            self.folder.require_here()
            settings: dict[str, int | None] = {"items": self.items, "shots": None}
            result = replace(result, precision=self.precision, settings=settings)
            checked = with_check(result, self.folder.path)
            write_result(self.folder.evals, checked, loaded)

    def _record(self, result: EvaluationResult) -> None:
        facts = {"items": result.count, "seconds": result.seconds}
        for metric, measure in result.measures.items():
            self.tracker.evaluation(
                result.name, metric=metric, value=measure.value, stderr=measure.stderr, **facts
            )
