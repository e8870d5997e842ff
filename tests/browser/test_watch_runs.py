"""The list of runs, the address, and one run with all that is known of it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


@pytest.fixture
def runs(tmp_path: Path, run_folders: Any) -> list[Any]:
    """Three runs: one goes on, one is done, one failed."""
    found = []
    for number, lr in enumerate((3e-4, 6e-4, 1e-3)):
        run = run_folders.GrowingRun(tmp_path / "runs" / f"mill-{number}", lr=lr, until=400)
        run.grow(200 + 100 * number, every=50)
        run.account()
        found.append(run)
    found[0].processes(lost=3)
    found[0].slow_process()
    found[1].state("done")
    found[2].state("failed", reason="the disk is full")
    return found


@pytest.fixture
def page(runs: list[Any], watching: Any, visit: Any) -> Any:
    opened = visit()
    expect(row(opened, "mill-0")).to_contain_text("200 / 400")
    expect(opened.locator("#rows li")).to_have_count(3)
    until(opened, "document.querySelector('.plot')?.chart.series.length === 6")
    return opened


def until(page: Any, true: str) -> None:
    """Wait for an expression; the page's own policy forbids that it polls by itself."""
    end = time.monotonic() + 20
    while not page.evaluate(true):
        assert time.monotonic() < end, f"this did not come true: {true}"
        page.wait_for_timeout(30)


def row(page: Any, name: str) -> Any:
    return page.locator("#rows li").filter(has=page.get_by_text(name, exact=True))


def names(page: Any) -> list[str]:
    return list(page.locator("#rows .name").all_inner_texts())


def drawn(page: Any) -> set[str]:
    """The runs that the first chart shows."""
    labels = page.evaluate("document.querySelector('.plot').chart.series.map(({ label }) => label)")
    return {label.partition(",")[0] for label in labels}


def test_rows_tell_state_progress_and_speed(page: Any) -> None:
    expect(row(page, "mill-0")).to_contain_text("running")
    expect(row(page, "mill-0")).to_contain_text(
        re.compile(r"left · 20\dk tok/s · goodput 8\d\.\d%")
    )
    expect(row(page, "mill-1").locator(".state")).to_have_text("done")
    expect(row(page, "mill-2")).to_contain_text("the disk is full")
    expect(page.locator("#run-count")).to_have_text("3, 3 shown")


def test_runs_are_searched_by_name_and_by_setting(page: Any) -> None:
    page.locator("#search").fill("mill-1")
    expect(page.locator("#rows li")).to_have_count(1)
    expect(page.locator("#run-count")).to_have_text("1 of 3, 3 shown")
    page.locator("#search").fill("lr=0.0006")
    expect(page.locator("#rows .name")).to_have_text(["mill-1"])
    page.locator("#search").fill("failed")
    expect(page.locator("#rows .name")).to_have_text(["mill-2"])
    page.get_by_role("button", name="Show these").click()
    until(page, "document.querySelector('.plot').chart.series.length === 2")
    assert drawn(page) == {"mill-2"}
    page.locator("#search").fill("")
    page.get_by_role("button", name="Reset", exact=True).click()
    until(page, "document.querySelector('.plot').chart.series.length === 6")


def test_runs_are_sorted_and_pinned(page: Any) -> None:
    page.locator("#sort").select_option("loss")
    expect(page.locator("#rows .name")).to_have_text(["mill-2", "mill-1", "mill-0"])
    row(page, "mill-0").hover()
    page.get_by_role("button", name="Pin mill-0").click()
    expect(page.locator("#rows .name")).to_have_text(["mill-0", "mill-2", "mill-1"])
    page.reload()
    expect(page.locator("#rows .name")).to_have_text(["mill-0", "mill-2", "mill-1"])


def test_runs_are_hidden_and_shown(page: Any) -> None:
    page.get_by_role("checkbox", name="Show mill-1").uncheck()
    until(page, "document.querySelector('.plot').chart.series.length === 4")
    assert drawn(page) == {"mill-0", "mill-2"}
    page.get_by_role("button", name="Hide all").click()
    expect(page.get_by_role("heading", name="No run is shown")).to_be_visible()
    page.get_by_role("button", name="Show the newest").click()
    until(page, "document.querySelector('.plot').chart.series.length === 6")


