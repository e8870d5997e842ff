"""Mixtures over time: stages of a run with shares of its sources, and how often each may be read.

    [data]
    paths = ["tokens/web", "tokens/code", "tokens/math"]
    max_epochs = { code = 4 }

    [[data.stage]]
    to = 0.75
    weights = { web = 0.8, code = 0.2 }

    [[data.stage]]
    gradual = true
    weights = { web = 0.4, math = 0.4, code = 0.2 }

A source is called by the shortest end of its path that no other has, or by more of its path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from gristmill.base.units import Duration
from gristmill.config.settings import Settings, WholeSpan

NEARLY_ONE = 0.005
"""How far the shares of a stage may be from adding up to one, so that a third can be written."""


def _shares(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError('must be a table from source to share, such as { "web" = 0.8, … }')
    for name, share in value.items():
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not math.isfinite(share) or share < 0:
            raise ValueError(f"the share of {name!r} must be a number from 0, not {share!r}")
    total = math.fsum(value.values())
    if abs(total - 1) > NEARLY_ONE:
        raise ValueError(f"the shares add up to {total:g}, and must add up to 1")
    return {name: float(share) for name, share in value.items()}


def _epochs(value: Any) -> float | dict[str, float]:
    for limit in value.values() if isinstance(value, dict) else [value]:
        number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not number or not math.isfinite(limit) or limit <= 0:
            raise ValueError("must be a number above 0, or a table from source to such a number")
    if isinstance(value, dict):
        return {name: float(limit) for name, limit in value.items()}
    return float(value)


Shares = Annotated[
    dict[str, float],
    PlainValidator(_shares),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": 0},
            "minProperties": 1,
        }
    ),
]
"""What part of a stage each source has: shares that add up to one."""

_LIMIT_SCHEMA = {"type": "number", "exclusiveMinimum": 0}

EpochLimits = Annotated[
    float | dict[str, float],
    PlainValidator(_epochs),
    PlainSerializer(lambda limits: limits),
    WithJsonSchema(
        {
            "anyOf": [
                _LIMIT_SCHEMA,
                {"type": "object", "additionalProperties": _LIMIT_SCHEMA, "minProperties": 1},
            ]
        }
    ),
]
"""How often sources may be read: a number for all of them, or a table from source to number."""


class StageConfig(Settings):
    """A part of a run with a mixture of its own."""

    begin: WholeSpan | None = Field(default=None, alias="from")
    """Where the stage begins, as `to`; where the one before it ends if not given."""
    to: WholeSpan | None = None
    """Where the stage ends: "15B tokens", "2k steps", or a fraction of the run, such as 0.75. The
    last one ends with the run."""
    weights: Shares
    """The share of each source, such as { web = 0.8, code = 0.2 }; together 1. Sources that are
    left out are not read. A source is called by the end of its path in data.paths."""
    gradual: bool = False
    """Change linearly from the shares of the stage before to these, over the whole stage; at once
    if not."""


class _Mixed(Protocol):
    """The settings of data, as far as they matter here."""

    @property
    def sources(self) -> tuple[str, ...]: ...

    @property
    def stage(self) -> tuple[StageConfig, ...] | None: ...


class _Spans(Protocol):
    """The run in plain numbers, as far as they matter here."""

    @property
    def samples(self) -> int: ...

    def samples_of(self, span: Duration | float) -> int: ...


@dataclass(frozen=True)
class Stage:
    """A stage in plain numbers."""

    begin: int
    """Its first sample."""
    end: int
    """The first sample after it."""
    weights: tuple[float, ...]
    """The share of every source."""
    gradual: bool = False


def source_names(paths: Sequence[str]) -> tuple[str, ...]:
    """What sources are called: the shortest end of each path that no other has."""
    parts = [_parts(path) for path in paths]
    found = []
    for own in parts:
        lengths = range(1, len(own) + 1)
        length = next((n for n in lengths if sum(one[-n:] == own[-n:] for one in parts) == 1), None)
        found.append("/".join(own[-length:] if length else own))
    return tuple(found if len(set(found)) == len(found) else paths)


def find_sources(name: str, paths: Sequence[str]) -> list[int]:
    """The numbers of the sources that a name may mean: one, unless it is unknown or ambiguous."""
    if name in paths:
        return [paths.index(name)]
    asked = _parts(name)
    return [number for number, path in enumerate(paths) if _parts(path)[-len(asked) :] == asked]


def _parts(path: str) -> list[str]:
    # Megatron's files end on this, which says nothing.
    return [part for part in path.removesuffix("_text_document").split("/") if part] or [path]


def by_source(values: Mapping[str, float], paths: Sequence[str]) -> dict[int, float]:
    """Values by the number of their source; all names are known."""
    return {find_sources(name, paths)[0]: value for name, value in values.items()}


def borders(stages: Sequence[StageConfig]) -> list[Duration | float | None]:
    """Where each stage ends, as it is written there or at the next one; None where neither says
    so, as at the last one."""
    following = [stage.begin for stage in stages[1:]]
    return [
        stage.to if stage.to is not None else after
        for stage, after in zip(stages, [*following, None], strict=True)
    ]


def resolve_stages(data: _Mixed, resolved: _Spans) -> tuple[Stage, ...]:
    """The stages of a run whose settings fit together; none if its mixture never changes. Those
    that a shorter run does not come to have no samples."""
    stages = data.stage
    if not stages:
        return ()
    ends = [
        min(resolved.samples_of(end), resolved.samples)
        for end in borders(stages)[:-1]
        if end is not None
    ]
    found = []
    for number, stage in enumerate(stages):
        shares = by_source(stage.weights, data.sources)
        weights = tuple(shares.get(source, 0.0) for source in range(len(data.sources)))
        begin = ends[number - 1] if number else 0
        end = ends[number] if number < len(ends) else resolved.samples
        found.append(Stage(begin, end, weights, stage.gradual))
    return tuple(found)
