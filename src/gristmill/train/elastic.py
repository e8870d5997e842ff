"""A run whose workers may die and come back: a round of training for each view of who is there.

    view      the workers that take part, agreed on by all of them (`parallel/elastic`)
    round     from one view to the next: groups, control, hooks and records are made anew; model,
              optimizer and progress stay in memory

At the start of a round all workers agree on the newest step that any of them has reached, and go on
from there. Each keeps its own weights; one that has just come takes the average of the others, and
optimizer state from one of them. If none has any state, the newest checkpoint is loaded.

What is promised: no sample is read twice. Not read are those of a worker that is not there, and up
to a few steps of workers that were behind when another died. With the same workers to the end, the
run is the same to the bit as one that is not elastic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import Place
from gristmill.base.units import Progress, parse_seconds
from gristmill.checkpoint.layout import Best, CheckpointFolder
from gristmill.checkpoint.state_file import Counters
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.optim.spec import Optimizer, StateEntry
from gristmill.parallel.control import ControlGroup, wait_for
from gristmill.parallel.decentralized.agreement import StopAgreement
from gristmill.parallel.decentralized.strategy import Decentralized
from gristmill.parallel.decentralized.workers import Workers, workers_per_node
from gristmill.parallel.elastic.coordinator import reach_store
from gristmill.parallel.elastic.membership import Membership, View, ViewChangedError
from gristmill.parallel.elastic.view_world import ViewGroups, ViewWorld, view_workers
from gristmill.parallel.liveness.rendezvous import join_store
from gristmill.parallel.liveness.verdict import may_come_from_peer
from gristmill.parallel.world import MARGIN, open_device
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import cut_metrics
from gristmill.train.assemble import Assembly, assemble
from gristmill.train.resume import Resumed, resume

MAX_SILENCE = 20.0
"""Seconds without a heartbeat after which a worker is dead, or less if `parallel.timeout` is short.
To be wrong costs little: it joins again."""


class ElasticMonitor:
    """Tells errors of this worker from those that others caused by going."""

    active = False

    def __init__(self, place: Place, membership: Membership) -> None:
        self.place, self.membership, self.view = place, membership, View(-1, {})
        self.on_exit: Any = None
        self._phase = ("start", 0)

    @property
    def where(self) -> str:
        phase, step = self._phase
        return f"worker {self.place.rank} on {self.place.host} in phase {phase} at step {step}"

    def phase(self, name: str, step: int = 0) -> None:
        self._phase = (name, step)

    def explain(self, error: BaseException) -> BaseException | None:
        """A change of the view, if that is behind an error; waits until it is known."""
        if isinstance(error, ViewChangedError):
            return error
        if not may_come_from_peer(error) or not self.membership.await_change(self.view):
            return None
        return ViewChangedError(str(error))


class ElasticRun:
    """This worker's part of an elastic run, over all rounds."""

    def __init__(self, config: RunConfig, folder: RunFolder, place: Place, mesh: Mesh) -> None:
        self.config, self.folder, self.place, self.mesh = config, folder, place, mesh
        if place.address is None:
            raise UserError(
                f"started as one of {place.world} workers without a rendezvous address",
                where="environment MASTER_ADDR, MASTER_PORT",
                remedy="start with `gristmill train --processes N`, or set both",
            )
        self.per_node = workers_per_node(config.parallel, mesh, local_world=place.local_world)
        self.device = open_device(config.runtime, tf32=config.precision.tf32, place=place)
        limit = parse_seconds(config.parallel.timeout)
        start = parse_seconds(config.parallel.start_timeout)
        connect = partial(_connected, place, seconds=start)
        log = folder.logs / "coordinator.log"
        self.store = connect(lambda: reach_store(place, seconds=start, log=log))
        silence = min(MAX_SILENCE, limit / 2)
        # The store's client serves one thread at a time.
        heartbeats = connect(lambda: join_store(place, seconds=start))
        self.membership = Membership(place, heartbeats, silence=silence, start=start)
        self.monitor = ElasticMonitor(place, self.membership)
        self.view, self.before = View(-1, {}), View(-1, {})
        self.has_state = False
        self._timeout = limit + MARGIN
        self._groups: ViewGroups | None = None
        self._control = ControlGroup()
        self._world: ViewWorld | None = None
        self._workers: Workers | None = None
        self._parts: Assembly | None = None

    def __enter__(self) -> ElasticRun:
        self.membership.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.membership.close(done=error is None)
        if self._groups is not None:
            self._groups.leave()

    def done(self) -> None:
        """Part from the others, who are done as well."""
        self._control.barrier()

    def next_view(self) -> ControlGroup:
        """Wait for the next view with this worker in it, and meet its members."""
        if self._groups is not None:
            self._groups.leave()
        self.before, self.view = self.view, self.membership.join(self.view.number)
        if self.membership.left_out():
            self.has_state = False
        self.monitor.view = self.view
        check = partial(self.membership.check, self.view)
        self._groups = ViewGroups(
            self.view,
            self.store,
            worker=self.place.rank,
            timeout=self._timeout,
            interrupt=check,
        )
        self._world = ViewWorld(self.device, self.place, self.mesh, view_groups=self._groups)
        self._workers = view_workers(self._world, per_node=self.per_node)
        self._control = self._world.control_group("run")
        return self._control

    def assemble(self) -> Assembly:
        """Everything for a round: built in the first, connected anew in the others."""
        assert self._world is not None and self._workers is not None
        world, workers, control = self._world, self._workers, self._control
        if self._parts is None:
            self._parts = assemble(
                self.config, self.folder, world, control, saves=True, workers=workers
            )
        else:
            strategy = self._parts.strategy
            assert isinstance(strategy, Decentralized)
            strategy.enter(workers, control, StopAgreement(world.control_group("stop")))
            self._parts = dataclasses.replace(self._parts, world=world, control=control)
        state = self._parts.state
        state.workers, state.worker = workers.members, workers.mine
        state.rank, state.ranks = control.rank, control.size
        return self._parts

    def begin(self, parts: Assembly) -> Resumed:
        """Bring all workers of the view to the same step."""
        control, state = parts.control, parts.state
        assert isinstance(parts.strategy, Decentralized)
        mine = {"worker": state.worker, "steps": state.progress.steps if self.has_state else None}
        reports = control.all_gather(mine)
        stateful = [one for one in reports if one["steps"] is not None]
        if not stateful:
            resumed = resume(parts)
            self.has_state = True
            resumed.notes.extend(self._missing())
            return resumed
        newest = max(one["steps"] for one in stateful)
        source = next(one["worker"] for one in stateful if one["steps"] == newest)
        joining = [one["worker"] for one in reports if one["steps"] is None]
        numbers = _numbers(parts) if state.worker == source else None
        values = next(one for one in control.all_gather(numbers) if one is not None)
        parts.strategy.catch_up(counts=self.has_state, rounds=values["strategy"]["rounds"])
        if joining:
            assert self._workers is not None
            _hand_over(state.optimizer, control, self._workers, source=source, joining=joining)
        state.progress = Progress(**values["progress"])
        if not self.has_state:
            state.counters = Counters(**values["counters"])
            state.best = Best(**values["best"]) if values["best"] else None
        self.has_state = True
        CheckpointFolder(self.folder.checkpoints).clean(control)
        control.on_rank0(lambda: _cut_records(self.folder, state.progress.steps))
        return Resumed(None, [self._changes(newest, joining)], continues=True)

    def _changes(self, step: int, joining: Sequence[int]) -> str:
        """What has changed since the last view, in words."""
        gone = [worker for worker in self.before.workers if worker not in self.view.workers]
        come = [worker for worker in joining if worker not in gone]
        parts = []
        if gone:
            parts.append(f"{_named(gone)} {'is' if len(gone) == 1 else 'are'} gone")
        if come:
            parts.append(f"{_named(come)} joined with the average of the others")
        what = " and ".join(parts) or "a worker was left out for a moment"
        return f"{what}; continuing from step {step} with {self._present()}"

    def _missing(self) -> list[str]:
        if len(self.view.members) == self.place.world:
            return []
        return [f"not all of the {self.place.world} workers came; training with {self._present()}"]

    def _present(self) -> str:
        members = self.view.workers
        assert self._parts is not None and isinstance(self._parts.strategy, Decentralized)
        exchange = self._parts.strategy.exchange
        text = f"{len(members)} of {self.place.world} workers: {_listed(members)}"
        if exchange.topology != exchange.wanted:
            text += f" (in random pairs: {exchange.wanted} does not fit {len(members)})"
        return text


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {_listed(workers)}"


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))


