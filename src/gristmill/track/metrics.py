"""The records of a run, and `metrics.jsonl`, the file that keeps them.

The file holds one JSON object per line, in the order of writing. The first key names the kind, the
others are the fields of that kind's class below, in the order of their declaration:

    {"kind": "step", "step": 1200, "samples": 576000, "tokens": 589824000, …, "loss": 3.2145, …}
                                                    … "sources": {"web": {"loss": 3.31, …}, …}}
    {"kind": "validation", "step": 1200, …, "loss": 3.31, "perplexity": 27.4, …}
    {"kind": "evaluation", "step": 1200, …, "name": "hellaswag", "metric": "acc", "value": 0.31, …}
    {"kind": "sample", "step": 1200, …, "prompt": "Once", "text": " upon a time"}
    {"kind": "event", "step": 1200, …, "level": "warning", "text": "…"}
    {"kind": "system", "step": 1200, …, "host": "node7", "cpu_use": 0.31, "gpu_use": 0.97, …}
    {"kind": "straggler", "step": 1200, …, "rank": 3, "host": "node7", "phase": "data", …}

Floats are written with enough digits to read them back exactly. JSON has no numbers that are not
finite, so those are the strings "nan", "inf" and "-inf". Keys and kinds that this version does not
know are ignored, so that it can read the files of newer versions.

A process that dies while writing leaves a cut last line; reading skips it and `cut_metrics` removes
it. Any other line that cannot be read is damage, and is reported with its number: a curve with a
silent hole is worse than a message. Damage never keeps a run from resuming.

The file of a long run is large. What a resume needs is at its end, so it is read backwards, block
by block. Records are nearly in the order of their steps: an event may come before the records of a
few steps that are still on the device, which is far less than a block.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors

SAVED_CHECKPOINT = "saved checkpoint"
"""How the text of the event begins that tells of a new checkpoint."""


Parts = dict[str, dict[str, Any]]
"""Numbers by name, each for several things by name; a record without any does not have the key."""


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
    """Mean cross-entropy per counted token of this step's batch, in nats; if workers have weights
    of their own, of the first worker's part of it."""
    lr: float
    """Learning rate of this step's update."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    tokens_per_second: float | None
    """Tokens per second, over all processes; like all rates null for a step that compiled."""
    step_seconds: float
    """How long this step took."""
    tflops: float | None
    """10^12 model FLOPs per second per device, counting attention in full (as PaLM does)."""
    tflops_causal: float | None
    """The same, counting only the half of the attention that a causal mask leaves."""
    mfu: float | None = None
    """`tflops` as a fraction of the device's peak; null if the peak is not known."""
    mfu_causal: float | None = None
    """`tflops_causal` as a fraction of the device's peak; null if the peak is not known."""
    memory_bytes: int | None = None
    """Most memory held on the device so far; null where the device does not tell."""
    loss_scale: float | None = None
    """Factor on the loss in float16; null in other precisions."""
    next_lr: float | None = None
    """Learning rate of the next step; null unless track.log_format is "megatron", which prints
    it."""
    next_loss_scale: float | None = None
    """Loss scale of the next step; null unless in float16."""
    skipped: int = 0
    """Steps so far that made no update."""
    nan: int = 0
    """Steps so far whose loss or gradient was not finite."""
    data_wait: float = 0.0
    """Seconds of this step in which data was waited for."""
    sync_wait: float | None = None
    """Seconds of this step that the first process waited for the others; null if there are none. On
    a GPU only what does not hide behind the backward pass."""
    sent_bytes: int | None = None
    """Bytes that the first process has sent to other workers so far; null unless workers have
    weights of their own."""
    mixing: float | None = None
    """How far workers move towards the average of their group; null likewise."""
    sources: Parts | None = None
    """Of each source of the training text: `loss`, the mean of its tokens in this batch, null if it
    has none there, and `tokens`, how many were read of it so far. Missing with a single source, on
    XLA devices, and where track.sources is off."""

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
    consensus_distance: float | None = None
    """Root mean square distance of the workers to their average, relative to its norm; null unless
    workers have weights of their own."""
    bits_per_byte: float | None = None
    """The loss in bits, per byte of text; null if the text has no bytes."""
    train_loss: float | None = None
    """The same loss on windows of the training text; null unless validate.train_windows asks for
    it."""
    sets: Parts | None = None
    """Of each further set in [[validate.set]]: its `loss`, `perplexity` and `windows`, and
    `bits_per_byte`. Missing if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord(ProgressStamp):
    """One score on a downstream task."""

    kind: ClassVar[str] = "evaluation"

    name: str
    """The task."""
    metric: str
    """What was measured, such as acc."""
    value: float
    """The score."""
    stderr: float | None
    """Its standard error; null if it is not known."""
    items: int
    """How many questions were asked."""
    seconds: float
    """How long the whole task took."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemRecord(ProgressStamp):
    """How busy one host was in the seconds before, over all programs on it. Of its GPUs only those
    that the run may use are counted; what a machine does not tell is null."""

    kind: ClassVar[str] = "system"

    host: str
    """The host's name."""
    cpu_use: float | None = None
    """Share of all CPU cores that was busy, from 0 to 1."""
    ram_bytes: int | None = None
    """Memory in use."""
    disk_read: float | None = None
    """Bytes per second read from all disks."""
    disk_write: float | None = None
    """Bytes per second written to all disks."""
    disk_free: int | None = None
    """Free bytes of the file system that the run folder is on."""
    net_sent: float | None = None
    """Bytes per second sent over all network interfaces but loopback."""
    net_received: float | None = None
    """Bytes per second received over them."""
    gpus: int = 0
    """How many GPUs the following are about."""
    gpu_use: float | None = None
    """Share of the time in which a kernel ran, from 0 to 1: the mean over the GPUs."""
    gpu_memory_bytes: int | None = None
    """Memory in use on the fullest GPU."""
    gpu_watts: float | None = None
    """Power of all GPUs together."""
    gpu_celsius: float | None = None
    """Temperature of the hottest GPU."""
    gpu_mhz: float | None = None
    """Clock of the multiprocessors of the slowest GPU."""
    gpu_throttled: str | None = None
    """What holds the clock of a GPU down: "thermal" (heat), "power" (its power limit or supply), or
    "thermal, power"; null if nothing does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StragglerRecord(ProgressStamp):
    """A process that is much slower than the others, or no longer is."""

    kind: ClassVar[str] = "straggler"

    rank: int
    """The process."""
    host: str
    """Where it runs."""
    phase: str
    """What it is slow at: data, compute, optimizer, or link (its connection to rank 0)."""
    ratio: float
    """Its time as a multiple of the median over all processes; 1.31 is 31 % slower."""
    seconds: float
    """How much longer than the median it is busy in each step; of a link, how long an answer
    takes."""
    cause: str | None = None
    """Why, as far as the measurements tell."""
    over: bool = False
    """Whether this tells that it keeps up again."""


Record = (
    StepRecord
    | ValidationRecord
    | EvaluationRecord
    | SampleRecord
    | EventRecord
    | SystemRecord
    | StragglerRecord
)


PARTS = ("sources", "sets")
"""The fields that hold numbers of several things by name."""
_NOT_FINITE = ("nan", "inf", "-inf")
_CLASSES: dict[str, type[Record]] = {record.kind: record for record in get_args(Record)}


def _json_types(hint: Any) -> tuple[type, ...]:
    """The types that the JSON value of a field may have."""
    options = get_args(hint) or (hint,)
    origins = [get_origin(option) or option for option in options]
    return tuple(one if isinstance(one, type) else type(one) for one in origins)


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
    values = {field.name: _as_json(getattr(record, field.name)) for field in fields(record)}
    for name in PARTS:
        if values.get(name, ...) is None:
            del values[name]
    return json.dumps({"kind": record.kind, **values}, ensure_ascii=False, allow_nan=False)


def _as_json(value: Any) -> Any:
    """A value with words for the floats that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return {key: _as_json(one) for key, one in value.items()} if isinstance(value, dict) else value


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
        if float in types and (type(item) is int or item in _NOT_FINITE):
            item = float(item)
        elif name in PARTS and type(item) is dict:
            item = {part: _part(name, numbers) for part, numbers in item.items()}
        if type(item) not in types:
            raise ValueError(f"{name!r} cannot be {item!r}")
        known[name] = item
    return _CLASSES[kind](**known)


