"""The charts of the live page: what they show, and what a pointer and keys do with them."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


@pytest.fixture
def runs(tmp_path: Path, run_folders: Any) -> list[Any]:
    """Two runs whose charts are full after a moment."""
    found = []
    for seed in (1, 2):
        run = run_folders.GrowingRun(tmp_path / "runs" / f"seed-{seed}", seed=seed, until=400)
        run.grow(300, every=50)
        found.append(run)
    return found


@pytest.fixture
def page(runs: list[Any], watching: Any, visit: Any) -> Any:
    opened = visit()
    until(opened, "document.querySelector('.plot')?.chart.series.length >= 4")
    return opened


def until(page: Any, true: str) -> None:
    """Wait for an expression; the page's own policy forbids that it polls by itself."""
    end = time.monotonic() + 20
    while not page.evaluate(true):
        assert time.monotonic() < end, f"this did not come true: {true}"
        page.wait_for_timeout(30)


def chart(page: Any, title: str) -> Any:
    figure = page.locator("figure.chart").filter(
        has=page.get_by_role("heading", name=title, exact=True)
    )
    figure.scroll_into_view_if_needed()
    return figure


def series(page: Any, title: str) -> list[dict[str, Any]]:
    """What a chart draws."""
    values = chart(page, title).evaluate(
        "(figure) => figure.chart.series.map(({ label, x, y, low, high, group }) =>"
        " ({ label, group, x: [...x], y: [...y].map(String), low: low && [...low].map(String),"
        " high: high && [...high].map(String) }))"
    )
    return [{**one, "y": [float(text) for text in one["y"]]} for one in values]


def recorded(run: Any, kind: str, name: str) -> dict[int, float]:
    lines = run.folder.metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {one["step"]: one[name] for one in records if one["kind"] == kind}


def drag(page: Any, title: str, begin: float, end: float) -> None:
    box = chart(page, title).locator(".plot").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + begin * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + (begin + end) / 2 * box["width"], y, steps=3)
    page.mouse.move(box["x"] + end * box["width"], y, steps=3)
    page.mouse.up()


def test_sources_and_domains_share_a_chart_each(runs: list[Any], watching: Any, visit: Any) -> None:
    for run in runs:
        run.mix()
    page = visit()
    until(page, "document.querySelector('.plot')?.chart.series.length >= 4")
    for title in ("Loss by source", "Loss by domain"):
        chart(page, title)
        own = "[...document.querySelectorAll('.chart')].find((one) => "
        until(page, f"{own}one.chart.spec.title === '{title}').chart.series.length === 4")
    labels = sorted(f"{run.folder.path.name}, {part}" for run in runs for part in ("code", "web"))
    assert sorted(one["label"] for one in series(page, "Loss by source")) == labels
    domains = series(page, "Loss by domain")
    assert {one["label"].split(", ")[1] for one in domains} == {"news", "proofs"}
    told = recorded(runs[0], "validation", "sets")
    own = next(one for one in domains if one["label"] == f"{runs[0].folder.path.name}, proofs")
    assert own["x"] == list(told)
    assert own["y"] == pytest.approx([one["proofs"]["loss"] for one in told.values()], rel=1e-5)


def test_every_curve_of_a_run_has_a_chart(page: Any) -> None:
    for section in ("System", "Other"):
        page.locator("summary").filter(has_text=section).click()
    titles = page.locator("figure.chart h3").all_inner_texts()
    assert set(titles) >= {
        "Loss", "Validation loss", "Learning rate", "Gradient norm", "Skipped steps", "Throughput",
        "Waited for data", "Waited for others", "Memory", "Perplexity", "hellaswag", "GPU use",
        "GPU temperature", "CPU use", "Free on disk",
    }  # fmt: skip
    assert len(titles) == len(set(titles))


