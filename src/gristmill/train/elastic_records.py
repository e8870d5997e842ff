"""The records of an elastic run, and work that a change of workers interrupts.

The first worker of a view writes metrics.jsonl. If it dies, the next one removes the records of
steps that no other worker has made, and adds those that are missing.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from gristmill.base.errors import UserError
from gristmill.base.files import storage_errors
from gristmill.checkpoint.layout import CheckpointFolder
from gristmill.strategies.decentralized.membership import ViewChangedError
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics, last_recorded_step, to_json, validation_loss
from gristmill.track.records import Record, StepRecord
from gristmill.track.sinks import Sink
from gristmill.train.assemble import BuiltRun
from gristmill.train.checkpoints import Checkpoint
from gristmill.train.hooks import Hook
from gristmill.train.validation import Validate

KEPT_STEPS = 1000
"""Step records that every worker keeps: more than one worker can be ahead of another."""


class RecentSteps:
    """A sink that keeps the last step records, in case the worker that writes them dies."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=KEPT_STEPS)

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._records.append(record)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def between(self, after: int, last: int) -> list[str]:
        """The records of steps after `after`, up to `last`, as lines of JSON."""
        records = {record.step: record for record in self._records if after < record.step <= last}
        return [to_json(records[step]) for step in sorted(records)]


class CurrentOnly:
    """A sink that drops the records of a worker that the others have continued without."""

    def __init__(self, sink: Sink, check: Callable[[], None]) -> None:
        self._sink, self._check = sink, check

    def write(self, record: Record) -> None:
        with contextlib.suppress(ViewChangedError):
            # If the store is gone, the run ends, and its last records must be written.
            with contextlib.suppress(UserError):
                self._check()
            self._sink.write(record)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        self._sink.close()


def cut_records(folder: RunFolder, step: int) -> int:
    """Remove the records of steps that only a lost worker has made; returns the last recorded
    step."""
    cut_metrics(folder.metrics, after=step or -1)
    return last_recorded_step(folder.metrics)


def add_records(folder: RunFolder, lines: Sequence[str]) -> None:
    """Add the records of steps that the previous writer had not written."""
    if lines:
        with storage_errors(folder.metrics), folder.metrics.open("a") as file:
            file.writelines(f"{line}\n" for line in lines)


def make_up(run: BuiltRun, hooks: Sequence[Hook], *, validated: bool) -> None:
    """Run the validation and the save that a change of workers has interrupted."""
    now, resolved = run.state.progress, run.resolved
    step = now.steps
    newest = run.control.on_rank0(run.folder.newest_step) or 0
    for hook in hooks:
        if isinstance(hook, Validate) and validated:
            hook.skip_end()
        elif isinstance(hook, Validate) and hook.every.due(resolved.progress_at(step - 1), now):
            hook.at_start()
        elif isinstance(hook, Checkpoint) and hook.missed_since(resolved.progress_at(newest)):
            hook.put_off()


def is_saved(run: BuiltRun) -> bool:
    """Whether the current step is saved; a worker may have been lost just before that."""
    path = CheckpointFolder(run.folder.checkpoints).path(run.state.progress.steps)
    return bool(run.control.on_rank0(path.is_dir))


def is_validated(run: BuiltRun) -> bool:
    """Whether a finished run has its final validation; it may have been interrupted just before."""

    def recorded() -> bool:
        step = run.state.progress.steps
        return validation_loss(run.folder.metrics, step=step) is not None

    return run.data.validation is None or bool(run.control.on_rank0(recorded))
