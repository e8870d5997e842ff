"""The store in which the processes of a run meet: a small dictionary that the first of them keeps.

It is torch's `TCPStore` at the address of the run. Torch's own rendezvous uses it as well,
before or afterwards, since stores of one process at one port have one server, which lives as long
as any of them. The client of a frozen server waits for ever, whatever timeout it was given. One of
a server that is not there yet says so on standard error, in dozens of lines: whether somebody
answers is found out before torch is asked.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Place

_LOOPBACK = ("127.0.0.1", "localhost")
_TICK = 0.1


class Store(Protocol):
    """What is asked of a store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys that are there; waits for those that are not."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are there."""
        ...


def serve_store(place: Place) -> Store:
    """The store of the run, kept by this process."""
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
            f"the processes cannot meet at {place.address}: {str(error).partition(chr(10))[0]}",
            where="environment MASTER_ADDR, MASTER_PORT",
            remedy="another program may have the port, or this host another name; set both",
            exit=Exit.PEER,
        ) from error


def _listen(host: str, port: int) -> int | None:
    """A socket for processes of this machine only, if all are here; torch's own lets in anyone."""
    if host not in _LOOPBACK:
        return None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            # This process may keep the store already; if another has the port, torch says so.
            return None
        return listener.detach()


def join_store(place: Place, *, seconds: float) -> Store:
    """The store of the run, kept by another process; waits so long for that to begin."""
    assert place.address is not None
    host, port = place.address
    deadline = time.monotonic() + seconds
    while not _answers(host, port):
        if time.monotonic() > deadline:
            raise RuntimeError(f"nobody answers at {place.address}")
        time.sleep(_TICK)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=False,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
    )


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1) as one:
            # A port that nobody has may be given to the caller, who then reaches itself.
            return bool(one.getsockname() != one.getpeername())
    except OSError:
        return False
