"""CORE, the score over 22 tasks with which DataComp-LM and nanochat judge base models.

Its questions come as a bundle, a folder or a zip file:

    core.yaml             the tasks: label, type, file, examples in the prompt, delimiter
    eval_meta_data.csv    the accuracy of guessing, for each task
    eval_data/            JSON lines

As nanochat computes it: a text begins with the tokenizer's first token; the examples in the prompt
are drawn from the other items by a generator seeded with the item's number; of several options the
one with the lowest mean loss per token is taken, over the tokens after what all options begin with
(or before what all end with, where contexts differ). Every accuracy is centered so that guessing is
0 and no mistake is 1, and CORE is the mean of these.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.caches import cache_folder
from gristmill.base.errors import DataError, optional
from gristmill.base.files import sha256_text
from gristmill.evaluate.measures import Measure, mean
from gristmill.evaluate.results import EvaluationResult
from gristmill.evaluate.scoring import Continuation, Score, common_length
from gristmill.text.tokenizers.tokenizer import Tokenizer

NAME = "core"
BUNDLE = "eval_bundle"
URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234
LARGEST = 2**30
"""Bytes of a file in a bundle; all of nanochat's have less together."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class CoreTask:
    """One of CORE's tasks."""

    name: str
    kind: str
    """multiple_choice, schema or language_modeling."""
    rows: list[Row]
    examples: int
    """How many solved items stand before the question."""
    delimiter: str
    guessing: float
    """The accuracy of guessing."""
    facts: dict[str, Any]

    def first(self, items: int) -> CoreTask:
        """Its first items; the examples in prompts are drawn from these."""
        return replace(self, rows=self.rows[:items])

    def questions(self, tokenizer: Tokenizer) -> list[list[Continuation]]:
        render, cut = _KINDS[self.kind]
        texts = [
            render(row, self._examples(number), self.delimiter)
            for number, row in enumerate(self.rows)
        ]
        flat = iter(tokenizer.encode_batch([text for options in texts for text in options]))
        first = tokenizer.prefix or (tokenizer.end_of_text,)
        results = []
        for number, options in enumerate(texts):
            try:
                results.append(cut([(*first, *next(flat)) for _ in options]))
            except ValueError as error:
                raise DataError(str(error), where=f"{self.name}, item {number}") from error
        return results

    def _examples(self, number: int) -> list[Row]:
        others = [place for place in range(len(self.rows)) if place != number]
        drawn = random.Random(EXAMPLES_SEED + number).sample(others, self.examples)
        return [self.rows[place] for place in drawn]

    def measures(self, scores: Sequence[Sequence[Score]]) -> dict[str, Measure]:
        right = list[float]()
        for row, options in zip(self.rows, scores, strict=True):
            if self.kind == "language_modeling":
                right.append(float(options[0].greedy))
                continue
            losses = [-option.log_prob / option.tokens for option in options]
            right.append(float(losses.index(min(losses)) == row["gold"]))
        accuracy = mean(right)
        scale = 1 / (1 - self.guessing)
        centered = Measure(
            (accuracy.value - self.guessing) * scale,
            None if accuracy.stderr is None else accuracy.stderr * scale,
            accuracy.items,
            scale,
        )
        return {"acc": accuracy, "centered": centered}

    @property
    def texts(self) -> list[str]:
        """Every question with its right answer."""
        return [_solved(row, self.kind, self.delimiter) for row in self.rows]


def combined(results: Sequence[EvaluationResult]) -> EvaluationResult:
    """CORE, from the results of all its tasks."""
    centered = [result.measures["centered"] for result in results]
    errors = [measure.stderr for measure in centered]
    known = [error for error in errors if error is not None]
    stderr = math.hypot(*known) / len(errors) if len(known) == len(errors) else None
    value = math.fsum(measure.value for measure in centered) / len(centered)
    return EvaluationResult(
        NAME,
        {"core": Measure(value, stderr)},
        count=sum(result.count for result in results),
        seconds=sum(result.seconds for result in results),
        facts={"data_sha256": {result.name: result.facts["data_sha256"] for result in results}},
        notes=tuple(note for result in results for note in result.notes),
        parts={result.name: result.measures for result in results},
    )


# ------------------------------------------------------------------ the bundle


def open_core(place: Path | None, *, where: str) -> list[CoreTask]:
    """The tasks of a bundle: the given one, or that in the cache."""
    place = place or _cached(where)
    yaml = optional("yaml", extra="eval", purpose="reading core.yaml")
    try:
        read = _reader(place)
        listed = yaml.safe_load(read("core.yaml"))["icl_tasks"]
        table = csv.DictReader(io.StringIO(read("eval_meta_data.csv")))
        guessing = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in table}
        return [_task(entry, guessing[entry["label"]], read) for entry in listed]
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        what = f"not a bundle as nanochat has it: {type(error).__name__}: {error}"
        raise DataError(what, where=place) from error


