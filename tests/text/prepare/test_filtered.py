"""Preparing with filters: any number of processes, parts and kills give the same files, and every
document that was dropped is accounted for."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.cli.prepare_filters import open_plan
from gristmill.text.filters.build import FilterPlan, Filters
from gristmill.text.filters.settings import parse_filters
from gristmill.text.prepare.ledger import Ledger
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PartNumber, PrepareRequest, parse_holdout
from gristmill.text.sources.source import Dropped, ReadOptions, Reason
from gristmill.text.tokenizers.tokenizer import ByteTokenizer
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.store import open_tokens

BYTES = ByteTokenizer()
SMALL = ReadOptions(block_bytes=300)
SETTINGS = (
    "[gopher-repetition]\ntop = {}\nduplicate = {}\n"
    "[c4]\nmin_sentences = 2\n[length]\nmin_characters = 30\n"
)
QUESTION = "which of these wheels is turned by the water of the river that drives the mill all day"


def texts() -> list[str]:
    rows = [f"This is sentence {n} of them. It has {n * n} words!" for n in range(60)]
    rows[3:50:7] = [row + "\nMenu" for row in rows[3:50:7]]
    rows[5:50:9] = ["line again\n" * 9] * len(rows[5:50:9])
    rows[8] = "Tiny one. So. It."
    rows[20] = "Somebody asked. Which of these wheels -- is turned by the water of the river?"
    rows[41] = f"A quiz says: {QUESTION.capitalize()}? The answer is here. It is long."
    return rows


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the file in.jsonl."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"text": text, "title": f"Title {n}", "url": f"https://site{n % 5}.com/{n}"}
        for n, text in enumerate(texts())
    ]
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{}\n")
    Path("filters.toml").write_text(SETTINGS)
    item = {"query": QUESTION.capitalize() + ":", "choices": ["the large one", "none"], "gold": 0}
    others = {"query": "What?", "choices": ["this", "that"], "gold": 1}
    Path("quiz.jsonl").write_text(json.dumps(others) + "\n" + json.dumps(item) + "\n")
    return tmp_path


def request(folder: str, **options: Any) -> PrepareRequest:
    plan = open_plan(["filters.toml"], ["quiz.jsonl"], None, None)
    settings = {"filters": plan, "workers": 1, "options": SMALL, "save_every": 0} | options
    return PrepareRequest(["in.jsonl"], Path(folder, "set"), BYTES, **settings)


def documents(prefix: Path) -> list[str]:
    reader = open_tokens(prefix)
    text = bytes(id if id < 256 else 0 for id in reader.read(0, len(reader)).tolist()).decode()
    return text.split("\0")[:-1]


def files_of(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["prepare", *words])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_what_is_dropped_and_why(place: Path) -> None:
    result = prepare(request("one"))
    ledger = result.keys[0].ledger
    filters = Filters(FilterPlan(parse_filters(["filters.toml"])))
    kept = [value for text in texts() if isinstance(value := filters.judge(text, {}), str)]
    kept = [text for text in kept if "A quiz says" not in text]
    assert documents(place / "one/set") == kept
    assert not any("Menu" in text for text in kept) and len(kept) > 40
    assert {reason.value: count for reason, count in ledger.dropped.items()} == {
        "gopher-repetition: duplicate lines": 4,
        "length: too few characters": 1,
        "contamination: quiz": 1,
        "missing key": 1,
    }
    saved = json.loads(Path("one/set.ledger.json").read_text())
    places = {entry["reason"]: entry for entry in saved["first_dropped"]}
    assert places["gopher-repetition: duplicate lines"]["text"] == "line again\n" * 9
    found = places["contamination: quiz"]
    assert found["origin"] == "in.jsonl:42"
    assert found["found"] == f"item 2: {' '.join(QUESTION.split()[:13])}"
    assert found["text"].startswith("A quiz says: Which")
    assert "text" not in places["missing key"]
    assert Ledger.from_json(saved).as_json() == {k: v for k, v in saved.items() if k != "seal"}


def test_the_manifest_says_what_was_checked(place: Path) -> None:
    prepare(request("one"))
    checked = open_tokens(place / "one/set").checked
    assert checked is not None
    facts = checked["quiz"]
    assert (facts["items"], facts["unchecked"], facts["words"]) == (2, 1, 13)
    prepare(request("two", filters=FilterPlan()))
    assert open_tokens(place / "two/set").checked == {}
    convert_tokens(["one/set", "one/set"], "both/same")
    assert open_tokens("both/same").checked == checked
    convert_tokens(["one/set", "two/set"], "both/other")
    assert open_tokens("both/other").checked == {}


def test_workers_and_parts_give_the_same_files(place: Path) -> None:
    prepare(request("one"))
    whole = files_of("one")
    prepare(request("two", workers=2))
    assert files_of("two") == whole
    for number in (1, 2, 3):
        prepare(request("parts", part=PartNumber(number, 3)))
    run_merge = CliRunner().invoke(
        app, ["tokens", "merge", *(f"parts/set.part-{n}-of-3" for n in (1, 2, 3)), "-o", "all/set"]
    )
    assert run_merge.exit_code == 0, run_merge.output
    merged = files_of("all")
    for name in ("set.bin", "set.starts", "set.ledger.json", "set.json"):
        assert merged[name] == whole[name], name


class CrashError(BaseException):
    """Stands for the end of the process."""


def test_a_killed_preparation_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = {"holdout": parse_holdout("8,2", seed=3)}
    prepare(request("whole", **held_out))
    real, went_on = os.fsync, 0
    for call in range(1, 40, 8):
        count = itertools.count()

        def crash(handle: int, call: int = call, count: Any = count) -> None:
            if next(count) == call:
                raise CrashError
            real(handle)

        notes: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", crash)
            with pytest.raises(CrashError):
                prepare(request(f"{call}", **held_out))
        prepare(request(f"{call}", **held_out), note=notes.append)
        went_on += len(notes)
        assert files_of(f"{call}") == files_of("whole")
    assert went_on > 2


def test_other_filters_do_not_resume(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = itertools.count()

    def crash(handle: int) -> None:
        if next(count) == 20:
            raise CrashError

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", crash)
        with pytest.raises(CrashError):
            prepare(request("one"))
    Path("filters.toml").write_text(SETTINGS + "[fineweb]\n")
    with pytest.raises(UserError, match="it differs in: filters"):
        prepare(request("one"))
    Path("filters.toml").write_text(SETTINGS)
    plan = open_plan(["filters.toml"], ["quiz.jsonl"], 12, None)
    with pytest.raises(UserError, match="it differs in: decontaminate"):
        prepare(request("one", filters=plan))
    prepare(request("one"))


def test_each_key_is_filtered(place: Path) -> None:
    plan = open_plan(["length=8"], None, None, None)
    options = ReadOptions(keys=("text", "title"), block_bytes=300)
    result = prepare(request("one", filters=plan, options=options))
    assert [key.ledger.kept for key in result.keys] == [60, 50]


def table(rows: Sequence[dict[str, str]], path: str) -> str:
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    if path.endswith(".csv"):
        lines = [",".join(columns), *(",".join(row.values()) for row in rows)]
        Path(path).write_text("\n".join(lines) + "\n")
    elif path.endswith(".parquet"):
        pq.write_table(pa.table(columns), path)
    else:
        Path(path).write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("name", ["in.jsonl", "a.csv", "a.parquet", "a.json"])
def test_urls_of_any_table(place: Path, name: str) -> None:
    Path("urls.toml").write_text("[url]\nblocked = ['site1.com', 'site2.com/7']\n")
    rows = [{"text": f"text {n}", "url": f"https://site{n % 5}.com/{n}"} for n in range(60)]
    if name != "in.jsonl":
        table(rows, name)
    plan = open_plan(["urls.toml"], None, None, None)
    result = prepare(PrepareRequest([name], Path("one/set"), BYTES, filters=plan, workers=1))
    dropped = result.keys[0].ledger.dropped
    assert dropped[Reason("url: blocked address")] == 13
    assert result.keys[0].ledger.kept == 47


def test_plain_text_has_no_url(place: Path) -> None:
    Path("a.txt").write_text("text")
    plan = open_plan(["url=a.txt"], None, None, None)
    with pytest.raises(UserError, match="a filter asks for 'url', which plain text does not have"):
        prepare(PrepareRequest(["a.txt"], Path("one/set"), BYTES, filters=plan))
    # In JSON a string is a document too, without a url.
    Path("a.json").write_text('["some text", {"text": "b", "url": "https://b.org"}]')
    prepare(PrepareRequest(["a.json"], Path("one/set"), BYTES, filters=plan))
    assert documents(place / "one/set") == ["b"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_fails(place: Path, workers: int) -> None:
    Path("mine.py").write_text(
        "def judge(document):\n"
        "    if '30 of' in document['text']: raise ValueError('no 30')\n"
        "    return 'odd' if '1 of' in document['text'] else True\n"
    )
    plan = open_plan(["own=mine.py:judge"], None, None, None)
    with pytest.raises(UserError, match=r"in.jsonl:31: mine.py:judge raised ValueError: no 30"):
        prepare(request("one", filters=plan, workers=workers))
    with pytest.raises(UserError, match=r"in.jsonl:31"):
        prepare(request("one", filters=plan, workers=workers))
    Path("mine.py").write_text("def judge(document):\n    return 7\n")
    with pytest.raises(UserError, match="it differs in: filters"):
        prepare(request("one", filters=plan))
    with pytest.raises(UserError, match="returned 7, which is not True, False, a reason or a dict"):
        prepare(request("one", filters=plan, overwrite=True))


def test_the_command_line(place: Path) -> None:
    words = ["in.jsonl", "-o", "cli/set", "-t", "bytes"]
    Path("words.txt").write_text("menu\n")
    Path("regex.toml").write_text("[regex]\ndrop = ['(again\\s*line )+']\n")
    said = run(*words, "--filter", "length=30,words=words.txt", "--filter", "regex.toml")
    assert "61 read = 48 kept + 13 dropped" in said
    lines = [line.split() for line in said.splitlines() if "  dropped" in line]
    assert lines == [
        ["dropped", "7", "11.48%", "words:", "listed", "words"],
        ["dropped", "4", "6.56%", "regex:", "(again\\s*line", ")+"],
        ["dropped", "1", "1.64%", "length:", "too", "few", "characters"],
        ["dropped", "1", "1.64%", "missing", "key"],
    ]
    assert "    in.jsonl:61: missing key" in said
    Path("more.jsonl").write_text(json.dumps({"text": QUESTION}) + "\n")
    Path("lines.txt").write_text(f"Other words.\n\n{QUESTION}\n")
    decontaminate = ["--decontaminate", "more.jsonl,quiz.jsonl", "--decontaminate", "lines.txt"]
    said = run(*words, "--overwrite", *decontaminate, "--decontaminate-words", "18")
    assert "contamination: more" in said
    assert f"in.jsonl:42: more, item 1: {QUESTION}" in said
    checked = open_tokens(place / "cli/set").checked
    assert checked is not None
    assert {name: facts["words"] for name, facts in checked.items()} == {
        "quiz": 18, "more": 18, "lines": 18,
    }  # fmt: skip
    for wrong, message in {
        ("--decontaminate-words", "9"): "no task is given",
        ("--decontaminate-share", "0.5"): "no task is given",
        ("--decontaminate", "quiz.jsonl,./quiz.jsonl"): "there are two tasks 'quiz'",
        ("--decontaminate", "lambada=gone.jsonl"): "there is no such file",
        ("--decontaminate", ","): "no task is named",
        ("--filter", "c5"): "there is no filter 'c5'",
    }.items():
        with pytest.raises(UserError, match=message):
            run(*words, "--overwrite", *wrong)
    # Dropping is what filters are for; only what cannot be read is a mistake.
    with pytest.raises(UserError, match="this line gives no document: missing key"):
        run(*words, "--overwrite", "--filter", "filters.toml", "--strict")


def test_ledgers_keep_as_many_places_as_they_are_long() -> None:
    def ledger(count: int) -> Ledger:
        new = Ledger()
        for number in range(count):
            new.drop(Dropped(Reason("long", "text"), f"a:{number}"))
            new.drop(Dropped(Reason("short"), f"a:{number}"))
            new.drop(Dropped(Reason("listed", "text", "what"), f"a:{number}"))
        return new

    whole = ledger(150)
    assert Counter(place.reason.value for place in whole.places) == {
        "long": 20, "short": 100, "listed": 150,
    }  # fmt: skip
    parts = ledger(12)
    rest = ledger(138)
    parts.add(rest)
    assert parts.dropped == whole.dropped
    assert Counter(place.reason.value for place in parts.places) == Counter(
        place.reason.value for place in whole.places
    )
