"""`tokens`: inspect, verify, convert and merge token files. `tokenizer`: train tokenizers."""

from __future__ import annotations

import enum
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes, format_count
from gristmill.cli.options import (
    AsJson,
    Documents,
    JsonKey,
    Output,
    Overwrite,
    Quiet,
    ReadFormat,
    ShardSize,
    Sources,
    TokenFormat,
    output_option,
)
from gristmill.cli.progress import ProgressLine
from gristmill.cli.tokens_copy import COPY, copy_set
from gristmill.cli.tokens_origins import FIND, WHICH, find_text, which_documents
from gristmill.report.tokens_page import write_tokens_page
from gristmill.text.prepare.ledger import merge_ledgers
from gristmill.text.prepare.older_sets import merge_signatures
from gristmill.text.prepare.outputs import save_tokenizer
from gristmill.text.prepare.request import find_sets
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import Document, DocumentSplit, ReadOptions
from gristmill.text.statistics import token_statistics
from gristmill.text.tokenizers.kinds import TokenizerKind, WordPattern
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer as learn
from gristmill.tokens.convert import CopyProgress, Origin, convert_tokens
from gristmill.tokens.format import TokenSetInfo
from gristmill.tokens.store import (
    Reading,
    TokenSetSummary,
    find_manifest,
    inspect_tokens,
    open_tokens,
    verify_tokens,
)

tokens = typer.Typer(help="Inspect, verify, convert and merge token files.", no_args_is_help=True)
tokenizer = typer.Typer(help="Train tokenizers, and try them on text.", no_args_is_help=True)

_DOCUMENTS_SHOWN = 3
_TOKENS_SHOWN = 60


class IdType(enum.StrEnum):
    """How ids are stored in plain files."""

    UINT16 = "uint16"
    UINT32 = "uint32"
    INT32 = "int32"


_foreign_option = functools.partial(typer.Option, rich_help_panel="Files of other programs")
Prefix = Annotated[
    Path, typer.Argument(metavar="NAME", help="Name of the token files, without an ending.")
]
From = Annotated[
    ReadFormat | None,
    _foreign_option(
        "--from",
        metavar="FORMAT",
        help="Their format, if it is not recognised: flat, megatron (all of its kinds), llmc, npy, "
        "datatrove or dolma.",
    ),
]
Dtype = Annotated[
    IdType | None,
    _foreign_option(
        metavar="TYPE",
        help="How ids are stored, with --from flat, datatrove or dolma, where nothing states it: "
        "uint16, uint32 or int32.",
    ),
]
EndOfText = Annotated[
    int | None,
    _foreign_option(
        metavar="ID", help="The id between documents, if the files do not state where these begin."
    ),
]
MadeBy = Annotated[
    str | None,
    _foreign_option(
        "--tokenizer",
        "-t",
        metavar="NAME",
        help="Their tokenizer, if they do not state it: a folder or file.",
    ),
]


tokens.command("which", epilog=WHICH)(which_documents)
tokens.command("find", epilog=FIND)(find_text)
tokens.command("copy", epilog=COPY)(copy_set)


INSPECT = """
Examples:

gristmill tokens inspect tokens/mine

gristmill tokens inspect tokens/mine --page mine.html
"""


