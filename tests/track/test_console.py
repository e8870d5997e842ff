"""The console: a bar on a terminal, thinned plain lines elsewhere, texts shown literally."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from gristmill.track.console import (
    BarSink,
    DecentralizedSink,
    LineSink,
    MegatronSink,
    console_sink,
)
from gristmill.track.records import (
    EventRecord,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)
from gristmill.track.sinks import Horizon


def step(number: int, time: float) -> StepRecord:
    return StepRecord(
        step=number,
        samples=number,
        tokens=number * 1024,
        time=time,
        loss=3.25,
        lr=1e-3,
        grad_norm=1.0,
        tokens_per_second=51_200.0,
        step_seconds=0.02,
        tflops=1.0,
        tflops_causal=1.0,
    )


def event(text: str) -> EventRecord:
    return EventRecord(step=1, samples=1, tokens=1, time=0.0, level="warning", text=text)


def sample(text: str) -> SampleRecord:
    return SampleRecord(step=7, samples=1, tokens=1, time=0.0, prompt="[red]", text=text)


def validation(number: int) -> ValidationRecord:
    return ValidationRecord(
        step=number,
        samples=1,
        tokens=1,
        time=0.0,
        loss=3.0,
        perplexity=20.0,
        windows=1,
        seconds=1.0,
        best=False,
    )


def sink(*, terminal: bool, start: int = 0) -> tuple[BarSink | LineSink, io.StringIO]:
    output = io.StringIO()
    console = Console(
        file=output, force_terminal=terminal, width=120, color_system=None, _environ={}
    )
    shown = console_sink(
        horizon=Horizon(100_000, 100_000), start_step=start, name="[b]run", console=console
    )
    return shown, output


def shown_steps(output: io.StringIO) -> list[int]:
    lines = [line for line in output.getvalue().splitlines() if line.startswith("step ")]
    return [int(line.split()[1].split("/")[0]) for line in lines]


def test_plain_steps_are_thinned_by_their_clock() -> None:
    console, output = sink(terminal=False)
    for number in range(1, 1001):
        console.write(step(number, time=number * 0.1))
    assert shown_steps(output) == [1, 2, 3, 4, 5, *range(105, 1000, 100)]
    console.close()
    assert shown_steps(output)[-1] == 1000


def test_a_clock_that_is_set_back_does_not_silence_the_steps() -> None:
    console, output = sink(terminal=False)
    for number in range(1, 401):
        console.write(step(number, time=number * 0.1 - (3600 if number > 200 else 0)))
    assert shown_steps(output) == [1, 2, 3, 4, 5, 105, 201, 301]


def test_what_is_said_of_the_end_comes_after_the_last_step() -> None:
    console, output = sink(terminal=False)
    for number in range(1, 8):
        console.write(step(number, time=number * 0.1))
    console.write(event("saved checkpoint"))
    console.flush()
    console.write(event("stopped and saved"))
    console.write(step(8, time=0.8))
    console.write(replace(event("failed at step 8"), level="error"))
    console.close()
    lines = [line.split("|")[0].strip() for line in output.getvalue().splitlines()[5:]]
    assert lines == [
        "warning: saved checkpoint",
        "step 7/100000",
        "warning: stopped and saved",
        "step 8/100000",
        "error: failed at step 8",
    ]


def test_a_resumed_run_shows_its_first_steps_and_its_horizon_once() -> None:
    console, output = sink(terminal=False, start=99_990)
    for number in range(99_991, 100_001):
        console.write(step(number, time=number * 0.001))
    console.close()
    assert shown_steps(output) == [*range(99_991, 99_996), 100_000]


def test_a_slow_process_is_shown_and_how_busy_a_host_is_is_not() -> None:
    stamp = {"step": 7, "samples": 1, "tokens": 1, "time": 1.0}
    records = (
        SystemRecord(**stamp, host="n7", cpu_use=0.5),
        StragglerRecord(**stamp, rank=3, host="n7", phase="data", ratio=1.5, seconds=0.2),
    )
    slow = "rank 3 on n7 is 50% slower than the median at data (200 ms per step)"
    for terminal in (False, True):
        console, output = sink(terminal=terminal)
        for record in records:
            console.write(record)
        console.close()
        assert f"warning: {slow}\n" in output.getvalue()
        assert "0.5" not in output.getvalue()
    horizon, megatron, decentralized = Horizon(9, 9), io.StringIO(), io.StringIO()
    for foreign in (
        MegatronSink(megatron, horizon=horizon, previous=None),
        DecentralizedSink(decentralized, start_step=0, checkpoints=Path()),
    ):
        for record in records:
            foreign.write(record)
    assert megatron.getvalue() == f"warning: {slow}\n"
    assert decentralized.getvalue().endswith(f" WARNING] {slow}\n")
    assert decentralized.getvalue().count("\n") == 1


def test_plain_output_has_every_other_record_on_one_unwrapped_line() -> None:
    console, output = sink(terminal=False)
    for number in range(50):
        console.write(validation(number))
    console.write(event("word " * 100))
    console.write(sample("a\nb"))
    lines = output.getvalue().splitlines()
    assert len(lines) == 52
    assert lines[-1] == r'sample at step 7 | "[red]" -> "a\nb"'


def test_the_terminal_has_a_bar_and_literal_texts_above_it() -> None:
    console, output = sink(terminal=True)
    console.write(step(50_000, time=0.0))
    console.write(sample("[/nothing] \x1b[2J [bold]kept[/bold]"))
    console.write(event("disk [almost] full"))
    console.write(validation(3))
    console.close()
    text = output.getvalue()
    assert "[b]run" in text
    assert "50000/100000" in text
    assert "loss 3.2500" in text
    assert "51.2k tok/s" in text
    assert "16m40s left" in text
    assert "[red][/nothing] \N{REPLACEMENT CHARACTER}[2J [bold]kept[/bold]" in text
    assert "warning: disk [almost] full" in text
    assert "validation at step 3" in text
    assert "\x1b[2J" not in text
