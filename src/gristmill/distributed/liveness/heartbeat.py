"""Heartbeats: what each process reports about itself, and the last one heard from every rank.

    {"rank": 2, "host": "n03", "count": 57, "phase": "step", "step": 120, "turn": 2,
     "seconds": 0.4, "state": "running", "message": "", "pid": 4711, "pid_namespace": "…", …}

A reader measures for how long the count of a rank has not changed, so the clocks of hosts need not
agree. A rank's progress is its step and the number of phases that it has begun in it, since all
ranks go through the same phases.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "done", "failed", "lost", "vanished", "absent"]
"""lost: exits because of another rank. Only readers know the last two. vanished: ended without a
report. absent: never heard from."""
_FEW = 4


@dataclass(frozen=True)
class Heartbeat:
    """The state of one process as it reports it, and how long ago a reader last heard from it."""

    rank: int
    host: str = "unknown"
    count: int = 0
    phase: str = "start"
    step: int = 0
    turn: int = 0
    """Phases begun in this step."""
    seconds: float = 0.0
    """Time in this phase."""
    state: State = "running"
    message: str = ""
    """Why it failed, or which rank it lost."""
    pid: int = 0
    pid_namespace: str = ""
    """Where the process id is valid (see `HeartbeatBoard`)."""
    silence: float = 0.0
    """Seconds since a running rank was last heard from; set by readers."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further facts about the process and its host, not needed for a verdict."""

    @property
    def progress(self) -> tuple[int, int]:
        return (self.step, self.turn)

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def where(self) -> str:
        return f"in phase {self.phase} at step {self.step}"


def write_heartbeats(heartbeats: Iterable[Heartbeat]) -> str:
    """Heartbeats in the format of the store."""
    return json.dumps([asdict(heartbeat) for heartbeat in heartbeats])


def read_heartbeats(text: bytes) -> list[Heartbeat]:
    """Heartbeats from the format of the store."""
    return [Heartbeat(**values) for values in json.loads(text)]


class Roster:
    """The last heartbeat of every rank, and when it arrived on the reader's clock."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.vanished: set[int] = set()
        """Ranks whose process has ended although its last heartbeat says "running"."""
        self._last: dict[int, Heartbeat] = {}
        self._arrived: dict[int, float] = {}

    def note(self, heartbeat: Heartbeat, *, now: float) -> None:
        rank, before = heartbeat.rank, self._last.get(heartbeat.rank)
        if before is None or before.count != heartbeat.count:
            self._arrived[rank] = now
        if before is not None and before.state != heartbeat.state:
            del self._last[rank]  # to the end: a snapshot lists the first to fail first
        self._last[rank] = heartbeat

    def snapshot(self, *, now: float) -> tuple[Heartbeat, ...]:
        """One heartbeat for each rank, in the order in which their states last changed."""
        seen = []
        for rank, heartbeat in self._last.items():
            if heartbeat.state == "running" and rank in self.vanished:
                heartbeat = replace(heartbeat, state="vanished")
            elif heartbeat.state == "running":
                heartbeat = replace(heartbeat, silence=now - self._arrived[rank])
            seen.append(heartbeat)
        absent = [rank for rank in range(self.world) if rank not in self._last]
        return (*seen, *(Heartbeat(rank, state="absent") for rank in absent))


def condense(heartbeats: Iterable[Heartbeat]) -> tuple[Heartbeat, ...]:
    """The few heartbeats of a large world on which a verdict may depend: rank 0; the first few
    ranks that ended, are absent, silent or behind; the most recent one; and the one furthest
    ahead."""
    leader, *others = sorted(heartbeats, key=lambda one: one.rank != 0)
    chosen = [leader]
    for state in ("failed", "vanished", "lost", "absent"):
        chosen += [other for other in others if other.state == state][:_FEW]
    running = [other for other in others if other.state == "running"]
    by_silence = sorted(running, key=lambda one: -one.silence)
    by_progress = sorted(running, key=lambda one: (one.progress, -one.seconds))
    chosen += by_silence[:_FEW] + by_silence[-1:] + by_progress[:_FEW] + by_progress[-1:]
    return tuple({one.rank: replace(one, facts={}) for one in chosen}.values())


def pid_namespace() -> str:
    """The PID namespace of this process; empty if the system does not report it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Whether a process of this namespace has ended, even if its parent has not reaped it yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    # The second field is the program's name, which may contain anything.
    return text.rpartition(b")")[2].split()[0] in (b"Z", b"X")
