"""`prepare`: turn text into token files."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.exits import follow_supervisor
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.dialects import DialectCommand, DialectName
from gristmill.cli.options import (
    AsJson,
    Documents,
    JsonKeys,
    Overwrite,
    Quiet,
    ShardSize,
    TokenFormat,
    command_options,
    output_option,
    source_option,
)
from gristmill.cli.prepare_dedup import (
    Against,
    Dedup,
    DedupBuckets,
    DedupBy,
    DedupGroup,
    DedupHashes,
    DedupMemory,
    DedupMinLength,
    DedupWords,
    check_dedup_group,
    dedup_request,
    group_all_parts,
    show_dedup,
)
from gristmill.cli.prepare_filters import (
    Decontaminate,
    DecontaminateShare,
    DecontaminateWords,
    FilterNames,
    open_plan,
    print_dropped,
)
from gristmill.cli.prepare_parts import (
    AtOnce,
    Attempts,
    EngineName,
    JobSettings,
    Page,
    RayAddress,
    Status,
    check_hold_out_end,
    check_parts_options,
    fetch_corpus,
    find_corpus,
    part_arguments,
    prepare_parts,
    sets_of,
    show_parts,
)
from gristmill.cli.prepare_tokenizer import is_of_text, open_named, tokenizer_of_text
from gristmill.cli.progress import ProgressLine
from gristmill.cli.tokens_copy import named, prepare_and_upload, staged
from gristmill.hub.client import downloads_shown
from gristmill.hub.objects import scheme_of
from gristmill.text.prepare.all_parts import part_requests
from gristmill.text.prepare.prepare import PrepareResult
from gristmill.text.prepare.prepare import prepare as prepare_tokens
from gristmill.text.prepare.request import (
    WHOLE,
    Holdout,
    PrepareRequest,
    no_parts_of,
    parse_holdout,
    parse_part,
)
from gristmill.text.prepare.work_plan import PrepareProgress
from gristmill.text.sources.corpora import Corpus, describe, known_corpora
from gristmill.text.sources.source import DocumentSplit, OnDamage, ReadOptions

_SEED = 1234
_tokenizer_option = functools.partial(typer.Option, rich_help_panel="Tokenizer")
_work_option = functools.partial(typer.Option, rich_help_panel="Work")


def _list_corpora(wanted: bool) -> None:
    if not wanted:
        return

    for corpus in known_corpora().values():
        typer.echo(describe(corpus) + "\n")
    raise typer.Exit()


@command_options(cls=DialectCommand)
def prepare(
    context: typer.Context,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Files, globs, folders (JSON, CSV, Parquet, Arrow, text; .gz .bz2 .xz .zst), "
            "- for stdin, addresses (s3:// gs:// hf:// https://), hf:NAME[@REVISION] of a "
            "dataset, or the name of a corpus.",
        ),
    ] = None,
    *,
    dialect: DialectName = None,
    output: Annotated[
        str,
        output_option(
            "--output",
            "-o",
            metavar="NAME",
            help="Folder and name of the token files, without an ending: tokens/books, or an "
            "address such as s3://bucket/tokens/books.",
        ),
    ],
    tokenizer: Annotated[
        str,
        _tokenizer_option(
            "--tokenizer",
            "-t",
            metavar="NAME",
            help="gpt2, bytes, bpe:4096 (as many ids, learnt from the text), characters (those of "
            "the text), a tiktoken encoding, a folder or file, NAME[@REVISION] on the Hub.",
        ),
    ] = "gpt2",
    vocab_file: Annotated[
        Path | None,
        _tokenizer_option(metavar="FILE", help="Vocabulary of a BPE, with --merge-file."),
    ] = None,
    merge_file: Annotated[
        Path | None, _tokenizer_option(metavar="FILE", help="Merges of a BPE, with --vocab-file.")
    ] = None,
    end_of_text: Annotated[
        str | None,
        _tokenizer_option(
            metavar="TOKEN", help="The token that ends a document, if it cannot be detected."
        ),
    ] = None,
    append_eod: Annotated[
        bool,
        _tokenizer_option(
            "--append-eod/--no-append-eod",
            metavar=" ",
            help="End every document with the end-of-text token.",
        ),
    ] = True,
    json_key: JsonKeys = None,
    documents: Documents = DocumentSplit.FILE,
    separator: Annotated[
        str | None,
        source_option(
            metavar="TEXT", help="The text between documents in plain text, such as <|endoftext|>."
        ),
    ] = None,
    strict: Annotated[
        bool, source_option("--strict", help="Stop at the first line that is no document.")
    ] = False,
    on_damage: Annotated[
        OnDamage,
        source_option(
            metavar="stop|skip",
            help="If a file cannot be read to its end, stop, or leave it out and name it in the "
            "ledger.",
        ),
    ] = OnDamage.STOP,
    filter: FilterNames = None,
    decontaminate: Decontaminate = None,
    decontaminate_words: DecontaminateWords = None,
    decontaminate_share: DecontaminateShare = None,
    corpora: Annotated[
        bool,
        source_option(
            "--corpora",
            callback=_list_corpora,
            is_eager=True,
            help="List the corpora known by name and exit.",
        ),
    ] = False,
    format: Annotated[
        TokenFormat,
        output_option(
            "--format",
            metavar="FORMAT",
            help="Format of the token files: flat, megatron, megatron-cached, megatron-lazy, llmc "
            "or npy.",
        ),
    ] = TokenFormat.FLAT,
    shard_size: ShardSize = None,
    split: Annotated[
        str | None,
        output_option(
            metavar="SHARES",
            help="Hold documents out: shares of train, val and test, such as 999,1. The sets are "
            "named NAME_train and NAME_val, or by replacing {split} in NAME.",
        ),
    ] = None,
    hold_out_end: Annotated[
        float | None,
        output_option(
            metavar="SHARE",
            help="Hold the end of each plain text file out: 0.1 makes its last tenth, in "
            "characters, the set val.",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        output_option(
            metavar="N", help=f"Seed that chooses the documents held out; {_SEED} if not given."
        ),
    ] = None,
    overwrite: Overwrite = False,
    dedup: Dedup = None,
    dedup_by: DedupBy = None,
    dedup_min_length: DedupMinLength = None,
    dedup_words: DedupWords = None,
    dedup_buckets: DedupBuckets = None,
    dedup_hashes: DedupHashes = None,
    dedup_memory: DedupMemory = None,
    against: Against = None,
    dedup_group: DedupGroup = False,
    workers: Annotated[
        int | None,
        _work_option(
            min=1,
            metavar="N",
            help="Processes; one for each core if not given. With --engine, those of one part, "
            "and 1 if not given.",
        ),
    ] = None,
    part: Annotated[
        str | None,
        _work_option(
            "--part",
            metavar="PART",
            help="Do one part of the work: 2/8; 2 with --parts 8; slurm or pbs for the number of "
            "the task.",
        ),
    ] = None,
    parts: Annotated[
        int | None,
        _work_option(
            min=1,
            metavar="N",
            help="How many parts there are. With --engine all are done, and merged; with --part "
            "one; with neither, the one of this task of a job array.",
        ),
    ] = None,
    engine: EngineName = None,
    at_once: AtOnce = None,
    attempts: Attempts = None,
    ray_address: RayAddress = None,
    launch: JobSettings = None,
    status: Status = False,
    page: Page = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Turn text into token files that `train` reads.

    After a kill or an interruption, the same command resumes.
    """
    follow_supervisor()
    place = staged(output)
    if status:
        show_parts(place, parts, page=page, as_json=as_json, quiet=quiet)
        return
    if not sources:
        what, remedy = "no source is given", "name files, folders or a corpus"
        raise UserError(what, where="command line", remedy=remedy, exit=Exit.USAGE)
    in_parts = check_parts_options(
        engine,
        part=part,
        parts=parts,
        workers=workers,
        at_once=at_once,
        attempts=attempts,
        ray_address=ray_address,
        launch=launch or (),
        page=page,
    )
    if separator is not None and (not separator or documents is not DocumentSplit.FILE):
        raise UserError(
            "documents are split in one way: by --documents, or by a separator that is not empty",
            where="--separator",
            remedy="leave one of the two out",
        )
    corpus = find_corpus(sources)
    check_hold_out_end(
        hold_out_end,
        split=split,
        corpus=corpus,
        in_parts=part is not None or parts is not None or engine is not None,
    )
    request = PrepareRequest(
        sources,
        place,
        lambda: open_named(tokenizer, vocab_file, merge_file, end_of_text, quiet=quiet),
        options=ReadOptions(tuple(json_key or ("text",)), documents, separator),
        filters=open_plan(filter, decontaminate, decontaminate_words, decontaminate_share),
        append_end_of_text=append_eod,
        strict=strict,
        on_damage=on_damage,
        format=format.value,
        shard_size=shard_size,
        holdout=_holdout(corpus, split, seed),
        dedup=dedup_request(
            dedup,
            unit=dedup_by,
            min_length=dedup_min_length,
            words=dedup_words,
            buckets=dedup_buckets,
            hashes=dedup_hashes,
            memory=dedup_memory,
            against=against or (),
            hold_out_end=hold_out_end,
        ),
        part=WHOLE if in_parts or dedup_group else parse_part(part, parts=parts),
        workers=workers,
        overwrite=overwrite,
    )
    if dedup_group:
        check_dedup_group(request, parts, alone=part is None and in_parts is None)

    if scheme_of(output) and request.part != WHOLE:
        what = "a part is merged with the others on a disk that all of them share"
        remedy = "give a local name; merge the parts, then: gristmill tokens copy NAME ADDRESS"
        raise UserError(what, where=f"--output {output}", remedy=remedy, exit=Exit.USAGE)

    def run_here(request: PrepareRequest, expected: int | None = None) -> PrepareResult:
        if in_parts is None:
            return _prepare(request, quiet, expected)
        arguments = part_arguments(context, in_parts, output=place)
        return prepare_parts(request, arguments, in_parts, quiet=quiet)

    def run(request: PrepareRequest, expected: int | None = None) -> PrepareResult:
        if not scheme_of(output):
            return run_here(request, expected)
        return prepare_and_upload(request, lambda: run_here(request, expected), quiet=quiet)

    with downloads_shown(None) if quiet else nullcontext():
        if corpus and in_parts and corpus.dataset:
            raise no_parts_of(corpus.name)
        if corpus:
            request = replace(request, sources=[fetch_corpus(corpus, request, quiet)])
        if is_of_text(tokenizer):
            made = tokenizer_of_text(tokenizer, request, in_parts is not None)
            request = replace(request, tokenizer=made)
        jobs = sets_of(request, corpus, hold_out_end)
        if dedup_group:
            for wanted, _ in jobs:
                group_all_parts(part_requests(wanted, parts or 0), quiet=quiet)
            return
        results = [run(*job) for job in jobs]
    if as_json:
        typer.echo(json.dumps(prepared_as_json(results), indent=2, ensure_ascii=False))
    elif not quiet:
        for result in results:
            report_prepared(result)


