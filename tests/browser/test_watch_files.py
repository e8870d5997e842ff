"""The files of the live page and of the report, without a browser: nothing from elsewhere, nothing
inline, and scripts that can stand one after the other in the report."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import gristmill
from gristmill.report import page, parts_page, tokens_page

ROOT = Path(gristmill.__file__).parent
SHARED = ROOT / "report" / "pages"
PAGES = (page, tokens_page, parts_page)
FOLDERS = (ROOT / "watch" / "pages", SHARED, ROOT / "web" / "pages")
FILES = [file for folder in FOLDERS for file in sorted(folder.iterdir())]


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


def test_what_is_named_is_there_once() -> None:
    names = Counter(file.name for file in FILES)
    assert set(names.values()) == {1}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r'"static/([\w.]+)"', text)) <= set(names)
        imported = set(re.findall(r'from "\./([\w.]+)"', text))
        assert imported <= set(names)
        if file.parent == SHARED:
            assert imported <= {other.name for other in SHARED.iterdir()}, file.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__)
def test_a_page_has_every_script_after_those_that_it_imports(page: Any) -> None:
    for index, name in enumerate(page.SCRIPTS):
        text = (SHARED / name).read_text(encoding="utf-8")
        assert set(re.findall(r'from "\./([\w.]+)"', text)) <= set(page.SCRIPTS[:index]), name
        # The page has them inline, where these would end the script.
        assert not re.search(r"</script|<!--", text, re.IGNORECASE)


def test_no_file_is_left_over() -> None:
    used = {name for page in PAGES for name in (*page.SCRIPTS, *page.STYLES)}
    assert used == {file.name for file in SHARED.iterdir()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__)
def test_no_two_scripts_of_a_page_have_the_same_names(page: Any) -> None:
    names: Counter[str] = Counter()
    for script in page.SCRIPTS:
        text = (SHARED / script).read_text(encoding="utf-8")
        pattern = r"^(?:export )?(?:async )?(?:function\*?|class|const|let)\s+(\w+)"
        names.update(re.findall(pattern, text, re.MULTILINE))
    assert [name for name, count in names.items() if count > 1] == []


def test_all_scripts_are_asked_for_at_once() -> None:
    """Otherwise a browser learns of each from the one that imports it, one trip after the other."""
    page = (ROOT / "watch" / "pages" / "watch.html").read_text(encoding="utf-8")
    found, wanted = {"watch.js"}, {"watch.js"}
    by_name = {file.name: file for file in FILES}
    while wanted:
        text = by_name[wanted.pop()].read_text(encoding="utf-8")
        new = set(re.findall(r'from "\./([\w.]+)"', text)) - found
        found |= new
        wanted |= new
    preloaded = re.findall(r'<link rel="modulepreload" href="static/([\w.]+)">', page)
    assert sorted(preloaded) == sorted(found - {"watch.js"})
