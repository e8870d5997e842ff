"""`--dialect` of the commands that other programs have too: their words become ours."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

DialectName = Annotated[
    str | None,
    typer.Option(
        "--dialect",
        metavar="NAME",
        help="The words behind -- are those of another program, such as megatron, "
        "llm-pytorch, decentralized, xla-gpt2 or nanogpt; see `gristmill translate`.",
    ),
]


class DialectCommand(TyperCommand):
    """A command of which another program has one too: with `--dialect NAME`, the words behind `--`
    are that program's, and become ours before they are parsed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own, foreign = _split_dialect(args)
        name = _dialect_of(own)
        if name is None or {"-h", "--help"} & set(own):
            return super().parse_args(ctx, args)

        # It knows all settings of runs, which take long to import.
        from gristmill.cli.translate import translate_command

        words = translate_command(
            name, str(self.name), foreign, quiet=bool({"-q", "--quiet"} & set(own))
        )
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


def _split_dialect(args: list[str]) -> tuple[list[str], list[str]]:
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
