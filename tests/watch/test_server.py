"""What the server answers, to whom, and what it sends by itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gristmill.track.metrics import cut_metrics, to_json
from gristmill.track.records import EventRecord, SampleRecord, StragglerRecord
from gristmill.watch import live

STAMP = {"samples": 8, "tokens": 64, "time": 1001.0}


def ids(server: Any) -> dict[str, str]:
    return {name: row["id"] for name, row in server.rows().items()}


def is_read(server: Any, **steps: int) -> bool:
    """Whether these runs were read up to these steps."""
    rows = server.rows()
    return all(
        name in rows and rows[name]["step"] == step and rows[name]["read"] == 1.0
        for name, step in steps.items()
    )


def test_rows_say_what_a_run_is_at(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    made("runs/one", steps=100, until="1k steps")
    made("runs/two", steps=3, until="6400 tokens", state="done")
    server = start_watch()
    server.until(lambda: is_read(server, one=100, two=3))
    rows = server.rows()
    one = rows["one"]
    assert (one["state"], one["step"], one["steps"], one["tokens"]) == ("running", 100, 1000, 6400)
    assert one["loss"] == pytest.approx(2.011, abs=0.001)
    assert one["eta"] == 1800 and one["seconds"] == 198.0 and one["tokens_per_second"] == 32.0
    assert one["updated"] == 1200.0 and one["validation"] is None
    assert {"loss", "lr", "grad_norm"} <= set(one["names"]) and "tflops" not in one["names"]
    assert (rows["two"]["state"], rows["two"]["steps"], rows["two"]["eta"]) == ("done", 100, None)
    answer = server.get("/api/runs").json()
    assert answer["control"] is False and answer["version"] >= 1


def test_runs_come_grow_go_and_come_back(
    made: Callable[..., Any], start_watch: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("gristmill.watch.watcher._SEARCH_SECONDS", 0.05)
    one = made("runs/one", steps=5)
    server = start_watch()
    server.until(lambda: is_read(server, one=5))
    id = ids(server)["one"]
    one.steps(6, 9)
    server.until(lambda: is_read(server, one=9))
    cut_metrics(one.folder.metrics, after=4)
    server.until(lambda: is_read(server, one=4))
    made("runs/team/two", steps=2)
    server.until(lambda: is_read(server, two=2))
    shutil.rmtree(one.folder.path)
    server.until(lambda: "one" not in server.rows())
    assert server.get(f"/api/run/{id}").status_code == 404
    made("runs/one", steps=7)
    server.until(lambda: is_read(server, one=7))
    assert ids(server)["one"] == id


def test_curves_are_answered_by_address_and_by_body(
    made: Callable[..., Any], start_watch: Callable[..., Any], decode: Callable[..., Any]
) -> None:
    made(steps=50)
    server = start_watch()
    server.until(lambda: is_read(server, one=50))
    id = ids(server)["one"]
    answer = server.get(f"/api/curves?runs={id},gone&names=loss,lr&x=tokens&points=10")
    assert answer.headers["content-type"] == "application/octet-stream"
    header, curves = decode(answer.content)
    assert header["runs"] == [id] and [curve.name for curve in curves] == ["loss", "lr"]
    assert len(curves[0].x) == 7 and curves[0].x[-1] == 50 * 64
    body = {"runs": [id], "names": ["loss", "lr"], "x": "tokens", "points": 10}
    assert server.post("/api/curves", body).content == answer.content
    one = curves[0]
    since = f"{id}:loss:{one.generation}:7:{header['revisions'][0]},{id}:lr:{one.generation}:7"
    answer = server.get(f"/api/curves?runs={id}&names=loss,lr&x=tokens&points=10&since={since}")
    _, news = decode(answer.content)
    assert [(curve.name, curve.first, len(curve.x)) for curve in news] == [("lr", 6, 1)]
    query = f"runs={id}&names=loss&x=step&from=10&to=12"
    _, (part,) = decode(server.get(f"/api/curves?{query}").content)
    assert part.x.tolist() == [9, 10, 11, 12, 13] and part.low is None


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("names=loss&x=time", "x"),
        ("names=loss&points=many", "points"),
        ("names=loss&points=0", "points"),
        ("names=loss&points=1e9", "points"),
        ("names=loss&from=nan", "from"),
        ("names=loss&to=1e999", "to"),
        ("names=loss&since=abc", "since"),
        ("names=loss&since=abc:loss:1", "since"),
        ("names=" + ",".join(f"n{number}" for number in range(300)), "names"),
    ],
)
def test_wrong_questions_are_named(start_watch: Callable[..., Any], query: str, param: str) -> None:
    server = start_watch()
    answer = server.get(f"/api/curves?runs=a&{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body",
    [{}, {"runs": "a", "names": []}, {"runs": [], "names": [1]},
     {"runs": [], "names": [], "since": {}}, {"runs": [], "names": [], "since": [["a", 1, 2, 3]]},
     {"runs": [], "names": [], "since": [["a", "b", 1.5, 3]]}, {"runs": [], "names": [], "x": 5}],
)  # fmt: skip
def test_wrong_bodies_are_refused(start_watch: Callable[..., Any], body: Any) -> None:
    assert start_watch().post("/api/curves", body).status_code == 400


def test_all_about_one_run(made: Callable[..., Any], start_watch: Callable[..., Any]) -> None:
    run = made(steps=3)
    folder = run.folder
    for step in (1, 2, 3, 4, 5):
        for prompt in ("a", "b"):
            record = SampleRecord(step=step, **STAMP, prompt=prompt, text=f"{prompt}{step}é")
            run.append(to_json(record) + "\n")
    run.append(
        to_json(EventRecord(step=5, **STAMP, level="warning", text="careful")) + "\n",
        to_json(
            StragglerRecord(step=5, **STAMP, rank=2, host="n", phase="data", ratio=1.3, seconds=1.0)
        )
        + "\n",
        "damaged\n",
    )
    folder.environment.write_text('{"parameters": 7, "odd": NaN, "planned": {"mfu": 0.5}}')
    folder.log.write_text("".join(f"line {number}\n" for number in range(300)))
    (folder.path / "processes.json").write_text('{"written": 1, "processes": [{"rank": 0}]}')
    (folder.evals / "step-00000003-acc.json").write_text("{damaged")
    for step in (10, 20):
        checkpoint = folder.checkpoints / f"step-{step:08d}"
        checkpoint.mkdir()
        (checkpoint / "model.safetensors").write_bytes(b"x" * step)
    (folder.checkpoints / "best.json").write_text('{"step": 10}')
    server = start_watch()
    server.until(lambda: is_read(server, one=5))
    id = ids(server)["one"]
    shown = server.get(f"/api/run/{id}").json()
    assert shown["row"] == server.rows()["one"]
    assert shown["environment"] == {"parameters": 7, "odd": None, "planned": {"mfu": 0.5}}
    planned = {"tokens_per_second": None, "step_seconds": None, "mfu": 0.5, "memory_bytes": None}
    assert shown["summary"]["planned"] == planned
    assert shown["settings"].startswith("[train]") and shown["damaged"] == 1
    assert [(c["step"], c["bytes"], c["best"]) for c in shown["checkpoints"]] == [
        (10, 10, True), (20, 20, False),
    ]  # fmt: skip
    assert shown["events"]["total"] == 1
    assert shown["events"]["newest"][0]["text"] == "careful"
    assert [one["step"] for one in shown["samples"]] == [3, 4, 5]
    assert shown["sample_steps"] == [1, 2, 3, 4, 5]
    assert shown["stragglers"][0]["ratio"] == 1.3 and shown["processes"]["processes"]
    assert shown["evaluations"] == [] and shown["summary"]["step"] == 5
    for step in (1, 5):
        texts = server.get(f"/api/run/{id}/samples?step={step}").json()["texts"]
        assert [one["text"] for one in texts] == [f"a{step}é", f"b{step}é"]
    lines = server.get(f"/api/run/{id}/log?lines=2").json()["lines"]
    assert lines == ["line 298", "line 299"]
    assert server.get(f"/api/run/{id}/samples").status_code == 400


def test_a_run_of_nothing_but_damage_is_shown(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    run = made()
    folder = run.folder
    folder.settings.write_bytes(b"\xff = = [")
    folder.metrics.write_bytes(b"\xff\n[]\n{}\n5\n\n" + b'{"kind": []}\n{"kind": "step"}\n')
    folder.status.write_text('{"state": ["running"], "step": 1e999, "steps": "many"}')
    folder.environment.write_text('{"parameters": "many", "a": "\\ud800"}')
    (folder.path / "processes.json").write_text('{"processes": 5}')
    (folder.path / "time.jsonl").write_text("[]\n{damaged\n5\n")
    (folder.checkpoints / "step-00000001").write_text("no folder")
    (folder.checkpoints / "best.json").write_text("[]")
    folder.log.write_bytes(b"\xff\n")
    server = start_watch()
    server.until(lambda: "one" in server.rows() and server.rows()["one"]["read"] == 1.0)
    row = server.rows()["one"]
    assert (row["state"], row["step"], row["names"]) == ("unknown", 0, [])
    answer = server.get(f"/api/run/{row['id']}")
    assert answer.status_code == 200, server.log
    shown = answer.json()
    assert shown["damaged"] == 7 and shown["checkpoints"] == [] and shown["processes"] is None
    assert server.get(f"/api/run/{row['id']}/log").json()["lines"] == ["\ufffd"]
    answer = server.get(f"/api/settings?runs={row['id']}&all=1").json()
    assert answer == {"runs": [row["id"]], "settings": []}
    assert server.log[1:] == [line for line in server.log[1:] if "failed" not in line]


def test_pipes_are_not_waited_for_and_links_not_followed(
    made: Callable[..., Any], start_watch: Callable[..., Any], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"parameters": 7, "secret": "word"}\n')
    pipes, links = made("runs/pipes"), made("runs/links")
    (links.folder.evals / "a.json").symlink_to(secret)
    os.mkfifo(pipes.folder.evals / "a.json")
    for run, make in ((pipes, os.mkfifo), (links, lambda path: path.symlink_to(secret))):
        folder = run.folder
        others = ("processes.json", "time.jsonl", ".lock", "checkpoints/best.json")
        files = (folder.metrics, folder.log, folder.status, folder.environment)
        for file in (*files, *(folder.path / name for name in others)):
            file.unlink(missing_ok=True)
            make(file)
    server = start_watch(control=True)
    server.until(lambda: len(server.rows()) == 2)
    for name, id in ids(server).items():
        shown = server.get(f"/api/run/{id}")
        assert shown.status_code == 200 and shown.json()["environment"] == {}, name
        assert "word" not in shown.text
        assert server.get(f"/api/run/{id}/log").json()["lines"] == []


def test_requests_are_not_written_through_a_link(
    made: Callable[..., Any], start_watch: Callable[..., Any], tmp_path: Path
) -> None:
    run = made(steps=1)
    (tmp_path / "elsewhere").mkdir()
    (run.folder.path / "requests").symlink_to(tmp_path / "elsewhere")
    server = start_watch(control=True)
    server.until(lambda: is_read(server, one=1))
    token = {"Authorization": f"Bearer {server.parts.control.token}"}
    path = f"/api/run/{ids(server)['one']}/action"
    assert server.post(path, {"action": "save"}, headers=token).status_code == 500
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_settings_that_differ(made: Callable[..., Any], start_watch: Callable[..., Any]) -> None:
    made("runs/a", lr=1e-3, seed=1)
    made("runs/b", lr=1e-3, seed=2)
    server = start_watch()
    server.until(lambda: len(server.rows()) == 2)
    both = ids(server)
    query = f"runs={both['b']},{both['a']}"
    answer = server.get(f"/api/settings?{query}").json()
    assert answer["runs"] == [both["b"], both["a"]]
    assert answer["settings"] == [{"setting": "data.seed", "values": ["2", "1"]}]
    every = server.get(f"/api/settings?{query}&all=1").json()["settings"]
    assert {"setting": "optim.lr", "values": ["0.001", "0.001"]} in every


# ------------------------------------------------------------------ events


def events_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """The data of events, as they come."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_events_tell_what_is_new(made: Callable[..., Any], start_watch: Callable[..., Any]) -> None:
    one, _ = made("runs/one", steps=5), made("runs/two", steps=5)
    server = start_watch()
    server.until(lambda: is_read(server, one=5, two=5))
    with httpx.stream("GET", f"{server.url}/api/events", timeout=90) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = events_of(answer)
        first = next(events)
        assert first["all"] and {row["name"] for row in first["rows"]} == {"one", "two"}
        one.steps(6, 8)
        news = next(events)
        (row,) = news["rows"]
        assert row["step"] == 8 and "folder" not in row and "name" not in row
        assert news["version"] == server.get("/api/runs").json()["version"]
        version = news["version"]
    one.steps(9, 9)
    server.until(lambda: is_read(server, one=9))
    known = {"Last-Event-ID": str(version)}
    with httpx.stream("GET", f"{server.url}/api/events", headers=known, timeout=90) as answer:
        again = next(events_of(answer))
        assert "all" not in again and again["rows"][0]["step"] == 9
    with httpx.stream("GET", f"{server.url}/api/events?version=0", timeout=90) as answer:
        from_the_beginning = next(events_of(answer))
        assert from_the_beginning.get("all") or from_the_beginning["rows"]