def _connected(place: Place, connect: Any, *, seconds: float) -> Any:
    try:
        return connect()
    except RuntimeError as error:
        raise UserError(
            f"worker {place.rank} on {place.host} did not reach the store of the run at "
            f"{place.address} within {seconds:.0f} seconds: {str(error).splitlines()[0]}",
            where="parallel.start_timeout",
            remedy="check that worker 0 was started and that this address can be reached",
            exit=Exit.PEER,
        ) from error


def _numbers(parts: Assembly) -> dict[str, Any]:
    """What a worker that comes needs, beside tensors."""
    state = parts.state
    return {
        "progress": dataclasses.asdict(state.progress),
        "counters": dataclasses.asdict(state.counters),
        "best": None if state.best is None else dataclasses.asdict(state.best),
        "strategy": parts.strategy.state(),
    }


def _cut_records(folder: RunFolder, step: int) -> None:
    """Remove records of steps that only a worker which is gone has made."""
    cut_metrics(folder.metrics, after=step or -1)


@torch.no_grad()
def _hand_over(
    optimizer: Optimizer,
    control: ControlGroup,
    workers: Workers,
    *,
    source: int,
    joining: Sequence[int],
) -> None:
    """Give the optimizer state of one worker to those that have just come."""
    entries = {(one.kind, one.key): one.value for one in optimizer.entries()}
    described = [
        [kind, key, list(value.shape), str(value.dtype).removeprefix("torch.")]
        for (kind, key), value in entries.items()
    ]
    mine = workers.mine == source
    listed = next(one for one in control.all_gather(described if mine else None) if one is not None)
    members = sorted([source, *joining])
    if workers.mine not in members:
        return
    group = workers.connect(members)
    for kind, key, shape, dtype in listed:
        value = (
            entries[kind, key].cpu() if mine else torch.empty(shape, dtype=getattr(torch, dtype))
        )
        sent = dist.broadcast(value, group=group, group_src=members.index(source), async_op=True)
        wait_for(sent, workers.interrupt)
        if not mine:
            like = next(iter(optimizer.param_groups[0]["params"]), value)
            optimizer.load_entry(StateEntry(kind, key, value.to(like.device)))
