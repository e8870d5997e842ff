"""What a run costs on a layout: time to its horizon, device-hours, money and energy.

    hours = tokens / tokens per second / 3600        device-hours = hours * devices
    money = device-hours * price                     kWh = device-hours * watts of a device / 1000

Restarts, validation, checkpoints and compilation come on top, and so do hosts and cooling: the
devices' own limit of power is what counts here.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.plan.hardware import Hardware
from gristmill.plan.step import StepPlan


@dataclass(frozen=True)
class Cost:
    """A whole run."""

    seconds: float
    device_hours: float
    money: float | None
    """US dollars; None without a price."""
    kwh: float


def run_cost(
    step: StepPlan, *, tokens: float, devices: int, hardware: Hardware, price: float | None
) -> Cost:
    """What `tokens` tokens cost at the speed of a step."""
    seconds = tokens / step.tokens_per_second
    hours = seconds / 3600 * devices
    money = None if price is None else hours * price
    return Cost(seconds, hours, money, hours * hardware.watts / 1000)
