"""Measured constants: kept, read back, and used in place of the table's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.plan.calibration import (
    Calibration,
    calibrated,
    read_calibrations,
    this_machine,
    write_calibration,
)
from gristmill.plan.hardware import open_hardware

MEASURED = Calibration(
    kind="a100-80gb",
    device="NVIDIA A100-SXM4-80GB",
    when="2026-11-19T05:00:00+00:00",
    rates={"product_share": 0.7, "launch": 5e-6},
    memory_bandwidth=1.6e12,
)


def test_calibrations_of_several_kinds_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "calibration.json"
    write_calibration(MEASURED, file)
    other = Calibration("cpu", "processor", MEASURED.when, {"product_share": 0.3})
    write_calibration(other, file)
    assert read_calibrations(file) == {"a100-80gb": MEASURED, "cpu": other}


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"format": 2, "machines": {}}', '{"format": 1}'),
        '{"format": 1, "machines": {"cpu": {}}}',
        '{"format": 1, "machines": {"cpu": {"device": "x", "when": "y", "rates": {"gap": -1}}}}',
    ],
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    assert read_calibrations(file) == {}


def test_what_was_measured_takes_the_place_of_the_table() -> None:
    kind = open_hardware("a100-80gb")
    mine = calibrated(kind, MEASURED)
    assert mine.rates.product_share == 0.7
    assert mine.rates.half_rows == kind.rates.half_rows
    assert mine.memory_bandwidth * mine.rates.memory_share == 1.6e12
    assert mine.inside == kind.inside


def test_this_machine_has_memory() -> None:
    hardware, count = this_machine()
    assert count >= 1
    assert hardware.memory > 2**28
