"""Results of evaluations in the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gristmill.report.page import newest_results


def write(folder: Path, name: str, step: int | None, precision: str = "fp32", **more: Any) -> None:
    measures = {"acc": {"value": (step or 0) / 100, "stderr": 0.01}} | more
    value = {"name": name, "step": step, "precision": precision, "measures": measures}
    folder.mkdir(exist_ok=True)
    file = folder / f"step-{step or 0:08d}-{name}-{precision}.json"
    file.write_text(json.dumps({**value, "count": 10042, "unit": "items"}))


def test_the_newest_result_of_each_task_is_shown(tmp_path: Path) -> None:
    for step in (10, 30, 20):
        write(tmp_path, "hellaswag", step)
    write(tmp_path, "hellaswag", 30, "bf16")
    write(tmp_path, "lambada", 20, perplexity={"value": None, "stderr": None})
    found = newest_results(tmp_path, warn=lambda text: None)
    assert {(one["on"], one["measure"], one["step"]) for one in found} == {
        ("hellaswag", "acc", 30),
        ("hellaswag in bf16", "acc", 30),
        ("lambada", "acc", 20),
    }
    assert found[0]["size"] == "10,042 items" and found[0]["stderr"] == 0.01


def test_a_damaged_result_is_left_out_and_told(tmp_path: Path) -> None:
    write(tmp_path, "hellaswag", 10)
    (tmp_path / "step-00000020-hellaswag.json").write_text("{")
    (tmp_path / "step-00000030-hellaswag.json").write_text('{"name": "x"}')
    told: list[str] = []
    found = newest_results(tmp_path, warn=told.append)
    assert [one["step"] for one in found] == [10]
    assert len(told) == 2 and "step-00000020" in told[0]


def test_a_run_without_results(tmp_path: Path) -> None:
    assert newest_results(tmp_path / "none", warn=lambda text: None) == []