def test_curves_are_what_was_recorded(page: Any, runs: list[Any]) -> None:
    page.locator("#smooth").fill("0")
    until(page, "document.querySelector('.plot').chart.series[0].raw === null")
    for run, label in zip(runs, ("seed-1", "seed-2"), strict=True):
        truth = recorded(run, "step", "loss")
        shown = next(one for one in series(page, "Loss") if one["label"] == label)
        assert shown["x"] == list(truth)
        assert shown["y"] == pytest.approx(list(truth.values()), rel=1e-6)
        checks = recorded(run, "validation", "loss")
        dashed = next(one for one in series(page, "Loss") if one["label"] == f"{label}, validation")
        assert dict(zip(dashed["x"], dashed["y"], strict=True)) == pytest.approx(checks, rel=1e-6)


def test_scores_have_whiskers_of_one_standard_error(page: Any, runs: list[Any]) -> None:
    chart(page, "hellaswag")
    until(
        page,
        "[...document.querySelectorAll('.chart')].some(({ chart }) =>"
        " chart.spec.whiskers && chart.series.length === 2)",
    )
    first, _ = series(page, "hellaswag")
    truth = recorded(runs[0], "evaluation", "value")
    assert first["y"] == pytest.approx(list(truth.values()), rel=1e-6)
    for low, value, high in zip(first["low"], first["y"], first["high"], strict=True):
        assert float(high) - value == pytest.approx(0.0047, abs=1e-5)
        assert value - float(low) == pytest.approx(0.0047, abs=1e-5)


def test_the_crosshair_tells_exact_values_of_all_runs(page: Any, runs: list[Any]) -> None:
    loss = chart(page, "Loss")
    loss.locator(".plot").hover(position={"x": 400, "y": 120})
    tip = loss.locator(".tip")
    expect(tip).to_be_visible()
    step = int(re.search(r"step ([\d,]+)", tip.inner_text())[1].replace(",", ""))
    for run, name in zip(runs, ("seed-1", "seed-2"), strict=True):
        truth = recorded(run, "step", "loss")[step]
        line = tip.locator("div").filter(has=page.get_by_text(name, exact=True))
        assert float(re.search(r"[\d.]+", line.locator("b").inner_text())[0]) == pytest.approx(
            truth, abs=6e-5
        )
    # The same place in every chart.
    places = page.evaluate("document.querySelector('.plot').chart.board.place")
    assert places == step
    page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


@pytest.mark.parametrize(
    ("axis", "last"),
    [("Tokens", 300 * 480 * 1024), ("Time", None), ("FLOPs", 300 * 480 * 1024 * 8.6e8)],
)
def test_the_x_axis_can_be_another(page: Any, runs: list[Any], axis: str, last: Any) -> None:
    page.get_by_role("button", name=axis, exact=True).click()
    until(
        page,
        "document.querySelector('.plot').chart.series[0]?.x.at(-1) !== 300"
        " && document.querySelector('.plot').chart.series.length >= 4",
    )
    shown = series(page, "Loss")
    times = recorded(runs[0], "step", "time")
    began = json.loads(runs[0].folder.metrics.read_text().splitlines()[0])["time"]
    wanted = last or times[300] - began
    assert shown[0]["x"][-1] == pytest.approx(wanted, rel=1e-6)
    expect(page).to_have_url(re.compile("x=(tokens|seconds|flops)"))


def test_dragging_zooms_all_charts_and_a_double_click_goes_back(page: Any) -> None:
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    drag(page, "Loss", 0.3, 0.6)
    expect(page).to_have_url(re.compile(r"from=[\d.]+&to=[\d.]+"))
    expect(page.get_by_role("button", name="Reset zoom")).to_be_visible()
    domains = "[...document.querySelectorAll('.chart')].filter(({ chart }) => chart.frame"
    domains += " && chart.visible).map(({ chart }) => chart.frame.domain.join())"
    until(page, f"new Set({domains}).size === 1")
    low, high = (float(one) for one in page.evaluate(f"{domains}[0]").split(","))
    assert 0 < low < high < 300
    until(page, "document.querySelector('.plot').chart.series.length >= 4")
    assert any('"from":' in text for text in asked)
    chart(page, "Loss").locator(".plot").dblclick()
    expect(page).not_to_have_url(re.compile("from="))
    expect(page.get_by_role("button", name="Reset zoom")).to_be_hidden()


