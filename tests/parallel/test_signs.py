"""What follows from the signs that processes give."""

from __future__ import annotations

from dataclasses import replace

from gristmill.parallel.signs import Roll, Sign, Summary, read_sign, write_sign


def sign(rank: int, **facts: object) -> Sign:
    return replace(Sign(rank, f"n{rank}", beat=1, phase="step", step=7, turn=2), **facts)  # type: ignore[arg-type]


def roll(*signs: Sign, world: int = 4) -> Roll:
    made = Roll(world)
    for one in signs:
        made.note(one, now=10.0)
    return made


def test_a_sign_is_written_and_read() -> None:
    one = sign(3, what='"ä\n"', seconds=0.5, state="failed")
    assert read_sign(write_sign(one).encode()) == one


def test_silence_counts_from_the_last_new_beat() -> None:
    seen = roll(sign(0), sign(1))
    seen.note(sign(1), now=12.0)
    assert seen.silence(1, now=13.0) == 3.0, "the same beat is not a new sign"
    seen.note(sign(1, beat=2), now=14.0)
    assert seen.silence(1, now=15.0) == 1.0
    seen.note(sign(1, beat=2, state="done"), now=16.0)
    assert seen.silence(1, now=99.0) == 0.0, "who is done is not missing"
    assert seen.silence(2, now=99.0) == 0.0, "who has not come is absent, not silent"


def test_a_summary_holds_the_few_that_matter() -> None:
    seen = roll(sign(1), sign(2, state="failed", what="boom"), world=5)
    seen.note(sign(3), now=11.0)
    seen.note(sign(4, state="lost", what="rank 2"), now=11.0)
    seen.note(sign(2, state="failed", what="boom", beat=2), now=12.0)
    summary = seen.summary(sign(0), now=14.0)
    assert summary.running == 2 and summary.absent == ()
    assert [(one.sign.rank, one.seconds) for one in summary.silent] == [(1, 4.0), (3, 3.0)]
    assert [one.rank for one in summary.failed] == [2]
    assert [one.rank for one in summary.lost] == [4]
    assert Summary.read(summary.write().encode()) == summary


def test_a_summary_of_thousands_stays_small() -> None:
    seen = Roll(5000)
    for rank in range(4000):
        seen.note(
            sign(rank, step=rank, what="x" * 500, state="failed" if rank % 2 else "running"),
            now=0.0,
        )
    assert len(seen.summary(sign(0), now=9.0).write()) < 10_000


def test_who_has_come_least_far_is_behind() -> None:
    signs = [sign(0), sign(1, turn=1, seconds=3.0), sign(2, turn=1, seconds=5.0), sign(3)]
    assert [one.rank for one in roll(*signs).summary(sign(0), now=11.0).behind] == [2, 1]
    earlier = sign(3, step=6, turn=9)
    assert roll(*signs[:3], earlier).summary(sign(0), now=11.0).behind == (earlier,)
    assert roll(sign(0), sign(1)).summary(sign(0), now=11.0).behind == (), "all are at one place"
    assert roll(sign(0), sign(1, step=1, state="done")).summary(sign(0), now=11.0).behind == ()


def test_who_has_ended_without_a_word_is_not_running() -> None:
    seen = roll(sign(0), sign(1, step=1), sign(2))
    seen.note_end(1)
    summary = seen.summary(sign(0), now=12.0)
    assert [one.rank for one in summary.gone] == [1] and summary.running == 1
    assert [one.sign.rank for one in summary.silent] == [2] and summary.behind == ()
    seen.note(sign(1, state="failed", what="boom", beat=2), now=13.0)
    late = seen.summary(sign(0), now=14.0)
    assert late.gone == () and [one.rank for one in late.failed] == [1]
