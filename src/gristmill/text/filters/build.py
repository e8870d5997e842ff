"""Builds filters from their settings, and applies them to the rows of a block.

    TextRows  ->  each text through all filters, in order  ->  TextRows, reasons for the dropped

The result is a function of the rows alone, so any process may compute it, of any part of the text.
Processes that encode get the filters as files in a folder (`save_filters`, `open_filters`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gristmill.base.files import sha256_file
from gristmill.text.filters.contamination import ContaminationIndex
from gristmill.text.filters.document import Filter, TextDocument
from gristmill.text.filters.gopher import GopherQuality, GopherRepetition
from gristmill.text.filters.own import OwnFilter, OwnFilterError, source_file
from gristmill.text.filters.plain import LanguageFilter, LengthFilter, RegexFilter, WordsFilter
from gristmill.text.filters.settings import SETTINGS, FilterSettings, NamedFilter, OwnSettings
from gristmill.text.filters.web import C4Quality, FineWeb, UrlFilter
from gristmill.text.filters.words import WordTable
from gristmill.text.sources.source import Reason, TextRows, Value

SAMPLE = 400
"""Characters of a dropped text that the ledger may keep."""
_NOTHING_LEFT = Reason("nothing left after filtering")
_FILE = "filters.json"
_CONSTRUCTORS: Mapping[str, Callable[[Any], Filter]] = {
    "url": UrlFilter,
    "language": LanguageFilter,
    "length": LengthFilter,
    "gopher-repetition": GopherRepetition,
    "gopher-quality": GopherQuality,
    "c4": C4Quality,
    "fineweb": FineWeb,
    "words": WordsFilter,
    "regex": RegexFilter,
    "own": OwnFilter,
}


@dataclass(frozen=True)
class FilterPlan:
    """Which filters there are, in order, and what documents must not hold."""

    filters: tuple[NamedFilter, ...] = ()
    contamination: ContaminationIndex | None = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return bool(self.filters) or self.contamination is not None

    @property
    def fields(self) -> tuple[str, ...]:
        """Keys of a row that are read beside its texts."""
        return tuple(
            dict.fromkeys(key for _, settings in self.filters for key in settings.fields_read)
        )

    @property
    def checked(self) -> dict[str, dict[str, Any]]:
        """The tasks that documents are checked against."""
        return self.contamination.checked if self.contamination else {}

    def as_json(self) -> dict[str, Any]:
        """All that decides what is dropped, files that are named included."""
        value: dict[str, Any] = {}
        if self.filters:
            value["filters"] = [[name, _facts(settings)] for name, settings in self.filters]
        if self.contamination:
            value["decontaminate"] = self.contamination.fingerprint
        return value


def _facts(settings: FilterSettings) -> dict[str, Any]:
    facts = settings.model_dump(mode="json")
    for name in settings.files:
        if facts[name] is not None and Path(facts[name]).is_file():
            facts[f"{name} (content)"] = sha256_file(Path(facts[name]))
    if isinstance(settings, OwnSettings) and (path := source_file(settings.function)):
        facts["function (content)"] = sha256_file(path) if path.is_file() else None
    return facts


class Filters:
    """Filters that are ready for documents."""

    def __init__(self, plan: FilterPlan) -> None:
        self._filters = [_CONSTRUCTORS[name](settings) for name, settings in plan.filters]
        if plan.contamination:
            self._filters.append(plan.contamination)
        self._table = WordTable()

    def judge(self, text: str, fields: Mapping[str, str]) -> Value:
        """The text that is left of a document, or why nothing is."""
        document = TextDocument(text, fields, self._table)
        for apply in self._filters:
            verdict = apply(document)
            if isinstance(verdict, Reason):
                sample = verdict.sample or document.text
                return replace(verdict, sample=sample[:SAMPLE])
            if verdict == "":
                return replace(_NOTHING_LEFT, sample=text[:SAMPLE])
            if verdict is not None:
                document = document.changed(verdict)
        return document.text


def filter_rows(rows: TextRows, filters: Filters, *, fields: Sequence[str]) -> TextRows:
    """The rows of a block after filtering, without the fields that filters ask for.

    A filter of the user's that fails raises an `OwnFilterError` with the place in the block.
    """
    texts = rows.columns[: len(rows.columns) - len(fields)]
    beside = rows.columns[len(texts) :]
    places = range(len(rows.places))
    known = [dict(zip(fields, (c[row] for c in beside), strict=True)) for row in places]
    columns = [
        [_judged(value, row, rows, filters, known[row]) for row, value in enumerate(column)]
        for column in texts
    ]
    return replace(rows, columns=columns)


def _judged(
    value: Value, row: int, rows: TextRows, filters: Filters, beside: Mapping[str, Value]
) -> Value:
    if isinstance(value, Reason):
        return value
    fields = {key: field for key, field in beside.items() if isinstance(field, str)}
    try:
        return filters.judge(value, fields)
    except OwnFilterError as error:
        error.place = rows.places[row]
        raise


# ------------------------------------------------------------------ for other processes


def save_filters(plan: FilterPlan, folder: Path) -> None:
    """Write a plan for other processes."""
    value = [[name, settings.model_dump(mode="json")] for name, settings in plan.filters]
    (folder / _FILE).write_text(json.dumps(value), encoding="utf-8")
    if plan.contamination:
        plan.contamination.save(folder)


def open_filters(folder: Path) -> Filters | None:
    """The filters that `save_filters` wrote, if it did."""
    if not (folder / _FILE).is_file():
        return None
    value = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    named = tuple((name, SETTINGS[name].model_validate(table)) for name, table in value)
    return Filters(FilterPlan(named, ContaminationIndex.load(folder)))