def test_who_does_not_read_costs_nothing_and_misses_nothing(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    one = made("runs/one", steps=5)
    server = start_watch()
    server.until(lambda: is_read(server, one=5))
    with httpx.stream("GET", f"{server.url}/api/events", timeout=90) as answer:
        lines = events_of(answer)
        next(lines)
        for step in range(6, 120):
            one.steps(step, step)
            server.until(lambda step=step: server.rows()["one"]["step"] == step)
        changes = server.parts.watcher._changes
        assert len(changes) <= 64
        seen = next(lines)
        while seen["rows"][0].get("step") != 119:
            seen = next(lines)


def test_streams_end_and_go_on_with_the_last_id(
    made: Callable[..., Any], start_watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.watch.live.STREAM_SECONDS", 0.5)
    monkeypatch.setattr("gristmill.watch.live.ALIVE_SECONDS", 0.05)
    one = made("runs/one", steps=5)
    server = start_watch()
    server.until(lambda: is_read(server, one=5))
    text = server.get("/api/events").text
    assert text.startswith("retry: 1000\n\n") and ": still here" in text
    *_, last = [line for line in text.splitlines() if line.startswith("id: ")]
    one.steps(6, 6)
    server.until(lambda: is_read(server, one=6))
    again = server.get("/api/events", headers={"Last-Event-ID": last.removeprefix("id: ")}).text
    assert '"step":6' in again and '"all"' not in again


def test_an_event_is_encoded_once_for_all(
    made: Callable[..., Any], start_watch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, encoded = live._encode, list[int]()

    def counted(changes: Any) -> bytes:
        encoded.append(changes.version)
        return encode(changes)

    monkeypatch.setattr(live, "_encode", counted)
    one = made("runs/one", steps=5)
    server = start_watch()
    server.until(lambda: is_read(server, one=5))
    version = server.get("/api/runs").json()["version"]
    with contextlib.ExitStack() as stack:
        streams = [
            events_of(
                stack.enter_context(
                    httpx.stream("GET", f"{server.url}/api/events?version={version}", timeout=90)
                )
            )
            for _ in range(8)
        ]
        one.steps(6, 6)
        for stream in streams:
            event = next(stream)
            while event["rows"][0].get("step") != 6:
                event = next(stream)
    assert len(encoded) == len(set(encoded)) > 0


# ------------------------------------------------------------------ who may ask


def test_other_names_and_other_sites_are_refused(start_watch: Callable[..., Any]) -> None:
    server = start_watch()
    for path in ("/", "/api/runs", "/api/events", "/static/watch.js"):
        answer = server.get(path, headers={"Host": "rebound.example"})
        assert answer.json()["error"]["code"] == "wrong_host"
    cross = {"Sec-Fetch-Site": "cross-site"}
    assert server.get("/api/runs", headers=cross).json()["error"]["code"] == "cross_site"
    assert server.post("/api/curves", {}, headers=cross).status_code == 403
    assert not any(name.startswith("access-control") for name in server.get("/api/runs").headers)
    assert server.get("/nothing").status_code == 404
    assert "there is something at /api/runs" in server.get("/runs").json()["error"]["message"]
    assert server.post("/api/runs", {}).status_code == 405
    assert server.get("/static/..%2fapp.py").status_code == 404


def test_keys_are_asked_for(made: Callable[..., Any], start_watch: Callable[..., Any]) -> None:
    made(steps=1)
    server = start_watch(keys=(b"secret",), control=True)
    assert server.get("/health").json() == {"status": "ok"}
    for path in ("/api/runs", "/api/events", "/api/curves?runs=a&names=b"):
        assert server.get(path).status_code == 401
    for key in ("secret", server.parts.control.token):
        assert server.get("/api/runs", headers={"Authorization": f"Bearer {key}"}).json()["control"]


def test_the_page_loads_nothing_from_elsewhere(start_watch: Callable[..., Any]) -> None:
    server = start_watch()
    # From the rooms of the live page, of the report, and of all pages.
    for path in ("/", "/static/watch.js", "/static/charts.js", "/static/base.css"):
        answer = server.get(path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert server.get("/static/chat.js").status_code == 404


# ------------------------------------------------------------------ actions


def test_actions_are_written_for_the_run(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    run = made(steps=1)
    server = start_watch(control=True)
    server.until(lambda: is_read(server, one=1))
    assert server.rows() and server.get("/api/runs").json()["control"] is True
    path = f"/api/run/{ids(server)['one']}/action"
    token = {"Authorization": f"Bearer {server.parts.control.token}"}
    assert f"#token={server.parts.control.token}" in server.log[0]
    for action in ({"action": "save"}, {"action": "until", "until": "20k steps"}):
        assert server.post(path, action, headers=token).status_code == 200
    requests = run.folder.path / "requests"
    written = [json.loads(file.read_text()) for file in sorted(requests.iterdir())]
    assert sorted(one["action"] for one in written) == ["save", "until"]
    (until,) = (one for one in written if one["action"] == "until")
    assert until["until"] == "20,000 steps".replace(",", "") or until["until"] == "20k steps"
    assert until["asked"] and until["by"]
    for wrong in ({}, {"action": "delete"}, {"action": "until"}, {"action": "until", "until": "x"},
                  {"action": "until", "until": "0 steps"}, {"action": 5}):  # fmt: skip
        assert server.post(path, wrong, headers=token).status_code == 400
    assert (
        server.post("/api/run/nothing/action", {"action": "stop"}, headers=token).status_code == 404
    )
    for _ in range(20):
        answer = server.post(path, {"action": "save"}, headers=token)
    assert answer.status_code == 409 and len(list(requests.iterdir())) == 16


def test_without_the_token_nothing_is_asked(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    run = made(steps=1)
    server = start_watch(control=True)
    server.until(lambda: is_read(server, one=1))
    path = f"/api/run/{ids(server)['one']}/action"
    token = server.parts.control.token
    for header in (
        {},
        {"Authorization": token},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Basic {token}"},
    ):
        answer = server.post(path, {"action": "stop"}, headers=header)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "wrong_token"
    only_looks = start_watch()
    only_looks.until(lambda: is_read(only_looks, one=1))
    answer = only_looks.post(path, {"action": "stop"}, headers={"Authorization": f"Bearer {token}"})
    assert answer.status_code == 403 and "--control" in answer.json()["error"]["message"]
    assert not (run.folder.path / "requests").exists()


def test_a_run_that_has_ended_is_asked_nothing(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    made(steps=1, state="done")
    server = start_watch(control=True)
    server.until(lambda: is_read(server, one=1))
    token = {"Authorization": f"Bearer {server.parts.control.token}"}
    answer = server.post(f"/api/run/{ids(server)['one']}/action", {"action": "stop"}, headers=token)
    assert answer.status_code == 409 and "done" in answer.json()["error"]["message"]


def test_a_thousand_folders(made: Callable[..., Any], start_watch: Callable[..., Any]) -> None:
    for number in range(1000):
        made(f"runs/run{number:04d}", steps=1, state="done")
    server = start_watch()
    server.until(lambda: len(server.rows()) == 1000)
    server.until(lambda: all(row["read"] == 1.0 for row in server.rows().values()))
    made("runs/run0500").steps(2, 3)
    server.until(lambda: server.rows()["run0500"]["step"] == 3)


def test_the_address_of_alerts_is_not_shown(
    made: Callable[..., Any], start_watch: Callable[..., Any]
) -> None:
    run = made()
    run.folder.settings.write_text('[alert]\nurl = "https://hooks.example/T0/secret-word"\n')
    server = start_watch()
    server.until(lambda: "one" in server.rows())
    id = ids(server)["one"]
    for path in (f"/api/run/{id}", f"/api/settings?runs={id}&all=1"):
        text = server.get(path).text
        assert "url" in text and "secret-word" not in text and "hooks.example" not in text
