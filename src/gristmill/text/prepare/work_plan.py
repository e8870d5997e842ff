"""The spans of all sources that belong to a preparation: read as blocks, written when encoded.

    spans    a.jsonl           b.jsonl           c.gz
             [block][block]..  [block][block]..  [block]..
                   ^ cursor: the span, the position and the line that come next

`WorkPlan.blocks` reads from a cursor on, and `WorkPlan.write` takes the same blocks back in the
same order, encoded. A span that an earlier process finished is not read again: an empty block
stands for it, in whose place `write` copies what is kept.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gristmill.base.errors import DataError
from gristmill.base.files import sha256_text
from gristmill.text.prepare.deduplicate import (
    PartDrops,
)
from gristmill.text.prepare.journal import (
    Cursor,
    DamagedSourceError,
    KeptSpan,
    SpanId,
    SpanRecord,
)
from gristmill.text.prepare.outputs import Outputs
from gristmill.text.prepare.request import (
    PrepareRequest,
    SourceSpan,
    spans_of,
)
from gristmill.text.prepare.workers import (
    BlockBatch,
    BlockInSource,
    EncodedBlock,
)
from gristmill.text.sources.reading import cut_source
from gristmill.text.sources.source import (
    OnDamage,
    Skipped,
    SkipReason,
    Source,
    TextBlock,
    TextRows,
    lines_before,
)


@dataclass(frozen=True)
class WorkListener:
    """What is called as the work goes on."""

    done: Callable[[SpanRecord], None] = lambda record: None
    """A span is done."""
    rewinding: Callable[[], None] = lambda: None
    """The outputs are about to be rewound to the beginning of a span: what was saved since will be
    gone."""


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is."""

    documents: int
    tokens: int
    bytes_done: int
    bytes_total: int | None
    """Known if all sources are files; then both are bytes on disk, else bytes of text."""
    text_bytes: int
    """Bytes of text that were encoded."""
    seconds: float


