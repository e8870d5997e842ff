"""Alerts: which rule tells what and when, and how commands and addresses are told."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.track import AlertConfig
from gristmill.track.alerts import (
    Alerts,
    Command,
    DeliveryError,
    StallTimer,
    Webhook,
    build_targets,
)
from gristmill.track.records import StepRecord, StragglerRecord
from gristmill.train.tracker import Tracker

FACTS = {"rule": "done", "text": "mini on n7: done", "message": "done\nreally", "step": 12,
         "loss": None}  # fmt: skip
LONG = 60.0
"""Seconds that a test waits for what takes a moment."""


class Notebook:
    """A target that notes what it is told, or fails."""

    name = "the notebook"

    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.error = error

    def tell(self, facts: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(facts)

    @property
    def rules(self) -> list[str]:
        return [facts["rule"] for facts in self.told]


class Log:
    """What a run logs, and its progress."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.progress = Progress(12, 48, 1152)

    def say(self, text: str, level: str) -> None:
        self.lines.append((level, text))


def alerts_of(folder: Path, *targets: Any, log: Log | None = None, **settings: Any) -> Alerts:
    log = log or Log()
    given = {"command": "true", "no_progress": False, "disk_below": False, **settings}
    alerts = Alerts(
        AlertConfig(**given), targets, run="mini", folder=folder, steps=100, tick=0.01, look=0.01
    )
    alerts.attach(say=log.say, progress=lambda: log.progress)
    return alerts


def step(loss: float, number: int = 12) -> StepRecord:
    return StepRecord(
        step=number, samples=1, tokens=1, time=1.0, loss=loss, lr=1e-3, grad_norm=1.0,
        tokens_per_second=1.0, step_seconds=1.0, tflops=None, tflops_causal=None,
    )  # fmt: skip


def straggler(**fields: Any) -> StragglerRecord:
    given = {"rank": 3, "host": "n7", "phase": "data", "ratio": 1.31, "seconds": 0.2, **fields}
    return StragglerRecord(step=5, samples=1, tokens=1, time=1.0, **given)


def eventually(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ------------------------------------------------------------------ rules


def test_the_facts(tmp_path: Path) -> None:
    notebook, log = Notebook(), Log()
    alerts = alerts_of(tmp_path, notebook, log=log)
    alerts.note(step(3.25))
    alerts.tell("done", "done at step 12")
    alerts.detach(seconds=LONG)
    (facts,) = notebook.told
    host = facts["host"]
    assert {**facts, "time": ""} == {
        "rule": "done", "text": f"mini on {host}: done at step 12", "message": "done at step 12",
        "run": "mini", "folder": str(tmp_path), "host": host, "step": 12, "steps": 100,
        "tokens": 1152, "loss": 3.25, "time": "",
    }  # fmt: skip
    assert facts["time"].startswith("20")
    assert log.lines == [("info", "the notebook was told of the alert done")]


def test_each_rule_tells_once_also_after_going_back(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook, straggler=True)
    alerts.note(straggler())
    alerts.note(straggler(rank=4))
    alerts.detach(seconds=LONG)
    alerts.attach(say=Log().say, progress=Progress)
    alerts.note(straggler(rank=5))
    alerts.detach(seconds=LONG)
    assert notebook.rules == ["straggler"]
    text = "rank 3 on n7 is 31% slower than the median at data (200 ms per step)"
    assert notebook.told[0]["message"] == text


def test_only_the_first_reason_for_the_end_counts(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook)
    alerts.tell("rank_lost", "lost rank 3")
    alerts.tell("failed", "this is only a consequence")
    alerts.detach(seconds=LONG)
    assert notebook.rules == ["rank_lost"]


def test_what_nobody_asked_for_is_not_told(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook, done=False)
    for number in range(9):
        alerts.note(step(1.0 if number < 4 else 100.0))
    alerts.note(straggler())
    alerts.tell("done", "done")
    alerts.detach(seconds=LONG)
    assert notebook.told == []


def test_a_straggler_that_keeps_up_again_is_no_alert(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook, straggler=True)
    alerts.note(straggler(over=True))
    alerts.detach(seconds=LONG)
    assert notebook.told == []


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([10.8, 10.7, 10.6, 10.5], False),  # a run begins above
        ([3.9, 4.1, 3.9, 4.1, 4.1, 3.9], False),  # single bad batches
        ([10.8, 3.9, 4.1, 4.2, 4.3], True),
        ([3.9, float("nan"), float("inf"), float("nan")], True),
    ],
)
def test_a_loss_that_rises(losses: list[float], told: bool, tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook, loss_above=4.0)
    for loss in losses:
        alerts.note(step(loss))
    alerts.detach(seconds=LONG)
    assert notebook.rules == ["loss_above"] * told
    if told:
        assert "above 4" in notebook.told[0]["message"]
        json.dumps(dict(notebook.told[0]), allow_nan=False)


