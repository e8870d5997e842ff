"""What the tests of single kinds of sources share: reading block by block, as workers do, and
compressed, damaged and prepared files."""

from __future__ import annotations

import bz2
import gzip
import lzma
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.sources.reading import cut_source, find_sources, read_block
from gristmill.text.sources.source import ReadError, ReadOptions, TextBlock, Value
from gristmill.text.tokenizers.tokenizer import ByteTokenizer


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


class Compression(NamedTuple):
    """A way to compress a file."""

    suffix: str
    compress: Callable[[bytes], bytes]


@pytest.fixture(params=[".gz", ".bz2", ".xz", ".zst"])
def compression(request: pytest.FixtureRequest) -> Compression:
    if request.param == ".zst":
        compressor = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)
        return Compression(".zst", compressor.compress)
    functions = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return Compression(request.param, functions[request.param])


@pytest.fixture(params=["cut", "flipped"])
def damage(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    """What happens to a compressed file."""

    def damaged(content: bytes) -> bytes:
        if request.param == "cut":
            return content[:-30]
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]

    return damaged


@pytest.fixture
def prepared_alike(tmp_path: Path) -> Callable[..., None]:
    """Checks that one process and two make the same token files of the columns `text` and
    `title`."""

    def check(path: Path, *, kept: int) -> None:
        made = []
        for workers in (1, 2):
            request = PrepareRequest(
                [str(path)],
                tmp_path / f"set-{workers}",
                ByteTokenizer(),
                options=ReadOptions(keys=("text", "title")),
                workers=workers,
            )
            assert [key.ledger.kept for key in prepare(request).keys] == [kept, kept]
            files = [tmp_path / f"set-{workers}_{key}.bin" for key in ("text", "title")]
            made.append([file.read_bytes() for file in files])
        assert made[0] == made[1]

    return check
