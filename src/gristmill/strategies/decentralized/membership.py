"""The membership of an elastic run: a sequence of views, the same on all workers.

    members/WORKER     the heartbeat of a worker: its incarnation, host, process id, and a count
    views/NUMBER       the workers of a view with their incarnations; written once

Every worker posts its heartbeat and reads those of the others, in a thread. A worker whose process
has ended, or that has been silent for too long, counts as dead; a new process has a new
incarnation. Any member of the newest view that finds it outdated proposes the next one; the first
proposal wins. So all agree on every view, and a worker that was left out, because its network or
its machine was frozen, notices that and joins again like a new one.

The first view waits until all workers are present, or for the start limit. If all members of a view
are lost, the next one waits likewise, but not as long.

A worker that was frozen may have been left out without knowing it. So no worker continues before it
has read the other heartbeats recently (`check`).

The thread sends heartbeats even if the main thread hangs. So if the main thread makes no progress
for longer than its phase may take, the worker announces that it leaves, and joins again once the
main thread continues.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.base.units import format_seconds
from gristmill.distributed.liveness.heartbeat import has_ended, pid_namespace
from gristmill.strategies.decentralized.coordinator import PULSE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT = 0.5
"""Seconds between two heartbeats."""
REGROUP = 30.0
"""Seconds that a view waits for all workers if no member of the last view is left."""
_RECOVERY = 5.0
"""Seconds within which a process that was frozen hears from the store again."""


class ViewChangedError(Exception):
    """Workers have died or joined since the view was formed."""


@dataclass(frozen=True)
class View:
    """The workers that take part, from one change to the next."""

    number: int
    members: Mapping[int, str]
    """Incarnations by worker, in order."""

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self.members)

    @classmethod
    def parse(cls, number: int, text: bytes) -> View:
        members = {int(worker): member for worker, member in json.loads(text).items()}
        return cls(number, dict(sorted(members.items())))

    def written(self) -> str:
        return json.dumps(dict(self.members))


@dataclass
class Peer:
    """The known state of another worker."""

    incarnation: str
    host: str
    pid: int
    namespace: str
    count: int = 0
    heard: float = 0.0
    """When its count last changed, on this worker's clock."""
    ended: bool = False
    done_in: int | None = None
    """The view in which it has finished or stopped, and in which its end needs no reaction."""
    complete: bool = False
    """Whether the run is complete, so that the others need not wait for this worker."""

    def note(self, values: Mapping[str, Any], *, now: float, namespace: str) -> None:
        # An old heartbeat that is written again by a reader is no sign of life.
        if values["count"] > self.count:
            self.count, self.heard = values["count"], now
        same_host = self.namespace == namespace != ""
        self.done_in, self.complete = values["done_in"], values["complete"]
        self.ended = values["leaving"] or (same_host and has_ended(self.pid))


