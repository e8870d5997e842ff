"""The monitor of an elastic run: errors of this worker, or the consequence of another one's death?

When a worker dies, the collectives of the others fail. Such an error is not reported: it becomes a
`ViewChangedError` once the membership confirms it, and training continues with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.distributed.liveness.heartbeat import Heartbeat
from gristmill.distributed.liveness.verdict import Limits, may_come_from_peer
from gristmill.strategies.decentralized.membership import Membership, View, ViewChangedError


class ElasticMonitor:
    """Separates errors of this worker from those that the departure of others causes."""

    active = False
    others_continue = True

    def __init__(
        self,
        place: ProcessInfo,
        membership: Membership,
        limits: Limits,
        *,
        ended: Callable[[], Exit | None],
    ) -> None:
        self.place, self.membership, self.view = place, membership, View(-1, {})
        self.limits, self.ended = limits, ended
        self.on_exit: Any = None
        self.facts: Callable[[], Mapping[str, Any]] = dict
        self.everyone: tuple[Heartbeat, ...] = ()
        """Empty: the heartbeats of `Membership` carry no further facts."""
        self._phase = ("start", 0)

    @property
    def where(self) -> str:
        phase, step = self._phase
        return f"worker {self.place.rank} on {self.place.host} in phase {phase} at step {step}"

    def phase(self, name: str, step: int = 0) -> None:
        self._phase = (name, step)
        self.membership.show_life(seconds=self.limits.of_phase(name))

    def explain(self, error: BaseException) -> BaseException | None:
        """A `ViewChangedError`, if a change of the view caused this error; waits until that is
        known."""
        if isinstance(error, ViewChangedError):
            return error
        if not may_come_from_peer(error):
            return None
        if self.ended() is not None:
            return ViewChangedError("the run has ended without this worker")
        if self.membership.await_change(self.view):
            return ViewChangedError(str(error))
        if isinstance(error, UserError):
            return None
        return UserError(
            f"{self.where} could not reach the other workers, which are alive: "
            f"{str(error).partition(chr(10))[0]}",
            where="parallel.timeout",
            remedy="set it above the longest time that a worker may take for a step, or start this "
            "worker again: it joins with the average",
            exit=Exit.PEER,
        )
