"""Hooks of MkDocs: the generated pages join the others, and tables fill their markers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

METRICS = "<!-- metrics tables -->"


def _generate() -> ModuleType:
    """`docs/generate.py`, which is no package and stands on no search path."""
    file = Path(__file__).with_name("generate.py")
    spec = importlib.util.spec_from_file_location("gristmill_docs_generate", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made from the program."""
    for path, make in _generate().PAGES.items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables of the records where a page asks for them."""
    if METRICS not in markdown:
        return markdown
    return markdown.replace(METRICS, _generate().metrics_tables())
