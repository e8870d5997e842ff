"""Conversations, one on each line of JSON-lines files; every line is accounted for.

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}
    {"prompt": "…", "completion": "…"}
    {"instruction": "…", "input": "…", "output": "…"}

A line that is no conversation is left out, with its reason and its place, as `prepare` does it.
Other keys of an object are ignored.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gristmill.base.errors import DataError
from gristmill.text.sources.lines import text_or_reason
from gristmill.text.sources.reading import find_sources, read_rows
from gristmill.text.sources.source import DocumentSplit, ReadOptions, Reason

ROLES: Mapping[str, str] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
"""The roles that files name, and what templates call them."""


class MessageKeys(NamedTuple):
    """Under which keys a message has its role and its text."""

    role: str
    content: str


class PairKeys(NamedTuple):
    """Under which keys an object has a question, more of it, and the answer."""

    question: str
    more: str | None
    answers: tuple[str, ...]


LISTS: Mapping[str, tuple[MessageKeys, ...]] = {
    "messages": (MessageKeys("role", "content"), MessageKeys("from", "value")),
    "conversations": (MessageKeys("from", "value"), MessageKeys("role", "content")),
}
"""The key of a list of messages, and the forms that its messages may have."""
_ANSWERS = ("completion", "response", "output")
PAIRS = (PairKeys("prompt", None, _ANSWERS), PairKeys("instruction", "input", _ANSWERS))
"""Objects with a question and its answer."""


class BadLine(enum.Enum):
    """Why a line is no conversation."""

    INVALID_UTF8 = "invalid UTF-8"
    INVALID_JSON = "invalid JSON"
    BLANK = "blank"
    OTHER_SHAPE = "of none of the accepted forms"
    ROLE = "with an unknown role"
    NO_TEXT = "with a message that is not text"
    EMPTY = "with an empty message"
    NO_ANSWER = "without an answer"
    REFUSED = "refused by the template"


@dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """What both sides say, and where it was read."""

    messages: tuple[Message, ...]
    origin: str
    """The file and the line, as file:line."""


@dataclass
class LineLedger:
    """What became of every line."""

    lines: int = 0
    kept: int = 0
    dropped: Counter[BadLine] = field(default_factory=Counter)
    first: dict[BadLine, str] = field(default_factory=dict)
    """The place of the first line dropped for each reason, and more about it if there is more."""
    skipped: list[str] = field(default_factory=list)
    """Files and folders that were left out as a whole, and why."""

    def drop(self, reason: BadLine, origin: str, detail: str = "") -> None:
        self.dropped[reason] += 1
        self.first.setdefault(reason, f"{origin}{f' ({detail})' if detail else ''}")

    def described(self) -> str | None:
        """The lines that were left out, in words; None if there are none."""
        assert self.lines == self.kept + self.dropped.total(), f"unaccounted for: {self}"
        if not self.dropped:
            return None
        reasons = (
            f"{count} {reason.value}, {'first' if count > 1 else 'at'} {self.first[reason]}"
            for reason, count in self.dropped.items()
        )
        return f"{self.dropped.total()} of {self.lines} lines are left out: {'; '.join(reasons)}"


class _BadLineError(Exception):
    def __init__(self, reason: BadLine, detail: str = "") -> None:
        self.reason, self.detail = reason, detail


def read_conversations(name: str, ledger: LineLedger) -> Iterator[Conversation]:
    """The conversations of a file, a folder or a glob, in order."""
    if name.startswith("hf:") or name == "-":
        what = "conversations are read from JSON-lines files, folders and globs"
        raise DataError(what, where=f"data.paths {name}")
    options = ReadOptions(split=DocumentSplit.LINE)
    sources, skipped = find_sources([name], options)
    ledger.skipped += [f"{item.origin} is left out: {item.what}" for item in skipped]
    for source in sources:
        # Whatever the name ends in: each line holds one value.
        source.extension = ".txt"
        for row in read_rows(source, options):
            ledger.lines += 1
            try:
                messages = _parse(row.value)
            except _BadLineError as error:
                ledger.drop(error.reason, row.origin, error.detail)
            else:
                ledger.kept += 1
                yield Conversation(messages, row.origin)


def require_conversations(name: str, ledger: LineLedger) -> None:
    """Refuse files in which there is no conversation."""
    if ledger.kept:
        return
    raise DataError(
        f"no conversation: {ledger.described() or 'there are no lines'}",
        where=name,
        remedy='each line must hold a conversation, such as {"messages": [{"role": "user", '
        '"content": "…"}, {"role": "assistant", "content": "…"}]}; a JSON array becomes such '
        "lines with: jq -c '.[]' FILE",
    )


def _parse(line: str | Reason) -> tuple[Message, ...]:
    if isinstance(line, Reason):
        blank = line == Reason.EMPTY_TEXT
        raise _BadLineError(BadLine.BLANK if blank else BadLine.INVALID_UTF8)
    if not line.strip():
        raise _BadLineError(BadLine.BLANK)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLineError(BadLine.INVALID_JSON, str(error)) from error
    messages = tuple(_messages(value))
    if all(message.role != "assistant" for message in messages):
        raise _BadLineError(BadLine.NO_ANSWER)
    return messages


def _messages(value: Any) -> Iterator[Message]:
    if isinstance(value, list):
        yield from _listed(value, LISTS["messages"])
        return
    if not isinstance(value, dict):
        raise _BadLineError(BadLine.OTHER_SHAPE, f"a {type(value).__name__}")
    for key, forms in LISTS.items():
        if isinstance(value.get(key), list):
            yield from _listed(value[key], forms)
            return
    for pair in PAIRS:
        answer = next((key for key in pair.answers if key in value), None)
        if pair.question not in value or answer is None:
            continue
        question = _text(value[pair.question])
        if pair.more is not None and value.get(pair.more):
            question += "\n\n" + _text(value[pair.more])
        yield Message("user", question)
        yield Message("assistant", _text(value[answer]))
        return
    keys = ", ".join(map(str, list(value)[:5])) or "none"
    raise _BadLineError(BadLine.OTHER_SHAPE, f"its keys: {keys}")


def _listed(messages: Sequence[Any], forms: Sequence[MessageKeys]) -> Iterator[Message]:
    for message in messages:
        keys = next(
            (form for form in forms if isinstance(message, dict) and {*form} <= set(message)), None
        )
        if keys is None:
            raise _BadLineError(BadLine.OTHER_SHAPE, "a message without role and content")
        role = message[keys.role]
        if not isinstance(role, str) or role not in ROLES:
            raise _BadLineError(BadLine.ROLE, repr(role))
        yield Message(ROLES[role], _text(message[keys.content]))


def _text(value: Any) -> str:
    text = text_or_reason(value, check_surrogates=True)
    if isinstance(text, Reason):
        reasons = {Reason.EMPTY_TEXT: BadLine.EMPTY, Reason.INVALID_UTF8: BadLine.INVALID_UTF8}
        raise _BadLineError(reasons.get(text, BadLine.NO_TEXT))
    return text
