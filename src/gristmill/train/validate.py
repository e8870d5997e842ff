"""The validation of a run on its own, without training.

Data, model, layout and number formats are those of the run, so the loss is the one that the run
computed at the checkpoint, to the bit with the same number of processes and threads on the same
kind of machine. Without a checkpoint, the run's initial weights are measured. Nothing in the run
folder changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.checkpoint.layout import CheckpointFolder, step_of
from gristmill.checkpoint.state import restore
from gristmill.config.schema import RunConfig
from gristmill.distributed.liveness.monitor import Monitor
from gristmill.distributed.liveness.verdict import Limits
from gristmill.track.folder import RunFolder, run_folder
from gristmill.track.metrics import read_metrics
from gristmill.track.records import Record, ValidationRecord
from gristmill.train.assemble import BuiltRun, assemble, build_validate
from gristmill.train.build import close_run_world, device_mesh, open_run_world
from gristmill.train.claim import choose_step
from gristmill.train.tracker import Tracker


@dataclass(frozen=True)
class Validated:
    """A validation, and the record of the run at the same step."""

    record: ValidationRecord
    recorded: ValidationRecord | None
    leads: bool
    """Whether this process reports the result."""


class _ValidationSink:
    """A sink that keeps the records of validation."""

    def __init__(self) -> None:
        self.records: list[ValidationRecord] = []

    def write(self, record: Record) -> None:
        if isinstance(record, ValidationRecord):
            self.records.append(record)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""


def validate_run(config: RunConfig, *, checkpoint: str | None = None) -> Validated:
    """Validate at the newest intact checkpoint, or at the given one."""
    if config.parallel.elastic:
        raise UserError(
            "workers that may come and go are not validated by themselves",
            where="parallel.elastic",
            remedy="validate with parallel.elastic=false",
        )
    place, folder = ProcessInfo.current(), run_folder(config)
    mesh = device_mesh(config, place)
    limits = Limits.of(config.parallel, save=config.checkpoint.timeout)
    with Monitor(place, limits=limits, log=folder.rank_log(place.rank)) as monitor:
        world = open_run_world(config, mesh, place)
        control = world.control_group("run")
        run = assemble(config, folder, world, control)
        step = control.on_rank0(partial(_choose, folder, config, checkpoint))
        if step is not None:
            _load(run, step)
        monitor.phase("validation", step or 0)
        collect = _ValidationSink()
        validate = build_validate(run, Tracker([collect], clock=lambda: run.state.progress))
        if validate is None:
            raise UserError(
                "this run has no validation text",
                where="data",
                remedy="give data.validation, or data.split a second part",
            )
        validate.at_start()
    close_run_world(world)
    (record,) = collect.records
    return Validated(record, _recorded(folder, record.step), leads=control.is_rank0)


def _choose(folder: RunFolder, config: RunConfig, which: str | None) -> int | None:
    """The step to validate at; None for the initial weights."""
    checkpoints = CheckpointFolder(folder.checkpoints)
    if which is not None:
        return choose_step(folder, which)
    search = checkpoints.newest_intact()
    if search.path is not None:
        return step_of(search.path)
    if config.model.initial_weights is None:
        raise UserError(
            "there is no checkpoint, and the run starts from random weights",
            where=folder.checkpoints,
            remedy="train it first, or name weights with model.start",
            exit=Exit.DATA,
        )
    return None


def _load(run: BuiltRun, step: int) -> None:
    def load() -> None:
        restore(run.state, CheckpointFolder(run.folder.checkpoints).path(step))
        run.strategy.load(run.state.strategy)

    run.control.on_all_ranks(load)


def _recorded(folder: RunFolder, step: int) -> ValidationRecord | None:
    if not folder.metrics.is_file():
        return None
    records = read_metrics(folder.metrics, damaged=lambda number, why: None)
    matching = (
        record for record in records if isinstance(record, ValidationRecord) and record.step == step
    )
    return next(matching, None)
