"""The last heartbeats of all ranks, and what a reader makes of them."""

from __future__ import annotations

from dataclasses import replace

from gristmill.distributed.heartbeat import (
    Heartbeat,
    Roster,
    condense,
    read_heartbeats,
    write_heartbeats,
)


def beat(rank: int, **facts: object) -> Heartbeat:
    return replace(Heartbeat(rank, f"n{rank}", count=1, phase="step", step=7, turn=2), **facts)  # type: ignore[arg-type]


def roster(*beats: Heartbeat, world: int = 4) -> Roster:
    made = Roster(world)
    for one in beats:
        made.note(one, now=10.0)
    return made


def ranks(beats: tuple[Heartbeat, ...], state: str) -> list[int]:
    return [one.rank for one in beats if one.state == state]


def silences(seen: Roster, *, now: float) -> dict[int, float]:
    return {one.rank: one.silence for one in seen.snapshot(now=now)}


def test_heartbeats_are_written_and_read() -> None:
    beats = [beat(3, message='"ä\n"', seconds=0.5, state="failed"), beat(4, silence=2.5)]
    assert read_heartbeats(write_heartbeats(beats).encode()) == beats


def test_silence_counts_from_the_last_new_heartbeat() -> None:
    seen = roster(beat(0), beat(1))
    seen.note(beat(1), now=12.0)
    assert silences(seen, now=13.0)[1] == 3.0, "the same count is not a new heartbeat"
    seen.note(beat(1, count=2), now=14.0)
    assert silences(seen, now=15.0)[1] == 1.0
    seen.note(beat(1, count=2, state="done"), now=16.0)
    assert silences(seen, now=99.0)[1] == 0.0, "a rank that is done is not missing"
    assert silences(seen, now=99.0)[2] == 0.0, "a rank never heard from is absent, not silent"


def test_a_snapshot_has_one_heartbeat_for_each_rank() -> None:
    seen = roster(beat(1), beat(2), beat(4), world=6)
    seen.note(beat(4, state="failed", message="boom", count=2), now=11.0)
    seen.note(beat(2, state="failed", message="bang", count=2), now=12.0)
    seen.note(beat(4, state="failed", message="boom", count=3), now=13.0)
    snapshot = seen.snapshot(now=14.0)
    assert sorted(one.rank for one in snapshot) == list(range(6))
    assert ranks(snapshot, "failed") == [4, 2], "the first to fail first"
    assert ranks(snapshot, "absent") == [0, 3, 5]
    assert ranks(snapshot, "running") == [1]


def test_a_rank_that_vanished_is_not_running() -> None:
    seen = roster(beat(0), beat(1, step=1), beat(2))
    seen.vanished.add(1)
    snapshot = seen.snapshot(now=12.0)
    assert ranks(snapshot, "vanished") == [1] and ranks(snapshot, "running") == [0, 2]
    seen.note(beat(1, state="failed", message="boom", count=2), now=13.0)
    late = seen.snapshot(now=14.0)
    assert ranks(late, "vanished") == [] and ranks(late, "failed") == [1]


def test_what_matters_of_thousands_is_small() -> None:
    seen = Roster(5000)
    for rank in range(4000):
        failed = {"state": "failed", "message": "x" * 500} if rank % 2 else {}
        seen.note(beat(rank, step=rank, **failed), now=rank / 1000)
    seen.note(beat(100, step=7, state="lost", message="rank 1"), now=5.0)
    seen.vanished.add(200)
    few = condense(seen.snapshot(now=9.0))
    assert len(write_heartbeats(few)) < 10_000
    assert few[0].rank == 0
    assert ranks(few, "failed") == [1, 3, 5, 7] and ranks(few, "absent") == [*range(4000, 4004)]
    assert ranks(few, "lost") == [100] and ranks(few, "vanished") == [200]
    # The most silent and the furthest behind, the last heard from and the furthest ahead.
    assert ranks(few, "running") == [0, 2, 4, 6, 8, 3998]
