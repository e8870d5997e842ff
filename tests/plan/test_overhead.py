"""What a run takes besides its steps: when it compiles, how often it samples, and how imports are
timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gristmill.config.load import load_text
from gristmill.config.resolve import resolve
from gristmill.plan.hardware import open_hardware
from gristmill.plan.layouts import on_device
from gristmill.plan.overhead import (
    SECONDS_PER_LAYER,
    SLOWER,
    USUAL_IMPORTS,
    Overhead,
    run_overhead,
    time_imports,
)

RUN = """
name = "x"
preset = "modern-small"
data.paths = "x"
train = { until = "1k steps", batch = 8 }
"""


def overhead(
    *settings: str, kind: str = "h200", training: float = 60.0, devices: int = 1
) -> Overhead:
    hardware = open_hardware(kind)
    config = on_device(load_text(RUN, settings, place="x"), hardware)
    return run_overhead(
        config,
        resolve(config, vocab=4096),
        hardware,
        devices=devices,
        imports=2.0,
        training=training,
        validations=20,
    )


def test_the_start_has_the_imports_and_is_longer_on_a_gpu() -> None:
    on_cpu, on_gpu = overhead(kind="cpu"), overhead()
    assert 2.0 < on_cpu.start < on_gpu.start
    assert on_cpu.total == on_cpu.start + on_cpu.compile + on_cpu.samples + on_cpu.saves


def test_only_what_is_compiled_takes_time_to_compile() -> None:
    assert overhead(kind="cpu").compile == 0 == overhead("runtime.compile=false").compile
    assert overhead("runtime.compile=true", kind="cpu").compile > 0


def test_long_runs_compile_the_whole_model_and_short_ones_blocks() -> None:
    """With the numbers by which the run itself chooses."""
    border = SECONDS_PER_LAYER * 12 / SLOWER
    blocks, whole = overhead(training=0.9 * border), overhead(training=1.1 * border)
    assert whole.compile > blocks.compile + SECONDS_PER_LAYER * 12
    assert overhead("runtime.compile=true", training=1.0) == whole
    assert overhead('runtime.compile="blocks"', training=1e6) == blocks
    together = overhead(training=1e6, devices=8)
    assert blocks.compile < together.compile < whole.compile


def test_start_and_compiling_agree_with_what_was_measured_on_an_h200() -> None:
    """From the command to the first step with nothing in the cache: docs/guides/gpu.md."""
    usual = USUAL_IMPORTS - 2.0
    for settings, seconds in ((), 24.1), (("runtime.compile=true",), 44.1):
        found = overhead(*settings)
        assert found.start + usual + found.compile == pytest.approx(seconds, rel=0.05)


def test_samples_count_at_the_start_at_their_interval_and_at_the_end() -> None:
    assert overhead().samples == 0
    ten, five = overhead('sample.every="100 steps"'), overhead('sample.every="200 steps"')
    assert ten.samples / five.samples == pytest.approx(11 / 6)
    many = overhead('sample.every="100 steps"', "sample.tokens=128", 'sample.prompts=["a", "b"]')
    assert many.samples == pytest.approx(4 * ten.samples)
    # A GPU reads the weights faster.
    assert overhead('sample.every="100 steps"', kind="cpu").samples > ten.samples


def test_larger_checkpoints_take_longer_to_save() -> None:
    assert overhead("preset=modern-xl").saves > 2 * overhead().saves


def test_imports_are_those_of_train_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answer(text: str, code: int = 0) -> None:
        def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
            asked.append(command)
            if code:
                raise subprocess.CalledProcessError(code, command)
            return subprocess.CompletedProcess(command, 0, stdout=text)

        monkeypatch.setattr("gristmill.plan.overhead.subprocess.run", run)

    answer("a note\n2.5\n")
    assert time_imports() == 2.5
    assert asked[0][0] == sys.executable and "import gristmill.train.run" in asked[0][-1]
    answer("", code=1)
    assert time_imports() == USUAL_IMPORTS
    answer("no number\n")
    assert time_imports() == USUAL_IMPORTS


def test_the_module_whose_import_is_timed_is_the_one_that_train_imports() -> None:
    import gristmill.cli.train

    source = Path(str(gristmill.cli.train.__file__)).read_text(encoding="utf-8")
    assert "from gristmill.train.run import Run" in source
