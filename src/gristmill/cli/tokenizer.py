"""`tokenizer`: train tokenizers and try them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes
from gristmill.cli.options import Documents, JsonKey, Sources
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources import DocumentSplit

tokenizer = typer.Typer(help="Train and try tokenizers.", no_args_is_help=True)


@tokenizer.command("train")
def train_tokenizer(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tokenizer.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", "-n", help="Number of ids.")] = 32768,
    json_key: JsonKey = "text",
    documents: Documents = DocumentSplit.FILE,
) -> None:
    """Learn a byte-level BPE tokenizer from text."""
    from gristmill.text.sources import Document, open_sources
    from gristmill.text.tokenizers import train_tokenizer as learn

    if output.exists() and any(output.iterdir()):
        raise UserError("this folder is not empty", where=str(output), exit=Exit.REFUSED)
    items = open_sources(sources, json_key=json_key, split=documents)
    texts = (item.text for item in items if isinstance(item, Document))
    with ProgressLine("learning") as line:
        learned = learn(
            texts,
            vocab_size=vocab_size,
            progress=lambda done: line.update(done, None, f"{format_bytes(done)} read"),
        )
    learned.save(output)
    typer.echo(f"{output}: {learned.size:,} ids, fingerprint {learned.fingerprint[:16]}")


@tokenizer.command("show")
def show_tokenizer(
    spec: Annotated[str, typer.Argument(help='Tokenizer folder or file, or "bytes".')],
    text: Annotated[str | None, typer.Argument(help="Text to cut into tokens.")] = None,
) -> None:
    """Show a tokenizer's facts, and how it cuts a text."""
    from gristmill.text.tokenizers import open_tokenizer

    opened = open_tokenizer(spec)
    typer.echo(f"ids          {opened.size:,}")
    typer.echo(f"end of text  {opened.end_of_text}")
    typer.echo(f"fingerprint  {opened.fingerprint}")
    if text is not None:
        for id in opened.encode(text):
            typer.echo(f"{id:>8}  {opened.token_bytes(id)!r}")