def _holdout(corpus: Corpus | None, split: str | None, seed: int | None) -> Holdout | None:
    """What is held out: as requested, or by the corpus unless it has a validation set."""
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


def _prepare(request: PrepareRequest, quiet: bool, expected: int | None = None) -> PrepareResult:
    """Prepare; `expected` bytes of text are the total if the sources do not tell."""
    first: PrepareProgress | None = None
    with ProgressLine("preparing", quiet=quiet) as line:

        def show(state: PrepareProgress) -> None:
            nonlocal first
            # Rates are those of this process, since what an earlier one did took no time here.
            first = first or state
            seconds = max(state.seconds - first.seconds, 1e-9)
            line.update(
                state.bytes_done,
                state.bytes_total or expected,
                f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens, "
                + _rate((state.text_bytes - first.text_bytes) / seconds),
            )

        try:
            dedup = functools.partial(show_dedup, line)
            return prepare_tokens(request, progress=show, deduplicating=dedup, note=line.say)
        except KeyboardInterrupt:
            line.say("interrupted: run the same command again to resume from what was saved")
            raise


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)} of text/s"


def prepared_as_json(results: Sequence[PrepareResult]) -> dict[str, Any]:
    """What was made and what was dropped, for programs."""
    keys = [key for result in results for key in result.keys]
    return {
        "sets": [
            {"name": named(new_set.prefix), "key": key.key, **asdict(new_set.info)}
            for key in keys
            for new_set in key.sets
        ],
        "ledgers": [{"file": named(key.ledger_file), **key.ledger.as_json()} for key in keys],
        "text_bytes": sum(result.text_bytes for result in results),
        "new_text_bytes": sum(result.new_text_bytes for result in results),
        "seconds": sum(result.seconds for result in results),
        "encoder": next((result.encoder for result in results if result.encoder), None),
    }