def test_a_long_run_is_zoomed_into_to_its_single_records(
    tmp_path: Path, run_folders: Any, watching: Any, visit: Any
) -> None:
    run = run_folders.GrowingRun(tmp_path / "runs" / "long", until=9000, seed=2)
    run.grow(6000, every=3000)
    page = visit(path="/#from=3000&to=3100&smooth=0")
    until(
        page,
        "(() => { const one = document.querySelector('.plot')?.chart.series[0];"
        " return one && one.low === null && one.x.length >= 100; })()",
    )
    truth = recorded(run, "step", "loss")
    shown = next(one for one in series(page, "Loss") if one["label"] == "long")
    inside = {x: y for x, y in zip(shown["x"], shown["y"], strict=True) if 3000 <= x <= 3100}
    assert list(inside) == list(range(3000, 3101))
    for step, value in inside.items():
        assert value == pytest.approx(truth[int(step)], rel=1e-6)


def test_axes_can_be_logarithmic(page: Any) -> None:
    button = page.get_by_role("button", name="Loss: logarithmic values", exact=True)
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="log x").click()
    expect(page).to_have_url(re.compile("logx=1"))
    until(page, "document.querySelector('.plot').chart.frame.logX")
    frame = chart(page, "Loss").evaluate(
        "({ chart: { frame } }) => [frame.logX, frame.logY, ...frame.domain, ...frame.extent]"
    )
    assert frame[:2] == [True, True] and frame[2] > 0 and frame[4] > 0


def test_smoothing_is_an_exponential_mean(page: Any, runs: list[Any]) -> None:
    page.locator("#smooth").fill("0.9")
    expect(page.locator("output[for=smooth]")).to_have_text("0.90")
    truth = list(recorded(runs[0], "step", "loss").values())
    mean = mass = 0.0
    for value in truth:
        mean, mass = mean * 0.9 + value * 0.1, mass * 0.9 + 0.1
    until(
        page,
        "Math.abs(document.querySelector('.plot').chart.series[0].y.at(-1)"
        f" - {mean / mass}) < 1e-4",
    )


def test_lines_are_drawn_in_the_full_colour_of_their_run(page: Any, watched: Any) -> None:
    watched.expected = ("willReadFrequently",)
    until(page, "document.querySelector('.plot').chart.frame !== undefined")
    solid = """(figure) => {
      const { base, board, series } = figure.chart;
      const wanted = board.paints.of(series[0].colour).match(/\\d+/g).map(Number);
      const { data } = base.getContext("2d").getImageData(0, 0, base.width, base.height);
      let found = 0;
      for (let at = 0; at < data.length; at += 4) {
        found += data[at + 3] > 250 && wanted.every((part, index) => data[at + index] === part);
      }
      return found;
    }"""
    assert chart(page, "Loss").evaluate(solid) > 100


def test_charts_are_filtered_by_a_pattern(page: Any) -> None:
    page.locator("#filter").fill("^gpu|grad")
    expect(page.locator("figure.chart h3").filter(has_text="Learning rate")).to_have_count(0)
    # Sections that match are opened.
    titles = page.locator("figure.chart:visible h3").all_inner_texts()
    assert titles and all(re.search("gpu|grad", title, re.I) for title in titles)
    assert "Gradient norm" in titles and "GPU use" in titles
    page.locator("#filter").fill("no [such")
    expect(page.locator("figure.chart")).to_have_count(0)


