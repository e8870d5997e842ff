"""The command line: every command in one place, and every error in one form.

    a mistake of the user   `error: what is wrong`, and the remedy     its own status
    a defect                a traceback, then one line that begins     70
                            `error: a defect of gristmill`
    Ctrl-C                  nothing                                    130
    a closed output pipe    nothing                                    0
    a full or broken disk   `error: the disk refused`                  74
    a failed collective     `error:` what failed in NCCL or Gloo       76, or a more specific one

The module of a command is imported when it is called, so that `--help` and the light commands start
quickly; torch only when the command runs, so that its own help does not wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.cli.progress import DOWNLOADS
from gristmill.cli.verbs import EXAMPLES, FIRST_STEPS, PLACEHOLDERS, VERBS
from gristmill.hub.client import downloads_shown

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors that no program can be written to avoid."""
_WIDTH = 300
"""Characters of an error's message that the last line repeats."""


class _PipeError(Exception):
    """Wraps an error that typer would handle itself; that error is its cause."""


class _Loaded(Mapping[str, Any]):
    """The commands, each of which is imported when it is asked for: `--help` and light commands
    start at once, and nothing but a verb's own module waits for torch."""

    def __getitem__(self, name: str) -> Any:
        return load_verb(name)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@functools.cache
def load_verb(name: str) -> Any:
    """The command or group of a verb."""
    module, _, attribute = VERBS[name].import_path.partition(":")
    loaded = getattr(importlib.import_module(f"gristmill.cli.{module}"), attribute)
    if isinstance(loaded, typer.Typer):
        command: Any = typer.main.get_group(loaded)
        command.name = name
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name, **getattr(loaded, "command_options", {}))(loaded)
        command = typer.main.get_command(alone)
    _complete_help(command, name)
    return command


def _complete_help(command: Any, words: str) -> None:
    """Add the examples of a command, and of those inside it, and one name for the same value in
    all of them; the lines of a paragraph are joined, since a terminal has its own width."""
    paragraphs = (command.help or "").split("\n\n")
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    if examples := EXAMPLES.get(words):
        command.epilog = "\n\n".join(["Examples:", *examples])
    for name, inner in getattr(command, "commands", {}).items():
        _complete_help(inner, f"{words} {name}")
    for parameter in command.params:
        if parameter.metavar is None:
            parameter.metavar = _placeholder(parameter)


def _placeholder(parameter: Any) -> str | None:
    """What the help calls a value; None for a flag, and where it lists the few that there are."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    kind = _kind_of_value(parameter)
    if parameter.is_flag or kind == "choice":
        return None
    known = next((PLACEHOLDERS[name] for name in parameter.opts if name in PLACEHOLDERS), None)
    return known or {"integer": "N", "float": "X"}.get(kind)


def _kind_of_value(parameter: Any) -> str:
    """What click calls it."""
    if hasattr(parameter, "type"):  # in typer before 0.29
        return str(parameter.type.name)
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return "choice"
    return {int: "integer", float: "float"}.get(annotation, "text")


class _Commands(TyperGroup):
    """All commands. If a file or a pipe ends too early, typer would exit with 1 and hide why."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Loaded()
        self._listing = False

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise _PipeError from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        super().format_help(ctx, formatter)
        self._listing = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._listing:
            # Its name and summary are enough for a line.
            return TyperCommand(cmd_name, help=VERBS[cmd_name].summary)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(
    name="gristmill",
    cls=_Commands,
    help="Text in, language model out: pretrain GPT models from raw text.",
    epilog="Exit status: 0 done, 75 stopped and saved (the same command resumes), 2 wrong command "
    "line, 65 bad data, 71 a faulty device, 74 storage, 76 another process was lost, 77 refused "
    "for safety, 78 wrong settings, 70 a defect.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    if version:
        typer.echo(f"gristmill {_version()}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(FIRST_STEPS, nl=False)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("gristmill")
    except metadata.PackageNotFoundError:
        return "(source tree, not installed)"


def main() -> None:
    """Run the command line. User errors are printed without a traceback, defects with one."""
    # A file name need not be UTF-8; what is not is printed as \\udce9, which is JSON too.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with downloads_shown(DOWNLOADS if _speaks() else None):
            # Else `python -m gristmill` would install completion for a program of that name.
            app(prog_name="gristmill")
    except UserError as error:
        sys.exit(_refuse(error))
    except OSError as error:
        sys.exit(_refused_by_disk(error) if error.errno in _DISK else _report(error))
    except _PipeError as error:
        cause = error.__cause__ or error
        unread = isinstance(cause, BrokenPipeError) and _reader_left()
        sys.exit(Exit.DONE if unread else _report(cause))
    except Exception as error:
        explained = _failed_collective(error)
        sys.exit(_report(error) if explained is None else _refuse(explained))


def _refuse(error: UserError) -> Exit:
    """Print what the user can do something about."""
    for problem in error.problems:
        sys.stderr.write(f"error: {problem}\n")
    return error.exit


def _failed_collective(error: Exception) -> UserError | None:
    """The user error for a failure of NCCL or Gloo; None for any other error."""
    if "torch.distributed" not in sys.modules:
        return None
    from gristmill.distributed.failures import explain_failure

    return explain_failure(error)


def _speaks() -> bool:
    """Whether this process tells about its downloads; one of each run does."""
    try:
        return ProcessInfo.current().rank == 0
    except UserError:
        return True


def _refused_by_disk(error: OSError) -> Exit:
    """Print what the system says where nobody expected it, such as in a temporary folder."""
    where = f"{error.filename}: " if error.filename else ""
    sys.stderr.write(f"error: {where}the disk refused: {error.strerror}\n")
    return Exit.STORAGE


def _reader_left() -> bool:
    """Whether nobody reads our output any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    # Otherwise the unwritten rest would fail again when the program ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _report(error: BaseException) -> Exit:
    """Print a defect; the last line has the essentials, so that a log can be searched for it."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())
    what = what if len(what) <= _WIDTH else f"{what[:_WIDTH]}…"
    notes = "; ".join(" ".join(note.split()) for note in getattr(error, "__notes__", ()))
    where = f" ({notes})" if notes else ""
    sys.stderr.write(
        f"error: a defect of gristmill {_version()}: {what}{where}; "
        "please report it, with the command and the traceback above\n"
    )
    return Exit.INTERNAL