@tokens.command("inspect", epilog=INSPECT)
def inspect_set(
    prefix: Prefix,
    source: From = None,
    dtype: Dtype = None,
    end_of_text: EndOfText = None,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write a page to look at: lengths, sources, languages, copies, common phrases, "
            "and texts that were kept and dropped.",
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show counts, document lengths and the range of ids."""
    reading = Reading(source, dtype, end_of_text)
    if page is not None:
        if reading != Reading():
            what = "a page is for sets that were prepared here, which say how to read them"
            raise UserError(what, where="--page", remedy="convert the set first", exit=Exit.USAGE)
        _write_page(prefix, page, as_json=as_json, quiet=quiet)
        return
    summary = inspect_tokens(prefix, reading)
    texts = _first_documents(prefix, reading)
    if as_json:
        value = {"name": str(prefix), **asdict(summary), "first_documents": texts}
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
    elif not quiet:
        _show_summary(summary)
        for number, text in enumerate(texts):
            typer.echo(f"document {number:<2} {text}")


def _write_page(prefix: Path, page: Path, *, as_json: bool, quiet: bool) -> None:
    """Write what a set consists of to a page, and with `as_json` to standard output."""

    def show(done: int, total: int) -> None:
        line.update(done, total, f"{format_count(done)} tokens read")

    with ProgressLine("looking", quiet=quiet) as line:
        statistics = token_statistics(prefix, progress=show)
    write_tokens_page(statistics, page)
    if as_json:
        typer.echo(json.dumps(statistics, indent=2, ensure_ascii=False))
    elif not quiet:
        typer.echo(f"written to {page}")


def _show_summary(summary: TokenSetSummary) -> None:
    info = summary.info
    vocabulary = "unknown" if info.vocab_size is None else f"{info.vocab_size:,}"
    typer.echo(f"format      {info.format}, {info.dtype}")
    typer.echo(f"tokens      {info.tokens:,}")
    typer.echo(f"documents   {info.documents:,}")
    typer.echo(f"vocabulary  {vocabulary}, end of text {info.end_of_text}")
    typer.echo(f"ids         {summary.smallest_id} to {summary.largest_id}")
    typer.echo(f"tokenizer   {info.tokenizer[:16] if info.tokenizer else 'unknown'}")
    typer.echo(f"content     {info.fingerprint[:16]}")
    if summary.checked:
        typer.echo(f"checked     not to hold items of {', '.join(summary.checked)}")
    quantiles = ", ".join(f"{100 * q:g}%: {n}" for q, n in summary.length_quantiles.items())
    typer.echo(f"lengths     mean {summary.mean_length:.1f}; {quantiles}")
    widest = max(summary.length_histogram.values())
    for low, documents in summary.length_histogram.items():
        bar = "#" * round(40 * documents / widest)
        typer.echo(f"  {low:>9,} to {2 * low:>9,}  {documents:>9,}  {bar}")


def _first_documents(prefix: Path, reading: Reading) -> list[str]:
    """How the first documents begin, if the tokenizer lies beside the set."""
    folder = Path(f"{prefix}.tokenizer")
    if not folder.is_dir():
        return []
    tokenizer, reader = open_tokenizer(folder), open_tokens(prefix, reading)
    bounds = [*reader.document_starts[: _DOCUMENTS_SHOWN + 1].tolist(), len(reader)]
    texts = []
    for begin, end in pairwise(bounds[: _DOCUMENTS_SHOWN + 1]):
        text = tokenizer.decode(reader.read(begin, min(end - begin, _TOKENS_SHOWN)).tolist())
        texts.append(repr(text) + (" …" if end - begin > _TOKENS_SHOWN else ""))
    return texts


@tokens.command("verify", epilog="Example: gristmill tokens verify tokens/mine")
def verify_set(
    prefix: Prefix,
    source: From = None,
    dtype: Dtype = None,
    end_of_text: EndOfText = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check sizes, checksums and ids; report everything that is broken."""
    began = time.perf_counter()

    def show(done: int, total: int) -> None:
        rate = format_bytes(done / max(time.perf_counter() - began, 1e-9))
        line.update(done, total, f"{format_bytes(done)} of {format_bytes(total)}, {rate}/s")

    reading = Reading(source, dtype, end_of_text)
    with ProgressLine("verifying", quiet=quiet) as line:
        problems = verify_tokens(prefix, reading, progress=show)
    manifest = None if problems else find_manifest(prefix)
    if as_json:
        value = {
            "name": str(prefix),
            "intact": not problems,
            "checksums_compared": manifest is not None,
            "problems": [asdict(problem) for problem in problems],
        }
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    if not as_json and not quiet:
        state = "intact"
        if manifest is None:
            state = "readable; without a manifest there are no checksums to compare"
        elif not manifest.sealed:
            state += "; its manifest is of an earlier version and has no checksum of its own"
        typer.echo(f"{prefix}: {state}")


@tokens.command(
    "convert",
    epilog="Example: gristmill tokens convert tokens/mine -o tokens/npy/mine --format npy",
)
def convert_set(
    prefix: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Prefix, folder or file of token files.")
    ],
    output: Output,
    format: Annotated[
        TokenFormat,
        output_option(
            "--format",
            metavar="FORMAT",
            help="Format of the new token files: flat, megatron, megatron-cached, megatron-lazy, "
            "llmc or npy.",
        ),
    ],
    shard_size: ShardSize = None,
    source: From = None,
    dtype: Dtype = None,
    end_of_text: EndOfText = None,
    tokenizer: MadeBy = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert token files to another format."""
    reading = Reading(source, dtype, end_of_text)
    options: dict[str, Any] = {"format": format, "shard_size": shard_size, "overwrite": overwrite}
    _copy([prefix], output, tokenizer, reading=reading, **options)


@tokens.command(
    "merge", epilog="Example: gristmill tokens merge 'tokens/books.part-*' -o tokens/books"
)
def merge_sets(
    prefixes: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE", help="Prefixes of token files in order, or quoted globs."),
    ],
    output: Output,
    format: Annotated[
        TokenFormat | None,
        output_option(
            "--format",
            metavar="FORMAT",
            help="Format of the new token files: flat, megatron, megatron-cached, megatron-lazy, "
            "llmc or npy; that of the first if not given.",
        ),
    ] = None,
    shard_size: ShardSize = None,
    tokenizer: MadeBy = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge several token sets into one, in the order given.

    Parts made by `prepare --parts` give the files of one preparation of everything.
    """
    sources = find_sets(prefixes)
    options: dict[str, Any] = {"format": format, "shard_size": shard_size, "overwrite": overwrite}
    ledger = functools.partial(merge_ledgers, sources, output)
    _copy(sources, output, tokenizer, ledger=ledger, **options)
    merge_signatures(sources, output)


def _copy(
    sources: Sequence[Path],
    output: Path,
    tokenizer: str | None,
    ledger: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Copy token sets into a new one, with their tokenizer and what `ledger` writes; the options
    are `convert_tokens`'s."""
    beside = [folder for source in sources if (folder := Path(f"{source}.tokenizer")).is_dir()]
    chosen = tokenizer or next(iter(beside), None)
    made_by, origin = open_tokenizer(chosen) if chosen else None, None
    if tokenizer is not None and made_by is not None:
        origin = Origin(made_by.size, made_by.end_of_text, made_by.spec)

    def show(state: CopyProgress) -> None:
        rate = format_count(state.tokens / max(state.seconds, 1e-9))
        words = f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens"
        line.update(state.tokens, state.tokens_total, f"{words}, {rate} tokens/s")

    def save_companions(info: TokenSetInfo) -> None:
        folder = Path(f"{output}.tokenizer")
        if made_by is not None:
            save_tokenizer(made_by, folder)
        elif folder.is_dir():
            # It belongs to the set that was replaced.
            shutil.rmtree(folder)
        ledger()

    options |= {"progress": show, "companions": save_companions}
    with ProgressLine("copying") as line:
        info = convert_tokens(sources, output, origin=origin, **options)
    typer.echo(
        f"{output}: {info.tokens:,} tokens in {info.documents:,} documents, {info.format}, "
        f"{info.dtype}"
    )
    if info.tokenizer is None:
        typer.echo("  the tokenizer is unknown: name it in data.tokenizer to train")


# ------------------------------------------------------------------ tokenizers


@tokenizer.command("train")
def train_tokenizer(
    sources: Sources,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="For the tokenizer.")
    ],
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
            metavar="TOKENIZER",
            help="A folder or file, bytes, gpt2, an encoding of tiktoken such as cl100k_base, "
            "or a Hugging Face name.",
        ),
    ],
    text: Annotated[str | None, typer.Argument(help="Text to split into tokens.")] = None,
    end_of_text: Annotated[
        str | None,
        typer.Option(help="The token that ends a document, if the files do not state it."),
    ] = None,
) -> None:
    """Show the facts about a tokenizer, and how it splits a text."""
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
