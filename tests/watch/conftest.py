"""Run folders that grow, and servers of them in this process."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gristmill.track.folder import RunFolder
from gristmill.track.metrics import to_json
from gristmill.track.records import StepRecord
from gristmill.watch.server import WatchOptions, WatchParts, run
from gristmill.web.server import bind

LONG = 90.0
"""Seconds that tests wait at most for what takes a moment."""
SETTINGS = '[train]\nuntil = "{until}"\n[optim]\nlr = {lr}\n[data]\nseed = {seed}\n'


def step_line(step: int, **values: Any) -> str:
    """The record of a step, with values that tell which it is."""
    facts: dict[str, Any] = {
        "samples": 8 * step,
        "tokens": 64 * step,
        "time": 1000.0 + 2 * step,
        "loss": 2.0 + 1 / step,
        "lr": 1e-3,
        "grad_norm": 1.0 + (step % 7),
        "tokens_per_second": 32.0,
        "step_seconds": 2.0,
        "tflops": None,
        "tflops_causal": None,
    }
    return to_json(StepRecord(step=step, **{**facts, **values})) + "\n"


class MadeRun:
    """A run folder that a test writes."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)

    def begin(
        self, *, until: str = "1k steps", lr: float = 1e-3, seed: int = 0, state: Any = "running"
    ) -> MadeRun:
        self.folder.create()
        self.folder.settings.write_text(SETTINGS.format(until=until, lr=lr, seed=seed))
        self.folder.write_status(state, step=0)
        self.folder.metrics.touch()
        return self

    def append(self, *lines: str) -> None:
        with self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write("".join(lines))

    def steps(self, first: int, last: int, **values: Any) -> MadeRun:
        """Append the records of these steps, the last included."""
        self.append(*(step_line(step, **values) for step in range(first, last + 1)))
        return self


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., MadeRun]:
    """Make a run folder with so many steps."""

    def make(name: str = "runs/one", steps: int = 0, **how: Any) -> MadeRun:
        return MadeRun(tmp_path / name).begin(**how).steps(1, steps)

    return make


@pytest.fixture
def line_of() -> Callable[..., str]:
    return step_line


@dataclass(frozen=True)
class Curve:
    """One entry of an answer."""

    run: str
    name: str
    generation: int
    first: int
    x: Any
    mean: Any
    low: Any
    high: Any


def decoded(content: bytes) -> tuple[dict[str, Any], list[Curve]]:
    """The header and the curves of an answer."""
    (length,) = struct.unpack_from("<I", content)
    header, offset = json.loads(content[4 : 4 + length]), 4 + length
    assert offset % 8 == 0
    curves = []
    for number, name, generation, first, points, band in header["entries"]:
        x = np.frombuffer(content, "<f8", points, offset)
        offset += 8 * points
        arrays = []
        for _ in range(3 if band else 1):
            arrays.append(np.frombuffer(content, "<f4", points, offset))
            offset += 4 * points
        offset += -offset % 8
        mean, low, high = arrays if band else (arrays[0], None, None)
        names = header["runs"][number], header["names"][name]
        curves.append(Curve(*names, generation, first, x, mean, low, high))
    assert offset == len(content)
    return header, curves


@pytest.fixture
def decode() -> Callable[[bytes], tuple[dict[str, Any], list[Curve]]]:
    return decoded


@dataclass
class RunningWatch:
    """A server in a thread of this process."""

    url: str
    parts: WatchParts
    loop: asyncio.AbstractEventLoop
    log: list[str] = field(default_factory=list)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=LONG, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=LONG, **options)

    def rows(self) -> dict[str, dict[str, Any]]:
        """All rows by their names."""
        return {row["name"]: row for row in self.get("/api/runs").json()["runs"]}

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        ready = threading.Event()
        for _ in range(int(LONG / 0.05)):
            if holds():
                return
            ready.wait(0.05)
        raise AssertionError(self.log)


@pytest.fixture
def start_watch(tmp_path: Path) -> Iterator[Callable[..., RunningWatch]]:
    """Start a server of a folder; all are stopped at the end."""
    started: list[tuple[RunningWatch, threading.Thread]] = []

    def start(
        *roots: Path, keys: tuple[bytes, ...] = (), interval: float = 0.05, **options: Any
    ) -> RunningWatch:
        bound = bind("127.0.0.1", 0)
        url, log = f"http://127.0.0.1:{bound.getsockname()[1]}", list[str]()
        begun: Future[RunningWatch] = Future()

        async def main() -> None:
            loop = asyncio.get_running_loop()
            await run(
                roots or [tmp_path / "runs"],
                WatchOptions(interval=interval, **options),
                bound=bound,
                keys=keys,
                log=log.append,
                begun=lambda parts: begun.set_result(RunningWatch(url, parts, loop, log)),
            )

        def work() -> None:
            try:
                asyncio.run(main())
            except BaseException as error:
                if begun.done():
                    raise
                begun.set_exception(error)
            finally:
                bound.close()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        server = begun.result(LONG)
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        asyncio.run_coroutine_threadsafe(server.parts.stop(), server.loop).result(LONG)
        thread.join(LONG)
