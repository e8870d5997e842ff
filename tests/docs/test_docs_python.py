"""The programs of the guide for Python run as they are printed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/guides/python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_programs_of_the_guide_run(
    run_text: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tour.toml").write_text(run_text("tour"))
    names: dict[str, Any] = {}
    assert len(BLOCKS) == 3
    for block in BLOCKS:
        exec(compile(block, "guides/python.md", "exec"), names)
    assert names["validated"].record.loss == names["validated"].recorded.loss
    assert len(names["losses"]) == names["outcome"].step
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert capsys.readouterr().out.rstrip()
