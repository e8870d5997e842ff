"""Comparison with files that are changed on purpose only."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
UPDATE = "GRISTMILL_UPDATE_GOLDEN"


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with a file of this folder, or rewrites the file if that is asked for."""

    def compare(name: str, text: str) -> None:
        path = FOLDER / name
        if os.environ.get(UPDATE) == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {name}; to make it: {UPDATE}=1 pytest tests/golden"
        expected = path.read_text(encoding="utf-8").splitlines()
        found = text.splitlines()
        lost = [f"- {line}" for line in expected if line not in found]
        new = [f"+ {line}" for line in found if line not in expected]
        assert expected == found, "\n".join(
            [
                f"{name} differs:",
                *(lost + new or ["only the order of the lines"]),
                f"if this is meant, run {UPDATE}=1 pytest tests/golden and commit the change",
            ]
        )

    return compare
