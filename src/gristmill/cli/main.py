"""The command line: every verb in one place, and every error in one form.

    a mistake of the user   `error: what is wrong`, and the remedy     its own status
    a defect                a traceback, then one line that begins     70
                            `error: a defect of gristmill`
    Ctrl-C                  nothing                                    130
    the reader went away    nothing                                    0

A command's work is imported when it runs, so that `--help` and the light commands start in a blink.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from gristmill.base.errors import Exit, UserError
from gristmill.cli import bench, inspect, models, prepare, tokenizer, tokens, train

_WIDTH = 300
"""Characters of an error's own words that are repeated in the last line."""


class _UnwordedError(Exception):
    """An error for which typer has a status and words of its own; it is the cause of this one."""


class _Commands(TyperGroup):
    """All verbs. Where a file or a pipe ends too early, typer would end with 1 and hide why."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise _UnwordedError from error


app = typer.Typer(
    name="gristmill",
    cls=_Commands,
    help="Text in, language model out: pretrain GPT models from raw text.",
    epilog="Exit status: 0 done, 75 stopped and saved (the same command goes on), 2 wrong command "
    "line, 65 bad data, 74 storage, 76 another process was lost, 77 refused for safety, "
    "78 wrong settings, 70 a defect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("demo")(train.demo)
app.command("prepare")(prepare.prepare)
app.add_typer(tokens.tokens, name="tokens")
app.add_typer(tokenizer.tokenizer, name="tokenizer")
app.command("train")(train.train)
app.command("bench")(bench.bench)
app.command("evaluate")(models.evaluate)
app.command("generate")(models.generate)
app.command("export")(models.export)
app.command("report")(inspect.report)
app.command("config")(inspect.config)
app.command("doctor")(inspect.doctor)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(f"gristmill {_version()}")
        raise typer.Exit()


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("gristmill")
    except metadata.PackageNotFoundError:
        return "(source tree, not installed)"


def main() -> None:
    """Run the command line; a user's error is printed without a traceback, a defect with one."""
    try:
        app()
    except UserError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        sys.exit(error.exit)
    except _UnwordedError as error:
        cause = error.__cause__ or error
        unread = isinstance(cause, BrokenPipeError) and _reader_left()
        sys.exit(Exit.DONE if unread else _report(cause))
    except Exception as error:
        sys.exit(_report(error))


def _reader_left() -> bool:
    """Whether nobody reads our output any more; then nothing is left to say."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not output.poll(0):
        return False
    # What is still unwritten would fail once more when the program ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _report(error: BaseException) -> Exit:
    """Say what is known of a defect; the last line, which a log may be searched for, says most."""
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
