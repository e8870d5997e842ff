"""The board on which ranks post their heartbeats and read those of others: keys of the store.

    gristmill/ATTEMPT/RANK       that rank's heartbeat
    gristmill/ATTEMPT/summary    of a large world, the few that matter, posted by rank 0

In a large world only rank 0 reads all heartbeats; the others read its own and its summary.

For a process in the same PID namespace, since the same boot, the kernel tells whether it has ended.
For others, and outside Linux, only silence counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.base.process import Place
from gristmill.distributed.liveness.heartbeat import (
    Heartbeat,
    Roster,
    condense,
    read_heartbeats,
    write_heartbeats,
)
from gristmill.distributed.liveness.verdict import Limits

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class HeartbeatBoard:
    """Posts and reads heartbeats; used by one thread."""

    def __init__(self, store: Store, place: Place, limits: Limits) -> None:
        self.store, self.place, self.limits = store, place, limits
        self.uneasy = False
        """Whether a rank is late or may have vanished, so that it is worth reading again soon."""
        self._large = place.world > limits.large_world
        self._roster = Roster(1 if self._large and place.rank else place.world)
        self._posted: set[int] = set()
        self._suspects: set[int] = set()

    def post(self, own: Heartbeat) -> None:
        self.store.set(self._key(own.rank), write_heartbeats([own]))

    def read(self, own: Heartbeat, *, now: float) -> tuple[Heartbeat, ...]:
        """The last heartbeats of all ranks; in a large world, of the few that matter."""
        if self._large and own.rank:
            heartbeats = self._read_summary(now)
        else:
            heartbeats = self._read_all(own, now)
            if self._large:
                heartbeats = condense(heartbeats)
                self.store.set(self._key("summary"), write_heartbeats(heartbeats))
        late = any(one.silence > self.limits.late for one in heartbeats if one.rank != own.rank)
        self.uneasy = late or bool(self._suspects)
        return heartbeats

    def _read_all(self, own: Heartbeat, now: float) -> tuple[Heartbeat, ...]:
        for rank in range(self.place.world):
            if rank not in self._posted and self.store.check([self._key(rank)]):
                self._posted.add(rank)
        for text in self.store.multi_get([self._key(rank) for rank in sorted(self._posted)]):
            self._roster.note(*read_heartbeats(text), now=now)
        snapshot, namespace = self._roster.snapshot(now=now), own.pid_namespace
        local = {
            one.rank: one.pid
            for one in snapshot
            if one.state == "running" and one.pid_namespace == namespace != ""
        }
        # A suspect had ended before this reading, which would have seen its last report.
        vanished = self._suspects & local.keys()
        self._suspects = {rank for rank, pid in local.items() if has_ended(pid)}
        self._roster.vanished |= vanished
        return self._roster.snapshot(now=now) if vanished else snapshot

    def _read_summary(self, now: float) -> tuple[Heartbeat, ...]:
        keys, summary = [self._key(0), self._key("summary")], list[Heartbeat]()
        if self.store.check(keys):
            leader, summary = map(read_heartbeats, self.store.multi_get(keys))
            self._roster.note(*leader, now=now)
        known = {one.rank: one for one in (*summary, *self._roster.snapshot(now=now))}
        return tuple(known.values())

    def _key(self, name: int | str) -> str:
        return f"gristmill/{self.place.attempt}/{name}"


def pid_namespace() -> str:
    """Where the id of this process is valid; empty if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Whether a process of this namespace has ended, even if its parent has not noticed yet."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    # The second field is the program's name, which may contain anything.
    return text.rpartition(b")")[2].split()[0] in (b"Z", b"X")
