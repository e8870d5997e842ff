"""`tokens which` and `tokens find`: from a step of a run to the lines of its sources, and back."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import format_count
from gristmill.cli.options import AsJson
from gristmill.cli.progress import ProgressLine
from gristmill.text.search import Occurrence, excerpt, find_phrase
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.tokens.format import TokenReader
from gristmill.tokens.origins import DocumentOrigin, open_origins
from gristmill.tokens.store import open_tokens
from gristmill.track.folder import RunFolder

if TYPE_CHECKING:  # needs torch
    from gristmill.data.provenance import DocumentPart
    from gristmill.train.lookup import RunSamples

_SHOWN_TOKENS = 40
_MOST_STEPS = 20

WHICH = """
Examples:

gristmill tokens which runs/small --step 12000

gristmill tokens which runs/small --step 12000 --sample 7
"""
FIND = """
Examples:

gristmill tokens find "the miller's wheel" tokens/books

gristmill tokens find "the miller's wheel" runs/small    (and the steps that trained on it)
"""


def which_documents(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run folder.")],
    step: Annotated[int, typer.Option(min=1, help="The step.")],
    sample: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Sample N of the step, from 0 on, with its text."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which documents a step of a run trained on, and where they come from.

    Token sets know the lines of their sources if they were prepared by this program.
    """
    from gristmill.train.lookup import open_samples

    samples = open_samples(run)
    of_step = samples.of_step(step)
    if sample is not None and sample >= len(of_step):
        what = f"step {step} has the samples 0 to {len(of_step) - 1}"
        raise UserError(what, where=f"--sample {sample}", exit=Exit.USAGE)
    chosen = range(len(of_step)) if sample is None else [sample]
    origins = _Origins()
    rows: list[dict[str, Any]] = [
        {
            "sample": number,
            "of_run": of_step[number],
            "documents": [
                _described(part, samples, origins, text=sample is not None)
                for part in samples.documents(of_step[number])
            ],
        }
        for number in chosen
    ]
    if as_json:
        typer.echo(json.dumps({"step": step, "samples": rows}, indent=2, ensure_ascii=False))
        return
    left_out = "; the run passed over this batch" if samples.was_left_out(step) else ""
    typer.echo(
        f"step {step}: samples {of_step.start:,} to {of_step.stop - 1:,} of the run{left_out}"
    )
    for row in rows:
        typer.echo(f"sample {row['sample']}")
        for document in row["documents"]:
            typer.echo("\n".join(_lines(document)))


class _Origins:
    """The origins of token sets, opened once each."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def of(self, path: str, document: int) -> DocumentOrigin | None:
        if path not in self._known:
            self._known[path] = open_origins(Path(path))
        index = self._known[path]
        return None if index is None else index.of(document)


def _described(
    part: DocumentPart, samples: RunSamples, origins: _Origins, *, text: bool
) -> dict[str, Any]:
    origin = origins.of(part.tokens.path, part.document)
    shown = part.count if text else min(part.count, _SHOWN_TOKENS)
    ids = part.tokens.reader.read(part.begin, shown).tolist()
    return {
        "set": part.tokens.path,
        "document": part.document,
        "source": None if origin is None else origin.source,
        "line": None if origin is None else origin.line,
        "offset": part.offset,
        "tokens": part.count,
        "position": part.begin,
        "text": samples.tokenizer.decode(ids) + ("" if shown == part.count else "…"),
    }


def _lines(document: dict[str, Any]) -> Iterator[str]:
    source = "no source recorded"
    if document["source"] is not None:
        source = f"{document['source']}:{document['line']}"
    begin, count = document["offset"], document["tokens"]
    yield (
        f"  {document['set']}, document {document['document']:,} ({source}), "
        f"tokens {begin:,} to {begin + count - 1:,}"
    )
    yield "    " + document["text"].replace("\n", "\n    ")


# ------------------------------------------------------------------ find


@dataclass(frozen=True)
class _Set:
    """A token set that is searched."""

    path: str
    reader: TokenReader
    tokenizer: Tokenizer


def find_text(
    phrase: Annotated[str, typer.Argument(help="The text to look for, exactly as it stands.")],
    where: Annotated[
        Path, typer.Argument(metavar="WHERE", help="A token set, or the folder of a run.")
    ],
    limit: Annotated[int, typer.Option(min=1, help="Places that are shown.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Find a phrase in token files, with the lines of their sources that it stands in.

    Given a run, its training sets are searched, and shown is which steps so far have trained on
    each place.
    """
    samples = _samples(where)
    sets = _sets(where) if samples is None else _sets_of(samples)
    occurrences, total = _search(sets, phrase, limit=limit)
    steps = {} if samples is None else _steps(samples, occurrences)
    origins = _Origins()
    rows = list[dict[str, Any]]()
    for place, (number, occurrence) in enumerate(occurrences):
        chosen = sets[number]
        origin = origins.of(chosen.path, occurrence.document)
        rows.append(
            {
                "set": chosen.path,
                "document": occurrence.document,
                "source": None if origin is None else origin.source,
                "line": None if origin is None else origin.line,
                "position": occurrence.begin,
                "text": excerpt(chosen.reader, chosen.tokenizer, occurrence.begin, occurrence.end),
                **({} if samples is None else {"steps": steps.get(place, [])}),
            }
        )
    if as_json:
        value = {"phrase": phrase, "found": total, "places": rows}
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
        return
    for row in rows:
        source = "" if row["source"] is None else f" ({row['source']}:{row['line']})"
        typer.echo(f"{row['set']}, document {row['document']:,}{source}")
        typer.echo("    " + " ".join(row["text"].split()))
        if samples is not None:
            typer.echo(f"    {_steps_in_words(row['steps'])}")
    places = "place" if total == 1 else "places"
    typer.echo(f"{total:,} {places}" + (f", of which {limit} are shown" if total > limit else ""))


