"""What runs a web server: its socket, its signals, and an end in order.

TERM, INT     no more requests; those that run are finished, within the drain time; exit 0
once more     at once
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from gristmill.base.errors import UserError, optional
from gristmill.web.routes import EXTRA
from gristmill.web.service import Service, counted_requests

BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
MOST_FILES = 65536
MOST_CONNECTIONS = 16384
"""More are refused, also if they ask nothing."""
_CLOSE_SECONDS = 2
"""For connections to close, after the last answer was sent."""


def allow_many_files() -> None:
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


async def stop_server(
    service: Service, server: Any, seconds: float, *, log: Callable[[str], None]
) -> None:
    """Take no more requests, wait so long for those that run, and end the server."""
    waiting = counted_requests(service.running)
    log(f"stopping: {waiting} may take {seconds:g}s to finish" if service.running else "stopping")
    await service.drain(seconds)
    server.should_exit = True


@contextlib.contextmanager
def stopped_by_signals(stop: Callable[[], Coroutine[Any, Any, None]]) -> Iterator[None]:
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


def web_server(app: Any, *, purpose: str) -> Any:
    """What answers at a socket: `await it.serve(sockets=[bound])`."""
    uvicorn = optional("uvicorn", extra=EXTRA, purpose=purpose)

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


def url_of(host: str, bound: socket.socket) -> str:
    """The address of a server."""
    name = f"[{host.strip('[]')}]" if ":" in host else host
    return f"http://{name}:{bound.getsockname()[1]}"
