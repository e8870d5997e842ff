"""From raw text to token sets: cut, encode, write, and account for every line.

    sources -> spans -> blocks -> workers: rows -> ids -> in order: token writers and ledgers

    PREFIX.bin PREFIX.starts PREFIX.json   the token set, here in the format `flat`
    PREFIX.tokenizer/                      the tokenizer that made it
    PREFIX.ledger.json                     what became of every line

Lines read = documents kept + lines dropped by reason; this is checked before anything is put in
place. A line is whatever a source offers as one document: a line, a paragraph, a row or a file.
Memory is bounded by the blocks under way and the longest document. A killed preparation resumes
when the same is requested again (see `Journal`), and gives the same files byte for byte. A pipe
cannot be read twice, so such a preparation starts over.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import OutputLock, read_json, write_json
from gristmill.text.prepare.ledger import HopelessError
from gristmill.text.prepare.outputs import Outputs, PreparedKey
from gristmill.text.prepare.parts import spans_of
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.prepare.workers import (
    BlockBatch,
    BlockInSource,
    EncodedBlock,
    EncodeSettings,
    Workers,
    batched,
    encode_batch,
    encode_rows,
)
from gristmill.text.sources.blocks import TextRows, lines_before
from gristmill.text.sources.reading import cut_source, failed, find_sources
from gristmill.text.sources.source import Document, Item, Source
from gristmill.text.tokenizers.encoders import choose_encoder, save_encoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import dtype_for

_BYTES_PER_WORKER = 16 << 20
_BATCH = 1024
_JOURNAL_VERSION = 1


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is."""

    documents: int
    tokens: int
    bytes_done: int
    bytes_total: int | None
    """Known if all sources are files; then both are bytes on disk, else bytes of text."""
    seconds: float


@dataclass(frozen=True)
class PrepareResult:
    """What a preparation made."""

    keys: tuple[PreparedKey, ...]
    text_bytes: int
    new_text_bytes: int
    """Without those that an interrupted process had done before."""
    seconds: float
    encoder: str
    """The library that encoded the text; "" if nothing was left to do."""


@dataclass(frozen=True)
class Cursor:
    """What comes next."""

    span: int = 0
    """The number of the span, in the order of the work."""
    position: int | None = None
    """Where in its source; None for the beginning of the span."""
    line: int = 0
    """The number of the next line."""


class Journal:
    """The journal of one preparation, .NAME.prepare.json.

    Every few seconds the hidden files of the unfinished sets are flushed, then the journal records
    their lengths and which line of which source comes next. The same command, given again,
    truncates the files to that and continues. A different command is refused, since it would
    destroy hours of work. The journal is removed once the sets are in place.
    """

    def __init__(self, name: Path, request: Mapping[str, Any]) -> None:
        self.path = name.with_name(f".{name.name}.prepare.json")
        self._name = name
        self._request = dict(request)

    def load(self) -> tuple[Cursor, Sequence[Mapping[str, Any]]] | None:
        """What an earlier process saved, if it had the same request."""
        if not self.path.exists():
            return None
        why = "its journal cannot be read"
        try:
            found = read_json(self.path)
            state = Cursor(**found["cursor"]), found["columns"]
            request = found["request"]
            if found["version"] == _JOURNAL_VERSION:
                differing = [key for key in self._request if request.get(key) != self._request[key]]
                if not differing:
                    return state
                why = f"it differs in: {', '.join(differing)}"
        except (UserError, KeyError, TypeError):
            pass
        raise UserError(
            f"a different preparation of this set was interrupted: {why}",
            where=str(self._name),
            remedy="give the same command to resume it, use another name, or start over with "
            "--overwrite",
            exit=Exit.REFUSED,
        )

    def save(self, cursor: Cursor, columns: Sequence[Mapping[str, Any]]) -> None:
        value = {
            "version": _JOURNAL_VERSION,
            "request": self._request,
            "cursor": asdict(cursor),
            "columns": list(columns),
        }
        write_json(self.path, value)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def prepare(
    request: PrepareRequest,
    *,
    progress: Callable[[PrepareProgress], None] = lambda state: None,
    note: Callable[[str], None] = lambda message: None,
) -> PrepareResult:
    """Turn sources into token sets; `note` receives messages for the user."""
    sources = find_sources(request.sources, request.options)
    plan = _WorkPlan(sources, request)
    with ExitStack() as stack:
        # Before the journal is read: what it describes may be about to get its final name.
        stack.enter_context(OutputLock(request.name, purpose="prepare"))
        count = request.workers or _worker_count(plan.bytes_total)
        workers = Workers(count) if count > 1 else None
        if workers:
            stack.callback(workers.close)
        tokenizer = request.tokenizer() if callable(request.tokenizer) else request.tokenizer
        journal = None
        if all(source.repeatable for source in sources):
            journal = Journal(request.name, request.as_json(sources, tokenizer))
        outputs, cursor = _open_outputs(request, tokenizer, journal)
        before = outputs.text_bytes
        if cursor != Cursor():
            note(f"resuming an interrupted preparation: {outputs.kept:,} documents were done")
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            settings = _encode_settings(request, tokenizer, folder)
            batches = batched(plan.blocks(cursor), block_bytes=request.options.block_bytes)
            if workers:
                save_encoder(tokenizer, folder)
                encoded = workers.encode(batches, settings)
            else:
                encoder = choose_encoder(tokenizer)
                encoded = ((batch, encode_batch(batch, settings, encoder)) for batch in batches)
            saved = time.monotonic()
            for state, following in plan.write(encoded, outputs, cursor):
                progress(state)
                if journal and time.monotonic() - saved >= request.save_every:
                    journal.save(following, outputs.save())
                    saved = time.monotonic()
            if journal:
                # For a process that is killed while the files are renamed.
                journal.save(Cursor(len(plan.spans)), outputs.save())
            made = outputs.finish()
        except BaseException as error:
            if journal and journal.path.exists() and not isinstance(error, HopelessError):
                outputs.release()
            else:
                outputs.abandon()
                if journal:
                    journal.remove()
            raise
        if journal:
            journal.remove()
        outputs.abandon()
    done, seconds = outputs.text_bytes, time.perf_counter() - plan.began
    return PrepareResult(made, done, done - before, seconds, outputs.encoder)


