"""What a task is: questions whose options a model scores, and what follows from the scores.

    MultipleChoice   several options, one of them right: which one is the likeliest?
    TextCompletion   one text and how it continues: does greedy decoding find it, how likely is it?

Options are pairs of context and continuation. They are encoded as lm-evaluation-harness does it, so
that scores can be compared: spaces at the end of a context belong to the continuation, and the
continuation's ids are those of the whole text that come after the context's.

LAMBADA, HellaSwag and files of questions give the numbers that lm-evaluation-harness gives:

    lambada      {"text"}                                the last word, after the last space
    hellaswag    {"activity_label", "ctx_a", "ctx_b", "endings", "label"}
    FILE.jsonl   {"query", "choices", "gold"}            options for one context
                 {"context_options", "continuation", "gold"}  contexts for one continuation
                 {"context", "continuation"}             what follows

The shape of a file's first row decides. A space separates a context from its continuation.
HellaSwag also comes with its marks removed and contexts joined: {"query", "endings", "label"}.

The rows of a task are those of a JSON-lines file, or of a dataset on Hugging Face.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gristmill.base.errors import DataError, UserError, optional
from gristmill.base.files import open_bytes, sha256_file, sha256_text
from gristmill.evaluate.measures import Measure, mean, perplexity
from gristmill.evaluate.scoring import Continuation, Score
from gristmill.hub.client import quiet_library
from gristmill.text.sources.datasets import PREFIX, DatasetSpec, open_hub
from gristmill.text.tokenizers.tokenizer import Tokenizer


class Task(Protocol):
    """Questions, and what follows from the scores of their options."""

    @property
    def name(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]:
        """Where the questions came from, and how they are asked."""
        ...

    def first(self, items: int) -> Task:
        """The same task with its first items only."""
        ...

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        """The options of every question."""
        ...

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]: ...

    @property
    def texts(self) -> list[str]:
        """Every question with its right answer, as it might stand in a text."""
        ...


class Option(NamedTuple):
    """A context and a continuation of it."""

    context: str
    continuation: str


@dataclass(frozen=True)
class MultipleChoice:
    """Questions with several options, one of which is right.

    `acc` takes the likeliest option, `acc_norm` the likeliest per character.
    """

    name: str
    options: list[list[Option]]
    gold: list[int]
    """The number of the right option."""
    lengths: list[list[int]]
    """Characters of each option."""
    facts: dict[str, Any]

    def first(self, items: int) -> MultipleChoice:
        options, gold, lengths = self.options[:items], self.gold[:items], self.lengths[:items]
        return replace(self, options=options, gold=gold, lengths=lengths)

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        return encode_options(tokenizer, self.options)

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]:
        right, right_by_length = list[float](), list[float]()
        for options, gold, lengths in zip(scores, self.gold, self.lengths, strict=True):
            values = [score.log_prob for score in options]
            scaled = [value / length for value, length in zip(values, lengths, strict=True)]
            right.append(float(values.index(max(values)) == gold))
            right_by_length.append(float(scaled.index(max(scaled)) == gold))
        return {"acc": mean(right), "acc_norm": mean(right_by_length)}

    @property
    def texts(self) -> list[str]:
        right = (options[gold] for options, gold in zip(self.options, self.gold, strict=True))
        return [option.context + option.continuation for option in right]


@dataclass(frozen=True)
class TextCompletion:
    """Texts whose last words are to be predicted."""

    name: str
    options: list[Option]
    facts: dict[str, Any]

    def first(self, items: int) -> TextCompletion:
        return replace(self, options=self.options[:items])

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        return encode_options(tokenizer, [[option] for option in self.options])

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]:
        first = [options[0] for options in scores]
        return {
            "acc": mean([float(score.greedy) for score in first]),
            "perplexity": perplexity([score.log_prob for score in first]),
        }

    @property
    def texts(self) -> list[str]:
        return [option.context + option.continuation for option in self.options]


def encode_options(
    tokenizer: Tokenizer, questions: Sequence[Sequence[Option]]
) -> list[list[Continuation]]:
    """The ids of all options, after what the tokenizer puts before every text."""
    pairs = [_moved(option) for options in questions for option in options]
    contexts = sorted({pair.context for pair in pairs})
    lengths = dict(zip(contexts, map(len, tokenizer.encode_batch(contexts)), strict=True))
    whole = tokenizer.encode_batch([pair.context + pair.continuation for pair in pairs])
    prefix = list(tokenizer.prefix)
    continuations = iter(
        _continuation(prefix, ids, lengths[pair.context], pair, tokenizer)
        for pair, ids in zip(pairs, whole, strict=True)
    )
    return [[next(continuations) for _ in options] for options in questions]


def _continuation(
    prefix: list[int], ids: list[int], length: int, pair: Option, tokenizer: Tokenizer
) -> Continuation:
    if not length and not prefix:
        # Without a context, a new document begins.
        prefix = [tokenizer.end_of_text]
    if length >= len(ids):
        raise UserError(
            f"the tokenizer gives no ids to {pair.continuation!r} after {pair.context[-40:]!r}",
            where="evaluate",
            remedy="leave this task out for this model",
        )
    return Continuation((*prefix, *ids), len(prefix) + length)


def _moved(option: Option) -> Option:
    """The option with the spaces at the end of its context moved to the continuation."""
    context = option.context.rstrip()
    return Option(context, option.context[len(context) :] + option.continuation)


@dataclass(frozen=True)
class TaskRows:
    """JSON objects, and where each of them is."""

    source: str
    sha256: str
    """SHA-256 of the file's bytes, or of the rows of a dataset."""
    rows: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(self.rows, start=1):
            yield f"{self.source}, line {number}", row

    @property
    def facts(self) -> dict[str, Any]:
        return {"data": self.source, "data_sha256": self.sha256}


