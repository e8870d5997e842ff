"""From raw text to token sets: cut, grind, write, and account for every line.

    sources -> spans -> blocks -> workers: rows -> ids -> in order: token writers and ledgers

    PREFIX.bin PREFIX.starts PREFIX.json   the token set, here of the format `flat`
    PREFIX.tokenizer/                      the tokenizer that made it
    PREFIX.ledger.json                     what became of every line

Lines read = documents kept + lines dropped by reason; this is checked before anything is put in
place. A line is whatever a source offers as one document: a line, a block, a row or a whole file.
The end-of-text token stands after each document. Memory is bounded by the blocks under way and the
longest document. A preparation that was killed goes on where it was when the same is asked for
again (see `journal`), and its files are the same byte for byte. Only text from a pipe cannot be
read twice, so such a preparation begins anew.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gristmill.base.errors import UserError
from gristmill.text.prepare.grind import Grinder, Ground, Recipe
from gristmill.text.prepare.holdout import Holdout
from gristmill.text.prepare.journal import Cursor, Journal, State, request_of
from gristmill.text.prepare.ledger import HopelessError
from gristmill.text.prepare.outputs import Layout, Outputs, PreparedKey
from gristmill.text.prepare.parts import WHOLE, PartNumber, Span, blocks_of, first_line, spans_of
from gristmill.text.prepare.workers import Task, Work, Workers, gathered, grind_here
from gristmill.text.sources.blocks import Rows, Value
from gristmill.text.sources.finding import find_sources
from gristmill.text.sources.reading import failed, kind_of
from gristmill.text.sources.source import (
    Document,
    DocumentSplit,
    Item,
    ReadOptions,
    Source,
)
from gristmill.text.tokenizers.encoders import choose_encoder, save_encoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.flat import FORMAT
from gristmill.tokens.format import dtype_for

SAVE_EVERY = 5.0
"""Seconds of work that a kill may cost."""
_WORTH_A_WORKER = 16 << 20
_BATCH = 1024


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation has come."""

    documents: int
    bytes_done: int
    bytes_total: int | None
    """Known when all sources are files; then both are bytes on the disk, else bytes of text."""
    bytes_before: int
    """What an earlier process had done of `bytes_done`,"""
    documents_before: int
    """and of `documents`."""
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PrepareResult:
    """What a preparation made."""

    keys: tuple[PreparedKey, ...]
    text_bytes: int
    ground_bytes: int
    """How much of the text this process worked on, if it went on with the work of another."""
    seconds: float
    encoder: str
    """The library that encoded the text; "" if nothing was left to do."""


def prepare(
    sources: Sequence[str],
    *,
    tokenizer: Tokenizer | Callable[[], Tokenizer],
    output: Path,
    keys: Sequence[str] = ("text",),
    split: DocumentSplit = DocumentSplit.FILE,
    separator: str | None = None,
    append_end_of_text: bool = True,
    strict: bool = False,
    format: str = FORMAT,
    shard_size: int | None = None,
    holdout: Holdout | None = None,
    part: PartNumber = WHOLE,
    workers: int | None = None,
    overwrite: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Callable[[PrepareProgress], None] | None = None,
    note: Callable[[str], None] = lambda words: None,
    options: ReadOptions | None = None,
) -> PrepareResult:
    """Turn files, globs, folders or standard input ("-") into token sets named for `output`.

    `tokenizer` may be what opens it: then the worker processes start meanwhile. Each of `keys`
    gives a set of its own. `strict` stops at the first line that would be dropped. `workers` are
    processes, one for each core if not given. `note` hears what a person should know.
    """
    options = options or ReadOptions(tuple(keys), split, separator)
    found = find_sources(sources, options)
    layout = Layout(output, format, shard_size, options.keys, holdout, part)
    with _Job(found, options, spans_of(found, options, part), workers) as job:
        opened = tokenizer() if callable(tokenizer) else tokenizer
        settings = {
            "tokenizer": opened.fingerprint,
            "keys": list(options.keys),
            "documents": options.separator or options.split.value,
            "append_eod": append_end_of_text,
            "format": format,
            "shard_size": shard_size,
            "split": [*holdout.shares, holdout.seed, holdout.rows] if holdout else None,
            "part": str(part),
        }
        journal = Journal(layout.whole, request_of(found, settings)) if job.lasting else None
        outputs, cursor = _open(layout, opened, journal, overwrite=overwrite, strict=strict)
        before = outputs.text_bytes
        if cursor != Cursor():
            note(f"going on with an interrupted preparation: {outputs.kept:,} documents were done")
        try:
            job.begin(opened, cursor, append_end_of_text=append_end_of_text)
            job.run(outputs, cursor, journal, save_every=save_every, progress=progress)
            made = outputs.finish()
        except BaseException as error:
            _end(outputs, journal, error)
            raise
    if journal:
        journal.remove()
        outputs.abandon()
    done = outputs.text_bytes
    return PrepareResult(made, done, done - before, job.seconds, outputs.encoder)


