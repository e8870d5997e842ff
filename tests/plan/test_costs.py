"""Time, money and energy of a whole run."""

from __future__ import annotations

import pytest

from gristmill.plan.costs import run_cost
from gristmill.plan.hardware import open_hardware
from gristmill.plan.step import StepPlan

STEP = StepPlan({}, seconds=1.0, tokens_per_second=1e6, mfu=0.5)


def test_costs_of_a_run() -> None:
    """3.6 billion tokens at a million a second are an hour."""
    kind = open_hardware("h100-80gb")
    cost = run_cost(STEP, tokens=3.6e9, devices=8, hardware=kind, price=2.5)
    assert cost.seconds == pytest.approx(3600)
    assert cost.device_hours == pytest.approx(8)
    assert cost.money == pytest.approx(20)
    assert cost.kwh == pytest.approx(8 * 0.7)
    free = run_cost(STEP, tokens=3.6e9, devices=8, hardware=kind, price=None)
    assert free.money is None
