"""Deduplication of a preparation: which records of which block are dropped.

    sources ── signed by each part ──> records ── grouped, once for all parts ──> ROLE.key-0.drops
    older sets ───────────────────────────┘            a folder beside the output, `.NAME.dedup`
                                                       ROLE.key-0.drops ──> blocks, encoded

The records of all parts, one part after the other, are those of the whole. So what is dropped does
not depend on parts or workers. Of a group the first record stays: that of the lowest source, and in
it the lowest line. Grouping needs all parts, so with parts it is a step of its own, which takes a
lock and begins only when all of them are signed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, UserError
from gristmill.base.files import make_folder, read_json, write_json
from gristmill.base.locks import OutputLock
from gristmill.text.dedup.drops import BlockDrops, ColumnDrops
from gristmill.text.dedup.groups import OLDER, Grouping
from gristmill.text.dedup.signatures import EXACT_COLUMNS, SignatureSettings
from gristmill.text.dedup.sorting import Rows, write_rows
from gristmill.text.prepare.dedup_request import dedup_folder, groups_file, role_of
from gristmill.text.prepare.older_sets import (
    OlderSets,
    StoredSignatures,
    remove_signatures,
    write_signatures,
)
from gristmill.text.prepare.request import WHOLE, PartNumber, PrepareRequest
from gristmill.text.prepare.signing import (
    BLOCK_FACTS,
    DedupProgress,
    Listener,
    SignedPart,
    SpanPlan,
    sign_sources,
    signing_request,
)
from gristmill.text.prepare.workers import Workers
from gristmill.tokens.format import map_array

_VERSION = 1


def whole_name_of(request: PrepareRequest) -> Path:
    """The name of the preparation that a part belongs to."""
    return replace(request, part=WHOLE).name


def load_signed(request: PrepareRequest, part: PartNumber) -> SignedPart | None:
    """The records of a part, if it is signed as a whole."""
    return SignedPart.load(dedup_folder(whole_name_of(request)), role_of(part.number, part.of))


class PartDrops:
    """Which records of a part are dropped, block by block."""

    def __init__(self, signed: SignedPart, settings: SignatureSettings) -> None:
        self._signed, self._settings = signed, settings
        self._blocks = signed.blocks()
        self._ends = np.cumsum(self._blocks[:, BLOCK_FACTS:], axis=0)
        """For each block and key, how many records there are up to its end."""
        spans = signed.spans()
        self._damaged = [bool(span["damaged"]) for span in spans]
        self._span_ends = np.cumsum([span["blocks"] for span in spans], dtype=np.int64)
        """How many blocks there are up to the end of each span."""
        self._drops = [_read_drops(signed, key) for key in range(signed.keys)]

    def _blocks_of(self, span: int) -> range:
        return range(int(self._span_ends[span - 1]) if span else 0, int(self._span_ends[span]))

    def _records_of(self, block: int, key: int) -> tuple[int, int]:
        """The first record of a block, and where its records end."""
        end = int(self._ends[block, key])
        return end - int(self._blocks[block, BLOCK_FACTS + key]), end

    def _between(self, key: int, low: int, high: int) -> ColumnDrops:
        drops = self._drops[key]
        first, last = np.searchsorted(drops[:, 0], np.array([low, high], np.uint64))
        chosen = drops[first:last].astype(np.int64)
        return ColumnDrops(chosen[:, 0] - low, chosen[:, 1])

    def of_span(self, span: int) -> Iterator[tuple[int, BlockDrops] | None]:
        """Where each block of a span begins, and what is dropped of it; None, again and again, for
        a damaged source, which is left out anyway."""
        if self._damaged[span]:
            yield from itertools.repeat(None)
        for block in self._blocks_of(span):
            columns = [
                self._between(key, *self._records_of(block, key)) for key in range(len(self._drops))
            ]
            yield int(self._blocks[block, 0]), BlockDrops(columns, self._settings)

    def digest(self, span: int) -> str:
        """Changes with what is dropped of a span."""
        digest, blocks = hashlib.sha256(), self._blocks_of(span)
        for key in range(len(self._drops)):
            if blocks:
                low, _ = self._records_of(blocks[0], key)
                _, high = self._records_of(blocks[-1], key)
                drops = self._between(key, low, high)
                digest.update(drops.numbers.astype("<i8").tobytes() + b"/")
                digest.update(drops.codes.astype("<i8").tobytes() + b"/")
        return digest.hexdigest()

    def kept(
        self, key: int, chosen: Callable[[int, npt.NDArray[np.int64]], npt.NDArray[np.bool_] | None]
    ) -> Iterator[Rows]:
        """The records that stay; `chosen` tells for a span and lines in it which are meant, None
        for all."""
        columns = self._signed.columns_of(key)
        for span in range(len(self._span_ends)):
            for block in self._blocks_of(span):
                low, high = self._records_of(block, key)
                if low == high:
                    continue
                records = next(columns)
                stays = np.ones(high - low, np.bool_)
                stays[self._between(key, low, high).numbers] = False
                lines = records[-1].astype(np.int64) + int(self._blocks[block, 1])
                mine = chosen(span, lines)
                yield records[:-1, stays if mine is None else stays & mine].T


def _read_drops(signed: SignedPart, key: int) -> Rows:
    path = _drops_file(signed, key)
    count = path.stat().st_size // 8
    return map_array(path, np.uint64, count=count).reshape(-1, 2)


def _drops_file(signed: SignedPart, key: int) -> Path:
    return signed.folder / f"{signed.role}.key-{key}.drops"


def find_drops(
    request: PrepareRequest,
    plan: SpanPlan,
    asked: Mapping[str, Any],
    workers: Workers | None,
    *,
    filters: Path,
    listener: Listener,
    note: Callable[[str], None],
) -> PartDrops | None:
    """What is dropped of a part or the whole; None for a part that is signed now, and waits for the
    others to be. `filters`: a folder that `save_filters` wrote into if there are filters."""
    assert request.dedup is not None
    for span, name in zip(plan.spans, plan.names, strict=True):
        if not plan.repeatable(span):
            raise UserError(
                "duplicates are found by reading the text twice, and a pipe can be read once",
                where=name,
                remedy="write the text to a file first, or leave out --dedup",
            )
    _refuse_itself(request)
    wanted, folder = signing_request(asked, request), dedup_folder(whole_name_of(request))
    signed, role = load_signed(request, request.part), role_of(*_numbers(request.part))
    if signed is None or not signed.holds(wanted, plan.ids):
        signed = sign_sources(
            plan,
            request,
            wanted,
            workers,
            filters=filters,
            folder=folder,
            role=role,
            listener=listener,
        )
    if not is_grouped(request, signed):
        if request.part != WHOLE:
            note(
                f"part {request.part} is signed; when all parts are, group them: the same command "
                f"with --parts {request.part.of} --dedup-group; then give this one again"
            )
            return None
        group_parts(request, [signed], workers, listener=listener, note=note)
    return PartDrops(signed, request.dedup.settings)


def _refuse_itself(request: PrepareRequest) -> None:
    """A set cannot be compared with what it replaces."""
    assert request.dedup is not None
    own = {
        request.prefix(key, split).resolve()
        for key in request.options.keys
        for split in request.splits
    }
    for prefix in request.dedup.against:
        if prefix.resolve() in own:
            raise UserError(
                "this is the name of the new set too",
                where=f"--against {prefix}",
                remedy="give the new set another name (-o)",
            )


def _numbers(part: PartNumber) -> tuple[int, int]:
    return part.number, part.of


def is_grouped(request: PrepareRequest, signed: SignedPart) -> bool:
    """Whether it is known what is dropped of a part as it is signed now."""
    assert request.dedup is not None
    try:
        value = read_json(groups_file(whole_name_of(request), request.part.of))
        return bool(
            value["version"] == _VERSION
            and value["asked"] == request.dedup.as_json()
            and value["signed"][signed.role] == signed.digest
            and all(_drops_file(signed, key).is_file() for key in range(signed.keys))
        )
    except (DataError, KeyError, TypeError):
        return False


def group_parts(
    request: PrepareRequest,
    parts: Sequence[SignedPart],
    workers: Workers | None,
    *,
    listener: Listener,
    note: Callable[[str], None],
) -> None:
    """Find what is dropped of all parts. What was found before a kill is not sought again."""
    assert request.dedup is not None
    name, of = whole_name_of(request), len(parts)
    with OutputLock(name, purpose="dedup"):
        if all(is_grouped(replace(request, part=PartNumber(1, of)), part) for part in parts):
            return
        folder = dedup_folder(name)
        asked = {
            "asked": request.dedup.as_json(),
            "signed": {part.role: part.digest for part in parts},
        }
        work = folder / f"of-{of}.grouping"
        about = work / "about.json"
        if not about.is_file() or read_json(about) != asked:
            shutil.rmtree(work, ignore_errors=True)
            make_folder(work)
            write_json(about, asked)
        _Grouper(request, parts, workers, work, listener, note).run()
        write_json(groups_file(name, of), {"version": _VERSION, **asked})
        shutil.rmtree(work, ignore_errors=True)


class _Grouper:
    """Groups the records of all parts, key by key."""

    def __init__(
        self,
        request: PrepareRequest,
        parts: Sequence[SignedPart],
        workers: Workers | None,
        work: Path,
        listener: Listener,
        note: Callable[[str], None],
    ) -> None:
        assert request.dedup is not None
        self._dedup, self._parts, self._work = request.dedup, parts, work
        self._settings, self._listener = request.dedup.settings, listener
        self._buckets = self._settings.columns - EXACT_COLUMNS
        self._steps = 0
        self._total = parts[0].keys * (1 + self._buckets + bool(self._buckets))
        self._older_sets = OlderSets(
            request.dedup.against, self._settings, work.parent, workers, self._decoded, note
        )
        self._older: Sequence[StoredSignatures] = ()

    def _decoded(self, prefix: Path, done: int, total: int) -> None:
        self._listener(DedupProgress(f"reading the text of {prefix}", done, total))

    def _step(self, name: str) -> None:
        self._listener(DedupProgress(name, self._steps, self._total))
        self._steps += 1

    def run(self) -> None:
        self._older = self._older_sets.sign()
        for key in range(self._parts[0].keys):
            folder = self._work / f"key-{key}"
            make_folder(folder)
            grouping = Grouping(folder, self._dedup.memory, self._step)
            equal = grouping.exact(self._records(key, range(EXACT_COLUMNS)))
            groups = equal
            if self._buckets:
                buckets = [
                    grouping.bucket(
                        number,
                        self._buckets,
                        partial(self._records, key, [EXACT_COLUMNS + number]),
                    )
                    for number in range(self._buckets)
                ]
                groups = grouping.components([equal, *buckets])
            self._write(key, grouping.drops(groups, equal if self._buckets else None))

    def _records(self, key: int, columns: Sequence[int]) -> Iterator[Rows]:
        """Numbers of all records, each with the number of the record itself."""
        for older in self._older:
            for rows in older.rows(columns):
                yield np.column_stack([rows, np.full(len(rows), OLDER, np.uint64)])
        first = 1
        for part in self._parts:
            yield from part.rows(key, columns, first=first)
            first += part.records(key)

    def _write(self, key: int, drops: Iterator[Rows]) -> None:
        """Write what is dropped of each part, counted from its first record."""
        left, first = np.empty((0, 2), np.uint64), 1
        for part in self._parts:
            end = first + part.records(key)

            def pieces(first: int = first, end: int = end) -> Iterator[Rows]:
                nonlocal left
                while True:
                    count = int(np.searchsorted(left[:, 0], np.uint64(end)))
                    yield left[:count] - np.array([first, 0], np.uint64)
                    left = left[count:]
                    if len(left) or (following := next(drops, None)) is None:
                        return
                    left = following

            write_rows(_drops_file(part, key), pieces())
            first = end


def save_signatures(request: PrepareRequest, plan: SpanPlan, drops: PartDrops | None) -> None:
    """Write beside each finished set what its documents were compared by, if they were."""
    if request.dedup is None or drops is None:
        for name in request.options.keys:
            for split in request.splits:
                remove_signatures(request.prefix(name, split))
        return
    settings, holdout = request.dedup.settings, request.holdout
    before = functools.lru_cache(maxsize=1)(plan.lines_before)
    for key, name in enumerate(request.options.keys):
        for number, split in enumerate(request.splits):

            def chosen(
                span: int, lines: npt.NDArray[np.int64], number: int = number
            ) -> npt.NDArray[np.bool_] | None:
                if holdout is None:
                    return None
                places = lines + 1 + before(span)
                sets = holdout.sets_of(places, source=plan.spans[span].source)
                return np.equal(sets, number)

            write_signatures(
                request.prefix(name, split),
                settings.as_json(),
                drops.kept(key, chosen),
                columns=settings.columns,
            )


def remove_files(request: PrepareRequest, of: int) -> None:
    """Remove all that a deduplication has written for the whole or for so many parts."""
    folder = dedup_folder(whole_name_of(request))
    groups_file(whole_name_of(request), of).unlink(missing_ok=True)
    for number in range(1, of + 1):
        for path in folder.glob(f"*{role_of(number, of)}.*"):
            path.unlink(missing_ok=True)
    for path in folder.glob("older-*.rows"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / f"of-{of}.grouping", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
