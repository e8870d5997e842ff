"""The store of an elastic run, in a process of its own, so that it outlives every worker.

The first worker starts it if nothing answers at the address of the run. It ends when no worker has
sent a heartbeat for a while. If its host is lost, the workers end, and the run goes on from its
last checkpoint when they are started again.

The store also holds the settings of the run, so that a worker with others is refused before it
meets anybody.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Address, Place
from gristmill.parallel.liveness.rendezvous import answers, join_store, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

PULSE = "gristmill/pulse"
"""A counter that every heartbeat of every worker increases."""
IDLE = 30.0
"""Seconds without a heartbeat after which the store is not needed any more."""
SETTINGS = "gristmill/settings"
_LOOKS = 10
"""How often the store looks for heartbeats in this time."""
_QUIET = 3.0
"""Seconds without any heartbeat after which no worker is left."""
_FEW = 3


def reach_store(place: Place, *, seconds: float, log: Path, idle: float = IDLE) -> Store:
    """A connection to the store of the run, which worker 0 starts if there is none."""
    assert place.address is not None
    if place.rank == 0 and not place.agent and not answers(*place.address):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, place.address), str(idle)],
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
    seen, quiet = store.add(PULSE, 0), 0
    # Looks are counted, not seconds: all processes may have been suspended for a while.
    while quiet < _LOOKS:
        time.sleep(idle / _LOOKS)
        now = store.add(PULSE, 0)
        seen, quiet = now, quiet + 1 if now == seen else 0


def require_same_settings(
    store: Store, settings: Mapping[str, Any], *, place: Place, quiet: float = _QUIET
) -> None:
    """Refuse a worker whose settings are not those of the run; the first worker's count. If no
    worker is left, these are the settings of another run."""
    mine = json.dumps(settings, sort_keys=True)
    theirs = store.compare_set(SETTINGS, "", mine).decode()
    if theirs != mine and not _is_used(store, seconds=quiet):
        theirs = store.compare_set(SETTINGS, theirs, mine).decode()
    if theirs == mine:
        return
    known = json.loads(theirs)
    changed = [
        f"{name} is {settings.get(name)!r} here and {known.get(name)!r} there"
        for name in dict.fromkeys((*known, *settings))
        if known.get(name) != settings.get(name)
    ]
    more = f", and {len(changed) - _FEW} more" if len(changed) > _FEW else ""
    raise UserError(
        f"worker {place.rank} on {place.host} does not fit the run at {place.address}: "
        f"{', '.join(changed[:_FEW])}{more}",
        where="settings",
        remedy="start all workers with the same run file, and every run at an address of its own",
        exit=Exit.REFUSED,
    )


def _is_used(store: Store, *, seconds: float) -> bool:
    """Whether any worker sends heartbeats."""
    before, deadline = store.add(PULSE, 0), time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.1)
        if store.add(PULSE, 0) != before:
            return True
    return False


def main() -> None:
    """Serve the store at the address on the command line."""
    parser = argparse.ArgumentParser(description="The store of an elastic run.")
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("idle", type=float)
    given = parser.parse_args()
    assert dist.is_available()
    serve(Address(given.host, given.port), idle=given.idle)
    # Connections of workers that are gone do not matter any more.
    os._exit(0)


if __name__ == "__main__":
    main()
