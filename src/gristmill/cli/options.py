"""Options of the command line that several commands about data share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gristmill.text.sources import DocumentSplit

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE…",
        help="Files, globs or folders of .jsonl or plain text, also .gz .bz2 .xz .zst; - is stdin.",
    ),
]
Documents = Annotated[
    DocumentSplit,
    typer.Option("--documents", help="In plain text, a document is a file, a line or a block."),
]
JsonKey = Annotated[str, typer.Option(help="The key of the text in JSON lines.")]


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
    typer.Option(min=1, help="Tokens in one file, with llmc and npy; 100M if not given."),
]
