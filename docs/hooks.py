"""Hooks of MkDocs: the generated pages join the others, and tables fill their markers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

TEXTS = {
    "<!-- metrics tables -->": ("generate", "metrics_tables"),
    "<!-- topology tables -->": ("topologies", "topology_tables"),
}
"""What a page may ask for: the script and the function that make it."""


def _script(name: str) -> ModuleType:
    """A script of `docs/`, which is no package and stands on no search path."""
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"gristmill_docs_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made from the program."""
    made = _script("generate")
    for path, make in made.PAGES.items():
        files.append(File.generated(config, path, content=make()))
    for path, content in (
        ("llms.txt", made.page_index(config)),
        ("run-file.schema.json", made.schema_file()),
    ):
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Let the search list guides before decisions and the log."""
    if page.file.src_uri.startswith(("decisions/", "log")):
        page.meta.setdefault("search", {"boost": 0.5})
    return html


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables made from the program where a page asks for them."""
    for marker, (script, function) in TEXTS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, getattr(_script(script), function)())
    if "<!-- options of " in markdown:
        for marker, make in _script("dialects").TEXTS.items():
            markdown = markdown.replace(marker, make())
    return markdown
