"""Conversations in every accepted form; every line is accounted for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.text.chat.conversations import (
    BadLine,
    LineLedger,
    Message,
    read_conversations,
    require_conversations,
)

ASKED = {"role": "user", "content": "Hi"}
ANSWERED = {"role": "assistant", "content": "Yo"}
BOTH = (Message("user", "Hi"), Message("assistant", "Yo"))


def read(folder: Path, *lines: Any) -> tuple[list[tuple[Message, ...]], LineLedger]:
    file, ledger = folder / "chat.jsonl", LineLedger()
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    found = [one.messages for one in read_conversations(str(file), ledger)]
    assert ledger.kept == len(found)
    return found, ledger


@pytest.mark.parametrize(
    "line",
    [
        {"messages": [ASKED, ANSWERED], "source": "ignored"},
        [ASKED, ANSWERED],
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        {"conversations": [ASKED, ANSWERED]},
        {"prompt": "Hi", "completion": "Yo"},
        {"prompt": "Hi", "response": "Yo"},
        {"instruction": "Hi", "output": "Yo"},
        {"instruction": "Hi", "input": "", "output": "Yo"},
    ],
    ids=lambda line: " ".join(line) if isinstance(line, dict) else "list",
)
def test_accepted_forms(tmp_path: Path, line: Any) -> None:
    found, ledger = read(tmp_path, line)
    assert found == [BOTH]
    assert ledger.described() is None


def test_the_input_of_an_instruction_belongs_to_the_question(tmp_path: Path) -> None:
    ((question, _),), _ = read(tmp_path, {"instruction": "Sum", "input": "1 2", "output": "3"})
    assert question.content == "Sum\n\n1 2"


BAD = {
    BadLine.INVALID_JSON: '{"messages": [',
    BadLine.BLANK: "  ",
    BadLine.OTHER_SHAPE: {"text": "a document"},
    BadLine.ROLE: [{"role": "tool", "content": "x"}],
    BadLine.NO_TEXT: [ASKED, {"role": "assistant", "content": None}],
    BadLine.EMPTY: [ASKED, {"role": "assistant", "content": ""}],
    BadLine.NO_ANSWER: [ASKED],
    BadLine.INVALID_UTF8: '[{"role": "assistant", "content": "\\ud800"}]',
}


def test_bad_lines_are_left_out_and_counted_with_their_place(tmp_path: Path) -> None:
    found, ledger = read(tmp_path, [ASKED, ANSWERED], *BAD.values(), *BAD.values())
    assert found == [BOTH]
    assert ledger.dropped == dict.fromkeys(BAD, 2)
    assert ledger.lines == 1 + 2 * len(BAD)
    described = ledger.described() or ""
    assert described.startswith(f"{2 * len(BAD)} of {ledger.lines} lines are left out: ")
    for number, reason in enumerate(BAD, start=2):
        assert f"2 {reason.value}, first {tmp_path / 'chat.jsonl'}:{number}" in described
    assert "('tool')" in described and "(its keys: text)" in described


def test_nothing_but_bad_lines_is_refused(tmp_path: Path) -> None:
    _, ledger = read(tmp_path, "[", '{"messages": []}', "]")
    with pytest.raises(UserError, match=r"3 of 3 lines are left out") as caught:
        require_conversations("chat.jsonl", ledger)
    assert "jq -c" in str(caught.value)


def test_folders_globs_and_compressed_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps([ASKED, ANSWERED]))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"prompt": "Hi", "completion": "Yo"}))
    for name in (tmp_path, tmp_path / "*.jsonl*"):
        found = list(read_conversations(str(name), LineLedger()))
        assert [one.origin for one in found] == [
            f"{tmp_path / 'a.jsonl.gz'}:1", f"{tmp_path / 'b.jsonl'}:1",
        ]  # fmt: skip
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "gone")
    ledger = LineLedger()
    assert len(list(read_conversations(str(tmp_path), ledger))) == 2
    gone = "the file it leads to does not exist"
    assert ledger.skipped == [f"{tmp_path / 'c.jsonl'} is left out: {gone}"]
    with pytest.raises(UserError, match="no such file"):
        list(read_conversations(str(tmp_path / "missing.jsonl"), LineLedger()))