def _samples(where: Path) -> RunSamples | None:
    if not RunFolder(where).holds_run():
        return None
    from gristmill.train.lookup import open_samples

    return open_samples(where)


def _sets(where: Path) -> list[_Set]:
    reader, folder = open_tokens(where), Path(f"{where}.tokenizer")
    if not folder.is_dir():
        raise UserError(
            "the tokenizer of this set is not beside it, so its text is not known",
            where=folder,
            remedy="put its tokenizer there: gristmill tokens convert --tokenizer does",
            exit=Exit.DATA,
        )
    return [_Set(str(where), reader, open_tokenizer(folder))]


def _sets_of(samples: RunSamples) -> list[_Set]:
    return [_Set(tokens.path, tokens.reader, samples.tokenizer) for tokens in samples.stream.sets]


def _search(
    sets: list[_Set], phrase: str, *, limit: int
) -> tuple[list[tuple[int, Occurrence]], int]:
    """The first places with the number of their set, and how many there are."""
    occurrences, total = list[tuple[int, Occurrence]](), 0
    with ProgressLine("searching") as line:
        for number, chosen in enumerate(sets):

            def show(done: int, all_tokens: int, name: str = chosen.path) -> None:
                line.update(done, all_tokens, f"{format_count(done)} tokens of {name}")

            for occurrence in find_phrase(chosen.reader, chosen.tokenizer, phrase, progress=show):
                total += 1
                if len(occurrences) < limit:
                    occurrences.append((number, occurrence))
    return occurrences, total


def _steps(samples: RunSamples, occurrences: list[tuple[int, Occurrence]]) -> dict[int, list[int]]:
    """The steps that trained on each place."""
    from gristmill.data.provenance import TokenPlace

    places = [
        TokenPlace(number, occurrence.begin, occurrence.end) for number, occurrence in occurrences
    ]
    steps = defaultdict[int, list[int]](list)
    if places:
        with ProgressLine("walking through samples") as line:

            def show(done: int, total: int) -> None:
                line.update(done, total, f"{format_count(done)} samples")

            for place, step in samples.with_places(places, progress=show):
                if step not in steps[place]:
                    steps[place].append(step)
    return steps


def _steps_in_words(steps: list[int]) -> str:
    if not steps:
        return "no step has trained on it so far"
    shown = ", ".join(f"{step:,}" for step in steps[:_MOST_STEPS])
    more = f" and {len(steps) - _MOST_STEPS:,} more" if len(steps) > _MOST_STEPS else ""
    return f"trained on in {'step' if len(steps) == 1 else 'steps'} {shown}{more}"
