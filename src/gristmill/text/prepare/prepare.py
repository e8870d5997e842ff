"""From raw text to token sets: cut, encode, write, and account for every line.

    sources -> spans -> blocks -> workers: rows -> filters -> ids -> in order: writers and ledgers
    `--- WorkPlan.blocks ----'                                       `------ WorkPlan.write -----'

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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import UserError
from gristmill.base.locks import OutputLock
from gristmill.base.process import usable_cores
from gristmill.text.filters.build import save_filters
from gristmill.text.prepare.deduplicate import (
    find_drops,
    remove_files,
    save_signatures,
)
from gristmill.text.prepare.journal import (
    Cursor,
    DamagedSourceError,
    Journal,
    JournalGeneration,
    KeptSpan,
    SpanId,
    kept_spans,
)
from gristmill.text.prepare.ledger import HopelessError
from gristmill.text.prepare.outputs import Outputs, PreparedKey
from gristmill.text.prepare.part_status import prepared_keys, read_record, write_record
from gristmill.text.prepare.request import (
    FIRST_SAVE,
    WHOLE,
    PrepareRequest,
)
from gristmill.text.prepare.signing import DedupProgress
from gristmill.text.prepare.work_plan import PrepareProgress, WorkListener, WorkPlan
from gristmill.text.prepare.workers import (
    BlockBatch,
    BlockInSource,
    EncodedBlock,
    EncodeSettings,
    Workers,
    batched,
    encode_batch,
    encode_rows,
    filters_of,
)
from gristmill.text.sources.datasets import DatasetSource
from gristmill.text.sources.reading import find_sources, is_plain_text
from gristmill.text.sources.source import (
    Document,
    Item,
    OnDamage,
    Source,
    TextRows,
)
from gristmill.text.tokenizers.encoders import choose_encoder, save_encoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import NewSet, dtype_for
from gristmill.tokens.writer import refuse_existing

_BYTES_PER_WORKER = 16 << 20
_BATCH = 1024


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


def prepare(
    request: PrepareRequest,
    *,
    progress: Callable[[PrepareProgress], None] = lambda state: None,
    deduplicating: Callable[[DedupProgress], None] = lambda state: None,
    note: Callable[[str], None] = lambda message: None,
) -> PrepareResult:
    """Turn sources into token sets; `note` receives messages for the user."""
    sources, skipped = find_sources(request.sources, request.read_options, note=note)
    _check_fields(sources, request)
    for source in sources:
        if isinstance(source, DatasetSource):
            note(f"{source.name}: reading the column {source.column!r}")
    plan = WorkPlan(sources, request)
    with ExitStack() as stack:
        # Before the journal is read: what it describes may be about to get its final name.
        stack.enter_context(OutputLock(request.name, purpose="prepare"))
        count = request.workers or _worker_count(plan.bytes_total)
        workers = Workers(count) if count > 1 else None
        if workers:
            stack.callback(workers.close)
        tokenizer = request.tokenizer() if callable(request.tokenizer) else request.tokenizer
        asked = request.as_json(tokenizer)
        journal = None
        if all(source.repeatable for source in sources):
            journal = Journal(request.name, asked)
            stack.callback(journal.release)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if request.filters:
            save_filters(request.filters, folder)
            # Before any worker meets the same mistake, such as a function that is not there.
            filters_of(folder)
        drops = None
        if request.dedup:
            if journal and not request.overwrite:
                known = journal.load()
                if known is None and request.part == WHOLE:
                    refuse_existing_sets(request, tokenizer)
            drops = find_drops(
                request, plan, asked, workers, filters=folder, listener=deduplicating, note=note
            )
            if drops is None:
                return PrepareResult((), 0, 0, time.perf_counter() - plan.began, "")
            plan.drop(drops)
        record = None if request.part == WHOLE else read_record(request.name)
        mine = record and not request.overwrite and record.same_request(request, asked)
        if journal and record and mine:
            if journal.load() is None and record.holds(request, plan.ids):
                note(f"part {request.part} is already done")
                seconds = time.perf_counter() - plan.began
                return PrepareResult(
                    prepared_keys(request), record.counts.text_bytes, 0, seconds, ""
                )
            # The same command made it from other text.
            request = replace(request, overwrite=True)
        outputs, cursor = _Opening(request, tokenizer, journal, plan, note).open()
        before = outputs.text_bytes
        try:
            encoded = _encode(plan.blocks(cursor), request, tokenizer, workers, folder)
            listener = WorkListener()
            if journal:
                rewinding = functools.partial(_save_rewound, journal, plan, outputs)
                listener = WorkListener(journal.add, rewinding)
            due = time.monotonic() + min(FIRST_SAVE, request.save_every)
            for state, following in plan.write(encoded, outputs, cursor, listener):
                progress(state)
                if journal and time.monotonic() >= due:
                    journal.save(following, plan.current(following), outputs.save())
                    due = time.monotonic() + request.save_every
            if journal:
                # For a process that is killed while the files are renamed.
                journal.save(Cursor(len(plan.spans)), None, outputs.save())
            keys = outputs.finish(skipped)
            save_signatures(request, plan, drops)
        except BaseException as error:
            if journal and plan.closed and isinstance(error, DamagedSourceError):
                # The work before the damaged source is kept, however soon this was.
                _save_rewound(journal, plan, outputs)
            if journal and journal.path.exists() and not isinstance(error, HopelessError):
                outputs.release()
            else:
                outputs.abandon()
                if journal:
                    journal.remove()
            raise
        if journal:
            if request.part != WHOLE:
                write_record(request.name, asked, plan.ids, keys)
            journal.remove()
        if drops and request.part == WHOLE:
            remove_files(request, 1)
        outputs.abandon()
    done, seconds = outputs.text_bytes, time.perf_counter() - plan.began
    return PrepareResult(keys, done, done - before - outputs.copied, seconds, outputs.encoder)


def _encode(
    blocks: Iterable[BlockInSource],
    request: PrepareRequest,
    tokenizer: Tokenizer,
    workers: Workers | None,
    folder: Path,
) -> Iterator[tuple[BlockBatch, list[EncodedBlock]]]:
    """Encode blocks in their order, by workers, which use the folder, or by this process."""
    settings = _encode_settings(request, tokenizer, folder)
    batches = batched(blocks, block_bytes=request.options.block_bytes)
    if workers:
        save_encoder(tokenizer, folder)
        return workers.encode(batches, settings)
    encoder = choose_encoder(tokenizer)
    return ((batch, encode_batch(batch, settings, encoder)) for batch in batches)


def refuse_existing_sets(request: PrepareRequest, tokenizer: Tokenizer) -> None:
    """Hours of work should not end with a refusal to replace something."""
    for key in request.options.keys:
        for split in request.splits:
            prefix, spec = request.prefix(key, split), tokenizer.spec
            new = NewSet(prefix, tokenizer.size, tokenizer.end_of_text, spec, request.format)
            refuse_existing(replace(new, overwrite=request.overwrite))


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
        keys = outputs.finish()
    except BaseException:
        outputs.abandon()
        raise
    done, seconds = outputs.text_bytes, time.perf_counter() - began
    return PrepareResult(keys, done, done, seconds, outputs.encoder)


def _save_rewound(journal: Journal, plan: WorkPlan, outputs: Outputs) -> None:
    """Save the work on all spans that are done."""
    cursor = Cursor(plan.closed)
    journal.save(cursor, plan.current(cursor), outputs.save(rewound=True))


def _encode_settings(request: PrepareRequest, tokenizer: Tokenizer, folder: Path) -> EncodeSettings:
    end = tokenizer.end_of_text if request.append_end_of_text else None
    return EncodeSettings(request.read_options, folder, end, dtype_for(tokenizer.size))


def _check_fields(sources: Sequence[Source], request: PrepareRequest) -> None:
    """Refuse sources whose rows have no fields, if a filter asks for some."""
    if not request.filters.fields:
        return
    for source in sources:
        if is_plain_text(source):
            what = (
                f"a filter asks for {request.filters.fields[0]!r}, which plain text does not have"
            )
            remedy = "give JSON lines, Parquet or another kind of table, or leave the filter out"
            raise UserError(what, where=source.name, remedy=remedy)


def _worker_count(total: int | None) -> int:
    """One process for each core, but no more than the bytes to read are worth."""
    cores = usable_cores()
    return min(cores, 1 + total // _BYTES_PER_WORKER) if total is not None else cores


@dataclass(frozen=True)
class _Opening:
    """Opens the outputs of a preparation, anew or where an earlier process stopped."""

    request: PrepareRequest
    tokenizer: Tokenizer
    journal: Journal | None
    plan: WorkPlan
    note: Callable[[str], None]

    def open(self) -> tuple[Outputs, Cursor]:
        """The outputs and where to begin, from the journal if there is one for the same request."""
        journal = self.journal
        if journal is None:
            return Outputs(self.request, self.tokenizer, sources=self.plan.names), Cursor()
        try:
            saved = journal.load()
            if saved:
                return self._resume(journal, *saved)
        except UserError:
            if not self.request.overwrite:
                raise
        journal.remove()
        outputs = self._generation(0, ())
        # Not before the outputs, which refuse to replace others.
        journal.begin()
        return outputs, Cursor()

    def _resume(
        self, journal: Journal, last: JournalGeneration, earlier: Sequence[JournalGeneration]
    ) -> tuple[Outputs, Cursor]:
        """Continue the generation that was saved, or begin another if sources have changed."""
        plan, stop = self.plan, self.request.on_damage is OnDamage.STOP
        done = journal.records(last)
        here = last.current if last.cursor.position is not None else None
        ids = [*(record.id for record in done), *([here] if here else ())]
        again = stop and any(record.damaged for record in done)
        if plan.ids[: len(ids)] == ids and not again:
            plan.keep(self._kept_of(journal, earlier, plan.ids[last.cursor.span :])[0])
            journal.resume(last, earlier)
            outputs = self._generation(last.number, last.columns)
            if ids:
                self.note(
                    f"resuming an interrupted preparation: {outputs.kept:,} documents were done"
                )
            return outputs, last.cursor
        names, known = {id.name for id in plan.ids}, {id.name for id in ids}
        if not names & known:
            raise journal.refused("it differs in: sources")
        kept, used = self._kept_of(journal, (last, *earlier), plan.ids)
        plan.keep(kept)
        changed = (known & names) - {id.name for id in kept}
        words = f"{len(kept):,} files are as before"
        words += f", {len(changed):,} changed and will be done again" if changed else ""
        words += f", {len(known - names):,} are gone" if known - names else ""
        self.note(f"resuming an interrupted preparation: {words}")
        number = last.number + 1
        journal.begin(number, used)
        return self._generation(number, ()), Cursor()

    def _generation(self, number: int, states: Sequence[Mapping[str, Any]]) -> Outputs:
        names = self.plan.names
        return Outputs(self.request, self.tokenizer, states, generation=number, sources=names)

    def _kept_of(
        self, journal: Journal, generations: Sequence[JournalGeneration], wanted: Sequence[SpanId]
    ) -> tuple[dict[SpanId, KeptSpan], list[JournalGeneration]]:
        """What earlier generations, the newest first, hold of some spans, and which of them do."""
        kept: dict[SpanId, KeptSpan] = {}
        used = []
        skip = self.request.on_damage is OnDamage.SKIP
        for generation in generations:
            records = journal.records(generation)
            unfinished = generation.unfinished
            records += [unfinished] if unfinished else []
            usable = {record.id for record in records if skip or not record.damaged}
            new = (usable & set(wanted)) - set(kept)
            if not new:
                continue
            # Opening compares the checksums.
            outputs = self._generation(generation.number, generation.columns)
            readers = outputs.readers()
            outputs.release()
            spans = kept_spans(records, readers, cursor=generation.cursor if unfinished else None)
            kept |= {id: spans[id] for id in new}
            used.append(generation)
        return kept, used
