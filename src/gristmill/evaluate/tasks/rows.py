"""The rows of a task: a JSON-lines file, or a dataset on Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.base.errors import DataError, optional
from gristmill.base.files import open_bytes, sha256_file, sha256_text
from gristmill.base.hub import quiet_library
from gristmill.text.sources.datasets import PREFIX, DatasetSpec, open_hub


@dataclass(frozen=True)
class TaskRows:
    """JSON objects, and where each of them is."""

    source: str
    sha256: str
    """Of the file's bytes, or of the rows of a dataset."""
    rows: Sequence[Mapping[str, Any]]

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(self.rows, start=1):
            yield f"{self.source}, line {number}", row

    @property
    def facts(self) -> dict[str, Any]:
        return {"data": self.source, "data_sha256": self.sha256}


def read_rows(path: Path) -> TaskRows:
    """The rows of a JSON-lines file, which may be compressed."""
    if not path.is_file():
        raise DataError("there is no such file", where=path)
    rows: list[Mapping[str, Any]] = []
    with open_bytes(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"not JSON: {error}", where=f"{path}, line {number}") from error
            if not isinstance(row, dict):
                raise DataError("not a JSON object", where=f"{path}, line {number}")
            rows.append(row)
    if not rows:
        raise DataError("the file has no rows", where=path)
    return TaskRows(str(path), sha256_file(path), rows)


def hub_rows(name: str, *, split: str, task: str) -> TaskRows:
    """The rows of a dataset on Hugging Face, from its cache or the network."""
    datasets = optional("datasets", extra="hub", purpose="reading a task from Hugging Face")
    datasets.disable_progress_bars()
    quiet_library("datasets")
    try:
        opened = open_hub(datasets, DatasetSpec(name, split=split))
    except DataError as error:
        last = error.problems[-1]
        remedy = f"{last.remedy}; or name a local file: {task}=FILE.jsonl"
        raise DataError([*error.problems[:-1], replace(last, remedy=remedy)]) from error
    rows = [dict(row) for row in opened.rows]
    content = json.dumps(rows, sort_keys=True, ensure_ascii=False)
    return TaskRows(f"{PREFIX}{name}@{opened.version}", sha256_text(content), rows)