def read_rows(path: Path) -> TaskRows:
    """The rows of a JSON-lines file, which may be compressed."""
    if not path.is_file():
        raise DataError("there is no such file", where=path)
    rows: list[Mapping[str, Any]] = []
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"not JSON: {error}", where=f"{path}, line {number}") from error
            if not isinstance(row, dict):
                raise DataError("not a JSON object", where=f"{path}, line {number}")
            rows.append(row)
    if not rows:
        raise DataError("the file has no rows", where=path)
    return TaskRows(str(path), sha256_file(path), rows)


def hub_rows(name: str, *, split: str, task: str) -> TaskRows:
    """The rows of a dataset on Hugging Face, from its cache or the network."""
    datasets = optional("datasets", extra="hub", purpose="reading a task from Hugging Face")
    datasets.disable_progress_bars()
    quiet_library("datasets")
    try:
        opened = open_hub(datasets, DatasetSpec(name, split=split))
    except DataError as error:
        last = error.problems[-1]
        remedy = f"{last.remedy}; or name a local file: {task}=FILE.jsonl"
        raise DataError([*error.problems[:-1], replace(last, remedy=remedy)]) from error
    rows = [dict(row) for row in opened.rows]
    content = json.dumps(rows, sort_keys=True, ensure_ascii=False)
    return TaskRows(f"{PREFIX}{name}@{opened.version}", sha256_text(content), rows)


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
    choices = [_without_marks(ending) for ending in _texts(row, "endings", where)]
    return [Option(query, f" {choice}") for choice in choices], choices


def _without_marks(text: str) -> str:
    """The text of WikiHow without [header], [title], [step] and the like."""
    text = text.strip().replace(" [title]", ". ")
    return _MARK.sub("", text).replace("  ", " ")


def _listed(key: str) -> Callable[[Row, str], tuple[list[Option], list[str]]]:
    def read(row: Row, where: str) -> tuple[list[Option], list[str]]:
        query, choices = _text(row, "query", where), _texts(row, key, where)
        return [Option(query, f" {choice}") for choice in choices], choices

    return read


def _schema(row: Row, where: str) -> tuple[list[Option], list[str]]:
    contexts = _texts(row, "context_options", where)
    ending = _text(row, "continuation", where)
    return [Option(context, f" {ending}") for context in contexts], [ending] * len(contexts)


_SHAPES = (
    _Shape(frozenset(("activity_label", "ctx_a", "ctx_b")), _harness_hellaswag, "label"),
    _Shape(frozenset(("query", "endings")), _listed("endings"), "label"),
    _Shape(frozenset(("query", "choices")), _listed("choices"), "gold"),
    _Shape(frozenset(("context_options", "continuation")), _schema, "gold"),
)


def _choices(name: str, rows: TaskRows) -> Task:
    first = rows.rows[0]
    shape = next((shape for shape in _SHAPES if shape.keys <= first.keys()), None)
    if shape is None:
        known = "; ".join(", ".join(sorted({*shape.keys, shape.gold})) for shape in _SHAPES)
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