def test_a_run_that_hangs(tmp_path: Path) -> None:
    """Nothing happens in this thread: the alert has one of its own."""
    notebook, log = Notebook(), Log()
    alerts = alerts_of(tmp_path, notebook, log=log, no_progress="1s")
    log.progress = Progress(13, 52, 1248)
    alerts.phase("step")
    eventually(lambda: notebook.told)
    alerts.detach(seconds=LONG)
    message = notebook.told[0]["message"]
    assert notebook.rules == ["no_progress"]
    assert message.startswith("no step for ")
    assert message.endswith("since step 13; it is in the phase 'step'")


class Asked:
    """Asks a `StallTimer` every second."""

    def __init__(self, limit: float = 600.0) -> None:
        self.stall_timer, self.now = StallTimer(limit, step=0, tick=1.0, now=0.0), 0.0

    def seconds(self, count: int, step: int, phase: str | None = "step") -> float | None:
        found = None
        for _ in range(count):
            self.now += 1.0
            found = self.stall_timer.exhausted(step, phase, now=self.now)
            if found is not None:
                break
        return found


def test_patience_with_steps() -> None:
    asked = Asked()
    assert asked.seconds(100, 1) is None
    assert asked.seconds(600, 2) is None
    assert asked.seconds(2, 2) is not None


def test_the_first_step_compiles() -> None:
    asked = Asked()
    assert asked.seconds(4000, 0) is None
    assert asked.seconds(400, 0) is not None


@pytest.mark.parametrize("phase", ["validation", "save", "evaluation"])
def test_what_takes_long_may(phase: str) -> None:
    asked = Asked()
    assert asked.seconds(10, 1) is None
    assert asked.seconds(4000, 1, phase) is None
    # From its end on the limit is that of steps.
    assert asked.seconds(590, 1) is None
    assert asked.seconds(590, 1) is not None


def test_a_machine_that_slept_is_not_without_progress() -> None:
    asked = Asked()
    asked.seconds(10, 1)
    for _ in range(5):
        asked.now += 36_000
        assert asked.seconds(1, 1) is None
    assert asked.seconds(800, 1) is not None


def test_a_full_disk(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path, notebook, disk_below="1000000 TB")
    eventually(lambda: notebook.told)
    alerts.detach(seconds=LONG)
    assert notebook.rules == ["disk_below"]
    assert "less than 1000000 TB" in notebook.told[0]["message"]


def test_a_disk_with_room(tmp_path: Path) -> None:
    notebook = Notebook()
    alerts = alerts_of(tmp_path / "missing", notebook, disk_below="1 KB")
    time.sleep(0.1)  # several looks, the first of which find no folder
    alerts.folder = tmp_path
    time.sleep(0.1)
    alerts.detach(seconds=LONG)
    assert notebook.told == []


