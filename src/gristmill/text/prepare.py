"""From raw text to a token set: read, encode, write, and account for every line.

    sources -> Document -> batches -> encode_batch -> ids + end-of-text -> TokenWriter
            `> Dropped  -> Ledger

    PREFIX.bin PREFIX.starts PREFIX.json   the token set, here of the format `flat`
    PREFIX.tokenizer/                      the tokenizer that made it
    PREFIX.ledger.json                     what became of every line

Lines read = documents kept + lines dropped by reason; this is checked before anything is put in
place. A line is whatever a source offers as one document: a line, a block or a whole file. The
end-of-text token stands after each document. Text is encoded batch by batch, so memory is bounded
by the batch and the longest document.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import write_json
from gristmill.text.sources import Document, DocumentSplit, Dropped, Item, Reason, open_sources
from gristmill.text.tokenizers import TOKENIZER_FILES, Tokenizer
from gristmill.tokens.flat import FORMAT
from gristmill.tokens.format import TokenSetInfo, TokenWriter, file_of
from gristmill.tokens.store import create_tokens

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20
_PLACES = 100


@dataclass
class Ledger:
    """What became of every line."""

    lines: int = 0
    kept: int = 0
    dropped: dict[Reason, int] = field(default_factory=dict)
    places: list[Dropped] = field(default_factory=list)
    """The first 100 lines that were dropped."""

    def drop(self, item: Dropped) -> None:
        self.dropped[item.reason] = self.dropped.get(item.reason, 0) + 1
        if len(self.places) < _PLACES:
            self.places.append(item)

    def check(self) -> None:
        """Lines in = documents kept + lines dropped."""
        assert self.lines == self.kept + sum(self.dropped.values()), (
            f"lines unaccounted for: {self}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "lines": self.lines,
            "kept": self.kept,
            "dropped": {reason.value: count for reason, count in self.dropped.items()},
            "first_dropped": [
                {"origin": item.origin, "reason": item.reason.value} for item in self.places
            ],
        }


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation has come."""

    documents: int
    bytes_done: int
    bytes_total: int | None
    """Known when all sources are files; then both are bytes on the disk, else bytes of text."""
    tokens: int
    seconds: float


@dataclass(frozen=True)
class PrepareResult:
    """What a preparation made."""

    ledger: Ledger
    info: TokenSetInfo
    text_bytes: int
    tokens: int
    seconds: float


def prepare(
    sources: Sequence[str],
    *,
    tokenizer: Tokenizer,
    output: Path,
    json_key: str = "text",
    split: DocumentSplit = DocumentSplit.FILE,
    append_end_of_text: bool = True,
    strict: bool = False,
    format: str = FORMAT,
    shard_size: int | None = None,
    overwrite: bool = False,
    limit: int | None = None,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> PrepareResult:
    """Turn files, globs, folders or standard input ("-") into the token set `output`."""
    reader = open_sources(sources, json_key=json_key, split=split)

    def with_bytes(state: PrepareProgress) -> None:
        if progress and reader.bytes_total is not None:
            progress(replace(state, bytes_done=reader.bytes_done, bytes_total=reader.bytes_total))
        elif progress:
            progress(state)

    return prepare_documents(
        reader,
        tokenizer=tokenizer,
        output=output,
        append_end_of_text=append_end_of_text,
        strict=strict,
        format=format,
        shard_size=shard_size,
        overwrite=overwrite,
        limit=limit,
        progress=with_bytes,
    )


def prepare_documents(
    items: Iterable[Item],
    *,
    tokenizer: Tokenizer,
    output: Path,
    append_end_of_text: bool = True,
    strict: bool = False,
    format: str = FORMAT,
    shard_size: int | None = None,
    overwrite: bool = False,
    limit: int | None = None,
    progress: Callable[[PrepareProgress], None] | None = None,
) -> PrepareResult:
    """Turn documents into the token set `output`.

    `strict` stops at the first line that would be dropped; `limit` is the most documents to take;
    `shard_size` is the most tokens in one file, for formats of several files.
    """
    writer = create_tokens(
        output,
        vocab_size=tokenizer.size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.spec,
        format=format,
        shard_size=shard_size,
        overwrite=overwrite,
    )
    mill = _Mill(
        tokenizer=tokenizer,
        writer=writer,
        ending=(tokenizer.end_of_text,) if append_end_of_text else (),
        strict=strict,
    )
    try:
        mill.run(items, limit=limit, progress=progress)
        mill.ledger.check()
        _refuse_nothing(mill.ledger)
        save_tokenizer(tokenizer, file_of(output, ".tokenizer"))
        write_json(file_of(output, ".ledger.json"), mill.ledger.as_json())
        info = writer.finish(text_bytes=mill.text_bytes)
    except BaseException:
        writer.abandon()
        raise
    return PrepareResult(
        ledger=mill.ledger,
        info=info,
        text_bytes=mill.text_bytes,
        tokens=info.tokens,
        seconds=mill.seconds,
    )


class _Mill:
    """Encodes batches of documents and keeps the counts."""

    def __init__(
        self, *, tokenizer: Tokenizer, writer: TokenWriter, ending: tuple[int, ...], strict: bool
    ) -> None:
        self.ledger = Ledger()
        self.text_bytes = 0
        self.tokens = 0
        self._tokenizer = tokenizer
        self._writer = writer
        self._ending = ending
        self._strict = strict
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def run(
        self,
        items: Iterable[Item],
        *,
        limit: int | None,
        progress: Callable[[PrepareProgress], None] | None,
    ) -> None:
        for batch in _batches(self._documents(items, limit=limit)):
            self._grind(batch)
            if progress:
                progress(self._progress())

    def _documents(self, items: Iterable[Item], *, limit: int | None) -> Iterator[Document]:
        offered = 0
        for item in items if limit != 0 else ():
            self.ledger.lines += 1
            if isinstance(item, Dropped):
                self._drop(item)
                continue
            yield item
            offered += 1
            if offered == limit:
                return

    def _grind(self, batch: Sequence[Document]) -> None:
        encoded = self._tokenizer.encode_batch([document.text for document in batch])
        for document, ids in zip(batch, encoded, strict=True):
            if not ids:
                self._drop(Dropped(Reason.EMPTY_TEXT, document.origin))
                continue
            self._writer.add([*ids, *self._ending])
            self.ledger.kept += 1
            self.tokens += len(ids) + len(self._ending)
            self.text_bytes += len(document.text.encode())

    def _drop(self, item: Dropped) -> None:
        if self._strict:
            raise UserError(
                f"this line gives no document: {item.reason.value}",
                where=item.origin,
                remedy="mend it, or prepare without strict to leave such lines out",
                exit=Exit.DATA,
            )
        self.ledger.drop(item)

    def _progress(self) -> PrepareProgress:
        return PrepareProgress(
            documents=self.ledger.kept,
            bytes_done=self.text_bytes,
            bytes_total=None,
            tokens=self.tokens,
            seconds=self.seconds,
        )


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _refuse_nothing(ledger: Ledger) -> None:
    if ledger.kept:
        return
    reasons = ", ".join(f"{count} {reason.value}" for reason, count in ledger.dropped.items())
    first = ledger.places[0].origin if ledger.places else None
    raise UserError(
        f"no document was found in {ledger.lines} lines" + (f" ({reasons})" if reasons else ""),
        where=first,
        remedy="check the sources, and for JSON lines the name of the key that holds the text",
        exit=Exit.DATA,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer beside a token set, in place of any other."""
    # A file of another tokenizer that stood here before would be opened in this one's place.
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    tokenizer.save(folder)
