"""Where documents come from: packed, compressed, put together, and damage found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import DataError
from gristmill.tokens import origins
from gristmill.tokens.convert import convert_tokens
from gristmill.tokens.format import NewSet
from gristmill.tokens.origins import DocumentOrigin, open_origins, packed
from gristmill.tokens.store import create_tokens, verify_tokens

SPEC = {"type": "bytes", "fingerprint": "x"}
Origins = list[tuple[int, int]]


def write(prefix: Path, rows: Origins, sources: list[str], **options: object) -> Path:
    """A set of one token for each document."""
    asked: dict[str, object] = {"origins": True, **options}
    writer = create_tokens(NewSet(prefix, 300, 256, SPEC, **asked))  # type: ignore[arg-type]
    for source, line in rows:
        one = packed(source, np.array([line]))
        starts = np.zeros(1, np.int64)
        writer.append([7], starts=starts, origins=one if writer.has_origins else None)
    writer.finish(sources=sources)
    return prefix


def read(prefix: Path) -> list[DocumentOrigin]:
    index = open_origins(prefix)
    assert index is not None
    return [index.of(document) for document in range(index.documents)]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2**40 - 1)), min_size=1, max_size=40),
    chunk=st.integers(1, 50),
)
def test_what_is_written_is_read(
    rows: Origins, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    names = ["a.jsonl", "b/ü.txt", "c\udcff.txt", "d"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origins, "_CHUNK", chunk)
        prefix = write(tmp_path_factory.mktemp("set") / "set", rows, names)
        assert read(prefix) == [(names[source], line) for source, line in rows]
        index = open_origins(prefix)
        assert index is not None and set(index.sources) == {names[source] for source, _ in rows}
    assert verify_tokens(prefix) == []


def test_lines_that_follow_each_other_cost_nearly_nothing(tmp_path: Path) -> None:
    rows = [(0, line) for line in range(1, 50_001)]
    prefix = write(tmp_path / "set", rows[:3], ["a"])
    writer = create_tokens(NewSet(tmp_path / "many", 300, 256, SPEC, origins=True))
    lines = np.array([line for _, line in rows])
    writer.append(np.full(len(rows), 7), starts=np.arange(len(rows)), origins=packed(0, lines))
    writer.finish(sources=["a"])
    assert (tmp_path / "many.origins").stat().st_size < 1000
    index = open_origins(tmp_path / "many")
    assert index is not None
    assert index.of(33_333) == ("a", 33_334)
    assert read(prefix) == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.parametrize("format", ["flat", "megatron", "npy"])
def test_sets_that_are_put_together_keep_them(tmp_path: Path, format: str) -> None:
    one = write(tmp_path / "one", [(0, 5), (1, 2)], ["a", "b"])
    two = write(tmp_path / "two", [(0, 9), (1, 1), (1, 4)], ["b", "c"])
    convert_tokens([one, two, one], tmp_path / "all", format=format)
    expected = [*read(one), *read(two), *read(one)]
    assert read(tmp_path / "all") == expected
    assert verify_tokens(tmp_path / "all") == []
    index = open_origins(tmp_path / "all")
    assert index is not None and index.sources == ("a", "b", "c")


def test_of_a_set_without_them_nothing_is_known(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", [(0, 1)], [], origins=False)
    known = write(tmp_path / "known", [(0, 1)], ["a"])
    assert open_origins(plain) is None
    convert_tokens([known, plain], tmp_path / "all")
    assert open_origins(tmp_path / "all") is None


def test_damage_is_found(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [(0, line * 7) for line in range(1, 500)], ["a"])
    file = tmp_path / "set.origins"
    whole = file.read_bytes()
    (tmp_path / "set.origins").write_bytes(whole[:-1])
    assert verify_tokens(prefix)
    for content in (b"", b"x" * 60, whole[:-9], b"GMORIGIN" + b"\xff" * 40):
        file.write_bytes(content)
        with pytest.raises(DataError, match="origins of documents are damaged"):
            open_origins(prefix)
    file.write_bytes(whole[:41] + bytes([whole[41] ^ 255]) + whole[42:])
    index = open_origins(prefix)
    assert index is not None
    with pytest.raises(DataError, match="damaged"):
        index.of(3)