@dataclass
class Roll:
    """The last heartbeats of all workers, and which are alive. Independent of store and clock."""

    worker: int
    silence: float
    """Seconds after which a silent worker is dead."""
    namespace: str
    peers: dict[int, Peer] = field(default_factory=dict)

    def note(self, worker: int, values: Mapping[str, Any], *, now: float) -> None:
        known = self.peers.get(worker)
        if known is None or known.incarnation != values["incarnation"]:
            names = ("incarnation", "host", "pid", "namespace")
            known = Peer(**{name: values[name] for name in names})
            known.heard, self.peers[worker] = now, known
        known.note(values, now=now, namespace=self.namespace)

    def alive(self, *, now: float) -> dict[int, str]:
        """The incarnations of all live workers, in order."""
        return {
            worker: one.incarnation
            for worker, one in sorted(self.peers.items())
            if not one.ended and one.done_in is None and self._is_heard(worker, now=now)
        }

    def _is_heard(self, worker: int, *, now: float) -> bool:
        return worker == self.worker or now - self.peers[worker].heard < self.silence

    def _is_done(self, worker: int, view: View) -> bool:
        """Whether a worker has finished the run as a member of a view."""
        peer = self.peers.get(worker)
        return peer is not None and peer.done_in == view.number

    def proposal(
        self, view: View | None, *, now: float, whole: int, waited: float, start: float
    ) -> View | None:
        """The next view, if this worker should propose one. `whole`: the number of workers of the
        run; `waited`: how long this worker has waited; `start`: how long the first view waits for
        all."""
        # Several workers may propose a view of the same number at once. The store keeps the first
        # proposal and all adopt views in order, so they agree on any outcome; a worker wrongly left
        # out joins the next view. But a worker outside the view proposes nothing while members are
        # left: it may have been frozen, and mistake live workers for dead ones.
        alive = self.alive(now=now)
        all_here = len(alive) + sum(peer.complete for peer in self.peers.values()) >= whole
        if view is None:
            return View(0, alive) if all_here or waited > start else None
        kept = {w: member for w, member in view.members.items() if alive.get(w) == member}
        if not kept and not all_here and waited <= min(start, REGROUP):
            return None  # all members are lost: returning workers wait for one another
        joining = {w: one for w, one in alive.items() if kept.get(w) != one}
        mine = alive.get(self.worker)
        if view.members.get(self.worker) != mine and kept:
            return None  # left out: the members decide
        leads = not kept or min(kept) == self.worker
        complete = all(worker in kept or self._is_done(worker, view) for worker in view.members)
        if complete and not (joining and leads):
            return None  # the view is up to date, or another member admits the new workers
        # A death is proposed at once by any member; new workers wait for the first member.
        members = {**kept, **(joining if leads else {})}
        return View(view.number + 1, dict(sorted(members.items())))