def test_runs_are_grouped_over_seeds(page: Any, runs: list[Any]) -> None:
    page.locator("#smooth").fill("0")
    page.locator("#group").focus()
    expect(page.locator("#group option")).to_have_count(3)
    page.locator("#group").select_option("over:train.seed")
    until(page, "document.querySelector('.plot').chart.series[0]?.group")
    (mean,) = series(page, "Loss")
    assert mean["label"] == "all runs (2)"
    both = [recorded(run, "step", "loss") for run in runs]
    index = mean["x"].index(150)
    values = [one[150] for one in both]
    assert mean["y"][index] == pytest.approx(math.fsum(values) / 2, rel=1e-5)
    assert float(mean["low"][index]) == pytest.approx(min(values), rel=1e-5)
    assert float(mean["high"][index]) == pytest.approx(max(values), rel=1e-5)
    page.locator("#group").select_option("by:train.seed")
    until(page, "document.querySelector('.plot').chart.series.length === 2")
    labels = [one["label"] for one in series(page, "Loss")]
    assert labels == ["train.seed = 1 (1)", "train.seed = 2 (1)"]


def test_the_table_of_values_says_what_the_crosshair_shows(page: Any, runs: list[Any]) -> None:
    page.locator("#smooth").fill("0")
    page.locator("#values summary").click()
    plot = chart(page, "Loss").locator(".plot")
    plot.focus()
    page.keyboard.press("Home")
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    expect(page.locator("#values summary")).to_contain_text("step 10")
    heads = page.locator("#values thead th").all_inner_texts()
    assert heads[:2] == ["Run", "Loss"] and "Learning rate" in heads
    rows = page.locator("#values tbody tr")
    for run, name in zip(runs, ("seed-1", "seed-2"), strict=True):
        row = rows.filter(has=page.get_by_text(name, exact=True))
        loss = recorded(run, "step", "loss")[10]
        expect(row.locator("td").first).to_have_text(f"{loss:.4f}")


def test_a_chart_is_used_with_keys(page: Any) -> None:
    plot = chart(page, "Loss").locator(".plot")
    plot.focus()
    page.keyboard.press("End")
    expect(plot).to_have_attribute("aria-valuenow", "300")
    expect(plot).to_have_attribute("aria-valuetext", re.compile(r"^step 300\. seed-1: \d\.\d{4}"))
    page.keyboard.press("ArrowLeft")
    expect(plot).to_have_attribute("aria-valuenow", "299")
    page.keyboard.press("Shift+ArrowLeft")
    expect(plot).to_have_attribute("aria-valuenow", "289")
    page.keyboard.press("+")
    expect(page).to_have_url(re.compile("from="))
    page.keyboard.press("0")
    expect(page).not_to_have_url(re.compile("from="))
    expect(plot).to_have_attribute(
        "aria-label", re.compile(r"^Loss by steps: seed-1 from 1\d\.\d+")
    )


def test_events_and_checkpoints_are_marked(page: Any) -> None:
    until(page, "document.querySelector('.plot').chart.markers.length >= 13")
    kinds = page.evaluate(
        "document.querySelector('.plot').chart.markers.map(({ kind, x }) => `${kind} ${x}`)"
    )
    assert kinds.count("checkpoint 50") == 2
    assert [one for one in kinds if one.startswith("warning")] == ["warning 248"]
    plot = chart(page, "Loss").locator(".plot")
    place = plot.evaluate("({ chart }) => chart.frame.toX(248)")
    plot.hover(position={"x": place, "y": 100})
    expect(chart(page, "Loss").locator(".tip")).to_contain_text("skipped step 248")


def test_only_what_is_seen_is_asked_for(page: Any) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    expect(page.locator("figure.chart h3").filter(has_text="GPU use")).to_have_count(1)
    expect(page.locator("figure.chart").filter(has_text="GPU use")).to_be_hidden()
    page.locator("summary").filter(has_text="System").click()
    chart(page, "GPU use")
    until(
        page,
        "[...document.querySelectorAll('.chart')].some(({ chart }) =>"
        " chart.spec.id === 'system.gpu_use' && chart.series.length === 2)",
    )
    assert any("gpu_use" in text for text in asked)
