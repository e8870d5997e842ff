"""Whatever a setting holds, it stays a value: nothing that a job script says can run it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import UserError
from gristmill.launch.jobs import batch
from gristmill.launch.jobs.batch import render

HOSTILE = (
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned;",
    "x && touch pwned",
    "' ; touch pwned ; '",
    '" ; touch pwned ; "',
    "a\\",
    "${IFS}touch${IFS}pwned",
    "{{ 7 * 7 }}",
    "~root",
    "*",
    "-rf",
    "#",
    " a  b ",
)


def made(text: str, **values: object) -> str:
    return batch._environment().from_string(text).render(**values)


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_word_of_shell_is_that_word(value: str) -> None:
    assert shlex.split(made("x {{ value | sh }}", value=value), posix=True) == ["x", value]


@pytest.mark.parametrize("value", HOSTILE)
def test_the_shell_itself_sees_a_word(value: str, tmp_path: Path) -> None:
    script = made("printf %s {{ value | sh }}", value=value)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == (value, "")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("filter", ["directive", "comment"])
def test_lines_for_schedulers_stay_one_line(filter: str) -> None:
    for value in HOSTILE:
        assert "\n" not in made(f"{{{{ value | {filter} }}}}", value=value)


def test_control_characters_are_refused() -> None:
    with pytest.raises(UserError, match="a line break or another control character"):
        made("#SBATCH --x={{ value | directive }}", value="a\nrm -rf /")
    with pytest.raises(UserError, match="control character"):
        made("{{ value | sh }}", value="a\0b")
    assert made("# {{ value | comment }}", value="a\nrm -rf /") == "# a rm -rf /"


def test_text_without_a_filter_does_not_render() -> None:
    with pytest.raises(AssertionError, match="without saying how it is quoted"):
        made("{{ value }}", value="anything")
    with pytest.raises(AssertionError, match="without saying how it is quoted"):
        made("{{ value }}", value=True)
    with pytest.raises((AssertionError, jinja2.UndefinedError)):
        made("{{ missing }}")
    assert made("{{ value }}", value=3) == "3"


def test_yaml_keeps_a_value_a_string() -> None:
    yaml = pytest.importorskip("yaml")
    for value in (*HOSTILE, "yes", "1e3", "!!python/object:os.system", "a: b", "- a", "x\ny"):
        assert yaml.safe_load(made("key: {{ value | yaml }}", value=value)) == {"key": value}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_lines_in_yaml_are_those_lines(lines: list[str]) -> None:
    yaml = pytest.importorskip("yaml")
    text = "\n".join(lines)
    for value in (text, f"x{text}\n"):
        shown = made("a:\n  b: {{ value | lines(4) }}\n  c: 1\n", value=value)
        assert yaml.safe_load(shown) == {"a": {"b": value, "c": 1}}


def test_all_templates_are_there() -> None:
    folder = Path(batch.__file__).with_name("templates")
    for file in folder.glob("*.jinja"):
        assert batch._environment().get_template(file.name)
    with pytest.raises(jinja2.TemplateNotFound):
        render("nothing.jinja")
