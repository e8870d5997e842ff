"""Where the records of a run go: files on this machine, and the services of `services.py`.

    Tracker ─┬─ Guarded ── JsonlSink        metrics.jsonl
             ├─ Guarded ── LogSink          train.log
             ├─ Guarded ── BarSink          the terminal (see `console`), or LineSink
             ├─ Guarded ── TensorBoardSink  event files, for the extra "tensorboard"
             ├─ Guarded ── WandbSink        Weights & Biases, for the extra "wandb"
             └─ Guarded ── TrackioSink      trackio, for the extra "trackio"

A sink that fails (a full disk, a lost network) must not cost the run: `Guarded` turns the first
failure into one warning, which it reports to the caller.

- A file of the run folder may be writable again later. Until then its records are kept in memory,
  the newest `KEPT_RECORDS` of them, and then written in order. If any were lost, the file says so.
- Any other sink gets nothing from then on: half a curve with a warning is better than unexplained
  holes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from gristmill.base.errors import on_one_line, printable
from gristmill.base.files import storage_errors
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.track.metrics import to_json
from gristmill.track.records import (
    Breakdown,
    EvaluationRecord,
    EventRecord,
    ProgressStamp,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)

WAIT_SHOWN_FROM = 0.01
"""The share of a step's time from which a line mentions waiting."""


class Sink(Protocol):
    """Somewhere that records go."""

    def write(self, record: Record) -> None:
        """Take one record."""

    def flush(self) -> None:
        """Bring everything written to where it will stay."""

    def close(self) -> None:
        """Flush and release everything; nothing is written afterwards."""


KEPT_RECORDS = 10_000
"""Records that are kept in memory while a file cannot be written."""


class Guarded:
    """A sink whose failure becomes one warning instead of the end of the run. With `keep`, that
    many records wait in memory while the system refuses to write them."""

    def __init__(
        self, sink: Sink, *, name: str, report: Callable[[EventRecord], None], keep: int = 0
    ) -> None:
        self._sink, self._name, self._report, self._keep = sink, name, report, keep
        self._waiting: deque[Record] = deque()
        self._refused = False
        """Whether the last attempt to write was refused."""
        self._late = self._lost = 0
        self._failed = False
        self._last = ProgressStamp(step=0, samples=0, tokens=0, time=0.0)

    def write(self, record: Record) -> None:
        if self._failed:
            return
        self._last = record
        self._waiting.append(record)
        self._late += self._refused
        self._attempt(self._write_waiting)
        while len(self._waiting) > self._keep:
            self._waiting.popleft()
            self._lost += 1

    def flush(self) -> None:
        if not self._failed:
            self._attempt(self._flush)

    def close(self) -> None:
        """Close the sink, even a failed one, since it may still hold a file or a connection."""
        self.flush()
        if self._waiting and not self._failed:
            count = len(self._waiting) + self._lost
            self._warn(f"{count} records could not be written to {self._name}")
        self._attempt(self._sink.close)
        self._failed = True

    def _flush(self) -> None:
        self._write_waiting()
        self._sink.flush()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._sink.write(self._waiting[0])
            self._waiting.popleft()
        if self._refused:
            self._refused = False
            late, lost, self._late, self._lost = self._late, self._lost, 0, 0
            text = f"{self._name} can be written again: {late - lost} records were written late"
            text += f", and {lost} older ones are lost" if lost else ""
            event = self._event("warning", text)
            self._report(event)
            self._sink.write(event)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        # Loggers, remote ones above all, raise anything, and the run is worth more.
        except Exception as error:
            if self._failed:
                return
            why = f"({type(error).__name__}: {error})"
            if not self._keep or not isinstance(error, OSError):
                self._failed = True
                self._warn(
                    f"{self._name} failed and gets no more records {why}; training continues"
                )
            elif not self._refused:
                self._refused, self._late = True, len(self._waiting)
                self._warn(
                    f"{self._name} cannot be written {why}; training continues, and its records "
                    "are kept in memory until it can"
                )

    def _warn(self, text: str) -> None:
        self._report(self._event("warning", text))

    def _event(self, level: Literal["info", "warning", "error"], text: str) -> EventRecord:
        last = self._last
        return EventRecord(
            step=last.step,
            samples=last.samples,
            tokens=last.tokens,
            time=time.time(),
            level=level,
            text=text,
        )


@dataclass(frozen=True)
class Horizon:
    """Where a run ends."""

    steps: int
    samples: int


