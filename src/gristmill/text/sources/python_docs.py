"""English text that every Python carries: a corpus for the demo that needs no network.

    pydoc_data.topics          the chapters of the language reference that `help()` shows
    the standard library       the docstrings of every module, class and function, module by module

About two megabytes of technical English, different in each Python version. Files are parsed, never
imported. They are sorted, then shuffled with a fixed seed. Repeated docstrings are taken once, and
tests are left out.
"""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from gristmill.text.sources.source import Document

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SEED = 1337


def python_documents() -> list[Document]:
    """The documentation of this Python."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(root.rglob("*.py"))
    files = [path for path in paths if _SKIPPED.isdisjoint(path.relative_to(root).parts)]
    seen: set[str] = set()
    documents = []
    for name in sorted(topics):
        text = topics[name].strip() + "\n"
        if text not in seen:
            seen.add(text)
            documents.append(Document(text, origin=f"pydoc_data.topics:{name}"))
    documents += _docstrings(files, root=root, seen=seen)
    random.Random(_SEED).shuffle(documents)
    return documents


def _docstrings(files: list[Path], *, root: Path, seen: set[str]) -> Iterator[Document]:
    for path in files:
        with warnings.catch_warnings():
            # Old sources hold escapes that newer Pythons warn about.
            warnings.simplefilter("ignore")
            module = ast.parse(path.read_bytes(), filename=str(path))
        texts = []
        for node in (module, *_definitions(module)):
            text = ast.get_docstring(node)
            if text and text not in seen:
                seen.add(text)
                texts.append(text)
        if texts:
            origin = f"{path.relative_to(root).as_posix()}:1"
            yield Document("\n\n".join(texts) + "\n", origin)


def _definitions(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """The classes and functions below a node, in the order they are written."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        # Expressions hold no definitions, and are most of the tree.
        if isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions(child)