def _cached(where: str) -> Path:
    folder = cache_folder()
    for place in (folder / BUNDLE, folder / f"{BUNDLE}.zip"):
        if place.exists():
            return place
    raise DataError(
        "CORE needs its bundle of questions",
        where=where,
        remedy=f"download {URL}, then name it: core={BUNDLE}.zip, or put it into {folder}",
    )


def _reader(place: Path) -> Callable[[str], str]:
    """Reads a file of the bundle by its name."""
    if place.is_dir():
        return lambda name: _read(place / name)
    try:
        content = zipfile.ZipFile(place)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"no folder and no zip file: {error}", where=place) from error
    # The files are in a folder of their own.
    (root,) = {name.removesuffix("core.yaml") for name in content.namelist() if _is_list(name)} or {
        ""
    }

    def read(name: str) -> str:
        try:
            entry = content.getinfo(root + name)
            if entry.file_size > LARGEST:
                raise DataError(f"its {name} is larger than any of a bundle", where=place)
            return content.read(entry).decode()
        except KeyError as error:
            raise DataError(f"there is no {name} in it", where=place) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise DataError(f"its {name} is damaged: {error}", where=place) from error
        except RuntimeError as error:  # a password, or a method that is not built in
            raise DataError(f"its {name} cannot be unpacked: {error}", where=place) from error

    return read


def _is_list(name: str) -> bool:
    return name.rpartition("/")[2] == "core.yaml" and not name.startswith("__MACOSX")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=path) from error


def _task(listed: Mapping[str, Any], guessing: float, read: Callable[[str], str]) -> CoreTask:
    label, kind = listed["label"], listed["icl_task_type"]
    if kind not in _KINDS:
        raise ValueError(f"{label}: tasks of type {kind!r} are not known")
    content = read(f"eval_data/{listed['dataset_uri']}")
    rows = [json.loads(line) for line in content.splitlines() if line.strip()]
    # nanochat shuffles before it takes the first ones.
    random.Random(SHUFFLE_SEED).shuffle(rows)
    examples = listed["num_fewshot"][0]
    facts = {
        "data": listed["dataset_uri"],
        "data_sha256": sha256_text(content),
        "examples": examples,
    }
    delimiter = listed.get("continuation_delimiter", " ")
    return CoreTask(label, kind, rows, examples, delimiter, guessing, facts)


# ------------------------------------------------------------------ prompts


def _with_examples(solved: Sequence[str], question: str) -> str:
    return "".join(f"{example}\n\n" for example in solved) + question


def _solved(row: Row, kind: str, delimiter: str) -> str:
    if kind == "multiple_choice":
        return str(row["query"] + delimiter + row["choices"][row["gold"]])
    if kind == "schema":
        return str(row["context_options"][row["gold"]] + delimiter + row["continuation"])
    return str(row["context"].strip() + delimiter + row["continuation"])


def _choices(row: Row, examples: Sequence[Row], delimiter: str) -> list[str]:
    solved = [_solved(example, "multiple_choice", delimiter) for example in examples]
    return [_with_examples(solved, row["query"] + delimiter + choice) for choice in row["choices"]]


def _contexts(row: Row, examples: Sequence[Row], delimiter: str) -> list[str]:
    solved = [_solved(example, "schema", delimiter) for example in examples]
    return [
        _with_examples(solved, context + delimiter + row["continuation"])
        for context in row["context_options"]
    ]


def _texts(row: Row, examples: Sequence[Row], delimiter: str) -> list[str]:
    """The prompt without and with what is to be predicted."""
    solved = [_solved(example, "language_modeling", delimiter) for example in examples]
    question = _with_examples(solved, row["context"].strip() + delimiter)
    return [question.strip(), question + row["continuation"]]


def _after_common(options: Sequence[tuple[int, ...]]) -> list[Continuation]:
    # One option may be the beginning of another: its last token is scored then.
    start = min(common_length(options), min(map(len, options)) - 1)
    return [_checked(ids, start) for ids in options]


def _common_end(options: Sequence[tuple[int, ...]]) -> list[Continuation]:
    count = common_length([ids[::-1] for ids in options])
    return [_checked(ids, len(ids) - count) for ids in options]


def _second(options: Sequence[tuple[int, ...]]) -> list[Continuation]:
    without, whole = options
    if whole[: len(without)] != without:
        raise ValueError("the prompt's ids change with what follows it")
    return [_checked(whole, len(without))]


def _checked(ids: tuple[int, ...], start: int) -> Continuation:
    if not 0 < start < len(ids):
        raise ValueError("there is nothing to score, or nothing before it")
    return Continuation(ids, start)


_Render = Callable[[Row, Sequence[Row], str], list[str]]
_Cut = Callable[[Sequence[tuple[int, ...]]], list[Continuation]]
_KINDS: dict[str, tuple[_Render, _Cut]] = {
    "multiple_choice": (_choices, _after_common),
    "schema": (_contexts, _common_end),
    "language_modeling": (_texts, _second),
}
