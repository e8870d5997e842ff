"""`metrics.jsonl`, the file that keeps the records of a run: how it is written and read.

The file holds one JSON object per line, in the order of writing. The first key names the kind, the
others are the fields of that kind's class in `track/records.py`, in the order of their
declaration:

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
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import storage_errors
from gristmill.track.records import BREAKDOWNS, Record, StepRecord, ValidationRecord

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
    for name in BREAKDOWNS:
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
        elif name in BREAKDOWNS and type(item) is dict:
            item = {key: _breakdown_row(name, numbers) for key, numbers in item.items()}
        if type(item) not in types:
            raise ValueError(f"{name!r} cannot be {item!r}")
        known[name] = item
    return _CLASSES[kind](**known)


def _breakdown_row(name: str, numbers: Any) -> dict[str, Any]:
    """The numbers of one source or validation set, in the field of that name."""
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


STEP_FIELDS = tuple(field.name for field in fields(StepRecord) if field.name not in BREAKDOWNS)
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
