"""The rows and sizes of `optimizers.py`, and what one sweep consists of.

    OptimizerRow   an optimizer with its settings, and the two that are tuned (`optimizers.toml`)
    Size           model, batch and horizons that fit a machine
    Sweep          everything that makes the runs of one result file comparable

A sweep is written to the result file before its runs, and a sweep that goes on has to be the same.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optimizer_search import Candidate, Knob

ROWS = Path(__file__).with_name("optimizers.toml")

REFERENCE = "muon"
"""The row that the others are compared with."""


@dataclass(frozen=True)
class OptimizerRow:
    """One optimizer."""

    name: str
    title: str
    knobs: tuple[Knob, ...]
    """The learning rate and one more setting."""
    optim: Mapping[str, Any]
    set: tuple[str, ...] = ()
    base: str | None = None

    def words(self, candidate: Candidate) -> list[str]:
        """All settings of the row, as on the command line; those that are tuned come last."""
        return [*self.set, *_words(self.optim, "optim"), *candidate.words]


def _words(table: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, Mapping) and all(name.isidentifier() for name in value):
            yield from _words(value, f"{place}.{key}")
        elif isinstance(value, Mapping):  # numbers by the point of the run they count from
            points = (f"{json.dumps(start)} = {number}" for start, number in value.items())
            yield f"{place}.{key}={{ {', '.join(points)} }}"
        else:
            yield f"{place}.{key}={json.dumps(value)}"


def read_rows(file: Path, *, size: str) -> dict[str, OptimizerRow]:
    """All rows of a file, with the learning rates of a size."""
    try:
        tables = tomllib.loads(file.read_text())
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise SystemExit(f"{file}: {error}") from None
    rows = {}
    for name, table in tables.items():
        try:
            rows[name] = _row(name, table, size=size)
        except KeyError as error:
            raise SystemExit(f"{file}: [{name}] has no {error}; see {ROWS.name}") from None
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{file}: [{name}]: {error}; see {ROWS.name}") from None
    for name, row in rows.items():
        if row.base is not None and row.base not in rows:
            raise SystemExit(f"{file}: [{name}] has base {row.base!r}, which is no row")
    return rows


def _row(name: str, table: Mapping[str, Any], *, size: str) -> OptimizerRow:
    unknown = set(table) - {"title", "lr", "second", "base", "set", "optim"}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is no part of a row")
    lr = table["lr"]
    start = float(lr[size] if isinstance(lr, Mapping) else lr)
    return OptimizerRow(
        name=name,
        title=table["title"],
        knobs=(Knob("lr", start, 2.0), Knob(**table["second"])),
        optim=table["optim"],
        set=tuple(table.get("set", ())),
        base=table.get("base"),
    )


@dataclass(frozen=True)
class Size:
    """A model with its batch and horizons, each of which an option can change."""

    preset: str
    device: str
    compute: str
    layers: int | None
    width: int | None
    context: int | None
    batch: int
    set: tuple[str, ...]
    """Settings of all rows."""
    tokens: int
    """Of a final run."""
    trial_tokens: int
    trials: int
    points: int
    """Validations in a final run; a trial has one at its end."""
    rate: int
    """Tokens per second, for --plan: measured with Muon."""
    overhead_seconds: float
    """Seconds of a run that are neither steps nor validations, for --plan."""
    validation_seconds: float
    """Seconds of a validation, for --plan."""


# A warm-up for all rows: Muon does not need one, and AdamW does.
_SCHEDULE = ("schedule.warmup=0.05",)

SIZES = {
    "cpu": Size(
        preset="modern-nano",
        device="cpu",
        compute="fp32",
        layers=3,
        width=None,
        context=128,
        batch=16,
        set=("model.value_embeddings=1", *_SCHEDULE),
        tokens=400 * 16 * 128,
        trial_tokens=150 * 16 * 128,
        trials=6,
        points=10,
        rate=7000,
        overhead_seconds=2.0,
        validation_seconds=4.0,
    ),
    "124m": Size(
        preset="modern-small",
        device="cuda",
        compute="bf16",
        layers=None,
        width=None,
        context=None,
        batch=32,
        set=_SCHEDULE,
        tokens=8_000_000,
        trial_tokens=4_000_000,
        trials=4,
        points=12,
        rate=500_000,
        overhead_seconds=8.0,
        validation_seconds=0.8,
    ),
}


@dataclass(frozen=True)
class Sweep:
    """What the runs of one result file have in common, and its rows."""

    size: str
    trials: int
    trial_tokens: int
    tokens: int
    seeds: tuple[int, ...]
    points: int
    common: Mapping[str, Any]
    """Preset, shape, batch, settings of all rows, device and fingerprints of the text."""
    rows: tuple[OptimizerRow, ...]

    def row(self, name: str) -> OptimizerRow | None:
        return next((row for row in self.rows if row.name == name), None)


def to_table(sweep: Sweep) -> dict[str, Any]:
    """For the result file."""
    table: dict[str, Any] = json.loads(json.dumps(asdict(sweep)))
    return table


def from_table(table: Mapping[str, Any]) -> Sweep:
    rows = tuple(
        OptimizerRow(
            **{
                **row,
                "knobs": tuple(Knob(**knob) for knob in row["knobs"]),
                "set": tuple(row["set"]),
            }
        )
        for row in table["rows"]
    )
    return Sweep(**{**table, "seeds": tuple(table["seeds"]), "rows": rows})


def joined(before: Sweep, now: Sweep) -> Sweep:
    """The sweep of a file that goes on: the same, but rows may have been added."""
    was, wanted = to_table(before), to_table(now)
    for name in was:
        if name != "rows" and was[name] != wanted[name]:
            raise SystemExit(
                f"the sweep to go on with has {name} {was[name]}, not {wanted[name]}: give the "
                "same options, or begin another result file"
            )
    for row in now.rows:
        if before.row(row.name) not in (None, row):
            raise SystemExit(
                f"the sweep to go on with has other settings for {row.name}: begin another result "
                "file"
            )
    added = (row for row in now.rows if before.row(row.name) is None)
    return replace(before, rows=(*before.rows, *added))
