"""The lines of other programs, as scripts parse them."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from gristmill.track.console import DecentralizedSink, MegatronSink, megatron_line
from gristmill.track.metrics import last_step_record, to_json
from gristmill.track.records import EventRecord, StepRecord, ValidationRecord
from gristmill.track.sinks import Horizon

STEP = StepRecord(
    step=25,
    samples=50,
    tokens=50 * 2048,
    time=datetime(2024, 7, 16, 11, 19, 22).timestamp(),
    loss=10.86954,
    lr=1.638e-8,
    grad_norm=0.0,
    tokens_per_second=1.0,
    step_seconds=0.087,
    tflops=1.0,
    tflops_causal=1.0,
    loss_scale=4294967296.0,
)
BEFORE = replace(STEP, step=24, samples=48)
MEGATRON = re.compile(
    r" iteration\s+(\d+)/\s*(\d+) \| consumed samples:\s+(\d+) \| elapsed time per iteration "
    r"\(ms\): ([\d.]+) \| learning rate: ([-+.\dE]+) \| global batch size:\s+(\d+) \| lm loss: "
    r"([-+.\dE]+) \| loss scale: ([\d.]+) \| grad norm: ([\d.]+) \| number of skipped iterations:"
    r"\s+(\d+) \| number of nan iterations:\s+(\d+) \|"
)


def validation(step: int, **change: object) -> ValidationRecord:
    record = ValidationRecord(
        step=step,
        samples=1,
        tokens=1,
        time=STEP.time,
        loss=2.971195,
        perplexity=19.5,
        windows=1,
        seconds=1.0,
        best=False,
    )
    return replace(record, **change)  # type: ignore[arg-type]


def test_the_lines_of_the_guide() -> None:
    """Character by character those of the AWS guide's logs."""
    assert megatron_line(STEP, BEFORE, steps=73242187) == (
        " iteration       25/73242187 | consumed samples:           50 | elapsed time per "
        "iteration (ms): 87.0 | learning rate: 1.638E-08 | global batch size:     2 | lm loss: "
        "1.086954E+01 | loss scale: 4294967296.0 | grad norm: 0.000 | number of "
        "skipped iterations:   0 | number of nan iterations:   0 |"
    )
    skipped = replace(
        STEP, step=2, samples=576, step_seconds=243.4383, lr=0.0, loss_scale=2147483648.0, skipped=2
    )
    before = replace(STEP, step=1, samples=288, skipped=1)
    assert megatron_line(skipped, before, steps=508626) == (
        " iteration        2/  508626 | consumed samples:          576 | elapsed time per "
        "iteration (ms): 243438.3 | learning rate: 0.000E+00 | global batch size:   288 | loss "
        "scale: 2147483648.0 | number of skipped iterations:   1 | number of nan iterations:   0 |"
    )


def test_rate_and_scale_are_those_of_the_next_iteration() -> None:
    record = replace(STEP, lr=1.0, loss_scale=8.0, next_lr=2.0, next_loss_scale=4.0)
    found = MEGATRON.fullmatch(megatron_line(record, BEFORE, steps=100))
    assert found is not None and (found[5], found[8]) == ("2.000E+00", "4.0")


def test_a_parser_finds_all_numbers() -> None:
    record = replace(STEP, step=40, samples=200, loss=3.25, loss_scale=None, grad_norm=1.25, nan=2)
    text = megatron_line(record, replace(BEFORE, step=30, samples=100, nan=1), steps=1000)
    found = MEGATRON.fullmatch(text)
    assert found is not None
    numbers = [float(group) for group in found.groups()]
    assert numbers == [40, 1000, 200, 87.0, 1.638e-8, 10, 3.25, 1.0, 1.25, 0, 1]


def test_megatron_without_a_previous_record_counts_from_the_beginning() -> None:
    found = MEGATRON.fullmatch(megatron_line(STEP, None, steps=100))
    assert found is not None and found[6] == "2"


def test_what_megatron_prints_besides_steps() -> None:
    output = io.StringIO()
    sink = MegatronSink(output, horizon=Horizon(100, 200), previous=None)
    sink.write(STEP)
    sink.write(replace(STEP, step=26, samples=54))
    sink.write(validation(26))
    event = EventRecord(step=26, samples=1, tokens=1, time=0.0, level="info", text="saved it")
    sink.write(event)
    sink.close()
    first, second, rule, text, end, last = output.getvalue().splitlines()
    assert MEGATRON.fullmatch(first) and "global batch size:     4" in second
    assert text == (
        " validation loss at iteration 26 | lm loss value: 2.971195E+00 | "
        "lm loss PPL: 1.950000E+01 | "
    )
    assert rule == end == "-" * (len(text) + 1)
    assert "saved it" in last


def test_decentralized_lines() -> None:
    output = io.StringIO()
    sink = DecentralizedSink(output, start_step=206_998, checkpoints=Path("log/x/checkpoints"))

    def say(step: int, text: str, level: str = "info") -> None:
        facts = {"step": step, "samples": 1, "tokens": 1, "time": STEP.time}
        sink.write(EventRecord(**facts, level=level, text=text))  # type: ignore[arg-type]

    for number, loss in ((206_999, 2.95), (207_000, 2.965190)):
        sink.write(replace(STEP, step=number, loss=loss, step_seconds=88.9345))
    sink.write(validation(207_000, train_loss=2.957595))
    say(207_000, "saved checkpoint step-00207000 (9 MiB)")
    sink.write(replace(STEP, step=207_004, loss=3.0, step_seconds=0.5))
    sink.write(validation(207_004, best=True, train_loss=2.9))
    say(207_004, "saved checkpoint step-00207004 (9 MiB)")
    say(207_004, "hot\x1b[31m", "warning")
    sink.close()
    lines = output.getvalue().splitlines()
    assert lines[0] == (
        "[11:19:22  INFO] Step 207000, Val loss: 2.971195, Train loss: 2.957595, Train time: "
        "177.869 s (88934.500 ms/step), Total train time: 177.869 s"
    )
    assert lines[1] == "[11:19:22  INFO] saved checkpoint step-00207000 (9 MiB)"
    assert lines[2].endswith("Train time: 2.000 s (500.000 ms/step), Total train time: 179.869 s")
    assert lines[3:] == [
        "[11:19:22  INFO] New best model found. Saving...",
        "[11:19:22  INFO] Saved model to log/x/checkpoints/step-00207004",
        "[11:19:22 WARNING] hot\ufffd[31m",
    ]


def test_decentralized_before_the_first_step() -> None:
    output = io.StringIO()
    sink = DecentralizedSink(output, start_step=0, checkpoints=Path())
    sink.write(validation(0, train_loss=2.98))
    assert output.getvalue() == (
        "[11:19:22  INFO] Initial train loss: 2.980000, val loss: 2.971195, step: 0\n"
    )


@pytest.mark.parametrize(("until", "step"), [(24, 24), (30, 25), (3, None)])
def test_the_last_record_before_a_resume(tmp_path: Path, until: int, step: int | None) -> None:
    path = tmp_path / "metrics.jsonl"
    records = (BEFORE, validation(24), STEP, validation(25))
    path.write_text("".join(f"{to_json(record)}\n" for record in records))
    found = last_step_record(path, until=until)
    assert (found and found.step) == step
    assert last_step_record(tmp_path / "none", until=5) is None
