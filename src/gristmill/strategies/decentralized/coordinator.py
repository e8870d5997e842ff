"""The store of an elastic run, in a process of its own, so that it outlives every worker.

Worker 0 starts it if nothing answers at the address of the run. It exits when no worker has sent a
heartbeat for a while. If its host is lost, the workers exit, and the run continues from its last
checkpoint when they are started again.

The store also holds the settings of the run, so that a worker with different ones is refused before
it connects to any other.

Torch's store accepts anyone who reaches its port. So workers sign the values they write, with a key
in the run folder that only their user can read (`SignedStore`). Others can still disturb a run by
deleting or overwriting values, but they cannot take part in it or redirect workers to another
address.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_text, storage_errors
from gristmill.base.process import Address, ProcessInfo
from gristmill.distributed.liveness.rendezvous import answers, join_store, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    Store = dist.Store

PULSE = "gristmill/pulse"
"""A counter that every heartbeat of every worker increases."""
IDLE = 30.0
"""Seconds without a heartbeat after which the store is no longer needed."""
SETTINGS = "gristmill/settings"
_LOOKS = 10
"""How often the store checks for heartbeats in this time."""
_QUIET = 3.0
"""Seconds without any heartbeat after which no worker is left."""
_FEW = 3
_DIGEST = 32
"""Bytes of a signature."""


class ForgedValueError(RuntimeError):
    """A value in the store that was not written by a worker of this run."""

    def __init__(self, key: str) -> None:
        super().__init__(f"somebody without the key of the run folder has written {key!r} there")


class SignedStore(Store):
    """A store whose values are signed, so that only those who know the key can write them.

    A signature also covers the name of a value, so that a value cannot be copied to another name.
    Names begin with the key's fingerprint, so that a later run in the same store sees none of them.
    Counters are not signed; only the lifetime of the store depends on them.

    Torch calls this object from C++ without keeping a reference, so the caller must keep one."""

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self.store, self.key = store, key
        self._prefix = f"gristmill/{fingerprint(key)}/"

    def set(self, name: str, value: str | bytes) -> None:
        self.store.set(self._prefix + name, self._signed(name, value))

    def get(self, name: str) -> bytes:
        return self._verified(name, self.store.get(self._prefix + name))

    def multi_get(self, names: Sequence[str]) -> list[bytes]:
        values = self.store.multi_get([self._prefix + name for name in names])
        return [self._verified(name, value) for name, value in zip(names, values, strict=True)]

    def compare_set(self, name: str, expected: str, desired: str) -> bytes:
        # The store treats an empty value as missing.
        known = self._signed(name, expected) if expected else ""
        now = self.store.compare_set(self._prefix + name, known, self._signed(name, desired))
        return self._verified(name, now)

    def check(self, names: Sequence[str]) -> bool:
        return self.store.check([self._prefix + name for name in names])

    def wait(self, names: Sequence[str], timeout: timedelta | None = None) -> None:
        wanted = [self._prefix + name for name in names]
        self.store.wait(wanted, *(() if timeout is None else (timeout,)))

    def add(self, name: str, amount: int) -> int:
        return self.store.add(name, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        self.store.set_timeout(timeout)

    def clone(self) -> SignedStore:
        """Another connection to the same store."""
        return SignedStore(self.store.clone(), self.key)  # type: ignore[attr-defined]

    def _signature(self, name: str, value: bytes) -> str:
        return hmac.digest(self.key, f"{name}\0".encode() + value, "sha256").hex()

    def _signed(self, name: str, value: str | bytes) -> str:
        # As hexadecimal digits: the store's interface expects text, and torch's values are bytes.
        content = value.encode() if isinstance(value, str) else bytes(value)
        return self._signature(name, content) + content.hex()

    def _verified(self, name: str, text: bytes) -> bytes:
        content = b""
        with contextlib.suppress(ValueError):
            content = bytes.fromhex(text[2 * _DIGEST :].decode())
        if not hmac.compare_digest(text[: 2 * _DIGEST], self._signature(name, content).encode()):
            raise ForgedValueError(name)
        return content


def fingerprint(key: bytes) -> str:
    """The public fingerprint of a key."""
    return sha256_text(f"fingerprint of {key.hex()}")[:16]


def run_key(path: Path) -> bytes:
    """The key of a run, in a file of the run folder; the first worker to need it creates it."""
    if not path.exists():
        write_key(path, secrets.token_bytes(_DIGEST), replace=False)
    with storage_errors(path):
        text = path.read_text("ascii", errors="replace")
    with contextlib.suppress(ValueError):
        if len(key := bytes.fromhex(text)) == _DIGEST:
            return key
    raise UserError(
        "the key of an elastic run is damaged",
        where=path,
        remedy="stop all workers, remove it, and start them again: it is made anew",
        exit=Exit.DATA,
    )


def write_key(path: Path, key: bytes, *, replace: bool) -> None:
    """Write a key to its file, readable for this user only. A key that another worker has written
    in the meantime is kept, unless it is to be replaced."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        with open(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(key.hex())
        if replace:
            os.replace(draft, path)
            return
        # Linking is atomic: the file has its whole content, even if this worker is killed here.
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()


def reach_store(place: ProcessInfo, *, seconds: float, log: Path, idle: float = IDLE) -> Store:
    """A connection to the store of the run, which worker 0 starts if it does not run."""
    assert place.address is not None
    if place.rank == 0 and not place.agent and not answers(*place.address):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, place.address), str(idle)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # The store survives if this worker is killed with all its children.
                start_new_session=True,
            )
    return join_store(place, seconds=seconds)


def serve(address: Address, *, idle: float = IDLE) -> None:
    """Host the store until it is no longer used."""
    store = serve_store(ProcessInfo(address=address))
    store.set_timeout(timedelta(seconds=idle))
    seen, quiet = store.add(PULSE, 0), 0
    # Checks are counted, not seconds: all processes may have been suspended for a while.
    while quiet < _LOOKS:
        time.sleep(idle / _LOOKS)
        now = store.add(PULSE, 0)
        seen, quiet = now, quiet + 1 if now == seen else 0


def require_same_settings(
    store: Store, settings: Mapping[str, Any], *, place: ProcessInfo, quiet: float = _QUIET
) -> None:
    """Refuse a worker whose settings differ from those of the run, which are the first worker's. If
    no worker is left, stored settings belong to an earlier run and are replaced."""
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
    host, port, idle = sys.argv[1:]
    serve(Address(host, int(port)), idle=float(idle))
    # Connections of workers that have gone no longer matter.
    os._exit(0)


if __name__ == "__main__":
    main()
