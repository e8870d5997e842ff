"""The demo's corpus: enough English, in one order, without tests and without repetition."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from gristmill.text.sources import python_docs
from gristmill.text.sources.python_docs import python_documents

MODULE = '''"""The module."""
class A:
    """The class."""
    try:
        x = 1
    except ValueError:
        def f(self):
            r"""First \\d line.

            Indented line.
            """
    async def g(self): "The method."
def undocumented(): pass
def copy(): """The class."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of a few files."""
    for name in ("b/tests/t.py", "test/t.py", "site-packages/t.py", "b/idle_test/t.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('"""Left out."""')
    (tmp_path / "a.py").write_text(MODULE)
    (tmp_path / "b" / "again.py").write_text('"""The module."""\n')
    (tmp_path / "b" / "latin.py").write_bytes(b'# coding: latin-1\n"""Caf\xe9 \\d."""\n')
    (tmp_path / "empty.py").write_text("")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(python_docs, "topics", {"two": "Same.\n", "one": "Same.\n"})
    return tmp_path


@pytest.mark.usefixtures("library")
def test_docstrings_are_cleaned_in_order_and_taken_once() -> None:
    found = {document.origin: document.text for document in python_documents()}
    assert found == {
        "pydoc_data.topics:one": "Same.\n",
        "a.py:1": "The module.\n\nThe class.\n\nFirst \\d line.\n\nIndented line.\n\nThe method.\n",
        "b/latin.py:1": "Café \\d.\n",
    }


def test_the_order_is_mixed_and_the_same_every_time(library: Path) -> None:
    for n in range(20):
        (library / f"m{n:02}.py").write_text(f'"""Module {n}."""')
    origins = [document.origin for document in python_documents()]
    assert origins != sorted(origins)
    assert [document.origin for document in python_documents()] == origins


@pytest.mark.slow
def test_this_python_carries_enough_english() -> None:
    documents = python_documents()
    texts = {document.origin: document.text for document in documents}
    assert len(texts) == len(documents) > 300
    assert 1.5e6 < sum(map(len, texts.values())) < 4e6
    assert "Join two or more pathname components" in texts["posixpath.py:1"]
    assert "def join(" not in texts["posixpath.py:1"]
    assert "Lambda expressions" in texts["pydoc_data.topics:lambda"]
    assert "unittest/case.py:1" in texts
    assert not [origin for origin in texts if origin.startswith("test/")]
