"""The rendezvous: the store through which the processes of a run find each other.

It is torch's `TCPStore`, which rank 0 or the launcher hosts at the address of the run. Stores of
one process at one port share one server. A client whose server is not up yet prints dozens of lines
on standard error, so `join_store` first checks whether the address answers.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_LOOPBACK = ("127.0.0.1", "localhost")
_TICK = 0.1


def serve_store(place: ProcessInfo) -> Store:
    """The store of the run, hosted by this process."""
    assert place.address is not None
    host, port = place.address
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(host, port),
        )
    except RuntimeError as error:
        raise UserError(
            f"cannot host the rendezvous at {place.address}: {str(error).partition(chr(10))[0]}",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="another program may use the port, or the address is not this host's; set both",
            exit=Exit.PEER,
        ) from error


def _listen(host: str, port: int) -> int | None:
    """A socket that only this machine can reach, if all processes are here; torch's own listens on
    every network."""
    if host not in _LOOPBACK:
        return None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            # This process may host the store already; if another has the port, torch reports it.
            return None
        return listener.detach()


def join_store(place: ProcessInfo, *, seconds: float) -> Store:
    """The store of the run, hosted by another process; waits up to this long for it to answer."""
    assert place.address is not None
    host, port = place.address
    deadline = time.monotonic() + seconds
    while not answers(host, port):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing answers at {place.address}")
        time.sleep(_TICK)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def answers(host: str, port: int) -> bool:
    """Whether there is a store at an address."""
    try:
        with socket.create_connection((host, port), timeout=1) as connection:
            # The system may give the free port to the caller itself, which then reaches itself.
            return bool(connection.getsockname() != connection.getpeername())
    except OSError:
        return False
