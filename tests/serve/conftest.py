"""Tiny models, and servers of them in this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill.base.errors import Exit
from gristmill.config.load import load_text
from gristmill.generate.engine import Engine
from gristmill.generate.request import Generation
from gristmill.serve.served import LoadOptions
from gristmill.serve.server import ServerOptions, ServerParts, run
from gristmill.train.run import Run
from gristmill.web.server import bind
from gristmill.web.service import RequestLimits

RUN = """
name = "mill"
folder = "{folder}"
[model]
layers = 2
heads = 2
width = 32
context = 128
[data]
paths = "{tokens}"
split = "90,10"
[train]
until = "{steps} steps"
batch = 8
[optim]
lr = 2e-2
[validate]
every = "1k steps"
[checkpoint]
every = "50 steps"
keep = 3
[runtime]
device = "cpu"
threads = 1
"""
LONG = 90.0
"""Seconds that tests wait at most for what takes a moment."""


def train_run(folder: Path, tokens: Path, *, steps: int = 150) -> Path:
    """A run of a moment, with a checkpoint every 50 steps; goes on if it is there."""
    text = RUN.format(folder=folder, tokens=tokens, steps=steps)
    assert Run(load_text(text, [], place="mill.toml")).train().exit is Exit.DONE
    return folder


@pytest.fixture(scope="session")
def mill(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of steps 50, 100 and 150; one id a byte, context 128."""
    return train_run(tmp_path_factory.mktemp("runs") / "mill", tokens)


@dataclass
class RunningServer:
    """A server in a thread of this process."""

    url: str
    parts: ServerParts
    loop: asyncio.AbstractEventLoop
    log: list[str] = field(default_factory=list)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LONG, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            if isinstance(body, bytes):
                return client.post(path, content=body, **options)
            return client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.get(path, **options)

    def do(self, act: Callable[[], Any]) -> Any:
        """Call something in the server's event loop."""
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(call)
        return done.result(LONG)

    def wait(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LONG)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds in the server's event loop."""

        async def look() -> None:
            async with asyncio.timeout(LONG):
                while not holds():
                    await asyncio.sleep(0.01)

        self.wait(look())

    def idle(self) -> bool:
        """Whether nobody holds anything."""
        models = self.parts.registry.loaded
        return self.parts.service.running == 0 and all(
            one.worker.pending == one.worker.active == one.users == 0 for one in models
        )


@pytest.fixture(scope="session")
def serve_models() -> Iterator[Callable[..., RunningServer]]:
    """Start a server of some models; all are stopped at the end."""
    started: list[tuple[RunningServer, threading.Thread]] = []

    def start(
        *models: object,
        keys: tuple[bytes, ...] = (),
        limits: RequestLimits | None = None,
        loaded: int = 2,
        drain: float = 30.0,
        send_buffer: int | None = None,
        **load: Any,
    ) -> RunningServer:
        load = {"device": "cpu", "slots": 4, "template": "plain", **load}
        options = ServerOptions(
            most_loaded=loaded,
            drain=drain,
            limits=limits or RequestLimits(),
            load=LoadOptions(**load),
        )
        bound = bind("127.0.0.1", 0)
        if send_buffer is not None:  # also of its connections
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        url, log = f"http://127.0.0.1:{bound.getsockname()[1]}", list[str]()
        begun: Future[RunningServer] = Future()

        async def main() -> None:
            loop = asyncio.get_running_loop()
            await run(
                list(map(str, models)),
                options,
                bound=bound,
                keys=keys,
                log=log.append,
                begun=lambda parts: begun.set_result(RunningServer(url, parts, loop, log)),
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
        if thread.is_alive():
            server.wait(server.parts.stop())
            thread.join(LONG)


@pytest.fixture(scope="session")
def server(mill: Path, serve_models: Callable[..., RunningServer]) -> RunningServer:
    """A server of one run."""
    return serve_models(mill)


class Gate:
    """Keeps engines from doing anything while it is closed; requests still come and go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._open, step = threading.Event(), Engine.step
        self._open.set()

        def gated(engine: Engine) -> list[Generation]:
            if self._open.is_set():
                return step(engine)
            engine._admit()
            self._open.wait(0.005)
            return []

        patch.setattr(Engine, "step", gated)

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Open, until a test closes it."""
    gate = Gate(monkeypatch)
    yield gate
    gate.open()
