"""JSON that is not one value to a line: arrays and concatenated values, whole and broken."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.text.prepare.prepare import prepare
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.sources.reading import find_sources
from gristmill.text.sources.source import ReadOptions, Reason, Value
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

ReadBlocks = Callable[..., Any]
TINY = 7


def written(folder: Path, content: str | bytes, name: str = "a.json") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ------------------------------------------------------------------ what a file is


@pytest.mark.parametrize(
    ("content", "shape"),
    [
        ("", ".jsonl"),
        (" \n\n", ".jsonl"),
        ('{"text": "a"}', ".jsonl"),
        ('\ufeff\n {"text": "a"} \nnonsense', ".jsonl"),
        ('{"text": "' + "long " * 1000 + '"}\n{"text": "b"}\n', ".jsonl"),
        (b'{"text": "\xff"}\n', ".jsonl"),
        ("[]", ".json-array"),
        ('\ufeff \r\n\t[{"text": "a"}]', ".json-array"),
        (" " * 5000 + "[1]", ".json-array"),
        ('{\n"text": "a"\n}', ".json-values"),
        ('{"text": "a"}, \n{"text": "b"}', ".json-values"),
        ('{"text": "a"} {"text": "b"}', ".json-values"),
        ('"a"\n"b"', ".json-values"),
        ('{"text": "' + "x" * 100_000 + '",\n"n": 1}', ".json-values"),
    ],
)
def test_the_beginning_tells_what_a_file_is(
    tmp_path: Path, content: str | bytes, shape: str
) -> None:
    packed = gzip.compress(content.encode() if isinstance(content, str) else content)
    for path in (written(tmp_path, content), written(tmp_path, packed, "b.json.gz")):
        (source,) = find_sources([str(path)], ReadOptions()).sources
        assert source.extension == shape


def test_a_file_that_was_replaced_is_looked_at_again(
    tmp_path: Path, read_blocks: ReadBlocks
) -> None:
    assert read_blocks(written(tmp_path, '["a"]')).values == ["a"]
    assert read_blocks(written(tmp_path, '{"text": "b"}')).values == ["b"]


# ------------------------------------------------------------------ rows


def test_an_array_of_objects_and_texts(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    path = written(
        tmp_path,
        '[{"text": "one", "title": "1"},\n'
        '"two\\n\\"2\\"", {"text":\n"three"}\n,'
        '{"data": [{"text": "no"}]}, 4, null, [1, ["]"]],\n{"text": 5}, {"text": ""}, "", true]\n',
    )
    assert read_blocks(path, keys=("text", "title")).rows == [
        (1, ("one", "1")),
        (2, ('two\n"2"', 'two\n"2"')),
        (2, ("three", Reason.MISSING_KEY)),
        (4, (Reason.MISSING_KEY, Reason.MISSING_KEY)),
        (4, (Reason.WRONG_TYPE, Reason.WRONG_TYPE)),
        (4, (Reason.WRONG_TYPE, Reason.WRONG_TYPE)),
        (4, (Reason.WRONG_TYPE, Reason.WRONG_TYPE)),
        (5, (Reason.WRONG_TYPE, Reason.MISSING_KEY)),
        (5, (Reason.EMPTY_TEXT, Reason.MISSING_KEY)),
        (5, (Reason.EMPTY_TEXT, Reason.EMPTY_TEXT)),
        (5, (Reason.WRONG_TYPE, Reason.WRONG_TYPE)),
    ]


def test_concatenated_values(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    path = written(
        tmp_path, '\ufeff{\n "text": "one"\n}\n{"text": "two"}"three"4\n,5 {"text":"six"}'
    )
    assert read_blocks(path).rows == [
        (1, ("one",)),
        (4, ("two",)),
        (4, ("three",)),
        (4, (Reason.WRONG_TYPE,)),
        (5, (Reason.WRONG_TYPE,)),
        (5, ("six",)),
    ]
    assert read_blocks(written(tmp_path, "1 2")).values == [Reason.WRONG_TYPE] * 2


def test_bad_letters_spoil_one_row_only(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    path = written(tmp_path, b'[{"text": "\xff"}, "\xff", "\\ud800", {"text": "\\ud800"}, "fine"]')
    assert read_blocks(path).values == [Reason.INVALID_UTF8] * 4 + ["fine"]


@pytest.mark.parametrize("content", ["[]", " [ \n ] ", "\ufeff[]\n"])
def test_an_array_of_nothing(tmp_path: Path, read_blocks: ReadBlocks, content: str) -> None:
    reading = read_blocks(written(tmp_path, content), block_bytes=1)
    assert reading.rows == [] and reading.failure is None


LETTERS = st.text(st.sampled_from('a"\\\n[]{},: \tü\U0001f600\ufeff\u2028'), max_size=12)
TEXT = st.builds(str.__mul__, LETTERS, st.sampled_from([1, 1, 1, 60]))
VALUE = st.recursive(
    TEXT | st.none() | st.booleans() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ROW = st.fixed_dictionaries({}, optional={"text": TEXT, "b": VALUE, "c": VALUE}) | VALUE


def spelled(values: list[Any], shape: str, indent: int | None, ascii_only: bool) -> str:
    words = [json.dumps(value, indent=indent, ensure_ascii=ascii_only) for value in values]
    if shape == ".json-array":
        return "[\n" + "\n,\n".join(words) + "]\n"
    # The first line decides what the file is.
    return "\n1 " + "\n".join(words)


def expected(value: Any, key: str) -> Value:
    if isinstance(value, dict):
        if key not in value:
            return Reason.MISSING_KEY
        value = value[key]
    return (value or Reason.EMPTY_TEXT) if isinstance(value, str) else Reason.WRONG_TYPE


@settings(deadline=None, max_examples=60)
@given(
    st.lists(ROW, max_size=8),
    st.sampled_from([".json-array", ".json-values"]),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 64) | st.integers(64, 2000),
)
@example([{"text": '\\"'}, '\\\\"]'], ".json-array", 1, True, 1)
def test_where_blocks_are_cut_decides_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    read_blocks: ReadBlocks,
    values: list[Any],
    shape: str,
    indent: int | None,
    ascii_only: bool,
    size: int,
) -> None:
    content = spelled(values, shape, indent, ascii_only)
    path = written(tmp_path_factory.mktemp("in"), content)
    keys = ("text", "b")
    whole = read_blocks(path, keys=keys)
    given = values if shape == ".json-array" else [1, *values]
    assert [row for _, row in whole.rows] == [tuple(expected(v, k) for k in keys) for v in given]
    assert whole.failure is None
    small = read_blocks(path, keys=keys, block_bytes=size)
    assert small.rows == whole.rows and small.failure is None
    for block, line, count in zip(small.blocks, small.lines, small.counts, strict=True):
        rest = read_blocks(path, begin=block.end, line=line, keys=keys, block_bytes=size)
        assert rest.failure is None
        assert rest.rows == small.rows[count:]


# ------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize(
    ("content", "rows", "line", "words"),
    [
        ('["a",\n"b"', 2, 2, "the file ends before its array does"),
        ('["a",\n', 1, 2, "the file ends before its array does"),
        ("[", 0, 1, "the file ends before its array does"),
        ('["a",\n{"text":\n "b', 1, 2, "the value that begins here has no end"),
        ('["a"\n"b"]', 1, 2, "expected a comma or the end of the array"),
        ('["a",\n]', 1, 2, "expected a value here"),
        ("[,]", 0, 1, "expected a value here"),
        ('["a"]\n["b"]', 1, 2, "more text after the end of the array"),
        ('["a",\n\n{"text": \n"b" "c"}, "d"]', 1, 4, "invalid JSON: Expecting ',' delimiter"),
        ('["a",\ntru, "b"]', 1, 2, "invalid JSON: Expecting value"),
        ('["a",\n{"text": "b"], "c"]', 1, 2, "invalid JSON"),
        ('["a",\n"b\nc"]', 1, 2, "invalid JSON: Invalid control character"),
        ('["a",\n' + "[" * 100_000 + "]" * 100_000 + "]", 1, 2, "invalid JSON"),
        ('"a"\n}', 1, 2, "expected a value here"),
        ('{\n"text": "a"\n}\n{"text": "cut', 1, 4, "the value that begins here has no end"),
        ('{"text": "cut\n{"text": "b"}', 0, 1, "Invalid control character"),
        ('{"text": "cut {"text": "b"}', 0, 1, "invalid JSON: Expecting ',' delimiter"),
        ('["a",\n{"text": tru', 1, 2, "invalid JSON"),
        ('["a",\n{"text": 1', 1, 2, "the value that begins here has no end"),
        ('["a",\n"b", truex]', 2, 2, "invalid JSON: Extra data"),
        ('["a",\n"b", ' + "9" * 5000 + "]", 2, 2, "invalid JSON: Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("size", [1, TINY, 1 << 20])
def test_what_is_not_json_ends_the_reading_with_its_place(
    tmp_path: Path,
    read_blocks: ReadBlocks,
    content: str,
    rows: int,
    line: int,
    words: str,
    size: int,
) -> None:
    if size == 1 and len(content) > 10_000:
        size = 1 << 10
    reading = read_blocks(written(tmp_path, content), block_bytes=size)
    assert reading.failure is not None and words in reading.failure.what
    assert reading.values == ["a", "b"][:rows]
    assert reading.lines[-1] == line


@pytest.mark.parametrize("size", [1, TINY, 1 << 20])
def test_a_value_over_the_limit(tmp_path: Path, read_blocks: ReadBlocks, size: int) -> None:
    content = '["short",\n"' + "x" * 98 + '"\n, "more"]'
    path = written(tmp_path, content)
    assert len(read_blocks(path, block_bytes=size, line_limit=100).rows) == 3
    reading = read_blocks(path, block_bytes=size, line_limit=99)
    assert reading.failure is not None and "longer than 99 B" in reading.failure.what
    assert reading.rows == [(1, ("short",))] and reading.lines[-1] == 2


def test_an_endless_value_is_not_waited_for(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    path = written(tmp_path, '["short", "' + "x" * 100_000)
    reading = read_blocks(path, block_bytes=100, line_limit=1000)
    assert reading.failure is not None and "longer than" in reading.failure.what
    assert reading.blocks[-1].disk < 2000


def test_compressed(tmp_path: Path, read_blocks: ReadBlocks, compression: Any) -> None:
    texts = [format(n**30, "x") for n in range(3000)]
    whole = compression.compress(json.dumps(texts, indent=0).encode())
    path = written(tmp_path, whole, f"a.json{compression.suffix}")
    reading = read_blocks(path, block_bytes=1 << 12)
    assert reading.values == texts and reading.rows[-1][0] == 3001
    disks = [block.disk for block in reading.blocks]
    assert disks == sorted(disks) and disks[-1] == path.stat().st_size
    middle = reading.blocks[len(reading.blocks) // 2]
    rest = read_blocks(path, begin=middle.end, block_bytes=1 << 12)
    assert rest.values == texts[len(texts) - len(rest.values) :] and rest.blocks[0].content


def test_damaged(
    tmp_path: Path, read_blocks: ReadBlocks, compression: Any, damage: Callable[[bytes], bytes]
) -> None:
    whole = json.dumps([format(n**30, "x") for n in range(3000)]).encode()
    content = damage(compression.compress(whole))
    path = written(tmp_path, content, f"a.json{compression.suffix}")
    reading = read_blocks(path, block_bytes=1 << 12)
    assert reading.failure is not None
    assert "damaged or incomplete" in reading.failure.remedy


@pytest.mark.parametrize("content", ['[{"text": "%s"}\n,"%s"]', '{"text":\n"%s"}\n"%s"'])
def test_prepared_by_one_process_or_two(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content % ("one ü", "two"))
    made = []
    for workers in (1, 2):
        output = tmp_path / f"set-{workers}"
        result = prepare(PrepareRequest([str(path)], output, ByteTokenizer(), workers=workers))
        assert result.keys[0].ledger.kept == 2
        made.append((tmp_path / f"set-{workers}.bin").read_bytes())
    assert made[0] == made[1]
