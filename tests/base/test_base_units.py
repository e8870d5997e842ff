"""Durations, progress, and numbers written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.base.units import (
    Duration,
    Progress,
    Unit,
    format_bytes,
    format_count,
    format_exact,
    format_seconds,
    parse_seconds,
)

UNITS = st.sampled_from(Unit)


# ------------------------------------------------------------------ durations


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("500 steps", 500, Unit.STEPS),
        ("1 step", 1, Unit.STEPS),
        ("600k steps", 600_000, Unit.STEPS),
        ("2.5k steps", 2_500, Unit.STEPS),
        ("1M samples", 1_000_000, Unit.SAMPLES),
        ("1 sample", 1, Unit.SAMPLES),
        ("1_000 samples", 1_000, Unit.SAMPLES),
        ("1,000 samples", 1_000, Unit.SAMPLES),
        ("20B tokens", 20 * 10**9, Unit.TOKENS),
        ("20G tokens", 20 * 10**9, Unit.TOKENS),
        ("2.3B tokens", 2_300_000_000, Unit.TOKENS),
        ("1T tokens", 10**12, Unit.TOKENS),
        ("  20b TOKENS ", 20 * 10**9, Unit.TOKENS),
        ("3ksteps", 3_000, Unit.STEPS),
        ("0 steps", 0, Unit.STEPS),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text: str, amount: int, unit: Unit) -> None:
    assert Duration.parse(text) == Duration(amount, unit)


@pytest.mark.parametrize("text", ["5 tokens", "5 token", "300 Tokens", "1_000tokens"])
def test_plain_numbers_of_tokens_are_read(text: str) -> None:
    assert Duration.parse(text).unit is Unit.TOKENS


@pytest.mark.parametrize(
    "text",
    ["", "500", "steps", "500 furlongs", "-5 steps", "5 k", "5 steps 6", "1e3 steps", "5kk steps"],
)
def test_anything_else_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Duration.parse(text)
    assert str(caught.value) == (
        f"{text!r} is not a duration\n"
        '    write a number and a unit: "500 steps", "1M samples" or "20B tokens"'
    )


@pytest.mark.parametrize("text", ["1.5 steps", "0.0001k steps"])
def test_a_part_of_a_step_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a whole number of steps"):
        Duration.parse(text)


def test_a_comma_separates_groups_of_three_digits_only() -> None:
    with pytest.raises(UserError):
        Duration.parse("1,5M tokens")


def test_large_amounts_keep_every_digit() -> None:
    assert Duration.parse("9007199254740993 steps").amount == 9007199254740993


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (2500, "2.5k"), (10**6, "1M"), (25 * 10**8, "2.5B")],
)
def test_amounts_are_written_short(amount: int, text: str) -> None:
    assert format_exact(amount) == text
    assert str(Duration(amount, Unit.STEPS)) == f"{text} steps"


@given(amount=st.integers(0, 10**15), unit=UNITS)
def test_what_is_written_reads_back_the_same(amount: int, unit: Unit) -> None:
    duration = Duration(amount, unit)
    assert Duration.parse(str(duration)) == duration


@given(
    digits=st.integers(1, 999),
    multiple=st.sampled_from([1, 10**3, 10**6, 10**9, 10**12]),
    unit=st.sampled_from([Unit.STEPS, Unit.SAMPLES]),
)
def test_round_amounts_read_back_the_same(digits: int, multiple: int, unit: Unit) -> None:
    duration = Duration(digits * multiple, unit)
    assert Duration.parse(str(duration)) == duration


# ------------------------------------------------------------------ progress


def test_the_clock_counts_one_step_at_a_time() -> None:
    clock = Progress().after(samples=8, tokens=1024).after(samples=4, tokens=512)
    assert clock == Progress(steps=2, samples=12, tokens=1536)
    assert [clock.measured_in(unit) for unit in Unit] == [2, 12, 1536]


@pytest.mark.parametrize("unit", list(Unit))
def test_a_horizon_is_reached_at_its_amount_and_after(unit: Unit) -> None:
    clock = Progress(steps=10, samples=10, tokens=10)
    reached = [clock.reached(Duration(amount, unit)) for amount in (9, 10, 11)]
    assert reached == [True, True, False]


@given(
    amount=st.integers(1, 40),
    unit=UNITS,
    sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60)), max_size=20),
)
def test_an_interval_is_due_when_a_multiple_of_it_was_passed(
    amount: int, unit: Unit, sizes: list[tuple[int, int]]
) -> None:
    every, clock = Duration(amount, unit), Progress()
    for samples, tokens in sizes:
        later = clock.after(samples=samples, tokens=tokens)
        passed = range(clock.measured_in(unit) + 1, later.measured_in(unit) + 1)
        assert every.due(clock, later) == any(place % amount == 0 for place in passed)
        clock = later


@given(unit=UNITS, samples=st.integers(0, 100))
def test_an_interval_of_zero_is_never_due(unit: Unit, samples: int) -> None:
    before = Progress()
    assert not Duration(0, unit).due(before, before.after(samples=samples, tokens=samples))


# ------------------------------------------------------------------ times and sizes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("3h30m", 12600),
        ("3h 30m", 12600),
        ("1d", 86400),
        ("1d2h3m4s", 93784),
        ("1.5h", 5400),
    ],
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "90", "soon", "10ms", "h", "-3h", "3h later", "3H"])
def test_anything_else_is_not_a_time(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_seconds(text)
    assert str(caught.value) == (f'{text!r} is not a time\n    write "90s", "30m", "3h30m" or "1d"')


@given(st.integers(60, 10**6))
def test_times_written_for_people_read_back_the_same(seconds: int) -> None:
    assert parse_seconds(format_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0s"),
        (1.25, "1.2s"),
        (59.4, "59.4s"),
        (59.9, "1m00s"),
        (61, "1m01s"),
        (3599.7, "1h00m00s"),
        (3725, "1h02m05s"),
        (100_000, "27h46m40s"),
    ],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.5, "0.5"),
        (999, "999"),
        (1000, "1k"),
        (1500, "1.5k"),
        (124_439_808, "124M"),
        (1_557_611_200, "1.56B"),
        (3e12, "3T"),
        (-2500, "-2.5k"),
    ],
)
def test_counts_have_about_three_digits(amount: float, text: str) -> None:
    assert format_count(amount) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1000 * 1024, "1000 KiB"),
        (2**30, "1 GiB"),
        (1.5 * 2**40, "1.5 TiB"),
    ],
)
def test_bytes_are_written_in_powers_of_1024(amount: float, text: str) -> None:
    assert format_bytes(amount) == text
