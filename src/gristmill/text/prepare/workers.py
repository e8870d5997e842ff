"""From blocks of text to token ids, through filters, in this process or in several.

    batches of blocks  ->  at most a few per worker under way  ->  results in the same order

The order, and so the output, does not depend on the number of workers. Small blocks travel
together, so that a folder of many small files does not cost a message for each.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import Exit, UserError
from gristmill.text.dedup.drops import (
    BlockDrops,
    RemovedUnits,
    SignedColumn,
    drop_duplicates,
    sign_column,
)
from gristmill.text.dedup.signatures import SignatureSettings
from gristmill.text.filters.build import Filters, filter_rows, open_filters
from gristmill.text.filters.own import OwnFilterError
from gristmill.text.sources.reading import read_block
from gristmill.text.sources.source import (
    ReadError,
    ReadOptions,
    Reason,
    Source,
    TextBlock,
    TextRows,
    Value,
)
from gristmill.text.tokenizers.encoders import Encoder, open_encoder

_BATCHES_PER_WORKER = 3
_MAX_BLOCKS = 256
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class EncodeSettings:
    """Everything that decides how blocks are encoded."""

    options: ReadOptions
    encoder: Path
    """A folder that `save_encoder` wrote, and `save_filters` if there are filters."""
    end_of_text: int | None
    """The id that follows each document."""
    dtype: str
    """The type of the ids."""


@dataclass(frozen=True)
class EncodedColumn:
    """The documents under one key of a block."""

    ids: npt.NDArray[Any]
    """All documents end to end, each with its end of text."""
    lengths: npt.NDArray[np.int64]
    """How many ids each document has."""
    text_bytes: npt.NDArray[np.int64]
    """How many bytes of text each document had."""
    places: npt.NDArray[np.int64]
    """The line where each document began, counted from the beginning of the block."""
    dropped: Sequence[tuple[int, Reason]]
    """The lines that gave no document."""
    removed: Sequence[RemovedUnits] = ()
    """What was removed inside of documents."""

    def only(self, mine: npt.NDArray[np.bool_]) -> EncodedColumn:
        """Some of the documents."""
        ids, places = self.ids[np.repeat(mine, self.lengths)], self.places[mine]
        return EncodedColumn(ids, self.lengths[mine], self.text_bytes[mine], places, ())


@dataclass(frozen=True)
class EncodedBlock:
    """A block after encoding."""

    rows: int
    lines: int
    columns: Sequence[EncodedColumn]
    failure: ReadError | None
    encoder: str
    """The library that encoded it."""
    fault: FilterFault | None = None
    """Why the block could not be filtered."""


class FilterFault(NamedTuple):
    """A document that a filter of the user's failed on."""

    place: int
    """The line where it begins, counted from the beginning of the block."""
    what: str

    def error(self, where: str) -> UserError:
        """The error for it, with the place of the document."""
        remedy = "mend the function; if it was changed, start over with --overwrite"
        return UserError(self.what, where=where, remedy=remedy)


class BlockInSource(NamedTuple):
    """A block, its source, and the number of the source."""

    number: int
    source: Source
    block: TextBlock
    drops: BlockDrops | None = None
    """The duplicates in it, if they are dropped."""


BlockBatch: TypeAlias = Sequence[BlockInSource]
"""Blocks that travel together."""


def encode_rows(rows: TextRows, settings: EncodeSettings, encoder: Encoder) -> EncodedBlock:
    """Encode the texts of a block, each followed by the end of text."""
    columns = [_encode_column(values, rows.places, settings, encoder) for values in rows.columns]
    return EncodedBlock(len(rows.places), rows.lines, columns, rows.failure, encoder.name)


def _encode_column(
    values: Sequence[Value], places: Sequence[int], settings: EncodeSettings, encoder: Encoder
) -> EncodedColumn:
    kept = np.asarray(places, np.int64)
    texts = [value for value in values if isinstance(value, str)]
    dropped: list[tuple[int, Reason]] = []
    if len(texts) < len(values):
        kept = kept[[isinstance(value, str) for value in values]]
        rows = zip(places, values, strict=True)
        dropped = [(place, value) for place, value in rows if isinstance(value, Reason)]
    encoded = encoder.encode(texts)
    ids, lengths, sizes = encoded.ids, encoded.lengths, encoded.text_bytes
    empty = lengths == 0
    if empty.any():
        # Some tokenizers give no ids for some texts.
        dropped += [(int(place), Reason.EMPTY_TEXT) for place in kept[empty]]
        dropped.sort(key=lambda row: row[0])
        kept, lengths, sizes = kept[~empty], lengths[~empty], sizes[~empty]
    ids = ids.astype(settings.dtype, copy=False)
    if settings.end_of_text is not None:
        ids = np.insert(ids, np.cumsum(lengths), settings.end_of_text)
        lengths = lengths + 1
    return EncodedColumn(ids, lengths, sizes, kept, dropped)


