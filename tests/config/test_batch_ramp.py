"""A batch that grows: against walking step by step, and against Megatron's rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.units import Duration, Unit
from gristmill.config.resolve import BatchRamp, RampStep, ceil_divide

SEQUENCE = 24


@st.composite
def ramps(draw: st.DrawFn, unit: Unit | None = None) -> tuple[BatchRamp, Duration]:
    start, by, increases = (draw(st.integers(1, limit)) for limit in (20, 20, 9))
    unit = unit or draw(st.sampled_from(Unit))
    scale = {Unit.STEPS: 1, Unit.SAMPLES: 10, Unit.TOKENS: 10 * SEQUENCE}[unit]
    over = Duration(draw(st.integers(1, 60 * scale)), unit)
    full = start + by * increases
    return BatchRamp.growing(start=start, by=by, full=full, over=over, sequence=SEQUENCE), over


def walked(ramp: BatchRamp, steps: int, *, start: int = 0) -> list[int]:
    """Samples before each step, one step after the other."""
    samples = [start]
    for _ in range(steps):
        samples.append(samples[-1] + ramp.batch_at(samples[-1]))
    return samples


@given(ramps(), st.integers(0, 80), st.integers(0, 900))
def test_any_number_of_steps_is_the_same_as_one_after_the_other(
    drawn: tuple[BatchRamp, Duration], steps: int, start: int
) -> None:
    ramp, _ = drawn
    assert ramp.samples_after(steps) == walked(ramp, steps)[-1]
    assert ramp.samples_after(steps, start=start) == walked(ramp, steps, start=start)[-1]


@given(ramps(), st.integers(0, 40), st.integers(0, 40))
def test_a_run_in_two_parts_has_the_steps_of_the_whole(
    drawn: tuple[BatchRamp, Duration], first: int, second: int
) -> None:
    ramp, _ = drawn
    between = ramp.samples_after(first)
    assert ramp.samples_after(second, start=between) == ramp.samples_after(first + second)


@given(ramps(), st.integers(0, 1500))
def test_steps_to_an_amount_are_the_fewest_that_do_it(
    drawn: tuple[BatchRamp, Duration], samples: int
) -> None:
    ramp, _ = drawn
    steps = ramp.steps_to(samples)
    assert ramp.samples_after(steps) >= samples
    assert steps == 0 or ramp.samples_after(steps - 1) < samples


@given(ramps())
def test_the_batch_only_grows_and_ends_full(drawn: tuple[BatchRamp, Duration]) -> None:
    ramp, over = drawn
    batches = [ramp.batch_at(sample) for sample in walked(ramp, 80)]
    assert batches == sorted(batches)
    assert batches[0] == ramp.first
    grown = ramp.steps_to(ramp.full_from)
    done = {
        Unit.STEPS: grown,
        Unit.SAMPLES: ramp.samples_after(grown),
        Unit.TOKENS: ramp.samples_after(grown) * SEQUENCE,
    }
    assert done[over.unit] >= over.amount
    assert ramp.batch_at(ramp.samples_after(grown)) == ramp.full
    assert grown == 0 or ramp.batch_at(ramp.samples_after(grown - 1)) < ramp.full


def megatron_batch(consumed: int, *, start: int, by: int, full: int, over: int) -> int:
    """Megatron's rule in its own arithmetic, which is floating-point."""
    if consumed > over:
        return full
    samples_in_a_stage = over / ((full - start) // by)
    return start + by * int(consumed / samples_in_a_stage)


@given(
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 95),
    st.integers(1, 5000),
    st.integers(0, 500_000),
)
def test_the_batch_is_megatrons(
    start: int, by: int, increases: int, length: int, consumed: int
) -> None:
    full, over = start + by * increases, length * increases
    ramp = BatchRamp.growing(
        start=start, by=by, full=full, over=Duration(over, Unit.SAMPLES), sequence=1
    )
    for sample in (consumed, over - 1, over, over + 1, consumed // length * length):
        assert ramp.batch_at(sample) == megatron_batch(
            sample, start=start, by=by, full=full, over=over
        )


def test_megatrons_example_for_its_largest_model() -> None:
    """BatchRamp whose length is no whole number, from the first step to the full batch."""
    ramp = BatchRamp.growing(
        start=16, by=16, full=1536, over=Duration(5_859_375, Unit.SAMPLES), sequence=2048
    )
    consumed = steps = 0
    while consumed <= 5_859_375:
        batch = megatron_batch(consumed, start=16, by=16, full=1536, over=5_859_375)
        assert ramp.batch_at(consumed) == batch
        consumed, steps = consumed + batch, steps + 1
    assert len(ramp.ramp_steps) == 96
    assert ramp.samples_after(steps) == consumed
    assert ramp.steps_to(5_859_375) == steps


def test_a_ramp_step_ends_with_the_training_step_in_which_its_edge_lies() -> None:
    ramp = BatchRamp.growing(start=4, by=4, full=12, over=Duration(20, Unit.SAMPLES), sequence=8)
    assert ramp.ramp_steps == (RampStep(0, 4), RampStep(10, 8), RampStep(20, 12))
    assert walked(ramp, 6) == [0, 4, 8, 12, 20, 32, 44]


def test_thirds_of_a_run_in_steps_samples_and_tokens() -> None:
    def growing(over: Duration) -> BatchRamp:
        return BatchRamp.growing(start=128, by=128, full=384, over=over, sequence=SEQUENCE)

    in_steps = growing(Duration(200, Unit.STEPS))
    batches = [in_steps.batch_at(sample) for sample in walked(in_steps, 299)]
    assert batches == [128] * 100 + [256] * 100 + [384] * 100
    in_samples = growing(Duration(2 * 7680, Unit.SAMPLES))
    assert [step.begin for step in in_samples.ramp_steps] == [0, 7680, 15360]
    assert growing(Duration(2 * 7680 * SEQUENCE, Unit.TOKENS)) == in_samples


def test_ramp_steps_shorter_than_a_training_step_are_skipped() -> None:
    ramp = BatchRamp.growing(start=4, by=4, full=16, over=Duration(1, Unit.STEPS), sequence=8)
    assert walked(ramp, 3) == [0, 4, 20, 36]
    ramp = BatchRamp.growing(start=4, by=4, full=16, over=Duration(6, Unit.SAMPLES), sequence=8)
    assert walked(ramp, 3) == [0, 4, 16, 32]


@pytest.mark.parametrize("batch", [1, 12])
def test_a_batch_that_does_not_grow(batch: int) -> None:
    ramp = BatchRamp.constant(batch)
    assert ramp.first == ramp.full == ramp.batch_at(0) == ramp.batch_at(10**12) == batch
    assert ramp.samples_after(10**15) == 10**15 * batch
    assert ramp.steps_to(10**15 * batch + 1) == 10**15 + 1
    assert ramp.steps_to(0) == 0


def test_quotients_are_exact_where_floating_point_is_not() -> None:
    assert ceil_divide(10**17 + 1, 10) == 10**16 + 1
    assert [ceil_divide(amount, 3) for amount in (0, 1, 3, 4)] == [0, 1, 1, 2]
