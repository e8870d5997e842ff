"""What a run shows on standard output.

On a terminal, a bar at the bottom and everything else above it:

    validation at step 1000 | loss 3.3101 | perplexity 27.388 | 64 windows in 3.1s | best so far
    gpt2-small ━━━━━━━━━╸━━━━━━━━━ 1200/5000 loss 3.2145 51.2k tok/s 12m03s left

Anywhere else, plain lines: every validation, sample and event; of the steps the first few, then at
most one in ten seconds, and the last. Steps are thinned by the clock of the records rather than by
their number, so that slow and fast runs give logs of similar length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from gristmill.base.errors import printable
from gristmill.base.units import format_seconds
from gristmill.track.records import (
    SAVED_CHECKPOINT,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    ValidationRecord,
)
from gristmill.track.sinks import (
    EtaEstimator,
    Horizon,
    line,
    rate,
    set_losses,
    straggler_event,
)

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
        elif (text := line(record)) is not None:
            if isinstance(record, StragglerRecord):
                record = straggler_event(record)
            if isinstance(record, EventRecord):
                style = _STYLES[record.level]
            else:
                best = isinstance(record, ValidationRecord) and record.best
                style = "green" if best else "default"
            self._console.print(Text(text, style=style), soft_wrap=True)

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
            if (text := line(record)) is not None:
                self._print(text)
            return
        left = self._eta.seconds_left(record)
        text = line(record, horizon_steps=self._steps, seconds_left=left)
        assert text is not None
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


# ------------------------------------------------------------------ in the words of other programs
#
# For scripts that parse standard output:
#
#   megatron        one line for each record of steps, with the spacing and digits of Megatron-LM:
#    iteration       25/  508626 | consumed samples:         7200 | elapsed time per iteration …
#
#   decentralized   one line for each validation, as decentralized GPT-2 training logs it:
#   [11:19:22  INFO] Step 207000, Val loss: 2.971195, Train loss: 2.957595, Train time: 177.869 s …
#
# Only what is printed changes: the files of the run stay as they are. Nothing is thinned, since a
# script may count lines: `track.every` is the interval between lines of steps. All other records
# are printed as plain lines.
#
# Megatron counts skipped and NaN iterations since its last line, and leaves the loss and the
# gradient norm out if no iteration since then made an update. Rate and loss scale are those of the
# next iteration, since Megatron prints them after it has updated them. Without a loss scale it
# prints 1.0.

_LEVELS = {"info": "INFO", "warning": "WARNING", "error": "ERROR"}


class MegatronSink:
    """Prints Megatron's lines."""

    def __init__(self, output: TextIO, *, horizon: Horizon, previous: StepRecord | None) -> None:
        """`previous` is the last record of steps before this process, if there is one."""
        self._output, self._steps, self._previous = output, horizon.steps, previous

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._print(megatron_line(record, self._previous, steps=self._steps))
            self._previous = record
        elif isinstance(record, ValidationRecord):
            text = (
                f" validation loss at iteration {record.step} | lm loss value: {record.loss:.6E} | "
                f"lm loss PPL: {record.perplexity:.6E} | "
            )
            rule = "-" * (len(text) + 1)
            self._print(f"{rule}\n{text}\n{rule}")
            if record.sets:
                self._print(f" validation sets at iteration {record.step}: {set_losses(record)}")
        elif (plain := line(record)) is not None:
            self._print(plain)

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        self.flush()

    def _print(self, text: str) -> None:
        print(text, file=self._output, flush=True)


def megatron_line(record: StepRecord, previous: StepRecord | None, *, steps: int) -> str:
    """Megatron's line about the iterations since the previous record."""
    before = (previous.step, previous.samples, previous.skipped, previous.nan) if previous else None
    step, samples, skipped, nan = before or (0, 0, 0, 0)
    iterations = max(1, record.step - step)
    batch = round((record.samples - samples) / iterations)
    skipped, nan = record.skipped - skipped, record.nan - nan
    parts = [
        f" iteration {record.step:8d}/{steps:8d}",
        f"consumed samples: {record.samples:12d}",
        f"elapsed time per iteration (ms): {1000 * record.step_seconds:.1f}",
        f"learning rate: {record.lr if record.next_lr is None else record.next_lr:.3E}",
        f"global batch size: {batch:5d}",
    ]
    if skipped < iterations:
        parts.append(f"lm loss: {record.loss:.6E}")
    scale = record.loss_scale if record.next_loss_scale is None else record.next_loss_scale
    parts.append(f"loss scale: {1.0 if scale is None else scale:.1f}")
    if skipped < iterations:
        parts.append(f"grad norm: {record.grad_norm:.3f}")
    parts.append(f"number of skipped iterations: {skipped:3d}")
    parts.append(f"number of nan iterations: {nan:3d}")
    return " | ".join(parts) + " |"


class DecentralizedSink:
    """Prints the lines of decentralized GPT-2 training: its losses are those of a validation, on
    windows of both texts, and its times those of training in this process."""

    def __init__(self, output: TextIO, *, start_step: int, checkpoints: Path) -> None:
        self._output, self._last_step, self._validated = output, start_step, start_step
        self._seconds = self._total = 0.0
        self._checkpoints = checkpoints
        self._best: set[int] = set()
        """The steps with the best loss so far that are not saved yet. A checkpoint is written in
        the background, so the next validation may come before it is there."""

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self._seconds += record.step_seconds * (record.step - self._last_step)
            self._last_step = record.step
        elif isinstance(record, ValidationRecord):
            self._write_validation(record)
        elif isinstance(record, EventRecord):
            self._write_event(record)
        elif isinstance(record, StragglerRecord):
            self._write_event(straggler_event(record))
        elif (text := line(record)) is not None:
            self._print(record, text)

    def _write_validation(self, record: ValidationRecord) -> None:
        # Other runs have a loss of the training text only if they ask for it.
        train_loss = math.nan if record.train_loss is None else record.train_loss
        if record.step == 0:
            text = f"Initial train loss: {train_loss:.6f}, val loss: {record.loss:.6f}, step: 0"
            self._print(record, text)
            return
        self._total += self._seconds
        milliseconds = 1000 * self._seconds / max(1, record.step - self._validated)
        self._print(
            record,
            f"Step {record.step:6d}, Val loss: {record.loss:.6f}, Train loss: {train_loss:.6f}, "
            f"Train time: {self._seconds:.3f} s ({milliseconds:.3f} ms/step), "
            f"Total train time: {self._total:.3f} s",
        )
        if record.sets:
            self._print(record, f"Validation sets at step {record.step}: {set_losses(record)}")
        if record.best:
            self._print(record, "New best model found. Saving...")
            self._best.add(record.step)
        self._seconds, self._validated = 0.0, record.step

    def _write_event(self, record: EventRecord) -> None:
        text = printable(record.text)
        for step in self._best:
            if text.startswith(f"{SAVED_CHECKPOINT} step-{step:08d} "):
                text = f"Saved model to {self._checkpoints / f'step-{step:08d}'}"
                self._best.remove(step)
                break
        # The level stands before it.
        self._print(record, text, level=_LEVELS[record.level])

    def flush(self) -> None:
        self._output.flush()

    def close(self) -> None:
        self.flush()

    def _print(self, record: Record, text: str, level: str = "INFO") -> None:
        now = datetime.fromtimestamp(record.time)
        print(f"[{now:%H:%M:%S} {level:>5}] {text}", file=self._output, flush=True)
