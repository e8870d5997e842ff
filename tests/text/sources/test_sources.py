"""Reading documents: splits, encodings, compression, places, and what is dropped and why."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.base.files import _SmallReads
from gristmill.text.sources.reading import SourceReader, cut_source, find_sources
from gristmill.text.sources.source import (
    Document,
    DocumentSplit,
    Dropped,
    ReadOptions,
    Reason,
    SkipReason,
)


def texts(*paths: Path | str, json_key: str = "text", **options: Any) -> list[str | Reason]:
    read = ReadOptions(keys=(json_key,), **options)
    items = SourceReader([str(path) for path in paths], options=read)
    return [item.text if isinstance(item, Document) else item.reason for item in items]


def test_every_reason_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        (b'{"text": "good"}', "good"),
        (b'{"text": "cut', Reason.INVALID_JSON),
        (b'{"body": "x"}', Reason.MISSING_KEY),
        (b'{"text": 3}', Reason.WRONG_TYPE),
        (b'{"text": null}', Reason.WRONG_TYPE),
        (b'["text"]', Reason.WRONG_TYPE),
        (b'"text"', Reason.WRONG_TYPE),
        (b'{"text": "\xff"}', Reason.INVALID_UTF8),
        (b'{"text": "\\ud800"}', Reason.INVALID_UTF8),
        (b'{"text": "\\ud83d\\ude00"}', "\U0001f600"),
        (b'{"text": ""}', Reason.EMPTY_TEXT),
        (b"", Reason.EMPTY_TEXT),
        (b"[" * 100_000, Reason.INVALID_JSON),
        (b'{"text": "no newline at the end"}', "no newline at the end"),
    ]
    path.write_bytes(b"\n".join(line for line, _ in lines))
    found = list(SourceReader([str(path)]))
    expected = [
        Dropped(result, f"{path}:{n}") if isinstance(result, Reason) else
        Document(result, f"{path}:{n}")
        for n, (_, result) in enumerate(lines, start=1)
    ]  # fmt: skip
    assert found == expected


@settings(deadline=None)
@given(st.lists(st.text(min_size=1)))
def test_json_lines_come_back(tmp_path_factory: pytest.TempPathFactory, given: list[str]) -> None:
    path = tmp_path_factory.mktemp("in") / "a.jsonl"
    lines = [json.dumps({"body": text}, ensure_ascii=False) for text in given]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    assert texts(path, json_key="body") == given


def test_only_newlines_split_lines(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x0bd\x0ce\x1cf\x85g\rh"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": odd}, ensure_ascii=False) + "\n", "utf-8")
    (tmp_path / "a.txt").write_bytes(odd.encode() + b"\nsecond\n")
    assert texts(tmp_path / "a.jsonl") == [odd]
    assert texts(tmp_path / "a.txt", split=DocumentSplit.LINE) == [odd, "second"]


def test_byte_order_mark_and_carriage_returns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n{"text": "y"}\r\n')
    assert texts(tmp_path / "a.jsonl") == ["x", "y"]
    plain = tmp_path / "a.txt"
    plain.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n")
    assert texts(plain) == ["one\ntwo\n\nthree\n"]
    assert texts(plain, split=DocumentSplit.LINE) == ["one", "two", Reason.EMPTY_TEXT, "three"]
    assert texts(plain, split=DocumentSplit.BLANK) == ["one\ntwo", "three"]


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".csv", ".json", ".jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_recognised(tmp_path: Path, ending: str, encoding: str) -> None:
    text = {
        ".txt": "plain text\nof two lines\n",
        ".csv": "number,text\n1,one\n",
        ".json": '[{"text": "one"},\n{"text": "two"}]',
    }.get(ending, '{"text": "one"}\n{"text": "two"}\n')
    path = tmp_path / f"a{ending}"
    content = text.encode(encoding)
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    name = {"utf-16-le": "UTF-16LE", "utf-16-be": "UTF-16BE"}.get(encoding, encoding.upper())
    for split in DocumentSplit:
        with pytest.raises(UserError) as caught:
            texts(path, split=split)
        (problem,) = caught.value.problems
        assert problem.what.startswith(f"this file is {name}, not UTF-8: ")
        assert problem.remedy == f"convert it: iconv -f {name} -t UTF-8 OLD > NEW"
        assert problem.where == f"{path}:1"


def test_another_part_recognises_the_encoding_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(('{"text": "one"}\n' * 9).encode("utf-16"))
    (source,) = find_sources([str(path)], ReadOptions()).sources
    (block,) = cut_source(source, ReadOptions(), 100)
    assert "UTF-16" in str(block.content.failure)


@pytest.mark.parametrize(
    "content", [b"a", b"a\0b", b"a\0\0\0b", "\N{SNOWMAN}\0x".encode(), bytes(9)]
)
def test_zeros_alone_are_no_other_encoding(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert texts(tmp_path / "a.txt") == [content.decode()]


def test_blocks_know_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    path.write_text("\n\none\ntwo\n \t\n\n\nthree")
    found = list(SourceReader([str(path)], ReadOptions(split=DocumentSplit.BLANK)))
    assert found == [Document("one\ntwo", f"{path}:3"), Document("three", f"{path}:8")]


def test_separated_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\nmore\n<|end|>\ntwo<|end|>three\r\n<|end|>\n<|end|>\xff<|end|>\n")
    expected = ["one\nmore", "two", "three", Reason.EMPTY_TEXT, Reason.INVALID_UTF8]
    lines = [1, 4, 4, 6, 6]
    for block in (1, 7, 1000):
        options = ReadOptions(separator="<|end|>", block_bytes=block)
        found = list(SourceReader([str(path)], options=options))
        assert [item.origin for item in found] == [f"{path}:{line}" for line in lines]
        assert texts(path, separator="<|end|>", block_bytes=block) == expected
    path.write_bytes(b"only one")
    assert texts(path, separator="<|end|>") == ["only one"]
    path.write_bytes(b"a<|end|>" + b"b" * 200 + b"<|end|>")
    with pytest.raises(UserError, match="longer than 100 B"):
        texts(path, separator="<|end|>", line_limit=100)


def test_bad_text_is_dropped_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\nb\xffd\nthree\n")
    assert texts(path, split=DocumentSplit.LINE) == ["one", Reason.INVALID_UTF8, "three"]
    assert texts(path) == [Reason.INVALID_UTF8]
    path.write_bytes(b"")
    assert texts(path) == [Reason.EMPTY_TEXT]
    assert texts(path, split=DocumentSplit.LINE) == []


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files(tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % n for n in range(1000))
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(lines))
    reader = SourceReader([str(path)])
    items = list(reader)
    assert items[999] == Document("999", f"{path}:1000")
    assert reader.bytes_done == reader.bytes_total == path.stat().st_size
    whole = tmp_path / f"a{suffix}"
    whole.write_bytes(compress(b"plain"))
    assert texts(whole) == ["plain"]


def test_zstd(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "x"}\n{"text": "y"}\n'))
    assert texts(path) == ["x", "y"]
    whole = tmp_path / "a.txt.zst"
    whole.write_bytes(zstandard.compress(b"plain"))
    assert texts(whole) == ["plain"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_cut_compressed_file_is_an_error_with_its_place(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(bytes(range(256)) * 999)[:-20])
    for split in DocumentSplit:
        with pytest.raises(UserError, match="damaged or incomplete") as caught:
            texts(path, split=split)
        assert str(path) in str(caught.value.problems[0].where)
        assert caught.value.exit is Exit.DATA


def test_progress_within_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    lines = (json.dumps({"text": format(n**40, "x")}) for n in range(1, 20_000))
    path.write_bytes(lzma.compress("\n".join(lines).encode(), preset=0))
    reader = SourceReader([str(path)], options=ReadOptions(block_bytes=1 << 16))
    total = reader.bytes_total
    assert total is not None
    seen = [reader.bytes_done for _ in reader]
    assert seen == sorted(seen)
    assert 0.3 * total < seen[len(seen) // 2] < 0.8 * total


def test_folders_globs_and_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/.hidden", ".git/d.txt", "e.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "json"}' if name.endswith("l") else name)
    assert texts(tmp_path) == ["a.txt", "b.txt", "deep/c.txt", "json"]
    assert texts(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts(tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "deep/c.txt"]
    assert texts(tmp_path / "e.jsonl", tmp_path / "a.txt") == ["json", "a.txt"]
    assert texts(tmp_path / "deep" / ".hidden") == ["deep/.hidden"]


def test_a_name_with_glob_characters_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("literal")
    assert texts(tmp_path / "a[1].txt") == ["literal"]


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things in it that are not read."""
    folder = tmp_path / "odd"
    for name in ("a.txt", "deep/b.txt", "private/c.txt", "private/deep/d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.txt").write_text("e")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "z.txt").symlink_to(tmp_path / "elsewhere" / "e.txt")
    (folder / "broken.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(folder / "pipe")
    real = os.scandir

    def scandir(path: Any = ".") -> Any:
        # Tests may run as root, whom no permission stops.
        if Path(path) == folder / "private":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    return folder


def test_what_is_left_out_of_a_folder_is_listed(odd_folder: Path) -> None:
    reader = SourceReader([str(odd_folder)])
    assert texts(odd_folder) == ["a.txt", "deep/b.txt", "e"]
    assert {(item.reason, item.origin) for item in reader.skipped} == {
        (SkipReason.UNREADABLE_FOLDER, str(odd_folder / "private")),
        (SkipReason.LINKED_FOLDER, str(odd_folder / "linked")),
        (SkipReason.BROKEN_LINK, str(odd_folder / "broken.txt")),
        (SkipReason.SPECIAL_FILE, str(odd_folder / "pipe")),
    }
    assert len(reader.skipped) == 4


def test_what_a_pattern_leaves_out_is_listed(odd_folder: Path) -> None:
    reader = SourceReader([str(odd_folder / "**" / "*.txt")])
    assert {(item.reason, item.origin) for item in reader.skipped} == {
        (SkipReason.UNREADABLE_FOLDER, str(odd_folder / "private")),
        (SkipReason.BROKEN_LINK, str(odd_folder / "broken.txt")),
    }
    reader = SourceReader([str(odd_folder / "[ad]*")])
    assert [(item.reason, item.origin) for item in reader.skipped] == [
        (SkipReason.UNSEARCHED_FOLDER, str(odd_folder / "deep"))
    ]
    with pytest.raises(UserError, match=r"no file matches that can be read: .*private"):
        SourceReader([str(odd_folder / "priv*")])


def test_a_folder_without_readable_files_says_why(odd_folder: Path) -> None:
    with pytest.raises(UserError, match=r"holds no files that can be read: .*Permission denied"):
        SourceReader([str(odd_folder / "private")])


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"name of a source is empty\n.*current folder is: \."):
        SourceReader([name])
    assert texts(".") == ["a"]


