"""Elastic training: workers may die and rejoin. Each change of the membership starts a new round.

    view      the workers that take part, agreed on by all of them (`Membership`)
    round     training under one view: process groups, control group, hooks and records are created
              anew; model, optimizer and progress stay in memory

At the start of a round all workers agree on the newest step that any of them has reached, and
continue from there. Each keeps its own weights; a new worker takes the average of the others, and
optimizer state from one of them. The newest checkpoint is loaded if no worker has any state, or if
the only ones left are workers that the others had already continued without. A worker that wakes up
after the others have ended the run does not change it. A worker builds everything before it joins,
so that the others need not wait for that.

The first member of a view writes the records of the run. If it dies, the next one adds the steps
that it had not recorded.

The guarantee: no sample is read twice. Skipped are the samples of absent workers, and up to a few
steps of workers that were behind when another one died. If the workers never change, the run is
bit-identical to one that is not elastic.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.base.units import Progress, parse_seconds
from gristmill.checkpoint.layout import Best, CheckpointFolder
from gristmill.checkpoint.state_file import Counters
from gristmill.config.parallel import Mesh
from gristmill.config.schema import RunConfig
from gristmill.distributed.control import ControlGroup, wait_for
from gristmill.distributed.device import memory_explained
from gristmill.distributed.liveness.rendezvous import join_store
from gristmill.distributed.liveness.verdict import Limits
from gristmill.distributed.world import open_device
from gristmill.optim.spec import Optimizer, StateEntry
from gristmill.strategies.decentralized.coordinator import (
    SignedStore,
    fingerprint,
    reach_store,
    require_same_settings,
    run_key,
    write_key,
)
from gristmill.strategies.decentralized.membership import Membership, View, ViewChangedError
from gristmill.strategies.decentralized.strategy import Decentralized
from gristmill.strategies.decentralized.view_world import (
    ViewGroups,
    ViewWorld,
    keep_unfinished,
    view_workers,
)
from gristmill.strategies.decentralized.workers import StopAgreement, WorkerSet, workers_per_node
from gristmill.track.folder import RunFolder
from gristmill.train.assemble import BuiltRun, assemble, build_content_check
from gristmill.train.claim import FolderClaim
from gristmill.train.elastic_monitor import ElasticMonitor
from gristmill.train.elastic_records import (
    CurrentOnly,
    RecentSteps,
    add_records,
    cut_records,
)
from gristmill.train.resume import Resumed, resume
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker
from gristmill.train.training import Outcome, Training, located_errors

MAX_SILENCE = 20.0
"""Seconds without a heartbeat after which a worker counts as dead; fewer if `parallel.timeout` is
short. A wrong verdict costs little, since the worker joins again."""


def train_elastic(
    config: RunConfig,
    claim: FolderClaim,
    place: ProcessInfo,
    mesh: Mesh,
    *,
    stop: StopRequest,
    began: float,
) -> Outcome:
    """Train with workers that may die and rejoin: one round for each view."""
    worker, folder = ElasticRun(config, claim.folder, place, mesh), claim.folder
    check = build_content_check(worker.built)
    check.start()
    with contextlib.ExitStack() as cleanup:
        for entered in (located_errors(folder, worker.monitor), worker, claim):
            cleanup.enter_context(entered)
        # Runs before the lock is released.
        cleanup.callback(check.stop)
        while True:
            try:
                if (end := worker.ended()) is None:
                    control = worker.next_view(asked_to_stop=lambda: stop.reason is not None)
                    end = worker.ended()
                if end is not None:
                    return _left_behind(folder, place, end)
                if control is None:
                    return Outcome(folder.path, Exit.STOPPED, folder.newest_step() or 0, None)
                if not control.is_rank0:
                    claim.give_up()
                control.barrier()
                # In later views the run continues, perhaps led by another worker.
                control.on_rank0(claim.take_over if worker.view.number else claim.take)
                worker.keep_key()
                built = worker.connect()
                with memory_explained("free some, or use a machine with more"):
                    training = Training(
                        built, stop=stop, monitor=worker.monitor, check=check, began=began
                    )
                    outcome = training.to_the_end(worker.begin, track=worker.tracked)
                worker.done(complete=outcome.exit is Exit.DONE)
                return outcome
            except ViewChangedError:
                continue
            except Exception as error:
                cause = worker.monitor.explain(error)
                if cause is None:
                    raise
                if not isinstance(cause, ViewChangedError):
                    raise cause from error


def _left_behind(folder: RunFolder, place: ProcessInfo, end: Exit) -> Outcome:
    """The outcome of a worker that wakes up after the others have ended the run."""
    how = "complete" if end is Exit.DONE else "stopped and saved"
    step = folder.read_status().get("step", 0)
    print(
        f"info: the run is {how} at step {step} by the other workers; worker {place.rank} on "
        f"{place.host} leaves, and nothing was changed",
        flush=True,
    )
    return Outcome(folder.path, end, step, None)


class ElasticRun:
    """This worker's part of an elastic run, over all rounds."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, place: ProcessInfo, mesh: Mesh
    ) -> None:
        self.config, self.folder, self.place, self.mesh = config, folder, place, mesh
        if place.address is None:
            raise UserError(
                f"started as one of {place.world} workers without a rendezvous address",
                where="environment MASTER_ADDR, MASTER_PORT",
                remedy="start with `gristmill train --processes N`, or set both",
            )
        self.per_node = workers_per_node(config.parallel, mesh, local_world=place.local_world)
        self.device = open_device(
            config.runtime,
            tf32=config.precision.tf32,
            place=place,
            share=config.parallel.share_gpu,
            spread=True,
        )
        self.view, self.before = View(-1, {place.rank: ""}), View(-1, {})
        self.has_state = False
        self.behind = False
        """Whether the others have continued without this worker, so that its state is stale."""
        self.recent = RecentSteps()
        limit = parse_seconds(config.parallel.timeout)
        self._limit = limit
        self._store: SignedStore | None = None
        # A world of one, until everything is built.
        self._groups = ViewGroups(
            self.view, None, worker=place.rank, timeout=limit, interrupt=lambda: None
        )
        self._world = ViewWorld(self.device, place, mesh, view_groups=self._groups)
        self._workers = view_workers(self._world, per_node=self.per_node)
        self._control = ControlGroup()
        with memory_explained("free some, or use a machine with more"):
            self._built = assemble(
                config, folder, self._world, self._control, saves=True, workers=self._workers
            )
        start = parse_seconds(config.parallel.start_timeout)
        connect = partial(_connected, place, seconds=start)
        log = folder.logs / "coordinator.log"
        self._key = run_key(folder.key)
        store = connect(lambda: reach_store(place, seconds=start, log=log))
        settings = shared_settings(self._built.config, folder, place)
        settings["key of the run folder"] = fingerprint(self._key)
        require_same_settings(store, settings, place=place)
        self._store = SignedStore(store, self._key)
        silence = min(MAX_SILENCE, limit / 2)
        # A client of the store can be used by one thread at a time.
        heartbeats = connect(lambda: join_store(place, seconds=start))
        self.membership = Membership(
            place, SignedStore(heartbeats, self._key), silence=silence, start=start
        )
        limits = Limits.of(config.parallel, save=config.checkpoint.timeout)
        self.monitor = ElasticMonitor(place, self.membership, limits, ended=self.ended)

    def __enter__(self) -> ElasticRun:
        self.membership.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Without an error, this worker has already announced that it leaves.
        self.membership.close()
        self._groups.leave()
        keep_unfinished()

    @property
    def built(self) -> BuiltRun:
        """This worker's part of the run."""
        return self._built

    def keep_key(self) -> None:
        """Restore the key of this run if the folder has been moved aside since. Workers that join
        later must find this key, even if one of them has created another."""
        if run_key(self.folder.key) != self._key:
            write_key(self.folder.key, self._key, replace=True)

    def done(self, *, complete: bool) -> None:
        """Leave together with the others. If one of them is lost at the very last moment, those
        that have not finished find everything saved."""
        with contextlib.suppress(ViewChangedError, RuntimeError):
            self._control.barrier()
        self.membership.close(done_in=self.view, complete=complete)

    def ended(self) -> Exit | None:
        """How the run ended while this worker was suspended, according to the run folder; None if
        it did not. Such a worker must not touch the folder, since its own state is older."""
        if not self.has_state:
            return None
        ends = {"done": Exit.DONE, "stopped": Exit.STOPPED}
        return ends.get(self.folder.read_status().get("state", ""))

    def _check(self) -> None:
        """Raise if this worker is not, or may not be, in the newest view."""
        try:
            self.membership.check(self.view)
        except UserError:
            # The store is gone after the end of a run.
            if self.ended() is not None:
                raise ViewChangedError("the run has ended without this worker") from None
            raise

    def next_view(self, *, asked_to_stop: Callable[[], bool]) -> ControlGroup | None:
        """Wait for the next view that includes this worker, and connect to its members. None if the
        worker is asked to stop before it has anything to save."""
        self.monitor.phase("start")
        self._groups.leave()
        view = self.membership.join(
            self.view.number, asked_to_stop=lambda: not self.has_state and asked_to_stop()
        )
        if view is None:
            return None
        self.before, self.view = self.view, view
        self.behind |= self.membership.left_out()
        self.monitor.view = view
        self._groups = ViewGroups(
            view,
            self._store,
            worker=self.place.rank,
            timeout=self._limit,
            interrupt=partial(self.membership.check, view),
        )
        self._world = ViewWorld(self.device, self.place, self.mesh, view_groups=self._groups)
        self._workers = view_workers(self._world, per_node=self.per_node)
        self._control = self._world.control_group("run")
        return self._control

    def connect(self) -> BuiltRun:
        """This worker's part of the run, connected to the workers of the view."""
        world, workers, control = self._world, self._workers, self._control
        strategy, state = self._built.strategy, self._built.state
        assert isinstance(strategy, Decentralized)
        strategy.enter(workers, control, StopAgreement(world.control_group("stop")))
        state.workers, state.worker = workers.members, workers.mine
        state.rank, state.ranks = control.rank, control.size
        self._built = dataclasses.replace(self._built, world=world, control=control)
        return self._built

    def tracked(self, tracker: Tracker) -> Tracker:
        """A tracker that writes while this view lasts, and keeps recent steps in case another
        worker cannot write them."""
        sinks = [CurrentOnly(sink, self._check) for sink in tracker.sinks]
        return Tracker([*sinks, self.recent], clock=tracker.clock, alerts=tracker.alerts)

    def begin(self, run: BuiltRun) -> Resumed:
        """Bring all workers of the view to the same step."""
        control, state = run.control, run.state
        assert isinstance(run.strategy, Decentralized)
        mine = {
            "worker": state.worker,
            "steps": state.progress.steps if self.has_state else None,
            "behind": self.behind,
            "identity": state.identity,
        }
        reports = control.all_gather(mine)
        known = [report for report in reports if report["steps"] is not None]
        stateful = [report for report in known if not report["behind"]]
        if known and not stateful:
            # Workers that were further ahead are gone, but their checkpoints are not.
            saved = control.on_rank0(self.folder.newest_step)
            if saved is None or saved < max(report["steps"] for report in known):
                stateful = known
        self._require_same_identity(mine, (stateful or reports)[0], reports)
        if not stateful:
            resumed = resume(run)
            self._has_begun(run)
            resumed.notes.extend(self._missing())
            return resumed
        counting = [report["worker"] for report in stateful]
        newest = max(report["steps"] for report in stateful)
        source = next(report["worker"] for report in stateful if report["steps"] == newest)
        joining = [report["worker"] for report in reports if report["worker"] not in counting]
        recorded = control.on_rank0(lambda: cut_records(self.folder, newest))
        resolved = None
        if state.worker == source:
            resolved = {**_numbers(run), "records": self.recent.between(recorded, newest)}
        values = next(values for values in control.all_gather(resolved) if values is not None)
        counts = state.worker in counting
        run.strategy.catch_up(counts=counts, rounds=values["strategy"]["rounds"])
        if joining:
            _hand_over(state.optimizer, control, self._workers, source=source, joining=joining)
        CheckpointFolder(self.folder.checkpoints).clean(control)
        control.on_rank0(lambda: add_records(self.folder, values["records"]))
        state.progress = Progress(**values["progress"])
        if not counts:
            state.counters = Counters(**values["counters"])
        # All workers have the same validations, except that one may have missed the last.
        state.best = Best(**values["best"]) if values["best"] else None
        self._has_begun(run)
        return Resumed(None, [self._changes(newest, joining)], continues=True)

    def _has_begun(self, run: BuiltRun) -> None:
        step, steps = run.state.progress.steps, run.resolved.steps
        # Before a worker can mistake the status of an earlier call for the end of this one.
        run.control.on_rank0(lambda: self.folder.write_status("running", step=step, steps=steps))
        self.has_state, self.behind = True, False

    def _require_same_identity(
        self, mine: dict[str, Any], right: dict[str, Any], reports: Sequence[dict[str, Any]]
    ) -> None:
        """Refuse a worker with different data or a different tokenizer; the others continue without
        it."""
        expected = right["identity"]
        wrong = [name for name in expected if mine["identity"].get(name) != expected[name]]
        if wrong:
            raise UserError(
                f"worker {self.place.rank} on {self.place.host} does not fit the run: "
                f"{', '.join(wrong)} differs from that of worker {right['worker']}",
                where="settings",
                remedy="give all workers the same token files and tokenizer",
                exit=Exit.REFUSED,
            )
        if any(report["identity"] != expected for report in reports):
            raise ViewChangedError("a worker does not fit the run, and leaves")

    def _changes(self, step: int, joining: Sequence[int]) -> str:
        """A message about the changes since the last view."""
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
        assert isinstance(self._built.strategy, Decentralized)
        exchange = self._built.strategy.exchange
        text = f"{len(members)} of {self.place.world} workers: {_listed(members)}"
        if exchange.topology != exchange.wanted:
            text += f" (in random pairs: {exchange.wanted} does not fit {len(members)})"
        return text


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {_listed(workers)}"


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, workers))


