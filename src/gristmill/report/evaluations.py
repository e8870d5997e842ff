"""The results in a run's `evals/`, for the report: of every text and task the newest.

evals/step-00012000-hellaswag.json   {"name", "precision", "step", "measures": {"acc": {…}}, …}
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError
from gristmill.base.files import read_json


def newest_results(folder: Path, *, warn: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry for each measure: what was measured on, its name, value, standard error, step."""
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            result = _checked(read_json(file))
        except (DataError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            warn(f"left out {file}, which is damaged: {error}")
            continue
        key = (result["name"], result["precision"])
        if key not in newest or result["step"] >= newest[key]["step"]:
            newest[key] = result
    return [entry for result in newest.values() for entry in _entries(result)]


def _checked(value: Any) -> dict[str, Any]:
    """The parts of a result that are shown."""
    measures = {
        str(name): {"value": _number(one["value"]), "stderr": _number(one["stderr"])}
        for name, one in value["measures"].items()
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
            **one,
            "step": result["step"],
            "size": f"{result['count']:,} {result['unit']}",
        }
        for name, one in result["measures"].items()
        if one["value"] is not None
    ]
