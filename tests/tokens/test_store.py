"""Finding, inspecting and verifying token sets."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import sha256_file, write_sealed_json
from gristmill.tokens import format as token_format
from gristmill.tokens import store
from gristmill.tokens.format import NewSet, file_of, read_manifest
from gristmill.tokens.store import (
    create_tokens,
    find_manifest,
    inspect_tokens,
    open_tokens,
    verify_tokens,
)

DOCUMENTS = [[5, 6, 7], [8], [9] * 8, [250, 3]]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    make(tmp_path / "books", DOCUMENTS)
    return tmp_path / "books"


def make(prefix: Path, documents: list[list[int]]) -> None:
    spec = {"type": "test", "fingerprint": "abc"}
    writer = create_tokens(NewSet(prefix, vocab_size=257, end_of_text=256, tokenizer=spec))
    for document in documents:
        writer.add(document)
    writer.finish(text_bytes=33)


def forge_checksums(prefix: Path) -> None:
    """Make the manifest agree with the files, as a faulty writer would have."""
    path = prefix.with_suffix(".json")
    manifest = json.loads(path.read_text())
    for suffix, facts in manifest["files"].items():
        facts["sha256"] = sha256_file(prefix.with_suffix(suffix))
    del manifest["seal"]
    path.write_text(json.dumps(manifest))


def test_a_missing_set_names_what_was_sought_and_what_is_there(prefix: Path) -> None:
    make(prefix.with_name("wiki.v2"), [[1]])
    with pytest.raises(UserError) as caught:
        open_tokens(prefix.with_name("boks"))
    message = str(caught.value)
    assert "boks.json" in message and "books, wiki.v2" in message
    assert caught.value.exit is Exit.DATA
    with pytest.raises(UserError, match=r"books, wiki\.v2"):
        open_tokens(prefix.parent)


def test_a_prefix_with_an_ending_is_corrected(prefix: Path) -> None:
    with pytest.raises(UserError, match=r"leave out the ending: .*books$"):
        open_tokens(f"{prefix}.bin")


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        open_tokens(tmp_path / "nowhere" / "set")
    with pytest.raises(UserError, match="holds no token sets"):
        open_tokens(tmp_path / "set")


def test_a_foreign_token_file_is_called_unfinished(tmp_path: Path) -> None:
    (tmp_path / "set.bin").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"unfinished(.|\n)*--from flat"):
        open_tokens(tmp_path / "set")


def test_a_set_may_be_renamed(prefix: Path) -> None:
    for suffix in (".bin", ".starts", ".json"):
        prefix.with_suffix(suffix).rename(prefix.parent / f"novels{suffix}")
    assert len(open_tokens(prefix.parent / "novels")) == 14
    assert verify_tokens(prefix.parent / "novels") == []


@pytest.mark.parametrize("place", [".", ".."])
def test_a_set_needs_a_name(place: str) -> None:
    with pytest.raises(UserError, match="needs a name"):
        create_tokens(
            NewSet(Path(place), vocab_size=9, end_of_text=None, tokenizer={"fingerprint": ""})
        )


def test_a_file_in_the_way_of_the_folder(prefix: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        make(prefix.with_suffix(".bin") / "set", [[1]])


@pytest.mark.parametrize("piece", [1, 3, 1 << 20])
def test_inspection(prefix: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_format, "PIECE", piece)
    summary = inspect_tokens(prefix)
    assert (summary.info.tokens, summary.info.documents, summary.info.text_bytes) == (14, 4, 33)
    assert (summary.smallest_id, summary.largest_id) == (3, 250)
    assert summary.mean_length == 3.5
    assert summary.length_quantiles == {
        0.0: 1, 0.05: 1, 0.25: 1, 0.5: 2, 0.75: 3, 0.95: 3, 1.0: 8
    }  # fmt: skip
    assert summary.length_histogram == {1: 1, 2: 2, 4: 0, 8: 1}


@given(st.lists(st.integers(1, 2**40), min_size=1))
def test_the_histogram_counts_each_document_once(lengths: list[int]) -> None:
    bins = store._histogram(np.array(lengths, dtype=np.int64))
    for low, documents in bins.items():
        assert documents == sum(low <= length < 2 * low for length in lengths)
    assert sum(bins.values()) == len(lengths)


def test_an_intact_set_has_no_problems(prefix: Path) -> None:
    assert verify_tokens(prefix) == []


def overwrite(path: Path, content: bytes | bytearray) -> None:
    """As `write_bytes`, with as many bytes as before: some file systems wait for the disk whenever
    a file was cut to nothing and written anew."""
    with path.open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("suffix", [".bin", ".starts"])
def test_every_flipped_bit_is_found(prefix: Path, suffix: str) -> None:
    path = prefix.with_suffix(suffix)
    content = path.read_bytes()
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1
        overwrite(path, damaged)
        problems = verify_tokens(prefix)
        assert any("checksum" in p.what and p.where == str(path) for p in problems), position


def test_cut_and_missing_files_are_named(prefix: Path) -> None:
    path = prefix.with_suffix(".bin")
    path.write_bytes(path.read_bytes()[:-2])
    prefix.with_suffix(".starts").unlink()
    assert [(p.where, "cut short" in p.what) for p in verify_tokens(prefix)] == [
        (str(path), True),
        (str(prefix.with_suffix(".starts")), False),
    ]
    prefix.with_suffix(".json").unlink()
    assert "unfinished" in verify_tokens(prefix)[0].what


@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_ids_outside_the_vocabulary_are_found(
    prefix: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_format, "PIECE", piece)
    ids = np.fromfile(prefix.with_suffix(".bin"), dtype="<u2")
    ids[10] = 257
    ids.tofile(prefix.with_suffix(".bin"))
    forge_checksums(prefix)
    problems = verify_tokens(prefix)
    assert len(problems) == 1
    assert "the id 257 at position 10" in problems[0].what


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([1, 3, 4, 12], "first document begins at position 1"),
        ([0, 4, 4, 12], "document 1 does not end"),
        ([0, 3, 2, 12], "document 1 does not end"),
        ([0, 3, 4, 14], "document 3 does not end"),
        ([0, 3, 4, 2**64 - 1], "document 2 does not end"),
    ],
)
def test_wrong_starts_are_found(prefix: Path, starts: list[int], words: str) -> None:
    np.array(starts, dtype="<u8").tofile(prefix.with_suffix(".starts"))
    forge_checksums(prefix)
    problems = verify_tokens(prefix)
    assert len(problems) == 1
    assert words in problems[0].what


# ------------------------------------------------------------------ every flipped bit


def test_no_flipped_bit_of_a_manifest_goes_unnoticed(prefix: Path) -> None:
    path, missed = prefix.with_suffix(".json"), []
    content = path.read_bytes()
    for at in range(len(content)):
        flipped = content[at] ^ (1 << at % 7)
        overwrite(path, content[:at] + bytes([flipped]) + content[at + 1 :])
        try:
            read_manifest(prefix)
        except UserError:
            continue
        missed.append(at)
    assert missed == []
    # The last one flipped the end of the file, and `verify` reports what reading it does.
    assert verify_tokens(prefix) != []
    path.write_bytes(content)
    assert verify_tokens(prefix) == []


def test_a_manifest_of_an_earlier_program_is_read_and_known_to_be_unsealed(prefix: Path) -> None:
    manifest = find_manifest(prefix)
    assert manifest is not None and manifest.sealed
    forge_checksums(prefix)
    earlier = find_manifest(prefix)
    assert earlier == replace(manifest, sealed=False)
    assert verify_tokens(prefix) == []


def test_every_flipped_bit_of_a_ledger_is_noticed(prefix: Path) -> None:
    """Unless it changes nothing that JSON keeps."""
    path, value = file_of(prefix, ".ledger.json"), {"lines": 7, "kept": 6, "dropped": {"é": 1}}
    write_sealed_json(path, value)
    assert verify_tokens(prefix) == []
    content = path.read_bytes()
    for at, bit in itertools.product(range(len(content)), range(8)):
        changed = bytearray(content)
        changed[at] ^= 1 << bit
        overwrite(path, changed)
        same = False
        with contextlib.suppress(ValueError):
            same = json.loads(bytes(changed)) == json.loads(content)
        assert bool(verify_tokens(prefix)) is not same, (at, bit)
