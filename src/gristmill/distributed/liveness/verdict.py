"""The verdict: whether a process has to exit because of another one, and the message why.

    last heartbeat           noticed, reported          all have exited
    |------ max_silence ------|------- shutdown --------|
    |---------------------- whole ----------------------|

A rank that is slow but alive may take the whole limit of a phase. A silent rank is given up earlier
by the time that shutting down takes, so that the run ends within the limit. This is never before
half of the limit: if that is a few seconds, ending a second late is better than giving up a busy
rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.base.units import format_seconds, parse_seconds
from gristmill.config.parallel import ParallelConfig
from gristmill.distributed.liveness.heartbeat import Heartbeat, State

SUPERVISOR_KILL = 2.0
"""Seconds in which a supervisor kills a frozen process once the others have exited."""
_FEW = 4
_FROM_PEERS = re.compile(
    r"gloo|nccl|connection|connect to|broken pipe|reset by peer|timed? ?out|socket", re.IGNORECASE
)
"""Found in messages of errors that another process may have caused."""


@dataclass(frozen=True)
class Limits:
    """How long a process waits for the others, and how often it checks them, in seconds."""

    start: float
    """In the phase "start"."""
    phase: float
    """In any other phase."""
    save: float = math.inf
    """In the phase "save", whose length depends on disks that may be slow."""
    silence: float | None = None
    """Longest time without a heartbeat; derived from the limit of a phase if None."""
    leaving: float = 30.0
    """Longest time from an error to the end of the process."""
    beat: float = 1.0
    """Between two heartbeats."""
    read: float = 3.0
    """Between two readings of the others' heartbeats."""
    large_world: int = 64
    """World size above which only rank 0 reads all heartbeats, and the others its summary."""

    @classmethod
    def of(cls, config: ParallelConfig, *, save: str = "1h") -> Limits:
        """The limits of a run. Heartbeats are more frequent if the timeout is short."""
        start, phase = parse_seconds(config.start_timeout), parse_seconds(config.timeout)
        limits = cls(start, phase, save=parse_seconds(save))
        speed = min(1.0, limits.whole / 20)
        return replace(limits, beat=speed * limits.beat, read=speed * limits.read)

    def of_phase(self, name: str) -> float:
        return {"start": self.start, "save": self.save}.get(name, self.phase)

    @property
    def whole(self) -> float:
        """From the last heartbeat of a rank to the end of all processes."""
        return min(self.phase, 120.0)

    def max_silence(self, world: int) -> float:
        """How long a rank may be silent before the others exit."""
        if self.silence is not None:
            return self.silence
        shutdown = self.read + 4 * self.beat + SUPERVISOR_KILL
        shutdown += 2 * self.read if world > self.large_world else 0
        return max(self.whole - shutdown, self.whole / 2)

    @property
    def tick(self) -> float:
        """Between two verdicts."""
        return self.beat / 4

    @property
    def late(self) -> float:
        """A silence that probably means trouble, though perhaps temporary."""
        return 2.5 * self.beat

    @property
    def propagation(self) -> float:
        """Time after which all ranks have read what one has posted."""
        return self.read + 2 * self.beat


@dataclass(frozen=True)
class Heard:
    """What a process knows about its peers."""

    place: ProcessInfo
    """The process, and the address of the store."""
    peers: tuple[Heartbeat, ...] = ()
    """The last heartbeats, its own among them; in a large world, the few that matter."""
    answered_at: float | None = None
    """When the store last answered; None if it never has."""
    store_error: str | None = None
    ended_since: float | None = None
    """When this process learned that a rank, or the store, has ended."""

    def updated(self, *, now: float, **changes: object) -> Heard:
        new = replace(self, **changes)  # type: ignore[arg-type]
        if ended_peer(new) is None:
            return replace(new, ended_since=None)
        return new if new.ended_since is not None else replace(new, ended_since=now)

    def others(self, *states: State) -> Iterator[Heartbeat]:
        """Heartbeats of other ranks in these states."""
        mine = self.place.rank
        return (peer for peer in self.peers if peer.state in states and peer.rank != mine)