def prepare_documents(
    items: Iterable[Item], *, tokenizer: Tokenizer, output: Path, overwrite: bool = False
) -> PrepareResult:
    """Turn documents that are at hand into the token set `output`."""
    began = time.perf_counter()
    request = PrepareRequest((), output, tokenizer, overwrite=overwrite)
    encoder = choose_encoder(tokenizer)
    settings = _encode_settings(request, tokenizer, Path())
    outputs = Outputs(request, tokenizer)
    remaining = iter(items)
    try:
        while batch := list(itertools.islice(remaining, _BATCH)):
            values = [item.text if isinstance(item, Document) else item.reason for item in batch]
            rows = TextRows([values], range(len(batch)), len(batch))
            origins = [item.origin for item in batch]
            block = encode_rows(rows, settings, encoder)
            outputs.append(block, source=0, line=0, origin=origins.__getitem__)
        made = outputs.finish()
    except BaseException:
        outputs.abandon()
        raise
    done, seconds = outputs.text_bytes, time.perf_counter() - began
    return PrepareResult(made, done, done, seconds, outputs.encoder)


def _encode_settings(request: PrepareRequest, tokenizer: Tokenizer, folder: Path) -> EncodeSettings:
    end = tokenizer.end_of_text if request.append_end_of_text else None
    return EncodeSettings(request.options, folder, end, dtype_for(tokenizer.size))


def _worker_count(total: int | None) -> int:
    """One process for each core, but no more than the bytes to read are worth."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(cores or 1, 1 + total // _BYTES_PER_WORKER) if total is not None else cores or 1


def _open_outputs(
    request: PrepareRequest, tokenizer: Tokenizer, journal: Journal | None
) -> tuple[Outputs, Cursor]:
    """The outputs and where to begin, from the journal if there is one for the same request."""
    try:
        saved = journal.load() if journal else None
        if saved:
            cursor, states = saved
            return Outputs(request, tokenizer, states), cursor
    except UserError:
        if not request.overwrite:
            raise
    if journal:
        journal.remove()
    return Outputs(request, tokenizer, () if journal else None), Cursor()


def _origin(name: str, line: int, place: int) -> str:
    return f"{name}:{line + place}"


class _WorkPlan:
    """The spans of all sources that belong to a preparation, in order."""

    def __init__(self, sources: Sequence[Source], request: PrepareRequest) -> None:
        self.began = time.perf_counter()
        self.spans = spans_of(sources, request.options, request.part)
        self._sources = sources
        self._options = request.options
        self._span_of = {span.source: number for number, span in enumerate(self.spans)}
        self._ends = list(itertools.accumulate(span.disk for span in self.spans))
        sized = all(source.size is not None for source in sources)
        self.bytes_total = self._ends[-1] if sized and self._ends else None

    def blocks(self, cursor: Cursor) -> Iterator[BlockInSource]:
        """The blocks from a cursor on."""
        for span in self.spans[cursor.span :]:
            begin = span.begin if cursor.position is None else cursor.position
            cursor = Cursor()
            source = self._sources[span.source]
            for block in cut_source(source, self._options, begin):
                if span.end is not None and block.begin >= span.end:
                    break
                if span.end is not None and block.end > span.end:
                    block = replace(block, end=span.end, disk=span.end)
                yield BlockInSource(span.source, source, block)

    def write(
        self,
        encoded: Iterable[tuple[BlockBatch, list[EncodedBlock]]],
        outputs: Outputs,
        cursor: Cursor,
    ) -> Iterator[tuple[PrepareProgress, Cursor]]:
        """Write encoded blocks; after each batch, the progress and what comes next."""
        for batch, blocks in encoded:
            for (number, source, text), block in zip(batch, blocks, strict=True):
                span, line = self._span_of[number], cursor.line
                if span != cursor.span or cursor.position is None:
                    line = 1 + lines_before(source, self.spans[span].begin)
                origin = functools.partial(_origin, source.name, line)
                outputs.append(block, source=number, line=line, origin=origin)
                line += block.lines
                if block.failure:
                    raise failed(block.failure, source=source, line=line)
                cursor = Cursor(span, text.end, line)
            done = outputs.text_bytes
            if self.bytes_total is not None:
                last = self.spans[cursor.span]
                done = self._ends[cursor.span] - last.disk + batch[-1].block.disk - last.begin
            seconds = time.perf_counter() - self.began
            yield (
                PrepareProgress(outputs.kept, outputs.tokens, done, self.bytes_total, seconds),
                cursor,
            )
