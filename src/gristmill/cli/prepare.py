"""`prepare`: turn text into token files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gristmill.base.errors import UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.options import Documents, JsonKeys, Output, Overwrite, ShardSize, TokenFormat
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources.source import DocumentSplit, OnDamage, ReadOptions

if TYPE_CHECKING:
    from gristmill.text.prepare.prepare import PrepareResult
    from gristmill.text.prepare.request import Holdout, PrepareRequest
    from gristmill.text.sources.corpora import Corpus
    from gristmill.text.tokenizers.tokenizer import Tokenizer

_SEED = 1234


def _list_corpora(wanted: bool) -> None:
    if not wanted:
        return
    from gristmill.text.sources.corpora import describe, known_corpora

    for corpus in known_corpora().values():
        typer.echo(describe(corpus) + "\n")
    raise typer.Exit()


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE…",
            help="Files, globs, folders (JSON, CSV, Parquet, Arrow, text; .gz .bz2 .xz .zst), "
            "- for stdin, hf:NAME for a dataset, or the name of a corpus.",
        ),
    ],
    output: Output,
    tokenizer: Annotated[
        str,
        typer.Option(
            "--tokenizer",
            "-t",
            help='"gpt2", "bytes", a tiktoken encoding, a folder or file, a Hugging Face name.',
        ),
    ] = "gpt2",
    vocab_file: Annotated[
        Path | None, typer.Option(help="Vocabulary of a BPE, with --merge-file.")
    ] = None,
    merge_file: Annotated[
        Path | None, typer.Option(help="Merges of a BPE, with --vocab-file.")
    ] = None,
    end_of_text: Annotated[
        str | None, typer.Option(help="The token that ends a document, if it cannot be detected.")
    ] = None,
    json_key: JsonKeys = None,
    documents: Documents = DocumentSplit.FILE,
    separator: Annotated[
        str | None,
        typer.Option(help="The text between documents in plain text, such as <|endoftext|>."),
    ] = None,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-text token.")
    ] = True,
    strict: Annotated[
        bool, typer.Option(help="Stop at the first line that would be dropped.")
    ] = False,
    on_damage: Annotated[
        OnDamage,
        typer.Option(
            help="A file that cannot be read to its end stops the work, or is left out as a whole "
            "and named in the ledger.",
        ),
    ] = OnDamage.STOP,
    format: Annotated[TokenFormat, typer.Option(help="Format of the token files.")] = (
        TokenFormat.FLAT
    ),
    shard_size: ShardSize = None,
    split: Annotated[
        str | None,
        typer.Option(help="Hold documents out: shares of train, val and test, such as 999,1."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help=f"Seed that chooses the documents held out; {_SEED} if not given."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core if not given.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            help="Do one part of the work: 2/8; 2 with --parts 8; or slurm or pbs, where it is the "
            "number of the task.",
        ),
    ] = None,
    parts: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many parts there are; without --part, the scheduler says which."
        ),
    ] = None,
    overwrite: Overwrite = False,
    corpora: Annotated[
        bool,
        typer.Option(
            "--corpora",
            callback=_list_corpora,
            is_eager=True,
            help="List the corpora known by name and exit.",
        ),
    ] = False,
) -> None:
    """Turn text into token files that `train` reads.

    After a kill or an interruption, the same command resumes. With --split the sets are named
    OUTPUT_train and OUTPUT_val, or by replacing {split} in OUTPUT.
    """
    from gristmill.text.prepare.parts import parse_part
    from gristmill.text.prepare.request import PrepareRequest

    if separator is not None and (not separator or documents is not DocumentSplit.FILE):
        raise UserError(
            "documents are split in one way: by --documents, or by a separator that is not empty",
            where="--separator",
            remedy="leave one of the two out",
        )
    corpus = _find_corpus(sources)
    request = PrepareRequest(
        sources,
        output,
        lambda: _open_tokenizer(tokenizer, vocab_file, merge_file, end_of_text),
        options=ReadOptions(tuple(json_key or ("text",)), documents, separator),
        append_end_of_text=append_eod,
        strict=strict,
        on_damage=on_damage,
        format=format.value,
        shard_size=shard_size,
        holdout=_holdout(corpus, split, seed),
        part=parse_part(part, parts=parts),
        workers=workers,
        overwrite=overwrite,
    )
    if corpus:
        _prepare_corpus(corpus, request)
    else:
        _prepare(request)


def _holdout(corpus: Corpus | None, split: str | None, seed: int | None) -> Holdout | None:
    """What is held out: as requested, or by the corpus unless it has a validation set."""
    from gristmill.text.prepare.request import Holdout, parse_holdout

    if split is not None:
        return parse_holdout(split, seed=_SEED if seed is None else seed)
    if corpus and corpus.held_out is not None:
        chosen = seed if seed is not None else corpus.seed
        shares = (1 - corpus.held_out, corpus.held_out)
        rows = corpus.documents if corpus.split_as_published else None
        return Holdout(shares, _SEED if chosen is None else chosen, rows)
    if seed is not None:
        raise UserError(
            "a seed chooses the documents held out, but none are",
            where="--seed",
            remedy="hold some out with --split, or leave it out",
        )
    return None


def _open_tokenizer(
    name: str, vocab: Path | None, merges: Path | None, end_of_text: str | None
) -> Tokenizer:
    from gristmill.text.tokenizers.tokenizer import open_tokenizer, open_tokenizer_files

    if vocab and merges:
        opened = open_tokenizer_files(vocab, merges, end_of_text=end_of_text)
    elif vocab or merges:
        raise UserError(
            "a vocabulary and its merges belong together",
            where="--vocab-file" if vocab else "--merge-file",
            remedy="give both, or a tokenizer with -t",
        )
    else:
        opened = open_tokenizer(name, end_of_text=end_of_text)
    if not opened.lossless:
        typer.echo("note: this tokenizer is not lossless: decoding may not give the same text")
    return opened


def _prepare(request: PrepareRequest, *, expected: int | None = None) -> None:
    """Prepare and report; `expected` bytes of text are the total if the sources do not tell."""
    from gristmill.text.prepare.prepare import prepare as prepare_tokens
    from gristmill.text.prepare.work_plan import PrepareProgress

    first: PrepareProgress | None = None
    with ProgressLine("preparing") as line:

        def show(state: PrepareProgress) -> None:
            nonlocal first
            # Rates are those of this process, since what an earlier one did took no time here.
            first = first or state
            seconds = max(state.seconds - first.seconds, 1e-9)
            line.update(
                state.bytes_done,
                state.bytes_total or expected,
                f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens, "
                f"{format_bytes((state.bytes_done - first.bytes_done) / seconds)}/s, "
                f"{format_count((state.documents - first.documents) / seconds)} documents/s",
            )

        try:
            result = prepare_tokens(request, progress=show, note=line.say)
        except KeyboardInterrupt:
            line.say("interrupted: run the same command again to resume from what was saved")
            raise
    report_prepared(result)


def _find_corpus(sources: Sequence[str]) -> Corpus | None:
    from gristmill.text.sources.corpora import find_corpus

    named = [name for name in sources if not Path(name).exists() and find_corpus(name)]
    if named and len(sources) > 1:
        raise UserError(
            "a corpus known by name is prepared on its own",
            where=named[0],
            remedy="prepare each on its own, then: gristmill tokens merge",
        )
    return find_corpus(named[0]) if named else None


def _prepare_corpus(corpus: Corpus, request: PrepareRequest) -> None:
    from gristmill.text.prepare.request import split_name
    from gristmill.text.sources.corpora import check_disk, describe, fetch_corpus

    typer.echo(describe(corpus))
    check_disk(corpus, output=request.output)
    with ProgressLine("downloading") as line:
        source = fetch_corpus(
            corpus, progress=lambda done, total: line.update(done, total, format_bytes(done))
        )
    if request.holdout or not corpus.validation:
        _prepare(replace(request, sources=[source]), expected=corpus.text_bytes)
        return
    # The corpus has a validation set of its own.
    for name, own in (("train", source), ("val", corpus.source(corpus.validation))):
        output = Path(split_name(str(request.output), name))
        _prepare(replace(request, sources=[own], output=output))


def report_prepared(result: PrepareResult) -> None:
    """Print what was made and what was dropped."""
    for key in result.keys:
        for made in key.sets:
            info = made.info
            typer.echo(
                f"{made.prefix}: {info.tokens:,} tokens in {info.documents:,} documents from "
                f"{format_bytes(info.text_bytes or 0)} of text, {info.format}, {info.dtype}"
            )
        ledger = key.ledger
        dropped = sum(ledger.dropped.values())
        typer.echo(f"{ledger.lines:,} read = {ledger.kept:,} kept + {dropped:,} dropped")
        for reason, count in ledger.dropped.items():
            typer.echo(f"  dropped {count:,}: {reason.value}")
        for place in ledger.places[:5]:
            typer.echo(f"    {place.origin}: {place.reason.value}")
        if dropped > 5:
            typer.echo(f"    more places: {key.ledger_file}")
        for why, count in ledger.skipped.items():
            typer.echo(f"  skipped {count:,}: {why.value}")
        for skipped in ledger.skipped_places[:5]:
            typer.echo(f"    {skipped.origin}: {skipped.what}")
    rate = format_bytes(result.new_text_bytes / max(result.seconds, 1e-9))
    by = f", encoded by {result.encoder}" if result.encoder else ""
    typer.echo(f"{format_seconds(result.seconds)}, {rate}/s{by}")
