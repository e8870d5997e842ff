"""`tokenizer`: train tokenizers and try them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes
from gristmill.cli.options import Documents, JsonKey, Sources
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources.source import DocumentSplit
from gristmill.text.tokenizers.kinds import TokenizerKind, WordPattern

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
        WordPattern, typer.Option(help="Pattern that splits text into words.")
    ] = WordPattern.GPT2,
    min_count: Annotated[
        int | None,
        typer.Option(min=1, help="How often bpe and wordpiece must see a pair to merge it.  [2]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Bytes of text to train on; all if not given.")
    ] = None,
    json_key: JsonKey = "text",
    documents: Documents = DocumentSplit.FILE,
) -> None:
    """Train a tokenizer on text. It works on bytes, so it is lossless."""
    from gristmill.text.sources.reading import SourceReader
    from gristmill.text.sources.source import Document, ReadOptions
    from gristmill.text.tokenizers.training import train_tokenizer as learn

    if output.exists() and any(output.iterdir()):
        raise UserError("this folder is not empty", where=output, exit=Exit.REFUSED)
    reader = SourceReader(sources, ReadOptions((json_key,), documents))

    def texts() -> Iterator[str]:
        yield from (item.text for item in reader if isinstance(item, Document))
        line.update(reader.bytes_done, None, "all text read, learning tokens")

    for skipped in reader.skipped:
        typer.echo(f"skipped: {skipped.origin}: {skipped.what}", err=True)
    with ProgressLine("learning") as line:
        learned = learn(
            texts(),
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


@tokenizer.command("show")
def show_tokenizer(
    spec: Annotated[
        str,
        typer.Argument(
            help="A folder or file, bytes, gpt2, an encoding of tiktoken such as cl100k_base, "
            "or a Hugging Face name."
        ),
    ],
    text: Annotated[str | None, typer.Argument(help="Text to split into tokens.")] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="The token that ends a document, if the files do not state it."),
    ] = None,
) -> None:
    """Show the facts about a tokenizer, and how it splits a text."""
    from gristmill.text.tokenizers.tokenizer import open_tokenizer

    opened = open_tokenizer(spec, end_of_text=end_of_text)
    typer.echo(f"type         {opened.spec['type']}")
    typer.echo(f"ids          {opened.size:,}")
    typer.echo(f"end of text  {opened.end_of_text}  {opened.decode([opened.end_of_text])}")
    lossless = "yes" if opened.lossless else "no: decoding may not give the same text"
    typer.echo(f"lossless     {lossless}")
    typer.echo(f"fingerprint  {opened.fingerprint}")
    if text is None:
        return
    ids = opened.encode(text)
    for id in ids:
        typer.echo(f"{id:>8}  {opened.token_bytes(id)!r}")
    if (decoded := opened.decode(ids)) != text:
        typer.echo(f"decodes to {decoded!r}")
