"""Starts the server, and stops it.

TERM, INT     no more requests; those that run are finished, within the drain time; exit 0
once more     at once
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError, optional
from gristmill.serve.access import Access, is_local, read_keys, require_keys
from gristmill.serve.app import EXTRA, PURPOSE, App, build_app
from gristmill.serve.metrics import Metrics
from gristmill.serve.registry import Registry
from gristmill.serve.served import LoadOptions
from gristmill.serve.service import Limits, Service, counted_requests

SWITCH_SECONDS = 0.0005
"""How long a thread that computes may hold Python's lock while another waits for it. With Python's
own 5 ms, a token waits for about one more before it is sent."""
BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
MOST_FILES = 65536
MOST_CONNECTIONS = 16384
"""More are refused, also if they ask nothing."""
_CLOSE_SECONDS = 2
"""For connections to close, after the last answer was sent."""


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
    limits: Limits = field(default_factory=Limits)
    load: LoadOptions = field(default_factory=LoadOptions)


def serve(models: Sequence[str], options: ServerOptions, *, log: Callable[[str], None]) -> None:
    """Serve models until a signal ends it."""
    for package in ("starlette", "uvicorn"):
        optional(package, extra=EXTRA, purpose=PURPOSE)
    keys, notes = ([], []) if options.api_key_file is None else read_keys(options.api_key_file)
    for note in notes:
        log(f"warning: {note}")
    require_keys(options.host, keys)
    _allow_many_files()
    sys.setswitchinterval(SWITCH_SECONDS)
    bound = bind(options.host, options.port)
    with contextlib.closing(bound):
        asyncio.run(run(models, options, bound=bound, keys=keys, log=log))


def _allow_many_files() -> None:
    """Every connection is a file; the usual limit of 1024 would refuse the next one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> socket.socket:
    """The socket of the server."""
    where = f"--host {host} --port {port}"
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        remedy = "choose another with --port" if error.errno == errno.EADDRINUSE else None
        what = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            what = "another program uses this port"
        raise UserError(what, where=where, remedy=remedy) from error
    bound.setblocking(False)
    return bound


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
    service = Service(access=access, limits=options.limits, metrics=metrics, log=log)
    server = _web_server(build_app(App(service, registry, metrics)))
    log(f"serving {', '.join(registry.names)} at {_url(options.host, bound)}")
    # What was read so far stays; without it, collecting garbage takes a third of the time.
    gc.collect()
    gc.freeze()
    tasks = [
        asyncio.create_task(registry.follow()),
        asyncio.create_task(_load_first(registry)),
    ]

    def stop() -> Coroutine[Any, Any, None]:
        return _stop(service, server, options.drain, log)

    begun(ServerParts(service, registry, metrics, stop))
    with _stopped_by_signals(stop):
        await server.serve(sockets=[bound])
    for task in tasks:
        task.cancel()
    await asyncio.to_thread(registry.close)


async def _load_first(registry: Registry) -> None:
    """The first model is loaded before it is asked for."""
    with contextlib.suppress(Exception):  # was logged, and is told to those who ask
        async with registry.borrow(registry.names[0]):
            pass


async def _stop(service: Service, server: Any, seconds: float, log: Callable[[str], None]) -> None:
    waiting = counted_requests(service.running)
    log(f"stopping: {waiting} may take {seconds:g}s to finish" if service.running else "stopping")
    await service.drain(seconds)
    server.should_exit = True


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Call `stop` at the first signal; end the process at the second. Other threads get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, tasks = asyncio.get_running_loop(), list[asyncio.Task[None]]()

    def handle(number: int) -> None:
        if tasks:
            os._exit(128 + number)
        tasks.append(loop.create_task(stop()))

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _web_server(app: Any) -> Any:
    uvicorn = optional("uvicorn", extra=EXTRA, purpose=PURPOSE)

    class Server(uvicorn.Server):  # type: ignore[misc, name-defined]
        """Leaves signals to us: its own way of stopping takes no more connections, so nobody could
        ask for its health."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=60,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
        backlog=BACKLOG,
    )
    return Server(config)


def _url(host: str, bound: socket.socket) -> str:
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}"
