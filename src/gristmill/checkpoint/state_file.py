"""`state.json`: all of a checkpoint that is not a tensor.

Its bytes are covered by the manifest. Its content is checked as well, since a manifest can be
written for anything: whoever reads it may rely on every table and number below.

    progress    steps (that of the folder's name), samples, tokens
    identity    what must not change between saving and resuming, by dotted name
    settings    of the model, and its vocabulary
    strategy    what the strategy keeps as plain numbers, such as the loss scale
    counters    what happened so far
    health      what judges the steps of the run; if there are workers, a table for each
    best        step and loss of the best validation so far, or null
    workers     those with weights of their own, or null
    base        the model that adapters belong to (see `adapter_base.py`), or null
    layout, micro_batch, torch, threads, processes    what the last bits of its numbers depend on
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import read_json
from gristmill.base.units import Progress
from gristmill.checkpoint.layout import Best, find_step
from gristmill.config.parallel import AXES

FORMAT = "gristmill-checkpoint"
VERSION = 1
IN_PIECES = 2
"""The version of a checkpoint with `pieces.json`."""
STATE = "state.json"
_TABLES = ("progress", "identity", "settings", "strategy", "counters")
_MOST = 2**63
"""Larger counts do not fit into the tensors that some of them go to."""


@dataclass
class Counters:
    """What happened so far."""

    skipped: int = 0
    """Steps that left the weights as they were."""
    nan: int = 0
    """Steps whose loss was not finite."""
    seconds: float = 0.0
    """Wall-clock time spent training."""
    skipped_samples: int = 0
    """Samples of the skipped steps."""


def read_state(folder: Path) -> dict[str, Any]:
    """The checked content of a checkpoint's state.json."""
    path = folder / STATE
    values = read_json(path)
    if not isinstance(values, dict):
        raise DataError("its content is not a table", where=path)
    if values.get("format") != FORMAT or values.get("version") not in (VERSION, IN_PIECES):
        # Not a DataError: a checkpoint of another program is not a damaged one.
        raise UserError(
            f"written in format {shown(values.get('format'))} version "
            f"{shown(values.get('version'))}; this program reads {FORMAT!r} versions {VERSION} "
            f"and {IN_PIECES}",
            where=str(path),
            exit=Exit.DATA,
        )
    fault = _fault(values, step=find_step(folder))
    if fault is not None:
        raise DataError(fault, where=path)
    return values


def _fault(values: dict[str, Any], *, step: int | None) -> str | None:
    """What is wrong with the content, if anything; `step` is that of the folder's name."""
    for name in _TABLES:
        if not isinstance(values.get(name), dict):
            return f"{name} is {shown(values.get(name))}, not a table"
    for table, kind in (("progress", Progress), ("counters", Counters)):
        names = {field.name for field in fields(kind)}
        for name, value in values[table].items():
            # Seconds are the only number here that is not a count.
            good = is_count(value) or (name == "seconds" and _is_finite(value) and value >= 0)
            if name not in names or not good:
                return f"{table}.{shown(name, quoted=False)} is {shown(value)}"
    steps = values["progress"].get("steps")
    if steps is None or (step is not None and steps != step):
        return f"progress.steps is {steps}, but the name of the folder says {step}"
    if not isinstance(values.get("health", {}), dict):
        return f"health is {shown(values['health'])}, not a table"
    best, layout = values.get("best"), values.get("layout")
    try:
        if best is not None and Best.of(best).step > steps:
            return f"best is {shown(best)}, a later step"
    except ValueError as error:
        return f"best is {shown(best)}, {error}"
    workers = values.get("workers")
    if workers is not None and not (isinstance(workers, list) and all(map(is_count, workers))):
        return f"workers is {shown(workers)}, not a list of workers"
    if layout is not None and not _is_mesh(layout):
        return f"layout is {shown(layout)}, not the sizes of a mesh"
    return None


def is_count(value: Any) -> bool:
    """Whether a value from a JSON file counts something."""
    return type(value) is int and 0 <= value < _MOST


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_mesh(value: Any) -> bool:
    return (
        isinstance(value, dict) and set(value) <= set(AXES) and all(map(is_count, value.values()))
    )


def shown(value: Any, *, quoted: bool = True) -> str:
    """A value for a message, shortened."""
    text = repr(value) if quoted else str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
