"""What is trained on and what is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import DataConfig
from gristmill.data.dataset import open_parts
from gristmill.tokens.store import create_tokens


def write(prefix: Path, lengths: list[int], *, tokenizer: str = "abc") -> Path:
    """A token set whose every token is its position modulo 1000."""
    spec = {"type": "test", "fingerprint": tokenizer}
    writer = create_tokens(
        prefix, vocab_size=1000, end_of_text=None, tokenizer=spec, overwrite=True
    )
    begin = 0
    for length in lengths:
        writer.add(np.arange(begin, begin + length) % 1000)
        begin += length
    writer.finish()
    return prefix


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return write(tmp_path / "books", [10] * 100)


def test_one_part_in_a_hundred_is_held_out_by_default(books: Path) -> None:
    parts = open_parts(DataConfig(paths=str(books)), sequence=8)
    assert (parts.train.stretch.begin, parts.train.stretch.end) == (0, 990)
    assert parts.validation is not None
    assert (parts.validation.stretch.begin, parts.validation.stretch.end) == (990, 1000)


def test_a_third_part_stays_unread(books: Path) -> None:
    parts = open_parts(DataConfig(paths=str(books), split="7,2,1"), sequence=8)
    assert parts.validation is not None
    stretches = (parts.train.stretch, parts.validation.stretch)
    assert [(part.begin, part.end) for part in stretches] == [(0, 700), (700, 900)]


def test_there_is_no_validation_on_request(books: Path) -> None:
    assert open_parts(DataConfig(paths=str(books), split="1,0"), sequence=8).validation is None


@pytest.mark.parametrize("split", ["1,0", "1,0,0", "8,2,0"])
def test_a_part_of_nothing_takes_nothing(books: Path, split: str) -> None:
    parts = open_parts(DataConfig(paths=str(books), split=split), sequence=8)
    assert (parts.validation or parts.train).stretch.end == 1000


@pytest.mark.parametrize("lengths", [[100, 9900], [9900, 100, 20000]])
def test_training_gets_the_larger_part_even_of_uneven_documents(
    tmp_path: Path, lengths: list[int]
) -> None:
    prefix = write(tmp_path / "uneven", lengths)
    parts = open_parts(DataConfig(paths=str(prefix), split="99,1"), sequence=8)
    assert parts.validation is not None
    assert len(parts.train.stretch) > len(parts.validation.stretch)


def test_a_single_document_is_cut_inside(tmp_path: Path) -> None:
    prefix = write(tmp_path / "one", [1000])
    parts = open_parts(DataConfig(paths=str(prefix), split="9,1"), sequence=8)
    assert parts.validation is not None
    assert (len(parts.train.stretch), len(parts.validation.stretch)) == (900, 100)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(5, 15), min_size=40, max_size=80),
    split=st.sampled_from(["9,1", "1,1", "8,1,1", "1,2,3"]),
)
def test_parts_end_where_documents_begin_and_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], split: str
) -> None:
    prefix = write(tmp_path_factory.getbasetemp() / "property", lengths)
    parts = open_parts(DataConfig(paths=str(prefix), split=split), sequence=1)
    assert parts.validation is not None
    train, held = parts.train.stretch, parts.validation.stretch
    assert train.begin == 0
    assert train.end == held.begin < held.end
    ends, shares = np.cumsum(lengths), [float(part) for part in split.split(",")]
    assert {train.end, held.end} <= set(ends.tolist())
    wanted = np.cumsum(shares) / sum(shares) * sum(lengths)
    for cut, place in zip((train.end, held.end), wanted, strict=False):
        assert abs(cut - place) <= max(lengths) / 2 + 1e-6


def test_a_validation_file_is_read_whole_and_nothing_is_held_out(
    tmp_path: Path, books: Path
) -> None:
    held = write(tmp_path / "held", [30, 20])
    parts = open_parts(DataConfig(paths=str(books), validation=str(held)), sequence=8)
    assert parts.validation is not None
    assert len(parts.train.stretch) == 1000
    assert len(parts.validation.stretch) == 50
    assert parts.validation.reader is not parts.train.reader


def test_a_validation_file_of_another_tokenizer_is_refused(tmp_path: Path, books: Path) -> None:
    held = write(tmp_path / "held", [50], tokenizer="0123456789abcdef")
    with pytest.raises(UserError) as caught:
        open_parts(DataConfig(paths=str(books), validation=str(held)), sequence=8)
    assert str(caught.value) == (
        f"data.validation: {held} was made with another tokenizer than {books} "
        "(0123456789ab and abc)\n    prepare both with the same tokenizer"
    )
    assert caught.value.exit is Exit.DATA


def test_too_little_validation_text_is_refused(tmp_path: Path, books: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_parts(DataConfig(paths=str(books)), sequence=10)
    assert str(caught.value) == (
        "data.split: the validation text has 10 tokens, too few for one window of 10 + 1\n"
        '    hold out more (data.split = "9,1"), or shorten data.sequence'
    )
    open_parts(DataConfig(paths=str(books)), sequence=9)
    held = write(tmp_path / "held", [5])
    with pytest.raises(UserError, match=r"data\.validation: the validation text has 5 tokens"):
        open_parts(DataConfig(paths=str(books), validation=str(held)), sequence=5)


def test_a_missing_token_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no token set here"):
        open_parts(DataConfig(paths=str(tmp_path / "none")), sequence=8)


def test_windows_have_one_token_more_than_the_sequence(books: Path) -> None:
    part = open_parts(DataConfig(paths=str(books)), sequence=8).train
    windows = part.windows(np.array([0, 5, 981]), sequence=8)
    assert windows.dtype == np.int64
    assert windows.tolist() == [list(range(start, start + 9)) for start in (0, 5, 981)]