def _part(name: str, numbers: Any) -> dict[str, Any]:
    """The numbers of a part of a record."""
    if type(numbers) is not dict:
        raise ValueError(f"{name!r} cannot hold {numbers!r}")
    found = {key: float(one) if one in _NOT_FINITE else one for key, one in numbers.items()}
    if not all(one is None or type(one) in (int, float) for one in found.values()):
        raise ValueError(f"{name!r} cannot hold {numbers!r}")
    return found


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError("a number is too large")
    return int(text)


_MOST_DIGITS = 19
_DECODER = json.JSONDecoder(parse_int=_whole_number)


def _parse(line: str) -> dict[str, Any]:
    value = _DECODER.decode(line)
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        raise ValueError("not a record")
    return value


Damaged = Callable[[int, str], None]
"""Called with the number of a line that cannot be read, and why."""


def read_metrics(path: Path, *, damaged: Damaged | None = None) -> list[Record]:
    """All records of a file; a cut last line is skipped. Other lines that cannot be read are passed
    to `damaged`, or refused if it is None."""
    return list(_read_lines(path, lambda line: from_json(line.decode()), damaged))


def scan_metrics(path: Path, *, damaged: Damaged | None = None) -> Iterator[StepRow | Record]:
    """The same records one after the other, those of steps as rows of `STEP_FIELDS`: for files of
    which no list of records should be made. Reads a million steps in seconds."""
    return _read_lines(path, _RowReader().read, damaged)


