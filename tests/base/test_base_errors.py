"""How the program says what the user can mend."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gristmill.base.errors import DataError, Exit, Problem, UserError, optional


def test_a_problem_reads_place_then_fault_then_remedy() -> None:
    assert str(Problem("it leaks")) == "it leaks"
    assert str(Problem("it leaks", "the roof")) == "the roof: it leaks"
    assert str(Problem("it leaks", remedy="mend it")) == "it leaks\n    mend it"
    assert str(Problem("it leaks", "the roof", "mend it")) == "the roof: it leaks\n    mend it"


def test_an_error_of_one_problem() -> None:
    error = UserError("it leaks", where="the roof", remedy="mend it", exit=Exit.DATA)
    assert str(error) == "the roof: it leaks\n    mend it"
    assert error.problems == [Problem("it leaks", "the roof", "mend it")]
    assert error.exit is Exit.DATA
    assert UserError("it leaks").exit is Exit.CONFIG
    damaged = DataError("it leaks", where=Path("the") / "roof")
    assert damaged.exit is Exit.DATA and damaged.problems[0].where == "the/roof"


def test_an_error_of_several_problems_lists_them_in_order() -> None:
    problems = (Problem(what, remedy="mend it") for what in ("one", "two"))
    error = UserError(problems)
    assert str(error) == "one\n    mend it\ntwo\n    mend it"
    assert len(error.problems) == 2


def test_exit_statuses_are_those_documented() -> None:
    assert {status.name: int(status) for status in Exit} == {
        "DONE": 0,
        "USAGE": 2,
        "DATA": 65,
        "INTERNAL": 70,
        "DEVICE": 71,
        "STORAGE": 74,
        "STOPPED": 75,
        "PEER": 76,
        "REFUSED": 77,
        "CONFIG": 78,
    }
    assert Exit(76).meaning == "another process was lost"
    assert len({status.meaning for status in Exit}) == len(Exit), "each has a meaning of its own"


def test_an_optional_package_is_imported() -> None:
    assert optional("json", extra="data", purpose="reading") is json


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "wandb.sdk"):  # which another test may have imported
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        optional("wandb.sdk", extra="wandb", purpose="reporting to Weights & Biases")
    assert str(caught.value) == (
        "reporting to Weights & Biases needs the package 'wandb', which is not installed\n"
        "    pip install 'gristmill[wandb]'"
    )
    assert isinstance(caught.value.__cause__, ImportError)
