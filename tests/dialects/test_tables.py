"""The tables hold together: every row leads somewhere, and no option of Megatron is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.config.invalid import setting_paths
from gristmill.dialects.table import (
    Dialect,
    ForeignOption,
    dialect_names,
    load_dialect,
    load_table,
    table_names,
)
from gristmill.dialects.translate import RULES

SETTINGS = {".".join(path) for path in setting_paths()}


def command(verb: str) -> Any:
    found: Any = typer.main.get_command(app)
    for word in verb.split():
        found = found.commands[word]
    return found


def names_of(verb: str) -> set[str]:
    """Options and arguments of one of our commands."""
    names = set()
    for parameter in command(verb).params:
        if parameter.param_type_name == "argument":
            names.add(str(parameter.metavar or parameter.name).upper().strip("…[]"))
        names |= {*parameter.opts, *parameter.secondary_opts}
    return names


def targets(dialect: Dialect) -> Iterator[str]:
    yield from dialect.fixed
    yield from (option.to for option in dialect.options.values() if option.to is not None)


@pytest.mark.parametrize("name", table_names())
def test_every_row_names_a_setting_or_an_option(name: str) -> None:
    dialect = load_table(name)
    for target in targets(dialect):
        if dialect.verb == "train" and not target.startswith("-"):
            assert target in SETTINGS, target
        else:
            assert target in names_of(dialect.verb), target


@pytest.mark.parametrize("name", table_names())
def test_every_rule_is_there_and_called(name: str) -> None:
    dialect = load_table(name)
    assert set(dialect.rules) <= set(RULES)
    used = {option.rule for option in dialect.options.values() if option.rule is not None}
    assert used <= set(dialect.rules)


@pytest.mark.parametrize("name", table_names())
def test_defaults_are_of_the_right_kind(name: str) -> None:
    kinds = {"int": int, "float": float, "text": str, "bool": bool, "flag": bool}
    for option, row in load_table(name).options.items():
        values = row.default if row.count is not None else [row.default]
        for value in values if row.default is not None else ():
            assert type(value) is kinds[row.value], option
        if row.choices is not None and row.default is not None:
            assert row.default in row.choices, option


@pytest.mark.parametrize("name", table_names())
def test_no_option_has_two_rows(name: str) -> None:
    dialect = load_table(name)
    others = [other for row in dialect.options.values() for other in row.also]
    whole = [one for family in dialect.families for one in family.names if "*" not in one]
    names = [*dialect.options, *others, *whole]
    assert len(names) == len(set(names))
    for family in dialect.families:
        assert isinstance(family.option, ForeignOption)


def test_no_option_of_megatron_is_missing() -> None:
    """Every option of the releases 1.0 to core 0.17, of the newest Megatron-LM, and of
    Megatron-DeepSpeed."""
    dialect = load_table("megatron")
    file = Path(__file__).with_name("megatron_options.txt")
    names = file.read_text(encoding="utf-8").split()
    assert len(names) > 1000
    for name in names:
        (found,) = dialect.resolve(name)
        assert name in (found, *dialect.option(found).also)


def test_dialects_of_a_command() -> None:
    assert dialect_names("train") == [
        "decentralized", "llm-pytorch", "megatron", "nanogpt", "xla-gpt2"
    ]  # fmt: skip
    assert load_dialect("megatron", "prepare").program == "preprocess_data.py"
    assert load_dialect("xla-gpt2", "generate").program == "generate.py"


@pytest.mark.parametrize(
    ("name", "verb", "remedy"),
    [("megatorn", "train", "megatron"), ("megatron", "generate", "xla-gpt2"),
     ("../megatron", "train", "megatron"), ("megatron-prepare", "train", "megatron"),
     ("", "prepare", "nanogpt")],
)  # fmt: skip
def test_a_dialect_that_is_not_there(name: str, verb: str, remedy: str) -> None:
    with pytest.raises(UserError) as raised:
        load_dialect(name, verb)
    assert raised.value.exit == 2
    assert remedy in str(raised.value)


def test_an_option_goes_one_way() -> None:
    for ways in (
        {},
        {"to": "train.seed", "ignored": "no"},
        {"refused": "no"},
        {"ignored": "no", "refused": "no", "instead": "x"},
    ):
        with pytest.raises(ValueError, match=r"only one of these|told what to do"):
            ForeignOption(**ways)
