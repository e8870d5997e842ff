"""From sources to documents: the table of kinds, and all items of some sources one by one.

    name without .gz .bz2 .xz .zst        kind
    .jsonl .ndjson                        JSON lines
    .json                                 JSON lines, an array of values, or one value after another
    .csv .tsv                             tables, the first row naming the columns
    .parquet .arrow .feather              tables; compressed in themselves, not by .gz and the like
    .txt .md and all others               plain text: a document per file, line, block, or between
                                          separators

A kind of file is a `Kind` and one row of `KINDS`. What a .json file is, its beginning tells, and so
every process finds the same. The name of standard input or of a pipe says nothing, so the first
byte decides: "{" begins JSON lines, "[" an array, anything else is plain text. Standard input is
not decompressed, since `zcat` is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources.blocks import Failure, Kind
from gristmill.text.sources.columnar import ARROW, PARQUET
from gristmill.text.sources.datasets import DATASET, PREFIX
from gristmill.text.sources.finding import find_sources
from gristmill.text.sources.json_values import JSON_BY_SHAPE, Shape, shape_of
from gristmill.text.sources.lines import JSON_LINES, SEPARATED_TEXT, TEXT_BY_SPLIT
from gristmill.text.sources.source import (
    PIPED_ARRAY,
    Document,
    DocumentSplit,
    Dropped,
    Item,
    ReadOptions,
    Reason,
    Source,
)
from gristmill.text.sources.tables import CSV, TSV

KINDS: Mapping[str, Kind] = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".csv": CSV,
    ".tsv": TSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    PIPED_ARRAY: JSON_BY_SHAPE[Shape.ARRAY],
    PREFIX: DATASET,
}
"""By the ending of the name; what is not here is plain text, but for .json."""


def kind_of(source: Source, options: ReadOptions) -> Kind:
    """How a source is cut and read."""
    if source.ending == ".json":
        return JSON_BY_SHAPE[shape_of(source, options)]
    text = SEPARATED_TEXT if options.separator else TEXT_BY_SPLIT[options.split]
    return KINDS.get(source.ending, text)


class SourceReader:
    """Iterates over all items of some sources, once, and knows how far it has come."""

    def __init__(self, sources: Sequence[Source], options: ReadOptions) -> None:
        self.sources = tuple(sources)
        self.bytes_done = 0
        """How much of `bytes_total` has been read."""
        self._options = options
        self._items = self._read()

    def __iter__(self) -> Iterator[Item]:
        return self._items

    @property
    def bytes_total(self) -> int | None:
        """The size of all files on the disk; not known with standard input."""
        return total_size(self.sources)

    def _read(self) -> Iterator[Item]:
        finished = 0
        for source in self.sources:
            kind, first = kind_of(source, self._options), 1
            for block in kind.cut(source, self._options, 0):
                rows = kind.read(source, block, self._options)
                self.bytes_done = finished + block.disk
                for place, value in zip(rows.places, rows.columns[0], strict=True):
                    origin = f"{source.name}:{first + place}"
                    if isinstance(value, Reason):
                        yield Dropped(value, origin)
                    else:
                        yield Document(value, origin)
                first += rows.lines
                if rows.failure:
                    raise failed(rows.failure, source=source, line=first)
            finished += source.size or 0


def open_sources(
    paths: Sequence[str],
    *,
    json_key: str = "text",
    split: DocumentSplit = DocumentSplit.FILE,
    options: ReadOptions | None = None,
) -> SourceReader:
    """Find all files now; read them as the result is iterated over."""
    options = options or ReadOptions(keys=(json_key,), split=split)
    return SourceReader(find_sources(paths, options), options)


def total_size(sources: Sequence[Source]) -> int | None:
    """The size of all sources on the disk, if all are files."""
    sizes = [source.size for source in sources if source.size is not None]
    return sum(sizes) if len(sizes) == len(sources) else None


def failed(failure: Failure, *, source: Source, line: int) -> UserError:
    """The error for a source that cannot be read on at a line."""
    return UserError(
        failure.what, where=f"{source.name}:{line}", remedy=failure.remedy, exit=Exit.DATA
    )
