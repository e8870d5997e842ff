"""`prepare`: from text to token files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.base.errors import UserError
from gristmill.base.units import format_bytes, format_count, format_seconds
from gristmill.cli.options import (
    Documents,
    JsonKeys,
    Output,
    Overwrite,
    ShardSize,
    TokenFormat,
)
from gristmill.cli.progress import ProgressLine
from gristmill.text.sources.source import DocumentSplit

if TYPE_CHECKING:
    from gristmill.text.prepare.outputs import PreparedKey
    from gristmill.text.prepare.prepare import PrepareProgress, PrepareResult
    from gristmill.text.sources.corpora import Corpus
    from gristmill.text.tokenizers.tokenizer import Tokenizer

_SEED = 1234


def _list_corpora(wanted: bool) -> None:
    if not wanted:
        return
    from gristmill.text.sources.corpora import corpus_names, describe, find_corpus

    for name in corpus_names():
        corpus = find_corpus(name)
        assert corpus is not None
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
        str | None, typer.Option(help="The token that ends a document, if it is not found out.")
    ] = None,
    json_key: JsonKeys = None,
    documents: Documents = DocumentSplit.FILE,
    separator: Annotated[
        str | None,
        typer.Option(help="What stands between documents in plain text, as <|endoftext|>."),
    ] = None,
    append_eod: Annotated[
        bool, typer.Option(help="End every document with the end-of-text token.")
    ] = True,
    strict: Annotated[bool, typer.Option(help="Stop at the first line that is dropped.")] = False,
    format: Annotated[TokenFormat, typer.Option(help="Format of the token files.")] = (
        TokenFormat.FLAT
    ),
    shard_size: ShardSize = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Hold documents out: proportions for train, val and perhaps test, as 999,1."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help=f"Chooses the documents held out; {_SEED} if not given.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core if not given.")
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(help='Do one part of the work, as 2/8, or "slurm" for a job array\'s task.'),
    ] = None,
    overwrite: Overwrite = False,
    corpora: Annotated[
        bool,
        typer.Option(
            "--corpora",
            callback=_list_corpora,
            is_eager=True,
            help="Show the corpora known by name, and do nothing else.",
        ),
    ] = False,
) -> None:
    """Turn text into token files that `train` reads.

    Killed or interrupted, the same command goes on where it was. With --split the sets are named
    OUTPUT_train and OUTPUT_val, or as OUTPUT says where it contains {split}.
    """
    from gristmill.text.prepare.holdout import parse_holdout
    from gristmill.text.prepare.parts import WHOLE, parse_part

    settings: dict[str, Any] = {
        "tokenizer": lambda: _open_tokenizer(tokenizer, vocab_file, merge_file, end_of_text),
        "keys": tuple(json_key or ("text",)),
        "split": documents,
        "separator": separator,
        "append_end_of_text": append_eod,
        "strict": strict,
        "format": format.value,
        "shard_size": shard_size,
        "part": parse_part(part) if part else WHOLE,
        "workers": workers,
        "overwrite": overwrite,
    }
    if separator is not None and (not separator or documents is not DocumentSplit.FILE):
        raise UserError(
            "documents are divided in one way: by --documents, or by a separator that is not empty",
            where="--separator",
            remedy="leave one of the two out",
        )
    corpus = _corpus(sources)
    if corpus:
        _prepare_corpus(corpus, output, settings, split=split, seed=seed)
        return
    if split is None:
        _refuse_idle(seed)
    holdout = parse_holdout(split, seed=_SEED if seed is None else seed) if split else None
    report_prepared(_prepare(sources, output, settings | {"holdout": holdout}))


def _refuse_idle(seed: int | None) -> None:
    if seed is not None:
        raise UserError(
            "a seed chooses the documents held out, and none are",
            where="--seed",
            remedy="hold some out with --split, or leave it out",
        )


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
        typer.echo("note: this tokenizer changes some texts: decoding them gives something else")
    return opened


def _prepare(
    sources: Sequence[str],
    output: Path,
    settings: dict[str, Any],
    *,
    expected: int | None = None,
) -> PrepareResult:
    from gristmill.text.prepare.prepare import prepare as prepare_tokens

    with ProgressLine("preparing") as line:
        try:
            return prepare_tokens(
                sources, output=output, progress=_show(line, expected), note=line.say, **settings
            )
        except KeyboardInterrupt:
            line.say("interrupted: the same command goes on from what was saved")
            raise


# ------------------------------------------------------------------ corpora by name


def _corpus(sources: Sequence[str]) -> Corpus | None:
    from gristmill.text.sources.corpora import find_corpus

    named = [name for name in sources if not Path(name).exists() and find_corpus(name)]
    if not named:
        return None
    if len(sources) > 1:
        raise UserError(
            "a corpus known by name is prepared by itself",
            where=named[0],
            remedy="prepare each on its own, then: gristmill tokens merge",
        )
    return find_corpus(named[0])


def _prepare_corpus(
    corpus: Corpus, output: Path, settings: dict[str, Any], *, split: str | None, seed: int | None
) -> None:
    from gristmill.text.prepare.holdout import Holdout, parse_holdout
    from gristmill.text.prepare.outputs import split_name
    from gristmill.text.sources.corpora import check_disk, describe, fetch_corpus

    if split is None and corpus.held_out is None:
        _refuse_idle(seed)
    typer.echo(describe(corpus))
    check_disk(corpus, output=output)
    with ProgressLine("fetching") as line:
        source = fetch_corpus(
            corpus, progress=lambda done, total: line.update(done, total, format_bytes(done))
        )
    if split is None and corpus.validation:
        # The corpus brings a validation set of its own.
        for name, own in (("train", source), ("val", corpus.source(corpus.validation))):
            report_prepared(_prepare([own], Path(split_name(str(output), name)), settings))
        return
    holdout = None
    if split is not None:
        holdout = parse_holdout(split, seed=_SEED if seed is None else seed)
    elif corpus.held_out is not None:
        chosen = seed if seed is not None else corpus.seed
        shares = (1 - corpus.held_out, corpus.held_out)
        holdout = Holdout(shares, _SEED if chosen is None else chosen, corpus.permuted_rows)
    settings = settings | {"holdout": holdout}
    report_prepared(_prepare([source], output, settings, expected=corpus.text_bytes))


# ------------------------------------------------------------------ words


def _show(line: ProgressLine, expected: int | None) -> Callable[[PrepareProgress], None]:
    def show(state: PrepareProgress) -> None:
        seconds = max(state.seconds, 1e-9)
        done = state.bytes_done - state.bytes_before
        words = (
            f"{format_count(state.documents)} documents, {format_count(state.tokens)} tokens, "
            f"{format_bytes(done / seconds)}/s, "
            f"{format_count((state.documents - state.documents_before) / seconds)} documents/s"
        )
        line.update(state.bytes_done, state.bytes_total or expected, words)

    return show


def report_prepared(result: PrepareResult) -> None:
    """Say what was made and what was dropped."""
    for key in result.keys:
        for made in key.sets:
            info = made.info
            typer.echo(
                f"{made.prefix}: {info.tokens:,} tokens in {info.documents:,} documents from "
                f"{format_bytes(info.text_bytes or 0)} of text, {info.format}, {info.dtype}"
            )
        _report_ledger(key)
    rate = format_bytes(result.ground_bytes / max(result.seconds, 1e-9))
    by = f", encoded by {result.encoder}" if result.encoder else ""
    typer.echo(f"{format_seconds(result.seconds)}, {rate}/s{by}")


def _report_ledger(key: PreparedKey) -> None:
    ledger = key.ledger
    dropped = sum(ledger.dropped.values())
    typer.echo(f"{ledger.lines:,} read = {ledger.kept:,} kept + {dropped:,} dropped")
    for reason, count in ledger.dropped.items():
        typer.echo(f"  dropped {count:,}: {reason.value}")
    for place in ledger.places[:5]:
        typer.echo(f"    {place.origin}: {place.reason.value}")
    if dropped > 5:
        typer.echo(f"    more places: {key.ledger_file}")
