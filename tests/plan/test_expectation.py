"""What a run expects of its own layout, and when it expects nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gristmill.config.load import load_text
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.plan.calibration import Calibration, write_calibration
from gristmill.plan.expectation import Expectation, expect

RUN = """
name = "planned"
preset = "gpt2-small"
data.paths = "none"
train = { until = "10 steps", batch = 32, micro_batch = 16 }
precision.compute = "bf16"
"""
H200 = "NVIDIA H200"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return load_text(RUN, (), place="test")


def on(config: RunConfig, kind: str, name: str, *, mesh: Mesh | None = None) -> Expectation | None:
    return expect(
        config,
        mesh or Mesh(),
        vocab=50257,
        micro_batch=16,
        device_kind=kind,
        device_name=name,
    )


def test_a_known_gpu_is_expected_to_be_as_fast_as_its_kind(config: RunConfig) -> None:
    expected = on(config, "cuda", H200)
    assert expected is not None
    assert expected.device == "h200"
    assert expected.calibrated is None
    rate = expected.layout.step.tokens_per_second
    # Recorded on such a card: 13.0 GiB and 576 thousand tokens a second with 32 samples at once.
    assert 4e5 < rate < 8e5
    assert expected.memory is not None
    assert 6 * 2**30 < expected.memory < 13 * 2**30
    words = expected.described(tokens=10**9)
    assert "tok/s" in words and "GiB" in words and words.endswith("(constants of h200)")
    assert expected.seen(tokens_per_second=2e5, memory=2**33).startswith("200k tok/s (planned ")
    assert expected.as_json()["memory_bytes"] == expected.memory


def test_what_was_measured_here_is_used_and_named(config: RunConfig) -> None:
    table = on(config, "cuda", H200)
    rates = {"product_share": 0.3}
    write_calibration(Calibration("h200", H200, "2026-11-19T05:00:00+00:00", rates))
    expected = on(config, "cuda", H200)
    assert table is not None and expected is not None
    assert expected.source == "h200, measured here on 2026-11-19"
    assert expected.layout.step.seconds > 1.2 * table.layout.step.seconds


def test_a_processor_is_expected_nothing_of_until_it_is_measured(config: RunConfig) -> None:
    assert on(config, "cpu", "x86_64 CPU") is None
    write_calibration(Calibration("cpu", "processor", "2026-11-19T05:00:00+00:00"))
    expected = on(config, "cpu", "x86_64 CPU")
    assert expected is not None
    assert expected.memory is None
    assert "GiB" not in expected.described(tokens=10**6)


@pytest.mark.parametrize(
    ("kind", "name"), [("cuda", "Voodoo 2"), ("mps", "Apple M9"), ("xla", H200)]
)
def test_nothing_is_expected_of_devices_that_are_not_known(
    config: RunConfig, kind: str, name: str
) -> None:
    assert on(config, kind, name) is None


def test_several_processes_share_the_batch(config: RunConfig) -> None:
    alone, two = on(config, "cuda", H200), on(config, "cuda", H200, mesh=Mesh(dp_replicate=2))
    assert alone is not None and two is not None
    assert two.layout.step.seconds < alone.layout.step.seconds
