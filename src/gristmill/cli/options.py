"""Arguments and options that several commands share."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gristmill.base.errors import UserError
from gristmill.hub.objects import scheme_of, shown
from gristmill.text.sources.source import DocumentSplit

Command = TypeVar("Command", bound=Callable[..., None])


def command_options(**options: Any) -> Callable[[Command], Command]:
    """Settings of a command beside its function, such as its class, for whoever registers it."""

    def note(command: Command) -> Command:
        vars(command)["command_options"] = options
        return command

    return note


Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="A.B=C",
        help="Settings that override the file; A.B=unset removes one, so that its default applies.",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the result as JSON, and nothing else to standard output."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print nothing but errors and, with --json, JSON.")
]
Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE",
        help="Files, globs, folders (JSON, CSV, Parquet, Arrow, plain text; .gz .bz2 .xz .zst), "
        "- for stdin, addresses (s3:// gs:// hf:// https://), hf:NAME for a dataset.",
    ),
]
source_option = functools.partial(typer.Option, rich_help_panel="Source")
output_option = functools.partial(typer.Option, rich_help_panel="Output")
"""Options in a panel of the help."""
Documents = Annotated[
    DocumentSplit,
    source_option(
        "--documents",
        metavar="HOW",
        help="In plain text, a document is a file, a line, or (blank) a paragraph between blank "
        "lines.",
    ),
]
JsonKey = Annotated[
    str,
    source_option(
        metavar="KEY",
        help="The key or column that holds the text; meta.text is a key inside another in JSON.",
    ),
]
JsonKeys = Annotated[
    list[str] | None,
    source_option(
        "--json-key",
        "--json-keys",
        metavar="KEY",
        help="The key or column that holds the text; meta.text is a key inside another in JSON. "
        "Repeat it for several sets.",
        show_default="text",
    ),
]


class TokenFormat(enum.StrEnum):
    """The formats of token files."""

    FLAT = "flat"
    MEGATRON = "megatron"
    MEGATRON_CACHED = "megatron-cached"
    MEGATRON_LAZY = "megatron-lazy"
    LLMC = "llmc"
    NPY = "npy"


class ReadFormat(enum.StrEnum):
    """The formats of token files that are read: those above, and some of data pipelines."""

    FLAT = "flat"
    MEGATRON = "megatron"
    MEGATRON_CACHED = "megatron-cached"
    MEGATRON_LAZY = "megatron-lazy"
    LLMC = "llmc"
    NPY = "npy"
    DATATROVE = "datatrove"
    DOLMA = "dolma"


def parse_output(text: str) -> Path:
    """A name for token files; a folder is none."""
    if scheme_of(text):
        raise UserError(
            "this command writes to a disk of this machine",
            where=f"--output {shown(text)}",
            remedy="give a local name, then: gristmill tokens copy NAME ADDRESS",
        )
    path = Path(text)
    if text and not text.endswith("/") and not path.is_dir():
        return path
    example = path / "NAME" if text else "tokens/NAME"
    raise UserError(
        "this is a folder, and the files need a name in it" if text else "the name is empty",
        where=f"--output {text}".rstrip(),
        remedy=f"give the folder and a name, such as: -o {example}",
    )


Output = Annotated[
    Path,
    output_option(
        "--output",
        "-o",
        parser=parse_output,
        metavar="NAME",
        help="Folder and name of the token files, without an ending: tokens/books.",
    ),
]
Overwrite = Annotated[bool, output_option("--overwrite", help="Replace existing token files.")]
ShardSize = Annotated[
    int | None,
    output_option(min=1, metavar="N", help="Tokens per file, for llmc and npy; 100M if not given."),
]


def require_place(file: Path) -> None:
    """Refuse a file that could not be written, before anything is measured."""
    where = f"--json {file}"
    if file.is_dir():
        raise UserError("is a folder", where=where, remedy="name a file in it")
    if not file.parent.is_dir():
        raise UserError(f"there is no folder {file.parent}", where=where)
    if not os.access(file.parent, os.W_OK):
        raise UserError(f"cannot write in {file.parent}", where=where)


class PrecisionName(enum.StrEnum):
    """The values of --precision: number formats to generate in."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


PrecisionOption = Annotated[
    PrecisionName,
    typer.Option(
        "--precision",
        help="Of weights and activations; auto: bf16 on a GPU that computes with it, else fp32.",
    ),
]
