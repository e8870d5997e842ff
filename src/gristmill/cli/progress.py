"""Progress of long work: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from gristmill.base.errors import on_one_line, printable
from gristmill.base.units import format_bytes, format_seconds
from gristmill.hub.client import DownloadDisplay, OnDownload

SECONDS_BETWEEN_LINES = 10.0


class ProgressLine:
    """Shows how far some work has come, with a short message.

    While another one is shown inside of it, its bar is hidden.
    """

    shown: ClassVar[list[ProgressLine]] = []
    """All that are open, the innermost last."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self.title = title
        self._console = Console(stderr=True, quiet=quiet)
        self._on_terminal = self._console.is_terminal and not quiet
        self._last = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(on_one_line(title), markup=False),
            BarColumn(),
            TextColumn("{task.fields[message]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None, message="")

    def __enter__(self) -> ProgressLine:
        self._hide_last()
        self.shown.append(self)
        if self._on_terminal:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._hide_last()
        self.shown.remove(self)
        if self.shown and self.shown[-1]._on_terminal:
            self.shown[-1]._bar.start()

    def _hide_last(self) -> None:
        if self.shown and self.shown[-1]._on_terminal:
            self.shown[-1]._bar.stop()

    def say(self, message: str) -> None:
        """Print a message that stays, above the bar."""
        text = printable(message)
        self._console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def update(self, done: float, total: float | None, message: str) -> None:
        """Show `done` of `total`, with a message beside the bar."""
        now, message = time.monotonic(), on_one_line(message)
        if self._first is None or done < self._first[1]:
            # The beginning, or that of the next piece of work.
            self._bar.reset(self._task)
            self._first = (now, done)
        if self._on_terminal:
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

    def show_count(self, name: str, done: int, total: int) -> None:
        """Show how many items of something are done."""
        self.update(done, total, f"{name}, {done:,} of {total:,}")


@contextmanager
def _download_line(name: str) -> Iterator[OnDownload]:
    """Show a download from its first bytes on; what is in the cache is not shown."""
    line, lock = ProgressLine(f"downloading {name}"), threading.Lock()
    with ExitStack() as stack:

        def update(done: int, total: int | None) -> None:
            # Several threads download.
            with lock:
                if line not in ProgressLine.shown:
                    stack.enter_context(line)
                line.update(done, total, format_bytes(done))

        yield update


def _note(message: str) -> None:
    (ProgressLine.shown or [ProgressLine("")])[-1].say(message)


DOWNLOADS = DownloadDisplay(_download_line, _note)
"""Shows downloads as other long work is shown."""
