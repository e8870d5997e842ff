"""The report on where the time went, on slow processes, and on scores by step."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gristmill.report.page import score_curves, write_report
from gristmill.track.folder import RunFolder
from gristmill.track.metrics import to_json
from gristmill.track.records import StragglerRecord

MakeRun = Callable[..., Path]


class _Data(HTMLParser):
    """The content of the element that holds the data."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self._inside = "", False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = dict(attrs).get("id") == "data"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.text += data


def shown(run: Path) -> dict[str, Any]:
    page = write_report([run], run / "report.html")
    (one,) = json.loads(_Data(page.read_text("utf-8")).text)["runs"]
    return dict(one)


def test_parts_of_the_wall_time_add_up(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "a", steps=30)
    assert shown(run)["time"] is None
    parts = {"start": 10.0, "compute": 80.0, "optimizer": 6.0, "save": 4.0}
    line = {"began": 1e9, "queued": None, "first": 0, "step": 30, "parts": parts, "joules": 7.2e6}
    (run / "time.jsonl").write_text(json.dumps({**line, "end": "done"}) + "\n{damaged\n")
    time = shown(run)["time"]
    assert time["parts"] == parts and time["wall"] == pytest.approx(100)
    assert time["goodput"] == pytest.approx(0.86)
    assert (time["kwh"], time["attempts"]) == (pytest.approx(2.0), 1)


def test_slow_processes_are_told_in_order(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "a", steps=30)
    assert shown(run)["stragglers"] == []
    stamp = {"samples": 1, "tokens": 1, "time": 2e9}
    about = {"rank": 3, "host": "n1", "phase": "data", "ratio": 1.31, "seconds": 0.4}
    records = [
        StragglerRecord(**stamp, **about, step=31, cause="slow storage"),
        StragglerRecord(**stamp, **about, step=80, over=True),
    ]
    with RunFolder(run).metrics.open("a") as file:
        file.write("".join(to_json(record) + "\n" for record in records))
    found = shown(run)["stragglers"]
    assert [(one["step"], one["over"], one["cause"]) for one in found] == [
        (31, False, "slow storage"),
        (80, True, None),
    ]
    assert {(one["rank"], one["host"], one["phase"]) for one in found} == {(3, "n1", "data")}


@pytest.mark.parametrize(
    ("about", "flops"),
    [
        ({"flops_per_token": 8.6e8, "parameters": 10}, 8.6e8),
        ({"parameters": 100_000_000}, 6e8),
        ({"flops_per_token": "many", "parameters": -1}, None),
        ({}, None),
    ],
)
def test_flops_of_a_token(
    tmp_path: Path, make_run: MakeRun, about: dict[str, Any], flops: float | None
) -> None:
    run = make_run(tmp_path / "a", steps=30)
    RunFolder(run).environment.write_text(json.dumps(about))
    assert shown(run)["flops_per_token"] == flops


def test_scores_by_step(tmp_path: Path) -> None:
    for step, value in ((300, 0.31), (100, 0.27), (200, None)):
        measures = {"acc": {"value": value, "stderr": 0.005}}
        about = {
            "name": "hellaswag",
            "precision": "fp32",
            "step": step,
            "count": 9,
            "unit": "items",
        }
        file = tmp_path / f"step-{step:08d}-hellaswag.json"
        file.write_text(json.dumps({**about, "measures": measures}))
    (tmp_path / "damaged.json").write_text("{")
    assert score_curves(tmp_path) == {
        "hellaswag.acc": [
            {"step": 100, "value": 0.27, "stderr": 0.005},
            {"step": 300, "value": 0.31, "stderr": 0.005},
        ]
    }


def test_the_address_of_alerts_is_not_shown(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path / "a", steps=30)
    settings = RunFolder(run).settings
    settings.write_text(f'{settings.read_text()}\n[alert]\nurl = "https://example.org/secret"\n')
    page = write_report([run], run / "report.html")
    assert "secret" not in page.read_text("utf-8")
    assert "(not shown)" in shown(run)["settings"]
