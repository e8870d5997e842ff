"""The files of the pages, without a browser: nothing from elsewhere, nothing inline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gristmill

PACKAGE = Path(gristmill.__file__).parent
FILES = sorted(file for room in ("serve", "web") for file in (PACKAGE / room / "pages").iterdir())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_fetched_from_elsewhere(file: Path) -> None:
    text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://|//cdn|@import", text) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_inline_and_nothing_parses_markup(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".html":
        assert re.findall(r"<script>|<style|\sstyle=|\son\w+=", text) == []
    parsers = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|Function\("
    )
    assert re.findall(parsers, text) == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_are_small(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 520


def test_what_is_named_is_there() -> None:
    names = {file.name for file in FILES}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r'"static/([\w.]+)"', text)) <= names
        assert set(re.findall(r'from "\./([\w.]+)"', text)) <= names
