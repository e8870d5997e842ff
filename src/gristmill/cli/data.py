"""`prepare`, `tokens` and `tokenizer`: from text to token files."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources import DocumentSplit

if TYPE_CHECKING:
    from gristmill.text.prepare import PrepareProgress, PrepareResult
    from gristmill.text.tokenizers import Tokenizer
    from gristmill.tokens.convert import CopyProgress
    from gristmill.tokens.foreign import Reading
    from gristmill.tokens.format import TokenSetInfo

tokens = typer.Typer(help="Look into token files, convert and merge them.", no_args_is_help=True)
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


class TokenFormat(enum.StrEnum):
    """The formats of token files."""

    FLAT = "flat"
    MEGATRON = "megatron"
    LLMC = "llmc"
    NPY = "npy"


class IdType(enum.StrEnum):
    """How ids are stored in plain files."""

    UINT16 = "uint16"
    UINT32 = "uint32"
    INT32 = "int32"


Prefix = Annotated[Path, typer.Argument(help="Prefix of token files.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Prefix of the token files.")]
Overwrite = Annotated[bool, typer.Option(help="Replace existing token files.")]
ShardSize = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens in one file, with llmc and npy; 100M if not given."),
]
From = Annotated[
    TokenFormat | None,
    typer.Option("--from", help="Format of files of other programs, if it is not found out."),
]
Dtype = Annotated[
    IdType | None,
    typer.Option(help="How ids are stored, with --from flat; uint16 if not given."),
]
EndOfText = Annotated[
    int | None,
    typer.Option(help="The id between documents, in files that do not say where those begin."),
]
MadeBy = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", "-t", help="What made the ids, in files that do not say: folder or file."
    ),
]


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


@tokens.command("inspect")
def inspect_set(
    prefix: Prefix, source: From = None, dtype: Dtype = None, end_of_text: EndOfText = None
) -> None:
    """Show counts, document lengths and the range of ids."""
    from gristmill.text.tokenizers import open_tokenizer
    from gristmill.tokens.store import find_tokens, inspect_tokens

    reading = _reading(source, dtype, end_of_text)
    summary = inspect_tokens(prefix, reading)
    info = summary.info
    vocabulary = "unknown" if info.vocab_size is None else f"{info.vocab_size:,}"
    typer.echo(f"format      {info.format}, {info.dtype}")
    typer.echo(f"tokens      {info.tokens:,}")
    typer.echo(f"documents   {info.documents:,}")
    typer.echo(f"vocabulary  {vocabulary}, end of text {info.end_of_text}")
    typer.echo(f"ids         {summary.smallest_id} to {summary.largest_id}")
    typer.echo(f"tokenizer   {info.tokenizer[:16] if info.tokenizer else 'unknown'}")
    typer.echo(f"content     {info.fingerprint[:16]}")
    quantiles = ", ".join(f"{100 * q:g}%: {n}" for q, n in summary.length_quantiles.items())
    typer.echo(f"lengths     mean {summary.mean_length:.1f}; {quantiles}")
    widest = max((bin.documents for bin in summary.length_histogram), default=1)
    for bin in summary.length_histogram:
        bar = "#" * round(40 * bin.documents / widest)
        typer.echo(f"  {bin.low:>9,} to {bin.high:>9,}  {bin.documents:>9,}  {bar}")
    folder = Path(f"{prefix}.tokenizer")
    if folder.is_dir():
        reader = find_tokens(prefix, reading).reader
        first = open_tokenizer(folder).decode(reader.read(0, min(60, len(reader))).tolist())
        typer.echo(f"begins      {first!r}")


@tokens.command("verify")
def verify_set(
    prefix: Prefix, source: From = None, dtype: Dtype = None, end_of_text: EndOfText = None
) -> None:
    """Check sizes, checksums and ids; name everything that is broken."""
    from gristmill.tokens.store import find_tokens, verify_tokens

    reading = _reading(source, dtype, end_of_text)
    problems = verify_tokens(prefix, reading)
    if problems:
        raise UserError(problems, exit=Exit.DATA)
    if find_tokens(prefix, reading).manifest is None:
        typer.echo(f"{prefix}: readable throughout; without a manifest there are no checksums")
    else:
        typer.echo(f"{prefix}: intact")


@tokens.command("convert")
def convert_set(
    prefix: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Prefix, folder or file of token files.")
    ],
    output: Output,
    format: Annotated[TokenFormat, typer.Option(help="Format of the new token files.")],
    shard_size: ShardSize = None,
    source: From = None,
    dtype: Dtype = None,
    end_of_text: EndOfText = None,
    tokenizer: MadeBy = None,
    overwrite: Overwrite = False,
) -> None:
    """Write token files anew in another format."""
    _copy(
        [prefix],
        output,
        format=format,
        shard_size=shard_size,
        reading=_reading(source, dtype, end_of_text),
        tokenizer=tokenizer,
        overwrite=overwrite,
    )


@tokens.command("merge")
def merge_sets(
    prefixes: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE…", help="Prefixes of token files, in the order wanted."),
    ],
    output: Output,
    format: Annotated[
        TokenFormat | None,
        typer.Option(help="Format of the new token files; that of the first if not given."),
    ] = None,
    shard_size: ShardSize = None,
    tokenizer: MadeBy = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the documents of several token sets, one set after the other, as one."""
    _copy(
        prefixes,
        output,
        format=format,
        shard_size=shard_size,
        reading=None,
        tokenizer=tokenizer,
        overwrite=overwrite,
    )


