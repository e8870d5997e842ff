"""Constants of the step's formula, found from measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gristmill.bench.calibrate import fitted_products, measure_collective, measure_machine
from gristmill.plan.hardware import Hardware, open_hardware
from gristmill.plan.step import product_seconds

SHAPES = [
    *((512, 4096, 4096), (2048, 1024, 4096), (8192, 1024, 1024), (8192, 768, 3072)),
    *((8192, 4096, 1024), (8192, 2048, 2048), (8192, 4096, 4096), (32768, 1024, 4096)),
]


def times_of(hardware: Hardware, *, each: float = 0.0) -> list[tuple[int, int, int, float]]:
    """What products take by the formula, and a constant time of each."""
    return [
        (m, k, n, each + product_seconds(m, k, n, hardware=hardware, precision="bf16"))
        for m, k, n in SHAPES
    ]


def with_rates(**changes: float) -> Hardware:
    hardware = open_hardware("h200")
    return replace(hardware, rates=replace(hardware.rates, **changes))


def test_a_fit_finds_what_made_the_times() -> None:
    slow = with_rates(product_share=0.5)
    found = fitted_products(times_of(slow), peak=slow.peak("bf16"), start=open_hardware("h200"))
    fitted = with_rates(**found)
    for (m, k, n, expected), (*_, seconds) in zip(times_of(slow), times_of(fitted), strict=True):
        assert seconds == pytest.approx(expected, rel=0.02), (m, k, n)


@pytest.mark.parametrize("each", [20e-6, 100e-6])
def test_times_that_the_formula_cannot_explain_leave_constants_that_can_be(each: float) -> None:
    """Once, delays of a launch in every time gave a share of four times the peak."""
    hardware = open_hardware("h200")
    found = fitted_products(
        times_of(hardware, each=each), peak=hardware.peak("bf16"), start=hardware
    )
    assert 0.2 < found["product_share"] <= 0.95
    assert found["half_features"] < 10 * hardware.rates.half_features


def test_this_processor_is_measured() -> None:
    calibration = measure_machine()
    assert calibration.kind == "cpu"
    assert calibration.inside is None
    assert 0 < calibration.rates["product_share"] < 100
    assert 0 < calibration.rates["attention_share"] < 100
    assert calibration.memory_bandwidth is not None
    assert 1e8 < calibration.memory_bandwidth < 1e13


def test_an_all_reduce_between_three_processes_is_measured() -> None:
    rate = measure_collective(3, "cpu", size=2**20)
    assert rate is not None
    assert 1e5 < rate < 1e12
