"""Progress of long work: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gristmill.base.units import format_seconds

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Shows how far a piece of work is, with its rate in words."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._console = Console(stderr=True)
        self._last = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(title),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(title, total=None, words="")

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def say(self, words: str) -> None:
        """Say something that stays, above the bar."""
        self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def update(self, done: float, total: float | None, words: str) -> None:
        """Show `done` of `total`, with a few words beside the bar."""
        if self._first is None:
            self._first = (time.monotonic(), done)
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=total, words=words)
        elif time.monotonic() - self._last >= SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            share = f"{100 * done / total:.0f}% " if total else ""
            left = self._time_left(done, total)
            self._console.print(
                f"{self.title}: {share}{words}{left}", highlight=False, markup=False, soft_wrap=True
            )

    def _time_left(self, done: float, total: float | None) -> str:
        """In words, by the rate since the first update that was seen."""
        assert self._first is not None
        now, (since, before) = time.monotonic(), self._first
        if not total or done <= before or done >= total:
            return ""
        seconds = (total - done) * (now - since) / (done - before)
        return f", {format_seconds(seconds)} left"
