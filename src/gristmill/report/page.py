"""The report: one HTML page with the curves, samples and settings of one or several runs.

    run folders ──> what `page.html` shows, as one JSON value ──> page.html with that value inside

The page needs nothing else: no network, no other file, so it can be mailed or kept with a paper.
Its script draws the charts from the JSON, which stands in a `<script type="application/json">` with
every "<" written as \\u003c, so that no text of a model or a settings file can end the element.

Very long runs are thinned: curves to what a screen shows (see `plots`), samples to `MOST_SAMPLES`
moments spread evenly, events to the newest `MOST_EVENTS`. The run folder keeps all of them.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.files import read_json, write_atomic
from gristmill.report.plots import STEP_CURVES, VALIDATION_CURVES, buckets, make_plot
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import (
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    ValidationRecord,
    read_metrics,
)

MOST_SAMPLES = 200
MOST_EVENTS = 500
_LAST_RECORDS = 20


@dataclass(frozen=True)
class Summary:
    """The headline numbers of a run; None where the run has no such number."""

    step: int
    """Steps done."""
    tokens: int
    """Tokens seen."""
    seconds: float
    """Wall clock from the first record to the last."""
    train_loss: float | None
    """Mean training loss of the last records."""
    final_loss: float | None
    """The last validation loss."""
    best_loss: float | None
    """The lowest validation loss."""
    best_step: int | None
    """Where it was reached."""
    best_perplexity: float | None
    """Perplexity there."""
    tokens_per_second: float | None
    """Median of all steps."""
    mfu: float | None
    """Median of all steps."""
    memory_bytes: int | None
    """The most of all steps."""
    skipped: int
    """Steps without an update."""
    nan: int
    """Steps with a loss or gradient that was not finite."""
    parameters: int | None
    """Parameters of the model."""


def write_report(runs: Sequence[Path], output: Path) -> Path:
    """Write the page for one run, or for several to compare; returns where it is."""
    folders = [RunFolder(run) for run in runs]
    names = _names(runs)
    content = {
        "runs": [
            _run(folder, name=name, records=records)
            for folder, name, records in zip(folders, names, _read(folders), strict=True)
        ],
        "differences": _differences(folders) if len(folders) > 1 else [],
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, _page(content, title=" · ".join(names)))
    return output


def _read(folders: Sequence[RunFolder]) -> list[list[Record]]:
    """The records of every run, or all that stands in the way of reporting them."""
    found, problems = [], []
    for folder in folders:
        where = str(folder.path)
        records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
        if not folder.holds_run():
            remedy = "give the folder that holds run.toml, such as runs/NAME"
            problems.append(Problem("this folder holds no run", where, remedy))
        elif not records:
            remedy = "train at least one step first"
            problems.append(Problem("this run has no metrics yet", where, remedy))
        found.append(records)
    if not folders:
        problems.append(Problem("no run was given", None, "name one or several run folders"))
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    return found


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, or whole paths where two folders have the same name."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]


def _page(content: Mapping[str, Any], *, title: str) -> str:
    template = resources.files("gristmill.report").joinpath("page.html").read_text("utf-8")
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, rest = template.split("{{title}}")
    middle, after = rest.split("{{data}}")
    return f"{before}{html.escape(title)}{middle}{data}{after}"


def _run(folder: RunFolder, *, name: str, records: Sequence[Record]) -> dict[str, Any]:
    steps = [record for record in records if isinstance(record, StepRecord)]
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    start = records[0].time
    environment = _environment(folder)
    status = folder.read_status()
    return {
        "name": name,
        "state": status.get("state", "unknown"),
        "reason": status.get("reason"),
        "summary": asdict(_summary(records, parameters=environment.get("parameters"))),
        "train": asdict(make_plot(steps, names=STEP_CURVES, start=start)),
        "validation": asdict(make_plot(validations, names=VALIDATION_CURVES, start=start)),
        "samples": _samples(records),
        "events": _events(records),
        "settings": folder.settings.read_text("utf-8"),
        "environment": {key: _shown(value) for key, value in _flat(environment).items()},
    }


def _environment(folder: RunFolder) -> dict[str, Any]:
    return dict(read_json(folder.environment)) if folder.environment.is_file() else {}


def _summary(records: Sequence[Record], *, parameters: Any) -> Summary:
    steps = [record for record in records if isinstance(record, StepRecord)]
    validations = [
        record
        for record in records
        if isinstance(record, ValidationRecord) and math.isfinite(record.loss)
    ]
    best = min(validations, key=lambda record: record.loss, default=None)
    return Summary(
        step=records[-1].step,
        tokens=records[-1].tokens,
        seconds=records[-1].time - records[0].time,
        train_loss=_mean(step.loss for step in steps[-_LAST_RECORDS:]),
        final_loss=validations[-1].loss if validations else None,
        best_loss=best.loss if best else None,
        best_step=best.step if best else None,
        best_perplexity=_finite(best.perplexity) if best else None,
        tokens_per_second=_median(step.tokens_per_second for step in steps),
        mfu=_median(step.mfu for step in steps),
        memory_bytes=max((step.memory_bytes or 0 for step in steps), default=0) or None,
        skipped=steps[-1].skipped if steps else 0,
        nan=steps[-1].nan if steps else 0,
        parameters=parameters if isinstance(parameters, int) else None,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.fmean(known) if known else None


def _median(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return statistics.median(known) if known else None


def _samples(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The samples grouped by step, the last step always among them."""
    moments: dict[int, list[dict[str, str]]] = {}
    for record in records:
        if isinstance(record, SampleRecord):
            texts = moments.setdefault(record.step, [])
            texts.append({"prompt": record.prompt, "text": record.text})
    grouped = [{"step": step, "texts": texts} for step, texts in moments.items()]
    return [grouped[bucket[-1]] for bucket in buckets(len(grouped), limit=MOST_SAMPLES)]


def _events(records: Sequence[Record]) -> dict[str, Any]:
    events = [record for record in records if isinstance(record, EventRecord)]
    newest = events[-MOST_EVENTS:]
    return {
        "total": len(events),
        "newest": [
            {"step": event.step, "time": event.time, "level": event.level, "text": event.text}
            for event in newest
        ],
    }


def _flat(table: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, prefix=f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _shown(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _settings(folder: RunFolder) -> dict[str, Any]:
    try:
        return _flat(tomllib.loads(folder.settings.read_text("utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"not valid TOML: {error}", where=str(folder.settings), exit=Exit.DATA
        ) from error


def _differences(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs, each with its value in every run."""
    settings = [_settings(folder) for folder in folders]
    names = dict.fromkeys(name for table in settings for name in table)
    rows = [
        {"setting": name, "values": [_shown(table.get(name)) for table in settings]}
        for name in names
    ]
    return [row for row in rows if len(set(row["values"])) > 1]
