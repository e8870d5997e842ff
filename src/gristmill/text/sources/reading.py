"""From source names to documents: finding the sources, and the format of each.

    a file, a folder, a glob      files; those of a folder or glob in sorted order
    -                             standard input
    hf:NAME, hf:./folder          a Hugging Face dataset
    s3:// gs:// hf:// https://    objects of a store, or those below a folder or of a pattern

The extension of a name, without .gz .bz2 .xz .zst, decides the format (`FORMATS`). A .json file
holds JSON lines, an array of values, or one value after another. A missing source is an error
before any work begins. Folders are searched recursively, without hidden files. Links to files are
read; links to folders are not followed, since they may lead in a circle. What is left out, hidden
files apart, is listed. The name of standard input or a pipe says nothing, so the first byte
decides: "{" begins JSON lines, "[" an array, anything else is plain text. Standard input is not
decompressed.
"""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gristmill.base.errors import DataError
from gristmill.hub.objects import scheme_of
from gristmill.text.sources.corpora import known_corpora
from gristmill.text.sources.datasets import DATASET, PREFIX, DatasetSource, is_dataset
from gristmill.text.sources.lines import (
    ARRAY,
    CONCATENATED,
    JSON_LINES,
    SEPARATED_TEXT,
    TEXT_BY_SPLIT,
    json_format,
)
from gristmill.text.sources.remote import remote_sources
from gristmill.text.sources.source import (
    BLOCK_BYTES,
    DAMAGE,
    LINE_LIMIT,
    Document,
    DocumentSplit,
    Dropped,
    Item,
    Note,
    ReadError,
    ReadOptions,
    Reason,
    Skipped,
    SkipReason,
    Source,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
    damaged,
    failed_rows,
    tell,
)
from gristmill.text.sources.tables import ARROW, CSV, PARQUET, TSV

STDIN = "-"
_WHOLE_TEXT = TEXT_BY_SPLIT[DocumentSplit.FILE]
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


class FoundSources(NamedTuple):
    """The sources that names stand for, in order, and what was left out of folders."""

    sources: list[Source]
    skipped: list[Skipped]


def find_sources(names: Sequence[str], options: ReadOptions, *, note: Note = tell) -> FoundSources:
    """Find all sources; one that is named and not there is an error."""
    result = FoundSources([], [])
    for name in names:
        if not name.strip():
            raise DataError(
                "the name of a source is empty",
                where="SOURCE",
                remedy="check the variable it may come from; the current folder is: .",
            )
        if name == STDIN:
            result.sources.append(Source(None, note=note))
        elif scheme_of(name):
            result.sources.extend(remote_sources(name))
        elif is_dataset(name):
            result.sources.append(DatasetSource(name, options))
        elif Path(name).exists() and not Path(name).is_dir():
            result.sources.append(_file(Path(name), note))
        else:
            files, skipped = _files_of(name)
            result.sources.extend(map(_file, files))
            result.skipped.extend(skipped)
    return result


def _files_of(name: str) -> tuple[list[Path], list[Skipped]]:
    """The files of a folder or a pattern, of which there must be some, and what is left out."""
    is_folder, near = Path(name).is_dir(), list[str]()
    files, skipped = _files_below(Path(name)) if is_folder else _files_matching(name)
    if files:
        return files, skipped
    missing = "no file matches" if glob.has_magic(name) else "no such file or folder"
    if is_folder:
        missing = "this folder holds no files"
    else:
        near = difflib.get_close_matches(name, known_corpora(), n=2, cutoff=0.6)
    reason = f" that can be read: {skipped[0].origin}: {skipped[0].what}" if skipped else ""
    raise DataError(
        missing + reason,
        where=name,
        remedy=f"did you mean the corpus {' or '.join(near)}?" if near else None,
    )


def _files_below(place: Path) -> tuple[list[Path], list[Skipped]]:
    """All files in a folder that are not hidden, and what is left out."""
    files: list[Path] = []
    skipped: list[Skipped] = []

    def unreadable(error: OSError) -> None:
        what = f"cannot read: {error.strerror}"
        skipped.append(Skipped(SkipReason.UNREADABLE_FOLDER, str(error.filename), what))

    for folder, folders, names in os.walk(place, onerror=unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(folder, name) for name in folders):
            if path.is_symlink():
                what = "links to folders are not followed; give the folder as a source of its own"
                skipped.append(Skipped(SkipReason.LINKED_FOLDER, str(path), what))
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.is_file():
                files.append(path)
            else:
                skipped.append(_no_file(path))
    return sorted(files), skipped


