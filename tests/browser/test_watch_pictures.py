"""The pictures of the guide on watching runs, made from the page itself.

    GRISTMILL_PICTURES=docs/images pytest tests/browser/test_watch_pictures.py

Without the variable, they are made all the same and thrown away.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect

pytestmark = pytest.mark.usefixtures("watching")


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, run_folders: Any) -> None:
    run_folders.write_example(tmp_path / "runs")


@pytest.fixture
def watching_options() -> dict[str, Any]:
    return {"control": True}


@pytest.fixture
def keep(tmp_path: Path) -> Any:
    """Take a picture of what is seen."""
    folder = Path(os.environ.get("GRISTMILL_PICTURES", tmp_path))

    def kept(page: Any, name: str) -> None:
        page.wait_for_timeout(300)
        file = folder / f"{name}.png"
        page.screenshot(path=file, animations="disabled")
        assert file.read_bytes()[:4] == b"\x89PNG"

    return kept


def open_page(visit: Any, size: str, width: int, height: int, view: str, **how: Any) -> Any:
    page = visit(size, path=f"/#{view}", **how)
    page.set_viewport_size({"width": width, "height": height})
    # Read whole, so that a picture is the same each time.
    expect(page.locator("#rows li")).to_have_count(6)
    expect(page.locator("#rows .reading")).to_have_count(0)
    return page


def drawn(page: Any, series: int) -> None:
    """Wait until the first chart shows so many curves."""
    count = "document.querySelector('.plot')?.chart.series.length"
    end = time.monotonic() + 20
    while page.evaluate(count) != series:
        assert time.monotonic() < end, page.evaluate(count)
        page.wait_for_timeout(50)


def test_the_charts_wide_and_light(visit: Any, keep: Any) -> None:
    page = open_page(visit, "wide", 1360, 860, "x=tokens&sort=name", color_scheme="light")
    drawn(page, 12)
    page.locator(".plot").first.hover(position={"x": 460, "y": 190})
    expect(page.locator(".tip").first).to_be_visible()
    keep(page, "watch-charts")


def test_groups_wide_and_dark(visit: Any, keep: Any) -> None:
    view = "group=over:train.seed&sort=loss&filter=^loss|validation|hellaswag"
    page = open_page(visit, "wide", 1360, 760, view, color_scheme="dark")
    drawn(page, 3)
    page.locator(".plot").first.hover(position={"x": 520, "y": 150})
    expect(page.locator(".tip").first).to_be_visible()
    keep(page, "watch-groups")


def test_one_run_wide_and_light(visit: Any, keep: Any, watching: Any) -> None:
    view = f"token={watching.token}&sort=name"
    page = open_page(visit, "wide", 1360, 900, view, color_scheme="light")
    page.locator("#rows .open").first.click()
    expect(page.locator(".account")).to_be_visible()
    # Where the tests run is of no interest.
    folder = page.locator(".run-head .mono")
    folder.evaluate(
        "(place) => { place.textContent = place.textContent.replace(/^.*[/]runs/, 'runs'); }"
    )
    keep(page, "watch-run")


def test_a_phone(visit: Any, keep: Any) -> None:
    page = open_page(visit, "narrow", 375, 740, "sort=name", color_scheme="dark")
    drawn(page, 12)
    keep(page, "watch-phone")
