"""Where documents begin inside samples."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gristmill.data.loader import DocumentRules, doc_starts_after, make_batch, restarted_positions
from gristmill.data.sampling import TokenSpans
from gristmill.data.stream import doc_starts_in_spans


def test_the_drawing_of_the_module() -> None:
    tokens = np.array([[1, 2, 3, 0, 4, 5, 0, 6]])
    doc_starts = doc_starts_after(tokens, end_of_text=0)
    assert doc_starts.astype(int).tolist() == [[0, 0, 0, 0, 1, 0, 0, 1]]
    assert restarted_positions(doc_starts).tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    rules = DocumentRules("ids", attention=True, end_of_text=0)
    batch = make_batch(np.append(tokens, [[7]], axis=1), rules=rules)
    assert batch.documents_BT is not None
    assert batch.documents_BT.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]


def test_each_row_stands_for_itself() -> None:
    tokens = np.array([[1, 2, 0], [3, 4, 5]])
    doc_starts = doc_starts_after(tokens, end_of_text=0)
    assert not doc_starts.any()
    assert restarted_positions(doc_starts).tolist() == [[0, 1, 2]] * 2


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    samples=st.integers(1, 5),
    length=st.integers(2, 12),
    data=st.data(),
)
def test_marks_stand_where_the_document_changes(
    lengths: list[int], samples: int, length: int, data: st.DataObject
) -> None:
    lengths = [*lengths, 15]
    starts = np.cumsum([0, *lengths[:-1]])
    total = sum(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    begins, counts = [], []
    for _ in range(samples):
        left = length
        while left:
            count = data.draw(st.integers(1, left))
            begins.append(data.draw(st.integers(0, total - count)))
            counts.append(count)
            left -= count
    pieces = TokenSpans(np.array(begins), np.array(counts))
    doc_starts = doc_starts_in_spans(pieces, starts=starts, length=length)
    wanted = np.concatenate(
        [
            [True, *(np.diff(document[begin : begin + count]) > 0)]
            for begin, count in zip(begins, counts, strict=True)
        ]
    ).reshape(samples, length)
    wanted[:, 0] = False
    assert np.array_equal(doc_starts, wanted)
