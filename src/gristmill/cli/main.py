"""The command line: every command in one place, and every error in one form.

    a mistake of the user   `error: what is wrong`, and the remedy     its own status
    a defect                a traceback, then one line that begins     70
                            `error: a defect of gristmill`
    Ctrl-C                  nothing                                    130
    a closed output pipe    nothing                                    0
    a full or broken disk   `error: the disk refused`                  74

Each command imports what it needs when it runs, so that `--help` and the light commands start
quickly.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from gristmill.base.errors import Exit, UserError
from gristmill.base.process import ProcessInfo
from gristmill.cli import (
    bench,
    dialects,
    evaluate,
    inspect,
    launch,
    models,
    prepare,
    tokens,
    train,
)
from gristmill.cli.progress import DOWNLOADS
from gristmill.hub.client import downloads_shown

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors that no program can be written to avoid."""
_WIDTH = 300
"""Characters of an error's message that the last line repeats."""


class _PipeError(Exception):
    """Wraps an error that typer would handle itself; that error is its cause."""


class _Commands(TyperGroup):
    """All commands. If a file or a pipe ends too early, typer would exit with 1 and hide why."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (EOFError, BrokenPipeError) as error:
            raise _PipeError from error


app = typer.Typer(
    name="gristmill",
    cls=_Commands,
    help="Text in, language model out: pretrain GPT models from raw text.",
    epilog="Exit status: 0 done, 75 stopped and saved (the same command resumes), 2 wrong command "
    "line, 65 bad data, 71 a faulty device, 74 storage, 76 another process was lost, 77 refused "
    "for safety, 78 wrong settings, 70 a defect.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("demo")(train.demo)
app.command("prepare", epilog=prepare.EXAMPLES, cls=dialects.DialectCommand)(prepare.prepare)
app.add_typer(tokens.tokens, name="tokens")
app.add_typer(tokens.tokenizer, name="tokenizer")
app.command("train", cls=dialects.DialectTraining)(train.train)
app.command("translate", context_settings={"ignore_unknown_options": True})(dialects.translate)
app.add_typer(launch.launch, name="launch")
app.command("replay")(inspect.replay)
app.command("bench")(bench.bench)
app.command("evaluate")(evaluate.evaluate)
app.command("generate", cls=dialects.DialectCommand)(models.generate)
app.command("export")(models.export)
app.command("import")(models.import_checkpoint)
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
    """Run the command line. User errors are printed without a traceback, defects with one."""
    # A file name need not be UTF-8; what is not is printed as \\udce9, which is JSON too.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with downloads_shown(DOWNLOADS if _speaks() else None):
            app()
    except UserError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        sys.exit(error.exit)
    except OSError as error:
        sys.exit(_refused_by_disk(error) if error.errno in _DISK else _report(error))
    except _PipeError as error:
        cause = error.__cause__ or error
        unread = isinstance(cause, BrokenPipeError) and _reader_left()
        sys.exit(Exit.DONE if unread else _report(cause))
    except Exception as error:
        sys.exit(_report(error))


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
