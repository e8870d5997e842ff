"""Every named corpus says what it is, where it comes from, and what it will cost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources import corpora
from gristmill.text.sources.corpora import (
    Corpus,
    check_disk,
    describe,
    fetch_corpus,
    find_corpus,
    known_corpora,
)
from gristmill.text.sources.datasets import parse_dataset

SMALL = Corpus(
    name="small",
    title="A small one",
    homepage="https://example.invalid",
    licence="CC0",
    url="https://example.invalid/small.jsonl.gz",
    text_bytes=1000,
    download_bytes=400,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def corpus(name: str) -> Corpus:
    found = find_corpus(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", known_corpora())
def test_every_row_is_complete(name: str) -> None:
    row = corpus(name)
    assert re.fullmatch(r"[a-z0-9-]+", name) and not Path(name).suffix
    assert (row.dataset is None) != (row.url is None)
    assert (row.held_out is None) == (row.seed is None)
    assert row.validation is None or row.held_out is None
    assert row.licence and row.homepage.startswith("https://")
    assert row.url is None or row.url.startswith("https://")
    if row.dataset:
        spec = parse_dataset(row.source())
        assert (spec.name, spec.config, spec.split, spec.column) == (
            row.dataset,
            row.config,
            row.split,
            row.column,
        )
    text = describe(row)
    assert row.title in text and row.licence in text and "disk" in text
    assert "None" not in text


def test_names_are_found() -> None:
    assert {
        "openwebtext",
        "fineweb-10bt",
        "wikitext-103",
        "pile",
        "oscar",
    } <= known_corpora().keys()
    assert find_corpus("no such corpus") is None


def test_a_revision_follows_the_name() -> None:
    row = corpus("wikitext-2@v1")
    spec = parse_dataset(row.source())
    assert (spec.name, spec.revision, spec.config) == (row.dataset, "v1", row.config)
    with pytest.raises(UserError, match="single file without revisions\n    give oscar alone"):
        find_corpus("oscar@v1")


def test_openwebtext_is_split_as_the_field_does() -> None:
    row = corpus("openwebtext")
    assert (row.documents, row.held_out, row.seed) == (8_013_769, 0.0005, 2357)
    assert "8,013,769" in describe(row) and "0.05% of the documents" in describe(row)
    assert "stream" in describe(row)


def test_what_is_unknown_is_called_so() -> None:
    text = describe(corpus("pile"))
    assert re.search(r"documents +unknown", text) and re.search(r"text +unknown", text)
    assert "no longer distributed" in text


def test_a_source_of_another_split() -> None:
    row = corpus("wikitext-2")
    assert parse_dataset(row.source("validation")).split == "validation"


def test_the_disk_is_looked_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: dict[str, int] = {}

    def room(folder: Path, *, needed: int, purpose: str, remedy: str) -> None:
        needs[purpose] = needed

    monkeypatch.setattr(corpora, "require_room", room)
    check_disk(SMALL, output=tmp_path)
    assert (SMALL.file_bytes, SMALL.token_bytes) == (400, 500)
    assert needs == {"the file of small": 400, "a token set of small": 500}
    monkeypatch.undo()
    huge = Corpus(**{**vars(SMALL), "text_bytes": 10**18, "download_bytes": None})
    with pytest.raises(UserError, match="the file of small needs") as caught:
        check_disk(huge, output=tmp_path)
    assert caught.value.exit is Exit.STORAGE
    check_disk(Corpus(**{**vars(SMALL), "text_bytes": None}), output=tmp_path)


def test_a_file_is_fetched_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def fetch(url: str, **options: object) -> None:
        asked.append({"url": url, **options})

    monkeypatch.setattr(corpora, "download", fetch)
    place = tmp_path / "cache" / "gristmill" / "corpora" / "small" / "small.jsonl.gz"
    assert fetch_corpus(SMALL) == str(place)
    assert asked[0]["url"] == SMALL.url and asked[0]["to"] == place
    assert str(place) in describe(SMALL)
    row = corpus("openwebtext")
    assert fetch_corpus(row) == row.source() and len(asked) == 1
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.invalid/")
    fetch_corpus(corpus("oscar"))
    assert str(asked[1]["url"]).startswith("https://mirror.invalid/bigscience/")
