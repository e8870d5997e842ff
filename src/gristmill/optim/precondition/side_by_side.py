"""Decompositions of many matrices at the same time.

A decomposition of a few thousand rows leaves most of a GPU idle and consists of many small kernels,
which one thread cannot launch fast enough. Several threads with a stream each can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

THREADS = 8
"""144 QR decompositions of 768 and 3072 rows on an H200 take 826 ms one after the other, 217 ms in
8 threads, and 266 ms in 16."""

Task = Callable[[], None]


@torch.no_grad()
def side_by_side(tasks: Sequence[Task], device: torch.device) -> None:
    """Run tasks that do not depend on one another, the longest first. Each writes its results into
    tensors that exist already: others would belong to the thread's stream."""
    if device.type != "cuda" or len(tasks) < 2:
        for task in tasks:
            task()
        return
    main = torch.cuda.current_stream(device)
    _load_library(device)

    def run(task: Task) -> torch.cuda.Stream:
        stream = _own_stream(device)
        stream.wait_stream(main)
        with torch.cuda.device(device), torch.cuda.stream(stream), torch.no_grad():
            task()
        return stream

    for stream in set(_threads().map(run, tasks)):
        main.wait_stream(stream)


@cache
def _load_library(device: torch.device) -> None:
    """torch loads its library of decompositions at their first use, which only one thread may
    make."""
    torch.linalg.cholesky(torch.eye(2, device=device))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="decompositions")


_local = threading.local()


def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of this thread."""
    if not hasattr(_local, "stream"):
        _local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream: torch.cuda.Stream = _local.stream
    return stream
