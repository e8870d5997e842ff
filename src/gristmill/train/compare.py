"""The hook that detects processes whose copies of weights or optimizer state differ.

Any checkpoint saved since the last agreement may contain the corruption. When a difference is
found, these checkpoints are renamed, so that no run resumes from them automatically. Earlier ones
are kept until the copies agree again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import set_aside
from gristmill.base.units import Duration
from gristmill.checkpoint.layout import step_of
from gristmill.checkpoint.state import TrainState
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.distributed.control import ControlGroup
from gristmill.strategies.replicas import ReplicaDifference, find_differences, held_checksums
from gristmill.strategies.strategy import Strategy
from gristmill.train.meter import StepEvent


class CompareReplicas:
    """Compares all copies periodically, and before the last checkpoint."""

    phase = "comparison"

    def __init__(
        self,
        every: Duration,
        *,
        strategy: Strategy,
        control: ControlGroup,
        state: TrainState,
        writer: CheckpointWriter,
    ) -> None:
        self.every, self.strategy, self.control, self.state = every, strategy, control, state
        self.writer = writer
        self.agreed_at = state.progress.steps
        """The last step after which all copies were equal."""

    def at_start(self) -> None:
        """Nothing to compare: the copies are new."""

    def due(self, event: StepEvent) -> bool:
        return self.every.due(event.before, event.after)

    def act(self, event: StepEvent) -> None:
        self._compare()

    def at_end(self, *, finished: bool) -> None:
        self._compare()

    def _compare(self) -> None:
        strategy, step = self.strategy, self.state.progress.steps
        mine = held_checksums(strategy.parameters, strategy.optimizer)
        if self.state.workers:
            # Only processes of the same worker hold copies.
            mine = {f"worker {self.state.worker} {key}": value for key, value in mine.items()}
        # Every process checks all reports, so that all end with the same message.
        sums, hosts = zip(*self.control.all_gather([mine, socket.gethostname()]), strict=True)
        if found := find_differences(sums):
            self.writer.wait()
            doubtful = self.control.on_rank0(self._mark_doubtful)
            raise _corruption(found, hosts, doubtful, since=self.agreed_at, step=step)
        self.agreed_at = step

    def _mark_doubtful(self) -> list[str]:
        """Rename the checkpoints saved since the last agreement; returns the new names."""
        saved = self.writer.folder.committed()
        return [
            set_aside(path, "doubtful").name for path in saved if step_of(path) > self.agreed_at
        ]


def _corruption(
    differences: Sequence[ReplicaDifference],
    hosts: Sequence[str],
    doubtful: Sequence[str],
    *,
    since: int,
    step: int,
) -> UserError:
    problems = [Problem(f"silent corruption between step {since} and step {step}", "training")]
    for difference in differences:
        who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in difference.ranks)
        more = f" and {len(difference.names) - 3} more" if len(difference.names) > 3 else ""
        which = ", ".join(difference.names[:3]) + more
        what = f"{who} differ in {which}"
        if difference.agreed:
            what = f"{who} differs from ranks {', '.join(map(str, difference.agreed))} in {which}"
        problems.append(Problem(what))
    if doubtful:
        names = ", ".join(doubtful)
        problems.append(Problem(f"what was saved since then may be wrong, and is now {names}"))
    remedy = (
        "check these devices, then start the same command again: it resumes from a checkpoint of "
        f"step {since} or before, when all agreed"
    )
    problems[-1] = replace(problems[-1], remedy=remedy)
    return UserError(problems, exit=Exit.DEVICE)
