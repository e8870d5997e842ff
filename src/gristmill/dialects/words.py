"""From words, or the text of a file, to the values of options, by the rules of each syntax.

    argparse       --name value   --name=value   --list a b c   any unique beginning of a name
    configurator   --name=value, and Python files of assignments, as nanoGPT takes them
    toml           a TOML file

Nothing is run: a Python file is parsed, and only literals, arithmetic of numbers, and texts joined
by + are read.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from gristmill.base.errors import Exit, Problem, UserError, on_one_line
from gristmill.dialects.table import Dialect, ForeignOption

_LARGEST_FILE = 1 << 20
_LONGEST_TEXT = 1 << 16
_LARGEST_INT = 1 << 63
"""What TOML can hold."""
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|deepspeed|srun|mpirun|mpiexec|accelerate")
_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_KINDS = {"int": "a whole number below 2^63", "float": "a finite number", "bool": "true or false"}
_NEGATIVE = re.compile(r"-(\d|\.\d)")


@dataclass(frozen=True)
class GivenOption:
    """An option with its value."""

    name: str
    value: Any
    written: str
    """As the user wrote it."""
    changed: str | None = None
    """What is taken differently from how it was written."""


def read_options(dialect: Dialect, words: Sequence[str]) -> list[GivenOption]:
    """The options of a command line, in order; raises one error with all that cannot be read."""
    readers = {"argparse": _argparse, "configurator": _configurator, "toml": _toml}
    options: list[GivenOption] = []
    problems = [
        Problem("this is not UTF-8 text", on_one_line(word)) for word in words if _odd(word)
    ]
    for item in () if problems else readers[dialect.syntax](dialect, words):
        if isinstance(item, Problem):
            problems.append(item)
        else:
            options.append(item)
    if problems:
        raise UserError(problems, exit=Exit.USAGE)
    return options


def _odd(text: str) -> bool:
    """Whether a text has bytes that no text has, or a NUL, which no path may have."""
    return "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text)


def split_launcher(dialect: Dialect, words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """What starts the program, such as `torchrun --nproc_per_node 8 pretrain_gpt.py`, and the words
    behind it. Only a known launcher or the script itself begins such a part."""
    begin = _first_word(words)
    scripts = [
        at
        for at, word in enumerate(words)
        if any(names_script(word, script) for script in dialect.scripts)
    ]
    if not scripts or begin is None or (begin not in scripts and not _is_launcher(words[begin])):
        return (), words
    return words[: scripts[0] + 1], words[scripts[0] + 1 :]


def _first_word(words: Sequence[str]) -> int | None:
    """The place of the first word that sets no environment variable."""
    return next((at for at, word in enumerate(words) if not _VARIABLE.match(word)), None)


def _is_launcher(word: str) -> bool:
    return _LAUNCHER.fullmatch(word.rpartition("/")[2]) is not None


def names_script(word: str, script: str) -> bool:
    """Whether a path is that of a script, of which the table has the end."""
    parts = PurePosixPath(script).parts
    return PurePosixPath(word).parts[-len(parts) :] == parts


def other_script(dialect: Dialect, words: Sequence[str]) -> Problem | None:
    """What is wrong with a command that starts something, but no script of the program."""
    begin = _first_word(words)
    if begin is None or not dialect.scripts or split_launcher(dialect, words)[0]:
        return None
    # Where other syntaxes have a Python file, it is one of settings.
    alone = dialect.syntax == "argparse" and words[begin].endswith(".py")
    if not _is_launcher(words[begin]) and not alone:
        return None
    named = [word for word in words if word.endswith(".py")] or [words[begin]]
    what = f"{on_one_line(named[0])!r} is no script of {dialect.title} that is known here"
    return Problem(what, "command line", f"one of {', '.join(dialect.scripts)}")


def given_variables(dialect: Dialect, launcher: Sequence[str]) -> list[GivenOption]:
    """The environment variables before a command that the table knows."""
    variables = []
    for word in itertools.takewhile(_VARIABLE.match, launcher):
        name, _, value = word.partition("=")
        if name in dialect.options:
            variables.append(GivenOption(name, value, on_one_line(shlex.quote(word))))
    return variables


# ------------------------------------------------------------------ argparse


def _argparse(dialect: Dialect, words: Sequence[str]) -> Iterator[GivenOption | Problem]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-") or word in ("-", "--"):
            what = f"{on_one_line(word)!r} belongs to no option of {dialect.program}"
            remedy = "give only what stands behind the name of the script"
            yield Problem(what, "command line", remedy)
            continue
        name, equals, behind = word.partition("=")
        option_names = dialect.resolve(name)
        if len(option_names) != 1:
            yield _unknown(dialect, name, option_names)
            while at < len(words) and _is_value(words[at]):
                at += 1
            continue
        (known,) = option_names
        option = dialect.option(known)
        values = [behind] if equals else []
        while not equals and at < len(words) and _is_value(words[at]) and _takes(option, values):
            values.append(words[at])
            at += 1
        written = shlex.join([word, *([] if equals else values)])
        yield _given(known, option, values, on_one_line(written), explicit=bool(equals))


def _is_value(word: str) -> bool:
    return not word.startswith("-") or word == "-" or bool(_NEGATIVE.match(word))


def _takes(option: ForeignOption, values: Sequence[str]) -> bool:
    """Whether another word can belong to an option."""
    if option.value == "flag":
        return False
    return option.value == "words" or option.count == "any" or len(values) < (option.count or 1)


def _given(
    name: str, option: ForeignOption, values: Sequence[str], written: str, *, explicit: bool
) -> GivenOption | Problem:
    if option.value == "flag":
        if explicit:
            return Problem("takes no value", written, f"write {name} alone")
        return GivenOption(name, True, written)
    if option.value == "words":
        return GivenOption(name, list(values), written)
    wanted = 1 if option.count is None else option.count
    if not values or (wanted != "any" and len(values) != wanted):
        many = "a value" if wanted == 1 else "values" if wanted == "any" else f"{wanted} values"
        return Problem(f"needs {many}", written)
    try:
        parsed = [_value(option, text) for text in values]
    except ValueError as error:
        return Problem(str(error), written)
    return GivenOption(name, parsed[0] if option.count is None else parsed, written)


def _value(option: ForeignOption, text: str) -> Any:
    """The value of a word; a `ValueError` says why it has none."""
    with contextlib.suppress(ValueError):
        match option.value:
            case "text":
                return text
            case "int" if abs(int(text)) < _LARGEST_INT:
                return int(text)
            case "float" if math.isfinite(float(text)):
                return float(text)
            case "bool" if text.lower() in _BOOLEANS:
                return _BOOLEANS[text.lower()]
    raise ValueError(f"{on_one_line(text)[:60]!r} is not {_KINDS[option.value]}")


def _unknown(dialect: Dialect, name: str, candidates: Sequence[str]) -> Problem:
    where = on_one_line(name)
    if candidates:
        what = f"may stand for {', '.join(candidates[:6])}"
        return Problem(what, where, "write the whole name")
    near = dialect.nearest(name)
    remedy = f"did you mean {' or '.join(near)}?" if near else "see the page about this dialect"
    return Problem(f"{dialect.program} has no such option that is known here", where, remedy)


# ------------------------------------------------------------------ configurator


def _configurator(dialect: Dialect, words: Sequence[str]) -> Iterator[GivenOption | Problem]:
    for word in words:
        if "=" not in word:
            if word.startswith("-"):
                yield Problem("needs a value", on_one_line(word), "write --name=value")
            else:
                yield from _python_file(dialect, Path(word))
            continue
        name, _, text = word.partition("=")
        if not name.startswith("--"):
            yield Problem("is no option", on_one_line(word), "write --name=value")
            continue
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            # As nanoGPT does: what is no literal is a text.
            value = text
        yield _typed(dialect, name.removeprefix("--"), value, on_one_line(word))


def _python_file(dialect: Dialect, path: Path) -> Iterator[GivenOption | Problem]:
    """The assignments of a file."""
    text = _read(path)
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        yield Problem("this is not valid Python", str(path) + (f":{line}" if line else ""))
        return
    known: dict[str, Any] = {}
    for statement in statements:
        where = f"{path}:{statement.lineno}"
        match statement:
            case ast.Expr(value=ast.Constant(value=str())):
                continue
            case ast.Import(names=[ast.alias(name="time", asname=None)]):
                # For names of runs, such as "ft-" + str(time.time()).
                continue
            case ast.Assign(targets=[ast.Name(id=name)], value=node):
                try:
                    known[name] = value = _literal(node, known)
                except (ValueError, ArithmeticError, RecursionError) as error:
                    what = f"the value of {name} is no literal: {error}"
                    remedy = f"write the value itself, or pass it as --{name}=VALUE"
                    yield Problem(what, where, remedy)
                    continue
                item = _typed(dialect, name, value, f"{where}: {name} = {value!r}")
                if isinstance(item, GivenOption) and any(map(_is_time, ast.walk(node))):
                    item = replace(item, changed="without the time, so that the run can be resumed")
                yield item
            case _:
                what = "only assignments of literals are read, and nothing is run"
                yield Problem(what, where, "write NAME = VALUE, or pass it as --NAME=VALUE")


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _literal(node: ast.expr, known: dict[str, Any]) -> Any:
    """The value of a literal, of a name assigned above it, or of such numbers or texts put
    together."""
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, known) for item in items]
        case ast.Call(func=ast.Name(id="str"), args=[inner], keywords=[]) if _is_time(inner):
            return ""
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_number(_literal(inner, known))
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            sides = [_literal(side, known) for side in (left, right)]
            if isinstance(kind, ast.Add) and all(isinstance(side, str) for side in sides):
                # A text that is joined with itself doubles with every line.
                if sum(map(len, sides)) > _LONGEST_TEXT:
                    raise ValueError("the text is too long")
                return "".join(sides)
            return _number(_OPERATORS[type(kind)](*map(_number, sides)))
        case _:
            raise ValueError(f"{type(node).__name__} is not allowed")


def _is_time(node: ast.AST) -> bool:
    """Whether this is time.time(), which is not called."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Name(id="time"), attr="time"), args=[], keywords=[]
        ):
            return True
    return False


