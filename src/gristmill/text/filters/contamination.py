"""Finds documents that hold questions of tasks, before a model trains on them.

    task items -> words -> runs of 13 words, as numbers -> sorted hashes
    a document -> words -> runs of 13 words             -> found among them, then compared

A word is a sequence of letters and digits, in lower case, so marks do not matter. As for GPT-3
(Brown et al. 2020, appendix C), one run that a document shares with an item is enough; items that
are shorter than a run count as a whole if they have eight words; and runs that many items share say
nothing of any of them. With a share, more of an item must be found, as for OLMo: one quoted
sentence of a long passage is not the passage. Runs are counted wherever they stand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gristmill.base.files import sha256_text
from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.words import HASH_BASE
from gristmill.text.sources.source import Reason

CONTAMINATION = "contamination"
WORDS = 13
SHORTEST = 8
MOST_ITEMS = 10
_WORD = re.compile(r"[^\W_]+")
_EXCERPT = 60
"""Characters of a sample before what was found."""
_ARRAYS, _TABLES = "contamination.npz", "contamination.json"

Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TaskTexts:
    """The items of a task as texts: question and right answer."""

    name: str
    data: str
    """Where they come from."""
    data_sha256: str
    texts: Sequence[str]


@dataclass(frozen=True)
class ContaminationSettings:
    """What counts as contaminated."""

    words: int = WORDS
    """The length of a run."""
    share: float = 0.0
    """The least share of an item's runs in a document; any one if 0."""


@dataclass(frozen=True)
class CheckedTask:
    """What was checked of a task, for the manifest of a set."""

    data: str
    data_sha256: str
    items: int
    unchecked: int
    """Items that are too short, or all of whose runs are in many items."""
    words: int
    share: float


class _Runs(NamedTuple):
    """All runs of one length, by their hashes."""

    length: int
    hashes: npt.NDArray[np.uint64]
    """Sorted."""
    places: Ids
    """Where each run begins in the words of all items."""


class _Match(NamedTuple):
    """A run that a document shares with an item."""

    item: int
    place: int
    """Where it begins in the words of all items."""
    begin: int
    """At which word of the document."""
    length: int


