"""Commands of other programs: `translate`, and what `--dialect` asks for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import Exit, UserError, on_one_line
from gristmill.cli.options import command_options
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.dialects.table import load_dialect, load_table, table_names
from gristmill.dialects.translate import Translation, split_overrides
from gristmill.dialects.translate import translate as translate_words
from gristmill.hub.downloads import settings_folder


@command_options(context_settings={"ignore_unknown_options": True})
def translate(
    dialect: Annotated[
        str | None,
        typer.Argument(
            metavar="DIALECT",
            help="megatron, megatron-prepare, nanogpt, …; lists all if not given.",
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- WORD", help="What the other program is given, or a file."),
    ] = None,
) -> None:
    """Translate the command line of another program into a run file or a Gristmill command.

    Every line names the options that it comes from. What no run can have is refused. Nothing is
    run, and no file is changed.
    """
    if dialect is None:
        for name in table_names():
            table = load_table(name)
            typer.echo(f"{name:<22} {table.program}")
        return
    table = load_table(dialect)
    overrides, foreign = split_overrides(table, words or ())
    if overrides:
        what = "settings of ours have no place in another program's command"
        remedy = "add them to the printed run file, or to `gristmill train`"
        raise UserError(what, where=overrides[0], remedy=remedy, exit=Exit.USAGE)
    translation = translate_words(table, foreign)
    translation.check()
    typer.echo(translation.text, nl=False)


@dataclass(frozen=True)
class TranslatedRun:
    """A run that another program's command asks for."""

    config: RunConfig
    translation: Translation

    @property
    def validates_only(self) -> bool:
        return "--validate-only" in self.translation.words

    def tell(self) -> None:
        """Say on stderr what was not taken, or not quite."""
        _tell(self.translation)

    def prepare(self, *, alone: bool) -> None:
        """Make the token files that are not there yet, if no other process does the same."""
        for preparation in self.translation.first:
            if all(Path(f"{prefix}.json").is_file() for prefix in preparation.makes):
                continue
            if not alone:
                what = f"the token files {' and '.join(preparation.makes)} are not there"
                raise UserError(
                    what, where="data.paths", remedy=f"once, before: {preparation.command}"
                )
            typer.echo(f"first: {preparation.command}", err=True)
            done = subprocess.run(
                [sys.executable, "-m", "gristmill", *preparation.words], check=False
            )
            if done.returncode:
                raise typer.Exit(done.returncode)


def translate_run(name: str, words: list[str]) -> TranslatedRun:
    """The run of another program's words, with settings of ours before them. Errors speak of the
    words."""
    dialect = load_dialect(name, "train")
    overrides, foreign = split_overrides(dialect, words)
    translation = translate_words(dialect, foreign)
    try:
        config = load_text(
            translation.text,
            overrides,
            place=dialect.program,
            find_model=settings_folder,
            defaults=translation.defaults,
        )
    except UserError as error:
        raise translation.explain(error) from error
    return TranslatedRun(config, translation)


def translate_command(
    name: str, command: str, foreign: Sequence[str], *, quiet: bool
) -> Sequence[str]:
    """The words of our command for those of another program."""
    translation = translate_words(load_dialect(name, command), foreign)
    if not quiet:
        _tell(translation)
    return translation.words


def _tell(translation: Translation) -> None:
    for kind, remarks in (("changed", translation.changed), ("ignored", translation.ignored)):
        for remark in remarks:
            typer.echo(f"{kind}: {on_one_line(str(remark))}", err=True)
