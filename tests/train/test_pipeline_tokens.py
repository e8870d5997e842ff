"""Training on the token files of datatrove and dolma, as on our own of the same documents."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gristmill.config.schema import RunConfig
from gristmill.tokens.store import open_tokens
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs


@pytest.mark.parametrize("format", ["datatrove", "dolma"])
def test_losses_are_those_of_the_same_documents(
    make_run: Callable[..., RunConfig], tokens: Path, tmp_path: Path, runs: Runs, format: str
) -> None:
    reader = open_tokens(tokens)
    ids, starts = reader.read(0, len(reader)), reader.document_starts.tolist()
    folder = tmp_path / "theirs"
    folder.mkdir()
    # Two files, which meet between two documents.
    for name, (first, last) in {"a": (0, 25), "b": (25, len(starts))}.items():
        bounds = np.array([*starts, len(reader)])[first : last + 1]
        inside = (bounds - bounds[0]).tolist()
        part = ids[bounds[0] : bounds[-1]].astype("<u2").tobytes()
        if format == "datatrove":
            (folder / f"{name}.ds").write_bytes(part)
            (folder / f"{name}.ds.index").write_bytes(np.array(inside[1:], "<u8").tobytes())
        else:
            (folder / f"{name}.npy").write_bytes(part)
            rows = [f"{a},{b},id,source,0\n" for a, b in itertools.pairwise(inside)]
            (folder / f"{name}.csv.gz").write_bytes(gzip.compress("".join(rows).encode()))
    settings = ["data.documents=masked", 'train.until="6 steps"']
    Run(make_run(*settings, folder="ours")).train()
    named = [f"data.paths={json.dumps(str(folder))}", 'data.tokenizer="bytes"']
    Run(make_run(*settings, *named, folder="foreign")).train()
    ours, theirs = (runs.history(tmp_path / name) for name in ("ours", "foreign"))
    assert ours == theirs and any(line["kind"] == "step" for line in ours)