def test_missing_sources_are_named(tmp_path: Path) -> None:
    for name, words in (("no.txt", "no such file"), ("*.txt", "no file matches")):
        with pytest.raises(UserError, match=words) as caught:
            SourceReader([str(tmp_path / name)])
        assert caught.value.exit is Exit.DATA
    with pytest.raises(UserError, match="holds no files"):
        SourceReader([str(tmp_path)])


def test_a_line_over_the_limit_is_an_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 101 + "\n")
    for split, line in ((DocumentSplit.FILE, 1), (DocumentSplit.LINE, 2), (DocumentSplit.BLANK, 1)):
        with pytest.raises(UserError, match="longer than 100 B") as caught:
            texts(path, split=split, line_limit=100)
        assert caught.value.problems[0].where == f"{path}:{line}"
        assert texts(path, split=split, line_limit=108)
    path.write_text("x" * 60 + "\n" + "y" * 60 + "\n")
    with pytest.raises(UserError, match="longer"):
        texts(path, split=DocumentSplit.BLANK, line_limit=100)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"text": "x"}\n{"text": "y"}\n', ["x", "y"]),
        (b'[{"text": "x"},\n"y"]', ["x", "y"]),
        (b"plain\n", ["plain\n"]),
    ],
)
def test_standard_input(
    monkeypatch: pytest.MonkeyPatch, content: bytes, expected: list[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    reader = SourceReader(["-"])
    assert reader.bytes_total is None
    assert next(iter(reader)) == Document(expected[0], "<stdin>:1")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert texts("-") == expected


def test_a_pipe_in_place_of_a_file() -> None:
    process = subprocess.Popen(["printf", r'{"text": "piped"}\n'], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        reader = SourceReader([f"/dev/fd/{process.stdout.fileno()}"])
        assert [item.text for item in reader if isinstance(item, Document)] == ["piped"]
        assert reader.bytes_total is None


def test_a_key_inside_another(tmp_path: Path) -> None:
    lines = [
        ({"meta": {"text": "inside", "a": {"b": "deep"}}}, "inside", "deep"),
        ({"meta.text": "literal", "meta": {"text": "inside"}}, "literal", Reason.MISSING_KEY),
        ({"meta": "no object"}, Reason.MISSING_KEY, Reason.MISSING_KEY),
        ({"meta": {"text": ["x"], "a": {"b": ""}}}, Reason.WRONG_TYPE, Reason.EMPTY_TEXT),
    ]
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        content = json.dumps([line for line, *_ in lines], indent=1)
        if name == "a.jsonl":
            content = "\n".join(json.dumps(line) for line, *_ in lines)
        path.write_text(content)
        assert texts(path, json_key="meta.text") == [first for _, first, _ in lines]
        assert texts(path, json_key="meta.a.b") == [second for *_, second in lines]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("openwebtxt", "did you mean the corpus openwebtext"),
        ("tiny-shakespeare", "did you mean the corpus tinyshakespeare"),
        ("fineweb-edu", "did you mean the corpus fineweb-edu-10bt"),
    ],
)
def test_a_corpus_with_a_similar_name_is_named(name: str, near: str) -> None:
    with pytest.raises(UserError, match=near):
        SourceReader([name])
    with pytest.raises(UserError) as caught:
        SourceReader(["qqqqqq.jsonl"])
    assert caught.value.problems[0].remedy is None


def test_a_pipe_without_a_writer_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.text.sources.source.PATIENCE", 0.01)
    os.mkfifo(tmp_path / "pipe")
    told, notes = threading.Event(), []

    def note(message: str) -> None:
        notes.append(message)
        told.set()

    def write() -> None:
        # Only once the wait was told of; without that, the test ends all the same.
        told.wait(30)
        (tmp_path / "pipe").write_text("late")

    writer = threading.Thread(target=write)
    writer.start()
    ((source,), _) = find_sources([str(tmp_path / "pipe")], ReadOptions(), note=note)
    writer.join()
    assert notes == [f"{tmp_path / 'pipe'}: waiting for another process to write to this pipe"]
    (block,) = cut_source(source, ReadOptions(), 0)
    assert block.content == b"late"


@pytest.mark.parametrize("name", ["zeros.jsonl.gz", "zeros.txt.gz", "zeros.json.gz"])
def test_an_error_in_a_small_file_of_much_text_ends_the_reading(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for damage behind an error is bounded, however much a file decompresses to."""
    path = tmp_path / name
    path.write_bytes(gzip.compress(bytes(16 << 20)))
    monkeypatch.setattr("gristmill.text.sources.reading.LINE_LIMIT", 1 << 20)
    monkeypatch.setattr("gristmill.text.sources.reading.BLOCK_BYTES", 1 << 16)
    read = 0
    readinto = _SmallReads.readinto

    def counted(self: _SmallReads, buffer: Any) -> int:
        nonlocal read
        count = readinto(self, buffer)
        read += count
        return count

    monkeypatch.setattr(_SmallReads, "readinto", counted)
    with pytest.raises(UserError, match=r"longer than 1 MiB|invalid JSON"):
        texts(path, line_limit=1 << 20, block_bytes=1 << 16)
    assert read < 8 << 20