def prepare_documents(
    items: Iterable[Item],
    *,
    tokenizer: Tokenizer,
    output: Path,
    append_end_of_text: bool = True,
    strict: bool = False,
    format: str = FORMAT,
    overwrite: bool = False,
) -> PrepareResult:
    """Turn documents that are at hand into the token set `output`."""
    began = time.perf_counter()
    encoder = choose_encoder(tokenizer)
    end = tokenizer.end_of_text if append_end_of_text else None
    recipe = Recipe(ReadOptions(), Path(), end, dtype_for(tokenizer.size))
    grinder = Grinder(recipe, encoder)
    outputs = Outputs(Layout(output, format), tokenizer, overwrite=overwrite, strict=strict)
    try:
        for batch in _batches(items):
            values: list[Value] = [
                item.text if isinstance(item, Document) else item.reason for item in batch
            ]
            ground = grinder.encode(Rows([values], range(len(batch)), len(batch)))
            origins = [item.origin for item in batch]
            outputs.take(ground, source=0, line=0, origin=origins.__getitem__)
        made = outputs.finish()
    except BaseException:
        outputs.abandon()
        raise
    done, seconds = outputs.text_bytes, time.perf_counter() - began
    return PrepareResult(made, done, done, seconds, outputs.encoder)


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _open(
    layout: Layout, tokenizer: Tokenizer, journal: Journal | None, *, overwrite: bool, strict: bool
) -> tuple[Outputs, Cursor]:
    """The outputs and where to go on, from the journal if there is one for the same request."""
    lasting = journal is not None
    state = journal.load(overwrite=overwrite) if journal else None
    if state is not None:
        try:
            outputs = Outputs(
                layout,
                tokenizer,
                overwrite=overwrite,
                strict=strict,
                lasting=True,
                states=state.columns,
            )
            return outputs, state.cursor
        except UserError:
            if not overwrite:
                raise
    if journal:
        journal.remove()
    new = Outputs(layout, tokenizer, overwrite=overwrite, strict=strict, lasting=lasting)
    return new, Cursor()


def _end(outputs: Outputs, journal: Journal | None, error: BaseException) -> None:
    """Keep what was saved for the next process; where nothing was, or it is no use, remove all."""
    if journal and journal.path.exists() and not isinstance(error, HopelessError):
        outputs.release()
        return
    outputs.abandon()
    if journal:
        journal.remove()


