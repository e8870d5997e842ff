"""Python's garbage collector while a run starts.

Imports and compilation make half a million objects that stay, and hardly any garbage. The collector
would visit them again and again, which takes a tenth of the time until the first step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing until `resume_collector`, or to the end of the context."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def resume_collector() -> None:
    """Collect as always."""
    gc.enable()
