"""Copy one or more token sets into a new one of any format, in order and in bounded memory.

Ids are copied a few MiB at a time. Several threads read and check them, another computes checksums,
and this one writes; only the document starts of a source are held as a whole, 8
bytes each. The type of the ids is chosen for the new format and the vocabulary. The user may state
what a source does not (see `gristmill.tokens.store`), and every id is checked against it;
otherwise the vocabulary ends after the largest id, and the tokenizer stays unknown.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.process import usable_cores
from gristmill.tokens.format import (
    IdRange,
    NewSet,
    Starts,
    TokenReader,
    TokenSetInfo,
    id_range,
    piece_bounds,
)
from gristmill.tokens.origins import JoinedOrigins, open_origins
from gristmill.tokens.shards import FLAT
from gristmill.tokens.store import (
    FORMATS,
    Reading,
    create_tokens,
    find_manifest,
    is_empty_part,
    open_tokens,
)
from gristmill.tokens.writer import TokenWriter

_MAX_THREADS = 8
"""Threads that read; more than one disk or one hash needs."""


@dataclass(frozen=True)
class Origin:
    """The tokenizer that made the ids of a set."""

    vocab_size: int
    end_of_text: int | None
    spec: Mapping[str, Any]
    """Its "fingerprint" is None if the tokenizer is not known."""


@dataclass(frozen=True)
class CopyProgress:
    """How far a copy has come."""

    tokens: int
    tokens_total: int
    documents: int
    seconds: float


def convert_tokens(
    sources: Sequence[Path | str],
    output: Path | str,
    *,
    format: str | None = None,
    shard_size: int | None = None,
    reading: Reading | None = None,
    origin: Origin | None = None,
    overwrite: bool = False,
    progress: Callable[[CopyProgress], None] | None = None,
    companions: Callable[[TokenSetInfo], None] = lambda info: None,
) -> TokenSetInfo:
    """Write the documents of all sources, in the order given, as the token set `output`.

    `companions` writes what belongs beside the set; if the process is killed before that is done,
    the same call replaces the set.

    `reading` says how sources without a manifest are read, `origin` which tokenizer made them. The
    format is that of the first source if none is given, or flat if that is only read. Parts without
    documents add nothing.
    """
    full = [source for source in sources if not is_empty_part(source)] or sources
    readers = [open_tokens(source, reading) for source in full]
    if any(Path(source).resolve() == Path(output).resolve() for source in full):
        raise UserError(
            "the new set has the name of its source",
            where=str(output),
            remedy="give the new set another name (--output)",
            exit=Exit.REFUSED,
        )
    known = _origin(full, readers, origin)
    indices = [open_origins(Path(source)) for source in full]
    together = JoinedOrigins([one for one in indices if one is not None])
    writer = create_tokens(
        NewSet(
            Path(output),
            vocab_size=known.vocab_size,
            end_of_text=known.end_of_text,
            tokenizer=known.spec,
            format=format or (first if (first := readers[0].info.format) in FORMATS else FLAT),
            shard_size=shard_size,
            overwrite=overwrite,
            background=True,
            origins=len(together.indices) == len(full),
            request="\n".join([*map(str, sources), str(format), str(shard_size)]),
        )
    )
    sizes = [size for reader in readers if (size := reader.info.text_bytes) is not None]
    try:
        _copy(readers, together, writer, progress=progress)
        text_bytes = sum(sizes) if len(sizes) == len(readers) else None
        return writer.finish(text_bytes=text_bytes, companions=companions, sources=together.sources)
    except BaseException:
        writer.abandon()
        raise


def _copy(
    readers: Sequence[TokenReader],
    origins: JoinedOrigins,
    writer: TokenWriter,
    *,
    progress: Callable[[CopyProgress], None] | None,
) -> None:
    began, total = time.perf_counter(), sum(len(reader) for reader in readers)
    tokens = documents = 0
    for ids, starts, sequences, extremes in _read_ahead(readers):
        found = origins.between(documents, documents + len(starts)) if writer.has_origins else None
        writer.append(ids, starts=starts, sequences=sequences, extremes=extremes, origins=found)
        tokens, documents = tokens + len(ids), documents + len(starts)
        if progress:
            progress(CopyProgress(tokens, total, documents, time.perf_counter() - began))


class _LoadedPiece(NamedTuple):
    """Ids that are in memory and were looked at, and where in them documents and sequences
    begin."""

    ids: npt.NDArray[Any]
    starts: Starts
    sequences: Starts | None
    extremes: IdRange


def _read_ahead(readers: Sequence[TokenReader]) -> Iterator[_LoadedPiece]:
    """All pieces of all sets in order, read by several threads."""
    threads = min(usable_cores(), _MAX_THREADS)
    waiting: deque[Future[_LoadedPiece]] = deque()
    pool = ThreadPoolExecutor(threads, "read")
    try:
        for reader in readers:
            sequences = reader.sequence_starts
            for begin, count in piece_bounds(reader):
                waiting.append(pool.submit(_load, reader, sequences, begin, count))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _load(reader: TokenReader, sequences: Starts | None, begin: int, count: int) -> _LoadedPiece:
    ids = reader.read(begin, count)
    starts = _within(reader.document_starts, begin, count)
    inside = None if sequences is None else _within(sequences, begin, count)
    return _LoadedPiece(ids, starts, inside, IdRange(int(ids.min()), int(ids.max())))


def _within(places: Starts, begin: int, count: int) -> Starts:
    low, high = np.searchsorted(places, [begin, begin + count])
    return places[low:high] - begin


def _origin(
    names: Sequence[Path | str], readers: Sequence[TokenReader], given: Origin | None
) -> Origin:
    """The tokenizer of all sets: the one given unless a set contradicts, or what the sets say.

    Sets can be merged if one tokenizer made them, or if none is stated and the types agree.
    """
    if given is not None:
        for name, reader in zip(names, readers, strict=True):
            made_by = reader.info.tokenizer
            if made_by not in (None, given.spec["fingerprint"]):
                raise DataError(
                    f"these token files were made with tokenizer {str(made_by)[:12]}, and the one "
                    f"given is {str(given.spec['fingerprint'])[:12]}",
                    where=name,
                )
        return given
    first, remedy = readers[0].info, "name the tokenizer of all: --tokenizer"
    for name, info in zip(names, (reader.info for reader in readers), strict=True):
        if info.tokenizer is first.tokenizer is None and info.dtype != first.dtype:
            raise DataError(
                f"the ids are {info.dtype} and those of {names[0]} are {first.dtype}, so they "
                "hardly come from the same tokenizer",
                where=name,
                remedy=remedy,
            )
        if info.tokenizer == first.tokenizer:
            continue
        if None in (info.tokenizer, first.tokenizer):
            raise DataError(
                "these token files do not state which tokenizer made them, and the others do",
                where=name if info.tokenizer is None else names[0],
                remedy=remedy,
            )
        raise DataError(
            f"these token files were made with another tokenizer than {names[0]} "
            f"({str(info.tokenizer)[:12]} and {str(first.tokenizer)[:12]})",
            where=name,
            remedy="prepare both with the same tokenizer",
        )
    sizes = [reader.info.vocab_size or id_range(reader).largest + 1 for reader in readers]
    ends = {reader.info.end_of_text for reader in readers}
    specs = [manifest.tokenizer for name in names if (manifest := find_manifest(Path(name)))]
    return Origin(
        vocab_size=max(1, *sizes),
        end_of_text=ends.pop() if len(ends) == 1 else None,
        spec=specs[0] if specs else {"type": "unknown", "fingerprint": None},
    )
