"""From source names to documents: finding the sources, and the format of each.

    a file, a folder, a glob      files; those of a folder or glob in sorted order
    -                             standard input
    hf:NAME, hf:./folder          a Hugging Face dataset

The extension of a name, without .gz .bz2 .xz .zst, decides the format (`FORMATS`). A .json file
holds JSON lines, an array of values, or one value after another. A missing source is an error
before any work begins. Folders are searched recursively, without hidden files. The name of standard
input or a pipe says nothing, so the first byte decides: "{" begins JSON lines, "[" an array,
anything else is plain text. Standard input is not decompressed.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from gristmill.base.errors import DataError, UserError
from gristmill.text.sources.blocks import (
    ReadError,
    SourceFormat,
    TextBlock,
    TextRows,
    damaged,
    failed_rows,
)
from gristmill.text.sources.columnar import ARROW, PARQUET
from gristmill.text.sources.datasets import DATASET, PREFIX, DatasetSource
from gristmill.text.sources.json_values import ARRAY, CONCATENATED, json_format
from gristmill.text.sources.lines import JSON_LINES, SEPARATED_TEXT, TEXT_BY_SPLIT
from gristmill.text.sources.source import (
    BLOCK_BYTES,
    DAMAGE,
    Document,
    Dropped,
    Item,
    ReadOptions,
    Reason,
    Source,
)
from gristmill.text.sources.tables import CSV, TSV

STDIN = "-"
FORMATS: Mapping[str, SourceFormat] = {
    ".jsonl": JSON_LINES,
    ".ndjson": JSON_LINES,
    ".json-array": ARRAY,
    ".json-values": CONCATENATED,
    ".csv": CSV,
    ".tsv": TSV,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".feather": ARROW,
    PREFIX: DATASET,
}
"""By extension; any other is plain text."""


def find_sources(names: Sequence[str], options: ReadOptions) -> list[Source]:
    """The sources that names stand for, in order."""
    return [source for name in names for source in _find(name, options)]


def _find(name: str, options: ReadOptions) -> Sequence[Source]:
    if name == STDIN:
        return [Source(None)]
    if name.startswith(PREFIX):
        return [DatasetSource(name, options)]
    place = Path(name)
    if place.is_dir():
        files = [
            file
            for file in place.rglob("*")
            if not any(part.startswith(".") for part in file.relative_to(place).parts)
        ]
        missing = "this folder holds no files"
    elif place.exists():
        return [_file(place)]
    else:
        files = [Path(match) for match in glob.glob(name, recursive=True)]
        missing = "no file matches" if glob.has_magic(name) else "no such file or folder"
    found = sorted(file for file in files if file.is_file())
    if not found:
        raise DataError(missing, where=name)
    return [_file(file) for file in found]


def _file(path: Path) -> Source:
    source = Source(path)
    if source.extension == ".json":
        source.extension = json_format(path)
    return source


def format_of(source: Source, options: ReadOptions) -> SourceFormat:
    """How a source is cut and read."""
    text = SEPARATED_TEXT if options.separator else TEXT_BY_SPLIT[options.split]
    return FORMATS.get(source.extension, text)


def cut_source(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    """The blocks of a source from a position on; a failure is the last of them."""
    position, disk = begin, 0
    try:
        for block in format_of(source, options).cut(source, options, begin):
            rows = block.content
            if isinstance(rows, TextRows) and rows.failure:
                block = replace(block, content=replace(rows, failure=_cause(rows.failure, source)))
            yield block
            position, disk = block.end, block.disk
    except (ReadError, *DAMAGE) as error:
        rows = failed_rows(options, _cause(error, source))
        yield TextBlock(position, position, disk, rows)


def read_block(source: Source, block: TextBlock, options: ReadOptions) -> TextRows:
    """The rows of a block, up to a failure."""
    if isinstance(block.content, TextRows):
        return block.content
    read = format_of(source, options).read
    assert read is not None
    try:
        rows = read(source, block, options)
    except (ReadError, *DAMAGE) as error:
        rows = failed_rows(options, error)
    return replace(rows, failure=_cause(rows.failure, source)) if rows.failure else rows


def _cause(failure: Exception, source: Source) -> ReadError:
    """Why a source cannot be read; what damaged data decompresses to is seldom valid."""
    if not isinstance(failure, ReadError):
        return damaged(failure)
    if source.path and source.size is not None and not source.can_seek:
        try:
            with closing(source.open()) as stream:
                while stream.read(BLOCK_BYTES):
                    pass
        except DAMAGE as error:
            return damaged(error)
    return failure


class SourceReader:
    """Finds all files now, reads them when it is iterated over, and tells how far it is."""

    def __init__(self, names: Sequence[str], options: ReadOptions | None = None) -> None:
        self._options = options or ReadOptions()
        self._sources = find_sources(names, self._options)
        self.bytes_done = 0
        """How much of `bytes_total` has been read."""
        sizes = [source.size for source in self._sources if source.size is not None]
        self.bytes_total = sum(sizes) if len(sizes) == len(self._sources) else None
        """The size of all files on disk; None with standard input."""

    def __iter__(self) -> Iterator[Item]:
        finished = 0
        for source in self._sources:
            first = 1
            for block in cut_source(source, self._options, 0):
                rows = read_block(source, block, self._options)
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


def failed(failure: ReadError, *, source: Source, line: int) -> UserError:
    """The error for a source that cannot be read beyond a line."""
    return DataError(failure.what, where=f"{source.name}:{line}", remedy=failure.remedy)
