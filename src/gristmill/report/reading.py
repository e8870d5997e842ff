"""Reads lines of `metrics.jsonl` as numbers, many at a time.

A line with the keys of one that was read properly is as good. So lines are decoded together, and
their values become one array; only where that fails is each line read with care. Every field that
holds a number is found by its presence: also those that only a newer version writes.

    step         loss, lr, …
    validation   validation.loss, …
    evaluation   evaluation.NAME.METRIC, with the standard error
    system       system.HOST.cpu_use, …
    of a source, or a further set of validation text:   source.NAME.loss, validation.NAME.loss, …

What holds texts (samples, events, stragglers) is made into records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import numpy.typing as npt

from gristmill.report.thinning import Doubles
from gristmill.track.metrics import from_json
from gristmill.track.records import (
    BREAKDOWNS,
    EvaluationRecord,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)

_STAMP = ("step", "tokens", "time")
_NOT_CURVES = {*_STAMP, "samples", "kind"}
_TEXTS = {SampleRecord.kind, EventRecord.kind, StragglerRecord.kind}
_MOST_LAYOUTS = 512
STEPS = ""
"""The group of the curves of steps."""
VALIDATION = "validation."
SOURCE = "source."
_PART_GROUPS = {"sources": SOURCE, "sets": VALIDATION}
"""What the curves of parts of a record begin with, by the field that holds them."""
VALUE, ERROR = "value", "stderr"
"""The curves of a group of evaluations."""
_NO_CURVES = "\n"
"""The group of records that hold texts."""


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
    """What lines of the same keys hold."""

    kind: str
    names: tuple[str, ...]
    """The fields that hold numbers."""
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]] | None
    """The step, the tokens, the time and those numbers; None for kinds that are not known."""
    parts: tuple[str, ...] = ()
    """The fields that hold numbers of several things by name."""


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
class LineBlock:
    """The records on some consecutive lines of a metrics file."""

    stamps_BP: Doubles
    """Step, tokens and time of every record, in the order of the lines."""
    groups: list[GroupRows]
    texts: list[tuple[int, Record]]
    """Numbers of lines, and records that hold texts."""


@dataclass
class _Rows:
    """Some records with the same fields."""

    numbers: list[int] = field(default_factory=list)
    values: list[tuple[Any, ...]] = field(default_factory=list)


class _Collected:
    """What is collected of a block's lines."""

    def __init__(self) -> None:
        self.count = 0
        """Records."""
        self.rows: dict[str, dict[tuple[str, ...], _Rows]] = {}
        """By group and names."""
        self.texts: list[tuple[int, Record]] = []

    def rows_of(self, group: str, names: tuple[str, ...]) -> _Rows:
        kinds = self.rows.get(group)
        if kinds is None:
            kinds = self.rows[group] = {}
        rows = kinds.get(names)
        if rows is None:
            rows = kinds[names] = _Rows()
        return rows

    def block(self) -> LineBlock:
        """All of it as arrays; a `ValueError` or `TypeError` if a value is no number."""
        stamps_BP = np.full((self.count, len(_STAMP)), np.nan)
        groups = list[GroupRows]()
        for group, kinds in self.rows.items():
            parts = []
            for names, rows in kinds.items():
                values_BC = np.array(rows.values, dtype=np.float64)
                numbers = np.array(rows.numbers)
                stamps_BP[numbers] = values_BC[:, : len(_STAMP)]
                parts.append((names, numbers, values_BC[:, len(_STAMP) :]))
            if group != _NO_CURVES:
                groups.append(_joined(group, parts))
        if not np.isfinite(stamps_BP[:, :2]).all():
            raise ValueError("a step is no number")
        return LineBlock(stamps_BP, groups, self.texts)


def _joined(
    group: str, parts: list[tuple[tuple[str, ...], npt.NDArray[np.int64], Doubles]]
) -> GroupRows:
    """Records with different fields in their order; what one does not have is NaN."""
    if len(parts) == 1:
        names, numbers, values_BC = parts[0]
    else:
        names = tuple(dict.fromkeys(name for own, _, _ in parts for name in own))
        numbers = np.concatenate([numbers for _, numbers, _ in parts])
        values_BC, begin = np.full((len(numbers), len(names)), np.nan), 0
        for own, _, values in parts:
            end = begin + len(values)
            values_BC[begin:end, [names.index(name) for name in own]] = values
            begin = end
        order = np.argsort(numbers)
        numbers, values_BC = numbers[order], values_BC[order]
    # Fields that are null in all of them need no room.
    held = np.count_nonzero(~np.isnan(values_BC), axis=0) > 0
    names = tuple(name for name, some in zip(names, held, strict=True) if some)
    return GroupRows(group, names, numbers, values_BC[:, held])