def _connected(place: ProcessInfo, connect: Any, *, seconds: float) -> Any:
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


def _numbers(run: BuiltRun) -> dict[str, Any]:
    """The state that a joining worker needs, apart from tensors."""
    state = run.state
    return {
        "progress": dataclasses.asdict(state.progress),
        "counters": dataclasses.asdict(state.counters),
        "best": None if state.best is None else dataclasses.asdict(state.best),
        "strategy": run.strategy.state(),
    }


def shared_settings(config: RunConfig, folder: RunFolder, place: ProcessInfo) -> dict[str, Any]:
    """The settings that must be equal on all workers: all except devices and the paths of files."""
    values = config.model_dump(mode="json", exclude={"runtime", "track", "name", "folder"})
    for name in ("paths", "validation", "tokenizer", "cache"):
        values["data"].pop(name, None)
    flat = {"folder": str(folder.path.absolute()), "workers": place.world}
    for table, held in values.items():
        inner = held if isinstance(held, dict) else {"": held}
        flat |= {f"{table}.{name}".removesuffix("."): value for name, value in inner.items()}
    return flat


@torch.no_grad()
def _hand_over(
    optimizer: Optimizer,
    control: ControlGroup,
    workers: WorkerSet,
    *,
    source: int,
    joining: Sequence[int],
) -> None:
    """Send the optimizer state of one worker to those that join."""
    entries = {(entry.kind, entry.key): entry.value for entry in optimizer.entries()}
    described = [
        [kind, key, list(value.shape), str(value.dtype).removeprefix("torch.")]
        for (kind, key), value in entries.items()
    ]
    mine = workers.mine == source
    gathered = control.all_gather(described if mine else None)
    listed = next(entries for entries in gathered if entries is not None)
    members = sorted([source, *joining])
    if workers.mine not in members:
        return
    group = workers.connect(members)
    for kind, key, shape, dtype in listed:
        value = (
            entries[kind, key].cpu() if mine else torch.empty(shape, dtype=getattr(torch, dtype))
        )
        sent = dist.broadcast(value, group=group, group_src=members.index(source), async_op=True)
        wait_for(sent, workers.interrupt, group=group)
        if not mine:
            like = next(iter(optimizer.param_groups[0]["params"]), value)
            optimizer.load_entry(StateEntry(kind, key, value.to(like.device)))
