"""One way in for all records of a run, from any thread."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from gristmill.base.files import write_atomic
from gristmill.base.units import Progress
from gristmill.config.load import dump_run
from gristmill.config.schema import RunConfig
from gristmill.track.console import ConsoleSink
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import EventRecord, Record, SampleRecord, ValidationRecord
from gristmill.track.sinks import (
    Fanout,
    Guarded,
    Horizon,
    JsonlSink,
    LogSink,
    Sink,
    TensorBoardSink,
    WandbSink,
)


class Tracker:
    """Sends records to all sinks, stamped with the run's progress."""

    def __init__(self, sinks: Sequence[Sink], *, clock: Callable[[], Progress]) -> None:
        self._fanout, self._clock = Fanout(sinks), clock
        self._lock = threading.RLock()

    def write(self, record: Record) -> None:
        with self._lock:
            self._fanout.write(record)

    def say(self, text: str, *, level: Literal["info", "warning", "error"] = "info") -> None:
        """An event, in words."""
        self.write(EventRecord(**self._stamp(), level=level, text=text))

    def validation(self, loss: float, **facts: float) -> None:
        self.write(ValidationRecord(**self._stamp(), loss=loss, **facts))  # type: ignore[arg-type]

    def sample(self, prompt: str, text: str) -> None:
        self.write(SampleRecord(**self._stamp(), prompt=prompt, text=text))

    def flush(self) -> None:
        with self._lock:
            self._fanout.flush()

    def close(self) -> None:
        with self._lock:
            self._fanout.close()

    def _stamp(self) -> dict[str, int]:
        now = self._clock()
        stamp = {"step": now.steps, "samples": now.samples, "tokens": now.tokens}
        return {**stamp, "time": time.time()}  # type: ignore[dict-item]


def _run_id(folder: RunFolder) -> str:
    """A name for this run that stays the same when it is resumed, and that no other run has."""
    file = folder.path / "wandb-id.txt"
    if not file.is_file():
        write_atomic(file, uuid.uuid4().hex[:12])
    return file.read_text()


def build_tracker(
    config: RunConfig,
    folder: RunFolder,
    *,
    steps: int,
    samples: int,
    clock: Callable[[], Progress],
    rank: int = 0,
) -> Tracker:
    """The console, the files of the run folder, and the services a run asks for; a log file only
    for all processes but the first.

    Whatever a file or service refuses becomes one warning on the console; training goes on.
    """
    horizon = Horizon(steps, samples)
    if rank > 0:
        own = LogSink(folder.rank_log(rank), horizon=horizon)
        return Tracker([Guarded(own, name="its log", report=lambda w: None)], clock=clock)
    console = ConsoleSink(horizon=horizon, start_step=clock().steps, name=config.name)
    sinks: dict[str, Sink] = {
        "metrics.jsonl": JsonlSink(folder.metrics),
        "train.log": LogSink(folder.log, horizon=horizon),
    }
    if config.track.tensorboard:
        sinks["TensorBoard"] = TensorBoardSink(folder.path / "tensorboard")
    if config.track.wandb is not None:
        sinks["Weights & Biases"] = WandbSink(
            folder.path,
            project=config.track.wandb.project,
            name=config.name,
            mode=config.track.wandb.mode,
            settings={"run.toml": dump_run(config), **config.model_dump(mode="json")},
            run_id=_run_id(folder),
        )
    # A terminal that goes away (a closed window, `| head`) must not end the run either.
    terminal = Guarded(console, name="the terminal", report=lambda warning: None)
    guarded = [Guarded(sink, name=name, report=terminal.write) for name, sink in sinks.items()]
    return Tracker([terminal, *guarded], clock=clock)
