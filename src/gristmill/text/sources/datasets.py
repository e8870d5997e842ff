"""Text from datasets of Hugging Face: by name as a stream, or from a folder without network.

    hf:NAME[?config=…&split=…&column=…]      split is "train" if not given
    hf:./folder                              a folder of parquet, JSON or CSV files, or one that
                                             the `datasets` library has saved

The column is the one asked for, else `text`, else the first that holds text. Only that column is
read. Rows are numbered from 0 in the order of the dataset's files; to go on in the middle, whole
blocks of rows are passed over without being turned into text. A dataset from the network is pinned
to the commit it has when it is opened, which is part of its fingerprint; of a folder it is names,
sizes and times of its files. Datasets that come as a program are not read: the library no longer
runs them. `open_hub` is the only function that touches the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

from gristmill.base.errors import Exit, Problem, UserError, optional
from gristmill.base.files import sha256_text
from gristmill.text.sources.blocks import Block, Kind, Rows
from gristmill.text.sources.source import ReadOptions, Reason, Source

PREFIX = "hf:"
_KEYS = ("config", "split", "column")
_ROWS = 1000
_TEXT_TYPES = ("string", "large_string", "string_view")
_PATH_STARTS = ("/", ".", "~")
_SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DatasetSpec:
    """Which dataset, and which part of it."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of that name, if there is one."""
        return Path(self.name) if Path(self.name).is_dir() else None


@dataclass(frozen=True)
class Opened:
    """A dataset of the library, and what says that it is still the same one."""

    rows: Any
    version: str


def is_dataset(source: str) -> bool:
    """Whether a source is spelt as a dataset."""
    return source.startswith(PREFIX)


