"""The first pass of a deduplication: reads all sources and writes what is compared.

    ROLE.signed.json    the request, how far the work is, lengths and checksums of the files
    ROLE.spans          a line for each span that is done
    ROLE.blocks         for each block: where it begins, the lines of its span before it, and how
                        many records it has under each key
    ROLE.key-0          for each block its records: the first number of all of them, then the
                        second, …, at last the line in the block where the document begins

The second pass cuts the sources into the same blocks. So a record is known by its number within a
block, and neither pass needs to know how many lines or documents come before. After a kill the same
command resumes from what was saved last. If sources have changed since, all spans before the first
one that did are kept.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.base.files import make_folder, read_json, sha256_text, storage_errors, write_json
from gristmill.text.dedup.sorting import Rows
from gristmill.text.prepare.journal import Cursor, DamagedSourceError, SpanId
from gristmill.text.prepare.request import FIRST_SAVE, PrepareRequest, SourceSpan
from gristmill.text.prepare.workers import (
    BlockBatch,
    BlockInSource,
    SignedBlock,
    SignSettings,
    Workers,
    batched,
    sign_batch,
)
from gristmill.text.sources.source import OnDamage, lines_before
from gristmill.tokens.format import map_array
from gristmill.tokens.hashed_file import HashedFile

SIGNING = "reading what is to be compared"
_VERSION = 1
_NUMBER = 8
BLOCK_FACTS = 2
"""Numbers of a block before the counts of its records."""
_OF_ENCODING = ("tokenizer", "append_eod", "format", "shard_size", "split", "dedup", "part")
"""What does not decide about records, and what is named besides."""


class SpanPlan(Protocol):
    """What signing needs to know of the work."""

    spans: list[SourceSpan]
    ids: list[SpanId]
    names: list[str]
    bytes_total: int | None

    def blocks(self, cursor: Cursor) -> Iterator[BlockInSource]:
        """The blocks from a cursor on."""

    def repeatable(self, span: SourceSpan) -> bool:
        """Whether a span can be read again."""

    def lines_before(self, span: int) -> int:
        """How many lines of its source begin before a span."""


@dataclass(frozen=True)
class DedupProgress:
    """How far a deduplication is."""

    what: str
    done: int
    total: int | None
    """Bytes on disk while signing, else steps."""


Listener = Callable[[DedupProgress], None]


def signed_so_far(file: Path) -> Cursor | None:
    """Where the signing of a part was when it was saved last."""
    try:
        value = read_json(file)
        return None if value["complete"] else Cursor(**value["cursor"])
    except (DataError, KeyError, TypeError):
        return None


def signing_request(asked: Mapping[str, Any], request: PrepareRequest) -> dict[str, Any]:
    """Of what a preparation is asked for, all that decides about the records."""
    assert request.dedup is not None
    kept = {name: value for name, value in asked.items() if name not in _OF_ENCODING}
    return {**kept, "compared": request.dedup.settings.as_json()}


@dataclass(frozen=True)
class SignedPart:
    """The records of a part, in files."""

    folder: Path
    role: str
    value: Mapping[str, Any]
    """The content of ROLE.signed.json."""

    @classmethod
    def load(cls, folder: Path, role: str) -> SignedPart | None:
        """A part that is signed as a whole, if it is."""
        try:
            value = read_json(folder / f"{role}.signed.json")
            if value["version"] != _VERSION or not value["complete"]:
                return None
            part = cls(folder, role, value)
            whole = all(part.size(name) == facts["bytes"] for name, facts in value["files"].items())
            return part if whole else None
        except (UserError, KeyError, TypeError, OSError):
            return None

    def size(self, name: str) -> int:
        return self.file(name).stat().st_size

    def file(self, name: str) -> Path:
        return _hidden(self.folder / f"{self.role}.{name}")

    def holds(self, asked: Mapping[str, Any], ids: Sequence[SpanId]) -> bool:
        """Whether the same command would find the same now."""
        return bool(self.value["asked"] == asked and self.value["ids"] == _digest(ids))

    @property
    def digest(self) -> str:
        """Changes with the records."""
        facts = {name: self.value[name] for name in ("asked", "ids", "files")}
        return sha256_text(json.dumps(facts, sort_keys=True))

    @property
    def columns(self) -> int:
        return int(self.value["columns"])

    @property
    def keys(self) -> int:
        return int(self.value["keys"])

    def spans(self) -> list[Mapping[str, Any]]:
        return [json.loads(line) for line in self.file("spans").read_bytes().splitlines()]

    def blocks(self) -> npt.NDArray[np.int64]:
        """A row for each block."""
        width = BLOCK_FACTS + self.keys
        count = self.size("blocks") // _NUMBER
        return map_array(self.file("blocks"), np.int64, count=count).reshape(-1, width)

    def records(self, key: int) -> int:
        """How many records a key has."""
        return self.size(f"key-{key}") // (_NUMBER * (self.columns + 1))

    def rows(
        self, key: int, columns: Sequence[int], *, first: int, most: int = 1 << 16
    ) -> Iterator[Rows]:
        """Some of the numbers of each record, and its own number, counted from `first`."""
        waiting, count, width = list[Rows](), 0, self.columns + 1
        # Not mapped into memory, where the whole file would soon be.
        with self.file(f"key-{key}").open("rb", buffering=0) as file:
            for number, records in self._counted(key):
                rows = np.empty((records, len(columns) + 1), np.uint64)
                for place, column in enumerate(columns):
                    file.seek(_NUMBER * (number * width + column * records))
                    rows[:, place] = np.frombuffer(file.read(_NUMBER * records), np.uint64)
                rows[:, -1] = np.arange(first + number, first + number + records)
                waiting.append(rows)
                count += records
                if count >= most:
                    yield np.concatenate(waiting)
                    waiting, count = [], 0
        if waiting:
            yield np.concatenate(waiting)

    def columns_of(self, key: int) -> Iterator[Rows]:
        """For each block with records all of its numbers, by column."""
        width = self.columns + 1
        with self.file(f"key-{key}").open("rb") as file:
            for _, records in self._counted(key):
                content = file.read(_NUMBER * width * records)
                yield np.frombuffer(content, np.uint64).reshape(width, -1)

    def _counted(self, key: int) -> Iterator[tuple[int, int]]:
        """For each block with records the number of the first, and how many there are."""
        number = 0
        for records in self.blocks()[:, BLOCK_FACTS + key].tolist():
            if records:
                yield number, records
            number += records


def _hidden(path: Path) -> Path:
    """The name under which `HashedFile` writes."""
    return path.with_name(f".{path.name}.part")


def _digest(ids: Sequence[SpanId]) -> str:
    return sha256_text("\n".join(id.fingerprint for id in ids))


class SigningLog:
    """Writes the records of a part so that another process can continue."""

    def __init__(self, folder: Path, role: str, asked: Mapping[str, Any], keys: int, columns: int):
        self.spans_done = 0
        self._folder, self._role = folder, role
        self._asked, self._keys, self._columns = asked, keys, columns
        self._names = ["spans", "blocks", *(f"key-{key}" for key in range(keys))]
        self._files: dict[str, HashedFile] = {}
        self._ids: Sequence[SpanId] = ()
        self._ids_digest = ""
        self._begin: dict[str, int] = {}
        """The length of each file when the current span began."""

    @property
    def path(self) -> Path:
        return self._folder / f"{self._role}.signed.json"

    def open(self, ids: Sequence[SpanId], *, overwrite: bool) -> Cursor:
        """Continue what an earlier process has done for the same request, or begin anew."""
        make_folder(self._folder)
        self._ids, self._ids_digest = ids, _digest(ids)
        saved = self._saved(overwrite=overwrite)
        for name in self._names:
            state = saved["files"][name] if saved else None
            with storage_errors(self._folder):
                self._files[name] = HashedFile(
                    self._folder / f"{self._role}.{name}", ending="part", saved=state
                )
        if not saved:
            return self._mark(Cursor())
        self._begin = dict(saved["begin"])
        lines = b"".join(self._files["spans"].content()).splitlines()
        before = [json.loads(line) for line in lines]
        same = 0
        while same < min(len(before), len(ids)) and before[same]["id"] == ids[same].fingerprint:
            same += 1
        self.spans_done = same
        cursor = Cursor(**saved["cursor"])
        here = ids[same].fingerprint if same < len(ids) else None
        if same == len(before) and cursor.position is not None and saved["current"] == here:
            return cursor
        ends = before[same - 1]["ends"] if same else dict.fromkeys(self._names, 0)
        size = sum(len(line) + 1 for line in lines[:same])
        for name, file in self._files.items():
            file.rewind(size if name == "spans" else ends[name])
        return self._mark(Cursor(same))

    def _saved(self, *, overwrite: bool) -> Mapping[str, Any] | None:
        if not self.path.exists():
            return None
        try:
            value: Mapping[str, Any] = read_json(self.path)
            if value["version"] == _VERSION:
                asked = value["asked"]
                differing = [key for key in self._asked if asked.get(key) != self._asked[key]]
                if not differing and asked.keys() == self._asked.keys():
                    return value
                if not overwrite:
                    raise UserError(
                        "a different preparation of this set was interrupted: it differs in: "
                        + ", ".join(differing or sorted(asked.keys() - self._asked.keys())),
                        where=str(self._folder),
                        remedy="give the same command to resume it, use another name, or start "
                        "over with --overwrite",
                        exit=Exit.REFUSED,
                    )
        except (DataError, KeyError, TypeError):
            pass
        return None

    def _mark(self, cursor: Cursor) -> Cursor:
        """A span begins here."""
        self._begin = {name: file.bytes for name, file in self._files.items()}
        for file in self._files.values():
            file.mark()
        return cursor

    def append(self, begin: int, line: int, block: SignedBlock) -> None:
        """Write a block that begins at a position, after some lines of its span."""
        counts = [len(column.signatures) for column in block.columns]
        with storage_errors(self.path):
            self._files["blocks"].write(np.array([begin, line, *counts], "<i8").tobytes())
            for key, column in enumerate(block.columns):
                if len(column.signatures):
                    records = np.vstack([column.signatures.T, column.places])
                    self._files[f"key-{key}"].write(records.astype("<u8").tobytes())

    def close_span(self, *, damaged: bool = False) -> None:
        """End a span; of a damaged source nothing stays."""
        if damaged:
            for name, file in self._files.items():
                file.rewind(self._begin[name])
        ends = {name: self._files[name].bytes for name in self._names if name != "spans"}
        width = _NUMBER * (BLOCK_FACTS + self._keys)
        blocks = (ends["blocks"] - self._begin["blocks"]) // width
        id = self._ids[self.spans_done]
        line = {"id": id.fingerprint, "blocks": blocks, "damaged": damaged, "ends": ends}
        with storage_errors(self.path):
            self._files["spans"].write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self.spans_done += 1
        self._mark(Cursor())

    def save(self, cursor: Cursor, *, complete: bool = False) -> None:
        """Flush everything, so that another process can continue."""
        ids = self._ids
        with storage_errors(self.path):
            for file in self._files.values():
                file.flush()
        write_json(
            self.path,
            {
                "version": _VERSION,
                "asked": dict(self._asked),
                "complete": complete,
                "ids": self._ids_digest,
                "keys": self._keys,
                "columns": self._columns,
                "cursor": asdict(cursor),
                "current": ids[cursor.span].fingerprint if cursor.span < len(ids) else None,
                "begin": self._begin,
                "files": {name: file.state() for name, file in self._files.items()},
            },
        )

    def release(self) -> None:
        for file in self._files.values():
            file.release()


def sign_sources(
    plan: SpanPlan,
    request: PrepareRequest,
    asked: Mapping[str, Any],
    workers: Workers | None,
    *,
    filters: Path,
    folder: Path,
    role: str,
    listener: Listener,
) -> SignedPart:
    """Sign all spans of a plan, or those that an earlier process has not."""
    assert request.dedup is not None
    settings = SignSettings(request.read_options, filters, request.dedup.settings)
    log = SigningLog(folder, role, asked, len(request.options.keys), settings.signatures.columns)
    try:
        cursor = log.open(plan.ids, overwrite=request.overwrite)
        batches = batched(plan.blocks(cursor), block_bytes=request.options.block_bytes)
        task = partial(sign_batch, settings=settings)
        signed = (
            workers.map(task, batches) if workers else ((batch, task(batch)) for batch in batches)
        )
        _Signing(plan, request, log, cursor, listener).write(signed)
        log.save(Cursor(len(plan.spans)), complete=True)
    finally:
        log.release()
    part = SignedPart.load(folder, role)
    assert part is not None
    return part


class _Signing:
    """Writes signed blocks in their order."""

    def __init__(
        self,
        plan: SpanPlan,
        request: PrepareRequest,
        log: SigningLog,
        cursor: Cursor,
        listener: Listener,
    ) -> None:
        self._plan, self._request, self._log = plan, request, log
        self._cursor, self._listener = cursor, listener
        self._span_of = {span.source: number for number, span in enumerate(plan.spans)}
        self._ends = list(itertools.accumulate(span.disk for span in plan.spans))

    def write(self, signed: Iterable[tuple[BlockBatch, list[SignedBlock]]]) -> None:
        plan, log = self._plan, self._log
        due = time.monotonic() + min(FIRST_SAVE, self._request.save_every)
        for batch, blocks in signed:
            for located, block in zip(batch, blocks, strict=True):
                self._write_block(located, block)
            number = self._span_of[batch[-1].number]
            last = plan.spans[number]
            done = self._ends[number] - last.disk + batch[-1].block.disk - last.begin
            self._listener(DedupProgress(SIGNING, done, plan.bytes_total))
            if time.monotonic() >= due:
                log.save(self._cursor)
                due = time.monotonic() + self._request.save_every
        self._close_until(len(plan.spans))

    def _write_block(self, located: BlockInSource, block: SignedBlock) -> None:
        span = self._span_of[located.number]
        if span < self._log.spans_done:
            # It belongs to a damaged source that is left out.
            return
        if span > self._log.spans_done or self._cursor.position is None:
            self._close_until(span)
            self._cursor = Cursor(span, self._plan.spans[span].begin, 0)
        line = self._cursor.line
        if block.fault is not None:
            where = self._place(located, line + block.fault.place)
            raise block.fault.error(where)
        self._log.append(located.block.begin, line, block)
        self._cursor = Cursor(span, located.block.end, line + block.lines)
        if block.failure is None:
            return
        if self._request.on_damage is OnDamage.STOP:
            where = self._place(located, line + block.lines)
            # The next process begins this span anew.
            self._log.save(Cursor(span))
            raise DamagedSourceError.of(block.failure, where=where)
        self._log.close_span(damaged=True)
        self._cursor = Cursor(span + 1)

    def _place(self, located: BlockInSource, line: int) -> str:
        """The file and line of a block, so many lines after the beginning of its span."""
        begin = self._plan.spans[self._span_of[located.number]].begin
        return f"{located.source.name}:{1 + lines_before(located.source, begin) + line}"

    def _close_until(self, span: int) -> None:
        while self._log.spans_done < span:
            self._log.close_span()
            self._cursor = Cursor(self._log.spans_done)
