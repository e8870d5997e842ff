"""Progress of long work: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gristmill.base.units import format_seconds

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Shows how far some work has come, with a short message."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self._console = Console(stderr=True, quiet=quiet)
        self._shown = self._console.is_terminal and not quiet
        self._last = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.fields[message]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=None, message="")

    def __enter__(self) -> ProgressLine:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._bar.stop()

    def say(self, message: str) -> None:
        """Print a message that stays, above the bar."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def update(self, done: float, total: float | None, message: str) -> None:
        """Show `done` of `total`, with a message beside the bar."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)
        if self._shown:
            self._bar.update(self._task, completed=done, total=total, message=message)
        elif now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            share = f"{100 * done / total:.0f}% " if total else ""
            since, before = self._first
            left = ""
            if total and before < done < total:
                # By the rate since the first update.
                left = f", {format_seconds((total - done) * (now - since) / (done - before))} left"
            self.say(f"{self.title}: {share}{message}{left}")
