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
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.base.errors import UserError
from gristmill.base.locks import OutputLock
from gristmill.base.process import usable_cores
from gristmill.text.prepare.journal import Generation, Journal
from gristmill.text.prepare.ledger import HopelessError
from gristmill.text.prepare.outputs import Outputs, PreparedKey
from gristmill.text.prepare.part_record import prepared_keys, read_record, write_record
from gristmill.text.prepare.parts import WHOLE
from gristmill.text.prepare.records import Cursor, KeptSpan, SpanId, kept_spans
from gristmill.text.prepare.request import FIRST_SAVE, PrepareRequest
from gristmill.text.prepare.work_plan import (
    DamagedSourceError,
    PrepareProgress,
    WorkListener,
    WorkPlan,
)
from gristmill.text.prepare.workers import (
    EncodeSettings,
    Workers,
    batched,
    encode_batch,
    encode_rows,
)
from gristmill.text.sources.blocks import TextRows
from gristmill.text.sources.datasets import DatasetSource
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import Document, Item, OnDamage
from gristmill.text.tokenizers.encoders import choose_encoder, save_encoder
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.format import dtype_for

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
    note: Callable[[str], None] = lambda message: None,
) -> PrepareResult:
    """Turn sources into token sets; `note` receives messages for the user."""
    sources, skipped = find_sources(request.sources, request.options, note=note)
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
        outputs, cursor = _open_outputs(request, tokenizer, journal, plan, note=note)
        before = outputs.text_bytes
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
            made = outputs.finish(skipped)
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
                write_record(request.name, asked, plan.ids, made)
            journal.remove()
        outputs.abandon()
    done, seconds = outputs.text_bytes, time.perf_counter() - plan.began
    return PrepareResult(made, done, done - before - outputs.copied, seconds, outputs.encoder)


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


def _save_rewound(journal: Journal, plan: WorkPlan, outputs: Outputs) -> None:
    """Save the work on all spans that are done."""
    cursor = Cursor(plan.closed)
    journal.save(cursor, plan.current(cursor), outputs.save(rewound=True))


def _encode_settings(request: PrepareRequest, tokenizer: Tokenizer, folder: Path) -> EncodeSettings:
    end = tokenizer.end_of_text if request.append_end_of_text else None
    return EncodeSettings(request.options, folder, end, dtype_for(tokenizer.size))


def _worker_count(total: int | None) -> int:
    """One process for each core, but no more than the bytes to read are worth."""
    cores = usable_cores()
    return min(cores, 1 + total // _BYTES_PER_WORKER) if total is not None else cores


def _open_outputs(
    request: PrepareRequest,
    tokenizer: Tokenizer,
    journal: Journal | None,
    plan: WorkPlan,
    *,
    note: Callable[[str], None],
) -> tuple[Outputs, Cursor]:
    """The outputs and where to begin, from the journal if there is one for the same request."""
    try:
        saved = journal.load() if journal else None
        if journal and saved:
            return _resume(request, tokenizer, journal, plan, saved, note=note)
    except UserError:
        if not request.overwrite:
            raise
    if journal:
        journal.remove()
    outputs = Outputs(request, tokenizer, () if journal else None)
    if journal:
        # Not before the outputs, which refuse to replace others.
        journal.begin()
    return outputs, Cursor()


def _resume(
    request: PrepareRequest,
    tokenizer: Tokenizer,
    journal: Journal,
    plan: WorkPlan,
    saved: tuple[Generation, Sequence[Generation]],
    *,
    note: Callable[[str], None],
) -> tuple[Outputs, Cursor]:
    """Continue the generation that was saved, or begin another if sources have changed."""
    last, earlier = saved
    done = journal.records(last)
    here = last.current if last.cursor.position is not None else None
    ids = [*(record.id for record in done), *([here] if here else ())]
    again = request.on_damage is OnDamage.STOP and any(record.damaged for record in done)
    if plan.ids[: len(ids)] == ids and not again:
        following = plan.ids[last.cursor.span :]
        plan.keep(_kept_of(request, tokenizer, journal, earlier, following)[0])
        journal.resume(last, earlier)
        outputs = Outputs(request, tokenizer, last.columns, generation=last.number)
        if ids:
            note(f"resuming an interrupted preparation: {outputs.kept:,} documents were done")
        return outputs, last.cursor
    names, known = {one.name for one in plan.ids}, {one.name for one in ids}
    if not names & known:
        raise journal.refused("it differs in: sources")
    kept, used = _kept_of(request, tokenizer, journal, (last, *earlier), plan.ids)
    plan.keep(kept)
    changed = (known & names) - {one.name for one in kept}
    words = f"{len(kept):,} files are as before"
    words += f", {len(changed):,} changed and will be done again" if changed else ""
    words += f", {len(known - names):,} are gone" if known - names else ""
    note(f"resuming an interrupted preparation: {words}")
    number = last.number + 1
    journal.begin(number, used)
    return Outputs(request, tokenizer, (), generation=number), Cursor()


def _kept_of(
    request: PrepareRequest,
    tokenizer: Tokenizer,
    journal: Journal,
    generations: Sequence[Generation],
    wanted: Sequence[SpanId],
) -> tuple[dict[SpanId, KeptSpan], list[Generation]]:
    """What earlier generations, the newest first, hold of some spans, and which of them do."""
    kept: dict[SpanId, KeptSpan] = {}
    used = []
    skip = request.on_damage is OnDamage.SKIP
    for generation in generations:
        records = journal.records(generation)
        unfinished = generation.unfinished
        records += [unfinished] if unfinished else []
        usable = {record.id for record in records if skip or not record.damaged}
        found = (usable & set(wanted)) - set(kept)
        if not found:
            continue
        # Opening compares the checksums.
        outputs = Outputs(request, tokenizer, generation.columns, generation=generation.number)
        readers = outputs.readers()
        outputs.release()
        spans = kept_spans(records, readers, cursor=generation.cursor if unfinished else None)
        kept |= {one: spans[one] for one in found}
        used.append(generation)
    return kept, used
