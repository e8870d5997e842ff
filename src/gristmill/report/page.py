"""The report: one HTML page with the curves, samples and settings of one or several runs.

    run folders ──> what `page.html` shows, as one JSON value ──> page.html with that value inside

The page needs nothing else: no network, no other file, so it can be mailed or kept with a paper.
Its script draws the charts from the JSON, which stands in a `<script type="application/json">` with
every "<" written as \\u003c, so that no text of a model or a settings file can end the element. The
scripts and styles are those of `pages/`, which the live page loads one by one; here they stand in
the page, one after the other, without the lines by which they import each other.

Very long runs are thinned while they are read: see `plots`. The run folder keeps everything.
"""

from __future__ import annotations

import html
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, Exit, Problem, UserError
from gristmill.base.files import read_json, refuse_devices, write_atomic
from gristmill.config.track import without_address
from gristmill.report.plots import RunDigest
from gristmill.track.account import read_run_time
from gristmill.track.folder import RunFolder

STYLES = ("report.css", "charts.css")
SCRIPTS = (
    *("elements.js", "page_theme.js", "numbers.js", "curves.js", "painting.js", "charts.js"),
    *("catalog.js", "account.js", "report.js"),
)
"""The scripts of the page, each after those that it imports."""
_IMPORTS = re.compile(r"^import\s[^;]*;\n", re.MULTILINE)
_EXPORTS = re.compile(r"^export (?=async |function |class |const |let )", re.MULTILINE)


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
            _run(folder, name=name, digest=digest, warn=warn)
            for folder, name, digest in zip(folders, names, _read(folders, warn), strict=True)
        ],
        "differences": _differences(folders) if len(folders) > 1 else [],
        "made": datetime.now().astimezone().isoformat(timespec="minutes"),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, whole_page(content, title=" · ".join(names), scripts=SCRIPTS))
    return output


def _read(folders: Sequence[RunFolder], warn: Callable[[str], None]) -> list[RunDigest]:
    """The records of every run; refuses with all problems together."""
    digests, problems = list[RunDigest](), []
    for folder in folders:
        where, digest = str(folder.path), None
        refuse_devices(folder.path)
        if folder.metrics.is_file():
            damaged = _DamagedLines()
            digest = RunDigest(folder.metrics, damaged=damaged.add)
            if damaged.count:
                lines = "line" if damaged.count == 1 else "lines"
                what = f"left out {damaged.count} damaged {lines}, first {damaged.first}"
                warn(f"{folder.metrics}: {what}")
        if not folder.holds_run():
            remedy = "give the folder that holds run.toml, such as runs/NAME"
            problems.append(Problem("this folder holds no run", where, remedy))
        elif digest is None or not digest.records:
            remedy = "train at least one step first"
            problems.append(Problem("this run has no metrics yet", where, remedy))
        else:
            digests.append(digest)
    if not folders:
        problems.append(Problem("no run was given", None, "name one or several run folders"))
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    return digests


class _DamagedLines:
    """How many lines cannot be read, and which is the first."""

    count = 0
    first = ""

    def add(self, number: int, why: str) -> None:
        self.first = self.first or f"line {number} ({why[:200]})"
        self.count += 1


