"""The records of a run, and `metrics.jsonl`, the file that keeps them.

The file holds one JSON object per line, in the order of writing. The first key names the kind, the
others are the fields of that kind's class below, in the order of their declaration:

    {"kind": "step", "step": 1200, "samples": 576000, "tokens": 589824000, …, "loss": 3.2145, …}
    {"kind": "validation", "step": 1200, …, "loss": 3.31, "perplexity": 27.4, …}
    {"kind": "sample", "step": 1200, …, "prompt": "Once", "text": " upon a time"}
    {"kind": "event", "step": 1200, …, "level": "warning", "text": "…"}

Floats are written with enough digits to read them back exactly. JSON has no numbers that are not
finite, so those are the strings "nan", "inf" and "-inf". Keys and kinds that this version does not
know are ignored, so that it can read the files of newer versions.

A process that dies while writing leaves a cut last line; reading skips it and `cut_metrics` removes
it. Any other line that cannot be read is damage, and is reported with its number rather than
skipped: a curve with a silent hole is worse than a message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_type_hints

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressStamp:
    """When something was recorded: the fields that all records share."""

    step: int
    """Steps done so far, this one included."""
    samples: int
    """Samples consumed so far."""
    tokens: int
    """Tokens consumed so far."""
    time: float
    """Wall clock, in seconds since 1970-01-01 UTC."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord(ProgressStamp):
    """One training step."""

    kind: ClassVar[str] = "step"

    loss: float
    """Mean cross-entropy per counted token of this step's batch, in nats."""
    lr: float
    """Learning rate of this step's update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    tokens_per_second: float
    """Tokens per second, over all processes."""
    step_seconds: float
    """How long this step took."""
    tflops: float
    """10^12 model FLOPs per second per device, counting attention in full (as PaLM does)."""
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
class ValidationRecord(ProgressStamp):
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
class SampleRecord(ProgressStamp):
    """One text that the model wrote."""

    kind: ClassVar[str] = "sample"

    prompt: str
    """What the model was given."""
    text: str
    """What it wrote after that, the prompt not repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord(ProgressStamp):
    """Something worth telling: a resume, a checkpoint, a warning."""

    kind: ClassVar[str] = "event"

    level: Literal["info", "warning", "error"]
    """How much it matters."""
    text: str
    """What happened, in one sentence."""


Record = StepRecord | ValidationRecord | SampleRecord | EventRecord


_CLASSES: dict[str, type[Record]] = {record.kind: record for record in get_args(Record)}


def _json_types(hint: Any) -> tuple[type, ...]:
    """The types that the JSON value of a field may have."""
    options = get_args(hint) or (hint,)
    return tuple(option if isinstance(option, type) else type(option) for option in options)


_FIELDS = {
    kind: [
        (field.name, _json_types(get_type_hints(record)[field.name]), field.default is MISSING)
        for field in fields(record)
    ]
    for kind, record in _CLASSES.items()
}
"""For each kind: name, types, and whether the field is required."""


def to_json(record: Record) -> str:
    """One line of `metrics.jsonl`, without its line end."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = str(value)
    return json.dumps({"kind": record.kind, **values}, ensure_ascii=False, allow_nan=False)


def from_json(line: str) -> Record | None:
    """The record on a line, None for a kind that only a newer version knows; a `ValueError` says
    why there is none."""
    value = _parse(line)
    kind, known = value.get("kind"), {}
    if not isinstance(kind, str):
        raise ValueError("the kind of record is missing")
    if kind not in _CLASSES:
        return None
    for name, types, required in _FIELDS[kind]:
        if name not in value:
            if required:
                raise ValueError(f"{name!r} is missing")
            continue
        item = value[name]
        if float in types and (type(item) is int or item in ("nan", "inf", "-inf")):
            item = float(item)
        if type(item) not in types:
            raise ValueError(f"{name!r} cannot be {item!r}")
        known[name] = item
    return _CLASSES[kind](**known)


def _parse(line: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        raise ValueError("not a record")
    return value


_Decoded = TypeVar("_Decoded")


def _read_lines(path: Path, decode: Callable[[str], _Decoded]) -> Iterator[tuple[bytes, _Decoded]]:
    """Every line and what it decodes to, without a cut last one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                decoded = decode(line.decode())
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise UserError(
                    f"line {number} cannot be read: {error}",
                    where=str(path),
                    remedy="remove that line; the others are kept",
                    exit=Exit.DATA,
                ) from error
            yield line, decoded


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; a cut last line is skipped."""
    return [record for _, record in _read_lines(path, from_json) if record is not None]


def cut_metrics(path: Path, *, after: int) -> None:
    """Drop the records of all steps after the one given, and a cut last line.

    A run that resumes from an older checkpoint repeats those steps and writes them anew. Lines are
    kept byte for byte, so that what a newer version wrote survives. A missing file stays missing.
    """
    if not path.exists():
        return
    kept = (line for line, value in _read_lines(path, _parse) if value["step"] <= after)
    write_atomic(path, b"".join(line if line.endswith(b"\n") else line + b"\n" for line in kept))
