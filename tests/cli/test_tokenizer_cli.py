"""`tokenizer train` and `show` as a person uses them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

from gristmill.base.errors import Exit, UserError
from gristmill.cli.main import app


def run(*words: object) -> str:
    result = CliRunner().invoke(app, ["tokenizer", *map(str, words)])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    words = "the mill turns and grinds corn while water runs over wheels; millers wait".split()
    path.write_text(" ".join(Random(0).choices(words, k=2000)))
    return path


@pytest.mark.parametrize("kind", ["bpe", "wordpiece", "unigram"])
def test_train_and_show(kind: str, text: Path, tmp_path: Path) -> None:
    made = run("train", text, "-o", tmp_path / "made", "-n", 262, "--type", kind)
    assert "262 ids, fingerprint" in made
    shown = run("show", tmp_path / "made", "the mill")
    assert f"type         byte-level-{kind}" in shown
    assert "end of text  261  <|endoftext|>" in shown
    assert "lossless     yes" in shown
    assert "decodes to" not in shown
    with pytest.raises(UserError, match="not empty") as caught:
        run("train", text, "-o", tmp_path / "made", "-n", 262)
    assert caught.value.exit is Exit.REFUSED


def test_options_reach_the_training(text: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no meaning for unigram"):
        run("train", text, "-o", tmp_path / "a", "--type", "unigram", "--min-count", 3)
    with pytest.raises(UserError, match="at most 257"):
        run("train", text, "-o", tmp_path / "a", "-n", 300, "--min-count", 100_000)
    lines = [text, "--documents", "line", "-n", 270]
    text.write_text("aaaa bbbb\n" * 50 + "the mill grinds the corn\n" * 50)
    with pytest.raises(UserError, match="too short"):
        run("train", *lines, "-o", tmp_path / "a", "--limit", 100)
    run("train", *lines, "-o", tmp_path / "a")
    text.write_text("1234 1234 1234 " * 9)
    run("train", text, "-n", 259, "-o", tmp_path / "b", "--pattern", "gpt4")
    assert "b'123'" in run("show", tmp_path / "b", "1234")


def test_show_says_what_is_lost(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"?": 0, "mill": 1, "end": 2}, unk_token="?"))
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="no end-of-text token"):
        run("show", tmp_path)
    shown = run("show", tmp_path, "mills", "--end-of-text", "end")
    assert "lossless     no" in shown
    assert "decodes to '?'" in shown
