"""`tokens`: inspect, verify, convert and merge token files."""

from __future__ import annotations

import enum
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_count
from gristmill.cli.options import Output, Overwrite, ShardSize, TokenFormat
from gristmill.cli.progress import ProgressLine

if TYPE_CHECKING:
    from gristmill.tokens.convert import CopyProgress

tokens = typer.Typer(help="Inspect, verify, convert and merge token files.", no_args_is_help=True)

_DOCUMENTS_SHOWN = 3
_TOKENS_SHOWN = 60


class IdType(enum.StrEnum):
    """How ids are stored in plain files."""

    UINT16 = "uint16"
    UINT32 = "uint32"
    INT32 = "int32"


Prefix = Annotated[Path, typer.Argument(help="Prefix of token files.")]
From = Annotated[
    TokenFormat | None,
    typer.Option("--from", help="Format of files of other programs, if it is not recognised."),
]
Dtype = Annotated[
    IdType | None,
    typer.Option(help="How ids are stored, with --from flat; uint16 if not given."),
]
EndOfText = Annotated[
    int | None,
    typer.Option(help="The id between documents, in files that do not state where these begin."),
]
MadeBy = Annotated[
    str | None,
    typer.Option(
        "--tokenizer", "-t", help="The tokenizer of files that do not state theirs: folder or file."
    ),
]


@tokens.command("inspect")
def inspect_set(
    prefix: Prefix, source: From = None, dtype: Dtype = None, end_of_text: EndOfText = None
) -> None:
    """Show counts, document lengths and the range of ids."""
    from gristmill.text.tokenizers.tokenizer import open_tokenizer
    from gristmill.tokens.foreign import Reading
    from gristmill.tokens.store import inspect_tokens, open_tokens

    reading = Reading(source, dtype, end_of_text)
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
    widest = max(summary.length_histogram.values())
    for low, documents in summary.length_histogram.items():
        bar = "#" * round(40 * documents / widest)
        typer.echo(f"  {low:>9,} to {2 * low:>9,}  {documents:>9,}  {bar}")
    folder = Path(f"{prefix}.tokenizer")
    if not folder.is_dir():
        return
    tokenizer, reader = open_tokenizer(folder), open_tokens(prefix, reading)
    bounds = [*reader.document_starts[: _DOCUMENTS_SHOWN + 1].tolist(), len(reader)]
    for number, (begin, end) in enumerate(pairwise(bounds[: _DOCUMENTS_SHOWN + 1])):
        text = tokenizer.decode(reader.read(begin, min(end - begin, _TOKENS_SHOWN)).tolist())
        more = " …" if end - begin > _TOKENS_SHOWN else ""
        typer.echo(f"document {number:<2} {text!r}{more}")


@tokens.command("verify")
def verify_set(
    prefix: Prefix, source: From = None, dtype: Dtype = None, end_of_text: EndOfText = None
) -> None:
    """Check sizes, checksums and ids; report everything that is broken."""
    from gristmill.tokens.foreign import Reading
    from gristmill.tokens.store import find_manifest, verify_tokens

    reading = Reading(source, dtype, end_of_text)
    if problems := verify_tokens(prefix, reading):
        raise UserError(problems, exit=Exit.DATA)
    if find_manifest(prefix) is None:
        typer.echo(f"{prefix}: readable; without a manifest there are no checksums to compare")
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
    """Convert token files to another format."""
    from gristmill.tokens.foreign import Reading

    reading = Reading(source, dtype, end_of_text)
    options = {"format": format, "shard_size": shard_size, "overwrite": overwrite}
    _copy([prefix], output, tokenizer, reading=reading, **options)


@tokens.command("merge")
def merge_sets(
    prefixes: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE…", help="Prefixes of token files in order, or quoted globs."
        ),
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
    """Merge several token sets into one, in the order given.

    Parts made by `prepare --part` give the same files as one preparation of everything:
    gristmill tokens merge "tokens/books.part-*" -o tokens/books
    """
    from gristmill.text.prepare.parts import find_sets, merge_ledgers

    sources = find_sets(prefixes)
    options = {"format": format, "shard_size": shard_size, "overwrite": overwrite}
    _copy(sources, output, tokenizer, **options)
    merge_ledgers(sources, output)


def _copy(sources: Sequence[Path], output: Path, tokenizer: str | None, **options: Any) -> None:
    """Copy token sets into a new one, with their tokenizer; the options are `convert_tokens`'s."""
    from gristmill.text.prepare.outputs import save_tokenizer
    from gristmill.text.tokenizers.tokenizer import open_tokenizer
    from gristmill.tokens.convert import Origin, convert_tokens

    beside = [folder for source in sources if (folder := Path(f"{source}.tokenizer")).is_dir()]
    chosen = tokenizer or next(iter(beside), None)
    made_by, origin = open_tokenizer(chosen) if chosen else None, None
    if tokenizer is not None and made_by is not None:
        origin = Origin(made_by.size, made_by.end_of_text, made_by.spec)

    def show(state: CopyProgress) -> None:
        rate = format_count(state.tokens / max(state.seconds, 1e-9))
        words = f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens"
        line.update(state.tokens, state.tokens_total, f"{words}, {rate} tokens/s")

    with ProgressLine("copying") as line:
        info = convert_tokens(sources, output, origin=origin, progress=show, **options)
    folder = Path(f"{output}.tokenizer")
    if made_by is not None:
        save_tokenizer(made_by, folder)
    elif folder.is_dir():
        # It belongs to the set that was replaced.
        shutil.rmtree(folder)
    typer.echo(
        f"{output}: {info.tokens:,} tokens in {info.documents:,} documents, {info.format}, "
        f"{info.dtype}"
    )
    if info.tokenizer is None:
        typer.echo("  the tokenizer is unknown: name it in data.tokenizer to train")
