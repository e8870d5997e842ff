"""What the person at the terminal sees of a run.

On a terminal, a bar at the bottom and everything else above it:

    validation at step 1000 | loss 3.3101 | perplexity 27.388 | 64 windows in 3.1s | best so far
    gpt2-small ━━━━━━━━━╸━━━━━━━━━ 1200/5000 loss 3.2145 51.2k tok/s 12m03s left

Anywhere else, plain lines: every validation, sample and event, and of the steps the first few, then
at most one in ten seconds, and the last. Thinning goes by the clock of the records rather than by
their number, so that slow and fast runs give logs of a similar length.
"""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from gristmill.base.units import format_seconds
from gristmill.track.metrics import (
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    ValidationRecord,
)
from gristmill.track.sinks import Horizon, Pace, line, printable, rate

FIRST_STEPS = 5
SECONDS_BETWEEN_STEPS = 10.0
_STYLES = {"info": "default", "warning": "yellow", "error": "bold red"}


class ConsoleSink:
    """Shows a run on standard output: with a bar on a terminal, in plain lines elsewhere."""

    def __init__(
        self,
        *,
        horizon: Horizon,
        start_step: int,
        name: str,
        console: Console | None = None,
    ) -> None:
        console = console or Console()
        animated = console.is_terminal and not console.is_dumb_terminal
        self._view: _Bar | _Lines = (
            _Bar(console, horizon=horizon, start_step=start_step, name=name)
            if animated
            else _Lines(console, horizon=horizon, start_step=start_step)
        )

    def write(self, record: Record) -> None:
        self._view.write(record)

    def flush(self) -> None:
        self._view.settle()
        self._view.console.file.flush()

    def close(self) -> None:
        """Take the bar down; the line with its last state stays."""
        self._view.close()
        self.flush()


class _Bar:
    """The view on a terminal."""

    def __init__(self, console: Console, *, horizon: Horizon, start_step: int, name: str) -> None:
        self.console = console
        self._pace = Pace(horizon)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, style="bold"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
            TextColumn("{task.fields[loss]}", markup=False, style="cyan"),
            TextColumn("{task.fields[speed]}", markup=False, style="dim"),
            TextColumn("{task.fields[left]}", markup=False, style="green"),
            console=console,
            refresh_per_second=4,
            expand=True,
        )
        self._task: TaskID = self._progress.add_task(
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
            self._progress.update(
                self._task,
                completed=record.step,
                loss=f"loss {record.loss:.4f}",
                speed=f"{rate(record.tokens_per_second)} tok/s",
                left=f"{format_seconds(self._pace.seconds_left(record))} left",
            )
        elif isinstance(record, SampleRecord):
            self.console.print(_sample_panel(record))
        else:
            self.console.print(Text(line(record), style=_style(record)), soft_wrap=True)

    def settle(self) -> None:
        """Nothing: the bar shows every step."""

    def close(self) -> None:
        self._progress.stop()


def _style(record: ValidationRecord | EventRecord) -> str:
    if isinstance(record, EventRecord):
        return _STYLES[record.level]
    return "green" if record.best else "default"


def _sample_panel(record: SampleRecord) -> Panel:
    # Text objects are literal: brackets that a model writes are never read as markup.
    body = Text.assemble((printable(record.prompt), "bold"), printable(record.text))
    return Panel(
        body, title=f"sample at step {record.step}", title_align="left", border_style="dim"
    )


class _Lines:
    """The view where nothing can be drawn over."""

    def __init__(self, console: Console, *, horizon: Horizon, start_step: int) -> None:
        self.console = console
        self._steps = horizon.steps
        self._first = start_step + FIRST_STEPS
        self._pace = Pace(horizon)
        self._shown_at = float("-inf")
        self._pending: str | None = None

    def write(self, record: Record) -> None:
        if not isinstance(record, StepRecord):
            if isinstance(record, EventRecord) and record.level == "error":
                self.settle()
            self._print(line(record))
            return
        left = self._pace.seconds_left(record)
        text = line(record, horizon_steps=self._steps, seconds_left=left)
        if self._is_due(record):
            self._shown_at = record.time
            self._pending = None
            self._print(text)
        else:
            self._pending = text

    def settle(self) -> None:
        """Show the last step, so that what is said of the end comes after it."""
        if self._pending is not None:
            self._print(self._pending)
            self._pending = None

    def close(self) -> None:
        self.settle()

    def _is_due(self, record: StepRecord) -> bool:
        return (
            record.step <= self._first
            or record.step >= self._steps
            or record.time - self._shown_at >= SECONDS_BETWEEN_STEPS
        )

    def _print(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)