_R = TypeVar("_R")


def _read_lines(
    path: Path, parse: Callable[[bytes], _R | None], damaged: Damaged | None
) -> Iterator[_R]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    break
                if damaged is None:
                    raise UserError(
                        f"line {number} cannot be read: {error}",
                        where=str(path),
                        remedy="remove that line; the others are kept",
                        exit=Exit.DATA,
                    ) from error
                damaged(number, str(error))
                continue
            if record is not None:
                yield record


STEP_FIELDS = tuple(field.name for field in fields(StepRecord) if field.name not in PARTS)
"""The fields of a step's record that are one value, in the order of a row."""
StepRow = tuple[Any, ...]


class _RowReader:
    """Reads lines of steps without making records. A line whose values have the types of one that
    was read properly is as good."""

    def __init__(self) -> None:
        self._values = itemgetter(*STEP_FIELDS)
        self._decode: Callable[[bytes], Any] = lambda line: _DECODER.decode(line.decode())
        self._good = set[tuple[type, ...]]()
        with contextlib.suppress(ImportError):
            # Of the extra `data`; three times as fast, and it refuses what is no JSON.
            import orjson

            self._decode = orjson.loads

    def read(self, line: bytes) -> StepRow | Record | None:
        types: tuple[type, ...] = ()
        try:
            value = self._decode(line)
            if value["kind"] == StepRecord.kind:
                row: StepRow = self._values(value)
                types = tuple(map(type, row))
                if types in self._good:
                    return row
        except (ValueError, LookupError, TypeError):
            pass  # a line that is no such record, or none of this version
        record = from_json(line.decode())
        if not isinstance(record, StepRecord):
            return record
        if types and str not in types:  # a number that is not finite is a text
            self._good.add(types)
        return tuple(getattr(record, name) for name in STEP_FIELDS)


