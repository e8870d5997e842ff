"""`prepare --page`: how far all parts are, as a page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app


def content_of(file: Path) -> Any:
    found = re.search(r'<script id="data"[^>]*>(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture(autouse=True)
def _texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    for number in range(3):
        lines = (json.dumps({"text": f"text {number} {line}"}) for line in range(40))
        Path(f"in/{number}.jsonl").write_text("\n".join(lines) + "\n")


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["prepare", *words])


def test_the_page_of_parts_that_somebody_runs(tmp_path: Path) -> None:
    words = ["in", "-t", "bytes", "-o", "tokens/set"]
    assert invoke(*words, "--part", "2/3").exit_code == 0
    shown = invoke("-o", "tokens/set", "--status", "--page", "parts.html")
    assert shown.exit_code == Exit.STOPPED
    content = content_of(Path("parts.html"))
    assert [part["state"] for part in content["parts"]] == ["missing", "done", "missing"]
    assert content["parts"][1]["documents"] == 40
    assert (content["complete"], content["again"]) == (False, None)


def test_the_page_while_an_engine_runs_them(tmp_path: Path) -> None:
    words = ["in", "-t", "bytes", "-o", "tokens/set", "--parts", "3", "--engine", "local"]
    done = invoke(*words, "--page", "pages/parts.html")
    assert done.exit_code == 0, done.output
    content = content_of(Path("pages/parts.html"))
    assert content["complete"]
    assert content["again"] is None
    assert [part["documents"] for part in content["parts"]] == [40, 40, 40]
    assert {part["state"] for part in content["parts"]} == {"done"}
    assert content["events"][-1][1] == "3 parts"
    # A later look finds the parts merged and gone, and keeps the page.
    assert invoke("-o", "tokens/set", "--status", "--page", "pages/parts.html").exit_code == 0
    assert content_of(Path("pages/parts.html")) == content


def test_an_error_is_on_the_page(tmp_path: Path) -> None:
    Path("in/1.jsonl").write_text('{"text": "fine"}\nnonsense\n')
    words = ["in", "-t", "bytes", "-o", "tokens/set", "--parts", "3", "--engine", "local"]
    failed = invoke(*words, "--strict", "--page", "parts.html")
    assert isinstance(failed.exception, UserError)
    content = content_of(Path("parts.html"))
    assert content["doing"] == "Stopped by an error."
    assert "failed" in {part["state"] for part in content["parts"]}
    assert content["again"] is None


def test_a_page_needs_parts() -> None:
    refused = invoke("in", "-t", "bytes", "-o", "tokens/set", "--page", "parts.html")
    assert isinstance(refused.exception, UserError)
    assert "add --engine, or --status" in str(refused.exception)
    assert not Path("parts.html").exists()