class EtaEstimator:
    """How long a run still takes, from the wall clock between its latest steps.

    The clock covers what happens between steps (validation, checkpoints) and leaves out the first
    step, which compiles. It counts samples, since later steps may have more of them.
    """

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon.samples
        self._seen: deque[tuple[int, float]] = deque(maxlen=100)

    def seconds_left(self, record: StepRecord) -> float | None:
        """None if that cannot be said yet."""
        if not self._seen or self._seen[-1] != (record.samples, record.time):
            self._seen.append((record.samples, record.time))
        (first, first_time), (samples, now) = self._seen[0], self._seen[-1]
        if samples > first:
            seconds = max(now - first_time, 0.0) / (samples - first)
        elif record.tokens_per_second is None:
            return None
        else:
            seconds = record.tokens / record.samples / record.tokens_per_second
        return max(self._horizon - samples, 0) * seconds


def line(
    record: Record, *, horizon_steps: int | None = None, seconds_left: float | None = None
) -> str | None:
    """A record as one plain line, for the log and for output that is not a terminal. None for how
    busy a host is: those are curves."""
    if isinstance(record, SystemRecord):
        return None
    if isinstance(record, StragglerRecord):
        record = straggler_event(record)
    if isinstance(record, StepRecord):
        return _step_line(record, horizon_steps, seconds_left)
    if isinstance(record, ValidationRecord):
        apart = record.consensus_distance
        distance = "" if apart is None else f" | workers {100 * apart:.2g}% from their average"
        bits = record.bits_per_byte
        by_byte = "" if bits is None else f"{bits:.4f} bits per byte | "
        known = "" if record.train_loss is None else f"train loss {record.train_loss:.4f} | "
        return (
            f"validation at step {record.step} | loss {record.loss:.4f} | {known}"
            f"perplexity {record.perplexity:.5g} | {by_byte}{set_losses(record, ' | ')}"
            f"{record.windows} windows in "
            f"{format_seconds(record.seconds)}{distance}{' | best so far' if record.best else ''}"
        )
    if isinstance(record, EvaluationRecord):
        error = "" if record.stderr is None else f" ± {record.stderr:.4f}"
        return (
            f"{on_one_line(record.name)} at step {record.step} | "
            f"{on_one_line(record.metric)} {record.value:.4f}{error} | "
            f"{record.items:,} items in {format_seconds(record.seconds)}"
        )
    if isinstance(record, SampleRecord):
        quoted = (
            json.dumps(printable(text), ensure_ascii=False) for text in (record.prompt, record.text)
        )
        return f"sample at step {record.step} | {' -> '.join(quoted)}"
    return f"{record.level}: {printable(record.text)}"


def set_losses(record: ValidationRecord, end: str = "") -> str:
    """The losses of further sets, such as "code 2.1034, math 1.9876"; nothing if there are none."""
    told = (f"{on_one_line(name)} {one['loss']:.4f}" for name, one in (record.sets or {}).items())
    return "" if not record.sets else ", ".join(told) + end


def straggler_event(record: StragglerRecord) -> EventRecord:
    """What is said about a process that is slower than the others."""
    who = f"rank {record.rank} on {on_one_line(record.host)}"
    slow = f"{record.ratio - 1:.0%} slower than the median at {on_one_line(record.phase)}"
    text = f"{who} is {slow} ({_step_seconds(record.seconds)} per step)"
    if record.phase == "link":
        text = f"{who} is answered {record.ratio:.3g} times as late as the median"
    text += f": {on_one_line(record.cause)}" if record.cause else ""
    if record.over:
        text = f"{who} keeps up with the others again at {on_one_line(record.phase)}"
    stamp = {"step": record.step, "samples": record.samples, "tokens": record.tokens}
    level: Literal["info", "warning"] = "info" if record.over else "warning"
    return EventRecord(**stamp, time=record.time, level=level, text=text)


def _step_seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_seconds(seconds)