def judge(heard: Heard, me: Heartbeat, *, now: float, limits: Limits) -> str | None:
    """Why this process has to exit; None if it can continue. `me`: its current heartbeat."""
    ended = ended_peer(heard)
    silent = silent_peer(heard, now=now, longer_than=limits.max_silence(heard.place.world))
    if silent is not None:
        return ended or silent
    # The end of the other rank may be about to raise an error here, which should come first.
    if heard.ended_since is not None and now - heard.ended_since > limits.propagation:
        return ended
    if me.seconds <= limits.of_phase(me.phase):
        return None
    return ended or silent_peer(heard, now=now, longer_than=limits.late) or overdue(heard, me)


def blame(
    error: BaseException, heard: Heard, me: Heartbeat, *, now: float, limits: Limits
) -> str | None:
    """The process that caused this error, if another did. To be called a moment after the error,
    when every live rank has sent another heartbeat."""
    found = ended_peer(heard) or silent_peer(heard, now=now, longer_than=limits.late)
    if found is None and isinstance(error, UserError):
        complete = heard.answered_at is not None and heard.peers and not any(heard.others("absent"))
        return None if complete else overdue(heard, me)
    return found


def ended_peer(heard: Heard) -> str | None:
    """In this order: a rank that failed, one that vanished, the rank that a lost one blames, or the
    store if it is gone."""
    for one in heard.others("failed"):
        return f"{one.who} failed {one.where}: {one.message}"
    for one in heard.others("vanished"):
        return f"{one.who} died without reporting an error; last seen {one.where}"
    for one in heard.others("lost"):
        return one.message
    gone = heard.store_error is not None and heard.answered_at is not None
    return _store_problem(heard, "is gone") if gone else None


def silent_peer(heard: Heard, *, now: float, longer_than: float) -> str | None:
    """The store or the rank that has been silent for longer than that."""
    if heard.answered_at is not None and now - heard.answered_at > longer_than:
        silence = format_seconds(now - heard.answered_at)
        if found := _store_problem(heard, f"has not answered for {silence}"):
            return found
    one = max(heard.others("running"), key=lambda one: one.silence, default=None)
    if one is None or one.silence <= longer_than:
        return None
    silence = format_seconds(one.silence)
    return f"{one.who} has sent no heartbeat for {silence}; last seen {one.where}"


def _store_problem(heard: Heard, problem: str) -> str | None:
    """The problem with the store, and so with its host; None if that rank had finished."""
    store = f"the store at {heard.place.address}"
    if heard.place.agent:
        return f"{store}, hosted by the launcher, {problem}"
    host = next((peer for peer in heard.peers if peer.rank == 0 and peer.state != "absent"), None)
    if host is None:
        return f"{store}, hosted by rank 0, {problem}"
    if host.state == "done":
        return None
    return f"{host.who}, which hosts {store}, {problem}; last seen {host.where}"


def overdue(heard: Heard, me: Heartbeat) -> str:
    """What a process waits for that has been in one phase for too long."""
    waited = f"{me.who} has waited {format_seconds(me.seconds)} {me.where}"
    if heard.answered_at is None:
        host = "the launcher" if heard.place.agent else "rank 0"
        return f"{waited} for {host}, which does not answer at {heard.place.address}"
    absent = [str(other.rank) for other in heard.others("absent")][:_FEW]
    if absent:
        return f"{waited} for rank {', '.join(absent)}, which never joined"
    running = [me, *heard.others("running")]
    least = min(one.progress for one in running)
    if all(one.progress == least for one in running):
        return f"{waited}, and no rank is behind"
    if me.progress == least:
        return f"{waited} and is behind the other ranks"
    behind = [one for one in running if one.progress == least]
    behind = sorted(behind, key=lambda one: -one.seconds)[:_FEW]
    ranks = [f"{one.who}, {one.where} for {format_seconds(one.seconds)}" for one in behind]
    return f"{waited} for {' and '.join(ranks)}"


def may_come_from_peer(error: BaseException) -> bool:
    """Whether another process may have caused an error: when one dies, the collectives of the
    others fail with errors that do not name the cause."""
    seen: BaseException | None = error
    while seen is not None:
        of_peer = isinstance(seen, UserError) and seen.exit is Exit.PEER
        broken = isinstance(seen, RuntimeError) and _FROM_PEERS.search(str(seen))
        if isinstance(seen, dist.DistError) or of_peer or broken:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