def test_a_run_has_the_colour_that_is_chosen(page: Any) -> None:
    page.get_by_label("Colour of mill-0").evaluate(
        "(field) => { field.value = '#123456'; field.dispatchEvent(new Event('change')); }"
    )
    until(
        page,
        "document.querySelector('.plot').chart.series.every(({ colour, label }) =>"
        " (colour === '#123456') === label.startsWith('mill-0'))",
    )
    expect(page).to_have_url(re.compile("colours=[0-9a-f]{12}:123456"))


def test_the_list_with_the_keyboard(page: Any) -> None:
    page.locator("#sort").select_option("name")
    page.keyboard.press("Escape")
    page.locator("#main").focus()
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("ArrowDown")
    focused = "document.activeElement.closest('li')?.querySelector('.name').textContent"
    until(page, f"{focused} === 'mill-0'")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    until(page, f"{focused} === 'mill-2'")
    page.keyboard.press(" ")
    expect(page.get_by_role("checkbox", name="Show mill-2")).not_to_be_checked()
    expect(page.locator("#said")).to_have_text("mill-2 hidden")
    page.keyboard.press("Home")
    page.keyboard.press("o")
    until(page, "document.querySelector('.plot').chart.series.length === 2")
    assert drawn(page) == {"mill-0"}
    page.keyboard.press("p")
    expect(row(page, "mill-0").locator(".pin")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Enter")
    expect(page.get_by_role("tab", name="Run")).to_have_attribute("aria-selected", "true")


def test_a_link_shows_the_same_view_and_back_works(page: Any, visit: Any) -> None:
    page.get_by_role("button", name="Tokens", exact=True).click()
    page.get_by_role("checkbox", name="Show mill-1").uncheck()
    page.locator("#smooth").fill("0.2")
    page.locator("#filter").fill("loss")
    page.locator("#sort").select_option("name")
    expect(page).to_have_url(re.compile("filter=loss"))
    other = visit(path="/" + page.url.partition("/#")[2].join(["#", ""]))
    until(other, "document.querySelector('.plot')?.chart.series.length === 4")
    assert drawn(other) == {"mill-0", "mill-2"}
    expect(other.locator("#smooth")).to_have_value("0.2")
    expect(other.locator("#filter")).to_have_value("loss")
    expect(other.locator("#sort")).to_have_value("name")
    expect(other.get_by_role("button", name="Tokens")).to_have_attribute("aria-pressed", "true")
    heights = "document.querySelector('.plot').chart.frame.domain[1]"
    until(other, f"{heights} === {400 * 480 * 1024}")
    row(page, "mill-0").locator(".open").click()
    expect(page.locator("#run h2")).to_contain_text("mill-0")
    page.get_by_role("button", name="Log", exact=True).click()
    expect(page.locator(".logged")).to_contain_text("started mill-0 on 4 devices")
    page.go_back()
    expect(page.locator(".logged")).to_have_count(0)
    expect(page.locator("#run h2")).to_be_visible()
    page.go_back()
    expect(page.locator("#panels")).to_be_visible()
    expect(page.get_by_role("checkbox", name="Show mill-1")).not_to_be_checked()
    page.go_back()
    expect(page.get_by_role("checkbox", name="Show mill-1")).to_be_checked()


def test_an_address_that_makes_no_sense_shows_the_usual(
    runs: list[Any], visit: Any, watching: Any
) -> None:
    page = visit(
        path="/#tab=nonsense&x=%00&smooth=9&from=5&to=1&colours=a:b&log=,&group=by:no.such"
    )
    until(page, "document.querySelector('.plot')?.chart.series.length > 0")
    expect(page.get_by_role("tab", name="Charts")).to_have_attribute("aria-selected", "true")


def test_one_run_with_all_that_is_known_of_it(page: Any) -> None:
    row(page, "mill-0").locator(".open").click()
    expect(page.locator(".run-head")).to_contain_text("NVIDIA H200")
    expect(page.locator(".run-head")).to_contain_text("200 of 400 steps")
    body = page.locator(".run-body")
    expect(body.locator(".tile").filter(has_text="Goodput")).to_contain_text(
        re.compile(r"8\d\.\d%")
    )
    shares = body.locator(".account tbody td:last-child").all_inner_texts()
    assert sum(float(text.strip("%")) for text in shares) == pytest.approx(100, abs=0.6)
    expect(body.locator(".account")).to_contain_text("Steps lost to interruptions")
    expect(body.get_by_role("region", name="Slow processes")).to_contain_text("31%")
    page.get_by_role("button", name="Samples", exact=True).click()
    expect(body.locator(".sample")).to_have_count(2)
    # What a model writes is text.
    expect(body.locator(".sample").last).to_contain_text("</script><img src=x onerror=")
    expect(body.locator("output")).to_have_text("step 200, the newest")
    body.locator("input[type=range]").fill("0")
    expect(body.locator("output")).to_have_text("step 50")
    expect(body.locator(".sample").first).to_contain_text("the the, of and")
    body.get_by_role("button", name="Newest").click()
    expect(body.locator("output")).to_have_text("step 200, the newest")
    page.get_by_role("button", name="Events", exact=True).click()
    expect(body.locator("tbody tr")).to_have_count(5)
    page.get_by_role("button", name="Warnings and errors").click()
    expect(body.locator("tbody tr")).to_have_count(0)
    page.get_by_role("button", name="Processes", exact=True).click()
    expect(body.locator("tbody tr")).to_have_count(5)
    lost = body.locator("tr.differs")
    expect(lost).to_contain_text("lost")
    expect(lost).to_contain_text("1m 4s")
    page.get_by_role("button", name="Checkpoints", exact=True).click()
    expect(body.locator("tbody tr")).to_have_count(4)
    expect(body.locator("tbody tr").first).to_contain_text("200")
    page.get_by_role("button", name="Settings", exact=True).click()
    expect(body.locator("pre")).to_contain_text("lr = 0.0003")
    assert page.title() == "mill-0 · Gristmill watch"
    page.get_by_role("button", name="Show only this run").click()
    until(page, "document.querySelector('.plot').chart.series.length === 2")
    assert drawn(page) == {"mill-0"}


def test_runs_are_compared(page: Any) -> None:
    page.get_by_role("tab", name="Compare").click()
    results = page.get_by_role("region", name="Results")
    expect(results.locator("tbody tr")).to_have_count(3)
    expect(results.locator("tbody tr").last.locator(".best").first).to_be_visible()
    differing = page.get_by_role("region", name="Settings that differ")
    expect(differing.locator("thead th")).to_have_text(["Run", "optim.lr"])
    expect(differing.locator("tbody td")).to_have_text(["0.0003", "0.0006", "0.001"])
    expect(page.locator(".account")).to_have_count(3)
    page.get_by_role("checkbox", name="Show mill-1").uncheck()
    expect(differing.locator("tbody td")).to_have_text(["0.0003", "0.001"])


def test_a_thousand_runs_stay_usable(tmp_path: Path, watching: Any, visit: Any) -> None:
    stamp = {"samples": 1, "tokens": 1}
    for number in range(1000):
        folder = tmp_path / "runs" / f"many-{number:04d}"
        folder.mkdir()
        (folder / "run.toml").write_text(f"[optim]\nlr = {number}\n")
        lines = [
            json.dumps({"kind": "event", "step": step, "time": 1e9 + number, **stamp, "text": "x"})
            for step in (1, 2)
        ]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = visit(path="/#sort=name")
    expect(page.locator("#run-count")).to_have_text("1,000, 100 shown", timeout=60_000)
    assert page.locator("#rows li").count() < 60
    page.locator("#list").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    expect(row(page, "many-0999")).to_be_visible()
    assert page.locator("#rows li").count() < 60
    page.locator("#search").fill("many-0500")
    expect(page.locator("#rows .name")).to_have_text(["many-0500"])
    page.locator("#search").fill("lr=777")
    expect(page.locator("#rows .name")).to_have_text(["many-0777"])
