"""How long torch.compile has been at work in this process.

A step that compiles says nothing about the speed of training, so its rates are not recorded. torch
reports when compiling begins and ends, also for graphs that are compiled later, when a batch has
another size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self


class CompileClock:
    """Counts the seconds of compiling; `begins` is called each time that it starts."""

    def __init__(self, *, begins: Callable[[], None] = lambda: None) -> None:
        from torch._dynamo.callback import callback_handler

        self.seconds = 0.0
        self._begins, self._since = begins, 0.0
        self._handler: Any = callback_handler
        self._handler.register_start_callback(self._started)
        self._handler.register_end_callback(self._ended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._handler.remove_start_callback(self._started)
        self._handler.remove_end_callback(self._ended)

    def _started(self, reason: Any) -> None:
        self._since = time.monotonic()
        self._begins()

    def _ended(self, reason: Any) -> None:
        self.seconds += time.monotonic() - self._since
