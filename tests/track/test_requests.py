"""What others ask of a run while it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gristmill.track.requests import RequestBox, RunRequest, parse_request, read_requests


def ask(folder: Path, name: str, **what: object) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(what))


def test_the_oldest_first_and_one_at_a_time(tmp_path: Path) -> None:
    folder, box, refused = tmp_path / "requests", RequestBox(), list[str]()
    read_requests(folder, box, refuse=refused.append)
    assert box.take() is None, "there is no such folder"
    ask(folder, "2.json", action="save", by="a")
    ask(folder, "1.json", action="validate", by="b")
    ask(folder, ".3.json.tmp", action="stop")
    read_requests(folder, box, refuse=refused.append)
    assert sorted(file.name for file in folder.iterdir()) == [".3.json.tmp", "2.json"]
    read_requests(folder, box, refuse=refused.append)
    assert (folder / "2.json").is_file(), "there is no room for it yet"
    assert box.take() == RunRequest("validate", by="b")
    read_requests(folder, box, refuse=refused.append)
    assert box.take() == RunRequest("save", by="a")
    assert not refused


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting"),
        ("[]", "the action must be one of stop, save, validate, until"),
        ('{"action": "rm -rf"}', "the action must be one of"),
        ('{"action": "until"}', "`until` must be a horizon"),
        ('{"action": "until", "until": "soon"}', "`until` must be a horizon"),
        ('{"action": "until", "until": 7}', "`until` must be a horizon"),
        ("[" * 100_000, ""),
    ],
)
def test_what_is_no_request_is_refused_and_removed(tmp_path: Path, text: str, why: str) -> None:
    folder, box, refused = tmp_path / "requests", RequestBox(), list[str]()
    folder.mkdir()
    (folder / "1.json").write_text(text)
    ask(folder, "2.json", action="stop")
    read_requests(folder, box, refuse=refused.append)
    (told,) = refused
    assert why in told and "\n" not in told
    assert box.take() == RunRequest("stop")
    assert not list(folder.iterdir())


def test_who_asks_cannot_write_lines_of_the_log() -> None:
    request = parse_request(b'{"action": "stop", "by": "x\\nerror: lies"}')
    assert "\n" not in str(request)


def test_others_are_told_of_a_request_once() -> None:
    box = RequestBox()
    assert not box.flag()
    assert box.put(RunRequest("save")) and not box.put(RunRequest("stop"))
    assert [box.flag(), box.flag()] == [True, False]
    box.unflag()
    assert box.flag(), "the step in which they were told was taken back"
    assert box.take() == RunRequest("save")
    assert not box.flag()
