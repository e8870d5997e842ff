"""Keyboard, screen reader, colours, phone: the live page for everyone."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, run_folders: Any) -> None:
    for number in range(2):
        name = f"mill-{number}-{'w' * 60}" if number else "mill"
        run = run_folders.GrowingRun(tmp_path / "runs" / name, until=400, seed=number)
        run.grow(120, every=40)
        run.account()
        run.processes()
        run.slow_process()


def until(page: Any, true: str) -> None:
    """Wait for an expression; the page's own policy forbids that it polls by itself."""
    end = time.monotonic() + 20
    while not page.evaluate(true):
        assert time.monotonic() < end, f"this did not come true: {true}"
        page.wait_for_timeout(30)


def full(page: Any) -> None:
    until(page, "document.querySelector('.plot')?.chart.series.length >= 4")


def everywhere(page: Any) -> Any:
    """Every view of the page, one after the other."""
    full(page)
    yield "charts"
    page.get_by_role("tab", name="Run").click()
    for part in ("Overview", "Samples", "Events", "Log", "Processes", "Checkpoints", "Settings"):
        page.get_by_role("button", name=part, exact=True).click()
        expect(page.locator(".run-body > *").first).to_be_visible()
        yield part
    page.get_by_role("tab", name="Compare").click()
    expect(page.locator("#compare h2").first).to_be_visible()
    yield "compare"


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_all_controls_have_names(watching: Any, visit: Any, size: str) -> None:
    page = visit(size)
    roles = (
        "button|textbox|combobox|searchbox|spinbutton|radio|checkbox|link|option|dialog|slider|tab"
    )
    nameless = []
    for where in everywhere(page):
        tree = page.locator("body").aria_snapshot()
        found = re.findall(rf"^\s*- (?:{roles})(?: \[[^\]]*\])*:?$", tree, re.MULTILINE)
        nameless += [f"{where}: {one}" for one in found]
    assert nameless == []


def test_landmarks_and_headings(watching: Any, visit: Any) -> None:
    page = visit()
    full(page)
    for role, name in (
        ("banner", None), ("navigation", "Runs"), ("main", None), ("tablist", "View"),
        ("tabpanel", "Charts"), ("heading", "Gristmill watch"), ("heading", "Training"),
        ("list", "Runs"),
    ):  # fmt: skip
        expect(page.get_by_role(role, name=name, exact=True)).to_have_count(1)
    rows = page.locator("#rows li")
    assert rows.first.get_attribute("aria-setsize") == "2"
    # Growing curves must not be read out again and again.
    assert page.locator("#panels [aria-live], #rows [aria-live]").count() == 0


@pytest.mark.parametrize("width", [360, 375, 900, 1280, 1920])
def test_nothing_sticks_out(watching: Any, visit: Any, width: int) -> None:
    page = visit()
    page.set_viewport_size({"width": width, "height": 740})
    for where in everywhere(page):
        for locator in ("body", "main", ".top"):
            wide = "(place) => place.scrollWidth - place.clientWidth"
            assert page.locator(locator).evaluate(wide) <= 0, (where, locator)
    for control in page.locator(".top button:visible").all():
        box = control.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.checkVisibility({ opacityProperty: true }) || element.disabled) continue;
    if (element.closest(":disabled, .unseen, option")) continue;
    const behind = [];
    for (let at = element; at; at = at.parentElement) {
      behind.unshift(getComputedStyle(at).backgroundColor);
    }
    const back = light(rgb(behind));
    const ink = light(rgb([...behind, getComputedStyle(element).color]));
    const ratio = (Math.max(back, ink) + 0.05) / (Math.min(back, ink) + 0.05);
    if (ratio < 4.5) low.push(`${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(watching: Any, visit: Any, scheme: str) -> None:
    page = visit(color_scheme=scheme)
    for where in everywhere(page):
        assert page.evaluate(CONTRAST) == [], where


def test_charts_are_drawn_anew_in_other_colours(watching: Any, visit: Any, watched: Any) -> None:
    watched.expected = ("willReadFrequently",)
    page = visit(color_scheme="light")
    full(page)
    pixels = (
        "[...document.querySelector('.plot canvas').getContext('2d').getImageData(0, 0, 900, 600)"
    )
    pixels += ".data].reduce((sum, value, index) => (sum * 31 + value * (index % 977)) % 1e9, 7)"
    until(page, f"{pixels} !== 7")
    before = page.evaluate(pixels)
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Colours: dark")
    until(page, f"{pixels} !== {before}")


def test_charts_are_sharp_on_any_screen(watching: Any, visit: Any) -> None:
    for factor in (1, 2):
        page = visit(device_scale_factor=factor)
        full(page)
        until(page, "document.querySelector('.plot').chart.frame?.width > 100")
        sizes = page.evaluate(
            "(() => { const { base, plot } = document.querySelector('.plot').chart;"
            " return [base.width / plot.clientWidth, base.height / plot.clientHeight]; })()"
        )
        assert sizes == pytest.approx([factor, factor], rel=0.01)


def test_the_runs_are_a_drawer_on_a_phone(watching: Any, visit: Any) -> None:
    page = visit("narrow")
    full(page)
    drawer, button = page.locator("#runs"), page.locator("#open-runs")
    expect(drawer).to_be_hidden()
    expect(button).to_have_attribute("aria-expanded", "false")
    button.click()
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    expect(button).to_be_focused()
    button.click()
    page.locator("#rows .open").first.click()
    expect(drawer).to_be_hidden()
    expect(page.locator("#run h2")).to_be_visible()


def test_what_a_finger_needs(watching: Any, visit: Any) -> None:
    page = visit("narrow", is_mobile=True)
    full(page)
    for control in page.locator(".top button:visible, .controls button:visible").all():
        assert control.bounding_box()["height"] >= 34
    plot = page.locator(".plot").first
    box = plot.bounding_box()
    page.touchscreen.tap(box["x"] + 150, box["y"] + 80)
    until(page, "document.querySelector('.plot').chart.board.place !== null")


def test_help_tells_the_keys(watching: Any, visit: Any) -> None:
    page = visit()
    page.locator("#open-help").click()
    expect(page.get_by_role("dialog", name="Help")).to_contain_text("from run to run")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("Tab")
    page.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()


def test_tabs_with_arrow_keys(watching: Any, visit: Any) -> None:
    page = visit()
    full(page)
    page.get_by_role("tab", name="Charts").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Run")).to_be_focused()
    expect(page.get_by_role("tab", name="Run")).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("tabpanel", name="Charts")).to_be_visible()
