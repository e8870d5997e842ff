"""The report in a browser: one file, drawn with the charts of the live page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from gristmill.report.page import write_report

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


@pytest.fixture
def server() -> str:
    """The report is a file and asks nobody."""
    return "file:///"


@pytest.fixture
def runs(tmp_path: Path, run_folders: Any) -> list[Any]:
    found = []
    for seed in (1, 2):
        run = run_folders.GrowingRun(tmp_path / f"mill-{seed}", seed=seed, until=300)
        run.grow(300, every=50)
        run.account()
        run.slow_process()
        for step in (50, 150, 300):
            measures = {"acc": {"value": 0.2 + step / 3000, "stderr": 0.005}}
            about = {"name": "hellaswag", "precision": "fp32", "step": step, "count": 10042}
            file = run.folder.evals / f"step-{step:08d}-hellaswag.json"
            file.write_text(json.dumps({**about, "unit": "items", "measures": measures}))
        found.append(run)
    return found


@pytest.fixture
def report(runs: list[Any], tmp_path: Path, visit: Any) -> Any:
    """Open the report of the first runs."""

    def opened(count: int, size: str = "wide", **how: Any) -> Any:
        page_file = write_report([run.folder.path for run in runs[:count]], tmp_path / "r.html")
        page = visit(size, path=f"{page_file}", ready=False, **how)
        until(page, "document.querySelector('.plot')?.chart.frame?.width > 80")
        return page

    return opened


def until(page: Any, true: str) -> None:
    end = time.monotonic() + 20
    while not page.evaluate(true):
        assert time.monotonic() < end, f"this did not come true: {true}"
        page.wait_for_timeout(30)


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_everything_of_one_run_is_there(report: Any, size: str) -> None:
    page = report(1, size)
    headings = page.get_by_role("heading").all_inner_texts()
    assert {"mill-1", "Loss", "Learning rate", "Gradient norm", "Throughput", "Memory"} <= set(
        headings
    )
    assert {"Scores while training", "Where the time went", "Slow processes", "Evaluations",
            "Samples", "Settings", "Environment", "Events"} <= set(headings)  # fmt: skip
    expect(page.locator(".tile").filter(has_text="Goodput")).to_contain_text("%")
    shares = page.locator(".account tbody td:last-child").all_inner_texts()
    assert sum(float(text.strip("%")) for text in shares) == pytest.approx(100, abs=0.6)
    expect(page.get_by_role("region", name="Slow processes")).to_contain_text("slow storage")
    assert page.locator("img").count() == 0
    wide = page.evaluate("document.body.scrollWidth - document.body.clientWidth")
    assert wide <= 0


def test_scores_have_whiskers_at_their_places_on_every_axis(report: Any) -> None:
    page = report(1)
    score = "[...document.querySelectorAll('.chart')].map(({ chart }) => chart)"
    score += ".find(({ spec }) => spec.whiskers).series[0]"
    assert page.evaluate(f"[...{score}.x]") == [50, 150, 300]
    highs = page.evaluate(f"[...{score}.high]")
    assert highs == pytest.approx([0.2 + step / 3000 + 0.005 for step in (50, 150, 300)])
    page.get_by_role("button", name="FLOPs", exact=True).click()
    tokens = [step * 480 * 1024 for step in (50, 150, 300)]
    until(page, f"{score}.x[0] > 1000")
    assert page.evaluate(f"[...{score}.x]") == pytest.approx([8.6e8 * one for one in tokens])


def test_sources_and_domains_share_a_chart_each(runs: list[Any], report: Any) -> None:
    for run in runs:
        run.mix()

    def lines(page: Any, title: str) -> Any:
        charts = "[...document.querySelectorAll('.chart')].map(({ chart }) => chart)"
        own = f"{charts}.find(({{ spec }}) => spec.title === '{title}').series"
        return page.evaluate(f"{own}.map(({{ label, colour, y }}) => [label, colour, y.length])")

    page = report(1)
    assert [line[0] for line in lines(page, "Loss by source")] == ["code", "web"]
    assert len({line[1] for line in lines(page, "Loss by source")}) == 2
    assert [line[0] for line in lines(page, "Tokens by source")] == ["code", "web"]
    assert [line[0] for line in lines(page, "Loss by domain")] == ["news", "proofs"]
    both = report(2)
    labels = [f"mill-{run}, {part}" for run in (1, 2) for part in ("code", "web")]
    assert [line[0] for line in lines(both, "Loss by source")] == labels


def test_two_runs_are_compared(report: Any) -> None:
    page = report(2)
    expect(page.get_by_role("heading", name="2 runs compared")).to_be_visible()
    expect(page.locator(".account")).to_have_count(2)
    count = "document.querySelector('.plot').chart.series.length"
    assert page.evaluate(count) == 4
    page.get_by_role("button", name="mill-2", exact=True).click()
    assert page.evaluate(count) == 2
    plot = page.locator(".plot").first
    plot.hover(position={"x": 300, "y": 100})
    expect(page.locator(".tip").first).to_contain_text(re.compile(r"step \d+"))
    box = plot.bounding_box()
    page.mouse.down()
    page.mouse.move(box["x"] + 700, box["y"] + 100, steps=4)
    page.mouse.up()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    plot.dblclick()
    expect(page.get_by_role("button", name="Reset zoom")).to_be_hidden()


def test_the_report_can_be_dark(report: Any) -> None:
    page = report(1, color_scheme="dark")
    red = "parseInt(getComputedStyle(document.body).backgroundColor.slice(4))"
    assert page.evaluate(red) < 100
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(red) > 200


def test_charts_that_are_out_of_sight_are_printed(report: Any) -> None:
    page = report(1)
    drawn = "[...document.querySelectorAll('.chart')].filter(({ chart }) => !chart.frame).length"
    assert page.evaluate(drawn) > 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(drawn) == 0
