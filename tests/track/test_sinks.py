"""Sinks: lines for people, files that grow, remote loggers, and failures that stay small."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.track.metrics import read_metrics
from gristmill.track.records import (
    EvaluationRecord,
    EventRecord,
    Record,
    SampleRecord,
    StepRecord,
    StragglerRecord,
    SystemRecord,
    ValidationRecord,
)
from gristmill.track.services import TensorBoardSink, TrackioSink, WandbSink, wandb_mode
from gristmill.track.sinks import (
    EtaEstimator,
    Guarded,
    Horizon,
    JsonlSink,
    LogSink,
    line,
    scalars,
)
from gristmill.train.tracker import Tracker

STEP = StepRecord(
    step=1200,
    samples=9600,
    tokens=9830400,
    time=1_700_000_000.5,
    loss=3.21449,
    lr=6e-4,
    grad_norm=0.5118,
    tokens_per_second=51_234.0,
    step_seconds=0.16,
    tflops=12.34,
    tflops_causal=11.2,
    mfu=0.4119,
    mfu_causal=0.39,
    memory_bytes=3_328_599_654,
)
VALIDATION = ValidationRecord(
    step=1200,
    samples=9600,
    tokens=9830400,
    time=1.7e9,
    loss=3.3,
    perplexity=27.1126,
    windows=64,
    seconds=3.14,
    best=True,
)
SAMPLE = SampleRecord(
    step=1200, samples=1, tokens=1, time=1.7e9, prompt="Once", text=' upon\na "time" [bold]\x1b[2J'
)
EVENT = EventRecord(
    step=1200, samples=1, tokens=1, time=1.7e9, level="warning", text="slow network"
)
SYSTEM = SystemRecord(
    step=1200, samples=1, tokens=1, time=1.7e9, host="n7", cpu_use=0.25, gpus=8,
    gpu_throttled="power",
)  # fmt: skip
STRAGGLER = StragglerRecord(
    step=1200, samples=1, tokens=1, time=1.7e9, rank=3, host="n7", phase="data", ratio=1.314,
    seconds=0.0042, cause="slow storage",
)  # fmt: skip


class Kept:
    """A sink that keeps records and what was asked of it, and fails on demand."""

    def __init__(self, fails: str = "") -> None:
        self.records: list[Record] = []
        self.calls: list[str] = []
        self.fails = fails

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise ConnectionError("no route to host")

    def write(self, record: Record) -> None:
        self._call("write")
        self.records.append(record)

    def flush(self) -> None:
        self._call("flush")

    def close(self) -> None:
        self._call("close")


def test_a_step_in_one_line() -> None:
    assert line(STEP, horizon_steps=5000, seconds_left=723) == (
        "step 1200/5000 | loss 3.2145 | lr 6.00e-04 | grad 0.512 | 51.2k tok/s | 12.3 TFLOP/s | "
        "mfu 41.2% | mem 3.1 GiB | eta 12m03s"
    )


def test_parts_that_do_not_matter_are_left_out() -> None:
    bare = line(replace(STEP, mfu=None, memory_bytes=None))
    assert bare.endswith("12.3 TFLOP/s")
    assert bare.startswith("step 1200 |")
    troubled = line(replace(STEP, loss_scale=65536.0, skipped=3, nan=1, loss=float("nan")))
    assert troubled.endswith("scale 65536 | skipped 3 | nan 1")
    assert "loss nan" in troubled


def test_waiting_is_told_of_where_it_costs() -> None:
    waits = replace(STEP, data_wait=0.004, sync_wait=0.04)
    assert "| mfu 41.2% | data 2% | sync 25% | mem" in line(waits)
    assert waits.compute == pytest.approx(0.116)
    assert "data" not in line(replace(STEP, data_wait=0.001, sync_wait=0.0))
    # A host that ran ahead of its device wrote more than there is; files keep that.
    assert "| data 100% |" in line(replace(STEP, data_wait=2.7 * STEP.step_seconds))
    assert "sync" not in line(replace(STEP, step_seconds=0.0, sync_wait=0.0))
    assert scalars(waits)["speed/compute"] == waits.compute


def test_a_name_cannot_forge_a_line_or_move_the_cursor() -> None:
    hostile = EvaluationRecord(
        step=1, samples=1, tokens=1, time=0.0, name="x\x1b[2J\nerror: forged", metric="acc\r\x07",
        value=0.5, stderr=None, items=3, seconds=1.0,
    )  # fmt: skip
    shown = line(hostile)
    assert shown.isprintable()
    assert shown.startswith("x\\x1b[2J\\nerror: forged at step 1 | acc\\r\\x07 0.5000 |")


def test_how_busy_a_host_is_is_a_curve_and_no_line(tmp_path: Path) -> None:
    assert line(SYSTEM) is None
    assert scalars(SYSTEM) == {"system/n7/cpu_use": 0.25, "system/n7/gpus": 8}
    log = LogSink(tmp_path / "train.log", horizon=Horizon(5000, 40000))
    for record in (SYSTEM, EVENT):
        log.write(record)
    log.close()
    assert len((tmp_path / "train.log").read_text().splitlines()) == 1


def test_a_slow_process_is_a_warning() -> None:
    slow = "rank 3 on n7 is 31% slower than the median at data (4.2 ms per step)"
    assert line(STRAGGLER) == f"warning: {slow}: slow storage"
    assert line(replace(STRAGGLER, cause=None)) == f"warning: {slow}"
    over = line(replace(STRAGGLER, over=True))
    assert over == "info: rank 3 on n7 keeps up with the others again at data"
    link = line(replace(STRAGGLER, phase="link", ratio=121.4, cause="its network link is slow"))
    late = "rank 3 on n7 is answered 121 times as late as the median: its network link is slow"
    assert link == f"warning: {late}"
    hostile = line(replace(STRAGGLER, host="\x1b[2J", phase="a\nb", cause="c\rd", seconds=90.0))
    assert hostile is not None
    assert hostile.isprintable()
    assert "(1m30s per step)" in hostile
    assert scalars(STRAGGLER) == {}


def test_exchanges_are_told_of_where_there_are_any() -> None:
    gossip = replace(STEP, sent_bytes=3 * 2**30, mixing=1.0)
    assert "| sent 3 GiB | mem" in line(gossip)
    assert "| sent 3 GiB | mixing 0.25 | mem" in line(replace(gossip, mixing=0.25))
    assert scalars(gossip)["exchange/sent_bytes"] == 3 * 2**30
    assert scalars(gossip)["exchange/mixing"] == 1.0
    assert not any(name.startswith("exchange") for name in scalars(STEP))
    apart = replace(VALIDATION, consensus_distance=0.00123)
    assert "in 3.1s | workers 0.12% from their average | best so far" in line(apart)
    assert scalars(apart)["validation/consensus_distance"] == 0.00123
    assert "validation/consensus_distance" not in scalars(VALIDATION)


def test_every_kind_of_record_is_one_line_without_control_characters() -> None:
    assert line(VALIDATION) == (
        "validation at step 1200 | loss 3.3000 | perplexity 27.113 | 64 windows in 3.1s | "
        "best so far"
    )
    assert line(EVENT) == "warning: slow network"
    assert line(SAMPLE) == (
        r'sample at step 1200 | "Once" -> " upon\na \"time\" [bold]' + "\N{REPLACEMENT CHARACTER}"
        '[2J"'
    )


def test_time_left_follows_the_clock_between_steps() -> None:
    eta = EtaEstimator(Horizon(steps=25, samples=100))
    first = replace(STEP, samples=10, tokens=1000, tokens_per_second=200.0)
    assert eta.seconds_left(replace(first, time=0.0)) == 45.0
    assert eta.seconds_left(replace(first, samples=20, time=20.0)) == 160.0
    assert eta.seconds_left(replace(first, samples=120, time=90.0)) == 0.0


def test_time_left_knows_that_later_steps_are_larger() -> None:
    """Ten steps of 4 samples, then ten of 8: a sample takes a second throughout."""
    eta = EtaEstimator(Horizon(steps=20, samples=120))
    for step in range(1, 11):
        record = replace(STEP, step=step, samples=4 * step, time=4.0 * step, step_seconds=4.0)
        left = eta.seconds_left(replace(record, tokens=400 * step, tokens_per_second=100.0))
        assert left == pytest.approx(120 - 4 * step)


def test_metrics_grow_over_sinks_and_are_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(path)
    first.write(STEP)
    assert read_metrics(path) == [STEP]
    first.close()
    second = JsonlSink(path)
    strange = replace(SAMPLE, prompt="\udc80", text="žluť \u2028")
    second.write(strange)
    second.close()
    assert read_metrics(path) == [STEP, strange]


def test_the_log_has_time_and_time_left(tmp_path: Path) -> None:
    sink = LogSink(tmp_path / "train.log", horizon=Horizon(1300, 10_400))
    sink.write(STEP)
    sink.write(EVENT)
    sink.close()
    first, second = (tmp_path / "train.log").read_text().splitlines()
    when, text = first.split(" ", 1)
    assert datetime.fromisoformat(when).timestamp() == int(STEP.time)
    assert text == line(STEP, horizon_steps=1300, seconds_left=800 * 1024 / 51_234)
    assert second.endswith(" warning: slow network")


@pytest.mark.parametrize("fails", ["write", "flush", "close"])
def test_a_failing_sink_gives_one_warning_and_is_silent(fails: str) -> None:
    inner, reports = Kept(fails), Kept()
    sink = Guarded(inner, name="W&B", report=reports.write)
    for _ in range(2):
        sink.write(STEP)
        sink.flush()
    sink.close()
    sink.write(STEP)
    (warning,) = reports.records
    assert isinstance(warning, EventRecord)
    assert (warning.level, warning.step, warning.tokens) == ("warning", 1200, STEP.tokens)
    assert "W&B" in warning.text
    assert "no route to host" in warning.text
    assert inner.calls.count(fails) == 1
    assert inner.calls[-1] == "close"


def test_a_full_disk_does_not_stop_the_others() -> None:
    kept = Kept()
    sinks: list[Guarded | Kept] = []
    tracker = Tracker([], clock=Progress)
    for path in (Path("/dev/full"), Path("/dev/full")):
        sinks.append(
            Guarded(JsonlSink(path), name="metrics", report=lambda event: tracker.write(event))
        )
    tracker = Tracker([*sinks, kept], clock=Progress)
    for _ in range(3):
        tracker.write(STEP)
    tracker.flush()
    tracker.close()
    warnings = [record for record in kept.records if isinstance(record, EventRecord)]
    assert len(warnings) == 2
    assert kept.records.count(STEP) == 3
    assert all("No space left" in warning.text for warning in warnings)


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def at_step(step: int) -> StepRecord:
    return replace(STEP, step=step)


def texts(records: Sequence[Record]) -> list[str]:
    return [record.text for record in records if isinstance(record, EventRecord)]


def test_records_are_written_when_there_is_room_again(tmp_path: Path) -> None:
    """The disk is full in the middle of a line."""
    path, told = tmp_path / "metrics.jsonl", Kept()
    sink = Guarded(JsonlSink(path), name="metrics.jsonl", report=told.write, keep=100)
    sink.write(at_step(1))
    with disk_full_at(path.stat().st_size + 50):
        for step in range(2, 40):
            sink.write(at_step(step))
            sink.flush()
        assert read_metrics(path) == [at_step(1)] and path.read_bytes().endswith(b"\n")
    sink.write(at_step(40))
    sink.close()
    *steps, told_late = read_metrics(path)
    assert steps == [at_step(step) for step in range(1, 41)]
    first, second = texts(told.records)
    assert "metrics.jsonl cannot be written (OSError: [Errno 27] File too large)" in first
    assert second == "metrics.jsonl can be written again: 39 records were written late"
    assert texts([told_late]) == [second]


def test_what_does_not_fit_into_memory_is_counted(tmp_path: Path) -> None:
    path, told = tmp_path / "train.log", Kept()
    log = LogSink(path, horizon=Horizon(100, 100))
    sink = Guarded(log, name="train.log", report=told.write, keep=10)
    with disk_full_at(0):
        for step in range(1, 31):
            sink.write(at_step(step))
    sink.flush()
    *steps, last = path.read_text().splitlines()
    assert [one.split(" | ")[0].split()[-1] for one in steps] == [f"{n}/100" for n in range(21, 31)]
    (lost,) = texts(told.records)[1:]
    assert lost.endswith("10 records were written late, and 20 older ones are lost")
    assert last.endswith(f"warning: {lost}")


def test_what_could_not_be_written_to_the_end_is_told(tmp_path: Path) -> None:
    told = Kept()
    sink = Guarded(JsonlSink(tmp_path / "m"), name="m", report=told.write, keep=10)
    with disk_full_at(0):
        for step in range(1, 31):
            sink.write(at_step(step))
        sink.close()
    assert texts(told.records)[-1] == "30 records could not be written to m"


def test_trouble_while_closing_still_reaches_the_sinks_before() -> None:
    first, order = Kept(), []
    guarded = Guarded(Kept("close"), name="W&B", report=lambda e: order.append(list(first.calls)))
    Tracker([first, guarded], clock=Progress).close()
    assert order == [[]]
    assert first.calls == ["close"]


def test_closing_all_survives_one_that_fails() -> None:
    sinks = [Kept(), Kept("close"), Kept()]
    with pytest.raises(ConnectionError):
        Tracker(sinks, clock=Progress).close()
    assert [sink.calls for sink in sinks] == [["close"]] * 3


def read_events(folder: Path) -> dict[str, dict[int, object]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    found: dict[str, dict[int, object]] = {}
    for tag in accumulator.Tags()["scalars"]:
        found[tag] = {event.step: event.value for event in accumulator.Scalars(tag)}
    for tag in accumulator.Tags()["tensors"]:
        for event in accumulator.Tensors(tag):
            found.setdefault(tag, {})[event.step] = event.tensor_proto.string_val[0].decode()
    return found


def test_tensorboard_shows_numbers_texts_and_a_resumed_run_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = TensorBoardSink(tmp_path)
    for step in (1, 2, 3):
        first.write(replace(STEP, step=step, loss=float(step), loss_scale=None))
    first.flush()
    first.close()
    second = TensorBoardSink(tmp_path)
    second.write(replace(STEP, step=2, loss=20.0))
    second.write(replace(VALIDATION, step=2))
    second.write(replace(SAMPLE, step=2))
    second.write(replace(EVENT, step=2))
    second.close()
    found = read_events(tmp_path)
    assert found["train/loss"] == {1: 1.0, 2: 20.0}
    assert found["validation/loss"] == {2: pytest.approx(3.3)}
    assert "train/loss_scale" not in found
    assert found["sample"] == {2: '    Once upon\n    a "time" [bold]\x1b[2J'}
    assert found["warning"] == {2: "    slow network"}


def test_tracking_needs_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    program = (
        "import sys, pathlib, gristmill.track.console\n"
        "from gristmill.track.services import TensorBoardSink\n"
        f"TensorBoardSink(pathlib.Path({str(tmp_path)!r})).close()\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
def test_wandb_offline_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = WandbSink(
        tmp_path,
        project="tests",
        name="first",
        mode="offline",
        settings={"optim": {"lr": 6e-4}},
        run_id="abc123",
    )
    assert not (tmp_path / "wandb").exists()
    for record in (STEP, VALIDATION, SAMPLE, EVENT):
        sink.write(record)
    sink.flush()
    sink.close()
    # W&B's own process may still be writing; the end of a process waits for it, as this does.
    wandb.teardown()
    (written,) = tmp_path.glob("wandb/offline-run-*-abc123/run-abc123.wandb")
    content = written.read_bytes()
    assert b"train/loss" in content
    assert b"validation/perplexity" in content


class StandInWandb:
    """Notes what W&B is asked for."""

    def __init__(self, *, logged_in: bool = True) -> None:
        self.logged_in = logged_in
        self.asked: dict[str, object] = {}

    def login(self, **options: object) -> bool:
        return self.logged_in

    def init(self, **options: object) -> StandInWandb:
        self.asked = options
        return self

    def log(self, values: object, step: int) -> None:
        """Nothing is sent."""


def wandb_sink(folder: Path, mode: Any = "online") -> WandbSink:
    return WandbSink(folder, project="p", name="n", mode=mode, settings={}, run_id="i")


def test_variables_of_wandb_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = {"dir": "WANDB_DIR", "project": "WANDB_PROJECT", "name": "WANDB_NAME",
             "id": "WANDB_RUN_ID"}  # fmt: skip
    for name in names.values():
        monkeypatch.delenv(name, raising=False)
    wandb_sink(tmp_path).write(STEP)
    ours = {"dir": str(tmp_path), "project": "p", "name": "n", "id": "i"}
    assert {key: wandb.asked[key] for key in ours} == ours
    for key, name in names.items():
        monkeypatch.setenv(name, "x")
        wandb_sink(tmp_path).write(STEP)
        # What W&B is not told, it takes from the variable.
        assert wandb.asked.keys() & ours.keys() == ours.keys() - {key}
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("variable", "mode"),
    [(None, "online"), ("", "online"), ("offline", "offline"), ("dryrun", "offline"),
     ("disabled", "disabled")],
)  # fmt: skip
def test_the_mode_of_wandb(
    variable: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    assert wandb_mode("online") == mode


def test_a_mode_that_wandb_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "of\x1bline")
    with pytest.raises(UserError, match=r"environment WANDB_MODE: 'of\ufffdline' is no mode"):
        wandb_mode("online")


def test_who_is_not_logged_in_is_told_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", StandInWandb(logged_in=False))
    with pytest.raises(UserError, match=r'track\.wandb\.mode = "offline"'):
        wandb_sink(tmp_path)
    wandb_sink(tmp_path, "offline")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"gristmill\[wandb\]"):
        WandbSink(tmp_path, project="p", name="n", mode="offline", settings={}, run_id="i")


class StandInTrackio:
    """Notes what trackio is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.finished = 0
        self.id = "a1b2"

    def init(self, **options: Any) -> StandInTrackio:
        print("* Trackio project initialized")
        self.asked.append(options)
        return self

    def Markdown(self, text: str) -> tuple[str, str]:
        return ("markdown", text)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((values, step))

    def finish(self) -> None:
        print("* Run finished")
        self.finished += 1


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> StandInTrackio:
    trackio = StandInTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    return trackio


