"""Parts of tensors, against indexing of real arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.tensor_slices import (
    ShardSlice,
    TensorSlice,
    row_slices,
    split_slices,
    whole_slice,
)


def taken(whole: np.ndarray, pieces: tuple[ShardSlice, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The smaller tensor that pieces of a whole make up; -1 where they leave a gap."""
    local = np.full(shape, -1)
    for piece in pieces:
        local[piece.local.slices] = whole[piece.whole.slices]
    return local


def test_a_stack_is_divided_matrix_by_matrix() -> None:
    whole = np.arange(24).reshape(6, 4)
    pieces = split_slices((6, 4), dim=0, parts=(4, 2), rank=1, ranks=2)
    assert taken(whole, pieces, (3, 4)).tolist() == whole[[2, 3, 5]].tolist()
    columns = split_slices((6, 4), dim=1, parts=(4,), rank=1, ranks=2)
    assert taken(whole, columns, (6, 2)).tolist() == whole[:, 2:].tolist()


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4))
def test_divided_twice_every_element_is_held_once(
    ranks: int, shards: list[int], again: int
) -> None:
    parts = [shard * ranks for shard in shards]
    whole = np.arange(sum(parts) * 3).reshape(-1, 3)
    seen = []
    for rank in range(ranks):
        pieces = split_slices(whole.shape, dim=0, parts=parts, rank=rank, ranks=ranks)
        shape = (sum(shards), 3)
        local = taken(whole, pieces, shape)
        rows = [
            taken(whole, found, (max((p.local.end[0] for p in found), default=0), 3))
            for found in (row_slices(pieces, shape, rank=r, ranks=again) for r in range(again))
        ]
        assert np.concatenate(rows).tolist() == local.tolist()
        seen.append(local)
    assert sorted(np.concatenate(seen).ravel().tolist()) == whole.ravel().tolist()


def test_boxes_meet() -> None:
    one, two = TensorSlice((0, 2), (4, 6)), TensorSlice((3, 0), (9, 3))
    assert one.intersect(two) == TensorSlice((3, 2), (4, 3))
    assert one.intersect(TensorSlice((4, 2), (5, 3))) is None
    assert one.intersect(two).relative_to(one) == TensorSlice((3, 0), (4, 1))  # type: ignore[union-attr]
    assert one.shape == (4, 4) and one.size == 16


def test_a_number_is_one_piece() -> None:
    (piece,) = whole_slice(())
    assert piece.whole.size == 1 and piece.whole.slices == ()


def test_uneven_parts_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        split_slices((5,), dim=0, parts=(5,), rank=0, ranks=2)