class LineReader:
    """Reads lines, and remembers what proper ones look like."""

    def __init__(self) -> None:
        self._decode = _decoder()
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def read(self, lines: Sequence[bytes], *, damaged: Callable[[int, str], None]) -> LineBlock:
        """What complete lines hold; `damaged` is called with the number of each, from 0, that
        cannot be read, and why."""
        values, wrong = self._values(lines), list[tuple[int, str]]()
        try:
            block = self._collect(lines, values, wrong, careful=False).block()
        except (ValueError, TypeError, LookupError, OverflowError, AttributeError):
            wrong = []
            block = self._collect(lines, values, wrong, careful=True).block()
        for number, why in wrong:
            damaged(number, why)
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

    def _collect(
        self,
        lines: Sequence[bytes],
        values: list[Any],
        wrong: list[tuple[int, str]],
        *,
        careful: bool,
    ) -> _Collected:
        found, layouts = _Collected(), self._layouts
        steps: _Layout | None = None
        own = _Rows()
        pick: Callable[[Mapping[str, Any]], Any] = itemgetter(*_STAMP)
        for number, value in enumerate(values):
            layout = layouts.get(tuple(value)) if type(value) is dict else None
            if careful or layout is None or layout.kind != value["kind"]:
                try:
                    layout, value = self._learn(lines[number], value)
                except (ValueError, RecursionError) as error:
                    wrong.append((number, str(error)))
                    continue
            if layout is steps:
                own.numbers.append(found.count)
                own.values.append(pick(value))
                found.count += 1
                continue
            if layout.pick is None:
                continue
            if layout.kind in _TEXTS:
                try:
                    record = from_json(lines[number].decode())
                except (ValueError, RecursionError) as error:
                    wrong.append((number, str(error)))
                    continue
                assert record is not None
                found.texts.append((number, record))
            rows = found.rows_of(_group(layout.kind, value), layout.names)
            rows.numbers.append(found.count)
            rows.values.append(layout.pick(value))
            for name in layout.parts:
                _collect_parts(found, _PART_GROUPS[name], value, value[name] or {})
            found.count += 1
            if layout.kind == StepRecord.kind and not layout.parts:
                # Nearly all lines are such, and need less when they follow each other.
                steps, own, pick = layout, rows, layout.pick
        return found

    def _learn(self, line: bytes, value: Any) -> tuple[_Layout, Mapping[str, Any]]:
        """Read a line as every reader does, and remember what it looks like."""
        record = from_json(line.decode())
        # The other decoder may refuse what this one takes.
        value = value if type(value) is dict else json.loads(line)
        if record is None:
            keys, layout = tuple(value), _Layout(str(value["kind"]), (), None)
        else:
            known = {name: getattr(record, name) for name in value if hasattr(type(record), name)}
            known.pop("kind", None)
            keys, value = tuple(value), {**value, **known}
            names = () if record.kind in _TEXTS else tuple(_numbers(record, value))
            parts = tuple(
                name for name in BREAKDOWNS if name in value and name in _FIELDS[record.kind]
            )
            layout = _Layout(record.kind, names, itemgetter(*_STAMP, *names), parts)
        if len(self._layouts) < _MOST_LAYOUTS:
            self._layouts[keys] = layout
        return layout, value


def _collect_parts(
    found: _Collected, prefix: str, value: Mapping[str, Any], parts: Mapping[str, Any]
) -> None:
    """Add the numbers of the parts of a record, each part a group of its own."""
    stamp = tuple(value[name] for name in _STAMP)
    for name, numbers in parts.items():
        rows = found.rows_of(f"{prefix}{name}.", tuple(numbers))
        rows.numbers.append(found.count)
        rows.values.append((*stamp, *numbers.values()))


def _numbers(record: Record, value: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a record that hold numbers, or would if they were not null."""
    if isinstance(record, EvaluationRecord):
        yield from (VALUE, ERROR)
        return
    for name, one in value.items():
        null = one is None and name in _NUMERIC[record.kind]
        if name not in _NOT_CURVES and (null or type(one) in (int, float)):
            yield name


_FIELDS = {kind.kind: set(get_type_hints(kind)) for kind in get_args(Record)}
_NUMERIC = {
    kind.kind: {
        name
        for name, hint in get_type_hints(kind).items()
        if {int, float} & {hint, *get_args(hint)}
    }
    for kind in (StepRecord, ValidationRecord, SystemRecord)
}


def _group(kind: str, value: Mapping[str, Any]) -> str:
    if kind == StepRecord.kind:
        return STEPS
    if kind == ValidationRecord.kind:
        return VALIDATION
    if kind == SystemRecord.kind:
        return f"{kind}.{value['host']}."
    if kind == EvaluationRecord.kind:
        return f"{kind}.{value['name']}.{value['metric']}."
    return _NO_CURVES