class WorkPlan:
    """The spans of all sources that belong to a preparation, in order."""

    def __init__(self, sources: Sequence[Source], request: PrepareRequest) -> None:
        self.began = time.perf_counter()
        self.spans = spans_of(sources, request.options, request.part)
        numbered = request.holdout is not None
        self.ids = [SpanId.of(span, sources[span.source], numbered=numbered) for span in self.spans]
        self.signed_ids = list(self.ids)
        """As they are before it is known what is dropped."""
        self.names = [sources[span.source].name for span in self.spans]
        """The source of each span."""
        self.closed = 0
        """How many spans are done."""
        self._sources = sources
        self._options = request.read_options
        self._on_damage = request.on_damage
        self._kept: Mapping[int, KeptSpan] = {}
        self._two_passes = request.dedup is not None
        self._drops: PartDrops | None = None
        self._span_of = {span.source: number for number, span in enumerate(self.spans)}
        self._ends = list(itertools.accumulate(span.disk for span in self.spans))
        sized = all(source.size is not None for source in sources)
        self.bytes_total = self._ends[-1] if sized and self._ends else None

    def keep(self, kept: Mapping[SpanId, KeptSpan]) -> None:
        """Do not do again what an earlier generation has done."""
        self._kept = {number: kept[id] for number, id in enumerate(self.ids) if id in kept}

    def drop(self, drops: PartDrops) -> None:
        """Drop duplicates; a span that gives other documents now is another span."""
        self._drops = drops
        for number, id in enumerate(self.signed_ids):
            fingerprint = sha256_text(id.fingerprint + drops.digest(number))[:32]
            self.ids[number] = replace(id, fingerprint=fingerprint)

    def repeatable(self, span: SourceSpan) -> bool:
        """Whether a span can be read again."""
        return self._sources[span.source].repeatable

    def lines_before(self, span: int) -> int:
        """How many lines of its source begin before a span."""
        return lines_before(self._sources[self.spans[span].source], self.spans[span].begin)

    def current(self, cursor: Cursor) -> SpanId | None:
        """The span in which a cursor is."""
        return self.ids[cursor.span] if cursor.span < len(self.ids) else None

    def blocks(self, cursor: Cursor) -> Iterator[BlockInSource]:
        """The blocks from a cursor on; an empty one stands for what is kept of a span."""
        for number, span in enumerate(self.spans[cursor.span :], cursor.span):
            source, begin = self._sources[span.source], cursor.position
            cursor = Cursor()
            if begin is None:
                begin, kept = span.begin, self._kept.get(number)
                if kept:
                    disk = span.begin if kept.cursor else span.begin + span.disk
                    nothing = TextRows([[] for _ in self._options.columns], (), 0)
                    yield BlockInSource(span.source, source, TextBlock(begin, begin, disk, nothing))
                    if kept.cursor is None:
                        continue
                    assert kept.cursor.position is not None
                    begin = kept.cursor.position
            # Where both passes cut must not depend on where an earlier process stopped.
            first = span.begin if self._two_passes else begin
            drops = self._drops.of_span(number) if self._drops else itertools.repeat(None)
            for block in cut_source(source, self._options, first):
                if span.end is not None and block.begin >= span.end:
                    break
                if span.end is not None and block.end > span.end:
                    block = replace(block, end=span.end, disk=span.end)
                known = next(drops, (None, None)) or (block.begin, None)
                if known[0] != block.begin:
                    what = "this source is not what it was when it was compared with the others"
                    raise DataError(what, where=source.name, remedy="give the same command again")
                if block.begin >= begin:
                    yield BlockInSource(span.source, source, block, known[1])

    def write(
        self,
        encoded: Iterable[tuple[BlockBatch, list[EncodedBlock]]],
        outputs: Outputs,
        cursor: Cursor,
        listener: WorkListener,
    ) -> Iterator[tuple[PrepareProgress, Cursor]]:
        """Write encoded blocks; after each batch, the progress and what comes next."""
        self.closed = cursor.span
        for batch, blocks in encoded:
            for located, block in zip(batch, blocks, strict=True):
                cursor = self._write_block(located, block, outputs, cursor, listener)
            done, text = outputs.text_bytes, outputs.text_bytes - outputs.copied
            if self.bytes_total is not None:
                number = self._span_of[batch[-1].number]
                last = self.spans[number]
                done = self._ends[number] - last.disk + batch[-1].block.disk - last.begin
            seconds = time.perf_counter() - self.began
            counts = outputs.kept, outputs.tokens, done, self.bytes_total, text
            yield PrepareProgress(*counts, seconds), cursor
        self._close_until(len(self.spans), outputs, listener)

    def _write_block(
        self,
        located: BlockInSource,
        block: EncodedBlock,
        outputs: Outputs,
        cursor: Cursor,
        listener: WorkListener,
    ) -> Cursor:
        """Write a block that is due at a cursor; what comes next."""
        span, source = self._span_of[located.number], located.source
        if span < cursor.span:
            # It belongs to a damaged source that was left out.
            return cursor
        if span > cursor.span or cursor.position is None:
            self._close_until(span, outputs, listener)
            if kept := self._kept.get(span):
                outputs.copy(kept, span=span)
                if kept.cursor:
                    return replace(kept.cursor, span=span)
                self._close_until(span + 1, outputs, listener)
                return Cursor(span + 1)
            line = 1 + lines_before(source, self.spans[span].begin)
            cursor = Cursor(span, self.spans[span].begin, line)
        origin = functools.partial(_origin, source.name, cursor.line)
        if block.fault is not None:
            raise block.fault.error(origin(block.fault.place))
        outputs.append(block, source=located.number, line=cursor.line, origin=origin, span=span)
        line = cursor.line + block.lines
        if block.failure is None:
            return Cursor(span, located.block.end, line)
        where = f"{source.name}:{line}"
        if self._on_damage is OnDamage.STOP:
            raise DamagedSourceError.of(block.failure, where=where)
        listener.rewinding()
        outputs.rewind()
        outputs.skip(Skipped(SkipReason.DAMAGED_FILE, where, block.failure.what))
        self._close_until(span + 1, outputs, listener)
        return Cursor(span + 1)

    def _close_until(self, span: int, outputs: Outputs, listener: WorkListener) -> None:
        """End all spans before a span; those that gave no blocks are empty."""
        while self.closed < span:
            listener.done(SpanRecord(self.ids[self.closed], outputs.close_span()))
            self.closed += 1


def _origin(name: str, line: int, place: int) -> str:
    return f"{name}:{line + place}"
