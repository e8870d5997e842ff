"""The store of an elastic run, in a process of its own, so that it outlives every worker.

The first worker starts it if nothing answers at the address of the run. It ends when no worker has
sent a heartbeat for a while. If its host is lost, so is the run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from gristmill.base.process import Address, Place
from gristmill.parallel.liveness.rendezvous import answers, join_store, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE = "gristmill/pulse"
"""A counter that every heartbeat of every worker increases."""
IDLE = 30.0
"""Seconds without a heartbeat after which the store is not needed any more."""


def reach_store(place: Place, *, seconds: float, log: Path) -> Store:
    """A connection to the store of the run, which worker 0 starts if there is none."""
    assert place.address is not None
    if place.rank == 0 and not place.agent and not answers(*place.address):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", __name__, place.address.host, str(place.address.port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # It stays when this worker is killed with all that it has started.
                start_new_session=True,
            )
    return join_store(place, seconds=seconds)


def serve(address: Address, *, idle: float = IDLE) -> None:
    """Host the store until nobody uses it."""
    store = serve_store(Place(address=address))
    store.set_timeout(timedelta(seconds=idle))
    seen, since = store.add(PULSE, 0), time.monotonic()
    while time.monotonic() - since < idle:
        time.sleep(min(1.0, idle / 4))
        now = store.add(PULSE, 0)
        if now != seen:
            seen, since = now, time.monotonic()


def main() -> None:
    """Serve the store at the address on the command line."""
    parser = argparse.ArgumentParser(description="The store of an elastic run.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    given = parser.parse_args()
    assert dist.is_available()
    serve(Address(given.host, given.port))
    # Connections of workers that are gone do not matter any more.
    os._exit(0)


if __name__ == "__main__":
    main()