def _number(value: Any) -> int | float:
    """A number of sensible size, so that arithmetic stays short."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("arithmetic is for numbers")
    if not abs(value) < 1e30:
        raise ValueError("the number is too large")
    return value


# ------------------------------------------------------------------ toml


def _toml(dialect: Dialect, words: Sequence[str]) -> Iterator[GivenOption | Problem]:
    if len(words) > 1 and words[0] == "--config":
        words = words[1:]
    if len(words) != 1 or words[0].startswith("-"):
        what = f"{dialect.program} takes one TOML file"
        yield Problem(what, "command line", "give its path and nothing else")
        return
    path = Path(words[0])
    try:
        tables = tomllib.loads(_read(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        yield Problem(f"not valid TOML: {error}", str(path))
        return
    for name, value in _leaves(tables):
        yield _typed(dialect, name, value, f"{path}: {name} = {value!r}")


def _leaves(tables: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            yield from _leaves(value, name)
        else:
            yield name, value


def _typed(dialect: Dialect, name: str, value: Any, written: str) -> GivenOption | Problem:
    """An option whose value is no text any more, if it is of the right kind."""
    names = dialect.resolve(name)
    written = on_one_line(written)
    if not names:
        unknown = _unknown(dialect, name, ())
        return Problem(unknown.what, written, unknown.remedy)
    option = dialect.option(names[0])
    values = value if option.count is not None and isinstance(value, list | tuple) else [value]
    if option.count is not None and (
        not isinstance(value, list | tuple) or option.count not in ("any", len(value))
    ):
        return Problem(f"must be a list of {option.count} values", written)
    for item in values:
        wrong = _wrong_kind(option, item)
        if wrong:
            return Problem(wrong, written)
    if option.value == "float":
        values = [float(item) for item in values]
    return GivenOption(names[0], values[0] if option.count is None else list(values), written)


def _wrong_kind(option: ForeignOption, value: Any) -> str | None:
    is_bool = isinstance(value, bool)
    fits = {
        "words": True,
        "flag": is_bool,
        "bool": is_bool,
        "int": isinstance(value, int) and not is_bool,
        "float": isinstance(value, int | float) and not is_bool,
        "text": isinstance(value, str),
    }
    if not fits[option.value]:
        kinds = {"int": "a whole number", "float": "a number", "text": "text"}
        return f"must be {kinds.get(option.value, 'true or false')}"
    if isinstance(value, int) and abs(value) >= _LARGEST_INT:
        return "must be below 2^63"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number"
    if isinstance(value, str) and _odd(value):
        return "must be text without NUL"
    return None


def _read(path: Path) -> str:
    try:
        if path.is_file() and path.stat().st_size > _LARGEST_FILE:
            raise UserError("this is too large for a file of settings", where=path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the file: {error.strerror}", where=path) from error
    except ValueError as error:
        # A path with a NUL, or bytes that are no text.
        raise UserError("the file is not UTF-8 text", where=on_one_line(str(path))) from error
