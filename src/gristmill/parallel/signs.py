"""Signs of life: what a process says of itself, and what follows from what all have said.

    {"rank": 2, "host": "n03", "beat": 57, "phase": "step", "step": 120, "turn": 2,
     "seconds": 0.4, "state": "running", "what": "", "pid": 4711, "home": "…"}

A sign counts its beats, and whoever reads it measures how long ago the count has changed, so that
clocks of hosts need not agree. How far a process has come is its step, and within the step the
number of phases it has begun; processes of a run go through the same phases.

What is known of all is summed up in a few signs, whatever their number: who failed, who is silent,
who is behind, who has not come. In a large world one process reads all signs and publishes that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from gristmill.base.units import format_seconds

State = Literal["running", "done", "failed", "lost"]
"""lost: ended, or about to, because of another process."""
_FEW = 4


@dataclass(frozen=True)
class Sign:
    """What one process says of itself."""

    rank: int
    host: str
    beat: int = 0
    phase: str = "start"
    step: int = 0
    turn: int = 0
    """Phases begun at this step."""
    seconds: float = 0.0
    """How long the phase has lasted."""
    state: State = "running"
    what: str = ""
    """Why it failed, or because of whom it ended."""
    pid: int = 0
    home: str = ""
    """Where the process id is valid (see `neighbours`)."""

    @property
    def advance(self) -> tuple[int, int]:
        """Comparable among processes of a run."""
        return (self.step, self.turn)

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def where(self) -> str:
        return f"in {self.phase} at step {self.step}"

    def __str__(self) -> str:
        return f"{self.who}, {self.where} for {format_seconds(self.seconds)}"


@dataclass(frozen=True)
class Silent:
    """A process that has not been heard of for some time."""

    sign: Sign
    seconds: float


@dataclass(frozen=True)
class Summary:
    """What one process knows of all; of each kind, the first few."""

    by: Sign
    running: int = 0
    """Processes beside that one which have come and not ended."""
    absent: tuple[int, ...] = ()
    """Ranks that have never been heard of."""
    silent: tuple[Silent, ...] = ()
    """The longest first."""
    failed: tuple[Sign, ...] = ()
    """The first to say so first."""
    gone: tuple[Sign, ...] = ()
    """Seen to have ended without a word."""
    lost: tuple[Sign, ...] = ()
    behind: tuple[Sign, ...] = ()
    """The least advanced, if others are further."""

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> Summary:
        values = json.loads(text)
        return cls(
            by=Sign(**values["by"]),
            running=values["running"],
            absent=tuple(values["absent"]),
            silent=tuple(Silent(Sign(**one["sign"]), one["seconds"]) for one in values["silent"]),
            failed=_signs(values["failed"]),
            gone=_signs(values["gone"]),
            lost=_signs(values["lost"]),
            behind=_signs(values["behind"]),
        )


def _signs(values: Iterable[dict[str, object]]) -> tuple[Sign, ...]:
    return tuple(Sign(**one) for one in values)  # type: ignore[arg-type]


def write_sign(sign: Sign) -> str:
    """A sign as it is kept in the store."""
    return json.dumps(asdict(sign))


def read_sign(text: bytes) -> Sign:
    """A sign as it was written."""
    return Sign(**json.loads(text))


class Roll:
    """The last sign of every process, and when it was new. Times are of one steady clock."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._signs: dict[int, Sign] = {}
        self._changed: dict[int, float] = {}
        self._ended: list[int] = []
        self._gone: set[int] = set()

    def note(self, sign: Sign, *, now: float) -> None:
        before = self._signs.get(sign.rank)
        if before is None or before.beat != sign.beat:
            self._changed[sign.rank] = now
        if sign.state in ("failed", "lost") and sign.rank not in self._ended:
            self._ended.append(sign.rank)
        self._signs[sign.rank] = sign

    def note_end(self, rank: int) -> None:
        """A process has ended, whatever its last sign says."""
        self._gone.add(rank)

    def running(self) -> list[Sign]:
        """The last signs of those that have not ended."""
        return [
            sign
            for rank, sign in self._signs.items()
            if sign.state == "running" and rank not in self._gone
        ]

    def last(self, rank: int) -> Sign | None:
        """What a process said last."""
        return self._signs.get(rank)

    def silence(self, rank: int, *, now: float) -> float:
        """How long ago a running process was heard of; 0 for one that has not come or has ended."""
        sign = self._signs.get(rank)
        if sign is None or sign.state != "running":
            return 0.0
        return now - self._changed[rank]

    def summary(self, by: Sign, *, now: float) -> Summary:
        """What follows from all signs, for the process `by`."""
        self.note(by, now=now)
        running = self.running()
        silent = [
            Silent(sign, self.silence(sign.rank, now=now))
            for sign in running
            if sign.rank != by.rank
        ]
        ended = [self._signs[rank] for rank in self._ended if rank != by.rank]
        return Summary(
            by=by,
            running=sum(sign.rank != by.rank for sign in running),
            absent=tuple(rank for rank in range(self.world) if rank not in self._signs)[:_FEW],
            silent=tuple(sorted(silent, key=lambda one: -one.seconds)[:_FEW]),
            failed=tuple(sign for sign in ended if sign.state == "failed")[:_FEW],
            gone=tuple(
                sign
                for rank, sign in self._signs.items()
                if rank in self._gone and sign.state == "running"
            )[:_FEW],
            lost=tuple(sign for sign in ended if sign.state == "lost")[:_FEW],
            behind=_behind(running),
        )


def _behind(running: list[Sign]) -> tuple[Sign, ...]:
    places = {sign.advance for sign in running}
    if len(places) < 2:
        return ()
    least = [sign for sign in running if sign.advance == min(places)]
    return tuple(sorted(least, key=lambda sign: -sign.seconds)[:_FEW])
