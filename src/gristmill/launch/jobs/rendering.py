"""Job files from templates, in which no value can be read as a command.

A template is Jinja in `templates/`. Whatever it puts out has to say how it is quoted, by a filter:

    {{ value | sh }}          one word of shell
    {{ words | words }}       several words of shell
    {{ value | directive }}   the value of an #SBATCH or #PBS line
    {{ value | yaml }}        a value in YAML (JSON, which is YAML)
    {{ text | lines(4) }}     lines of text in YAML, indented by so many spaces
    {{ value | comment }}     the rest of a line that is a comment
    {{ line | program }}      a line of shell as the user wrote it: `launch.setup`, nothing else

Numbers need none. Text without a filter is an error, so a template that forgets one does not
render, whatever the value is.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup as _Quoted

from gristmill.base.errors import UserError

_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def render(template: str, **values: Any) -> str:
    """The text of a template."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("gristmill.launch.jobs"),
        finalize=_refuse_unquoted,
        # With it, what a macro puts out counts as quoted; nothing else is left to escape.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "sh": _sh,
        "words": _words,
        "directive": _directive,
        "yaml": _yaml,
        "lines": _lines,
        "comment": lambda value: _Quoted(_CONTROL.sub(" ", str(value))),
        "program": _Quoted,
    }
    return environment


def _refuse_unquoted(value: Any) -> Any:
    if isinstance(value, _Quoted) or type(value) is int:
        return value
    if value is None or isinstance(value, jinja2.Undefined):
        raise AssertionError("a template puts out a value that is not there")
    raise AssertionError(f"a template puts out {value!r} without saying how it is quoted")


def _sh(value: str | Path | int) -> _Quoted:
    if "\0" in str(value):
        raise _unprintable(value)
    return _Quoted(shlex.quote(str(value)))


def _words(values: Sequence[str | Path]) -> _Quoted:
    return _Quoted(" ".join(_sh(value) for value in values))


def _directive(value: str | Path | int) -> _Quoted:
    """Schedulers read such lines themselves, and the shell takes them for comments."""
    text = str(value)
    if _CONTROL.search(text):
        raise _unprintable(value)
    if not re.search(r"""[\s"'#\\]""", text):
        return _Quoted(text)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return _Quoted(f'"{escaped}"')


def _yaml(value: Any) -> _Quoted:
    """JSON writes rare letters as two halves, which YAML does not join; and YAML wants more of the
    unprintable ones escaped than JSON does."""
    text = json.dumps(value, ensure_ascii=False)
    return _Quoted(_UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def _lines(text: str, spaces: int) -> _Quoted:
    """Several lines of text in YAML, indented, as a person would write them."""
    # One line break at the end is what YAML keeps.
    plain = re.fullmatch(r"[^ \n](.*[^\n])?\n", text, re.DOTALL)
    if not plain or not all(line.isprintable() for line in text.split("\n")):
        return _yaml(text)
    indented = (f"{' ' * spaces}{line}" if line else "" for line in text.split("\n"))
    return _Quoted("|\n" + "\n".join(indented).rstrip("\n"))


def _unprintable(value: Any) -> UserError:
    return UserError(
        "this has a line break or another control character, which no job script can hold",
        where=repr(str(value)),
        remedy="use another name",
    )
