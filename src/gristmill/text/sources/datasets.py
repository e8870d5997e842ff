"""Text from Hugging Face datasets: streamed by name, or read from a local folder.

    hf:NAME[?config=…&split=…&column=…]      split is "train" if not given
    hf:./folder                              a folder of Parquet, JSON or CSV files, or one that
                                             the `datasets` library has saved

Only one column is read: the requested one, else `text`; no other is guessed. Resuming skips whole
batches of rows without decoding them. The fingerprint contains the commit of a dataset from the
Hub, or names, sizes and times of the files in a folder. Only `open_hub` uses the network.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from gristmill.base.errors import DataError, Problem, UserError, optional
from gristmill.base.files import sha256_text
from gristmill.text.sources.blocks import SourceFormat, TextBlock, TextRows, Value
from gristmill.text.sources.lines import text_or_reason
from gristmill.text.sources.source import ReadOptions, Source

PREFIX = "hf:"
_KEYS = ("config", "split", "column")
_BATCH_ROWS = 1000
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


class OpenedDataset(NamedTuple):
    """A dataset of the library, and what changes with its content."""

    rows: Any
    version: str


def parse_dataset(text: str) -> DatasetSpec:
    """Parse `hf:NAME?config=…&split=…&column=…`."""
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
        remedy = "write hf:NAME?config=…&split=…&column=…; everything but the name is optional"
        raise DataError([Problem(what, text, remedy) for what in wrong])
    return DatasetSpec(name, **found)


class DatasetSource(Source):
    """One split of a dataset; its lines are its rows."""

    extension = PREFIX
    can_seek = False
    repeatable = True

    def __init__(self, name: str, options: ReadOptions) -> None:
        if len(options.keys) > 1:
            raise UserError(
                f"only one column of a dataset can be read, not {len(options.keys)}",
                where=name,
                remedy="prepare one set for each column: hf:NAME?column=…",
            )
        self.path = self.size = None
        self.name = name
        spec = parse_dataset(name)
        datasets = optional("datasets", extra="hub", purpose="reading Hugging Face datasets")
        # The library's own progress bars would break the line of ours.
        datasets.disable_progress_bars()
        folder = Path(spec.name)
        if folder.is_dir():
            opened = _open_folder(datasets, spec, folder)
        elif spec.name.startswith(_PATH_STARTS):
            raise DataError("there is no such folder", where=name)
        else:
            opened = open_hub(datasets, spec)
        self._rows = opened.rows
        asked = options.keys[0] if options.keys != ReadOptions().keys else None
        self.column = self._find_column(spec.column or asked)
        facts = [spec.name, spec.config, spec.split, self.column, opened.version]
        self.fingerprint = sha256_text(json.dumps(facts))

    @property
    def identity(self) -> tuple[object, ...]:
        return self.name, self.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # Blocks carry the rows, so workers need not open the dataset.
        return vars(self) | {"_rows": None}

    def documents_from(self, start: int) -> Iterator[Value]:
        """The text of each row from number `start` on, or why the row has none."""
        # Arrow batches cost little until they are converted.
        rows = self._rows.select_columns([self.column]).with_format("arrow")
        batches = rows.iter(batch_size=_BATCH_ROWS)
        done = 0
        while True:
            try:
                table = next(batches, None)
            except Exception as error:  # the library raises nothing more precise
                raise DataError(
                    f"cannot read any further after row {done:,}: {_first_line(error)}",
                    where=self.name,
                    remedy="check the network or the files, then start the same command again",
                ) from error
            if table is None:
                return
            begin, done = done, done + table.num_rows
            if done > start:
                column = table.column(self.column).slice(max(0, start - begin))
                for value in column.to_pylist():
                    yield text_or_reason(value, check_surrogates=False)

    def _find_column(self, asked: str | None) -> str:
        features = self._rows.features
        if features is not None:
            schema = features.arrow_schema
        else:
            first = next(self._rows.with_format("arrow").iter(batch_size=1), None)
            if first is None:
                raise DataError("the dataset has no rows", where=self.name)
            schema = first.schema
        types = {field.name: str(field.type) for field in schema}
        chosen = asked or ReadOptions().keys[0]
        if types.get(chosen) not in _TEXT_TYPES:
            have = ", ".join(f"{name} ({type})" for name, type in types.items())
            holds = f"the column {chosen!r} holds no text"
            what = holds if chosen in types else f"there is no column {chosen!r}"
            raise DataError(
                f"{what}; the columns are: {have}",
                where=self.name,
                remedy="name a column of type string: hf:NAME?column=…, or --json-key",
            )
        return chosen


def _cut(source: Source, options: ReadOptions, begin: int) -> Iterator[TextBlock]:
    assert isinstance(source, DatasetSource)
    values: list[Value] = []
    characters = 0
    for value in source.documents_from(begin):
        values.append(value)
        characters += len(value) if isinstance(value, str) else 0
        if characters >= options.block_bytes or len(values) == _BATCH_ROWS:
            yield _block(begin, values)
            begin, values, characters = begin + len(values), [], 0
    if values:
        yield _block(begin, values)


def _block(begin: int, values: list[Value]) -> TextBlock:
    rows = TextRows([values], range(len(values)), len(values))
    return TextBlock(begin, begin + len(values), disk=0, content=rows)


DATASET = SourceFormat(_cut)


def open_hub(datasets: Any, spec: DatasetSpec) -> OpenedDataset:
    """Stream a dataset from the Hugging Face Hub, at its current commit."""
    from huggingface_hub import HfApi

    try:
        commit = str(HfApi().dataset_info(spec.name).sha)
        rows = datasets.load_dataset(
            spec.name, spec.config, split=spec.split, revision=commit, streaming=True
        )
    except Exception as error:  # neither library raises anything more precise
        raise _cannot_open(spec, error) from error
    return OpenedDataset(rows, commit)


def _open_folder(datasets: Any, spec: DatasetSpec, folder: Path) -> OpenedDataset:
    try:
        if any((folder / name).is_file() for name in _SAVED):
            rows = datasets.load_from_disk(str(folder))
        else:
            rows = datasets.load_dataset(str(folder), spec.config, split=spec.split, streaming=True)
    except Exception as error:  # the library raises nothing more precise
        raise _cannot_open(spec, error) from error
    if isinstance(rows, dict):
        if spec.split not in rows:
            raise DataError(
                f"there is no split {spec.split!r}: the splits are {', '.join(rows)}",
                where=f"{PREFIX}{spec.name}",
                remedy="name one of them: hf:NAME?split=…",
            )
        rows = rows[spec.split]
    files = [
        [str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]
    return OpenedDataset(rows, sha256_text(json.dumps(files)))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _cannot_open(spec: DatasetSpec, error: BaseException) -> UserError:
    return DataError(
        f"the dataset cannot be opened: {_first_line(error)}",
        where=f"{PREFIX}{spec.name}",
        remedy="check the name, its config and split, and the network; "
        "a local dataset is given as hf:./folder",
    )