class Membership:
    """Keeps this worker in the run, and tracks the others."""

    def __init__(
        self, place: ProcessInfo, store: Store, *, silence: float, start: float, beat: float = BEAT
    ) -> None:
        self.place, self.store, self.beat = place, store, beat
        self.silence, self.start_limit = silence, start
        self.incarnation = uuid.uuid4().hex
        self._roll = Roll(place.rank, silence, pid_namespace())
        self._posted: set[int] = set()
        self._view: View | None = None
        self._condition = threading.Condition()
        self._count, self._leaving, self._complete = 0, False, False
        self._done_in: int | None = None
        self._looked = self._began = time.monotonic()
        """When the last successful read of the other heartbeats began."""
        self._clock = 0.0
        """Seconds that this process was awake; time while it was frozen is not silence of
        others."""
        self._left_out = False
        self._failure: BaseException | None = None
        self._sign = (time.monotonic(), math.inf)
        """When the main thread last showed a sign of life, and for how long that is valid."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show_life(self, *, seconds: float | None = None) -> None:
        """Show a sign of life of the main thread. The next one may take `seconds` or, if None, as
        long as given last."""
        if threading.current_thread() is threading.main_thread():
            self._sign = (time.monotonic(), self._sign[1] if seconds is None else seconds)

    def close(self, *, done_in: View | None = None, complete: bool = False) -> None:
        """Announce that this worker leaves; with `done_in`, because the run has stopped in this
        view, or is `complete`. The first call counts."""
        if self._closing.is_set():
            return
        self._leaving, self._complete = done_in is None, complete
        self._done_in = None if done_in is None else done_in.number
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(4 * self.beat)

    @property
    def view(self) -> View | None:
        """The newest view."""
        return self._view

    def join(self, after: int, *, asked_to_stop: Callable[[], bool] = bool) -> View | None:
        """The newest view with this worker in it, later than number `after`; waits for one. None
        if the worker is asked to stop before there is one."""
        with self._condition:
            while not asked_to_stop():
                self.show_life()
                self._require_store()
                view = self._view
                if view is not None and view.number > after and self._is_in(view):
                    return view
                self._condition.wait(self.beat)
        return None

    def left_out(self) -> bool:
        """Whether the others have continued without this worker since the last call."""
        with self._condition:
            left_out, self._left_out = self._left_out, False
            return left_out

    def check(self, view: View) -> None:
        """Raise if a view is no longer the newest, or if this worker leaves."""
        self.show_life()
        self._require_store()
        if self._closing.is_set():
            raise ViewChangedError("this worker leaves")
        now = self._view
        if now is not None and now.number != view.number:
            raise ViewChangedError(f"view {view.number} was followed by view {now.number}")

    def await_change(self, view: View) -> bool:
        """Wait for the next view, for as long as it takes to detect a dead worker."""
        deadline = time.monotonic() + self.silence + 6 * self.beat
        with self._condition:
            while time.monotonic() < deadline:
                self.show_life()
                self._require_store()
                if self._view is not None and self._view.number != view.number:
                    return True
                self._condition.wait(self.beat)
        return False

    def _is_in(self, view: View) -> bool:
        return view.members.get(self.place.rank) == self.incarnation

    def _require_store(self) -> None:
        """Return once the last read of the other heartbeats is recent. Raise if the store does not
        answer, since the membership is then unknown."""
        fresh, since = self.silence / 2, time.monotonic()
        with self._condition:
            # This process itself may have been frozen, so the store's time starts now.
            while self._failure is None and not self._closing.is_set():
                now = time.monotonic()
                if now - self._looked < fresh:
                    return
                if now - since > max(self.silence, _RECOVERY):
                    break
                self._condition.wait(self.beat)
        if self._failure is None and self._closing.is_set():
            return
        silent = time.monotonic() - self._looked
        why = self._failure or f"no answer for {format_seconds(silent)}"
        raise UserError(
            f"worker {self.place.rank} on {self.place.host} lost the store of the run at "
            f"{self.place.address}: {why}",
            where="parallel.elastic",
            remedy="start it again: it takes the average and joins, or the run goes on from its "
            "last checkpoint",
            exit=Exit.PEER,
        )

    # -------------------------------------------------------------- membership thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._look()
                self._closing.wait(self.beat)
            self._post()
        except Exception as error:
            with self._condition:
                self._failure = RuntimeError(str(error).partition("\n")[0])
                self._condition.notify_all()

    def _look(self) -> None:
        """One heartbeat: post it, read the others, adopt or propose views."""
        began = time.monotonic()
        self._clock += min(began - self._looked, self.silence / 2)
        now = self._clock
        self._post()
        # Adopt the view before reading the others: its members posted before it was written, so
        # none that joined after the last read is mistaken for dead.
        self._adopt()
        for worker in range(self.place.world):
            if worker not in self._posted and self.store.check([_member_key(worker)]):
                self._posted.add(worker)
        posted = sorted(self._posted)
        values = self.store.multi_get([_member_key(worker) for worker in posted])
        for worker, text in zip(posted, values, strict=True):
            self._roll.note(worker, json.loads(text), now=now)
        wanted = self._roll.proposal(
            self._view,
            now=now,
            whole=self.place.world,
            waited=began - self._began,
            start=self.start_limit,
        )
        if wanted is not None and wanted.members:
            self.store.compare_set(_view_key(wanted.number), "", wanted.written())
            self._adopt()
        with self._condition:
            self._looked = began
            self._condition.notify_all()

    def _post(self) -> None:
        self._count += 1
        shown, lasts = self._sign
        hangs = time.monotonic() - shown > lasts
        values = {
            "incarnation": self.incarnation,
            "host": self.place.host,
            "pid": os.getpid(),
            "namespace": self._roll.namespace,
            "count": self._count,
            "leaving": self._leaving or hangs,
            "done_in": self._done_in,
            "complete": self._complete,
        }
        self.store.set(_member_key(self.place.rank), json.dumps(values))
        self.store.add(PULSE, 1)

    def _adopt(self) -> None:
        """Adopt the newest view."""
        number = -1 if self._view is None else self._view.number
        newest, left_out = self._view, False
        while self.store.check([_view_key(number + 1)]):
            number += 1
            was_in = newest is not None and self._is_in(newest)
            newest = View.parse(number, self.store.get(_view_key(number)))
            left_out |= was_in and not self._is_in(newest)
        if newest is not self._view:
            with self._condition:
                self._view = newest
                self._left_out |= left_out
                self._condition.notify_all()


def _member_key(worker: int) -> str:
    return f"members/{worker}"


def _view_key(number: int) -> str:
    return f"views/{number}"
