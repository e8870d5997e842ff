"""Settings put into the text of a run file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.plan.run_file import with_settings

WHERE = Path("run.toml")
TEXT = """name = "a"  # the name

[train]
until = "1k steps"
micro_batch = 2   # small
# the end

[data]
paths = "x"
"""


def test_values_change_in_their_lines_and_all_else_stays() -> None:
    made = with_settings(
        TEXT,
        {"train.micro_batch": 8, "train.recompute": "full", "parallel.tp": 4, "parallel.pp": None},
        where=WHERE,
    )
    assert 'name = "a"  # the name\n' in made
    assert "micro_batch = 8   # small\n# the end\n" in made
    values = tomllib.loads(made)
    assert values["train"] == {"until": "1k steps", "micro_batch": 8, "recompute": "full"}
    assert values["parallel"] == {"tp": 4}
    assert values["data"] == {"paths": "x"}
    kept = [line for line in TEXT.splitlines() if "micro_batch" not in line]
    assert all(line in made.splitlines() for line in kept)


def test_what_is_none_is_removed() -> None:
    made = with_settings(TEXT, {"train.micro_batch": None}, where=WHERE)
    assert made == TEXT.replace("micro_batch = 2   # small\n", "")


def test_doing_it_again_changes_nothing() -> None:
    changes = {"train.micro_batch": 8, "parallel.tp": 4}
    once = with_settings(TEXT, changes, where=WHERE)
    assert with_settings(once, changes, where=WHERE) == once


@pytest.mark.parametrize("text", ['train = {until = "1k steps"}\n', 'train.until = "1k steps"\n'])
def test_other_forms_of_tables_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="not written in tables"):
        with_settings(text, {"train.micro_batch": 8}, where=WHERE)
