"""What a run shows on standard output.

On a terminal, a bar at the bottom and everything else above it:

    validation at step 1000 | loss 3.3101 | perplexity 27.388 | 64 windows in 3.1s | best so far
    gpt2-small ━━━━━━━━━╸━━━━━━━━━ 1200/5000 loss 3.2145 51.2k tok/s 12m03s left

Anywhere else, plain lines: every validation, sample and event; of the steps the first few, then at
most one in ten seconds, and the last. Steps are thinned by the clock of the records rather than by
their number, so that slow and fast runs give logs of similar length.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gristmill.base.printing import printable
from gristmill.base.units import format_seconds
from gristmill.track.metrics import EventRecord, Record, SampleRecord, StepRecord, ValidationRecord
from gristmill.track.sinks import EtaEstimator, Horizon, line, rate

FIRST_STEPS = 5
SECONDS_BETWEEN_STEPS = 10.0
_STYLES = {"info": "default", "warning": "yellow", "error": "bold red"}


def slow_work(*, quiet: bool = False) -> Callable[[str], None]:
    """Says how far a run's preparations are, which come before all records, every ten seconds."""
    last, console = time.monotonic(), Console(quiet=quiet)

    def say(doing: str) -> None:
        nonlocal last
        if time.monotonic() - last >= SECONDS_BETWEEN_STEPS:
            last = time.monotonic()
            console.print(f"info: {doing}", highlight=False, markup=False, soft_wrap=True)

    return say


def console_sink(
    *, horizon: Horizon, start_step: int, name: str, console: Console | None = None
) -> BarSink | LineSink:
    """A bar on a terminal, plain lines elsewhere."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return BarSink(console, horizon=horizon, start_step=start_step, name=name)
    return LineSink(console, horizon=horizon, start_step=start_step)


class BarSink:
    """The view on a terminal."""

    def __init__(self, console: Console, *, horizon: Horizon, start_step: int, name: str) -> None:
        self._console = console
        self._eta = EtaEstimator(horizon)
        columns = {
            "{task.completed:.0f}/{task.total:.0f}": "none",
            "{task.fields[loss]}": "cyan",
            "{task.fields[speed]}": "dim",
            "{task.fields[left]}": "green",
        }
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            *(TextColumn(text, markup=False, style=style) for text, style in columns.items()),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._task = self._progress.add_task(
            printable(name),
            total=horizon.steps,
            completed=start_step,
            loss="first step",
            speed="",
            left="",
        )
        self._progress.start()

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            speed, left = record.tokens_per_second, self._eta.seconds_left(record)
            self._progress.update(
                self._task,
                completed=record.step,
                loss=f"loss {record.loss:.4f}",
                speed="" if speed is None else f"{rate(speed)} tok/s",
                left="" if left is None else f"{format_seconds(left)} left",
            )
        elif isinstance(record, SampleRecord):
            # Text objects are literal: brackets that a model writes are never read as markup.
            body = Text.assemble((printable(record.prompt), "bold"), printable(record.text))
            title = f"sample at step {record.step}"
            self._console.print(Panel(body, title=title, title_align="left", border_style="dim"))
        else:
            if isinstance(record, EventRecord):
                style = _STYLES[record.level]
            else:
                best = isinstance(record, ValidationRecord) and record.best
                style = "green" if best else "default"
            self._console.print(Text(line(record), style=style), soft_wrap=True)

    def flush(self) -> None:
        self._console.file.flush()

    def close(self) -> None:
        """Take the bar down; the line with its last state stays."""
        self._progress.stop()
        self.flush()


class LineSink:
    """Plain lines, for output that is not a terminal."""

    def __init__(self, console: Console, *, horizon: Horizon, start_step: int) -> None:
        self._console = console
        self._steps = horizon.steps
        self._first = start_step + FIRST_STEPS
        self._eta = EtaEstimator(horizon)
        self._shown_at = float("-inf")
        self._pending: str | None = None

    def write(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            if isinstance(record, EventRecord) and record.level == "error":
                self.flush()
            self._print(line(record))
            return
        left = self._eta.seconds_left(record)
        text = line(record, horizon_steps=self._steps, seconds_left=left)
        if (
            record.step <= self._first
            or record.step >= self._steps
            # Also if the clock was set back: no line would come until it is where it was.
            or not 0 <= record.time - self._shown_at < SECONDS_BETWEEN_STEPS
        ):
            self._shown_at = record.time
            self._pending = None
            self._print(text)
        else:
            self._pending = text

    def flush(self) -> None:
        """Show the last step, so that messages about the end come after it."""
        if self._pending is not None:
            self._print(self._pending)
            self._pending = None

    def close(self) -> None:
        self.flush()

    def _print(self, text: str) -> None:
        print(text, file=self._console.file, flush=True)
