"""`prepare`: from text to token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.options import (
    Documents,
    JsonKey,
    Output,
    Overwrite,
    ShardSize,
    Sources,
    TokenFormat,
)
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources import DocumentSplit

if TYPE_CHECKING:
    from gristmill.text.prepare import PrepareProgress, PrepareResult


def prepare(
    sources: Sources,
    output: Output,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", "-t", help='Tokenizer folder or file, or "bytes".')
    ],
    json_key: JsonKey = "text",
    documents: Documents = DocumentSplit.FILE,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-text token.")
    ] = True,
    strict: Annotated[bool, typer.Option(help="Stop at the first line that is dropped.")] = False,
    format: Annotated[TokenFormat, typer.Option(help="Format of the token files.")] = (
        TokenFormat.FLAT
    ),
    shard_size: ShardSize = None,
    overwrite: Overwrite = False,
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
            format=format.value,
            shard_size=shard_size,
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
