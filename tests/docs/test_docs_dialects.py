"""The pages for those who come from other systems name every option."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from gristmill.dialects.table import load_table, table_names

DOCS = Path(__file__).resolve().parents[2] / "docs"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DIALECTS = load("dialects")


def test_every_table_is_on_one_page() -> None:
    shown = [name for names in DIALECTS.PAGES.values() for name in names]
    assert sorted(shown) == table_names()
    pages = [path.read_text(encoding="utf-8") for path in (DOCS / "guides").glob("from-*.md")]
    for marker in DIALECTS.TEXTS:
        assert sum(marker in page for page in pages) == 1


@pytest.mark.parametrize("page", DIALECTS.PAGES)
def test_every_option_is_on_the_page(page: str) -> None:
    pytest.importorskip("mkdocs")
    marker = f"<!-- options of {page} -->"
    text = load("hooks").on_page_markdown(f"# Page\n\n{marker}\n")
    assert "<!--" not in text
    for name in DIALECTS.PAGES[page]:
        dialect = load_table(name)
        for option in (*dialect.options, *(one for row in dialect.families for one in row.names)):
            assert f"`{option}`" in text
    # A cell that ends early would shift the others.
    rows = [line for line in text.splitlines() if line.startswith("| `-")]
    assert {line.replace("\\|", "").count("|") for line in rows} <= {3, 4, 5}
