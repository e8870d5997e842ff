"""What all tables of settings have in common, and the types of settings, each with its check,
written form and JSON Schema.

A wrong value raises a `ValueError`, to which `config/load.py` adds the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)

from gristmill.base.errors import Problem, UserError
from gristmill.base.units import Duration, Progress, parse_seconds

Path_ = tuple[str, ...]
"""Where a setting is: its table, and its name there."""

Written = Collection[Path_]
"""Settings that the user wrote, as opposed to a preset's."""

UNSET = "unset"
"""Written in the place of a value: takes away what lower layers say, so that the default counts."""


@dataclass(frozen=True)
class NoEffect(Problem):
    """A setting that would do nothing: refused if the user wrote it, dropped if a preset did."""


def no_effect(setting: str, why: str, remedy: str = "remove it") -> NoEffect:
    """The problem of a setting, by its path, that would do nothing."""
    return NoEffect(f"has no effect {why}", setting, remedy)


class Settings(BaseModel):
    """What all tables have in common: frozen, strict, no unknown keys. The docstrings below their
    fields are read when they are asked for (`documentation.py`), not at every start."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
    )


# ------------------------------------------------------------------ types of settings

T = TypeVar("T")

LEAST_TIMEOUT = 5
"""Seconds. With less, a process that is only busy would be taken for lost."""


def _duration(value: Any) -> Duration:
    if isinstance(value, Duration):
        return value
    return _parsed(value, Duration.parse, examples='"500 steps", "1M samples" or "20B tokens"')


def _parsed(value: Any, parse: Callable[[str], T], *, examples: str) -> T:
    if not isinstance(value, str):
        raise ValueError(f"needs a unit: write {examples}")
    try:
        return parse(value)
    except UserError as error:
        raise ValueError(str(error).replace("\n    ", "; ")) from error


def _positive_duration(value: Any) -> Duration:
    duration = _duration(value)
    if duration.amount < 1:
        raise ValueError("must be at least 1")
    return duration


def _span(value: Any, *, whole: bool = False) -> Duration | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _duration(value)
    if not (0 <= value < 1 or (whole and value == 1)):
        bounds = "from 0 to 1" if whole else "at least 0 and below 1"
        raise ValueError(f'a plain number is a fraction of the run, {bounds}; or write "2k steps"')
    return float(value)


def _seconds(value: Any) -> str:
    _parsed(value, parse_seconds, examples='"90s", "30m", "3h30m" or "1d"')
    return str(value)


def _save_interval(value: Any) -> Duration | str:
    if isinstance(value, Duration):
        return _positive_duration(value)
    examples = '"15m", "500 steps", "1M samples" or "20B tokens"'
    if isinstance(value, str) and Duration.matches(value):
        return _positive_duration(value)
    seconds = _parsed(value, _parse_interval, examples=examples)
    if seconds <= 0:
        raise ValueError("must be longer than 0")
    return str(value)


def _parse_interval(text: str) -> float:
    try:
        return parse_seconds(text)
    except UserError as error:
        remedy = 'write "15m", "2h", "500 steps", "1M samples" or "20B tokens"'
        raise UserError(f"{text!r} is not an interval", remedy=remedy) from error


def _timeout(value: Any) -> str:
    text = _seconds(value)
    if parse_seconds(text) < LEAST_TIMEOUT:
        raise ValueError(
            f'must be at least "{LEAST_TIMEOUT}s": processes send a heartbeat every second, '
            "and a busy one may be late"
        )
    return text


def _size(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError('must be a whole number from 1 or "auto"')


def _paths(value: Any) -> str | tuple[str, ...] | dict[str, float]:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict | list | tuple):
        raise ValueError("must be a path, a list of paths, or a table from path to weight")
    if not value:
        raise ValueError("must name at least one token set")
    if not all(isinstance(path, str) for path in value):
        raise ValueError("every path must be text")
    if not isinstance(value, dict):
        if len(set(value)) < len(value):
            raise ValueError("a path is listed twice; to read a set more often, use weights")
        return tuple(value)
    for path, weight in value.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ValueError(f"the weight of {path!r} must be a number above 0, not {weight!r}")
    return {path: float(weight) for path, weight in value.items()}


_DURATION_SCHEMA = {
    "type": "string",
    "pattern": r"^[0-9][0-9_,]*(\.[0-9]+)?\s*[kKmMbBgGtT]?\s*(steps?|samples?|tokens?)$",
    "examples": ["500 steps", "1M samples", "20B tokens"],
}

_TIME_SCHEMA = {
    "type": "string",
    "pattern": r"^\s*([0-9]+(\.[0-9]+)?\s*[dhms]\s*)+$",
    "examples": ["90s", "30m", "3h30m", "1d"],
}

Interval = Annotated[
    Duration,
    BeforeValidator(_positive_duration),
    PlainSerializer(str),
    WithJsonSchema(_DURATION_SCHEMA),
]
"""An amount of steps, samples or tokens, at least 1: "500 steps", "1M samples", "20B tokens"."""

_SPAN_SERIALIZER = PlainSerializer(lambda span: str(span) if isinstance(span, Duration) else span)

Span = Annotated[
    Duration | float,
    BeforeValidator(_span),
    _SPAN_SERIALIZER,
    WithJsonSchema(
        {"anyOf": [_DURATION_SCHEMA, {"type": "number", "minimum": 0, "exclusiveMaximum": 1}]}
    ),
]
"""A part of the run: a duration, or a fraction of the horizon, at least 0 and below 1."""

WholeSpan = Annotated[
    Duration | float,
    BeforeValidator(partial(_span, whole=True)),
    _SPAN_SERIALIZER,
    WithJsonSchema({"anyOf": [_DURATION_SCHEMA, {"type": "number", "minimum": 0, "maximum": 1}]}),
]
"""The same, which may also be the whole run: 1."""

SaveInterval = Annotated[
    Duration | str,
    BeforeValidator(_save_interval),
    PlainSerializer(str),
    WithJsonSchema({"anyOf": [_DURATION_SCHEMA, _TIME_SCHEMA]}),
]
"""A wall-clock span, "15m", or an amount of steps, samples or tokens, at least 1."""

WallTime = Annotated[str, BeforeValidator(_seconds), WithJsonSchema(_TIME_SCHEMA)]
"""A wall-clock span such as "3h30m"."""

Timeout = Annotated[str, BeforeValidator(_timeout), WithJsonSchema(_TIME_SCHEMA)]
"""A wall-clock span of at least 5 seconds: how long one process waits for another."""

_WEIGHT_SCHEMA = {"type": "number", "exclusiveMinimum": 0}
_PATHS_SCHEMA: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
    {"type": "object", "additionalProperties": _WEIGHT_SCHEMA, "minProperties": 1},
]

TokenPaths = Annotated[
    str | tuple[str, ...] | dict[str, float],
    PlainValidator(_paths),
    PlainSerializer(lambda paths: list(paths) if isinstance(paths, tuple) else paths),
    WithJsonSchema({"anyOf": _PATHS_SCHEMA}),
]
"""One token set, several, or several with weights: { "tokens/web" = 0.9, … }."""

Count = Annotated[int, Field(ge=1)]
Size = Annotated[Count | Literal["auto"], BeforeValidator(_size)]
"""The size of a mesh axis."""
Fraction = Annotated[float, Field(ge=0, lt=1)]


# ------------------------------------------------------------------ values over a run

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Scheduled(Generic[N]):
    """A number that may change at certain points of a run."""

    points: tuple[tuple[Duration, N], ...]
    """Each number with the point from which on it counts; the first counts from the start."""

    def at(self, progress: Progress) -> N:
        """The number for the step that starts at `progress`."""
        return [value for start, value in self.points if progress.reached(start)][-1]

    @property
    def values(self) -> tuple[N, ...]:
        return tuple(value for _, value in self.points)


def constant(value: N) -> Scheduled[N]:
    """A number that never changes."""
    return Scheduled(((Duration.parse("0 steps"), value),))


def _scheduled(
    value: Any, *, whole: bool, least: float, excluded: bool, below: float
) -> Scheduled[Any]:
    if isinstance(value, Scheduled):
        return value

    def number(given: Any) -> Any:
        kinds = int if whole else int | float
        if isinstance(given, bool) or not isinstance(given, kinds):
            raise ValueError(f"must be a {'whole ' if whole else ''}number, not {given!r}")
        if not math.isfinite(given) or given < least or (excluded and given == least):
            raise ValueError(f"must be {'above' if excluded else 'at least'} {least:g}")
        if given >= below:
            raise ValueError(f"must be below {below:g}")
        return given if whole else float(given)

    if not isinstance(value, dict):
        return constant(number(value))
    points = tuple((_duration(start), number(one)) for start, one in value.items())
    amounts = [start.amount for start, _ in points]
    if not points or amounts[0] != 0:
        raise ValueError('the first number must be from "0 steps" on')
    if len({start.unit for start, _ in points}) > 1 or sorted(set(amounts)) != amounts:
        raise ValueError("write the points in one unit and in ascending order")
    return Scheduled(points)


def _written(value: Scheduled[Any]) -> Any:
    first, *others = value.points
    return first[1] if not others else {str(start): number for start, number in value.points}


def _over_run(number: dict[str, Any], **limits: Any) -> Any:
    table = {"type": "object", "additionalProperties": number, "minProperties": 1}
    return (
        PlainValidator(partial(_scheduled, **limits)),
        PlainSerializer(_written),
        WithJsonSchema({"anyOf": [number, table]}),
    )


_LIMITS: dict[str, Any] = {"whole": False, "least": 0, "excluded": False, "below": math.inf}

ScheduledCount = Annotated[
    Scheduled[int],
    *_over_run({"type": "integer", "minimum": 1}, **_LIMITS | {"whole": True, "least": 1}),
]
"""A whole number from 1, or a table such as { "0 steps" = 10, "1k steps" = 100 }: each number
counts from that point of the run on."""
ScheduledFraction = Annotated[
    Scheduled[float],
    *_over_run({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, **_LIMITS | {"below": 1}),
]
"""The same for fractions below 1."""
ScheduledPositive = Annotated[
    Scheduled[float],
    *_over_run({"type": "number", "exclusiveMinimum": 0}, **_LIMITS | {"excluded": True}),
]
"""The same for numbers above 0."""
ScheduledNonNegative = Annotated[
    Scheduled[float], *_over_run({"type": "number", "minimum": 0}, **_LIMITS)
]
"""The same for numbers from 0."""
