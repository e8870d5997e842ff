"""How long processes of a run wait for one another, and how often they look.

    last sign of life        noticed, said             all have ended
    |--------- silent --------|-------- ending ---------|
    |---------------------- whole ----------------------|

A process that lives and is slow may take the whole limit of a phase. One that froze is given up
sooner, by as much as it takes to end everything, so that the run ends within that limit. But never
before half of it: a limit of a few seconds is passed by a second rather than a busy process lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gristmill.base.units import parse_seconds
from gristmill.config.parallel import ParallelConfig

SUPERVISOR = 2.0
"""Seconds that whoever started the processes may take to end one that is frozen."""


@dataclass(frozen=True)
class Limits:
    """How long may pass, in seconds, before a process gives up on the others."""

    start: float
    """In the phase "start"."""
    phase: float
    """In any other phase."""
    silence: float | None = None
    """Without a sign of life; if not given, as long as all can end within the limit of a phase, and
    within two minutes."""
    leaving: float = 30.0
    """From an error to the end of the process."""

    @classmethod
    def of(cls, config: ParallelConfig) -> Limits:
        """Those of the settings."""
        return cls(parse_seconds(config.start_timeout), parse_seconds(config.timeout))

    @property
    def whole(self) -> float:
        """From the last sign of a process to the end of all."""
        return min(self.phase, 120.0)

    def silent(self, pace: Pace, *, crowd: bool = False) -> float:
        """How long a process may be silent before the others end."""
        if self.silence is not None:
            return self.silence
        ending = pace.ending + (2 * pace.reading if crowd else 0)
        return max(self.whole - ending, self.whole / 2)


@dataclass(frozen=True)
class Pace:
    """How often a process speaks and listens, in seconds."""

    beat: float = 1.0
    reading: float = 3.0
    crowd: int = 64
    """In a larger world the first process reads all signs, the others its summary."""

    def within(self, seconds: float) -> Pace:
        """Fast enough for a short limit."""
        faster = min(1.0, seconds / (20 * self.beat))
        return replace(self, beat=faster * self.beat, reading=faster * self.reading)

    @property
    def tick(self) -> float:
        return self.beat / 4

    @property
    def doubtful(self) -> float:
        """After this time without a sign, something is wrong, though it may pass."""
        return 2.5 * self.beat

    @property
    def heard(self) -> float:
        """In this time everybody has read what was written."""
        return self.reading + 2 * self.beat

    @property
    def ending(self) -> float:
        """In this time a silence that is too long is noticed, said, and everybody has ended."""
        return self.reading + 4 * self.beat + SUPERVISOR
