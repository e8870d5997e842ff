"""Reads lines of `metrics.jsonl` as numbers, many at a time.

A line of a known kind whose keys and types of values are those of a line that was read properly is
as good. So lines are decoded together, and each is only compared with those before. Every field
that holds a number is found by its presence: also those that only a newer version writes.

    step         loss, lr, …
    validation   validation.loss, …
    evaluation   evaluation.NAME.METRIC, with the standard error
    system       system.HOST.cpu_use, …

What holds texts (samples, events, stragglers) is made into records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.report.thinning import Doubles
from gristmill.track.metrics import (
    EvaluationRecord,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
    from_json,
)

_STAMP = ("step", "tokens", "time")
_NOT_CURVES = {*_STAMP, "samples", "kind"}
_TEXTS = {SampleRecord.kind, EventRecord.kind, StragglerRecord.kind}
_MOST_LAYOUTS = 512
STEPS = ""
"""The group of the curves of steps."""
VALIDATION = "validation."
VALUE, ERROR = "value", "stderr"
"""The curves of a group of evaluations."""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number in JSON")


def _decoder() -> Callable[[bytes], Any]:
    try:
        # Of the extra `data`; three times as fast.
        import orjson
    except ImportError:
        return lambda data: json.loads(data, parse_constant=_no_constant)
    decode: Callable[[bytes], Any] = orjson.loads
    return decode


class _Layout(NamedTuple):
    """What lines of the same keys and types hold."""

    kind: str
    """Empty for kinds that are not known."""
    names: tuple[str, ...]
    """The fields that hold numbers."""
    pick: Callable[[Mapping[str, Any]], Any]
    """Their values, in a tuple."""


@dataclass(frozen=True)
class _Rows:
    """Some records with the same fields."""

    numbers: list[int] = field(default_factory=list)
    """Which records of the block these are."""
    values: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class GroupRows:
    """The records of a block that belong to one group of curves, in their order."""

    group: str
    """What the names of the curves begin with."""
    names: tuple[str, ...]
    numbers: npt.NDArray[np.int64]
    """Which records of the block these are."""
    values_BC: Doubles


@dataclass(frozen=True)
class Block:
    """What some lines hold."""

    stamps: list[tuple[float, float, float]] = field(default_factory=list)
    """Step, tokens and time of every record, in the order of the lines."""
    texts: list[tuple[int, Record]] = field(default_factory=list)
    """Numbers of lines, and records that hold texts."""
    rows: dict[str, dict[tuple[str, ...], _Rows]] = field(default_factory=dict)
    """By group and names."""

    def groups(self) -> Iterator[GroupRows]:
        """The numbers, of which those that a record does not have are NaN."""
        for group, kinds in self.rows.items():
            names = tuple(dict.fromkeys(name for one in kinds for name in one))
            if len(kinds) == 1:
                (rows,) = kinds.values()
                values_BC = np.array(rows.values, dtype=np.float64)
                yield GroupRows(group, names, np.array(rows.numbers), values_BC)
                continue
            numbers = np.concatenate([np.array(rows.numbers) for rows in kinds.values()])
            values_BC, begin = np.full((len(numbers), len(names)), np.nan), 0
            for own, rows in kinds.items():
                end, columns = begin + len(rows.numbers), [names.index(name) for name in own]
                values_BC[begin:end, columns] = np.array(rows.values, dtype=np.float64)
                begin = end
            order = np.argsort(numbers)
            yield GroupRows(group, names, numbers[order], values_BC[order])


class LineReader:
    """Reads lines, and remembers what proper ones look like."""

    def __init__(self) -> None:
        self._decode = _decoder()
        self._layouts: dict[Any, _Layout] = {}

    def read(self, lines: Sequence[bytes], *, damaged: Callable[[int, str], None]) -> Block:
        """What complete lines hold; `damaged` is called with the number of each, from 0, that
        cannot be read, and why."""
        block = Block()
        for number, value in enumerate(self._values(lines)):
            try:
                self._add(block, number, lines[number], value)
            except (ValueError, RecursionError) as error:
                damaged(number, str(error))
        return block

    def is_whole(self, line: bytes) -> bool:
        """Whether a last line without an end is a record nevertheless."""
        try:
            from_json(line.decode())
        except (ValueError, RecursionError):
            return False
        return True

    def _values(self, lines: Sequence[bytes]) -> list[Any]:
        """The JSON of each line; None where there is none."""
        try:
            values = self._decode(b"[%b]" % b",".join(lines))
            if len(values) == len(lines):  # two broken lines could make one that is whole
                return list(values)
        except (ValueError, RecursionError):
            pass
        return [self._value(line) for line in lines]

    def _value(self, line: bytes) -> Any:
        try:
            return self._decode(line)
        except (ValueError, RecursionError):
            return None

    def _add(self, block: Block, number: int, line: bytes, value: Any) -> None:
        layout = None
        if type(value) is dict:
            kind = value.get("kind")
            key = (kind if type(kind) is str else "", *value, *map(type, value.values()))
            layout = self._layouts.get(key)
            if layout is None:
                layout, value = self._learn(key, line, value)
        else:
            layout, value = self._learn(None, line, {})
        if not layout.kind:
            return
        if layout.kind in _TEXTS:
            record = from_json(line.decode())
            assert record is not None
            block.texts.append((number, record))
        else:
            group = _group(layout.kind, value)
            kinds = block.rows.get(group)
            if kinds is None:
                kinds = block.rows[group] = {}
            rows = kinds.get(layout.names)
            if rows is None:
                rows = kinds[layout.names] = _Rows()
            rows.numbers.append(len(block.stamps))
            rows.values.append(layout.pick(value))
        block.stamps.append((value["step"], value["tokens"], value["time"]))

    def _learn(
        self, key: Any, line: bytes, value: dict[str, Any]
    ) -> tuple[_Layout, Mapping[str, Any]]:
        """Read a line as every reader does, and remember what it looks like if it is proper."""
        record = from_json(line.decode())
        if record is None:
            return _Layout("", (), lambda value: ()), value
        # The other decoder may refuse what this one takes.
        value = value or json.loads(line)
        known = {name: getattr(record, name) for name in value if hasattr(type(record), name)}
        known.pop("kind", None)
        odd = any(type(value[name]) is str and type(one) is float for name, one in known.items())
        value = {**value, **known}
        names = tuple(
            name
            for name, one in value.items()
            if name not in _NOT_CURVES and type(one) in (int, float)
        )
        if isinstance(record, EvaluationRecord):
            names = tuple(name for name in (VALUE, ERROR) if name in names)
        layout = _Layout(record.kind, names, _picking(names))
        if not odd and key is not None and len(self._layouts) < _MOST_LAYOUTS:
            self._layouts[key] = layout
        return layout, value


def _picking(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any]:
    if len(names) == 1:
        return lambda value: (value[names[0]],)
    return itemgetter(*names) if names else lambda value: ()


def _group(kind: str, value: Mapping[str, Any]) -> str:
    if kind == StepRecord.kind:
        return STEPS
    if kind == ValidationRecord.kind:
        return VALIDATION
    if kind == SystemRecord.kind:
        return f"{kind}.{value['host']}."
    return f"{kind}.{value['name']}.{value['metric']}."
