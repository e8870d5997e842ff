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


def test_a_model_is_evaluated_and_exported(written: Path, gristmill: Gristmill) -> None:
    done = gristmill("evaluate", "runs/small")
    assert done.returncode == 0, done.stderr
    done = gristmill("export", "runs/small", "exported", "--check", "files")
    assert done.returncode == 0, done.stderr
    assert gristmill("generate", "exported", "mill", "--tokens", "3").returncode == 0


def test_settings_are_read_and_a_sample_is_traced(written: Path, gristmill: Gristmill) -> None:
    assert gristmill("config", "runs/small").returncode == 0
    done = gristmill("tokens", "which", "runs/small", "--step", "3")
    assert done.returncode == 0 and "text.jsonl:" in done.stdout, done.stderr


def test_what_a_newer_version_wrote_is_refused_by_name(written: Path, gristmill: Gristmill) -> None:
    """A run file with a setting that is not known here, and a token set of another version."""
    file = written / "runs/small/run.toml"
    version = file.read_text(encoding="utf-8").split()[3].strip(";")
    text = file.read_text(encoding="utf-8").replace(version, "99.1.0", 1)
    assert "# by gristmill 99.1.0;" in text
    file.write_text(text.replace("[train]", "[train]\nfancy = 3"), encoding="utf-8")
    done = gristmill("train", "runs/small")
    assert done.returncode == 78
    assert "train.fancy: there is no such setting" in done.stderr
    assert "gristmill 99.1.0 wrote this run file" in done.stderr
    manifest = written / "tokens/mill.json"
    table = json.loads(manifest.read_text(encoding="utf-8")) | {"version": 9}
    manifest.write_text(json.dumps(table), encoding="utf-8")
    done = gristmill("tokens", "inspect", "tokens/mill")
    assert done.returncode == 65 and "has version 9" in done.stderr


def test_a_copy_of_a_run_is_a_run_of_its_own(written: Path, gristmill: Gristmill) -> None:
    before = lines(written, "step")
    shutil.copytree("runs/small", "copied")
    done = gristmill("train", "copied", "train.until=8 steps")
    assert done.returncode == 0, done.stderr
    assert lines(written, "step") == before
    assert (written / "copied/checkpoints/step-00000008").is_dir()
