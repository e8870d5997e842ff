"""`tokenizer`: train tokenizers and try them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes
from gristmill.cli.options import Documents, JsonKey, Sources
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources.source import DocumentSplit
from gristmill.text.tokenizers.kinds import TokenizerKind, WordPattern

if TYPE_CHECKING:
    from gristmill.text.sources.reading import SourceReader
    from gristmill.text.tokenizers.tokenizer import Tokenizer

tokenizer = typer.Typer(help="Train and try tokenizers.", no_args_is_help=True)


@tokenizer.command("train")
def train_tokenizer(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the tokenizer.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", "-n", help="Number of ids.")] = 32768,
    kind: Annotated[
        TokenizerKind, typer.Option("--type", help="Kind of tokenizer; all work on bytes.")
    ] = TokenizerKind.BPE,
    pattern: Annotated[
        WordPattern, typer.Option(help="Whose way of cutting text into words.")
    ] = WordPattern.GPT2,
    min_count: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often a pair must occur to be joined, with bpe and wordpiece.  [2]"
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Bytes of text to learn from; all if not given.")
    ] = None,
    json_key: JsonKey = "text",
    documents: Documents = DocumentSplit.FILE,
) -> None:
    """Learn a tokenizer from text. It works on bytes, so it gives every text back."""
    from gristmill.text.sources.reading import open_sources
    from gristmill.text.sources.source import ReadOptions
    from gristmill.text.tokenizers.training import train_tokenizer as learn

    if output.exists() and any(output.iterdir()):
        raise UserError("this folder is not empty", where=str(output), exit=Exit.REFUSED)
    reader = open_sources(sources, ReadOptions((json_key,), documents))
    with ProgressLine("learning") as line:
        learned = learn(
            _texts(reader, line),
            vocab_size=vocab_size,
            kind=kind,
            pattern=pattern,
            min_count=min_count,
            limit=limit,
            progress=lambda done: line.update(
                reader.bytes_done, reader.bytes_total, f"{format_bytes(done)} of text read"
            ),
        )
    learned.save(output)
    typer.echo(f"{output}: {learned.size:,} ids, fingerprint {learned.fingerprint[:16]}")


def _texts(reader: SourceReader, line: ProgressLine) -> Iterator[str]:
    from gristmill.text.sources.source import Document

    for item in reader:
        if isinstance(item, Document):
            yield item.text
    line.update(reader.bytes_done, None, "all read, joining pairs or dropping pieces")


@tokenizer.command("show")
def show_tokenizer(
    spec: Annotated[
        str,
        typer.Argument(
            help="A folder or file, bytes, gpt2, an encoding of tiktoken such as cl100k_base, "
            "or a name on Hugging Face."
        ),
    ],
    text: Annotated[str | None, typer.Argument(help="Text to cut into tokens.")] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="The token that ends a document, if it is not stated.")
    ] = None,
) -> None:
    """Show a tokenizer's facts, and how it cuts a text."""
    from gristmill.text.tokenizers.tokenizer import open_tokenizer

    opened = open_tokenizer(spec, end_of_text=end_of_text)
    typer.echo(f"type         {opened.spec['type']}")
    typer.echo(f"ids          {opened.size:,}")
    typer.echo(f"end of text  {opened.end_of_text}  {opened.decode([opened.end_of_text])}")
    typer.echo(f"lossless     {'yes' if opened.lossless else 'no: some texts do not come back'}")
    typer.echo(f"fingerprint  {opened.fingerprint}")
    if text is not None:
        _show_cut(opened, text)


def _show_cut(opened: Tokenizer, text: str) -> None:
    ids = opened.encode(text)
    for id in ids:
        typer.echo(f"{id:>8}  {opened.token_bytes(id)!r}")
    back = opened.decode(ids)
    if back != text:
        typer.echo(f"comes back as {back!r}")
