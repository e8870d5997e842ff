"""The page of a token set in a browser: one file that draws itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.report.tokens_page import write_tokens_page
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.statistics import token_statistics
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

expect = pytest.importorskip("playwright.sync_api", reason="make test-browser installs it").expect


@pytest.fixture
def server() -> str:
    """The page is a file and asks nobody."""
    return "file:///"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    texts = [f"the mill number {n} by the river turns <b>bold</b>" for n in range(40)]
    lines = [json.dumps({"text": text}) for text in [*texts, *texts[:4]]]
    long = tmp_path / ("a-very-long-name-of-a-source-" * 6 + ".jsonl")
    long.write_text("\n".join([*lines, "nonsense"]) + "\n")
    prepare(PrepareRequest([str(long)], tmp_path / "set", ByteTokenizer(), workers=1))
    return write_tokens_page(token_statistics(tmp_path / "set"), tmp_path / "set.html")


@pytest.mark.parametrize("size", ["wide", "narrow"])
def test_everything_of_a_set_is_there(file: Path, visit: Any, size: str) -> None:
    page = visit(size, path=f"{file}", ready=False)
    headings = set(page.get_by_role("heading").all_inner_texts())
    assert {"Lengths", "Sources", "Languages", "Most common phrases", "Dropped",
            "Some documents", "Three words"} <= headings  # fmt: skip
    expect(page.locator(".tile").filter(has_text="Copies")).to_contain_text("4 documents")
    expect(page.get_by_role("region", name="Reasons")).to_contain_text("invalid json")
    page.locator("summary").first.click()
    expect(page.locator("details pre").first).to_contain_text("turns <b>bold</b>")
    assert page.locator("main b").count() == 0
    assert page.evaluate("document.body.scrollWidth - document.body.clientWidth") <= 0


def test_the_theme_can_be_switched(file: Path, visit: Any) -> None:
    page = visit("wide", path=f"{file}", ready=False)
    before = page.evaluate("document.documentElement.dataset.theme")
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate("document.documentElement.dataset.theme") != before
