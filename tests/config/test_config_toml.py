"""The lines of keys in TOML text."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from gristmill.config.documentation import key_lines

BARE = st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True)
WORDS = st.one_of(
    st.integers(), st.booleans(), st.text('aZ9 =[]#.\n"\\\u00fc'), st.lists(st.text("a =\n"))
)


def nested(
    keys: st.SearchStrategy[str], values: st.SearchStrategy[Any]
) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(
        keys,
        st.recursive(values, lambda inner: st.dictionaries(keys, inner, max_size=3), max_leaves=6),
        max_size=4,
    )


def leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))


@given(nested(BARE, WORDS))
def test_every_written_key_is_found_on_its_line(tables: dict[str, Any]) -> None:
    text = tomli_w.dumps(tables)
    lines, places = text.split("\n"), key_lines(text)
    for path in leaves(tables):
        value: Any = tables
        for part in path:
            value = value[part]
        if isinstance(value, dict):
            header = f"[{'.'.join(path)}"
            assert lines[places[path] - 1].startswith((f"{header}]", f"{header}."))
        else:
            assert lines[places[path] - 1].startswith(f"{path[-1]} = ")


def test_lines_are_counted_from_one() -> None:
    text = (
        "# a comment\n"
        'name = "trial"  # and another\n'
        "\n"
        "  [ train ]  # the table\n"
        '"batch"=12\n'
        "optim . lr = 1e-3\n"
        "#seed = 3\n"
        "[precision.loss_scale]\n"
        "window = 100\n"
    )
    assert key_lines(text) == {
        ("name",): 2,
        ("train",): 4,
        ("train", "batch"): 5,
        ("train", "optim"): 6,
        ("train", "optim", "lr"): 6,
        ("precision",): 8,
        ("precision", "loss_scale"): 8,
        ("precision", "loss_scale", "window"): 9,
    }


@pytest.mark.parametrize("quote", ['"""', "'''"])
def test_lines_inside_long_strings_are_no_keys(quote: str) -> None:
    text = f"first = {quote}\n[table]\nkey = 1\n{quote}\nsecond = {quote}short{quote}\nthird = 3\n"
    assert key_lines(text) == {("first",): 1, ("second",): 5, ("third",): 6}


def test_lists_over_several_lines_are_no_keys() -> None:
    text = 'prompts = [\n  "one = 1",\n  "two",\n]\nafter = 2\n'
    assert key_lines(text) == {("prompts",): 1, ("after",): 5}


@pytest.mark.parametrize("line", ['first = 1  # no """ here', "first = \"'''\""])
def test_quotes_in_comments_and_strings_hide_no_keys(line: str) -> None:
    assert tomllib.loads(f"{line}\nsecond = 2\n")["second"] == 2
    assert key_lines(f"{line}\nsecond = 2\n")[("second",)] == 2


def test_lines_may_end_as_on_windows() -> None:
    text = 'first = """\r\na\r\n"""\r\n[table]\r\nkey = { a = 1 }\r\n'
    assert key_lines(text) == {
        ("first",): 1,
        ("table",): 4,
        ("table", "key"): 5,
        ("table", "key", "a"): 5,
    }


@pytest.mark.parametrize("mark", ["\u2028", "\x85"])
def test_only_line_feeds_end_a_line(mark: str) -> None:
    text = f"# one{mark}line\nfirst = 1\n"
    assert key_lines(text)[("first",)] == 2


def test_a_dot_inside_quotes_divides_nothing() -> None:
    assert key_lines('"a.b" = 1\n') == {("a.b",): 1}
