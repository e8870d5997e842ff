"""What the page of a token set says, counted again by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.base.errors import UserError
from gristmill.cli.main import app
from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.statistics import language_of, token_statistics
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

TEXTS = {
    "a.jsonl": ["the mill by the river turns", "the mill by the river stands", "ab"],
    "b.jsonl": ["ab", "</script><b>bold</b> & the mill", "ab", "xyz"],
}


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    for name, texts in TEXTS.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (tmp_path / name).write_text("\n".join([*lines, "nonsense"]) + "\n")
    sources = [str(tmp_path / name) for name in TEXTS]
    prepare(PrepareRequest(sources, tmp_path / "set", ByteTokenizer(), workers=1))
    return tmp_path / "set"


def test_everything_is_counted(prefix: Path) -> None:
    found = token_statistics(prefix)
    texts = [text for some in TEXTS.values() for text in some]
    sizes = [len(text) + 1 for text in texts]
    assert (found["documents"], found["tokens"]) == (len(texts), sum(sizes))
    assert found["copies"]["documents"] == 2
    assert found["copies"]["tokens"] == 2 * 3
    assert found["copies"]["most"] == [[2, 3]]
    classes = Counter(1 << (size.bit_length() - 1) for size in sizes)
    counted = {row["from"]: row["documents"] for row in found["lengths"]["classes"]}
    assert {power: count for power, count in counted.items() if count} == classes
    by_source = {Path(row["name"]).name: row for row in found["sources"]["rows"]}
    for name, some in TEXTS.items():
        assert by_source[name]["documents"] == len(some)
        assert by_source[name]["tokens"] == sum(len(text) + 1 for text in some)
    assert found["phrases"]["3"][0] == ["the mill by", 2, 2]
    assert found["phrases"]["2"][0] == ["the mill", 3, 3]
    assert found["dropped"]["reasons"] == [["invalid json", 2]]
    assert [one["text"] for one in found["texts"]] == texts
    assert found["texts"][3]["origin"].endswith("b.jsonl:1")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The king was in the house and he said that it was good", "English"),
        ("Der König war in dem Haus und er hat das nicht gewusst", "German"),
        ("El rey que estaba en la casa no lo sabía con una", "Spanish"),
        ("Le roi est dans la maison et il ne sait pas que", "French"),
        ("Король был в доме и не знал", "Cyrillic"),
        ("国王在房子里,他不知道", "Chinese"),
        ("王は家にいて、それを知らなかった", "Japanese"),
        ("xqzt wvut", "Latin letters"),
        ("12 34 + 5 = ?", "no letters"),
    ],
)
def test_languages_are_guessed(text: str, language: str) -> None:
    assert language_of(text) == language


def test_the_page_holds_all_of_it_and_no_markup_of_the_text(prefix: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "set.html"
    words = ["tokens", "inspect", str(prefix), "--page", str(page), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    content = page.read_text("utf-8")
    assert "</script><b>" not in content
    start = content.index('<script id="data" type="application/json">')
    data: dict[str, Any] = json.loads(
        content[content.index(">", start) + 1 :].split("</script>")[0]
    )
    del data["made"]
    assert data == json.loads(result.stdout)


def test_what_has_no_page_is_told(prefix: Path, tmp_path: Path) -> None:
    page = ["--page", str(tmp_path / "x.html")]
    foreign = ["tokens", "inspect", str(prefix), "--from", "flat", *page]
    result = CliRunner().invoke(app, foreign)
    assert "convert the set first" in str(result.exception)
    for file in (tmp_path / "set.tokenizer").iterdir():
        file.unlink()
    (tmp_path / "set.tokenizer").rmdir()
    with pytest.raises(UserError, match="tokenizer of this set"):
        token_statistics(prefix)
    assert not (tmp_path / "x.html").exists()
