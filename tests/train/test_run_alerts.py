"""Runs that tell somebody: real commands, and what is left of them in the log."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord, SystemRecord
from gristmill.train.run import Run
from gristmill.train.validation import Validate

MakeRun = Callable[..., RunConfig]
SHORT = 'train.until="6 steps"'
QUIET = "alert.disk_below=false"


def telling(path: Path) -> str:
    """A command that appends the facts to a file, in one piece."""
    code = f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read())"
    return f"alert.command={json.dumps([sys.executable, '-c', code])}"


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def said(folder: Path) -> list[tuple[str, str]]:
    records = read_metrics(folder / "metrics.jsonl")
    return [(one.level, one.text) for one in records if isinstance(one, EventRecord)]


def test_a_run_tells_that_it_is_done(run_text: Callable[..., str], tmp_path: Path) -> None:
    """As on the command line, with a rule that holds from the start besides."""
    file, output = tmp_path / "run.toml", tmp_path / "told"
    file.write_text(run_text())
    command = [sys.executable, "-m", "gristmill", "train", str(file), SHORT, telling(output),
               'alert.disk_below="1000000 TB"']  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = {one["rule"]: one for one in told(output)}
    assert sorted(facts) == ["disk_below", "done"]
    assert (facts["done"]["run"], facts["done"]["step"], facts["done"]["steps"]) == ("tiny", 6, 6)
    assert facts["done"]["folder"] == str(tmp_path / "run")
    assert 0 < facts["done"]["loss"] < 10
    assert facts["done"]["message"].startswith("done at step 6 after ")
    log = said(tmp_path / "run")
    for rule in facts:
        assert ("info", f"alert.command was told of the alert {rule}") in log
    # Nothing is new: nobody is told again.
    output.unlink()
    again = subprocess.run([*command[:-1], QUIET], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert told(output) == []


def test_a_run_tells_that_it_failed(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Validate, event: Any) -> None:
        raise UserError("the mill is broken")

    monkeypatch.setattr(Validate, "act", fail)
    with pytest.raises(UserError, match="the mill is broken"):
        Run(make_run(telling(tmp_path / "told"), QUIET)).train()
    (facts,) = told(tmp_path / "told")
    assert (facts["rule"], facts["message"], facts["step"]) == ("failed", "the mill is broken", 4)


def test_a_run_tells_that_it_diverged(make_run: MakeRun, tmp_path: Path) -> None:
    settings = ("optim.lr=1e30", "train.bad_steps=3", 'train.until="30 steps"', "train.clip=0.0")
    with pytest.raises(UserError, match="the run has diverged"):
        Run(make_run(*settings, telling(tmp_path / "told"), QUIET)).train()
    (facts,) = told(tmp_path / "told")
    assert facts["rule"] == "diverged"
    json.dumps(facts, allow_nan=False)


def test_a_command_that_fails_costs_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    outcome = Run(make_run(SHORT, 'alert.command="exit 3"', QUIET)).train()
    assert outcome.exit is Exit.DONE
    warning = "alert.command could not be told of the alert done: it ended with status 3"
    assert ("warning", warning) in said(tmp_path / "run")


def test_a_run_without_its_address_does_not_start(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRISTMILL_TEST_HOOK", raising=False)
    with pytest.raises(UserError, match="the environment variable GRISTMILL_TEST_HOOK"):
        Run(make_run(SHORT, 'alert.url="env:GRISTMILL_TEST_HOOK"')).train()


def systems(folder: Path) -> list[SystemRecord]:
    records = read_metrics(folder / "metrics.jsonl")
    return [record for record in records if isinstance(record, SystemRecord)]


def test_the_host_is_recorded(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(self: Validate, event: Any) -> None:
        deadline = time.monotonic() + 60
        while not systems(tmp_path / "run") and time.monotonic() < deadline:
            time.sleep(0.05)

    monkeypatch.setattr(Validate, "act", wait)
    Run(make_run(SHORT, 'track.system="1s"')).train()
    record = systems(tmp_path / "run")[0]
    assert record.gpus == 0
    assert record.ram_bytes is not None
    assert "system" not in (tmp_path / "run/train.log").read_text()


def test_the_host_is_not_recorded(make_run: MakeRun, tmp_path: Path) -> None:
    Run(make_run('train.until="200 steps"', "track.system=false")).train()
    assert not systems(tmp_path / "run")


def test_services_do_not_learn_whom_a_run_tells(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> SimpleNamespace:
        asked.append(options)
        return SimpleNamespace(id="x", log=lambda values, step: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init))
    address = 'alert.url="http://user:secret@127.0.0.1:9/hook"'
    rules = [f"alert.{rule}=false" for rule in ("done", "disk_below", "no_progress")]
    Run(make_run(SHORT, 'track.trackio.project="mill"', address, *rules)).train()
    (options,) = asked
    assert (options["project"], options["name"]) == ("mill", "tiny")
    assert options["config"]["train"]["until"] == "6 steps"
    assert "secret" not in repr(options)
    files = ("train.log", "metrics.jsonl", "status.json", "environment.json")
    assert all("secret" not in (tmp_path / "run" / name).read_text() for name in files)
