"""What is trained on and what is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import DataConfig
from gristmill.data.dataset import DatasetSplit, Mixture, open_data, open_set
from gristmill.data.sampling import TokenSpans
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens


def write(prefix: Path, lengths: list[int], *, tokenizer: str = "abc") -> Path:
    """A token set whose every token is its position modulo 1000."""
    spec = {"type": "test", "fingerprint": tokenizer}
    writer = create_tokens(
        NewSet(prefix, vocab_size=1000, end_of_text=None, tokenizer=spec, overwrite=True)
    )
    begin = 0
    for length in lengths:
        writer.add(np.arange(begin, begin + length) % 1000)
        begin += length
    writer.finish()
    return prefix


def only(mixture: Mixture) -> DatasetSplit:
    (part,) = mixture.splits
    return part


@pytest.fixture
def books(tmp_path: Path) -> Path:
    return write(tmp_path / "books", [10] * 100)


def test_one_part_in_a_hundred_is_held_out_by_default(books: Path) -> None:
    parts = open_data(DataConfig(paths=str(books)), sequence=8)
    assert (only(parts.train).tokens.start, only(parts.train).tokens.stop) == (0, 990)
    assert parts.validation is not None
    assert (only(parts.validation).tokens.start, only(parts.validation).tokens.stop) == (990, 1000)


def test_a_third_part_stays_unread(books: Path) -> None:
    parts = open_data(DataConfig(paths=str(books), split="7,2,1"), sequence=8)
    assert parts.validation is not None
    ranges = (only(parts.train).tokens, only(parts.validation).tokens)
    assert [(part.start, part.stop) for part in ranges] == [(0, 700), (700, 900)]


def test_there_is_no_validation_on_request(books: Path) -> None:
    assert open_data(DataConfig(paths=str(books), split="1,0"), sequence=8).validation is None


@pytest.mark.parametrize("split", ["1,0", "1,0,0", "8,2,0"])
def test_a_part_of_nothing_takes_nothing(books: Path, split: str) -> None:
    parts = open_data(DataConfig(paths=str(books), split=split), sequence=8)
    assert only(parts.validation or parts.train).tokens.stop == 1000


@pytest.mark.parametrize("lengths", [[100, 9900], [9900, 100, 20000]])
def test_training_gets_the_larger_part_even_of_uneven_documents(
    tmp_path: Path, lengths: list[int]
) -> None:
    prefix = write(tmp_path / "uneven", lengths)
    parts = open_data(DataConfig(paths=str(prefix), split="99,1"), sequence=8)
    assert parts.validation is not None
    assert len(only(parts.train).tokens) > len(only(parts.validation).tokens)


def test_a_single_document_is_cut_inside(tmp_path: Path) -> None:
    prefix = write(tmp_path / "one", [1000])
    parts = open_data(DataConfig(paths=str(prefix), split="9,1"), sequence=8)
    assert parts.validation is not None
    assert (len(only(parts.train).tokens), len(only(parts.validation).tokens)) == (900, 100)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(5, 15), min_size=40, max_size=80),
    split=st.sampled_from(["9,1", "1,1", "8,1,1", "1,2,3"]),
)
def test_parts_end_where_documents_begin_and_do_not_overlap(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], split: str
) -> None:
    prefix = write(tmp_path_factory.getbasetemp() / "property", lengths)
    parts = open_data(DataConfig(paths=str(prefix), split=split), sequence=1)
    assert parts.validation is not None
    train, held = only(parts.train).tokens, only(parts.validation).tokens
    assert train.start == 0
    assert train.stop == held.start < held.stop
    ends, shares = np.cumsum(lengths), [float(part) for part in split.split(",")]
    assert {train.stop, held.stop} <= set(ends.tolist())
    wanted = np.cumsum(shares) / sum(shares) * sum(lengths)
    for cut, place in zip((train.stop, held.stop), wanted, strict=False):
        assert abs(cut - place) <= max(lengths) / 2 + 1e-6


def test_a_validation_file_is_read_whole_and_nothing_is_held_out(
    tmp_path: Path, books: Path
) -> None:
    held = write(tmp_path / "held", [30, 20])
    parts = open_data(DataConfig(paths=str(books), validation=str(held)), sequence=8)
    assert parts.validation is not None
    assert len(only(parts.train).tokens) == 1000
    assert len(only(parts.validation).tokens) == 50
    assert only(parts.validation).reader is not only(parts.train).reader


def test_a_validation_file_of_another_tokenizer_is_refused(tmp_path: Path, books: Path) -> None:
    held = write(tmp_path / "held", [50], tokenizer="0123456789abcdef")
    with pytest.raises(UserError) as caught:
        open_data(DataConfig(paths=str(books), validation=str(held)), sequence=8)
    assert str(caught.value) == (
        f"data.validation: {held} was made with a different tokenizer than {books} "
        "(0123456789ab and abc)\n    prepare both with the same tokenizer"
    )
    assert caught.value.exit is Exit.DATA


def test_too_little_validation_text_is_refused(tmp_path: Path, books: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_data(DataConfig(paths=str(books)), sequence=10)
    assert str(caught.value) == (
        "data.split: the validation text has 10 tokens, too few for one window of 10 + 1\n"
        '    hold out more (data.split = "9,1"), or shorten data.sequence'
    )
    open_data(DataConfig(paths=str(books)), sequence=9)
    held = write(tmp_path / "held", [5])
    with pytest.raises(UserError, match=r"data\.validation: the validation text has 5 tokens"):
        open_data(DataConfig(paths=str(books), validation=str(held)), sequence=5)


def test_a_missing_token_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no token set here"):
        open_data(DataConfig(paths=str(tmp_path / "none")), sequence=8)


# ------------------------------------------------------------------ reading pieces


def spans(*rows: tuple[int, int]) -> TokenSpans:
    begins, counts = zip(*rows, strict=True)
    return TokenSpans(np.array(begins), np.array(counts))


GATHERED = {
    "windows": [(0, 9), (5, 9), (981, 9)],
    "short pieces": [(3, 2), (900, 7), (0, 1), (0, 8)],
    "one piece": [(42, 9)],
}


@pytest.mark.parametrize("rows", GATHERED.values(), ids=GATHERED)
@pytest.mark.parametrize("kind", ["mapped", "in memory", "several files"])
def test_pieces_are_gathered_into_rows(
    tmp_path: Path, kind: str, rows: list[tuple[int, int]]
) -> None:
    if kind == "several files":
        writer = create_tokens(
            NewSet(
                tmp_path / "set",
                vocab_size=1000,
                end_of_text=None,
                tokenizer={"type": "test", "fingerprint": "abc"},
                format="npy",
                shard_size=7,
            )
        )
        writer.add(np.arange(1000))
        writer.finish()
    else:
        write(tmp_path / "set", [10] * 100)
    text = open_set(str(tmp_path / "set"), in_memory=kind == "in memory")
    assert (text.ids is None) == (kind == "several files")
    assert (not text.watch.states) == (kind == "in memory")
    wanted = np.concatenate([np.arange(begin, begin + count) for begin, count in rows])
    found = text.gather(spans(*rows), length=9)
    assert found.tolist() == wanted.reshape(-1, 9).tolist()


def test_long_pieces_are_gathered_like_short_ones(tmp_path: Path) -> None:
    text = open_set(str(write(tmp_path / "set", [5000])))
    rows = [(0, 700), (2000, 301), (4000, 400), (100, 601)]
    wanted = np.concatenate([np.arange(begin, begin + count) for begin, count in rows]) % 1000
    assert text.gather(spans(*rows), length=1001).tolist() == wanted.reshape(-1, 1001).tolist()


# ------------------------------------------------------------------ several sets


def test_each_of_several_sets_is_divided(tmp_path: Path, books: Path) -> None:
    other = write(tmp_path / "other", [20] * 50)
    parts = open_data(DataConfig(paths={str(books): 3, str(other): 1}, split="8,2"), sequence=8)
    assert [len(part.tokens) for part in parts.train.splits] == [800, 800]
    assert parts.validation is not None
    assert [len(part.tokens) for part in parts.validation.splits] == [200, 200]
    assert parts.train.weights == parts.validation.weights == (3.0, 1.0)


def test_a_set_too_small_to_hold_out_a_window_is_only_trained_on(
    tmp_path: Path, books: Path
) -> None:
    small = write(tmp_path / "small", [10] * 8)
    paths = {str(small): 1.0, str(books): 2.0}
    parts = open_data(DataConfig(paths=paths, split="9,1"), sequence=20)
    assert len(parts.train.splits) == 2
    assert parts.validation is not None
    assert [part.path for part in parts.validation.splits] == [str(books)]
    assert parts.validation.weights == (2.0,)


def test_every_set_of_another_tokenizer_is_named(tmp_path: Path, books: Path) -> None:
    others = [write(tmp_path / name, [500], tokenizer=name * 12) for name in "xy"]
    with pytest.raises(UserError) as caught:
        open_data(DataConfig(paths=tuple(map(str, (books, *others)))), sequence=2)
    assert len(caught.value.problems) == 2
    assert "y was made with a different tokenizer than" in str(caught.value)


def test_every_set_too_short_to_train_on_is_named(tmp_path: Path, books: Path) -> None:
    others = [write(tmp_path / name, [5]) for name in "xy"]
    with pytest.raises(UserError) as caught:
        open_data(DataConfig(paths=tuple(map(str, (books, *others))), split="1,0"), sequence=8)
    assert len(caught.value.problems) == 2
    assert f"the training text of {others[1]} has 5 tokens, too few for one window of 8 + 1" in str(
        caught.value
    )


def test_validation_may_be_a_blend_too(tmp_path: Path, books: Path) -> None:
    held = {str(write(tmp_path / name, [50])): weight for name, weight in (("a", 1), ("b", 2))}
    parts = open_data(DataConfig(paths=str(books), validation=held), sequence=8)
    assert parts.validation is not None
    assert parts.validation.weights == (1.0, 2.0)


# ------------------------------------------------------------------ division by rows


def test_megatron_divides_rows_not_tokens(tmp_path: Path) -> None:
    lengths = [3] * 400 + [100] * 100
    prefix = write(tmp_path / "rows", lengths)
    config = DataConfig(paths=str(prefix), order="megatron", split="949,50,1")
    parts = open_data(config, sequence=8)
    train = only(parts.train)
    assert train.rows is not None and parts.validation is not None
    assert (train.rows.start, train.rows.stop) == (0, 474)
    assert (train.tokens.start, train.tokens.stop) == (0, sum(lengths[:474]))
    assert len(only(parts.validation).tokens) == 2600


@pytest.mark.parametrize("split", ["949,50,1", "99,1"])
def test_a_division_that_leaves_nothing_names_the_smallest_that_does(
    tmp_path: Path, split: str
) -> None:
    prefix = write(tmp_path / "few", [5] * 9)
    config = DataConfig(paths=str(prefix), order="megatron", split=split)
    with pytest.raises(UserError) as caught:
        open_data(config, sequence=8)
    assert str(caught.value) == (
        "data.split: the validation text has 0 tokens in 0 rows, too few for one window of 8 + 1\n"
        '    hold out at least 2 of the 9 rows: data.split = "7,2"'
    )
    mended = config.model_copy(update={"split": "7,2"})
    held = open_data(mended, sequence=8).validation
    assert held is not None and len(only(held).tokens) == 10


def test_a_training_part_without_rows_is_told_in_numbers(tmp_path: Path) -> None:
    prefix = write(tmp_path / "few", [50, 50, 50])
    config = DataConfig(paths=str(prefix), order="megatron", split="1,9")
    with pytest.raises(UserError) as caught:
        open_data(config, sequence=8)
    assert str(caught.value) == (
        "data.paths: the training text, rows 0 to 0 of 3, has 0 tokens, too few for one window of "
        '8 + 1\n    hold out at least 1 of the 3 rows: data.split = "2,1"'
    )


def test_a_set_of_one_row_cannot_be_divided(tmp_path: Path) -> None:
    prefix = write(tmp_path / "one", [500])
    config = DataConfig(paths=str(prefix), order="megatron")
    with pytest.raises(UserError, match="500 tokens in 1 rows, which cannot be split"):
        open_data(config, sequence=8)
    assert open_data(config.model_copy(update={"split": "1,0"}), sequence=8).validation is None
