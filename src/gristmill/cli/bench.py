"""`bench`: where the time of a training step goes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.files import write_json
from gristmill.base.limits import keep_freed_memory
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.options import Overrides, require_place
from gristmill.config.load import load_run
from gristmill.hub.downloads import settings_folder

if TYPE_CHECKING:
    from gristmill.bench.measure import BenchResult, Speed, TimeRow
    from gristmill.strategies.strategy import CompiledStep

_NAME = 78
_COMPILED = {
    None: "",
    "step": ", the whole step compiled",
    "model": ", compiled as a whole",
    "blocks": ", compiled block by block",
}


def bench(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file, or a run folder.")],
    settings: Overrides = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps that are timed.")] = 30,
    warm_up: Annotated[
        int, typer.Option(min=1, help="Steps before them; the first one compiles.")
    ] = 10,
    random_tokens: Annotated[
        bool,
        typer.Option("--random-tokens", help="Use random ids instead of the run's token files."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all figures to this file too.")
    ] = None,
) -> None:
    """Measure the speed of a run's training step and show where its time goes.

    Runs the real step for a little while, then a few more steps under a profiler. Creates no run
    folder and changes none.
    """
    config = load_run(run, settings or (), find_model=settings_folder)
    if json is not None:
        require_place(json)
    # The profiler's library would announce itself; it reads this when torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    keep_freed_memory()
    from gristmill.bench.measure import measure_run

    result = measure_run(config, steps=steps, warm_up=warm_up, random_tokens=random_tokens)
    for line in _lines(result):
        typer.echo(line)
    if json is not None:
        write_json(json, dataclasses.asdict(result))


def _lines(result: BenchResult) -> Iterator[str]:
    yield from _header(result)
    if not result.stages:
        yield ""
        yield "the profiler does not see the work of this device: no tables"
        return
    yield from _table("stage", result.stages)
    yield f"{'step':<48}{sum(row.milliseconds for row in result.stages):>10.3f}{1:>8.1%}"
    if result.host:
        yield from _table("meanwhile on the host, slowed by the profiler", result.host)
    yield from _table("work by kind", result.parts)
    yield ""
    yield f"{'the ten largest by name':<{_NAME}}  {'a step':>7}{'ms':>10}{'share':>8}  kind"
    for kernel in result.kernels:
        name = kernel.name if len(kernel.name) <= _NAME else f"{kernel.name[: _NAME - 1]}…"
        yield (
            f"{name:<{_NAME}}  {kernel.count:>7.0f}{kernel.milliseconds:>10.3f}"
            f"{kernel.share:>8.1%}  {kernel.part}"
        )


def _table(title: str, rows: Iterable[TimeRow]) -> Iterator[str]:
    """Times of stages, or of the parts of each stage under its name."""
    yield ""
    yield f"{title:<48}{'ms':>10}{'share':>8}"
    stage = None
    for row in rows:
        if row.part and row.stage != stage:
            stage = row.stage
            yield stage
        name = f"  {row.part}" if row.part else row.stage
        yield f"{name:<48}{row.milliseconds:>10.3f}{row.share:>8.1%}"


def _header(result: BenchResult) -> Iterator[str]:
    subject, speed, matrix = result.subject, result.speed, result.matrix
    split = subject.batch // subject.micro_batch
    rows = {
        "model": f"{subject.name}, {format_count(subject.parameters)} parameters, vocabulary "
        f"{subject.vocabulary}",
        "batch": f"{subject.batch} x {subject.sequence} tokens"
        f"{f' in {split} parts' if split > 1 else ''}"
        f"{', random tokens' if subject.random_tokens else ''}",
        "device": f"{subject.device}, {subject.precision}{_COMPILED[subject.compiled]}"
        + (", CUDA graphs" if subject.cuda_graphs else ""),
        "first step": f"{speed.first_step:.1f} s{', compiling' if subject.compiled else ''}",
        "step": f"{speed.milliseconds:.2f} ms, median of {speed.steps} "
        f"({speed.fastest:.2f} to {speed.slowest:.2f})",
        "speed": f"{speed.tokens_per_second:,.0f} tokens/s",
        "data wait": f"{speed.data_wait:.3f} ms",
        "memory": "not known" if speed.memory is None else f"{format_bytes(speed.memory)} at most",
        "PaLM": _counting(speed.tflops, speed.mfu, matrix.flops),
        "causal": _counting(speed.tflops_causal, speed.mfu_causal, matrix.flops),
        "matrix": f"{matrix.flops / 1e12:.4g} TFLOP/s measured in {matrix.format} products of "
        f"{matrix.size} x {matrix.size}",
    }
    if result.compiled_step is not None:
        rows["compiled"] = _compilation(result.compiled_step, speed)
    yield from (f"{name:<12}{text}" for name, text in rows.items())


def _compilation(step: CompiledStep, speed: Speed) -> str:
    times = "once" if step.versions == 1 else f"{step.versions} times"
    text = f"{times}, in {step.seconds:.1f} s"
    if step.flops is None:
        return text
    rate = step.flops / (speed.milliseconds / 1000)
    return (
        f"{text}; XLA counts {step.flops / 1e12:.4g} TFLOP in a step on a device, so "
        f"{rate / 1e12:.4g} TFLOP/s"
    )


def _counting(tflops: float, mfu: float | None, matrix: float) -> str:
    peak = "" if mfu is None else f"{mfu:.1%} of the device's peak, "
    return f"{tflops:.4g} TFLOP/s, {peak}{1e12 * tflops / matrix:.1%} of the measured product"
