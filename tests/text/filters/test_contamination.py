"""Runs of words of task items are found where they stand, and nowhere else."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from gristmill.text.filters.contamination import (
    ContaminationIndex,
    ContaminationSettings,
    TaskTexts,
    words_of,
)
from gristmill.text.filters.document import TextDocument
from gristmill.text.filters.words import WordTable
from gristmill.text.sources.source import Reason


def index(*texts: str, name: str = "quiz", **settings: float) -> ContaminationIndex:
    words, share = int(settings.get("words", 13)), settings.get("share", 0.0)
    task = TaskTexts(name, "memory", "sha", texts)
    return ContaminationIndex.of([task], ContaminationSettings(words, share))


def found(built: ContaminationIndex, text: str) -> str | None:
    reason = built(TextDocument(text, {}, WordTable()))
    return None if reason is None else f"{reason.value}, {reason.found}"


def run(begin: int, length: int, mark: str = " ") -> str:
    return mark.join(f"word{number}" for number in range(begin, begin + length))


def test_one_run_is_enough() -> None:
    built = index("short", run(0, 40))
    assert found(built, f"before {run(10, 13)} after") == (
        f"contamination: quiz, item 2: {run(10, 13)}"
    )
    assert found(built, f"before {run(10, 12)} after") is None
    assert found(built, f"before {run(10, 6)} x {run(16, 7)} after") is None
    # Neither marks nor case nor line ends matter.
    spoken = f"«{run(27, 13, mark=', ').upper()}»".replace("WORD30,", "Word30\n--")
    assert found(built, spoken) is not None


def test_shorter_items_count_as_a_whole() -> None:
    built = index(run(0, 8), run(100, 7), run(200, 12))
    assert found(built, run(0, 9)) == f"contamination: quiz, item 1: {run(0, 8)}"
    assert found(built, run(100, 20)) is None
    assert found(built, f"a {run(200, 12)} b") == f"contamination: quiz, item 3: {run(200, 12)}"
    assert found(built, run(200, 11)) is None
    assert built.checked["quiz"]["unchecked"] == 1


def test_what_many_items_share_says_nothing() -> None:
    common = run(0, 13)
    ten = index(*(f"{common} {run(100 * n, 14)}" for n in range(1, 11)))
    eleven = index(*(f"{common} {run(100 * n, 14)}" for n in range(1, 12)))
    assert found(ten, common) is not None
    assert found(eleven, common) is None
    assert found(eleven, run(300, 13)) is not None
    # Many times in one item is one item.
    assert found(index(" ".join([common] * 20)), common) is not None
    assert index(*[common] * 11).checked["quiz"]["unchecked"] == 11


def test_a_share_of_an_item() -> None:
    item = run(0, 32)  # 20 runs
    text = f"{run(0, 17)} and elsewhere {run(20, 12)} and {run(15, 17)}"  # 5 and 5 of them
    assert found(index(item, share=0.5), text) is not None
    assert found(index(item, share=0.51), text) is None
    assert found(index(item, share=1.0), item) is not None
    # The same run again is still one.
    assert found(index(item, share=0.1), f"{run(0, 13)} x {run(0, 13)}") is None


def test_samples_show_the_place() -> None:
    built = index(run(0, 20))
    reason = built(TextDocument(f"{'x ' * 500}{run(0, 20)}", {}, WordTable()))
    assert isinstance(reason, Reason)
    assert reason.sample.startswith("x x") and reason.sample.index("word0 ") == 60


def test_tasks_are_told_apart(tmp_path: Path) -> None:
    tasks = [
        TaskTexts("first", "a", "1", [run(0, 20), ""]),
        TaskTexts("none", "b", "2", []),
        TaskTexts("second", "c", "3", [run(50, 20), run(80, 20)]),
    ]
    built = ContaminationIndex.of(tasks)
    built.save(tmp_path)
    loaded = ContaminationIndex.load(tmp_path)
    assert loaded is not None
    assert loaded.fingerprint == built.fingerprint
    assert loaded.checked == built.checked
    for same in (built, loaded):
        assert found(same, run(0, 20)) == f"contamination: first, item 1: {run(0, 13)}"
        assert found(same, run(85, 13)) == f"contamination: second, item 2: {run(85, 13)}"
    assert {name: facts["items"] for name, facts in built.checked.items()} == {
        "first": 2, "none": 0, "second": 2,
    }  # fmt: skip
    other = ContaminationIndex.of(tasks, ContaminationSettings(12))
    assert other.fingerprint != built.fingerprint
    assert ContaminationIndex.load(tmp_path / "none") is None
    assert found(ContaminationIndex.of([]), run(0, 20)) is None


@pytest.mark.parametrize("words", [8, 13])
def test_what_plain_code_finds(words: int) -> None:
    chance = random.Random(words)

    def text(length: int) -> str:
        return " ".join(chance.choices("ab", k=length))

    items = [text(chance.randrange(40)) for _ in range(30)]
    built = index(*items, words=words)
    holders: dict[str, set[int]] = {}
    for number, item in enumerate(items):
        spoken = re.findall(r"\w+", item)
        length = min(words, len(spoken))
        if length >= 8:
            for place in range(len(spoken) - length + 1):
                holders.setdefault(" ".join(spoken[place : place + length]), set()).add(number)
    rare = [gram for gram, numbers in holders.items() if len(numbers) <= 10]
    hits = 0
    for _ in range(200):
        document = text(chance.randrange(60))
        expected = any(f" {gram} " in f" {document} " for gram in rare)
        assert (found(built, document) is not None) == expected
        hits += expected
    assert 10 < hits < 195


def test_equal_hashes_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alike(ids: np.ndarray, length: int) -> np.ndarray:
        return np.zeros(max(0, len(ids) - length + 1), np.uint64)

    monkeypatch.setattr("gristmill.text.filters.contamination._run_hashes", all_alike)
    built = index(run(0, 13), run(50, 13))
    # One hash for all: many items seem to share it, but there are no more than ten.
    assert found(built, run(0, 13)) is not None
    assert found(built, f"{run(0, 12)} other") is None


def test_words() -> None:
    assert words_of("It's 3.5 km_h — ÄPFEL!") == ["it", "s", "3", "5", "km", "h", "äpfel"]
