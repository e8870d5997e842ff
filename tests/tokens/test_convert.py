"""From any format to any other, and several sets into one."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.base.errors import Exit, UserError
from gristmill.tokens import format as reading
from gristmill.tokens.convert import CopyProgress, Origin, convert_tokens
from gristmill.tokens.format import NewSet, TokenReader
from gristmill.tokens.store import FORMATS, Reading, create_tokens, open_tokens, verify_tokens

SPEC = {"type": "test", "fingerprint": "f" * 64}
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
NAMES = sorted(FORMATS)


def write(prefix: Path, documents: list[list[int]], **options: Any) -> Path:
    writer = create_tokens(
        NewSet(prefix, **({"vocab_size": 100, "end_of_text": 99, "tokenizer": SPEC} | options))
    )
    for document in documents:
        writer.add(document)
    writer.finish(text_bytes=7)
    return prefix


def documents_of(reader: TokenReader) -> list[list[int]]:
    bounds = [*reader.document_starts.tolist(), len(reader)]
    return [reader.read(a, b - a).tolist() for a, b in itertools.pairwise(bounds)]


def size_for(format: str, size: int) -> int | None:
    return size if FORMATS[format].sharded else None


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
def test_every_format_from_every_other(tmp_path: Path, source: str, target: str) -> None:
    write(tmp_path / "a", DOCUMENTS, format=source, shard_size=size_for(source, 4))
    info = convert_tokens(
        [tmp_path / "a"], tmp_path / "b", format=target, shard_size=size_for(target, 2)
    )
    assert documents_of(open_tokens(tmp_path / "b")) == DOCUMENTS
    assert verify_tokens(tmp_path / "b") == []
    before = open_tokens(tmp_path / "a").info
    assert (info.format, info.vocab_size, info.end_of_text) == (target, 100, 99)
    assert (info.tokenizer, info.text_bytes) == (before.tokenizer, 7)
    # It is of the ids as they are stored, and the older formats of Megatron know int32 only.
    assert (info.fingerprint == before.fingerprint) == (info.dtype == before.dtype)


@settings(deadline=None, max_examples=40)
@given(
    vocab_size=st.sampled_from([2, 257, 65499, 65500, 65536, 65537, 2**31]),
    path=st.lists(st.sampled_from(NAMES), min_size=2, max_size=5),
    size=st.integers(1, 30),
    piece=st.integers(1, 40),
    data=st.data(),
)
def test_round_trips_change_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    vocab_size: int,
    path: list[str],
    size: int,
    piece: int,
    data: st.DataObject,
) -> None:
    document = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=20)
    documents = data.draw(st.lists(document, min_size=1, max_size=10))
    folder = tmp_path_factory.mktemp("sets")
    format = path[0]
    options = {"format": format, "shard_size": size_for(format, size), "vocab_size": vocab_size}
    write(folder / "0", documents, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PIECE", piece)
        for number, format in enumerate(path[1:]):
            convert_tokens(
                [folder / str(number)],
                folder / str(number + 1),
                format=format,
                shard_size=size_for(format, size),
            )
    last = open_tokens(folder / str(len(path) - 1))
    assert documents_of(last) == documents
    assert last.info.vocab_size == vocab_size
    again = write(folder / "again", documents, **(options | {"format": format}
                  | {"shard_size": size_for(format, size)}))  # fmt: skip
    for suffix in (".bin", ".idx", ".starts"):
        one, two = (Path(f"{prefix}{suffix}") for prefix in (folder / str(len(path) - 1), again))
        assert one.exists() == two.exists()
        assert not one.exists() or one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("target", NAMES)
def test_merging_is_writing_all_documents_in_order(tmp_path: Path, target: str) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", [[50], [60, 61]], format="npy", shard_size=2)
    write(tmp_path / "c", [[70]], format="megatron")
    order = ["b", "a", "c", "a"]
    info = convert_tokens([tmp_path / name for name in order], tmp_path / "all", format=target)
    wanted = [[50], [60, 61], *DOCUMENTS, [70], *DOCUMENTS]
    assert documents_of(open_tokens(tmp_path / "all")) == wanted
    assert info.text_bytes == 28
    write(tmp_path / "direct", wanted, format=target)
    for path in tmp_path.glob("direct*"):
        if path.suffix != ".json":
            assert path.read_bytes() == Path(str(path).replace("direct", "all")).read_bytes()


def test_the_format_is_the_first_source_s(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS, format="megatron")
    write(tmp_path / "b", DOCUMENTS)
    assert convert_tokens([tmp_path / "a", tmp_path / "b"], tmp_path / "c").format == "megatron"


def test_sequences_survive_between_megatron_sets(tmp_path: Path) -> None:
    writer = create_tokens(
        NewSet(tmp_path / "a", vocab_size=100, end_of_text=99, tokenizer=SPEC, format="megatron")
    )
    writer.append(np.arange(6), starts=np.array([0, 4]), sequences=np.array([0, 1, 4, 5]))
    writer.finish()
    convert_tokens([tmp_path / "a"], tmp_path / "b")
    assert (tmp_path / "a.idx").read_bytes() == (tmp_path / "b.idx").read_bytes()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "b", DOCUMENTS, tokenizer={"fingerprint": "0123456789abcdef"})
    with pytest.raises(UserError, match=r"b: .*another tokenizer than .*a \(0123456789ab and ffff"):
        convert_tokens([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    origin = Origin(100, None, SPEC)
    with pytest.raises(
        UserError, match=r"b: .* made with tokenizer 0123456789ab, and the one given"
    ):
        convert_tokens([tmp_path / "b"], tmp_path / "c", origin=origin)
    assert not list(tmp_path.glob("*c*"))


def silent(path: Path, ids: list[int], dtype: str = "<u2") -> Path:
    np.save(f"{path}_1.npy", np.array(ids, dtype=dtype))
    return path


def test_sets_that_say_nothing_merge_if_they_store_ids_alike(tmp_path: Path) -> None:
    one, two = silent(tmp_path / "one", [1, 2]), silent(tmp_path / "two", [300])
    info = convert_tokens([one, two], tmp_path / "both")
    assert (info.vocab_size, info.tokenizer, info.text_bytes) == (301, None, None)
    assert documents_of(open_tokens(tmp_path / "both")) == [[1, 2], [300]]
    assert open_tokens(tmp_path / "both").info == info
    wide = silent(tmp_path / "wide", [1], "<u4")
    with pytest.raises(UserError, match=r"the ids are uint32 and those of .* are uint16"):
        convert_tokens([one, wide], tmp_path / "c")
    ours = write(tmp_path / "ours", DOCUMENTS)
    for pair in ([one, ours], [ours, one]):
        with pytest.raises(
            UserError, match=r"one: .*do not state which tokenizer(.|\n)*--tokenizer"
        ):
            convert_tokens(pair, tmp_path / "c")


def test_a_tokenizer_that_is_given_is_checked_against_every_id(tmp_path: Path) -> None:
    one = silent(tmp_path / "one", [1, 2, 99])
    ours = write(tmp_path / "ours", DOCUMENTS)
    info = convert_tokens([one, ours], tmp_path / "c", origin=Origin(100, 99, SPEC))
    assert (info.tokenizer, info.vocab_size, info.end_of_text) == ("f" * 64, 100, 99)
    with pytest.raises(UserError, match="the id 99 is outside the vocabulary of 50"):
        convert_tokens([one], tmp_path / "d", origin=Origin(50, None, SPEC))
    assert not [name for name in os.listdir(tmp_path) if "d" in name]


@pytest.mark.parametrize("largest", [65535, 65536, 70000, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("target", NAMES)
def test_ids_never_wrap(tmp_path: Path, largest: int, target: str) -> None:
    one = silent(tmp_path / "one", [0, largest], "<u4")
    if target.startswith("megatron") and largest >= 2**31:
        with pytest.raises(UserError, match="ids below"):
            convert_tokens([one], tmp_path / "two", format=target)
        return
    info = convert_tokens([one], tmp_path / "two", format=target)
    assert open_tokens(tmp_path / "two").read(0, 2).tolist() == [0, largest]
    assert info.vocab_size == largest + 1


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    one = silent(tmp_path / "one", [1, -1], "<i4")
    with pytest.raises(UserError, match="the id -1 is outside"):
        convert_tokens([one], tmp_path / "two")


def test_plain_ids_are_cut_into_documents(tmp_path: Path) -> None:
    np.array([1, 2, 9, 3, 9], dtype="<u2").tofile(tmp_path / "train.bin")
    convert_tokens(
        [tmp_path / "train.bin"],
        tmp_path / "set",
        format="megatron",
        reading=Reading(format="flat", end_of_text=9),
    )
    assert documents_of(open_tokens(tmp_path / "set")) == [[1, 2, 9], [3, 9]]
    assert open_tokens(tmp_path / "set").info.end_of_text == 9


def test_a_set_is_not_written_over_its_source(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(UserError, match="name of its source") as caught:
        convert_tokens([tmp_path / "a"], tmp_path / "b" / ".." / "a", overwrite=True)
    assert caught.value.exit is Exit.REFUSED


def test_progress_is_told_and_memory_bounded_by_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PIECE", 4)
    write(tmp_path / "a", [*DOCUMENTS, list(range(20))])
    told: list[CopyProgress] = []
    convert_tokens([tmp_path / "a"], tmp_path / "b", format="npy", progress=told.append)
    assert [state.tokens for state in told] == [4, 8, 12, 16, 20, 24, 28, 29]
    assert {state.tokens_total for state in told} == {29}
    assert [state.documents for state in told][-2:] == [4, 4]
    assert documents_of(open_tokens(tmp_path / "b"))[3] == list(range(20))


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", DOCUMENTS)
    before = sorted(os.listdir(tmp_path))

    def stop(_: CopyProgress) -> None:
        raise KeyboardInterrupt

    for format in NAMES:
        with pytest.raises(KeyboardInterrupt):
            convert_tokens([tmp_path / "a"], tmp_path / "b", format=format, progress=stop)
    assert sorted(os.listdir(tmp_path)) == before


KILLED = """
import os, signal, sys
from gristmill.tokens import convert, writer
def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)
writer.TokenWriter.finish = kill
convert.convert_tokens(sys.argv[1:3], sys.argv[3])
"""


def test_a_killed_merge_leaves_nothing_visible_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    parts = [write(tmp_path / name, [[1, 2], [3]]) for name in ("a", "b")]
    output = tmp_path / "out" / "merged"
    words = [sys.executable, "-c", KILLED, *map(str, parts), str(output)]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    left = sorted(path.name for path in output.parent.iterdir())
    assert left and all(name.startswith(".") for name in left)
    info = convert_tokens(parts, output)
    assert (info.tokens, info.documents) == (6, 4)
    left = sorted(path.name for path in output.parent.iterdir())
    assert left == ["merged.bin", "merged.json", "merged.starts"]