@pytest.mark.parametrize(
    ("error", "said"),
    [(DeliveryError("it said no"), "done: it said no"), (ValueError("secret"), "done: ValueError")],
)
def test_who_cannot_be_told_is_one_warning(error: Exception, said: str, tmp_path: Path) -> None:
    log = Log()
    alerts = alerts_of(tmp_path, Notebook(error), log=log)
    alerts.tell("done", "done")
    alerts.detach(seconds=LONG)
    text = f"the notebook could not be told of the alert {said}"
    assert log.lines == [("warning", text)]


def test_a_tracker_waits_for_its_alerts_and_logs_them(tmp_path: Path) -> None:
    """A delivery is recorded while the tracker waits for it."""
    kept: list[Any] = []
    notebook, closing = Notebook(), threading.Event()

    class Kept:
        def write(self, record: Any) -> None:
            assert not closing.is_set()
            kept.append(record)

        def flush(self) -> None: ...

        def close(self) -> None:
            closing.set()

    class Slow(Notebook):
        def tell(self, facts: Mapping[str, Any]) -> None:
            time.sleep(0.2)
            super().tell(facts)

    slow = Slow()
    config = AlertConfig(command="true", no_progress=False, disk_below=False, loss_above=2.0)
    alerts = Alerts(config, [notebook, slow], run="mini", folder=tmp_path, steps=9)
    tracker = Tracker([Kept()], clock=Progress, alerts=alerts)
    for loss in (1.0, 3.0, 3.0, 3.0):
        tracker.write(step(loss))
    tracker.phase("save")
    tracker.alert("failed", "failed at step 3", wait=LONG)
    assert sorted(slow.rules) == ["failed", "loss_above"]
    tracker.close()
    told = [record.text for record in kept[4:]]
    assert len(told) == 4
    assert all(text.startswith("the notebook was told of the alert ") for text in told)


def test_a_tracker_without_alerts() -> None:
    tracker = Tracker([], clock=Progress)
    tracker.phase("step")
    tracker.alert("done", "done", wait=LONG)
    tracker.close()


# ------------------------------------------------------------------ a command


def python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-c", script)


def test_a_command_gets_the_facts_twice(tmp_path: Path) -> None:
    output = tmp_path / "told.json"
    script = (
        "import json, os, sys; variables = {name: value for name, value in os.environ.items() "
        "if name.startswith('GRISTMILL_ALERT_')}; "
        f"json.dump([json.load(sys.stdin), variables], open({str(output)!r}, 'w'))"
    )
    Command(python(script)).tell(FACTS)
    given, variables = json.loads(output.read_text())
    assert given == FACTS
    assert variables == {
        "GRISTMILL_ALERT_RULE": "done", "GRISTMILL_ALERT_TEXT": "mini on n7: done",
        "GRISTMILL_ALERT_MESSAGE": "done\nreally", "GRISTMILL_ALERT_STEP": "12",
        "GRISTMILL_ALERT_LOSS": "",
    }  # fmt: skip


def test_a_list_is_read_by_no_shell(tmp_path: Path) -> None:
    Command(("touch", str(tmp_path / "a b; $HOME"))).tell(FACTS)
    assert (tmp_path / "a b; $HOME").is_file()


def test_a_line_is_read_by_the_shell(tmp_path: Path) -> None:
    output = tmp_path / "out"
    Command(f'echo "$GRISTMILL_ALERT_RULE" > {shlex.quote(str(output))}').tell(FACTS)
    assert output.read_text() == "done\n"


def test_a_command_that_reads_nothing() -> None:
    Command("true").tell({**FACTS, "message": "x" * 1_000_00})


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "^it ended with status 3$"),
        ("echo one; echo two >&2; exit 1", "^it ended with status 1: two$"),
        (
            "echo cannot reach https://user:secret@host/token?key=1; exit 1",
            "cannot reach https://…$",
        ),
        ("printf 'a\\033[2Jb'; exit 1", r"^it ended with status 1: a\\x1b\[2Jb$"),
    ],
)
def test_a_command_that_fails(command: str, said: str) -> None:
    with pytest.raises(DeliveryError, match=said):
        Command(command).tell(FACTS)


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    started, alive = tmp_path / "started", tmp_path / "alive"
    script = f"touch {started}; (while true; do touch {alive}; sleep 0.05; done) & sleep 1000"
    with pytest.raises(DeliveryError, match=r"took longer than 3\.0s"):
        Command(script, limit=3.0).tell(FACTS)
    assert started.exists()
    alive.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not alive.exists()


