"""Causes in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.parallel.causes import (
    in_one_line,
    may_be_of_others,
    named,
    words_of_end,
    words_of_silence,
    words_of_waiting,
)
from gristmill.parallel.signs import Sign, Silent, Summary


def sign(rank: int, **facts: object) -> Sign:
    return replace(Sign(rank, f"n{rank}", beat=1, phase="step", step=7, turn=2), **facts)  # type: ignore[arg-type]


def test_causes_come_before_consequences() -> None:
    failed = sign(2, state="failed", what="ValueError: boom")
    lost = sign(1, state="lost", what="rank 2 on n2 failed")
    summary = Summary(by=sign(0), failed=(failed,), lost=(lost,))
    assert words_of_end(summary) == "rank 2 on n2 failed in step at step 7: ValueError: boom"
    assert words_of_end(replace(summary, failed=())) == "rank 2 on n2 failed"
    assert words_of_end(Summary(by=sign(0))) is None


def test_words_of_silence() -> None:
    assert words_of_silence(Silent(sign(2), 31.0)) == (
        "rank 2 on n2 has given no sign of life for 31.0s; it was last heard of in step at step 7"
    )


def test_words_of_waiting() -> None:
    me, other = sign(0, seconds=600.0), sign(1, phase="data", turn=1, seconds=640.0)
    begin = "rank 0 on n0 has waited 10m00s in step at step 7"
    behind = Summary(by=me, behind=(other,))
    assert words_of_waiting(behind) == (
        f"{begin}, and behind is rank 1 on n1, in data at step 7 for 10m40s"
    )
    assert words_of_waiting(Summary(by=me, behind=(me,))) == f"{begin}, and is behind all others"
    assert words_of_waiting(Summary(by=me, absent=(2, 3))) == (
        f"{begin} for rank 2, 3, which never came"
    )
    assert words_of_waiting(Summary(by=me)) == f"{begin}, and no process is behind"


def test_reasons_are_one_line() -> None:
    assert in_one_line("no\n  such\tgrain ") == "no such grain"
    assert len(in_one_line("x" * 9999)) == 501


def test_who_is_gone_is_named_before_those_who_miss_it() -> None:
    lost = sign(1, state="lost", what="rank 3 on n3 has given no sign of life")
    summary = Summary(by=sign(0), gone=(sign(2),), lost=(lost,))
    words = "rank 2 on n2 has ended without a word; it was last heard of in step at step 7"
    assert words_of_end(summary) == words


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
    assert may_be_of_others(error) == theirs


def test_errors_have_names() -> None:
    assert named(ValueError("no grain")) == "ValueError: no grain"
    assert named(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert named(UserError("no grain", where="mill")) == "mill: no grain"
