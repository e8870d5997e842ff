"""Blocks ground by several processes, the results in the order of the blocks.

    tasks  ->  at most a few per worker are under way  ->  results, first in first out

The order, and so the output, does not depend on the number of workers. Small blocks travel
together, so that a folder of many small files costs no message each.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import TypeAlias

from gristmill.base.errors import Exit, UserError
from gristmill.text.prepare.grind import Grinder, Ground, Recipe
from gristmill.text.sources.blocks import Block
from gristmill.text.tokenizers.encoders import open_encoder

Task: TypeAlias = Sequence[tuple[int, Block]]
"""Blocks, each with the number of its source."""

_AHEAD = 3
_TOGETHER = 256


def gathered(blocks: Iterable[tuple[int, Block]], *, block_bytes: int) -> Iterator[Task]:
    """Put blocks together until they are about as large as one."""
    task: list[tuple[int, Block]] = []
    size, last = 0, (-1, 0)
    for source, block in blocks:
        before = last[1] if source == last[0] else 0
        last = (source, block.disk)
        task.append((source, block))
        size += block_bytes if block.content is not None else block.disk - before
        if size >= block_bytes or len(task) >= _TOGETHER:
            yield task
            task, size = [], 0
    if task:
        yield task


def grind_here(tasks: Iterable[Task], grinder: Grinder) -> Iterator[tuple[Task, list[Ground]]]:
    """Grind in this process."""
    for task in tasks:
        yield task, [grinder.grind(source, block) for source, block in task]


class Workers:
    """Processes that grind by one recipe.

    They start at once; the folder of the encoder may be filled while they do.
    """

    def __init__(self, recipe: Recipe, *, count: int) -> None:
        self._count = count
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count,
            # A fork would copy locks that threads of the libraries hold.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(recipe, os.getpid()),
        )
        for _ in range(count):
            self._pool.submit(_nothing)

    def grind(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, list[Ground]]]:
        """Grind tasks; the results come in the order of the tasks."""
        waiting: deque[tuple[Task, concurrent.futures.Future[list[Ground]]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._pool.submit(_work, task)))
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


_recipe: Recipe | None = None


def _begin(recipe: Recipe, parent: int) -> None:
    global _recipe
    _recipe = recipe
    # Control-C reaches every process of the terminal; the parent decides what it means.
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


def _work(task: Task) -> list[Ground]:
    grinder = _grinder()
    return [grinder.grind(source, block) for source, block in task]


@functools.cache
def _grinder() -> Grinder:
    assert _recipe is not None
    return Grinder(_recipe, open_encoder(_recipe.encoder))