def parse_dataset(text: str) -> DatasetSpec:
    """Read `hf:NAME?config=…&split=…&column=…`."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    wrong = [] if name else ["the name is missing"]
    found: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, _, value = part.partition("=")
        if key not in _KEYS:
            wrong.append(f"{key!r} is not one of {', '.join(_KEYS)}")
        elif not value:
            wrong.append(f"{key!r} has no value")
        elif key in found:
            wrong.append(f"{key!r} is given twice")
        else:
            found[key] = unquote_plus(value)
    if wrong:
        remedy = "write hf:NAME?config=…&split=…&column=…, all but the name as needed"
        raise UserError([Problem(what, text, remedy) for what in wrong], exit=Exit.DATA)
    return DatasetSpec(name, **found)


class DatasetText:
    """The texts of one split of a dataset."""

    def __init__(self, source: str, *, column: str | None = None) -> None:
        """Open a dataset; `column` is read if the source does not name one."""
        spec = parse_dataset(source)
        self.spec = replace(spec, column=spec.column or column)
        self.name = source
        self._datasets = optional(
            "datasets", extra="hub", purpose="reading datasets of Hugging Face"
        )
        # Progress is shown by whoever reads; the library's own bars would break its line.
        self._datasets.disable_progress_bars()
        folder = self.spec.folder
        if folder is None and self.spec.name.startswith(_PATH_STARTS):
            raise UserError("there is no such folder", where=source, exit=Exit.DATA)
        opened = (
            _open_folder(self._datasets, self.spec, folder)
            if folder
            else open_hub(self._datasets, self.spec)
        )
        self._rows = opened.rows
        self.column = self._find_column()
        identity = [self.spec.name, self.spec.config, self.spec.split, self.column, opened.version]
        self.fingerprint = sha256_text(json.dumps(identity))

    @property
    def count(self) -> int | None:
        """The number of rows, if it is known without reading them."""
        if hasattr(self._rows, "num_rows"):
            return int(self._rows.num_rows)
        splits = self._rows.info.splits or {}
        known = splits.get(self.spec.split)
        return int(known.num_examples) if known is not None and known.num_examples else None

    def documents_from(self, start: int) -> Iterator[str | Reason]:
        """The text of each row from number `start` on, or why the row has none."""
        row = 0
        for column in self._blocks():
            begin, row = row, row + len(column)
            if row <= start:
                continue
            for value in column.slice(max(0, start - begin)).to_pylist():
                yield _text_or_reason(value)

    def _blocks(self) -> Iterator[Any]:
        """The column in blocks of the Arrow library, which cost little until they are read."""
        rows = self._rows.select_columns([self.column]).with_format("arrow")
        blocks = rows.iter(batch_size=_ROWS)
        done = 0
        while True:
            try:
                table = next(blocks, None)
            except Exception as error:  # the library raises nothing more precise
                raise UserError(
                    f"cannot read on after row {done:,}: {_first_line(error)}",
                    where=self.name,
                    remedy="check the network or the files, then start the same command again",
                    exit=Exit.DATA,
                ) from error
            if table is None:
                return
            done += table.num_rows
            yield table.column(self.column)

    def _find_column(self) -> str:
        types = {field.name: str(field.type) for field in self._schema()}
        texts = [name for name, type in types.items() if type in _TEXT_TYPES]
        chosen = self.spec.column or ("text" if "text" in texts else next(iter(texts), None))
        if chosen is None or chosen not in texts:
            have = ", ".join(f"{name} ({type})" for name, type in types.items())
            what = f"the column {chosen!r} holds no text" if chosen in types else "no such column"
            raise UserError(
                f"{what}: the columns are {have}" if chosen else f"no column holds text: {have}",
                where=self.name,
                remedy="name a column of type string: hf:NAME?column=…",
                exit=Exit.DATA,
            )
        return chosen

    def _schema(self) -> Any:
        features = self._rows.features
        if features is not None:
            return features.arrow_schema
        first = next(self._rows.with_format("arrow").iter(batch_size=1), None)
        if first is None:
            raise UserError("the dataset has no rows", where=self.name, exit=Exit.DATA)
        return first.schema


class DatasetSource(Source):
    """A dataset as a source of text; its lines are its rows."""

    ending = PREFIX
    can_seek = False
    repeatable = True

    def __init__(self, name: str, options: ReadOptions) -> None:
        if len(options.keys) > 1:
            raise UserError(
                f"a dataset is read by one column, not by {len(options.keys)}",
                where=name,
                remedy="prepare one set for each column: hf:NAME?column=…",
            )
        self.path = self.size = None
        self.name = name
        column = options.keys[0] if options.keys != ReadOptions().keys else None
        self.text: DatasetText | None = DatasetText(name, column=column)

    @property
    def identity(self) -> tuple[object, ...]:
        assert self.text is not None
        return self.name, self.text.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # The rows travel in the blocks, so nobody else has to open the dataset.
        return vars(self) | {"text": None}


def _cut(source: Source, options: ReadOptions, begin: int) -> Iterator[Block]:
    assert isinstance(source, DatasetSource) and source.text is not None
    values: list[str | Reason] = []
    characters = 0
    for value in source.text.documents_from(begin):
        values.append(value)
        characters += len(value) if isinstance(value, str) else 0
        if characters >= options.block_bytes or len(values) == _ROWS:
            yield Block(begin, begin + len(values), disk=0, content=values)
            begin, values, characters = begin + len(values), [], 0
    if values:
        yield Block(begin, begin + len(values), disk=0, content=values)


def _read(source: Source, block: Block, options: ReadOptions) -> Rows:
    count = block.end - block.begin
    return Rows([block.content], range(count), count)


DATASET = Kind(cut=_cut, read=_read)


def open_hub(datasets: Any, spec: DatasetSpec) -> Opened:
    """Open a dataset on Hugging Face as a stream, at the commit it has now."""
    from huggingface_hub import HfApi

    try:
        commit = str(HfApi().dataset_info(spec.name).sha)
        rows = datasets.load_dataset(
            spec.name, spec.config, split=spec.split, revision=commit, streaming=True
        )
    except Exception as error:  # either library raises nothing more precise
        raise _unopened(spec, error) from error
    return Opened(rows, commit)


def _open_folder(datasets: Any, spec: DatasetSpec, folder: Path) -> Opened:
    try:
        if any((folder / name).is_file() for name in _SAVED):
            rows = _saved(datasets, spec, folder)
        else:
            rows = datasets.load_dataset(str(folder), spec.config, split=spec.split, streaming=True)
    except UserError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise _unopened(spec, error) from error
    return Opened(rows, _files_version(folder))


def _saved(datasets: Any, spec: DatasetSpec, folder: Path) -> Any:
    """A folder that the library saved: one split, or several by their names."""
    opened = datasets.load_from_disk(str(folder))
    if not isinstance(opened, dict):
        return opened
    if spec.split not in opened:
        raise UserError(
            f"there is no split {spec.split!r}: the splits are {', '.join(opened)}",
            where=f"{PREFIX}{spec.name}",
            remedy="name one of them: hf:NAME?split=…",
            exit=Exit.DATA,
        )
    return opened[spec.split]


def _files_version(folder: Path) -> str:
    """Names, sizes and times of all files below a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    facts = [
        [str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns]
        for file in files
    ]
    return sha256_text(json.dumps(facts))


def _text_or_reason(value: Any) -> str | Reason:
    if not isinstance(value, str):
        return Reason.WRONG_TYPE
    return value or Reason.EMPTY_TEXT


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _unopened(spec: DatasetSpec, error: BaseException) -> UserError:
    return UserError(
        f"the dataset cannot be opened: {_first_line(error)}",
        where=f"{PREFIX}{spec.name}",
        remedy="check the name, its config and split, and the network; "
        "a dataset on this machine is given as hf:./folder",
        exit=Exit.DATA,
    )
