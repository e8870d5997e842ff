"""Tables as text: quotes, delimiters, line ends, ragged rows, and what ends the reading."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.text.sources.reading import SourceReader
from gristmill.text.sources.source import ReadOptions, Reason

ReadBlocks = Callable[..., Any]
SIZES = [1, 7, 64, 1 << 20]


def written(folder: Path, content: str | bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("size", SIZES)
def test_quotes_and_line_ends(
    tmp_path: Path, read_blocks: ReadBlocks, end: str, mark: str, size: int
) -> None:
    lines = [
        'title,"text, all",n',
        'One,"A text, quoted.',
        "",
        'It says ""yes"".",1',
        'Two,5" of rain,2',
        '"Three"rd,"",3',
        ",Zwölf,",
        '"Four","end"',
    ]
    path = written(tmp_path, mark + end.join(lines))
    reading = read_blocks(path, keys=("text, all", "title"), block_bytes=size)
    assert reading.failure is None
    assert reading.rows == [
        (2, (f'A text, quoted.{end}{end}It says "yes".', "One")),
        (5, ('5" of rain', "Two")),
        (6, (Reason.EMPTY_TEXT, "Threerd")),
        (7, ("Zwölf", Reason.EMPTY_TEXT)),
        (8, ("end", "Four")),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text;note\n"a,b;c";x\n'),
        ("a.csv", 'text\tnote\n"a,b;c"\tx\n'),
        ("a.csv", '"text";"a,,,b"\n"a,b;c";x\n'),
        ("a.tsv", "text\tn,o,t,e\na,b;c\tx\n"),
        ("a.CSV", 'text,note\n"a,b;c",x\n'),
        ("a.csv", 'text\n"a,b;c"\n'),
        ("a.csv", '"li\nne",text\nx,"a,b;c"'),
        ("a.csv", '\ufeff"li\nne",text\nx,"a,b;c"'),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_delimiters_and_headers(
    tmp_path: Path, read_blocks: ReadBlocks, name: str, content: str, size: int
) -> None:
    reading = read_blocks(written(tmp_path, content, name), block_bytes=size)
    assert reading.values == ["a,b;c"] and reading.failure is None
    assert reading.rows[0][0] == content[: content.index("a,b")].count("\n") + 1


@pytest.mark.parametrize("size", SIZES)
def test_ragged_and_bad_rows_are_dropped_one_by_one(
    tmp_path: Path, read_blocks: ReadBlocks, size: int
) -> None:
    content = b'id,text\n1\n\n2,b\xffd\n3,"fine",more\n4,car\rriage,"\n5,na\xc3\xafve\n6,"a\rb"\r\n'
    reading = read_blocks(written(tmp_path, content), keys=("text", "id"), block_bytes=size)
    assert reading.failure is None
    assert reading.rows == [
        (2, (Reason.MISSING_KEY, "1")),
        (3, (Reason.EMPTY_TEXT, Reason.EMPTY_TEXT)),
        (4, (Reason.INVALID_UTF8, "2")),
        (5, ("fine", "3")),
        (6, (Reason.INVALID_CSV, Reason.INVALID_CSV)),
        (7, ("naïve", "5")),
        (8, ("a\rb", "6")),
    ]


@pytest.mark.parametrize("content", ["", "text\n", "text", "\ufefftext\r\n"])
def test_a_table_without_rows(tmp_path: Path, read_blocks: ReadBlocks, content: str) -> None:
    reading = read_blocks(written(tmp_path, content))
    assert reading.rows == [] and reading.failure is None


def test_a_long_cell(tmp_path: Path, read_blocks: ReadBlocks) -> None:
    text = "a long text, " * 20_000
    assert read_blocks(written(tmp_path, f'text\n"{text}"\n')).values == [text]


CELL = st.text(st.sampled_from('a",;\t\r\n ü\U0001f600\ufeff\u2028\x00'), max_size=8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(CELL, min_size=2, max_size=2), max_size=8),
    # With other line ends the standard library leaves a carriage return without quotes.
    st.sampled_from([("\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_ALL), ("\r\n", csv.QUOTE_MINIMAL)]),
    st.integers(1, 64),
)
@example([['"', "\r"]], ("\r\n", csv.QUOTE_MINIMAL), 1)
def test_written_tables_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    read_blocks: ReadBlocks,
    records: list[list[str]],
    style: tuple[str, Literal[0, 1]],
    size: int,
) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator=style[0], quoting=style[1])
    writer.writerows([["text", "b"], *records])
    path = written(tmp_path_factory.mktemp("in"), file.getvalue())
    keys = ("text", "b")
    whole = read_blocks(path, keys=keys)
    read = [tuple(cell or Reason.EMPTY_TEXT for cell in record) for record in records]
    assert [row for _, row in whole.rows] == read
    check_blocks(read_blocks, path, size=size, keys=keys)


@settings(deadline=None, max_examples=120)
@given(st.text(st.sampled_from('a",\r\nü'), max_size=60), st.integers(1, 20))
@example('"\n","a\r"b\n",c\n', 3)
def test_where_blocks_are_cut_decides_nothing_even_in_bad_tables(
    tmp_path_factory: pytest.TempPathFactory, read_blocks: ReadBlocks, body: str, size: int
) -> None:
    path = written(tmp_path_factory.mktemp("in"), "text,b\n" + body)
    check_blocks(read_blocks, path, size=size, keys=("b", "text"))


def check_blocks(read_blocks: ReadBlocks, path: Path, *, size: int, keys: tuple[str, ...]) -> None:
    whole = read_blocks(path, keys=keys)
    small = read_blocks(path, keys=keys, block_bytes=size)
    assert (small.rows, str(small.failure)) == (whole.rows, str(whole.failure))
    if whole.failure:
        assert small.lines[-1] == whole.lines[-1]
        return
    for block, line, count in zip(small.blocks, small.lines, small.counts, strict=True):
        rest = read_blocks(path, begin=block.end, line=line, keys=keys, block_bytes=size)
        assert (rest.rows, rest.failure) == (small.rows[count:], None)


# ------------------------------------------------------------------ what ends the reading


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("title,body\nx,y\n", 1, "there is no column 'text'; the columns are: title, body"),
        ("\n", 1, "there is no column 'text'"),
        (",".join("abcdefghijklmnopqrstuvwxyz") + "\n", 1, "s, t and 6 more"),
        ("x" * 1000 + "\n", 1, "x…"),
        ('text\nfine\n"a"\n"no\nend\n', 4, "a quoted cell of the record that begins here"),
        ('"text\nfine\n', 1, "a quoted cell of the record that begins here"),
        ("text\rfine\rfine\n", 1, "a carriage return"),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_hopeless_tables(tmp_path: Path, content: str, line: int, words: str, size: int) -> None:
    path = written(tmp_path, content)
    with pytest.raises(UserError) as caught:
        list(SourceReader([str(path)], options=ReadOptions(block_bytes=size)))
    assert words in caught.value.problems[0].what
    assert caught.value.problems[0].where == f"{path}:{line}"
    assert caught.value.exit is Exit.DATA


@pytest.mark.parametrize("size", SIZES)
def test_a_record_over_the_limit(tmp_path: Path, read_blocks: ReadBlocks, size: int) -> None:
    path = written(tmp_path, 'text,b\n"fine\n",\n"' + "x" * 49 + "\n" + "y" * 47 + '",\nz,\n')
    assert read_blocks(path, block_bytes=size, line_limit=100).failure is None
    reading = read_blocks(path, block_bytes=size, line_limit=99)
    assert reading.failure is not None and "longer than 99 B" in reading.failure.what
    assert reading.rows == [(2, ("fine\n",))] and reading.lines[-1] == 4


@pytest.mark.parametrize("begin", ["", "text\nfine\n"])
def test_an_unclosed_quote_does_not_take_all_memory(
    tmp_path: Path, read_blocks: ReadBlocks, begin: str
) -> None:
    path = written(tmp_path, begin + '"no end' + "\n" * 2_000_000)
    reading = read_blocks(path, block_bytes=100, line_limit=1000)
    assert reading.failure is not None and "longer than" in reading.failure.what
    assert reading.lines[-1] == (3 if begin else 1)
    assert reading.blocks[-1].disk < 2000


def test_compressed(tmp_path: Path, read_blocks: ReadBlocks, compression: Any) -> None:
    texts = [format(n**30, "x") for n in range(3000)]
    table = "text\n" + "".join(f'"{text}\n"\n' for text in texts)
    compressed = compression.compress(table.encode())
    path = written(tmp_path, compressed, f"a.csv{compression.suffix}")
    reading = read_blocks(path, block_bytes=1 << 12)
    assert reading.values == [text + "\n" for text in texts]
    assert reading.rows[-1][0] == 6000
    assert reading.blocks[-1].disk == path.stat().st_size


def test_damaged(
    tmp_path: Path, read_blocks: ReadBlocks, compression: Any, damage: Callable[[bytes], bytes]
) -> None:
    texts = [f"{n**30:x}\n" for n in range(3000)]
    table = "text\n" + "".join(f'"{text}"\n' for text in texts)
    whole = compression.compress(table.encode())
    content = damage(whole)
    path = written(tmp_path, content, f"a.csv{compression.suffix}")
    reading = read_blocks(path, block_bytes=1 << 12)
    assert reading.failure is not None
    assert "damaged or incomplete" in reading.failure.remedy
    if len(content) < len(whole):
        assert reading.values == texts[: len(reading.values)]


@pytest.mark.parametrize(("name", "sign"), [("a.csv", ","), ("a.tsv", "\t")])
def test_prepared_by_one_process_or_two(
    tmp_path: Path, name: str, sign: str, prepared_alike: Callable[..., None]
) -> None:
    content = f'title{sign}text\nOne{sign}"eins\nü"\nTwo{sign}zwei\n'
    path = written(tmp_path, content, name)
    prepared_alike(path, kept=2)