def _reading(source: TokenFormat | None, dtype: IdType | None, end_of_text: int | None) -> Reading:
    from gristmill.tokens.foreign import Reading

    return Reading(
        format=source.value if source else None,
        dtype=dtype.value if dtype else None,
        end_of_text=end_of_text,
    )


def _copy(
    sources: Sequence[Path],
    output: Path,
    *,
    format: TokenFormat | None,
    shard_size: int | None,
    reading: Reading | None,
    tokenizer: str | None,
    overwrite: bool,
) -> None:
    """Copy token sets into a new one, and the tokenizer beside them along with it."""
    from gristmill.text.prepare import save_tokenizer
    from gristmill.tokens.convert import Origin, convert_tokens

    made_by = _tokenizer_of(sources, tokenizer)
    origin = None
    if tokenizer is not None and made_by is not None:
        origin = Origin(made_by.size, made_by.end_of_text, made_by.spec)
    with ProgressLine("copying") as line:
        info = convert_tokens(
            sources,
            output,
            format=format.value if format else None,
            shard_size=shard_size,
            reading=reading,
            origin=origin,
            overwrite=overwrite,
            progress=_show_copy(line),
        )
    if made_by is not None:
        save_tokenizer(made_by, Path(f"{output}.tokenizer"))
    _report_copied(info, output)


def _tokenizer_of(sources: Sequence[Path], given: str | None) -> Tokenizer | None:
    """The tokenizer that is named, or else the first that lies beside a source."""
    from gristmill.text.tokenizers import open_tokenizer

    beside = [folder for source in sources if (folder := Path(f"{source}.tokenizer")).is_dir()]
    if given is not None:
        return open_tokenizer(given)
    return open_tokenizer(beside[0]) if beside else None


def _show_copy(line: ProgressLine) -> Callable[[CopyProgress], None]:
    def show(state: CopyProgress) -> None:
        rate = format_count(state.tokens / max(state.seconds, 1e-9))
        words = f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens"
        line.update(state.tokens, state.tokens_total, f"{words}, {rate} tokens/s")

    return show


def _report_copied(info: TokenSetInfo, output: Path) -> None:
    typer.echo(
        f"{output}: {info.tokens:,} tokens in {info.documents:,} documents, {info.format}, "
        f"{info.dtype}"
    )
    if info.tokenizer is None:
        typer.echo("  the tokenizer is not known: name it in data.tokenizer to train")


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