def trackio_sink(folder: Path, **options: Any) -> TrackioSink:
    return TrackioSink(folder, project="mill", name="tiny", settings={"a": 1}, **options)


def test_trackio_gets_the_numbers(
    trackio: StandInTrackio, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = trackio_sink(tmp_path)
    assert not trackio.asked
    for record in (STEP, VALIDATION, SYSTEM, STRAGGLER, EVENT, replace(SAMPLE, text="a ```` b")):
        sink.write(record)
    sink.flush()
    sink.close()
    (options,) = trackio.asked
    assert {name: options[name] for name in ("project", "name", "space_id", "config")} == {
        "project": "mill", "name": "tiny", "space_id": None, "config": {"a": 1},
    }  # fmt: skip
    assert (options["auto_log_cpu"], options["auto_log_gpu"]) == (False, False)
    steps, validation, busy, sample = (values for values, _ in trackio.logged)
    assert steps["train/loss"] == STEP.loss
    assert validation["validation/loss"] == VALIDATION.loss
    assert busy == scalars(SYSTEM)
    fence = "`" * 7
    assert sample == {"sample": ("markdown", f"{fence}\nOncea ```` b\n{fence}")}
    assert {step for _, step in trackio.logged} == {1200}
    assert trackio.finished == 1
    # What scripts read from a run's output stays as it is.
    assert capsys.readouterr().out == ""


def test_a_run_in_trackio_is_continued(trackio: StandInTrackio, tmp_path: Path) -> None:
    for _ in range(2):
        sink = trackio_sink(tmp_path, space="me/curves")
        sink.write(STEP)
        sink.close()
    assert [options["resume"] for options in trackio.asked] == ["never", "allow"]
    assert trackio.asked[0]["space_id"] == "me/curves"
    # Another run of this name is not the same.
    (tmp_path / "other").mkdir()
    trackio_sink(tmp_path / "other").write(STEP)
    assert trackio.asked[-1]["resume"] == "never"


def test_a_run_without_records_is_not_in_trackio(trackio: StandInTrackio, tmp_path: Path) -> None:
    trackio_sink(tmp_path).close()
    assert not trackio.asked
    assert not trackio.finished


def test_trackio_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"gristmill\[trackio\]"):
        trackio_sink(tmp_path)
