"""The world of a worker in one view of an elastic run.

Torch's default group cannot be used here, since it fails with the first of its members. Groups are
created directly, from those workers of a view that need one, and dropped with the view. Waiting for
other workers ends when the view changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gristmill.distributed.control import UNFINISHED, ControlGroup
from gristmill.distributed.world import MARGIN, World
from gristmill.strategies.decentralized.membership import View
from gristmill.strategies.decentralized.workers import WorkerSet

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL = 0.01
_CONNECTING = 20.0
"""Seconds for the members of a group to connect to each other, once all are present."""


class ViewGroups:
    """The groups of one view, over gloo."""

    def __init__(
        self,
        view: View,
        store: Store | None,
        *,
        worker: int,
        timeout: float,
        interrupt: Callable[[], None],
    ) -> None:
        self.view, self.store, self.worker = view, store, worker
        self.timeout, self.interrupt = timeout, interrupt
        self._known: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._clients: list[Store] = []
        """Connections to the store that groups use; torch keeps no references to them."""

    def of(
        self, members: Sequence[int], *, purpose: str, timeout: float | None = None
    ) -> dist.ProcessGroup | None:
        """The group of some workers, including this one; None for this one alone. `timeout`: that
        of its collectives, if not the one of a step."""
        if len(members) == 1:
            return None
        key = (purpose, tuple(members))
        if key not in self._known:
            self._known[key] = self._connect(members, purpose, timeout=timeout or self.timeout)
        return self._known[key]

    def _connect(
        self, members: Sequence[int], purpose: str, *, timeout: float
    ) -> dist.ProcessGroup:
        name = f"view-{self.view.number}/{purpose}/{'-'.join(map(str, members))}"
        assert self.store is not None, "a worker alone needs no group"
        store = dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]
        # Waiting here can be interrupted, and does not block the store.
        store.set(f"here/{self.worker}", "")
        while not store.check([f"here/{worker}" for worker in members]):
            self.interrupt()
            time.sleep(_POLL)
        rank, size = members.index(self.worker), len(members)
        gloo: Any = self._gloo(name, rank=rank, size=size)
        gloo._set_default_timeout(timedelta(seconds=timeout + MARGIN))
        # Some collectives do not accept a bare backend.
        group = dist.ProcessGroup(store, rank, size)
        kind: Any = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), kind, gloo)
        return group

    def _gloo(self, name: str, *, rank: int, size: int) -> Any:
        """Connect to the others, in a thread: if one of them dies at this moment, the others would
        block until the timeout."""
        assert self.store is not None
        # A client that waits cannot be used for anything else.
        client = self.store.clone()  # type: ignore[attr-defined]
        self._clients.append(client)
        own = dist.PrefixStore(name, client)  # type: ignore[attr-defined]
        built: Future[Any] = Future()

        def build() -> None:
            try:
                limit = timedelta(seconds=_CONNECTING)
                built.set_result(dist.ProcessGroupGloo(own, rank, size, limit))
            except BaseException as error:
                built.set_exception(error)

        threading.Thread(target=build, name="connect", daemon=True).start()
        while not built.done():
            self.interrupt()
            wait([built], timeout=_POLL)
        return built.result()

    def leave(self) -> None:
        """Leave all groups, even with unfinished collectives."""
        self._known.clear()
        self._clients.clear()
        forget_finished()


def forget_finished() -> None:
    """Drop collectives that have ended, and with them their groups. They end at the latest when the
    others close their connections."""
    for entry in list(UNFINISHED):
        if entry[0].is_completed():
            # Another thread may have removed it.
            with contextlib.suppress(ValueError):
                UNFINISHED.remove(entry)


def keep_unfinished() -> None:
    """At the end of the process: do not wait for collectives that others may never finish."""
    forget_finished()
    for _, group in UNFINISHED:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@dataclass(frozen=True)
class ViewWorld(World):
    """A worker of one process in a view."""

    view_groups: ViewGroups | None = field(default=None)

    def control_group(self, purpose: str, *, timeout: float | None = None) -> ControlGroup:
        assert self.view_groups is not None
        groups = self.view_groups
        group = groups.of(groups.view.workers, purpose=f"control: {purpose}", timeout=timeout)
        return ControlGroup(group, interrupt=groups.interrupt)


def view_workers(world: ViewWorld, *, per_node: int) -> WorkerSet:
    """The workers of a view."""
    groups = world.view_groups
    assert groups is not None

    def connect(members: Sequence[int]) -> dist.ProcessGroup | None:
        return groups.of(members, purpose="exchange")

    return WorkerSet(
        mine=world.at["dp_replicate"],
        members=groups.view.workers,
        per_node=per_node,
        connect=connect,
        on_host=world.device.kind == "cuda",
        interrupt=groups.interrupt,
    )
