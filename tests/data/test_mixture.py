"""Mixtures over time, against a program that walks through every sample."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.config.mixture import Stage, find_sources, source_names
from gristmill.data.blend import choose
from gristmill.data.mixture import (
    MixturePlan,
    Segment,
    describe_plan,
    plan_identity,
    plan_mixture,
    plan_warnings,
    same_until,
)

NAMES = ("web", "code", "math")


def staged(*stages: tuple[int, Sequence[float], bool]) -> list[Stage]:
    ends = [end for end, _, _ in stages]
    return [
        Stage(begin, end, tuple(weights), gradual)
        for begin, (end, weights, gradual) in zip([0, *ends], stages, strict=False)
    ]


class NothingLeftError(Exception):
    """All sources of a stage are used up."""


def walked(stages: Sequence[Stage], limits: Sequence[int | None]) -> list[int]:
    """The source of every sample, found by going through all of them with exact fractions."""
    found, taken, alive = list[int](), [0] * len(limits), [True] * len(limits)
    golden = Fraction(0x4F1BBCDCBFA53E0B, 1 << 63)
    for number, stage in enumerate(stages):
        goal = [Fraction(w) for w in stage.weights]
        shares = [Fraction(w) for w in stages[number - 1].weights] if stage.gradual else goal
        start = stage.begin
        for sample in range(stage.begin, stage.end):
            while True:
                here, there = (
                    [x / sum(kept) for x in kept] if sum(kept) else None
                    for kept in (
                        [x if ok else Fraction(0) for x, ok in zip(side, alive, strict=True)]
                        for side in (shares, goal)
                    )
                )
                here, there = here or there, there or here
                if here is None or there is None:
                    raise NothingLeftError
                part = Fraction(sample - start, stage.end - start)
                now = [a + (b - a) * part for a, b in zip(here, there, strict=True)]
                place, source = sample * golden % 1, 0
                while place >= sum(now[: source + 1]):
                    source += 1
                limit = limits[source]
                if limit is None or taken[source] < limit:
                    break
                alive[source], shares, start = False, now, sample
            taken[source] += 1
            found.append(source)
    return found


AT_ONCE = staged((700, (0.8, 0.2, 0), False), (1000, (0.4, 0.2, 0.4), False))
CASES = {
    "two stages": (AT_ONCE, (None,) * 3),
    "gradual": (staged((300, (0.8, 0.2, 0), False), (1000, (0.1, 0.2, 0.7), True)), (None,) * 3),
    "limits": (AT_ONCE, (None, 90, 50)),
    "gradual with limits": (
        staged((300, (0.8, 0.2, 0), False), (1000, (0.1, 0.2, 0.7), True)), (350, 75, None),
    ),
    "gradual towards what is used up": (
        staged((200, (0.5, 0.5, 0), False), (600, (0, 0, 1), True), (700, (1, 0, 0), False)),
        (None, None, 100),
    ),
    "to the last sample": (staged((1000, (0.5, 0.3, 0.2), False)), (500, 300, 200)),
    "at once used up": (
        staged((100, (0, 1, 0), False), (300, (0.5, 0.5, 0), False)), (None, 100, None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_sample_is_from_the_source_that_a_walk_finds(case: str) -> None:
    stages, limits = CASES[case]
    plan = plan_mixture(stages, limits, names=NAMES)
    expected = walked(stages, limits)
    assert plan.blend.sets(0, plan.end).tolist() == expected
    for end in (0, 1, 199, 200, 201, len(expected) - 1, len(expected)):
        counts = [expected[:end].count(source) for source in range(3)]
        assert plan.blend.taken(end).tolist() == counts
    for limit, count in zip(limits, plan.blend.taken(plan.end).tolist(), strict=True):
        assert limit is None or count <= limit


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    shares=st.lists(
        st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), min_size=4, max_size=4
    ),
    gradual=st.lists(st.booleans(), min_size=4, max_size=4),
    limits=st.lists(st.none() | st.integers(1, 40), min_size=3, max_size=3),
)
def test_any_stages_are_as_a_walk_finds_them(
    lengths: list[int], shares: list[list[int]], gradual: list[bool], limits: list[int | None]
) -> None:
    ends = np.cumsum(lengths).tolist()
    stages = staged(
        *(
            (end, [one / sum(own) for one in own], number > 0 and slowly)
            for number, (end, own, slowly) in enumerate(zip(ends, shares, gradual, strict=False))
        )
    )
    try:
        plan = plan_mixture(stages, limits, names=NAMES)
    except UserError:
        with pytest.raises(NothingLeftError):
            walked(stages, limits)
        return
    expected = walked(stages, limits)
    found = plan.blend.sets(0, plan.end).tolist()
    assert found == expected
    for begin in range(0, plan.end, 13):
        choice = choose(plan.blend, np.arange(begin, min(begin + 13, plan.end)))
        assert choice.sets.tolist() == expected[begin : begin + 13]
        for place, (source, sample) in enumerate(zip(choice.sets, choice.samples, strict=True)):
            assert sample == expected[: begin + place].count(source)


def test_shares_hold_in_every_stretch_of_a_long_run() -> None:
    """Also where they change: half of a source that fades in is read in the second half."""
    stages = staged((4 * 10**8, (0.8, 0.2, 0), False), (10**9, (0.4, 0.2, 0.4), True))
    plan = plan_mixture(stages, (None,) * 3, names=NAMES)
    for begin in (0, 10**6, 3 * 10**8, 399_990_000):
        counts = plan.blend.taken(begin + 10_000) - plan.blend.taken(begin)
        assert np.abs(counts - [8000, 2000, 0]).max() <= 8
    whole = (plan.blend.taken(10**9) - plan.blend.taken(4 * 10**8)).tolist()
    assert np.abs(np.subtract(whole, [6e8 * 0.6, 6e8 * 0.2, 6e8 * 0.2])).max() <= 30
    middle = plan.blend.taken(7 * 10**8 + 10_000) - plan.blend.taken(7 * 10**8)
    assert np.abs(middle - [6000, 2000, 2000]).max() <= 8
    sets = plan.blend.sets(7 * 10**8, 7 * 10**8 + 10_000)
    assert np.bincount(sets, minlength=3).tolist() == middle.tolist()


def test_a_run_of_a_billion_samples_is_planned_without_going_through_them() -> None:
    stages = staged((5 * 10**8, (0.8, 0.2, 0), False), (10**9, (0.4, 0.2, 0.4), True))
    limits = (None, 120_000_001, 70_000_001)
    began = time.process_time()
    plan = plan_mixture(stages, limits, names=NAMES)
    assert time.process_time() - began < 30  # a walk would take half an hour
    assert [(one.source, one.stage) for one in plan.dry] == [(1, 1), (2, 1)]
    assert plan.blend.taken(10**9).tolist() == [10**9 - sum(limits[1:]), *limits[1:]]  # type: ignore
    for one in plan.dry:
        assert int(plan.blend.taken(one.sample)[one.source]) == limits[one.source]
    assert len(plan.blend.segments) == 5  # two stages, two more for sources, and after the run


def test_arcs_fill_the_circle_to_the_end_of_a_stage() -> None:
    shares = [Fraction(number, 21) for number in (1, 2, 3, 4, 5, 6, 0)]
    segment = Segment.between(17, 10**9, shares, shares[::-1])
    for sample in (17, 18, 10**8, 17 + 10**9):
        arcs = segment.shares_at(sample)
        assert sum(arcs) == 1 and min(arcs) >= 0


def test_after_the_run_its_last_shares_stay_and_the_end_of_all_limits_is_no_error() -> None:
    plan = plan_mixture(staged((100, (0.5, 0.5), False)), (60, 60), names=NAMES[:2])
    assert plan.dry == ()
    sets = plan.blend.sets(0, 1000)
    assert np.bincount(sets[:120]).tolist() == [60, 60]
    assert np.abs(np.bincount(sets[120:]) - 440).max() <= 4


def test_nothing_left_to_read_is_refused_with_the_place() -> None:
    stages = staged((100, (1, 0), False), (200, (0, 1), False))
    with pytest.raises(UserError, match=r"from sample 150 on, in stage 2, .* code has been read"):
        plan_mixture(stages, (None, 50), names=NAMES[:2])


def test_a_plan_may_change_only_ahead_of_the_samples_that_are_done() -> None:
    def plan(end: int, *, gradual: bool) -> list[object]:
        stages = staged((end // 2, (0.8, 0.2), False), (end, (0.5, 0.5), gradual))
        return plan_identity(plan_mixture(stages, (None, None), names=NAMES[:2]))  # type: ignore

    short, long = plan(1000, gradual=True), plan(2000, gradual=True)
    assert same_until(short, long, 500) and not same_until(short, long, 501)
    assert same_until(short, short, 999)
    assert same_until(None, long, 0) and not same_until(None, long, 1)
    assert same_until(None, None, 10)
    at_once = plan(1000, gradual=False)
    assert same_until(at_once, short, 500) and not same_until(at_once, short, 501)


# ------------------------------------------------------------------ what is said of it


def said(plan: MixturePlan, limits: Sequence[int | None], since: int = 0) -> list[str]:
    return plan_warnings(
        plan, NAMES, (400, 50, 100), limits, step_of=lambda sample: sample // 10 + 1, since=since
    )


def test_a_source_that_runs_dry_is_told_with_its_step_and_who_gets_its_share() -> None:
    stages = staged((500, (0.8, 0.2, 0), False), (1000, (0.4, 0.2, 0.4), False))
    limits = (2 * 400, 100, 100)
    plan = plan_mixture(stages, limits, names=NAMES)
    sets = plan.blend.sets(0, 1000)
    dry = int(np.flatnonzero(sets == 1)[-1])
    first, second = said(plan, limits)
    assert [one.source for one in plan.dry] == [1, 2] and plan.dry[0].sample > dry
    assert f"code runs dry at step {plan.dry[0].sample // 10 + 1}" in first
    assert "before the end of stage" in first and "read 2 times" in first
    assert "math runs dry" in second and "its share goes to web" in second
    assert said(plan, limits, since=plan.dry[0].sample + 1) == [second]


def test_a_source_without_a_limit_that_repeats_is_told_too() -> None:
    stages = staged((1000, (0.5, 0.3, 0.2), False))
    plan = plan_mixture(stages, (None,) * 3, names=NAMES)
    texts = said(plan, (None,) * 3)
    again = [int(np.flatnonzero(plan.blend.sets(0, 1000) == s)[n]) for s, n in ((1, 50), (2, 100))]
    assert [f"(sample {sample})" in text for sample, text in zip(again, texts, strict=False)] == [
        True
    ] * 2
    assert len(texts) == 3 and "math has been read once" in texts[1]
    assert f"{(plan.blend.taken(1000)[1]) / 50:.3g} times by the end" in texts[0]


def test_the_stages_are_told_with_their_counts() -> None:
    stages = staged((500, (0.8, 0.2, 0), False), (1000, (0.4, 0.2, 0.4), True))
    plan = plan_mixture(stages, (None,) * 3, names=NAMES)
    lines = describe_plan(plan, NAMES, (400, 50, 100), step_of=lambda sample: sample // 10 + 1)
    counts = plan.blend.taken(500).tolist()
    assert lines[0] == f"stage 1 of 2, steps 1 to 50: web {counts[0]}, code {counts[1]} samples"
    assert lines[1].startswith("stage 2 of 2, steps 51 to 100, gradually: web ")
    assert lines[2].startswith("by the end of the run it reads web 1.")
    assert math.isclose(counts[0], 400, abs_tol=3)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["tokens/web", "tokens/code"], ("web", "code")),
        (["/data/web/tokens", "/data/code/tokens/"], ("web/tokens", "code/tokens")),
        (["web", "more/web"], ("web", "more/web")),
        (["tokens/web", "tokens/code_text_document"], ("web", "code")),
        (["a/b", "a//b"], ("a/b", "a//b")),
    ],
)
def test_sources_are_called_by_the_shortest_end_of_their_path(
    paths: list[str], names: tuple[str, ...]
) -> None:
    assert source_names(paths) == names
    assert [find_sources(name, paths) for name in names] == [[n] for n in range(len(paths))]
    assert find_sources("other", paths) == []


def test_a_name_that_two_sources_have_is_ambiguous() -> None:
    assert find_sources("tokens", ["/data/web/tokens", "/data/code/tokens"]) == [0, 1]