class ContaminationIndex:
    """The runs of words of all items."""

    def __init__(
        self,
        settings: ContaminationSettings,
        names: Sequence[str],
        facts: Sequence[Mapping[str, Any]],
        vocabulary: Sequence[str],
        ids: Ids,
        starts: Ids,
        first_items: Sequence[int],
    ) -> None:
        """`ids`: the words of all items; item i begins at starts[i], and task t at item
        first_items[t]."""
        self.settings = settings
        self._names, self._facts, self._vocabulary = list(names), list(facts), list(vocabulary)
        self._ids, self._starts, self._first_items = ids, starts, list(first_items)
        # 0 is for words that are in no item.
        self._id_of = {word: number for number, word in enumerate(vocabulary, 1)}
        self._runs = list(self._build_runs())
        self._run_counts = np.zeros(len(starts) - 1, np.int64)
        for runs in self._runs:
            np.add.at(self._run_counts, self._items_at(runs.places), 1)

    @classmethod
    def of(
        cls, tasks: Sequence[TaskTexts], settings: ContaminationSettings | None = None
    ) -> ContaminationIndex:
        """The index of some tasks."""
        vocabulary: dict[str, int] = {}
        ids, lengths, first_items = list[int](), list[int](), list[int]()
        for task in tasks:
            first_items.append(len(lengths))
            for text in task.texts:
                words = words_of(text)
                ids += [vocabulary.setdefault(word, len(vocabulary) + 1) for word in words]
                lengths.append(len(words))
        starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        facts = [
            {"data": task.data, "data_sha256": task.data_sha256, "items": len(task.texts)}
            for task in tasks
        ]
        return cls(
            settings or ContaminationSettings(),
            [task.name for task in tasks],
            facts,
            list(vocabulary),
            np.asarray(ids, np.int64),
            np.asarray(starts, np.int64),
            first_items,
        )

    # ------------------------------------------------------------------ what was checked

    @property
    def checked(self) -> dict[str, dict[str, Any]]:
        """What was checked, by task."""
        unchecked = self._run_counts == 0
        ends = [*self._first_items[1:], len(self._run_counts)]
        return {
            name: asdict(
                CheckedTask(
                    **facts,
                    unchecked=int(unchecked[first:end].sum()),
                    words=self.settings.words,
                    share=self.settings.share,
                )
            )
            for name, facts, first, end in zip(
                self._names, self._facts, self._first_items, ends, strict=True
            )
        }

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the items and the settings."""
        content = [self._names, asdict(self.settings), self._vocabulary, self._first_items]
        arrays = self._ids.tobytes().hex(), self._starts.tobytes().hex()
        return sha256_text(json.dumps([content, arrays]))

    def save(self, folder: Path) -> None:
        """Write it for other processes."""
        np.savez(folder / _ARRAYS, ids=self._ids, starts=self._starts)
        tables = {
            "settings": asdict(self.settings),
            "names": self._names,
            "facts": self._facts,
            "vocabulary": self._vocabulary,
            "first_items": self._first_items,
        }
        (folder / _TABLES).write_text(json.dumps(tables), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> ContaminationIndex | None:
        """What `save` wrote, if it did."""
        if not (folder / _TABLES).is_file():
            return None
        tables = json.loads((folder / _TABLES).read_text(encoding="utf-8"))
        settings = ContaminationSettings(**tables.pop("settings"))
        with np.load(folder / _ARRAYS, allow_pickle=False) as arrays:
            return cls(settings, ids=arrays["ids"], starts=arrays["starts"], **tables)

    # ------------------------------------------------------------------ runs

    def _build_runs(self) -> Iterator[_Runs]:
        lengths = np.diff(self._starts)
        for length in range(min(SHORTEST, self.settings.words), self.settings.words + 1):
            whole = length < self.settings.words
            chosen = lengths == length if whole else lengths >= length
            if not chosen.any():
                continue
            hashes = _run_hashes(self._ids, length)
            places = np.arange(len(hashes))
            items = self._items_at(places)
            # A run lies inside one item, and is all of an item that is shorter than others.
            inside = chosen[items] & (places + length <= self._starts[items + 1])
            places, hashes, items = places[inside], hashes[inside], items[inside]
            order = np.lexsort((items, hashes))
            places, hashes, items = places[order], hashes[order], items[order]
            first = np.concatenate(([True], hashes[1:] != hashes[:-1]))
            other = np.concatenate(([True], (items[1:] != items[:-1]) | first[1:]))
            count = np.add.reduceat(other.astype(np.int64), np.flatnonzero(first))
            rare = np.repeat(count <= MOST_ITEMS, np.diff(np.flatnonzero(first), append=len(first)))
            yield _Runs(length, hashes[rare], places[rare])

    def _items_at(self, places: Ids) -> Ids:
        """The item of each word; empty items have none."""
        return np.asarray(np.searchsorted(self._starts, places, side="right") - 1, np.int64)

    def _task_of(self, item: int) -> int:
        return int(np.searchsorted(self._first_items, item, side="right")) - 1

    # ------------------------------------------------------------------ documents

    def __call__(self, document: TextDocument) -> Reason | None:
        """Why a document is contaminated."""
        ids = np.fromiter(
            (self._id_of.get(word, 0) for word in _WORD.findall(document.lowered)), np.int64
        )
        matches = self._matches(ids)
        if not matches:
            return None
        shared: dict[int, set[int]] = {}
        for match in matches:
            shared.setdefault(match.item, set()).add(match.place)
        for match in matches:
            share = len(shared[match.item]) / int(self._run_counts[match.item])
            if share >= self.settings.share:
                return self._reason(match, document)
        return None

    def _matches(self, ids: Ids) -> list[_Match]:
        """The runs that a document shares with items, in the order of the document."""
        matches = list[_Match]()
        for runs in self._runs:
            if len(ids) < runs.length:
                continue
            hashes = _run_hashes(ids, runs.length)
            first = np.searchsorted(runs.hashes, hashes, side="left")
            known = first < len(runs.hashes)
            known[known] = runs.hashes[first[known]] == hashes[known]
            for begin in np.flatnonzero(known).tolist():
                end = np.searchsorted(runs.hashes, hashes[begin], side="right")
                for place in runs.places[first[begin] : end].tolist():
                    words = self._ids[place : place + runs.length]
                    if np.array_equal(words, ids[begin : begin + runs.length]):
                        item = int(self._items_at(np.asarray([place]))[0])
                        matches.append(_Match(item, place, begin, runs.length))
        return sorted(matches, key=lambda match: (match.begin, match.place))

    def _reason(self, match: _Match, document: TextDocument) -> Reason:
        task = self._task_of(match.item)
        numbers = self._ids[match.place : match.place + match.length].tolist()
        phrase = " ".join(self._vocabulary[number - 1] for number in numbers)
        # Lower case may have other lengths, so the place is approximate in rare scripts.
        starts = [found.start() for found in _WORD.finditer(document.lowered)]
        begin = max(0, starts[match.begin] - _EXCERPT)
        return Reason(
            f"{CONTAMINATION}: {self._names[task]}",
            sample=document.text[begin:],
            found=f"item {match.item - self._first_items[task] + 1}: {phrase}",
        )


def words_of(text: str) -> list[str]:
    """The words of a text, which runs consist of."""
    return _WORD.findall(text.lower())


def _run_hashes(ids: Ids, length: int) -> npt.NDArray[np.uint64]:
    """A number for each run of so many words."""
    count = max(0, len(ids) - length + 1)
    hashes, values = np.zeros(count, np.uint64), ids.astype(np.uint64)
    for place in range(length):
        hashes = hashes * HASH_BASE + values[place : place + count]
    return hashes
