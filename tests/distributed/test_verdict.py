"""Verdicts, case by case; nothing here waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, ProcessInfo
from gristmill.config.parallel import ParallelConfig
from gristmill.distributed.heartbeat import Heartbeat
from gristmill.distributed.verdict import (
    SUPERVISOR_KILL,
    Heard,
    Limits,
    blame,
    judge,
    may_come_from_peer,
)

LIMITS = Limits(start=600, phase=60, silence=20)
PLACE = ProcessInfo(1, 1, 4, "n1", address=Address("10.0.0.1", 1234))
NOW = 1000.0


def beat(rank: int, **facts: object) -> Heartbeat:
    return replace(Heartbeat(rank, f"n{rank}", count=1, phase="step", step=7, turn=2), **facts)  # type: ignore[arg-type]


ME = beat(1)
STORE = "the store at 10.0.0.1:1234"


def heard(*changed: Heartbeat, place: ProcessInfo = PLACE, **facts: object) -> Heard:
    """All ranks are in the same phase, but for those given; the ends of these have long been
    known."""
    peers = {rank: beat(rank) for rank in range(4)} | {one.rank: one for one in changed}
    facts = {"peers": tuple(peers.values()), "answered_at": NOW, **facts}
    return replace(Heard(place).updated(now=NOW - 30, **facts), answered_at=facts["answered_at"])  # type: ignore[arg-type]


def verdict(*changed: Heartbeat, me: Heartbeat = ME, **facts: object) -> str | None:
    return judge(heard(*changed, **facts), me, now=NOW, limits=LIMITS)  # type: ignore[arg-type]


# ------------------------------------------------------------------ a rank has ended

FAILED = beat(3, state="failed", message="ValueError: boom")
VANISHED = beat(2, state="vanished", phase="save", step=80)
LOST = beat(0, state="lost", message="rank 3 on n3 failed in phase step at step 7: ValueError")
FROZEN = beat(2, silence=20.1, phase="save", step=80)


def test_nothing_is_wrong() -> None:
    assert verdict() is None
    assert verdict(beat(2, state="done"), beat(3, state="absent"), beat(0, silence=20.0)) is None
    assert judge(Heard(PLACE), ME, now=NOW, limits=LIMITS) is None, "nothing was heard yet"


def test_a_rank_that_failed_is_blamed_before_those_that_it_took_down() -> None:
    assert verdict(FAILED, VANISHED, LOST) == (
        "rank 3 on n3 failed in phase step at step 7: ValueError: boom"
    )
    assert verdict(VANISHED, LOST) == (
        "rank 2 on n2 died without reporting an error; last seen in phase save at step 80"
    )
    assert verdict(LOST) == LOST.message


def test_ones_own_end_is_no_verdict() -> None:
    for own in (FAILED, VANISHED, LOST, FROZEN):
        assert verdict(replace(own, rank=1)) is None


def test_an_end_is_acted_on_when_all_may_know_it() -> None:
    fresh = replace(heard(FAILED), ended_since=NOW - LIMITS.propagation)
    assert judge(fresh, ME, now=NOW, limits=LIMITS) is None
    assert judge(fresh, ME, now=NOW + 0.1, limits=LIMITS) is not None


def test_an_end_is_known_since_it_was_first_heard_of() -> None:
    known = heard(FAILED)
    assert known.ended_since == NOW - 30
    assert known.updated(now=NOW, peers=(FAILED, LOST)).ended_since == NOW - 30
    assert known.updated(now=NOW, peers=(replace(FAILED, state="done"),)).ended_since is None


# ------------------------------------------------------------------ a rank is silent


def test_a_silent_rank_is_given_up_at_once() -> None:
    assert verdict(beat(3, silence=19.9), FROZEN) == (
        "rank 2 on n2 has sent no heartbeat for 20.1s; last seen in phase save at step 80"
    )


def test_the_most_silent_is_blamed_unless_one_has_ended() -> None:
    blamed = verdict(FROZEN, beat(3, silence=31.0))
    assert blamed == (
        "rank 3 on n3 has sent no heartbeat for 31.0s; last seen in phase step at step 7"
    )
    known = replace(heard(FROZEN, FAILED), ended_since=NOW)
    assert judge(known, ME, now=NOW, limits=LIMITS) == (
        "rank 3 on n3 failed in phase step at step 7: ValueError: boom"
    )


def test_the_silence_follows_from_the_limit_of_a_phase() -> None:
    limits = Limits(start=60, phase=20)
    for silence, blamed in ((10.9, False), (11.1, True)):
        found = judge(heard(beat(2, silence=silence)), ME, now=NOW, limits=limits)
        assert (found is not None) == blamed


# ------------------------------------------------------------------ the store


def test_a_store_that_is_gone() -> None:
    host = beat(0, phase="data", step=3)
    assert verdict(host, store_error="reset") == (
        f"rank 0 on n0, which hosts {STORE}, is gone; last seen in phase data at step 3"
    )
    assert verdict(FAILED, store_error="reset") == (
        "rank 3 on n3 failed in phase step at step 7: ValueError: boom"
    )
    assert verdict(replace(host, state="done"), store_error="reset") is None, "it was done"
    unknown = verdict(replace(host, state="absent"), store_error="reset")
    assert unknown == f"{STORE}, hosted by rank 0, is gone"
    by_launcher = verdict(store_error="reset", place=replace(PLACE, agent=True))
    assert by_launcher == f"{STORE}, hosted by the launcher, is gone"
    never = verdict(store_error="not a store", answered_at=None)
    assert never is None, "torch reports a store that never was one"


def test_a_store_that_does_not_answer() -> None:
    assert verdict(answered_at=NOW - 20) is None
    assert verdict(answered_at=NOW - 21) == (
        f"rank 0 on n0, which hosts {STORE}, has not answered for 21.0s; "
        "last seen in phase step at step 7"
    )
    assert verdict(answered_at=NOW - 21, place=replace(PLACE, agent=True)) == (
        f"{STORE}, hosted by the launcher, has not answered for 21.0s"
    )
    done = beat(0, state="done")
    assert verdict(done, answered_at=NOW - 21) is None
    assert verdict(done, FROZEN, answered_at=NOW - 21) is not None


# ------------------------------------------------------------------ a phase takes too long

SLOW = beat(1, seconds=60.1)
WAITED = "rank 1 on n1 has waited 1m00s in phase step at step 7"


def test_a_phase_has_a_limit_and_the_start_another() -> None:
    assert verdict(me=beat(1, seconds=60.0)) is None
    assert verdict(me=beat(1, phase="start", seconds=600.0)) is None
    assert verdict(me=beat(1, phase="start", seconds=600.1)) == (
        "rank 1 on n1 has waited 10m00s in phase start at step 7, and no rank is behind"
    )


def test_who_is_waited_for() -> None:
    assert verdict(me=SLOW) == f"{WAITED}, and no rank is behind"
    behind = [beat(rank, phase="data", turn=1, seconds=60.0 + rank) for rank in (2, 3)]
    assert verdict(*behind, me=SLOW) == (
        f"{WAITED} for rank 3 on n3, in phase data at step 7 for 1m03s and "
        "rank 2 on n2, in phase data at step 7 for 1m02s"
    )
    earlier = beat(0, step=6, turn=9, seconds=70.0)
    assert verdict(*behind, earlier, me=SLOW) == (
        f"{WAITED} for rank 0 on n0, in phase step at step 6 for 1m10s"
    )
    assert verdict(beat(2, step=1, state="done"), me=SLOW) == f"{WAITED}, and no rank is behind"
    assert verdict(beat(2, step=8), me=SLOW) == f"{WAITED} and is behind the other ranks"
    absent = [beat(rank, state="absent") for rank in (2, 3)]
    assert verdict(*absent, me=SLOW) == f"{WAITED} for rank 2, 3, which never joined"


def test_the_store_is_waited_for() -> None:
    never = {"peers": (), "answered_at": None, "me": SLOW}
    assert verdict(**never) == (f"{WAITED} for rank 0, which does not answer at 10.0.0.1:1234")
    assert verdict(**never, place=replace(PLACE, agent=True)) == (
        f"{WAITED} for the launcher, which does not answer at 10.0.0.1:1234"
    )


def test_at_the_limit_a_rank_that_is_late_is_blamed_first() -> None:
    late = beat(2, silence=LIMITS.late + 0.1)
    assert verdict(late) is None
    assert verdict(late, me=SLOW) == (
        "rank 2 on n2 has sent no heartbeat for 2.6s; last seen in phase step at step 7"
    )
    fresh = replace(heard(late, FAILED), ended_since=NOW)
    found = judge(fresh, SLOW, now=NOW, limits=LIMITS)
    assert found == "rank 3 on n3 failed in phase step at step 7: ValueError: boom"


# ------------------------------------------------------------------ errors

GLOO = "[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:64731: Connection reset by peer"


def raised(error: BaseException, *, during: BaseException | None = None) -> BaseException:
    error.__context__ = during
    return error


@pytest.mark.parametrize(
    ("error", "theirs"),
    [
        (RuntimeError(GLOO), True),
        (dist.DistBackendError("some words"), True),
        (UserError("did not find all", exit=Exit.PEER), True),
        (raised(KeyError("loss"), during=RuntimeError(GLOO)), True),
        (RuntimeError("Timed out waiting 8000ms for recv"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("connection"), False),
        (UserError("wrong setting"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_errors_that_others_may_have_caused(error: BaseException, theirs: bool) -> None:
    assert may_come_from_peer(error) == theirs


def test_an_error_is_blamed_on_a_rank_that_ended_or_is_late() -> None:
    def blamed(*changed: Heartbeat, error: BaseException, **facts: object) -> str | None:
        return blame(error, heard(*changed, **facts), ME, now=NOW, limits=LIMITS)  # type: ignore[arg-type]

    broken, unmet = RuntimeError(GLOO), UserError("did not find all", exit=Exit.PEER)
    for error in (broken, unmet):
        assert blamed(error=error) is None, "all live"
        assert blamed(FAILED, FROZEN, error=error) == (
            "rank 3 on n3 failed in phase step at step 7: ValueError: boom"
        )
        assert "rank 2 on n2 has sent no heartbeat" in str(blamed(FROZEN, error=error))
        late = beat(2, silence=LIMITS.late + 0.1)
        assert "rank 2 on n2 has sent no heartbeat" in str(blamed(late, error=error))
    absent = beat(2, state="absent")
    assert blamed(absent, error=broken) is None
    assert str(blamed(absent, error=unmet)).endswith("for rank 2, which never joined")
    assert "does not answer" in str(blamed(error=unmet, peers=(), answered_at=None))


# ------------------------------------------------------------------ limits


def test_limits_follow_the_settings() -> None:
    limits = Limits.of(ParallelConfig(timeout="10m", start_timeout="90s"))
    assert (limits.start, limits.phase, limits.whole) == (90, 600, 120)
    assert Limits.of(ParallelConfig(timeout="1m")).whole == 60
    saving = Limits.of(ParallelConfig(timeout="10s"), save="2h")
    assert (saving.of_phase("save"), saving.of_phase("step")) == (7200, 10)
    assert Limits(start=1, phase=9, silence=2.5).max_silence(2) == 2.5


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("seconds", [5.0, 10.0, 20.0, 60.0, 600.0])
def test_a_silence_ends_everything_within_the_limit(seconds: float, large: bool) -> None:
    limits = Limits.of(ParallelConfig(timeout=f"{seconds}s"))
    silence = limits.max_silence(65 if large else 64)
    # A heartbeat is read late, the silence seen at the next one; it is reported to a store that may
    # not answer, and a frozen process is killed. In a large world two more readings come between.
    noticed = silence + (3 if large else 1) * limits.read + 2 * limits.beat
    ended = noticed + 2 * limits.beat + SUPERVISOR_KILL
    assert ended <= min(seconds, 120) + (5 if large else 1.25)
    assert ended <= min(seconds, 120) or silence == seconds / 2
    assert silence >= 4 * limits.late, "a few heartbeats that are late end nothing"


def test_a_short_limit_makes_a_fast_heartbeat() -> None:
    def pace(timeout: str) -> tuple[float, float]:
        limits = Limits.of(ParallelConfig(timeout=timeout))
        return limits.beat, limits.read

    assert pace("20s") == pace("10m") == (1.0, 3.0)
    assert pace("5s") == (0.25, 0.75)