def test_what_a_command_leaves_behind_is_not_waited_for() -> None:
    Command("sleep 1000 &", limit=LONG).tell(FACTS)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"alert\.command: there is no command 'no-such-program'"):
        Command(("no-such-program", "x"))


# ------------------------------------------------------------------ an address


class Server:
    """Answers requests with the statuses given, the last of them again and again."""

    def __init__(self) -> None:
        self.statuses = [200]
        self.asked: list[tuple[str, Mapping[str, str], Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.asked.append((self.path, dict(self.headers), json.loads(body)))
                statuses = server.statuses
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *given: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(
            target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    server = Server()
    yield server
    server.close()


def webhook(url: str) -> Webhook:
    return Webhook(url, timeout=LONG, pauses=(0.01, 0.01))


def test_an_address_is_posted_to(server: Server) -> None:
    hook = webhook(f"http://{server.address}/services/T0/B0?key=1#x")
    hook.tell(FACTS)
    ((path, headers, body),) = server.asked
    assert path == "/services/T0/B0?key=1"
    assert headers["Content-Type"] == "application/json"
    assert body == FACTS
    assert hook.name == "alert.url (127.0.0.1)"


def test_a_user_in_an_address_becomes_a_header(server: Server) -> None:
    webhook(f"http://mill%40er:pass@{server.address}/").tell(FACTS)
    ((_, headers, _),) = server.asked
    assert headers["Authorization"] == "Basic bWlsbEBlcjpwYXNz"
    assert headers["Host"] == server.address


def test_a_busy_server_is_asked_again(server: Server) -> None:
    server.statuses = [503, 429, 200]
    webhook(f"http://{server.address}/").tell(FACTS)
    assert len(server.asked) == 3


@pytest.mark.parametrize(("status", "times"), [(500, 3), (404, 1), (302, 1), (307, 1)])
def test_a_server_that_refuses(status: int, times: int, server: Server) -> None:
    server.statuses = [status]
    with pytest.raises(DeliveryError, match=f"it answered {status} ") as caught:
        webhook(f"http://user:secret@{server.address}/token?key=secret").tell(FACTS)
    assert len(server.asked) == times
    assert "secret" not in str(caught.value)
    assert "token" not in str(caught.value)


def test_a_server_that_is_not_there(server: Server) -> None:
    server.close()
    try:
        with pytest.raises(DeliveryError, match="it cannot be reached") as caught:
            webhook(f"http://user:secret@{server.address}/token").tell(FACTS)
        assert "secret" not in str(caught.value)
        assert "token" not in str(caught.value)
    finally:
        server.http = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        server.thread = threading.Thread(target=server.http.serve_forever, daemon=True)
        server.thread.start()


def test_an_address_from_the_environment(server: Server) -> None:
    config = AlertConfig(url="env:HOOK", command="true")
    command, hook = build_targets(config, environment={"HOOK": f"http://{server.address}/x"})
    assert command.name == "alert.command"
    hook.tell(FACTS)
    assert server.asked[0][0] == "/x"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({}, "the environment variable HOOK, which holds the address, is not set"),
        ({"HOOK": ""}, "is not set"),
        ({"HOOK": "ftp://secret"}, "environment HOOK: HOOK must be an address that begins with"),
    ],
)
def test_a_variable_without_an_address(value: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        build_targets(AlertConfig(url="env:HOOK"), environment=value)
    assert "secret" not in str(caught.value)
