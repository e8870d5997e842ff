"""Text from Hugging Face datasets: streamed by name, or read from a local folder.

    hf:NAME[@REVISION][?config=…&split=…&column=…]    split is "train" if not given
    hf:./folder                                       a folder of Parquet, JSON or CSV files, or one
                                                      that the `datasets` library has saved

Only one column is read: the requested one, else `text`; no other is guessed. Resuming skips whole
batches of rows without decoding them. The fingerprint contains the commit of a dataset from the
Hub, or names, sizes and times of the files in a folder.

Only `open_hub` uses the network. A dataset that `hf download` has put into the cache of Hugging
Face is read from there, with or without network, if every file of its folders is there: a part of
the documents must not pass for all of them. What is streamed is not kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

from gristmill.base.errors import DataError, Problem, UserError, optional
from gristmill.base.files import sha256_text
from gristmill.hub.client import (
    HubRepository,
    ask_hub,
    first_line,
    parse_repository,
    quiet_library,
)
from gristmill.text.sources.corpora import config_files
from gristmill.text.sources.lines import text_or_reason
from gristmill.text.sources.source import (
    ReadOptions,
    Source,
    SourceFormat,
    TextBlock,
    TextRows,
    Value,
)

PREFIX = "hf:"
_KEYS = ("config", "split", "column")
_BATCH_ROWS = 1000
_TIMEOUT = 30
"""Seconds; the library would wait for ever."""
_TEXT_TYPES = ("string", "large_string", "string_view")
_CARD = "README.md"
"""Says which files belong to which config."""
_PATH_STARTS = ("/", ".", "~")
_SAVED = ("dataset_dict.json", "state.json")


@dataclass(frozen=True)
class DatasetSpec:
    """Which dataset, and which part of it."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None
    revision: str | None = None
    """A branch, a tag or a commit on the Hub."""

    @property
    def is_path(self) -> bool:
        """Whether this can only be a local folder."""
        return self.name.startswith(_PATH_STARTS) or Path(self.name).is_dir()


class OpenedDataset(NamedTuple):
    """A dataset of the library, and what changes with its content."""

    rows: Any
    version: str


def parse_dataset(text: str) -> DatasetSpec:
    """Parse `hf:NAME@REVISION?config=…&split=…&column=…`."""
    name, _, query = text.removeprefix(PREFIX).partition("?")
    wrong = [] if name else ["the name is missing"]
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, _, value = part.partition("=")
        if key not in _KEYS:
            wrong.append(f"{key!r} is not one of {', '.join(_KEYS)}")
        elif not value:
            wrong.append(f"{key!r} has no value")
        elif key in options:
            wrong.append(f"{key!r} is given twice")
        else:
            options[key] = unquote_plus(value)
    if wrong:
        remedy = "write hf:NAME@REVISION?config=…&split=…&column=…; only the name must be given"
        raise DataError([Problem(what, text, remedy) for what in wrong])
    spec = DatasetSpec(name, **options)
    if spec.is_path:
        return spec
    repository = parse_repository(name)
    if repository is None:
        what = f"{name!r} is no name of a dataset on Hugging Face"
        raise DataError(what, where=text, remedy="a local dataset is given as hf:./folder")
    return replace(spec, name=repository.name, revision=repository.revision)


def is_dataset(name: str) -> bool:
    """Whether the name of a source is that of a dataset; hf:// begins an address of files."""
    return name.startswith(PREFIX) and not name.startswith(f"{PREFIX}//")


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
        # The library's own progress bars and log lines would break the line of ours.
        datasets.disable_progress_bars()
        quiet_library("datasets")
        folder = Path(spec.name)
        if folder.is_dir() and spec.revision is None:
            opened = _open_folder(datasets, spec, folder)
        elif spec.is_path:
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
                    f"cannot read any further after row {done:,}: {first_line(error)}",
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
    """Open a dataset of the Hugging Face Hub at the commit of its revision: from the cache if it is
    there, else streamed."""
    from huggingface_hub import HfApi

    files = config_files(spec.name, spec.config)
    repository = HubRepository(
        spec.name,
        spec.revision,
        kind="dataset",
        files=(_CARD, files) if files else (),
        config=spec.config,
    )
    remedy = "check the name; a local dataset is given as hf:./folder"
    ask = partial(ask_hub, repository=repository, where=f"{PREFIX}{repository}", remedy=remedy)
    try:
        info: Any = ask(
            lambda: HfApi().dataset_info(spec.name, revision=spec.revision, timeout=_TIMEOUT)
        )
        if info.gated:
            ask(lambda: HfApi().auth_check(info.id, repo_type="dataset"))
    except DataError:
        opened = _open_cached(datasets, spec, repository, offline=True)
        if opened is None:
            raise
        return opened
    # Old names have no owner: the Hub tells the new one, which the library needs.
    pinned = replace(repository, name=info.id, revision=info.sha)
    opened = _open_cached(datasets, spec, pinned, offline=False)
    return opened or OpenedDataset(
        ask(lambda: _rows(_builder(datasets, spec, info.id, revision=info.sha), spec)), info.sha
    )


