"""Damaged token files: ids that no vocabulary has, and content that is not what was written."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from gristmill.base.errors import DataError, Exit
from gristmill.config.schema import DataConfig
from gristmill.data.build import OrderSpec, build_stream
from gristmill.data.dataset import open_data
from gristmill.data.intact import ContentCheck
from gristmill.data.loader import Loader, validation_batches
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens

ORDERS = ["shuffled", "random", "sequential", "megatron"]
FORMATS = {"flat": ".bin", "megatron": ".bin", "llmc": "_000001.bin", "npy": "_000002.npy"}


def write(prefix: Path, *, format: str = "flat", vocab: int = 100) -> Path:
    shard_size = 700 if format in ("llmc", "npy") else None
    tokenizer = {"type": "test", "fingerprint": "abc"}
    new = NewSet(prefix, vocab, None, tokenizer, format=format, shard_size=shard_size)
    writer = create_tokens(new)
    for begin in range(0, 1000, 50):
        writer.add(np.arange(begin, begin + 50) % 100)
    writer.finish()
    return prefix


def put(file: Path, *, token: int, value: int, header: int = 0, dtype: str = "<u2") -> None:
    raw = bytearray(file.read_bytes())
    at = header + token * np.dtype(dtype).itemsize
    raw[at : at + np.dtype(dtype).itemsize] = np.array([value], dtype).tobytes()
    file.write_bytes(raw)


# ------------------------------------------------------------------ ids outside the vocabulary


@pytest.mark.parametrize("order", ORDERS)
def test_an_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path, order: str) -> None:
    write(tmp_path / "set")
    put(tmp_path / "set.bin", token=123, value=60_000)
    config = DataConfig.model_validate(
        {"paths": str(tmp_path / "set"), "order": order, "split": "9,1"}
    )
    train = open_data(config, sequence=8).train
    loader = Loader(build_stream(config, train, OrderSpec(8, 1, 2000, None)), 4, 1, vocab=100)
    steps = (loader.step_batches(first) for first in range(0, 2000, 4))
    with pytest.raises(DataError) as caught:
        list(steps)
    assert caught.value.exit is Exit.DATA
    (problem,) = caught.value.problems
    assert problem.where == str(tmp_path / "set.bin")
    assert problem.what == "token 123 is the id 60000, outside the vocabulary of 100"


def test_in_a_set_of_several_files_the_place_is_that_in_the_file(tmp_path: Path) -> None:
    write(tmp_path / "set", format="llmc")
    put(tmp_path / "set_000002.bin", token=5, value=100, header=1024)
    held = open_data(DataConfig(paths=str(tmp_path / "set"), split="1,9"), sequence=8)
    assert held.validation is not None
    with pytest.raises(DataError, match=r"_000002.bin: token 5 \(token 705 of the set\) is the id"):
        list(validation_batches(held.validation, sequence=8, windows=999, batch=8, vocab=100))
    # Nobody says how many ids there are.
    assert list(validation_batches(held.validation, sequence=8, windows=999, batch=8))


def test_a_negative_id_is_outside_of_any_vocabulary(tmp_path: Path) -> None:
    write(tmp_path / "set", format="megatron", vocab=70_000)
    put(tmp_path / "set.bin", token=3, value=-7, dtype="<i4")
    config = DataConfig(paths=str(tmp_path / "set"), order="sequential")
    train = open_data(config, sequence=8).train
    loader = Loader(build_stream(config, train, OrderSpec(8, 1, 100, None)), 4, 1, vocab=70_000)
    with pytest.raises(DataError, match="token 3 is the id -7, outside"):
        loader.step_batches(0)


# ------------------------------------------------------------------ content


@pytest.mark.parametrize(("format", "ending"), FORMATS.items())
def test_one_changed_bit_is_found_and_the_file_named(
    tmp_path: Path, format: str, ending: str
) -> None:
    prefixes = [str(write(tmp_path / name, format=format)) for name in ("good", "bad")]
    ContentCheck(prefixes).start()
    file = tmp_path / f"bad{ending}"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(DataError, match="its checksum differs") as caught:
        ContentCheck(prefixes).start()
    assert caught.value.problems[0].where == str(file)
    assert caught.value.exit is Exit.DATA


def test_a_large_set_is_compared_while_training_runs(tmp_path: Path) -> None:
    write(tmp_path / "set")
    check = ContentCheck([str(tmp_path / "set")])
    check.start(at_once=0)
    assert check.in_background
    while not check.done:
        threading.Event().wait(0.01)
    check.require_intact()
    put(tmp_path / "set.bin", token=0, value=99)
    check = ContentCheck([str(tmp_path / "set")])
    check.start(at_once=0)
    while not check.done:
        threading.Event().wait(0.01)
    with pytest.raises(DataError, match="its checksum differs"):
        check.require_intact()


def test_stopping_does_not_wait_for_the_rest(tmp_path: Path) -> None:
    """At a byte in an hour it would take years."""
    check = ContentCheck([str(write(tmp_path / "set"))], rate=1 / 3600)
    check.start(at_once=0)
    assert not check.done
    check.stop()
    while not check.done:
        threading.Event().wait(0.01)
    check.require_intact()


def test_a_file_that_cannot_be_read_is_damage(tmp_path: Path) -> None:
    check = ContentCheck([str(write(tmp_path / "set"))])
    (tmp_path / "set.starts").unlink()
    with pytest.raises(DataError, match=r"set.starts: cannot read: No such file"):
        check.start()


def test_sets_without_a_manifest_have_nothing_to_compare(tmp_path: Path) -> None:
    write(tmp_path / "set", format="megatron")
    (tmp_path / "set.json").unlink()
    check = ContentCheck([str(tmp_path / "set")])
    assert check.bytes == 0
    check.start()
    assert check.done and not check.in_background
