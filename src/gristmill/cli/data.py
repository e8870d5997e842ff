"""`prepare`, `tokens` and `tokenizer`: from text to token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources import DocumentSplit

if TYPE_CHECKING:
    from gristmill.text.prepare import PrepareProgress, PrepareResult

tokens = typer.Typer(help="Look into token files.", no_args_is_help=True)
tokenizer = typer.Typer(help="Train and try tokenizers.", no_args_is_help=True)

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


def prepare(
    sources: Sources,
    output: Annotated[Path, typer.Option("--output", "-o", help="Prefix of the token files.")],
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help='Tokenizer folder or file, or "bytes".')
    ],
    json_key: JsonKey = "text",
    documents: Documents = DocumentSplit.FILE,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-text token.")
    ] = True,
    strict: Annotated[bool, typer.Option(help="Stop at the first line that is dropped.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace existing token files.")] = False,
) -> None:
    """Turn text into token files that `train` reads."""
    from gristmill.text.prepare import prepare as prepare_tokens
    from gristmill.text.tokenizers import open_tokenizer

    with ProgressLine("preparing") as line:
        result = prepare_tokens(
            sources,
            tokenizer=open_tokenizer(tokenizer),
            output=output,
            json_key=json_key,
            split=documents,
            append_end_of_text=append_eod,
            strict=strict,
            overwrite=overwrite,
            progress=_show(line),
        )
    report_prepared(result, output)


def _show(line: ProgressLine) -> Callable[[PrepareProgress], None]:
    def show(state: PrepareProgress) -> None:
        rate = format_bytes(state.bytes_done / max(state.seconds, 1e-9))
        words = f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens"
        line.update(state.bytes_done, state.bytes_total, f"{words}, {rate}/s")

    return show


def report_prepared(result: PrepareResult, output: Path) -> None:
    """Say what was made and what was dropped."""
    ledger, info = result.ledger, result.info
    typer.echo(
        f"{output}: {info.tokens:,} tokens in {info.documents:,} documents from "
        f"{format_bytes(result.text_bytes)} of text, {info.dtype}, "
        f"in {format_seconds(result.seconds)}"
    )
    dropped = sum(ledger.dropped.values())
    typer.echo(f"{ledger.lines:,} read = {ledger.kept:,} kept + {dropped:,} dropped")
    for reason, count in ledger.dropped.items():
        typer.echo(f"  dropped {count:,}: {reason.value}")
    for place in ledger.places[:5]:
        typer.echo(f"    {place.origin}: {place.reason.value}")
    if dropped > 5:
        typer.echo(f"    all places: {output}.ledger.json")


@tokens.command("inspect")
def inspect_set(prefix: Annotated[Path, typer.Argument(help="Prefix of token files.")]) -> None:
    """Show counts, document lengths and the range of ids."""
    from gristmill.text.tokenizers import open_tokenizer
    from gristmill.tokens.store import inspect_tokens, open_tokens

    summary = inspect_tokens(prefix)
    info = summary.info
    typer.echo(f"format      {info.format}, {info.dtype}")
    typer.echo(f"tokens      {info.tokens:,}")
    typer.echo(f"documents   {info.documents:,}")
    typer.echo(f"vocabulary  {info.vocab_size:,}, end of text {info.end_of_text}")
    typer.echo(f"ids         {summary.smallest_id} to {summary.largest_id}")
    typer.echo(f"tokenizer   {info.tokenizer[:16]}")
    typer.echo(f"content     {info.fingerprint[:16]}")
    quantiles = ", ".join(f"{100 * q:g}%: {n}" for q, n in summary.length_quantiles.items())
    typer.echo(f"lengths     mean {summary.mean_length:.1f}; {quantiles}")
    widest = max((bin.documents for bin in summary.length_histogram), default=1)
    for bin in summary.length_histogram:
        bar = "#" * round(40 * bin.documents / widest)
        typer.echo(f"  {bin.low:>9,} to {bin.high:>9,}  {bin.documents:>9,}  {bar}")
    folder = Path(f"{prefix}.tokenizer")
    if folder.is_dir():
        reader = open_tokens(prefix)
        first = open_tokenizer(folder).decode(reader.read(0, min(60, len(reader))).tolist())
        typer.echo(f"begins      {first!r}")


@tokens.command("verify")
def verify_set(prefix: Annotated[Path, typer.Argument(help="Prefix of token files.")]) -> None:
    """Check sizes, checksums and ids; name everything that is broken."""
    from gristmill.tokens.store import verify_tokens

    problems = verify_tokens(prefix)
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    typer.echo(f"{prefix}: intact")


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
