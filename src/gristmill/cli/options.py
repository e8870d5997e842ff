"""Arguments and options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gristmill.text.sources.source import DocumentSplit

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[A.B=C…]",
        help="Settings that override the file; A.B=unset removes one, so that its default applies.",
    ),
]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE…",
        help="Files, globs, folders (JSON, CSV, Parquet, Arrow, plain text; .gz .bz2 .xz .zst), "
        "- for stdin, hf:NAME for a dataset.",
    ),
]
Documents = Annotated[
    DocumentSplit,
    typer.Option("--documents", help="In plain text, a document is a file, a line or a block."),
]
JsonKey = Annotated[str, typer.Option(help="The key or column that holds the text.")]
JsonKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--json-key",
        "--json-keys",
        help="The key or column that holds the text; repeat it for several sets.",
        show_default="text",
    ),
]


class TokenFormat(enum.StrEnum):
    """The formats of token files."""

    FLAT = "flat"
    MEGATRON = "megatron"
    LLMC = "llmc"
    NPY = "npy"


Output = Annotated[Path, typer.Option("--output", "-o", help="Prefix of the token files.")]
Overwrite = Annotated[bool, typer.Option(help="Replace existing token files.")]
ShardSize = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per file, for llmc and npy; 100M if not given."),
]
