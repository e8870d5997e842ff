"""The page of a preparation in parts in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.report.parts_page import write_parts_page

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect
STATES = ["done", "running", "interrupted", "failed", "missing"]


@pytest.fixture
def server() -> str:
    """The page is a file and asks nobody."""
    return "file:///"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    parts = [
        {"part": number + 1, "state": STATES[number % 5], "documents": number,
         "tokens": 10 * number, "text_bytes": 40 * number,
         "what": "a <b>file</b> is damaged" if number == 3 else None,
         "log": "tokens/" + 20 * "long-name-" + ".log"}
        for number in range(1000)
    ]  # fmt: skip
    progress = {"bytes_done": 30, "bytes_total": 120, "new_text_bytes": 5 << 20, "seconds": 2.0,
                "seconds_left": 75.0}  # fmt: skip
    content = {
        "name": "tokens/crawl", "doing": "Parts are running.", "complete": False, "parts": parts,
        "progress": progress, "again": None,
        "events": [("2026-01-01 00:00:00", "part 4/1000 lags")],
    }  # fmt: skip
    write_parts_page(content, tmp_path / "parts.html")
    return tmp_path / "parts.html"


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_all_parts_are_there(file: Path, visit: Any, size: str) -> None:
    page = visit(size, path=f"{file}", ready=False)
    expect(page.locator(".tile").filter(has_text="Parts")).to_contain_text("200 of 1,000")
    expect(page.locator(".tile").filter(has_text="Left")).to_contain_text("1m 15s")
    squares = page.get_by_role("img", name="200 done, 200 running, 200 interrupted")
    assert squares.locator("i").count() == 1000
    first = page.get_by_role("region", name="Not done yet").locator("tbody tr").first
    expect(first).to_contain_text("a <b>file</b> is damaged")
    expect(page.get_by_role("region", name="What happened")).to_contain_text("part 4/1000 lags")
    assert page.evaluate("document.body.scrollWidth - document.body.clientWidth") <= 0
