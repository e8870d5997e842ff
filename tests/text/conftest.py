"""How the tests of single kinds of sources read: block by block, as workers do."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gristmill.text.sources.blocks import ReadError, TextBlock, Value
from gristmill.text.sources.reading import cut_source, find_sources, read_block
from gristmill.text.sources.source import ReadOptions


class BlockReading:
    """The blocks of a file up to a failure, and their rows."""

    def __init__(self, path: Path, *, begin: int = 0, line: int = 1, **options: Any) -> None:
        """Read from a position on, at which the given line is."""
        read = ReadOptions(**options)
        (source,) = find_sources([str(path)], read).sources
        self.blocks: list[TextBlock] = []
        self.rows: list[tuple[int, Sequence[Value]]] = []
        """Each with its line."""
        self.lines: list[int] = []
        """After each block the number of the next line."""
        self.counts: list[int] = []
        """After each block the number of rows so far."""
        self.failure: ReadError | None = None
        for block in cut_source(source, read, begin):
            # Blocks travel to other processes.
            there, travelled = pickle.loads(pickle.dumps((source, block)))
            rows = read_block(there, travelled, read)
            for place, values in zip(rows.places, zip(*rows.columns, strict=True), strict=True):
                self.rows.append((line + place, values))
            line += rows.lines
            self.blocks.append(block)
            self.lines.append(line)
            self.counts.append(len(self.rows))
            self.failure = rows.failure
            if self.failure:
                break

    @property
    def values(self) -> list[Value]:
        """The first column."""
        return [values[0] for _, values in self.rows]


@pytest.fixture(scope="session")
def read_blocks() -> type[BlockReading]:
    return BlockReading
