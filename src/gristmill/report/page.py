"""The report: one HTML page with the curves, samples and settings of one or several runs.

    run folders ──> what `page.html` shows, as one JSON value ──> page.html with that value inside

The page needs nothing else: no network, no other file, so it can be mailed or kept with a paper.
Its script draws the charts from the JSON, which stands in a `<script type="application/json">` with
every "<" written as \\u003c, so that no text of a model or a settings file can end the element.

Very long runs are thinned: curves to what a screen shows (see `plots`), samples to `MOST_SAMPLES`
steps spread evenly, events to the newest `MOST_EVENTS`. The run folder keeps all of them.
"""

from __future__ import annotations

import html
import json
import math
import statistics
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import read_json, write_atomic
from gristmill.report.evaluations import newest_results
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


def write_report(
    runs: Sequence[Path], output: Path, *, warn: Callable[[str], None] = lambda text: None
) -> Path:
    """Write the page for one run, or for several to compare; returns its path. What is damaged is
    left out, and `warn` is called with a message."""
    folders = [RunFolder(run) for run in runs]
    # Folder names, or whole paths if two folders have the same name.
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    content = {
        "runs": [
            _run(folder, name=name, records=records, warn=warn)
            for folder, name, records in zip(folders, names, _read(folders, warn), strict=True)
        ],
        "differences": _differences(folders) if len(folders) > 1 else [],
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, _page(content, title=" · ".join(names)))
    return output


def _read(folders: Sequence[RunFolder], warn: Callable[[str], None]) -> list[list[Record]]:
    """The records of every run; refuses with all problems together."""
    found, problems = [], []
    for folder in folders:
        where, records = str(folder.path), list[Record]()
        if folder.metrics.is_file():
            damaged: dict[int, str] = {}
            records = read_metrics(folder.metrics, damaged=damaged.__setitem__)
            if damaged:
                first = next(f"line {number} ({why})" for number, why in damaged.items())
                lines = "line" if len(damaged) == 1 else "lines"
                warn(f"{folder.metrics}: left out {len(damaged)} damaged {lines}, first {first}")
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


def _page(content: Mapping[str, Any], *, title: str) -> str:
    template = resources.files("gristmill.report").joinpath("page.html").read_text("utf-8")
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    before, rest = template.split("{{title}}")
    middle, after = rest.split("{{data}}")
    return f"{before}{html.escape(title)}{middle}{data}{after}"


def _run(
    folder: RunFolder, *, name: str, records: Sequence[Record], warn: Callable[[str], None]
) -> dict[str, Any]:
    steps = [record for record in records if isinstance(record, StepRecord)]
    validations = [record for record in records if isinstance(record, ValidationRecord)]
    events = [asdict(record) for record in records if isinstance(record, EventRecord)]
    start = records[0].time
    environment = _environment(folder, warn)
    parameters = environment.get("parameters")
    status = folder.read_status()
    return {
        "name": name,
        "state": status.get("state", "unknown"),
        "reason": status.get("reason"),
        "summary": {
            "parameters": parameters if isinstance(parameters, int) else None,
            **_summary(records, steps, validations),
        },
        "train": make_plot(steps, names=STEP_CURVES, start=start),
        "validation": make_plot(validations, names=VALIDATION_CURVES, start=start),
        "samples": _samples(records),
        "evaluations": newest_results(folder.evals, warn=warn),
        "events": {"total": len(events), "newest": events[-MOST_EVENTS:]},
        "settings": folder.settings.read_text("utf-8", errors="replace"),
        "environment": {key: _shown(value) for key, value in _flat(environment).items()},
    }


def _environment(folder: RunFolder, warn: Callable[[str], None]) -> dict[str, Any]:
    """What environment.json says; nothing if it is missing or damaged."""
    if not folder.environment.is_file():
        return {}
    try:
        environment = read_json(folder.environment)
    except DataError as error:
        warn(f"left out what is damaged: {error}")
        return {}
    return environment if isinstance(environment, dict) else {}


def _summary(
    records: Sequence[Record],
    steps: Sequence[StepRecord],
    validations: Sequence[ValidationRecord],
) -> dict[str, float | None]:
    """The headline numbers of a run; None if the run has no such number."""
    finite = [record for record in validations if math.isfinite(record.loss)]
    best = min(finite, key=lambda record: record.loss, default=None)
    train_losses = _known(step.loss for step in steps[-_LAST_RECORDS:])
    speeds = _known(step.tokens_per_second for step in steps)
    mfus = _known(step.mfu for step in steps)
    return {
        "step": records[-1].step,
        "tokens": records[-1].tokens,
        "seconds": records[-1].time - records[0].time,
        "train_loss": statistics.fmean(train_losses) if train_losses else None,
        "final_loss": finite[-1].loss if finite else None,
        "best_loss": best.loss if best else None,
        "best_step": best.step if best else None,
        "best_perplexity": best.perplexity if best and math.isfinite(best.perplexity) else None,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "mfu": statistics.median(mfus) if mfus else None,
        "memory_bytes": max((step.memory_bytes or 0 for step in steps), default=0) or None,
        "sent_bytes": steps[-1].sent_bytes if steps else None,
        "skipped": steps[-1].skipped if steps else 0,
        "nan": steps[-1].nan if steps else 0,
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _samples(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The samples grouped by step, the last step always among them."""
    texts: dict[int, list[dict[str, str]]] = {}
    for record in records:
        if isinstance(record, SampleRecord):
            sample = {"prompt": record.prompt, "text": record.text}
            texts.setdefault(record.step, []).append(sample)
    grouped = [{"step": step, "texts": samples} for step, samples in texts.items()]
    return [grouped[bucket[-1]] for bucket in buckets(len(grouped), limit=MOST_SAMPLES)]


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


def _differences(folders: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """The settings that are not the same in all runs, each with its value in every run."""
    settings = []
    for folder in folders:
        try:
            settings.append(_flat(tomllib.loads(folder.settings.read_text("utf-8"))))
        except ValueError as error:
            raise UserError(
                f"not valid TOML: {error}", where=str(folder.settings), exit=Exit.DATA
            ) from error
    names = dict.fromkeys(name for table in settings for name in table)
    rows = [
        {"setting": name, "values": [_shown(table.get(name)) for table in settings]}
        for name in names
    ]
    return [row for row in rows if len(set(row["values"])) > 1]
