"""Where the wall time of a run went."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.track import account as module
from gristmill.track.account import PARTS, WallAccount, read_run_time


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        # Only of this module: a server of other tests would sleep until then.
        fake = SimpleNamespace(time=lambda: self.unix, monotonic=lambda: self.now)
        monkeypatch.setattr(module, "time", fake)

    @property
    def unix(self) -> float:
        return 1_700_000_000.0 + self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def train(account: WallAccount, clock: Clock, steps: int, *, from_step: int = 0) -> None:
    """Steps of two seconds, of which the device computes half and updates a quarter."""
    account.phase("steps")
    for step in range(from_step + 1, from_step + steps + 1):
        clock.pass_by(2.0)
        account.add_step({"compute": 1.0, "optimizer": 0.5, "communication": 0.25, "data": 0.25})
        account.note(step)


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_parts_add_up_to_the_wall_time(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    account = WallAccount(path, began=clock.unix - 5)
    clock.pass_by(4)
    account.begin(0)
    account.phase("validation")
    clock.pass_by(3)
    train(account, clock, 10)
    account.phase("save")
    clock.pass_by(1)
    account.phase("end")
    clock.pass_by(2)
    account.write(10, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.wall == pytest.approx(5 + 4 + 3 + 20 + 1 + 2)
    assert found.parts == pytest.approx(
        {
            "compute": 10,
            "optimizer": 5,
            "communication": 2.5,
            "data": 2.5,
            "start": 9,
            "validation": 3,
            "save": 3,
        }
    )
    assert sum(found.parts.values()) == pytest.approx(found.wall)
    assert found.goodput == pytest.approx(17.5 / 35)
    assert [name for name, _, _ in found.table()][:2] == [PARTS["compute"], PARTS["start"]]


def test_the_host_divides_its_time_as_the_device_measured(clock: Clock, tmp_path: Path) -> None:
    """The device lags behind the host, and its clock may differ from it."""
    account = WallAccount(tmp_path / "time.jsonl", began=clock.unix)
    account.phase("steps")
    clock.pass_by(12)
    account.add_step({"compute": 3.0, "optimizer": 1.0})
    assert account.parts() == pytest.approx({"start": 0, "compute": 9, "optimizer": 3})


def test_only_saves_and_the_last_line_stay(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    account = WallAccount(path, began=clock.unix)
    account.begin(0)
    train(account, clock, 100)
    assert [line["step"] for line in written(path)] == [0, 96]
    account.note(100, keep=True)
    train(account, clock, 100, from_step=100)
    assert [line["step"] for line in written(path)] == [0, 100, 196]
    account.write(200, end="stopped")
    assert [line["step"] for line in written(path)] == [0, 100, 200]


def killed_and_resumed(path: Path, clock: Clock, *, save: int, end: int, down: float) -> None:
    """A run that is killed at step `end`, and goes on from step `save`."""
    first = WallAccount(path, began=clock.unix)
    first.begin(0)
    train(first, clock, save)
    first.note(save, keep=True)
    train(first, clock, end - save, from_step=save)
    first.write(end)
    clock.pass_by(down)
    second = WallAccount(path, began=clock.unix)
    clock.pass_by(7)
    second.begin(save)
    train(second, clock, 10, from_step=save)
    second.write(save + 10, end="done")


def test_steps_after_the_checkpoint_are_lost(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    killed_and_resumed(path, clock, save=20, end=35, down=60)
    found = read_run_time(path)
    assert found is not None
    assert found.parts["lost"] == pytest.approx(15 * 2)
    assert found.parts["compute"] == pytest.approx(20 + 10)
    assert (found.parts["down"], found.parts["restart"]) == pytest.approx((60, 7))
    assert found.wall == pytest.approx(70 + 60 + 7 + 20)
    assert found.goodput == pytest.approx(30 * 1.75 / found.wall)
    assert found.attempts == 2


@given(
    save=st.integers(0, 30),
    more=st.integers(0, 30),
    down=st.floats(0, 1e6, allow_nan=False),
)
def test_whatever_happens_the_parts_add_up(save: int, more: int, down: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        import tempfile

        clock = Clock(patch)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "time.jsonl"
            began = clock.unix
            killed_and_resumed(path, clock, save=save, end=save + more, down=down)
            found = read_run_time(path)
    assert found is not None
    assert found.wall == pytest.approx(clock.unix - began, rel=1e-6, abs=0.02)
    assert sum(found.parts.values()) == pytest.approx(found.wall)
    assert found.parts.get("lost", 0.0) == pytest.approx(2 * more, abs=0.02)
    assert all(seconds > 0 for seconds in found.parts.values())


def test_a_checkpoint_between_two_lines(clock: Clock, tmp_path: Path) -> None:
    """Going back to a step that no line was written for: in proportion."""
    path = tmp_path / "time.jsonl"
    first = WallAccount(path, began=clock.unix)
    first.begin(0)
    train(first, clock, 40)
    first.write(40)
    second = WallAccount(path, began=clock.unix)
    second.begin(10)
    second.write(10, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.parts["lost"] == pytest.approx(60, abs=0.1)


def test_going_back_in_one_process(clock: Clock, tmp_path: Path) -> None:
    """A rollback is an attempt of the same process, and its energy is not counted twice."""
    path = tmp_path / "time.jsonl"
    account = WallAccount(path, began=clock.unix)
    account.joules = lambda: 1000 * clock.now
    account.begin(0)
    train(account, clock, 20)
    account.note(20, keep=True)
    train(account, clock, 10, from_step=20)
    account.note(30, keep=True)
    clock.pass_by(5)
    account.begin(20)
    train(account, clock, 30, from_step=20)
    account.write(50, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.wall == pytest.approx(60 + 5 + 60)
    assert found.parts["lost"] == pytest.approx(20)
    assert found.parts["restart"] == pytest.approx(5)
    assert "down" not in found.parts
    assert found.kwh == pytest.approx(1000 * clock.now / 3.6e6)


def test_energy_of_several_processes_is_added(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    for joules in (7.2e6, 3.6e6):
        account = WallAccount(path, began=clock.unix)
        account.joules = lambda: 0.0
        account.begin(0)
        account.joules = lambda joules=joules: joules
        clock.pass_by(1)
        account.write(0, end="stopped")
    found = read_run_time(path)
    assert found is not None and found.kwh == pytest.approx(3.0)


def test_a_run_that_was_stopped_on_purpose_was_not_down(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    first = WallAccount(path, began=clock.unix)
    first.begin(0)
    train(first, clock, 5)
    first.write(5, end="stopped")
    clock.pass_by(3 * 86400)
    second = WallAccount(path, began=clock.unix)
    second.begin(5)
    train(second, clock, 5, from_step=5)
    second.write(10, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.wall == pytest.approx(20)
    assert "down" not in found.parts


def test_jobs_wait_in_the_queue(clock: Clock, tmp_path: Path) -> None:
    """A first job since it was submitted; the next of a chain since the one before ended."""
    path, submitted = tmp_path / "time.jsonl", clock.unix
    clock.pass_by(100)
    first = WallAccount(path, began=clock.unix, queued=submitted)
    first.begin(0)
    train(first, clock, 5)
    first.write(5, end="stopped")
    clock.pass_by(40)
    second = WallAccount(path, began=clock.unix, queued=submitted)
    second.begin(5)
    second.write(5, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.parts["queue"] == pytest.approx(140)
    assert found.wall == pytest.approx(150)


def test_another_process_leads_meanwhile(clock: Clock, tmp_path: Path) -> None:
    """What it wrote counts, and no second is counted twice."""
    path = tmp_path / "time.jsonl"
    waiting = WallAccount(path, began=clock.unix)
    leader = WallAccount(path, began=clock.unix)
    leader.begin(0)
    train(leader, clock, 20)
    leader.write(20)
    clock.pass_by(6)
    waiting.begin(20)
    train(waiting, clock, 10, from_step=20)
    waiting.write(30, end="done")
    found = read_run_time(path)
    assert found is not None
    assert found.wall == pytest.approx(40 + 6 + 20)
    assert "lost" not in found.parts


def test_damaged_lines_are_left_out(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "time.jsonl"
    account = WallAccount(path, began=clock.unix)
    account.begin(0)
    train(account, clock, 5)
    account.write(5, keep=True)
    whole = read_run_time(path)
    bad = [
        b'{"began": "x"}',
        b"\xff\xfe",
        b"[]",
        b"3",
        b'{"began": 1, "first": 0, "step": 1, "parts": {"start": "nan"}}',
        b'{"began": 1, "first": 0, "step": 1, "parts": {"start": -4}}',
        b'{"began": 1e999, "first": 0, "step": 1, "parts": {}}',
        b'{"began": 17',
    ]
    path.write_bytes(b"\n".join([*bad[:4], path.read_bytes().strip(), *bad[4:]]))
    assert read_run_time(path) == whole
    # The next line goes behind the last complete one.
    account.write(6, keep=True)
    last = written_after_damage(path)
    assert last["step"] == 6


def written_after_damage(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes().splitlines()[-1]))


def test_no_account(tmp_path: Path) -> None:
    assert read_run_time(tmp_path / "time.jsonl") is None
    (tmp_path / "time.jsonl").write_text("\n")
    assert read_run_time(tmp_path / "time.jsonl") is None


def test_a_disk_that_refuses_costs_nothing(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "gone" / "time.jsonl"
    account = WallAccount(path, began=clock.unix)
    account.begin(0)
    train(account, clock, 10)
    account.write(10, end="done")
    assert not path.exists()
    path.parent.mkdir()
    account.write(10, end="done")
    found = read_run_time(path)
    assert found is not None and math.isclose(found.wall, 20)
