"""The command line: every verb in one place, and every error in one form.

A command's work is imported when it runs, so that `--help` and the light commands start in a blink.
"""

from __future__ import annotations

import os
import sys

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.cli import bench, inspect, models, prepare, tokenizer, tokens, train

app = typer.Typer(
    name="gristmill",
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
        from importlib import metadata

        typer.echo(f"gristmill {metadata.version('gristmill')}")
        raise typer.Exit()


def main() -> None:
    """Run the command line; a user's error is printed without a traceback."""
    try:
        app()
    except UserError as error:
        for problem in error.problems:
            sys.stderr.write(f"error: {problem}\n")
        sys.exit(error.exit)
    except BrokenPipeError:
        # The reader of our output went away; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.DONE)