def _open_cached(
    datasets: Any, spec: DatasetSpec, repository: HubRepository, *, offline: bool
) -> OpenedDataset | None:
    """A dataset in the cache of Hugging Face; None if it is not there, or not all of it."""
    import huggingface_hub

    chosen: Any = {"repo_type": repository.kind, "revision": repository.revision}
    try:
        snapshot = huggingface_hub.snapshot_download(
            repository.name, allow_patterns=[_CARD], local_files_only=True, **chosen
        )
        listing = huggingface_hub.get_cached_repo_tree(repository.name, **chosen)
    except Exception:  # not there, or the library is too old to know what should be
        return None
    folder = Path(snapshot).resolve()
    try:
        wanted = _config_files(folder, spec.config or "default")
        builder = _builder(datasets, spec, str(folder), data_files=wanted)
        files = [Path(file) for group in builder.config.data_files.values() for file in group]
    except UserError:
        if offline:
            raise
        return None
    except Exception:  # none of its files are there, or not those that tell about its configs
        return None
    kinds = {(file.parent, file.suffix) for file in files}
    paths = [folder / file.path for file in listing]
    missing = [p for p in paths if (p.parent, p.suffix) in kinds and not p.is_file()]
    if not missing:
        return OpenedDataset(_rows(builder, spec), folder.name)
    if not offline:
        return None
    names = ", ".join(str(path.relative_to(folder)) for path in missing[:3])
    patterns = {str(path.parent.relative_to(folder) / f"*{path.suffix}") for path in missing}
    lacking = replace(repository, files=(_CARD, *sorted(patterns)))
    raise DataError(
        f"the cache lacks {len(missing)} of the dataset's files: {names}"
        + (", …" if len(missing) > 3 else ""),
        where=f"{PREFIX}{repository}",
        remedy=f"with network, {lacking.download_remedy}",
    )


def _config_files(folder: Path, config: str) -> Any:
    """The patterns of a config's files in the card of a dataset, if it has any; otherwise the
    library would look at those of the first config, which may not be there."""
    from huggingface_hub import DatasetCard

    if not (folder / _CARD).is_file():
        return None
    card: dict[str, Any] = DatasetCard.load(folder / _CARD).data.to_dict()
    entries = card.get("configs", [])
    return next(
        (entry.get("data_files") for entry in entries if entry["config_name"] == config), None
    )


def _open_folder(datasets: Any, spec: DatasetSpec, folder: Path) -> OpenedDataset:
    try:
        if any((folder / name).is_file() for name in _SAVED):
            rows = datasets.load_from_disk(str(folder))
        else:
            rows = _rows(_builder(datasets, spec, str(folder)), spec)
    except UserError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise DataError(
            f"the dataset cannot be opened: {first_line(error)}",
            where=f"{PREFIX}{spec.name}",
            remedy="check its files, its config and its split",
        ) from error
    if isinstance(rows, dict):
        if spec.split not in rows:
            raise _no_split(spec, rows)
        rows = rows[spec.split]
    files = [
        [str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns]
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]
    return OpenedDataset(rows, sha256_text(json.dumps(files)))


def _builder(
    datasets: Any,
    spec: DatasetSpec,
    path: str,
    *,
    revision: str | None = None,
    data_files: Any = None,
) -> Any:
    """What knows the splits of a config, in a folder or on the Hub."""
    try:
        return datasets.load_dataset_builder(
            path, spec.config, revision=revision, data_files=data_files
        )
    except RuntimeError as error:
        if "scripts" not in str(error):
            raise
        raise DataError(
            "the rows of this dataset are made by a program, which is not run",
            where=f"{PREFIX}{spec.name}",
            remedy=f"the Hub may have a copy in Parquet: hf:{spec.name}@refs/convert/parquet",
        ) from error
    except ValueError as error:
        configs = datasets.get_dataset_config_names(path, revision=revision)
        if spec.config in configs or (spec.config is None and len(configs) == 1):
            raise
        what = f"there is no config {spec.config!r}" if spec.config else "it has several configs"
        raise DataError(
            f"{what}: the configs (subsets) are {', '.join(configs)}",
            where=f"{PREFIX}{spec.name}",
            remedy="name one of them: hf:NAME?config=…",
        ) from error


def _rows(builder: Any, spec: DatasetSpec) -> Any:
    try:
        return builder.as_streaming_dataset(split=spec.split)
    except ValueError as error:
        splits = builder.as_streaming_dataset()
        if spec.split in splits:
            raise
        raise _no_split(spec, splits) from error


def _no_split(spec: DatasetSpec, splits: Iterable[str]) -> DataError:
    return DataError(
        f"there is no split {spec.split!r}: the splits are {', '.join(splits)}",
        where=f"{PREFIX}{spec.name}",
        remedy="name one of them: hf:NAME?split=…",
    )