def _files_matching(pattern: str) -> tuple[list[Path], list[Skipped]]:
    """All files that match a pattern, and what else does."""
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    files = [path for path in matches if path.is_file()]
    above = {folder for file in files for folder in file.parents}
    skipped = [_no_file(path) for path in matches if path not in above and not path.is_file()]
    root, below, _ = pattern.partition("**")
    if below and not glob.has_magic(root):
        # The library passes over them in silence.
        _, others = _files_below(Path(root))
        skipped += [item for item in others if item.reason is SkipReason.UNREADABLE_FOLDER]
    return files, skipped


def _no_file(path: Path) -> Skipped:
    if path.is_dir():
        what = "a pattern reads files only; give the folder as a source of its own"
        return Skipped(SkipReason.UNSEARCHED_FOLDER, str(path), what)
    if path.is_symlink():
        return Skipped(SkipReason.BROKEN_LINK, str(path), "the file it leads to does not exist")
    return Skipped(SkipReason.SPECIAL_FILE, str(path), "this is not a regular file")


def _file(path: Path, note: Note = tell) -> Source:
    source = Source(path, note=note)
    if source.extension == ".json" and not source.unreadable:
        source.extension = json_format(source)
    return source


def format_of(source: Source, options: ReadOptions) -> SourceFormat:
    """How a source is cut and read."""
    text = SEPARATED_TEXT if options.separator else TEXT_BY_SPLIT[options.split]
    return FORMATS.get(source.extension, text)


def cut_source(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    """The blocks of a source from a position on; a failure is the last of them."""
    position, disk = begin, 0
    try:
        if source.unreadable:
            raise source.unreadable
        if options.portion is not None and format_of(source, options) is not _WHOLE_TEXT:
            raise ReadError(
                "only the end of a plain text file, which is one document, can be held out",
                remedy="hold documents out instead: --split 9,1",
            )
        for block in format_of(source, options).cut(source, options, begin):
            rows = block.content
            if isinstance(rows, TextRows) and rows.failure:
                cause = _cause(rows.failure, source, block.begin)
                block = replace(block, content=replace(rows, failure=cause))
            yield block
            position, disk = block.end, block.disk
    except (ReadError, *DAMAGE) as error:
        rows = failed_rows(options, _cause(error, source, position))
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
    if rows.failure:
        rows = replace(rows, failure=_cause(rows.failure, source, block.begin))
    return rows


def _cause(failure: Exception, source: Source, position: int) -> ReadError:
    """Why a source cannot be read beyond a position; what damaged data decompresses to is seldom
    valid."""
    if not isinstance(failure, ReadError):
        return damaged(failure)
    if source.size is not None and not source.can_seek:
        try:
            with closing(source.open(position)) as stream:
                # Not to the end: a small file can decompress to terabytes.
                for _ in range(LINE_LIMIT // BLOCK_BYTES):
                    if not stream.read(BLOCK_BYTES):
                        break
        except DAMAGE as error:
            return damaged(error)
    return failure


class SourceRow(NamedTuple):
    """One row of a source, under the first key."""

    value: Value
    origin: str
    """The file and the line where it begins, as file:line; the first line is 1."""
    disk: int
    """Bytes on disk up to the end of its block, for progress."""


def read_rows(source: Source, options: ReadOptions) -> Iterator[SourceRow]:
    """The rows of a source from its beginning; one that cannot be read to its end is an error."""
    first = 1
    for block in cut_source(source, options, 0):
        rows = read_block(source, block, options)
        for place, value in zip(rows.places, rows.columns[0], strict=True):
            yield SourceRow(value, f"{source.name}:{first + place}", block.disk)
        first += rows.lines
        if rows.failure:
            what, remedy = rows.failure.what, rows.failure.remedy
            raise DataError(what, where=f"{source.name}:{first}", remedy=remedy)


class SourceReader:
    """Finds all files now, reads them when it is iterated over, and tells how far it is."""

    def __init__(self, names: Sequence[str], options: ReadOptions | None = None) -> None:
        self._options = options or ReadOptions()
        self._sources, self.skipped = find_sources(names, self._options)
        self.repeatable = all(source.repeatable for source in self._sources)
        self.bytes_done = 0
        """How much of `bytes_total` has been read."""
        sizes = [source.size for source in self._sources if source.size is not None]
        self.bytes_total = sum(sizes) if len(sizes) == len(self._sources) else None
        """The size of all files on disk; None with standard input."""

    def __iter__(self) -> Iterator[Item]:
        finished = 0
        for source in self._sources:
            for row in read_rows(source, self._options):
                self.bytes_done = finished + row.disk
                if isinstance(row.value, Reason):
                    yield Dropped(row.value, row.origin)
                else:
                    yield Document(row.value, row.origin)
            finished += source.size or 0
            self.bytes_done = finished