def whole_page(
    content: Mapping[str, Any],
    *,
    title: str,
    scripts: Sequence[str],
    styles: Sequence[str] = STYLES,
) -> str:
    """One file that needs no other: the content, and the scripts that draw it."""
    data = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    code = "\n".join(_IMPORTS.sub("", _EXPORTS.sub("", _file(name))) for name in scripts)
    parts = {
        "title": html.escape(title),
        "style": "\n".join(map(_file, styles)),
        "data": data.replace("<", "\\u003c"),
        "script": code,
    }
    template = resources.files("gristmill.report").joinpath("page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _file(name: str) -> str:
    return resources.files("gristmill.report").joinpath("pages", name).read_text("utf-8")


def _run(
    folder: RunFolder, *, name: str, digest: RunDigest, warn: Callable[[str], None]
) -> dict[str, Any]:
    environment = _environment(folder, warn)
    parameters = environment.get("parameters")
    status = folder.read_status()
    return {
        "name": name,
        "state": _text(status.get("state")) or "unknown",
        "reason": _text(status.get("reason")),
        "summary": {
            "parameters": parameters if isinstance(parameters, int) else None,
            **digest.summary(),
            "planned": planned_of(environment),
        },
        "train": digest.train,
        "validation": digest.validation,
        "parts": digest.parts,
        "samples": digest.samples(),
        "evaluations": newest_results(folder.evals, warn=warn),
        "scores": score_curves(folder.evals),
        "flops_per_token": _flops_per_token(environment),
        "time": _time(folder),
        "stragglers": digest.stragglers(),
        "events": digest.events(),
        "settings": without_address(folder.settings.read_text("utf-8", errors="replace")),
        "environment": {key: _shown(value) for key, value in _flat(environment).items()},
    }


def _text(value: Any) -> str | None:
    """A text of a file that anybody may have changed."""
    return value if isinstance(value, str) else None


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


def _flops_per_token(environment: Mapping[str, Any]) -> float | None:
    """FLOPs of training on one token: what the run wrote, or 6 for each parameter."""
    for name, factor in (("flops_per_token", 1.0), ("parameters", 6.0)):
        value = environment.get(name)
        if isinstance(value, int | float) and 0 < value < 1e300:
            return float(value) * factor
    return None


def planned_of(environment: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the run expected of its steps, as far as a page shows it."""
    planned = environment.get("planned")
    if not isinstance(planned, Mapping):
        return None
    names = ("tokens_per_second", "step_seconds", "mfu", "memory_bytes")
    numbers = {name: planned.get(name) for name in names}
    return {
        name: value if isinstance(value, int | float) and 0 < value < 1e300 else None
        for name, value in numbers.items()
    }


def _time(folder: RunFolder) -> dict[str, Any] | None:
    """Where the wall time of the run went; None if it kept no account."""
    account = read_run_time(folder.path / "time.jsonl")
    if account is None:
        return None
    return {
        "wall": account.wall,
        "parts": account.parts,
        "goodput": account.goodput,
        "kwh": account.kwh,
        "attempts": account.attempts,
    }


def _finite(value: Any) -> Any:
    """The same without numbers that JSON does not have, which files of a run may hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


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
            text = without_address(folder.settings.read_text("utf-8"))
            settings.append(_flat(tomllib.loads(text)))
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


# ------------------------------------------------------------------ evaluations


def newest_results(folder: Path, *, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """The results in a run's `evals/`, of every text and task the newest: one entry for each
    measure, with what was measured on, its name, value, standard error and step.

    evals/step-00012000-hellaswag.json   {"name", "precision", "step", "measures": {"acc": {…}}, …}
    """
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for result in _results(folder, warn):
        key = (result["name"], result["precision"])
        if key not in newest or result["step"] >= newest[key]["step"]:
            newest[key] = result
    return [entry for result in newest.values() for entry in _entries(result)]


def score_curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The results in a run's `evals/` by step: for each `TASK.MEASURE` its values and standard
    errors."""
    curves: dict[str, dict[int, dict[str, Any]]] = {}
    for result in _results(folder, lambda text: None):
        for entry in _entries(result):
            points = curves.setdefault(f"{entry['on']}.{entry['measure']}", {})
            step = entry["step"]
            points[step] = {"step": step, "value": entry["value"], "stderr": entry["stderr"]}
    return {name: [points[step] for step in sorted(points)] for name, points in curves.items()}


def _results(folder: Path, warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            yield _checked(read_json(file))
        except (DataError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            warn(f"left out {file}, which is damaged: {error}")


def _checked(value: Any) -> dict[str, Any]:
    """The parts of a result that are shown."""
    measures = {
        str(name): {"value": _number(measure["value"]), "stderr": _number(measure["stderr"])}
        for name, measure in value["measures"].items()
    }
    return {
        "name": str(value["name"]),
        "precision": str(value["precision"]),
        "step": int(value["step"] or 0),
        "count": int(value["count"]),
        "unit": str(value["unit"]),
        "measures": measures,
    }


def _number(value: Any) -> float | None:
    """JSON has no other numbers, but Python's reader takes NaN and 1e999."""
    number = None if value is None else float(value)
    return number if number is not None and math.isfinite(number) else None


def _entries(result: dict[str, Any]) -> list[dict[str, Any]]:
    precision = "" if result["precision"] == "fp32" else f" in {result['precision']}"
    return [
        {
            "on": f"{result['name']}{precision}",
            "measure": name,
            **measure,
            "step": result["step"],
            "size": f"{result['count']:,} {result['unit']}",
        }
        for name, measure in result["measures"].items()
        if measure["value"] is not None
    ]
