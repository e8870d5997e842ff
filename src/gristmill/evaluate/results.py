"""The result of an evaluation, and the JSON file that keeps it in `evals/`.

    {"kind": "task", "name": "hellaswag", "model": "step-00012000", "step": 12000,
     "precision": "fp32", "measures": {"acc": {"value": 0.31, "stderr": 0.005}, …},
     "count": 10042, "unit": "items", "seconds": 61.2,
     "facts": {"data": …, "data_sha256": …}, "training_data_checked": "yes",
     "settings": {…}, "made_by": {…}, "parts": {…}, "items": {"acc": [1, 0, …]}}

The values of all items are kept, so that two models can be compared item by item later.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from gristmill.base.files import read_json, sha256_file, write_json
from gristmill.checkpoint.layout import MANIFEST
from gristmill.checkpoint.model import LoadedModel
from gristmill.evaluate.measures import Measure
from gristmill.tokens.format import program_version
from gristmill.track.folder import RunFolder

Checked = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class EvaluationResult:
    """What a model scored on a text or a task."""

    name: str
    measures: dict[str, Measure]
    """The first one leads. Those of tasks have the names that lm-evaluation-harness gives them."""
    count: int
    """Tokens of a text, items of a task."""
    seconds: float
    facts: dict[str, Any]
    """Where the text or the questions came from, and how they were asked."""
    kind: Literal["text", "task"] = "task"
    notes: tuple[str, ...] = ()
    """What the user should know."""
    parts: dict[str, dict[str, Measure]] = field(default_factory=dict)
    """The measures of the tasks that this one sums up."""
    precision: str = "fp32"
    """The number format in which the model computed."""
    settings: dict[str, int | None] = field(default_factory=dict)
    """How much was computed, and how."""
    checked: Checked | None = None
    """Whether the training text was checked not to hold items of the task; None for a text."""
    files: tuple[Path, ...] = ()
    """Where this was written."""

    @property
    def unit(self) -> str:
        return "tokens" if self.kind == "text" else "items"


def with_check(result: EvaluationResult, run: Path | None) -> EvaluationResult:
    """The result of a task with what is known of the text that a run trained on."""
    if result.kind == "text":
        return result
    return replace(result, checked=_checked(result, run))


def _checked(result: EvaluationResult, run: Path | None) -> Checked:
    file = None if run is None else RunFolder(run).environment
    if file is None or not file.is_file():
        return "unknown"
    tasks = read_json(file).get("checked_tasks")
    if not isinstance(tasks, dict):
        return "unknown"
    data = result.facts.get("data_sha256")
    wanted = {result.name: data}
    if isinstance(data, dict):
        # A task that sums up others.
        wanted = {f"{result.name}/{name}": its_data for name, its_data in data.items()}
    # The data tell; of tasks that do not name theirs, the name does.
    known = {facts.get("data_sha256") for facts in tasks.values()}
    found = (
        name in tasks if its_data is None else its_data in known
        for name, its_data in wanted.items()
    )
    return "yes" if all(found) else "no"


def write_result(folder: Path, result: EvaluationResult, loaded: LoadedModel) -> Path:
    """Write a result with all that it depends on; returns the file."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(result.name).name).strip("-")
    begin = "" if loaded.step is None else f"step-{loaded.step:08d}-"
    end = "" if result.precision == "fp32" else f"-{result.precision}"
    file = folder / f"{begin}{name}{end}.json"
    manifest = loaded.origin / MANIFEST
    made_by = {
        "program": program_version(),
        "torch": torch.__version__,
        "device": loaded.model.device.type,
        "tokenizer": loaded.tokenizer.fingerprint,
        "checkpoint_sha256": sha256_file(manifest) if manifest.is_file() else None,
    }
    value = {
        "kind": result.kind,
        "name": result.name,
        "model": loaded.origin.name,
        "step": loaded.step,
        "precision": result.precision,
        "measures": _values(result.measures),
        "count": result.count,
        "unit": result.unit,
        "seconds": result.seconds,
        "facts": result.facts,
        "training_data_checked": result.checked,
        "settings": result.settings,
        "made_by": made_by,
        "parts": {name: _values(measures) for name, measures in result.parts.items()},
        "items": {
            name: [_number(item) for item in measure.items]
            for name, measure in result.measures.items()
            if measure.items
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, value)
    return file


def _values(measures: dict[str, Measure]) -> dict[str, dict[str, float | None]]:
    return {
        name: {
            # JSON has no infinity; a perplexity can be that.
            "value": measure.value if math.isfinite(measure.value) else None,
            "stderr": measure.stderr,
        }
        for name, measure in measures.items()
    }


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value