# ------------------------------------------------------------------ from the end

_BLOCK = 1 << 16
_LINES = re.compile(rb"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file."""

    offset: int
    data: bytes
    value: dict[str, Any] | None
    """Its record, None if it cannot be read."""

    @property
    def step(self) -> int | None:
        return None if self.value is None else self.value["step"]


def _read_backwards(path: Path) -> Iterator[list[_Line]]:
    """The lines of a file, in blocks from the last to the first; those of a block in order."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        end, size = file.seek(0, os.SEEK_END), _BLOCK
        while end > 0:
            begin = max(0, end - size)
            file.seek(begin)
            data = file.read(end - begin)
            if begin > 0:
                # The line that the block begins in belongs to the block before.
                skipped = data.find(b"\n") + 1
                if skipped in (0, len(data)):
                    size *= 2  # a line that is longer than the block
                    continue
                begin, data = begin + skipped, data[skipped:]
            yield [
                _Line(begin + match.start(), match[0], _try_parse(match[0]))
                for match in _LINES.finditer(data)
            ]
            end, size = begin, _BLOCK


def _try_parse(line: bytes) -> dict[str, Any] | None:
    try:
        return _parse(line.decode())
    except (ValueError, RecursionError):
        return None


def validation_loss(path: Path, *, step: int) -> float | None:
    """The validation loss of a step at the end of a file; None if it was not measured."""
    records = records_at(path, step=step)
    return next((record.loss for record in records if isinstance(record, ValidationRecord)), None)


def records_at(path: Path, *, step: int) -> Iterator[Record]:
    """The records of a step at the end of a file, the newest first."""
    for lines in _read_backwards(path):
        values = [line.value for line in lines if line.value is not None]
        for value in reversed(values):
            if value["step"] == step:
                with contextlib.suppress(ValueError):
                    record = from_json(json.dumps(value))
                    if record is not None:
                        yield record
        if values and all(value["step"] < step for value in values):
            break


def last_step_record(path: Path, *, until: int) -> StepRecord | None:
    """The last record of steps up to the one given; None if there is none."""
    for lines in _read_backwards(path):
        for line in reversed(lines):
            if line.value is None or line.value["step"] > until:
                continue
            if line.value.get("kind") == StepRecord.kind:
                with contextlib.suppress(ValueError):
                    record = from_json(line.data.decode())
                    assert isinstance(record, StepRecord)
                    return record
    return None


def last_recorded_step(path: Path) -> int:
    """The last step that a file has a record of, 0 if there is none."""
    for lines in _read_backwards(path):
        values = [line.value for line in lines if line.value is not None]
        steps = [value["step"] for value in values if value.get("kind") == StepRecord.kind]
        if steps:
            return int(max(steps))
    return 0


def cut_metrics(path: Path, *, after: int) -> list[bytes]:
    """Drop the records of all steps after the one given, a cut last line, and lines near the end
    that cannot be read; returns the latter.

    A run that resumes from an older checkpoint repeats those steps and writes them anew. Lines are
    kept byte for byte, so that what a newer version wrote survives. A missing file stays missing.
    """
    tail: list[_Line] = []
    for lines in _read_backwards(path):
        tail[:0] = lines
        steps = [line.step for line in lines if line.step is not None]
        if steps and max(steps) <= after:
            break
    kept = [line for line in tail if line.step is not None and line.step <= after]
    whole = [line for line in kept if line.data.endswith(b"\n")]
    first = next((line for line, other in zip_longest(tail, whole) if line is not other), None)
    if first is None:
        return []
    rest = [line.data.removesuffix(b"\n") for line in kept if line.offset >= first.offset]
    # If the process dies in between, the next cut finds what is left of these lines.
    with storage_errors(path), path.open("r+b") as file:
        file.seek(first.offset)
        file.write(b"".join(line + b"\n" for line in rest))
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    return [line.data for line in tail if line.step is None and line.data.endswith(b"\n")]
