"""LAMBADA, HellaSwag and files of questions, with the numbers that lm-evaluation-harness gives.

    lambada      {"text"}                                the last word, after the last space
    hellaswag    {"activity_label", "ctx_a", "ctx_b", "endings", "label"}
    FILE.jsonl   {"query", "choices", "gold"}            options for one context
                 {"context_options", "continuation", "gold"}  contexts for one continuation
                 {"context", "continuation"}             what follows

The shape of a file's first row decides. A space separates a context from its continuation.
HellaSwag also comes with its marks removed and contexts joined: {"query", "endings", "label"}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError
from gristmill.evaluate.tasks.rows import TaskRows, hub_rows, read_rows
from gristmill.evaluate.tasks.spec import MultipleChoice, Option, Task, TextCompletion

Row = Mapping[str, Any]
_MARK = re.compile(r"\[.*?\]")


def open_lambada(file: Path | None) -> Task:
    """LAMBADA in OpenAI's version: the test split, 5,153 passages."""
    name, data = "lambada", "EleutherAI/lambada_openai"
    return _last_words(name, read_rows(file) if file else hub_rows(data, split="test", task=name))


def open_hellaswag(file: Path | None) -> Task:
    """HellaSwag: the validation split, 10,042 questions."""
    name, data = "hellaswag", "Rowan/hellaswag"
    return _choices(
        name, read_rows(file) if file else hub_rows(data, split="validation", task=name)
    )


def open_file(file: Path) -> Task:
    """The questions of a file, by the shape of its rows."""
    rows = read_rows(file)
    first = rows.rows[0]
    name = file.name.partition(".")[0]
    if {"context", "continuation"} <= first.keys() or first.keys() == {"text"}:
        return _last_words(name, rows)
    return _choices(name, rows)


BUILT_IN: dict[str, Callable[[Path | None], Task]] = {
    "lambada": open_lambada,
    "hellaswag": open_hellaswag,
}


# ------------------------------------------------------------------ texts that end


def _last_words(name: str, rows: TaskRows) -> Task:
    options = list[Option]()
    for where, row in rows:
        if "text" in row:
            context, _, word = _text(row, "text", where).rpartition(" ")
            options.append(Option(context, f" {word}"))
        else:
            context = _text(row, "context", where)
            options.append(Option(context, f" {_text(row, 'continuation', where)}"))
        if not options[-1].context.strip() or not options[-1].continuation.strip():
            raise DataError("there is no word to predict, or nothing before it", where=where)
    return TextCompletion(name, options, rows.facts)


# ------------------------------------------------------------------ options


@dataclass(frozen=True)
class _Shape:
    """How rows with these keys are read."""

    keys: frozenset[str]
    read: Callable[[Row, str], tuple[list[Option], list[str]]]
    """The options of a row, and the text whose length normalizes each."""
    gold: str


def _harness_hellaswag(row: Row, where: str) -> tuple[list[Option], list[str]]:
    context = f"{_text(row, 'ctx_a', where)} {_text(row, 'ctx_b', where).capitalize()}"
    query = _without_marks(f"{_text(row, 'activity_label', where)}: {context}")
    choices = [_without_marks(one) for one in _texts(row, "endings", where)]
    return [Option(query, f" {one}") for one in choices], choices


def _without_marks(text: str) -> str:
    """The text of WikiHow without [header], [title], [step] and the like."""
    text = text.strip().replace(" [title]", ". ")
    return _MARK.sub("", text).replace("  ", " ")


def _listed(key: str) -> Callable[[Row, str], tuple[list[Option], list[str]]]:
    def read(row: Row, where: str) -> tuple[list[Option], list[str]]:
        query, choices = _text(row, "query", where), _texts(row, key, where)
        return [Option(query, f" {one}") for one in choices], choices

    return read


def _schema(row: Row, where: str) -> tuple[list[Option], list[str]]:
    contexts = _texts(row, "context_options", where)
    ending = _text(row, "continuation", where)
    return [Option(one, f" {ending}") for one in contexts], [ending] * len(contexts)


_SHAPES = (
    _Shape(frozenset(("activity_label", "ctx_a", "ctx_b")), _harness_hellaswag, "label"),
    _Shape(frozenset(("query", "endings")), _listed("endings"), "label"),
    _Shape(frozenset(("query", "choices")), _listed("choices"), "gold"),
    _Shape(frozenset(("context_options", "continuation")), _schema, "gold"),
)


def _choices(name: str, rows: TaskRows) -> Task:
    first = rows.rows[0]
    shape = next((one for one in _SHAPES if one.keys <= first.keys()), None)
    if shape is None:
        known = "; ".join(", ".join(sorted({*one.keys, one.gold})) for one in _SHAPES)
        raise DataError(
            f"rows with {', '.join(sorted(first))} are no questions",
            where=f"{rows.source}, line 1",
            remedy=f"known rows have: {known}; or context, continuation",
        )
    options, gold, lengths = list[list[Option]](), list[int](), list[list[int]]()
    for where, row in rows:
        both, texts = shape.read(row, where)
        options.append(both)
        gold.append(_gold(row, shape.gold, where, count=len(both)))
        lengths.append([max(1, len(text)) for text in texts])
    return MultipleChoice(name, options, gold, lengths, rows.facts)


def _text(row: Row, key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"{key!r} holds no text", where=where)
    return value


def _texts(row: Row, key: str, where: str) -> list[str]:
    value = row.get(key)
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(v, str) for v in value):
        raise DataError(f"{key!r} is no list of two or more texts", where=where)
    return value


def _gold(row: Row, key: str, where: str, *, count: int) -> int:
    """The number of the right option; Hugging Face has it as text."""
    value = row.get(key)
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if type(number) is not int or not 0 <= number < count:
        raise DataError(f"{key!r} is no number from 0 to {count - 1}", where=where)
    return number
