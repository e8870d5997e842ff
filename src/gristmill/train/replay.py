"""Replays steps of a run, to tell a faulty device from a bad batch.

The steps from a checkpoint up to the one in question are computed twice, with the run's own loop,
and compared with each other and with the run's records:

    the replays differ                   the device does not compute reliably
    they agree, the record differs       the run computed something else at the time: a temporary
                                         fault, or different versions, threads or processes
    all agree                            the device is not at fault: check the batch and settings

Nothing is written into the run folder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import Duration, Unit
from gristmill.checkpoint.layout import CheckpointFolder, step_of, verify
from gristmill.checkpoint.state import restore
from gristmill.checkpoint.state_file import read_state
from gristmill.checkpoint.writer import CheckpointWriter
from gristmill.config.load import changed_settings
from gristmill.config.rules import check_mesh
from gristmill.config.schema import RunConfig
from gristmill.data.loader import Batch
from gristmill.optim.schedule import build_schedule
from gristmill.strategies.replicas import held_checksums
from gristmill.track.folder import run_folder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import Record, StepRecord
from gristmill.train.assemble import BuiltRun, assemble, build_health, build_loader, build_meter
from gristmill.train.build import open_run_world
from gristmill.train.claim import known_steps
from gristmill.train.defaults import with_recorded_defaults
from gristmill.train.hooks import Hooks
from gristmill.train.loop import train
from gristmill.train.meter import StepEvent
from gristmill.train.resume import resume_differences
from gristmill.train.stop import StopRequest
from gristmill.train.tracker import Tracker

TOLERANCE = 0.02
"""Relative difference that different versions, threads or layouts may cause."""


class StepNumbers(NamedTuple):
    """The numbers of a step that are compared."""

    loss: float
    norm: float


class WorstSample(NamedTuple):
    """A sample of the step, with its loss under the weights before the step."""

    sample: int
    loss: float
    text: str


@dataclass(frozen=True)
class Replay:
    """The result of two replays."""

    start: int
    """The step of the checkpoint that they started from."""
    step: int
    first: Mapping[int, StepNumbers]
    second: Mapping[int, StepNumbers]
    recorded: Mapping[int, StepNumbers]
    equal_weights: bool
    """Whether both ended with the same bits in weights and optimizer state."""
    differences: list[str]
    """Why the record may differ within rounding."""
    changed: list[str]
    """Settings that differ from those of the run."""
    worst: list[WorstSample]

    @property
    def repeats(self) -> bool:
        """Whether both replays agree to the bit."""
        return self.equal_weights and all(
            _same(self.first[step], self.second[step], exact=True) for step in self.first
        )

    @property
    def departs_at(self) -> int | None:
        """The first step whose record differs from the replays."""
        return next(
            (
                step
                for step, found in self.first.items()
                if step in self.recorded
                and not _same(found, self.recorded[step], exact=not self.differences)
            ),
            None,
        )


def _same(one: StepNumbers, other: StepNumbers, *, exact: bool) -> bool:
    return all(
        a == b
        or (math.isnan(a) and math.isnan(b))
        or (not exact and math.isclose(a, b, rel_tol=TOLERANCE))
        for a, b in zip(one, other, strict=True)
    )


class _Collect:
    """A sink that keeps the numbers of steps."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.steps: dict[int, StepNumbers] = {}
        self.progress = progress

    def write(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            self.steps[record.step] = StepNumbers(record.loss, record.grad_norm)
            self.progress(record.step)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def replay_step(
    config: RunConfig, step: int, *, progress: Callable[[int, int, int], None]
) -> Replay:
    """Compute the steps up to `step` twice. `progress` is called with the round, the step and the
    first step."""
    folder = run_folder(config)
    if config.parallel.decentralized:
        raise UserError(
            "a replay has one process, and every step of this run depends on weights that several "
            "workers exchanged",
            where="parallel",
            remedy="to test a device, replay a run without parallel.gossip and parallel.local",
        )
    if config.runtime.device == "xla":
        raise UserError(
            "a step on XLA devices is one function, whose samples cannot be looked at one by one",
            where="runtime.device",
            remedy='replay with runtime.device="cpu" or "cuda"; losses agree within rounding',
        )
    checkpoints = CheckpointFolder(folder.checkpoints)
    start = checkpoints.newest_before(step)
    if start is None:
        raise UserError(
            f"there is no checkpoint from before step {step}",
            where=folder.checkpoints,
            remedy=known_steps(checkpoints),
        )
    path = checkpoints.path(start)
    if problems := verify(path):
        raise UserError(problems, exit=Exit.STORAGE)
    config = with_recorded_defaults(config, folder, check_mesh(config, processes=1))
    changed = changed_settings(folder.settings, config) if folder.holds_run() else []
    was_deterministic = config.runtime.deterministic
    config = _for_replay(config)
    mesh = check_mesh(config, processes=1)
    world = open_run_world(config, mesh)
    run = assemble(config, folder, world)
    skipped_batches = _skipped_later(config, checkpoints, start)
    rounds, sums, worst, differences = [], [], list[WorstSample](), list[str]()
    for number in (1, 2):
        saved = restore(run.state, path)
        run.strategy.load(run.state.strategy)
        differences = resume_differences(saved, run)
        if run.world.device.is_async and not was_deterministic:
            differences.append("the run did not use deterministic kernels")

        def tell(done: int, number: int = number) -> None:
            progress(number, done, start)

        collect = _Collect(tell)
        _train_to(run, step - 1, collect, skipped_batches)
        if number == 2:
            worst = _worst_samples(run)
        _train_to(run, step, collect, skipped_batches)
        rounds.append(collect.steps)
        sums.append(held_checksums(run.strategy.parameters, run.strategy.optimizer))
    recorded = {
        record.step: StepNumbers(record.loss, record.grad_norm)
        for record in (read_metrics(folder.metrics) if folder.metrics.is_file() else ())
        if isinstance(record, StepRecord) and start < record.step <= step
    }
    return Replay(
        start=start,
        step=step,
        first=rounds[0],
        second=rounds[1],
        recorded=recorded,
        equal_weights=sums[0] == sums[1],
        differences=differences,
        changed=changed,
        worst=worst,
    )


def _for_replay(config: RunConfig) -> RunConfig:
    """Settings with which every step is recorded, no step ends the run, and computation is
    deterministic on a GPU too."""
    changes = {
        "track": {"every": Duration(1, Unit.STEPS)},
        "train": {"bad_steps": 10**9},
        "runtime": {"deterministic": True},
    }
    tables = {name: getattr(config, name).model_copy(update=new) for name, new in changes.items()}
    return config.model_copy(update=tables)


class _ReplayHooks(Hooks):
    """Reads the results of steps, without acting on them."""

    def after_step(self, event: StepEvent) -> None:
        self.meter.add(event)

    def at_end(self, *, finished: bool) -> None:
        self.meter.drain()


def _skipped_later(
    config: RunConfig, checkpoints: CheckpointFolder, start: int
) -> list[tuple[int, int]]:
    """Samples after a checkpoint that the run did not train on, because it was rolled back and
    skipped them. Only later checkpoints record this."""
    guard = config.train.guard
    if guard is None or guard.action != "rollback":
        # Batches whose update the guard skipped were computed, so they are replayed.
        return []
    ranges = list[tuple[int, int]]()
    for path in checkpoints.committed():
        if step_of(path) > start:
            health = read_state(path).get("health") or {}
            ranges += [(begin, end) for begin, end in health.get("passed_over", ())]
    return ranges


def _train_to(
    run: BuiltRun, step: int, collect: _Collect, skipped_batches: list[tuple[int, int]]
) -> None:
    """Continue the loop up to a step, without hooks."""
    tracker = Tracker([collect], clock=lambda: run.state.progress)
    health = build_health(run, tracker)
    health.skip_batches(skipped_batches)
    config, resolved = run.config, run.resolved
    hooks = _ReplayHooks(
        [],
        meter=build_meter(run, tracker, health),
        tracker=tracker,
        stop=StopRequest(),
        writer=CheckpointWriter(
            CheckpointFolder(run.folder.checkpoints),
            config.checkpoint,
            progress_at=resolved.progress_at,
            say=tracker.say,
            warn=tracker.say,
        ),
        resolved=resolved,
        control=run.control,
    )
    batches = build_loader(run).starting_at(run.state.progress)
    try:
        train(
            run.state,
            batches=batches,
            strategy=run.strategy,
            schedule=build_schedule(config, resolved),
            hooks=hooks,
            until=Duration(step, Unit.STEPS),
        )
    finally:
        batches.close()
    run.state.health = health.state()


def _worst_samples(run: BuiltRun, count: int = 3) -> list[WorstSample]:
    """The samples of the next step with the highest loss."""
    first = run.state.progress.samples
    samples = [
        WorstSample(first + number, run.strategy.evaluate([sample]), _text(run, sample))
        for number, sample in enumerate(_single(build_loader(run).step_batches(first)))
    ]
    # A loss that is not finite ranks highest.
    samples.sort(
        key=lambda sample: sample.loss if math.isfinite(sample.loss) else math.inf, reverse=True
    )
    return samples[:count]


def _single(batches: list[Batch]) -> Iterator[Batch]:
    """The samples of batches, one at a time."""
    for batch in batches:
        for row in range(batch.samples):
            parts = {
                name: value[row : row + 1]
                for name, value in vars(batch).items()
                if name.endswith("_BT") and value is not None
            }
            weights = parts.get("loss_weights_BT")
            loss_tokens = float(batch.tokens_BT.shape[1] if weights is None else weights.sum())
            yield replace(batch, **parts, loss_tokens=loss_tokens)


def _text(run: BuiltRun, sample: Batch) -> str:
    ids: list[int] = sample.tokens_BT[0, :24].tolist()
    return run.tokenizer.decode(ids)
