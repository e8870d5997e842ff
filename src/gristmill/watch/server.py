"""Starts the server of the live page, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError, optional
from gristmill.watch.app import WatchApp
from gristmill.watch.control import Control
from gristmill.watch.live import STREAM_SECONDS, Broadcast
from gristmill.watch.watcher import Watcher
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

PURPOSE = "watching runs"
_DRAIN_SECONDS = 1.0


@dataclass(frozen=True)
class WatchOptions:
    """How a server of the live page runs."""

    host: str = "127.0.0.1"
    port: int = 8001
    api_key_file: Path | None = None
    control: bool = False
    """Whether whoever has the token may ask something of a run."""
    interval: float = 1.0
    """Seconds between looks at the files."""
    limits: RequestLimits = field(default_factory=lambda: RequestLimits(seconds=2 * STREAM_SECONDS))


def watch(roots: Sequence[Path], options: WatchOptions, *, log: Callable[[str], None]) -> None:
    """Serve the page until a signal ends it."""
    for package in ("starlette", "uvicorn"):
        optional(package, extra=EXTRA, purpose=PURPOSE)
    for root in roots:
        if root.exists() and not root.is_dir():
            raise UserError("this is no folder", where=root, remedy="name folders that hold runs")
    keys, notes = ([], []) if options.api_key_file is None else read_keys(options.api_key_file)
    notes += [f"{root} is not there yet" for root in roots if not root.exists()]
    for note in notes:
        log(f"warning: {note}")
    require_keys(options.host, keys)
    allow_many_files()
    bound = bind(options.host, options.port)
    with contextlib.closing(bound):
        asyncio.run(run(roots, options, bound=bound, keys=keys, log=log))


@dataclass(frozen=True)
class WatchParts:
    """A server that runs."""

    service: Service
    watcher: Watcher
    control: Control
    stop: Callable[[], Coroutine[Any, Any, None]]


async def run(
    roots: Sequence[Path],
    options: WatchOptions,
    *,
    bound: socket.socket,
    keys: Sequence[bytes] = (),
    log: Callable[[str], None],
    begun: Callable[[WatchParts], None] = lambda parts: None,
) -> None:
    """Serve until it is stopped; `begun` is called when it can be asked."""
    control = Control(allowed=options.control)
    tokens = [control.token.encode()] if keys and control.token else []
    access = Access([*keys, *tokens], local=is_local(options.host))
    service = Service(access=access, limits=options.limits, log=log)
    watcher = Watcher(roots, interval=options.interval, warn=log)
    broadcast = Broadcast(watcher)
    routes = WatchApp(watcher, broadcast, control).routes
    server = web_server(build_app(service, routes, prefix="/api", purpose=PURPOSE), purpose=PURPOSE)
    for line in _greeting(roots, options, url_of(options.host, bound), control):
        log(line)
    gc.collect()
    gc.freeze()
    watcher.start()

    async def stop() -> None:
        broadcast.close()
        await stop_server(service, server, _DRAIN_SECONDS, log=log)

    begun(WatchParts(service, watcher, control, stop))
    try:
        with stopped_by_signals(stop):
            await server.serve(sockets=[bound])
    finally:
        await asyncio.to_thread(watcher.stop)


def _greeting(
    roots: Sequence[Path], options: WatchOptions, url: str, control: Control
) -> list[str]:
    """Where the page is, and how to reach it from elsewhere."""
    address = url if control.token is None else f"{url}/#token={control.token}"
    lines = [f"watching {', '.join(map(str, roots))} at {address}"]
    if control.token is not None:
        lines.append("whoever has this address can stop runs; without the token it only shows them")
    if is_local(options.host):
        port = url.rpartition(":")[2]
        there = f"ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}"
        lines.append(f"from another machine: {there}, then open the address there")
    return lines
