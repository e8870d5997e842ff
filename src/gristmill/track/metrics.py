"""The records of a run, and `metrics.jsonl`, the file that keeps them.

The file holds one JSON object per line, in the order of writing. The first key names the kind, the
others are the fields of that kind's class below, in the order of their declaration:

    {"kind": "step", "step": 1200, "samples": 576000, "tokens": 589824000, …, "loss": 3.2145, …}
    {"kind": "validation", "step": 1200, …, "loss": 3.31, "perplexity": 27.4, …}
    {"kind": "sample", "step": 1200, …, "prompt": "Once", "text": " upon a time"}
    {"kind": "event", "step": 1200, …, "level": "warning", "text": "…"}

Floats are written with as many digits as reading them back exactly takes. JSON has no word for a
number that is not finite, so those are the strings "nan", "inf" and "-inf". Keys and kinds that
this version does not know are passed over, so that it reads the files of newer ones.

A process that dies while writing leaves a cut last line; reading skips it and `cut_metrics` removes
it. Any other line that cannot be read is damage, and is reported with its number rather than passed
over: a curve with a silent hole is worse than a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """When something was recorded: the part that all records share."""

    step: int
    """Steps done so far, this one included."""
    samples: int
    """Samples consumed so far."""
    tokens: int
    """Tokens consumed so far."""
    time: float
    """Wall clock, in seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(Moment):
    """One training step."""

    kind: ClassVar[str] = "step"

    loss: float
    """Mean cross-entropy per counted token of this step's batch, in nats."""
    lr: float
    """Learning rate of this step's update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    tokens_per_second: float
    """Tokens of all processes together, per second."""
    step_seconds: float
    """How long this step took."""
    tflops: float
    """10^12 model operations per second and device, counting attention in full (as PaLM does)."""
    tflops_causal: float
    """The same, counting only the half of the attention that a causal mask leaves."""
    mfu: float | None = None
    """`tflops` as a fraction of the device's peak; null when the peak is not known."""
    mfu_causal: float | None = None
    """`tflops_causal` as a fraction of the device's peak; null when the peak is not known."""
    memory_bytes: int | None = None
    """Most memory held on the device so far; null where the device does not tell."""
    loss_scale: float | None = None
    """Factor on the loss in float16; null in other precisions."""
    skipped: int = 0
    """Steps so far that made no update."""
    nan: int = 0
    """Steps so far whose loss or gradient was not finite."""
    data_wait: float = 0.0
    """Seconds that this step waited for data."""
    sync_wait: float | None = None
    """Seconds of this step that the first process waited for the others; null if there are none. On
    a GPU only what does not hide behind the backward pass."""

    @property
    def compute(self) -> float:
        """Seconds of this step in which nothing was waited for."""
        return max(0.0, self.step_seconds - self.data_wait - (self.sync_wait or 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationRecord(Moment):
    """One measurement on held-out text."""

    kind: ClassVar[str] = "validation"

    loss: float
    """Mean cross-entropy per counted token, in nats."""
    perplexity: float
    """e to the power of the loss."""
    windows: int
    """How many windows of text were measured."""
    seconds: float
    """How long that took."""
    best: bool
    """Whether this is the lowest loss of the run so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecord(Moment):
    """One text that the model wrote."""

    kind: ClassVar[str] = "sample"

    prompt: str
    """What the model was given."""
    text: str
    """What it wrote after that, the prompt not repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(Moment):
    """Something worth telling: a resume, a checkpoint, a warning."""

    kind: ClassVar[str] = "event"

    level: Literal["info", "warning", "error"]
    """How much it matters."""
    text: str
    """What happened, in one sentence."""


Record = StepRecord | ValidationRecord | SampleRecord | EventRecord


def _exact(accepted: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) is not accepted:
            raise ValueError(f"{value!r} is not of type {accepted.__name__}")
        return value

    return read


def _float(value: Any) -> float:
    if type(value) in (int, float) or value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r} is not a number")


def _reader(hint: Any) -> Callable[[Any], Any]:
    """How a field of this type is read from its JSON value."""
    options = get_args(hint)
    if type(None) in options:
        read = _reader(next(option for option in options if option is not type(None)))
        return lambda value: None if value is None else read(value)
    if hint is float:
        return _float
    return _exact(hint if isinstance(hint, type) else str)


_CLASSES: dict[str, type[Record]] = {
    record.kind: record for record in (StepRecord, ValidationRecord, SampleRecord, EventRecord)
}
_READERS = {
    kind: {
        field.name: (_reader(get_type_hints(record)[field.name]), field.default is MISSING)
        for field in fields(record)
    }
    for kind, record in _CLASSES.items()
}


def _json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def to_json(record: Record) -> str:
    """One line of `metrics.jsonl`, without its line end."""
    values = {field.name: _json_value(getattr(record, field.name)) for field in fields(record)}
    return json.dumps({"kind": record.kind, **values}, ensure_ascii=False, allow_nan=False)


def from_json(line: str) -> Record:
    """The record that a line holds; a `ValueError` says why it holds none."""
    record = _decode(_object(line))
    if record is None:
        raise ValueError("the kind of record is not known")
    return record


def _object(line: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        raise ValueError("not a record")
    return value


def _decode(value: dict[str, Any]) -> Record | None:
    """The record in an object, or None for a kind that only a newer version knows."""
    kind = value.get("kind")
    if not isinstance(kind, str):
        raise ValueError("the kind of record is missing")
    if kind not in _CLASSES:
        return None
    known = {}
    for name, (read, required) in _READERS[kind].items():
        if name in value:
            known[name] = read(value[name])
        elif required:
            raise ValueError(f"{name!r} is missing")
    return _CLASSES[kind](**known)


def _objects(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Every line with its number and the object it holds, less a cut last one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line, _object(line.decode())
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise _damaged(path, number=number, error=error) from error


def _damaged(path: Path, *, number: int, error: ValueError) -> UserError:
    return UserError(
        f"line {number} cannot be read: {error}",
        where=str(path),
        remedy="remove that line; the others are kept",
        exit=Exit.DATA,
    )


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; a cut last line is skipped."""
    records = []
    for number, _, value in _objects(path):
        try:
            record = _decode(value)
        except ValueError as error:
            raise _damaged(path, number=number, error=error) from error
        if record is not None:
            records.append(record)
    return records


def cut_metrics(path: Path, *, after: int) -> None:
    """Drop the records of all steps after the one given, and a cut last line.

    A run that resumes from an older checkpoint does those steps again and writes them anew. Lines
    are kept byte for byte, so that what a newer version wrote survives. A missing file stays so.
    """
    if not path.exists():
        return
    kept = (line for _, line, value in _objects(path) if value["step"] <= after)
    write_atomic(path, b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept))
