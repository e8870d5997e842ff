"""Kinds of values that settings can have: each with its check, written form and JSON Schema.

    Interval    "500 steps", "1M samples", "20B tokens", at least 1
    Span        the same, or a fraction of the run, at least 0 and below 1
    WholeSpan   the same, or 1 for the whole run
    WallTime    "90s", "30m", "3h30m", "1d"
    Patience    the same, at least 5 seconds
    TokenPaths  "tokens/web", or a list of such, or a table { "tokens/web" = 0.9, … }

What is wrong with a value is said by a `ValueError`, which `config/load.py` gives its place.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, WithJsonSchema

from gristmill.base.errors import UserError
from gristmill.base.units import Duration, parse_seconds

LEAST_PATIENCE = 5
"""Seconds. Whoever waits less takes a process for lost that is only busy."""


def _duration(value: Any) -> Duration:
    if isinstance(value, Duration):
        return value
    if not isinstance(value, str):
        raise ValueError('needs a unit: write "500 steps", "1M samples" or "20B tokens"')
    try:
        return Duration.parse(value)
    except UserError as error:
        raise ValueError(str(error).replace("\n    ", "; ")) from error


def _positive_duration(value: Any) -> Duration:
    duration = _duration(value)
    if duration.amount < 1:
        raise ValueError("must be at least 1")
    return duration


def _span(value: Any) -> Duration | float:
    return _part(value, whole=False)


def _whole_span(value: Any) -> Duration | float:
    return _part(value, whole=True)


def _part(value: Any, *, whole: bool) -> Duration | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _duration(value)
    if not (0 <= value < 1 or (whole and value == 1)):
        bounds = "from 0 to 1" if whole else "at least 0 and below 1"
        raise ValueError(f'a plain number is a fraction of the run, {bounds}; or write "2k steps"')
    return float(value)


def _seconds(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError('needs a unit: write "90s", "30m", "3h30m" or "1d"')
    try:
        parse_seconds(value)
    except UserError as error:
        raise ValueError(str(error).replace("\n    ", "; ")) from error
    return value


def _patience(value: Any) -> str:
    text = _seconds(value)
    if parse_seconds(text) < LEAST_PATIENCE:
        raise ValueError(
            f'must be at least "{LEAST_PATIENCE}s": processes give a sign of life every second, '
            "and a busy one is late with it"
        )
    return text


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
            raise ValueError("a path stands here twice; to read a set more often, use weights")
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

Interval = Annotated[
    Duration,
    BeforeValidator(_positive_duration),
    PlainSerializer(str),
    WithJsonSchema(_DURATION_SCHEMA),
]
"""An amount of steps, samples or tokens, at least 1."""

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
    BeforeValidator(_whole_span),
    _SPAN_SERIALIZER,
    WithJsonSchema({"anyOf": [_DURATION_SCHEMA, {"type": "number", "minimum": 0, "maximum": 1}]}),
]
"""The same, which may also be the whole run: 1."""

WallTime = Annotated[str, BeforeValidator(_seconds)]
"""A wall-clock span such as "3h30m"."""

Patience = Annotated[str, BeforeValidator(_patience)]
"""How long one process waits for another."""

TokenPaths = Annotated[
    str | tuple[str, ...] | dict[str, float],
    PlainValidator(_paths),
    PlainSerializer(lambda paths: list(paths) if isinstance(paths, tuple) else paths),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "uniqueItems": True},
                {
                    "type": "object",
                    "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
                    "minProperties": 1,
                },
            ]
        }
    ),
]
"""One token set, several, or several with weights."""

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