def encode_batch(
    batch: BlockBatch, settings: EncodeSettings, encoder: Encoder
) -> list[EncodedBlock]:
    """Read, filter and encode blocks."""
    encoded = []
    for located in batch:
        try:
            rows = rows_of(located, settings.options, filters_of(settings.encoder))
        except OwnFilterError as error:
            fault = FilterFault(error.place, str(error))
            encoded.append(EncodedBlock(0, 0, (), None, encoder.name, fault))
            continue
        removed = list[list[RemovedUnits]]()
        if located.drops:
            rows, removed = drop_duplicates(rows, located.drops)
        block = encode_rows(rows, settings, encoder)
        columns = zip(block.columns, removed, strict=False)
        changed = [replace(column, removed=inside) for column, inside in columns]
        encoded.append(replace(block, columns=changed or block.columns))
    return encoded


def rows_of(located: BlockInSource, options: ReadOptions, filters: Filters | None) -> TextRows:
    """The rows of a block, as both passes see them: the one that signs and the one that encodes.
    A filter of the user's that fails raises an `OwnFilterError`."""
    rows = read_block(located.source, located.block, options)
    return rows if filters is None else filter_rows(rows, filters, fields=options.fields)


filters_of = functools.lru_cache(maxsize=1)(open_filters)
"""The filters in a folder, which are opened once."""


@dataclass(frozen=True)
class SignSettings:
    """Everything that decides how blocks are signed."""

    options: ReadOptions
    filters: Path
    """A folder that `save_filters` wrote into if there are filters."""
    signatures: SignatureSettings


@dataclass(frozen=True)
class SignedBlock:
    """What the documents of a block are compared by."""

    lines: int
    documents: int
    columns: Sequence[SignedColumn]
    failure: ReadError | None
    fault: FilterFault | None = None
    """Why the block could not be filtered."""


def sign_batch(batch: BlockBatch, settings: SignSettings) -> list[SignedBlock]:
    """Read, filter and sign blocks."""
    signed = []
    for located in batch:
        try:
            rows = rows_of(located, settings.options, filters_of(settings.filters))
        except OwnFilterError as error:
            signed.append(SignedBlock(0, 0, (), None, FilterFault(error.place, str(error))))
            continue
        columns = [sign_column(v, rows.places, settings.signatures) for v in rows.columns]
        texts = sum(isinstance(value, str) for values in rows.columns for value in values)
        signed.append(SignedBlock(rows.lines, texts, columns, rows.failure))
    return signed


def batched(blocks: Iterable[BlockInSource], *, block_bytes: int) -> Iterator[BlockBatch]:
    """Put blocks together until they are about as large as one."""
    batch: list[BlockInSource] = []
    size, last = 0, (-1, 0)
    for block in blocks:
        before = last[1] if block.number == last[0] else 0
        last = (block.number, block.block.disk)
        batch.append(block)
        if not isinstance(block.block.content, TextRows) or block.block.content.places:
            carried = block.block.content is not None
            size += block_bytes if carried else block.block.disk - before
        if size >= block_bytes or len(batch) >= _MAX_BLOCKS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Workers:
    """Processes that encode; they start at once, before anything is known about the work."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count,
            # A fork would copy locks that threads of the libraries hold.
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_initialize,
            initargs=(os.getpid(),),
        )
        with _ignoring_interrupts():
            for _ in range(count):
                # A task that only makes a process start.
                self._pool.submit(int)

    def encode(
        self, batches: Iterable[BlockBatch], settings: EncodeSettings
    ) -> Iterator[tuple[BlockBatch, list[EncodedBlock]]]:
        """Encode batches; the results come in the same order."""
        return self.map(functools.partial(_encode_here, settings=settings), batches)

    def map(
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Tasks with their results, in the same order."""
        waiting: deque[tuple[Task, concurrent.futures.Future[Result]]] = deque()
        try:
            for task in tasks:
                waiting.append((task, self._pool.submit(function, task)))
                if len(waiting) >= _BATCHES_PER_WORKER * self._count:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process ended unexpectedly, perhaps for lack of memory",
                remedy="use fewer workers (--workers), then start the same command again",
                exit=Exit.STORAGE,
            ) from error

    def close(self) -> None:
        """Let the processes end; batches that are still waiting are not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """New processes ignore control-C, which a terminal sends to all: the parent handles it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _initialize(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is a process for each core already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _exit_with(parent: int) -> None:
    """End this process soon after its parent, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(Exit.INTERNAL)


_encoder = functools.lru_cache(maxsize=1)(open_encoder)


def _encode_here(batch: BlockBatch, settings: EncodeSettings) -> list[EncodedBlock]:
    return encode_batch(batch, settings, _encoder(settings.encoder))
