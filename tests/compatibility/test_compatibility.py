"""What released versions wrote is opened by this one: token sets, runs, checkpoints, records.

Each folder beside this file has what one version wrote (`write.py`).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VERSIONS = sorted(path.name for path in HERE.iterdir() if (path / "runs").is_dir())
Gristmill = Callable[..., Any]


@pytest.fixture(params=VERSIONS)
def written(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    folder = tmp_path / "old"
    shutil.copytree(HERE / request.param, folder)
    monkeypatch.chdir(folder)
    return folder


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / "runs/small/metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_there_is_one_of_this_version() -> None:
    from gristmill.tokens.format import program_version

    assert program_version().split()[1] in VERSIONS, "run tests/compatibility/write.py"


def test_a_token_set_is_intact(written: Path, gristmill: Gristmill) -> None:
    assert gristmill("tokens", "verify", "tokens/mill").returncode == 0
    assert gristmill("tokens", "inspect", "tokens/mill").returncode == 0
    found = gristmill("tokens", "find", "stone", "tokens/mill")
    assert found.returncode == 0, found.stderr


def test_a_run_goes_on(written: Path, gristmill: Gristmill) -> None:
    before = lines(written, "step")
    done = gristmill("train", "runs/small/run.toml", "train.until=9 steps")
    assert done.returncode == 0, done.stderr
    assert "resuming from step-00000006" in done.stderr + done.stdout
    after = lines(written, "step")
    assert after[: len(before)] == before
    assert [line["step"] for line in after] == list(range(1, 10))
    assert after[-1]["loss"] < before[0]["loss"]


def test_a_model_is_the_same(written: Path, gristmill: Gristmill) -> None:
    """Its loss on the windows that the run validated on, up to rounding."""
    expected = lines(written, "validation")[-1]["loss"]
    settings = ("train.until=6 steps", "validate.windows=8", "name=again", "train.seed=8")
    done = gristmill("train", "small.toml", *settings, "model.start=runs/small")
    assert done.returncode == 0, done.stderr
    (first, *_) = [
        json.loads(line)["loss"]
        for line in Path("runs/again/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        if json.loads(line)["kind"] == "validation"
    ]
    assert math.isclose(first, expected, rel_tol=1e-5)
    assert gristmill("generate", "runs/small", "mill", "--tokens", "3").returncode == 0


def test_a_run_is_reported(written: Path, gristmill: Gristmill) -> None:
    assert gristmill("report", "runs/small").returncode == 0
    assert "small" in (written / "runs/small/report.html").read_text(encoding="utf-8")