class _Job:
    """Grinds the spans of a preparation in order, here or in worker processes of its own."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: ReadOptions,
        spans: Sequence[Span],
        workers: int | None,
    ) -> None:
        self._sources = sources
        self._options = options
        self._spans = spans
        self._span_of = {span.source: number for number, span in enumerate(spans)}
        self._ends = list(itertools.accumulate(span.disk for span in spans))
        self._began = time.perf_counter()
        self._results: Iterator[tuple[Task, list[Ground]]] = iter(())
        self._closing = ExitStack()
        count = self._count(workers)
        self._workers = Workers(count) if count > 1 else None
        if self._workers:
            self._closing.callback(self._workers.close)

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()

    def begin(self, tokenizer: Tokenizer, cursor: Cursor, *, append_end_of_text: bool) -> None:
        """Begin to grind from the cursor on."""
        folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory()))
        end = tokenizer.end_of_text if append_end_of_text else None
        recipe = Recipe(self._options, folder, end, dtype_for(tokenizer.size))
        tasks = gathered(self._blocks(cursor), block_bytes=self._options.block_bytes)
        if self._workers is None:
            self._results = grind_here(tasks, Grinder(recipe, choose_encoder(tokenizer)))
        else:
            save_encoder(tokenizer, folder)
            self._results = self._workers.grind(tasks, recipe)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def lasting(self) -> bool:
        """Whether the sources can be read again, and so the work be gone on with."""
        return all(source.repeatable for source in self._sources)

    @property
    def bytes_total(self) -> int | None:
        sized = all(source.size is not None for source in self._sources)
        return self._ends[-1] if sized and self._ends else None

    def run(
        self,
        outputs: Outputs,
        cursor: Cursor,
        journal: Journal | None,
        *,
        save_every: float,
        progress: Callable[[PrepareProgress], None] | None,
    ) -> None:
        """Take all that is ground, from the cursor on."""
        total = self.bytes_total
        saved, before = time.monotonic(), self._before(cursor) if total else outputs.text_bytes
        kept = outputs.kept
        for task, grounds in self._results:
            for work, ground in zip(task, grounds, strict=True):
                cursor = self._take(outputs, cursor, work, ground)
            done = self._done(task[-1]) if total is not None else outputs.text_bytes
            if progress:
                progress(self._progress(outputs, done, before=before, kept=kept))
            if journal and time.monotonic() - saved >= save_every:
                journal.save(State(cursor, outputs.save()))
                saved = time.monotonic()
        if journal:
            # The files are about to be renamed; a process killed meanwhile left this.
            journal.save(State(Cursor(len(self._spans)), outputs.save()))

    def _count(self, asked: int | None) -> int:
        if asked is not None:
            return asked
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        total = self.bytes_total
        worth = cores if total is None else 1 + total // _WORTH_A_WORKER
        return max(1, min(cores or 1, worth or 1))

    def _blocks(self, cursor: Cursor) -> Iterator[Work]:
        for number, span in enumerate(self._spans[cursor.span :], start=cursor.span):
            begin = span.begin
            if number == cursor.span and cursor.position is not None:
                begin = cursor.position
            source = self._sources[span.source]
            for block in blocks_of(span, source, self._options, begin):
                yield Work(span.source, source, block)

    def _take(self, outputs: Outputs, cursor: Cursor, work: Work, ground: Ground) -> Cursor:
        number, source, block = work
        span, line = self._span_of[number], cursor.line
        if span != cursor.span or cursor.position is None:
            line = first_line(self._spans[span], source, self._options)
        outputs.take(
            ground, source=number, line=line, origin=lambda place: f"{source.name}:{line + place}"
        )
        if ground.failure:
            raise failed(ground.failure, source=source, line=line + ground.lines)
        return Cursor(span, block.end, line + ground.lines)

    def _done(self, last: Work) -> int:
        number = self._span_of[last.number]
        span = self._spans[number]
        return self._ends[number] - span.disk + last.block.disk - span.begin

    def _before(self, cursor: Cursor) -> int:
        """About how many bytes an earlier process had read."""
        earlier = self._ends[cursor.span - 1] if cursor.span else 0
        if cursor.position is None:
            return earlier
        span = self._spans[cursor.span]
        source = self._sources[span.source]
        by_bytes = source.can_seek and kind_of(source, self._options).lines_before is not None
        return earlier + cursor.position - span.begin if by_bytes else earlier

    def _progress(self, outputs: Outputs, done: int, *, before: int, kept: int) -> PrepareProgress:
        return PrepareProgress(
            documents=outputs.kept,
            bytes_done=done,
            bytes_total=self.bytes_total,
            bytes_before=before,
            documents_before=kept,
            tokens=outputs.tokens,
            seconds=self.seconds,
        )
