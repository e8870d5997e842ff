"""Estimated tokens of a text against those counted."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from gristmill.base.errors import DataError
from gristmill.text.estimate import BYTES_PER_ID, estimate_text, largest_vocabulary
from gristmill.text.tokenizers.tokenizer import open_tokenizer
from gristmill.text.tokenizers.training import train_tokenizer

LETTERS = random.Random(1)
WORDS = ["".join(LETTERS.choices("abcdefghimnorstu", k=LETTERS.randint(2, 9))) for _ in range(3000)]


def prose(words: int, *, seed: int = 0) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty files of different sizes and kinds, 700 KiB."""
    for number in range(30):
        text = prose(1000 + 300 * number, seed=number)
        if number % 3 == 0:
            (tmp_path / f"{number}.txt").write_text(text)
        elif number % 3 == 1:
            rows = (json.dumps({"text": text[at : at + 500]}) for at in range(0, len(text), 500))
            (tmp_path / f"{number}.jsonl").write_text("\n".join(rows))
        else:
            with gzip.open(tmp_path / f"{number}.txt.gz", "wt") as file:
                file.write(text)
    return tmp_path


def test_a_folder_of_several_kinds(folder: Path) -> None:
    estimate = estimate_text([str(folder)])
    real = sum(len(prose(1000 + 300 * number, seed=number)) for number in range(30))
    assert estimate.files == 30 and estimate.disk is not None and estimate.disk < real
    assert estimate.text_bytes == pytest.approx(real, rel=0.05)


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    file.write_text(prose(500_000))
    estimate = estimate_text([str(file)])
    assert estimate.text_bytes == file.stat().st_size
    assert estimate.sample_bytes < 2**20 + 4


def test_tokens_are_about_those_that_are_counted(folder: Path) -> None:
    estimate = estimate_text([str(folder)])
    texts = [prose(1000 + 300 * number, seed=number) for number in range(30)]
    assert estimate.text_bytes is not None
    trained = estimate.train_bpe(1024)
    assert trained is not None and trained[0] == 1024
    counted = sum(map(len, train_tokenizer(iter(texts), vocab_size=1024).encode_batch(texts)))
    assert estimate.text_bytes / trained[1] == pytest.approx(counted, rel=0.1)
    assert estimate.bytes_per_token(open_tokenizer("bytes")) == 1


def test_vocabularies_suit_the_text() -> None:
    assert largest_vocabulary(None, limit=4096) == 4096
    assert largest_vocabulary(10**9, limit=4096) == 4096
    assert largest_vocabulary(1024 * BYTES_PER_ID, limit=4096) == 1024
    assert largest_vocabulary(1000, limit=4096) is None
    assert largest_vocabulary(10**9, limit=300) is None


def test_a_text_that_repeats_one_letter_has_no_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a " * 300_000)
    assert estimate_text([str(tmp_path / "a.txt")]).train_bpe(4096) is None


def test_what_cannot_be_estimated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="standard input"):
        estimate_text(["-"])
    with pytest.raises(DataError, match="no such file"):
        estimate_text([str(tmp_path / "nothing")])
    (tmp_path / "rows.jsonl").write_text('{"body": "the key is another"}\n')
    with pytest.raises(DataError, match="--json-key"):
        estimate_text([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text("")
    with pytest.raises(DataError, match="no text"):
        estimate_text([str(tmp_path / "empty")])
