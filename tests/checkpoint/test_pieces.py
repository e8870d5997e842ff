"""Whether pieces make up a whole, against counting every element."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.tensor_slices import TensorSlice
from gristmill.checkpoint.pieces import (
    Index,
    StoredPiece,
    StoredTensor,
    TensorReport,
    file_name,
    find_faults,
    merge_reports,
    piece_key,
    read_index,
    write_index,
)


def index_of(shape: tuple[int, ...], boxes: list[TensorSlice]) -> Index:
    pieces = [StoredPiece("file", piece_key("x", box, shape), box) for box in boxes]
    return {"x": StoredTensor("F32", shape, pieces)}


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[TensorSlice]]:
    """A shape cut into boxes again and again, and then perhaps spoiled."""
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple))
    boxes = [TensorSlice.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.begin[dim], box.end[dim]))
        ends = [at if d == dim else e for d, e in enumerate(box.end)]
        begins = [at if d == dim else b for d, b in enumerate(box.begin)]
        boxes += [TensorSlice(box.begin, tuple(ends)), TensorSlice(tuple(begins), box.end)]
    spoil = draw(st.sampled_from(["not", "lose", "repeat", "move"]))
    if spoil != "not":
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        steps = [draw(st.integers(-1, 1)) for _ in shape]
        boxes += {"lose": [], "repeat": [box, box], "move": [box.shift(steps)]}[spoil]
    return shape, draw(st.permutations(boxes))


@given(divisions())
def test_complete_means_every_element_once(
    division: tuple[tuple[int, ...], list[TensorSlice]],
) -> None:
    shape, boxes = division
    counts = np.zeros([size + 2 for size in shape], dtype=int)
    for box in boxes:
        counts[box.shift([1] * len(shape)).slices] += 1
    expected = np.zeros_like(counts)
    expected[tuple(slice(1, size + 1) for size in shape)] = 1
    empty_outside = any(box.size == 0 for box in boxes)
    if not empty_outside:
        assert (find_faults(index_of(shape, boxes)) == []) == (counts == expected).all()
    elif not (counts == expected).all():
        assert find_faults(index_of(shape, boxes))


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    reports: list[dict[str, TensorReport]] = [
        {"a": ("F32", (4, 2), [((0, 0), (3, 2))]), "b": ("I64", (), [])},
        {"a": ("F32", (4, 2), [((3, 0), (4, 2))]), "b": ("I64", (), [((), ())])},
    ]
    index = merge_reports("model", reports)
    assert merge_reports("model", json.loads(json.dumps(reports))) == index
    write_index(tmp_path / "pieces.json", {"model": index, "optimizer": {}})
    assert read_index(tmp_path, "model") == index
    assert read_index(tmp_path, "optimizer") == {}
    keys = [(piece.file, piece.key) for one in index.values() for piece in one.pieces]
    assert keys == [
        ("model-00001-of-00002.safetensors", "a[0:3,0:2]"),
        ("model-00002-of-00002.safetensors", "a[3:4,0:2]"),
        ("model-00002-of-00002.safetensors", "b"),
    ]


def test_one_process_has_the_plain_names() -> None:
    assert file_name("optimizer") == "optimizer.safetensors"
    assert file_name("model", rank=2, ranks=8) == "model-00003-of-00008.safetensors"


@pytest.mark.parametrize("columns", [1, 8])
def test_thousands_of_pieces_are_checked(columns: int) -> None:
    rows = 4096 // columns
    boxes = [TensorSlice((r, c), (r + 1, c + 1)) for r in range(rows) for c in range(columns)]
    indexes = {str(n): index_of((rows, columns), boxes)["x"] for n in range(10)}
    assert find_faults(indexes) == []
    assert len(find_faults({**indexes, "y": index_of((rows, columns), boxes[1:])["x"]})) == 1
