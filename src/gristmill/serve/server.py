"""Starts the server of models, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import optional
from gristmill.serve.app import App
from gristmill.serve.metrics import Metrics
from gristmill.serve.registry import Registry
from gristmill.serve.served import LoadOptions
from gristmill.web.access import Access, is_local, read_keys, require_keys
from gristmill.web.routes import EXTRA, build_app
from gristmill.web.server import (
    allow_many_files,
    bind,
    stop_server,
    stopped_by_signals,
    url_of,
    web_server,
)
from gristmill.web.service import RequestLimits, Service

PURPOSE = "serving a model"
SWITCH_SECONDS = 0.0005
"""How long a thread that computes may hold Python's lock while another waits for it. With Python's
own 5 ms, a token waits for about one more before it is sent."""


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    most_loaded: int = 2
    """Models in memory."""
    drain: float = 30.0
    """Seconds for requests to end."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    load: LoadOptions = field(default_factory=LoadOptions)


def serve(models: Sequence[str], options: ServerOptions, *, log: Callable[[str], None]) -> None:
    """Serve models until a signal ends it."""
    for package in ("starlette", "uvicorn"):
        optional(package, extra=EXTRA, purpose=PURPOSE)
    keys, notes = ([], []) if options.api_key_file is None else read_keys(options.api_key_file)
    for note in notes:
        log(f"warning: {note}")
    require_keys(options.host, keys)
    allow_many_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    bound = bind(options.host, options.port)
    with contextlib.closing(bound):
        asyncio.run(run(models, options, bound=bound, keys=keys, log=log))


@dataclass(frozen=True)
class ServerParts:
    """A server that runs."""

    service: Service
    registry: Registry
    metrics: Metrics
    stop: Callable[[], Coroutine[Any, Any, None]]


async def run(
    models: Sequence[str],
    options: ServerOptions,
    *,
    bound: socket.socket,
    keys: Sequence[bytes] = (),
    log: Callable[[str], None],
    begun: Callable[[ServerParts], None] = lambda parts: None,
) -> None:
    """Serve until it is stopped; `begun` is called when it can be asked."""
    metrics = Metrics()
    registry = Registry(
        options=options.load, most_loaded=options.most_loaded, metrics=metrics, log=log
    )
    for model in models:
        registry.add(model)
    access = Access(keys, local=is_local(options.host))
    service = Service(access=access, limits=options.limits, log=log)
    routes = App(service, registry, metrics).routes
    app = build_app(service, routes, prefix="/v1", purpose=PURPOSE)
    server = web_server(app, purpose=PURPOSE)
    log(f"serving {', '.join(registry.names)} at {url_of(options.host, bound)}")
    # What was read so far stays; without it, collecting garbage takes a third of the time.
    gc.collect()
    gc.freeze()
    tasks = [
        asyncio.create_task(registry.follow()),
        asyncio.create_task(_load_first(registry)),
    ]

    def stop() -> Coroutine[Any, Any, None]:
        return stop_server(service, server, options.drain, log=log)

    begun(ServerParts(service, registry, metrics, stop))
    with stopped_by_signals(stop):
        await server.serve(sockets=[bound])
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(registry.close)


async def _load_first(registry: Registry) -> None:
    """The first model is loaded before it is asked for."""
    with contextlib.suppress(Exception):  # was logged, and is told to those who ask
        async with registry.borrow(registry.names[0]):
            pass
