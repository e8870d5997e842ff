"""The hook that finds processes whose copies of weights or optimizer state differ."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.units import Duration
from gristmill.checkpoint.state import TrainState
from gristmill.parallel.control import ControlGroup
from gristmill.parallel.replicas import ReplicaDifference, find_differences, held_checksums
from gristmill.parallel.strategy import Strategy
from gristmill.train.meter import StepEvent


class CompareReplicas:
    """Compares all copies periodically, and before the last checkpoint."""

    phase = "comparison"

    def __init__(
        self, every: Duration, *, strategy: Strategy, control: ControlGroup, state: TrainState
    ) -> None:
        self.every, self.strategy, self.control, self.state = every, strategy, control, state
        self._agreed_at = state.progress.steps

    def at_start(self) -> None:
        """Nothing to compare: all copies were just made."""

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
        # Every process looks at all reports, so that all end with the same message.
        sums, hosts = zip(*self.control.all_gather([mine, socket.gethostname()]), strict=True)
        if found := find_differences(sums):
            raise _corruption(found, hosts, since=self._agreed_at, step=step)
        self._agreed_at = step


def _corruption(
    found: Sequence[ReplicaDifference], hosts: Sequence[str], *, since: int, step: int
) -> UserError:
    problems = [Problem(f"silent corruption between step {since} and step {step}", "training")]
    for one in found:
        who = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in one.ranks)
        more = f" and {len(one.names) - 3} more" if len(one.names) > 3 else ""
        which = ", ".join(one.names[:3]) + more
        what = f"{who} differ in {which}"
        if one.agreed:
            what = f"{who} differs from ranks {', '.join(map(str, one.agreed))} in {which}"
        problems.append(Problem(what))
    remedy = (
        "check these devices, then go back with --from STEP to a checkpoint from before step "
        f"{since + 1}, up to which all agreed"
    )
    problems[-1] = replace(problems[-1], remedy=remedy)
    return UserError(problems, exit=Exit.DEVICE)