def report_prepared(result: PrepareResult) -> None:
    """Print what was made and what was dropped."""
    for key in result.keys:
        for new_set in key.sets:
            info = new_set.info
            typer.echo(
                f"{named(new_set.prefix)}: {info.tokens:,} tokens in {info.documents:,} documents "
                f"from {format_bytes(info.text_bytes or 0)} of text, {info.format}, {info.dtype}"
            )
        ledger = key.ledger
        dropped = ledger.dropped.total()
        typer.echo(f"{ledger.lines:,} read = {ledger.kept:,} kept + {dropped:,} dropped")
        print_dropped(ledger, named(key.ledger_file))
        for reason, count in ledger.removed.items():
            typer.echo(f"  removed {count:,}: {reason.value}")
        for why, count in ledger.skipped.items():
            typer.echo(f"  skipped {count:,}: {why.value}")
        for skipped in ledger.skipped_places[:5]:
            typer.echo(f"    {skipped.origin}: {skipped.what}")
    if not result.keys:
        # A part that waits for the others; a note has said so.
        return
    rate = _rate(result.new_text_bytes / max(result.seconds, 1e-9))
    by = f", encoded by {result.encoder}" if result.encoder else ""
    typer.echo(f"{format_seconds(result.seconds)}, {rate}{by}")