def _step_line(record: StepRecord, horizon_steps: int | None, seconds_left: float | None) -> str:
    waits = {"data": record.data_wait, "sync": record.sync_wait or 0.0}
    parts = [
        f"step {record.step}" + ("" if horizon_steps is None else f"/{horizon_steps}"),
        f"loss {record.loss:.4f}",
        f"lr {record.lr:.2e}",
        f"grad {record.grad_norm:.3f}",
        record.tokens_per_second is not None and f"{rate(record.tokens_per_second)} tok/s",
        record.tflops is not None and f"{record.tflops:.3g} TFLOP/s",
        record.mfu is not None and f"mfu {record.mfu:.1%}",
        *(
            f"{name} {min(1.0, seconds / record.step_seconds):.0%}"
            for name, seconds in waits.items()
            if seconds >= WAIT_SHOWN_FROM * record.step_seconds > 0
        ),
        record.sent_bytes and f"sent {format_bytes(record.sent_bytes)}",
        record.mixing not in (None, 1.0) and f"mixing {record.mixing:.3g}",
        record.memory_bytes is not None and f"mem {format_bytes(record.memory_bytes)}",
        record.loss_scale is not None and f"scale {record.loss_scale:.6g}",
        record.skipped and f"skipped {record.skipped}",
        record.nan and f"nan {record.nan}",
        seconds_left is not None and f"eta {format_seconds(seconds_left)}",
    ]
    return " | ".join(part for part in parts if part)


def rate(amount: float) -> str:
    """Tokens per second for people; a dash if it could not be measured."""
    return format_count(amount) if math.isfinite(amount) else "-"


class _TextFile:
    """A file that grows by whole lines, each written at once or not at all."""

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            # Without a buffer, which would keep what could not be written and write it twice.
            self._file = path.open("ab", buffering=0)

    def append(self, line: str) -> None:
        # A lone surrogate, as in a prompt from a command line in another encoding, becomes the
        # escape that JSON itself uses for it.
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        size = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            # A full disk takes the beginning of a line.
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


class JsonlSink(_TextFile):
    """Appends to `metrics.jsonl`."""

    def write(self, record: Record) -> None:
        self.append(to_json(record))


class LogSink(_TextFile):
    """Appends to `train.log`: the local time, then the plain line."""

    def __init__(self, path: Path, *, horizon: Horizon) -> None:
        super().__init__(path)
        self._steps, self._eta = horizon.steps, EtaEstimator(horizon)

    def write(self, record: Record) -> None:
        left = self._eta.seconds_left(record) if isinstance(record, StepRecord) else None
        when = datetime.fromtimestamp(record.time).astimezone().isoformat(timespec="seconds")
        text = line(record, horizon_steps=self._steps, seconds_left=left)
        if text is not None:
            self.append(f"{when} {text}")


_STEP_SCALARS = {
    "train": ("loss", "lr", "grad_norm", "loss_scale", "skipped", "nan"),
    "speed": (
        *("tokens_per_second", "step_seconds", "compute", "data_wait", "sync_wait"),
        *("tflops", "tflops_causal", "mfu", "mfu_causal"),
    ),
    "device": ("memory_bytes",),
    "exchange": ("sent_bytes", "mixing"),
    "progress": ("samples", "tokens"),
}
_SYSTEM_SCALARS = (
    *("cpu_use", "ram_bytes", "disk_read", "disk_write", "disk_free", "net_sent", "net_received"),
    *("gpus", "gpu_use", "gpu_memory_bytes", "gpu_watts", "gpu_celsius", "gpu_mhz"),
)


def _breakdown_scalars(group: str, breakdown: Breakdown | None) -> dict[str, float | None]:
    return {
        f"{group}/{name}/{field}": value
        for name, numbers in (breakdown or {}).items()
        for field, value in numbers.items()
    }


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record under their names in tracking services, such as train/loss."""
    if isinstance(record, StepRecord):
        named = {
            f"{group}/{name}": getattr(record, name)
            for group, names in _STEP_SCALARS.items()
            for name in names
        }
        named |= _breakdown_scalars("source", record.sources)
        return {name: value for name, value in named.items() if value is not None}
    if isinstance(record, ValidationRecord):
        names = ("loss", "perplexity", "bits_per_byte", "train_loss", "consensus_distance")
        named = {f"validation/{name}": getattr(record, name) for name in names}
        named |= _breakdown_scalars("validation", record.sets)
        return {name: value for name, value in named.items() if value is not None}
    if isinstance(record, EvaluationRecord):
        return {f"evaluation/{record.name}/{record.metric}": record.value}
    if isinstance(record, SystemRecord):
        named = {name: getattr(record, name) for name in _SYSTEM_SCALARS}
        return {
            f"system/{record.host}/{name}": value
            for name, value in named.items()
            if value is not None
        }
    return {}
