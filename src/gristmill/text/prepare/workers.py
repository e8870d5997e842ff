"""Blocks ground by several processes, the results in the order of the blocks.

    tasks  ->  at most a few per worker are under way  ->  results, first in first out

The order, and so the output, does not depend on the number of workers. Small blocks travel
together, so that a folder of many small files costs no message each.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple, TypeAlias

from gristmill.base.errors import Exit, UserError
from gristmill.text.prepare.grind import Grinder, Ground, Recipe
from gristmill.text.sources.blocks import Block
from gristmill.text.sources.source import Source
from gristmill.text.tokenizers.encoders import open_encoder

_AHEAD = 3
_TOGETHER = 256


class Work(NamedTuple):
    """A block, its source, and the number of that."""

    number: int
    source: Source
    block: Block


Task: TypeAlias = Sequence[Work]
"""Blocks that travel together."""


def gathered(blocks: Iterable[Work], *, block_bytes: int) -> Iterator[Task]:
    """Put blocks together until they are about as large as one."""
    task: list[Work] = []
    size, last = 0, (-1, 0)
    for work in blocks:
        block = work.block
        before = last[1] if work.number == last[0] else 0
        last = (work.number, block.disk)
        task.append(work)
        size += block_bytes if block.content is not None else block.disk - before
        if size >= block_bytes or len(task) >= _TOGETHER:
            yield task
            task, size = [], 0
    if task:
        yield task


def grind_here(tasks: Iterable[Task], grinder: Grinder) -> Iterator[tuple[Task, list[Ground]]]:
    """Grind in this process."""
    for task in tasks:
        yield task, [grinder.grind(work.source, work.block) for work in task]


class Workers:
    """Processes that grind; they start at once, before anything is known about the work."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count,
            # A fork would copy locks that threads of the libraries hold.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(os.getpid(),),
        )
        with _born_deaf():
            for _ in range(count):
                self._pool.submit(_nothing)

    def grind(self, tasks: Iterable[Task], recipe: Recipe) -> Iterator[tuple[Task, list[Ground]]]:
        """Grind tasks by a recipe; the results come in the order of the tasks."""
        waiting: deque[tuple[Task, concurrent.futures.Future[list[Ground]]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._pool.submit(_work, recipe, task)))
                if len(waiting) >= _AHEAD * self._count:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process ended unexpectedly, perhaps for lack of memory",
                remedy="use fewer workers (--workers), then start the same command again",
                exit=Exit.STORAGE,
            ) from error

    def close(self) -> None:
        """Let the processes end; what they were given and nobody waits for is not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _born_deaf() -> Iterator[None]:
    """Let processes that are started ignore control-C, which reaches all of a terminal; the parent
    decides what it means."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is a process for each core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process soon after its parent, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(Exit.INTERNAL)


def _nothing() -> None:
    """A task that only makes a process start."""


def _work(recipe: Recipe, task: Task) -> list[Ground]:
    grinder = _grinder(recipe)
    return [grinder.grind(work.source, work.block) for work in task]


@functools.lru_cache(maxsize=1)
def _grinder(recipe: Recipe) -> Grinder:
    return Grinder(recipe, open_encoder(recipe.encoder))
