"""Sorting more rows than memory holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gristmill.text.dedup import sorting
from gristmill.text.dedup.sorting import RowSorter, read_rows, write_rows


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("largest", [2, 1000, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 300, 20_000])
def test_rows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int, largest: int, count: int
) -> None:
    monkeypatch.setattr(sorting, "_MOST_RUNS", 5)
    chance = np.random.default_rng(count)
    rows = chance.integers(0, largest, (count, columns), np.uint64, endpoint=True)
    memory = 8 * columns * 6 * 1500
    sorter = RowSorter(tmp_path / "rows", columns=columns, memory=memory)
    for begin in range(0, count, 700):
        sorter.add(rows[begin : begin + 700])
    assert (tmp_path / "rows").exists() == (count > 1500)
    pieces = list(sorter.sorted())
    expected = rows[np.lexsort(rows.T[::-1])]
    assert np.array_equal(np.concatenate([rows[:0], *pieces]), expected)
    assert all(piece.nbytes <= memory for piece in pieces)
    assert not (tmp_path / "rows").exists()


def test_a_file_of_rows(tmp_path: Path) -> None:
    rows = np.arange(20, dtype=np.uint64).reshape(-1, 2)
    write_rows(tmp_path / "rows", [rows[:3], rows[3:3], rows[3:]])
    pieces = list(read_rows(tmp_path / "rows", columns=2, most=4))
    assert [len(piece) for piece in pieces] == [4, 4, 2]
    assert np.array_equal(np.concatenate(pieces), rows)
    assert np.array_equal(
        next(read_rows(tmp_path / "rows", columns=2, most=1, offset=16)), rows[1:2]
    )
    with pytest.raises(ZeroDivisionError):
        write_rows(tmp_path / "none", (rows for _ in range(1 // 0)))
    assert not (tmp_path / "none").exists()
