"""How long processes wait for one another."""

from __future__ import annotations

import pytest

from gristmill.config.parallel import ParallelConfig
from gristmill.parallel.limits import SUPERVISOR, Limits, Pace


def test_limits_follow_the_settings() -> None:
    limits = Limits.of(ParallelConfig(timeout="10m", start_timeout="90s"))
    assert (limits.start, limits.phase, limits.whole) == (90, 600, 120)
    assert Limits.of(ParallelConfig(timeout="1m")).whole == 60
    assert Limits(start=1, phase=9, silence=2.5).silent(Pace()) == 2.5


@pytest.mark.parametrize("crowd", [False, True])
@pytest.mark.parametrize("seconds", [5.0, 10.0, 20.0, 60.0, 600.0])
def test_a_silence_ends_everything_within_the_limit(seconds: float, crowd: bool) -> None:
    limits = Limits(start=600, phase=seconds)
    pace = Pace().within(limits.whole)
    silent = limits.silent(pace, crowd=crowd)
    # A sign is read late, the silence seen at the next beat; it is said to a store that may not
    # answer, and a frozen process is killed. In a crowd two more readings come between.
    noticed = silent + (3 if crowd else 1) * pace.reading + 2 * pace.beat
    ended = noticed + 2 * pace.beat + SUPERVISOR
    assert ended <= min(seconds, 120) + (5 if crowd else 1.25)
    assert ended <= min(seconds, 120) or silent == seconds / 2
    assert silent >= 4 * pace.doubtful, "a few signs that are late end nothing"


def test_a_short_limit_makes_a_fast_pace() -> None:
    assert Pace().within(20) == Pace().within(600) == Pace()
    assert Pace().within(5) == Pace(beat=0.25, reading=0.75)
    assert Pace(beat=0.1, reading=0.1).within(2) == Pace(beat=0.1, reading=0.1)
