"""The single, thread-safe entry point for all records of a run."""

from __future__ import annotations

import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal

from gristmill.base.files import write_atomic
from gristmill.base.units import Progress
from gristmill.config.load import dump_run
from gristmill.config.schema import RunConfig
from gristmill.track.console import DecentralizedSink, MegatronSink, console_sink
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import last_step_record
from gristmill.track.records import (
    EvaluationRecord,
    EventRecord,
    Record,
    SampleRecord,
    ValidationRecord,
)
from gristmill.track.services import TensorBoardSink, TrackioSink, WandbSink, wandb_mode
from gristmill.track.sinks import (
    KEPT_RECORDS,
    Guarded,
    Horizon,
    JsonlSink,
    LogSink,
    Sink,
)

if TYPE_CHECKING:
    from gristmill.track.alerts import Alerts, Rule

_DELIVERY = 15.0
"""Seconds to wait for the delivery of alerts at the end of a run."""
_RUN_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}\n?")


class Tracker:
    """Sends records to all sinks, stamped with the run's progress, and alerts to their targets."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        *,
        clock: Callable[[], Progress],
        alerts: Alerts | None = None,
    ) -> None:
        self.sinks, self.clock, self.alerts = tuple(sinks), clock, alerts
        self._lock = threading.RLock()
        if alerts is not None:
            alerts.attach(say=lambda text, level: self.say(text, level=level), progress=clock)

    def write(self, record: Record) -> None:
        with self._lock:
            for sink in self.sinks:
                sink.write(record)
        if self.alerts is not None:
            self.alerts.note(record)

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """Record an event."""
        self.write(EventRecord(**self._stamp(), level=level, text=text))

    def validation(self, loss: float, **facts: Any) -> None:
        self.write(ValidationRecord(**self._stamp(), loss=loss, **facts))

    def evaluation(self, name: str, **facts: Any) -> None:
        self.write(EvaluationRecord(**self._stamp(), name=name, **facts))

    def sample(self, prompt: str, text: str) -> None:
        self.write(SampleRecord(**self._stamp(), prompt=prompt, text=text))

    def phase(self, name: str) -> None:
        """Set the phase of the run, such as "step" or "validation". Alerts about missing progress
        wait longer outside of steps."""
        if self.alerts is not None:
            self.alerts.phase(name)

    def alert(self, rule: Rule, message: str, *, wait: float = 0.0) -> None:
        """Send an alert, if the run has alerts of this kind. `wait`: maximum seconds to wait for
        the delivery if the process is about to end; otherwise `close` waits."""
        if self.alerts is not None:
            self.alerts.tell(rule, message)
            if wait:
                self.alerts.wait(wait)

    def flush(self) -> None:
        with self._lock:
            for sink in self.sinks:
                sink.flush()

    def close(self) -> None:
        """Close all sinks, last to first, so that earlier ones can still record a failure."""
        if self.alerts is not None:
            # Without the lock, since a delivery writes a record.
            self.alerts.detach(seconds=_DELIVERY)
        with self._lock, ExitStack() as stack:
            for sink in self.sinks:
                stack.callback(sink.close)

    def _stamp(self) -> dict[str, Any]:
        now = self.clock()
        stamp = {"step": now.steps, "samples": now.samples, "tokens": now.tokens}
        return {**stamp, "time": time.time()}


def build_tracker(
    config: RunConfig,
    folder: RunFolder,
    *,
    steps: int,
    samples: int,
    clock: Callable[[], Progress],
    rank: int = 0,
    leads: bool = True,
    alerts: Alerts | None = None,
) -> Tracker:
    """Console, run folder and tracking services on the rank that `leads`; only a log file on other
    ranks, and no alerts.

    If a file or service fails, the console shows one warning and training continues. Records for
    the files are kept and written once that is possible again.
    """
    horizon = Horizon(steps, samples)
    if not leads:
        log = LogSink(folder.rank_log(rank), horizon=horizon)
        kept = Guarded(log, name="its log", report=lambda w: None, keep=KEPT_RECORDS)
        return Tracker([kept], clock=clock)
    console = _build_console(config, folder, horizon=horizon, start_step=clock().steps)
    files: dict[str, Sink] = {
        "metrics.jsonl": JsonlSink(folder.metrics),
        "train.log": LogSink(folder.log, horizon=horizon),
    }
    services = _build_services(config, folder)
    # A closed terminal or pipe (`| head`) must not end the run.
    terminal = Guarded(console, name="the terminal", report=lambda warning: None)
    guarded = [
        Guarded(sink, name=name, report=terminal.write, keep=keep)
        for sinks, keep in ((files, KEPT_RECORDS), (services, 0))
        for name, sink in sinks.items()
    ]
    return Tracker([terminal, *guarded], clock=clock, alerts=alerts)


def build_alerts(config: RunConfig, folder: RunFolder, *, steps: int) -> Alerts | None:
    """The alerts of this start of a run, on the rank that leads; None if there are no targets."""
    if config.alert is None:
        return None
    # Most runs have none, and the module imports HTTP clients.
    from gristmill.track.alerts import Alerts, build_targets

    targets = build_targets(config.alert)
    return Alerts(config.alert, targets, run=config.name, folder=folder.path, steps=steps)


def _build_services(config: RunConfig, folder: RunFolder) -> dict[str, Sink]:
    """The tracking services that the settings ask for, by name."""
    services: dict[str, Sink] = {}
    if config.track.tensorboard:
        services["TensorBoard"] = TensorBoardSink(folder.path / "tensorboard")
    # Others may see the settings in a service, and an address may contain a password.
    shown = config.model_copy(update={"alert": None})
    settings = {"run.toml": dump_run(shown), **shown.model_dump(mode="json")}
    mode = None if config.track.wandb is None else wandb_mode(config.track.wandb.mode)
    if config.track.wandb is not None and mode not in (None, "disabled"):
        # A unique id that survives a resume.
        run_id = folder.path / "wandb-id.txt"
        if not run_id.is_file() or not _RUN_ID.fullmatch(run_id.read_bytes()):
            write_atomic(run_id, uuid.uuid4().hex[:12])
        services["Weights & Biases"] = WandbSink(
            folder.path,
            project=config.track.wandb.project,
            entity=config.track.wandb.entity,
            name=config.name,
            mode=mode,
            settings=settings,
            run_id=run_id.read_text().strip(),
        )
    if config.track.trackio is not None:
        services["trackio"] = TrackioSink(
            folder.path,
            project=config.track.trackio.project,
            space=config.track.trackio.space,
            name=config.name,
            settings=settings,
        )
    return services


def _build_console(
    config: RunConfig, folder: RunFolder, *, horizon: Horizon, start_step: int
) -> Sink:
    if config.track.log_format == "megatron":
        previous = last_step_record(folder.metrics, until=start_step) if start_step else None
        return MegatronSink(sys.stdout, horizon=horizon, previous=previous)
    if config.track.log_format == "decentralized":
        return DecentralizedSink(sys.stdout, start_step=start_step, checkpoints=folder.checkpoints)
    return console_sink(horizon=horizon, start_step=start_step, name=config.name)
