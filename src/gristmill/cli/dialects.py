"""Commands of other programs: `translate`, and `--dialect` of the commands that do the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from gristmill.base.errors import Exit, UserError, on_one_line
from gristmill.cli.options import command_options
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig
from gristmill.dialects.table import load_dialect, load_table, table_names
from gristmill.dialects.translate import Translation, split_overrides
from gristmill.dialects.translate import translate as translate_words
from gristmill.hub.downloads import settings_folder

DialectName = Annotated[
    str | None,
    typer.Option(
        "--dialect",
        metavar="NAME",
        help="The words behind -- are those of another program, such as megatron, "
        "llm-pytorch, decentralized, xla-gpt2 or nanogpt; see `gristmill translate`.",
    ),
]


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
        typer.Argument(metavar="[-- WORDS…]", help="What the other program is given, or a file."),
    ] = None,
) -> None:
    """Print what the command of another program amounts to: a run file, or a command of ours.

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


class DialectCommand(TyperCommand):
    """A command of which another program has one too: with `--dialect NAME`, the words behind `--`
    are that program's, and become ours before they are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, foreign = split_dialect(args)
        name = _dialect_of(own)
        if name is None or {"-h", "--help"} & set(own):
            return super().parse_args(ctx, args)

        translation = translate_words(load_dialect(name, str(self.name)), foreign)
        if not {"-q", "--quiet"} & set(own):
            _tell(translation)
        words = translation.words
        end = words.index("--") if "--" in words else len(words)
        # Ours come later, so that they count.
        return super().parse_args(ctx, [*words[:end], *own, *words[end:]])


class DialectTraining(TyperCommand):
    """`train`: with `--dialect`, options that it does not know are the other program's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.ignore_unknown_options = _dialect_of(args[:end]) is not None
        left = super().parse_args(ctx, args)
        if ctx.params["run"] is None and ctx.params["dialect"] is None:
            ctx.fail("Missing argument 'RUN.toml'.")
        return left


def split_dialect(args: list[str]) -> tuple[list[str], list[str]]:
    """Words of ours and of the other program, which stand behind `--`. Without it, all but
    `--dialect NAME` are the other program's."""
    if "--" in args:
        at = args.index("--")
        return args[:at], args[at + 1 :]
    own: list[str] = []
    foreign: list[str] = []
    for at, word in enumerate(args):
        named = word.startswith("--dialect=") or "--dialect" in args[max(0, at - 1) : at + 1]
        (own if named or word in ("-h", "--help") else foreign).append(word)
    return own, foreign


def _dialect_of(words: list[str]) -> str | None:
    for at, word in enumerate(words):
        if word.startswith("--dialect="):
            return word.partition("=")[2]
        if word == "--dialect" and at + 1 < len(words):
            return words[at + 1]
    return None


def _tell(translation: Translation) -> None:

    for kind, remarks in (("changed", translation.changed), ("ignored", translation.ignored)):
        for remark in remarks:
            typer.echo(f"{kind}: {on_one_line(str(remark))}", err=True)
