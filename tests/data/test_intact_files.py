"""Token files that change under a run."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.base.units import Progress
from gristmill.config.schema import DataConfig
from gristmill.data.build import OrderSpec, build_stream
from gristmill.data.dataset import Mixture, open_data
from gristmill.data.intact import FILES_PER_STEP, TokenFileWatch
from gristmill.data.loader import Loader, validation_batches
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens


def write(prefix: Path, tokens: int = 2000) -> Path:
    writer = create_tokens(
        NewSet(
            prefix,
            vocab_size=1000,
            end_of_text=None,
            tokenizer={"type": "test", "fingerprint": "abc"},
            overwrite=True,
        )
    )
    writer.add(np.arange(tokens) % 1000)
    writer.finish()
    return prefix


def make_loader(prefix: Path, *, in_memory: bool = False) -> tuple[Loader, Mixture]:
    config = DataConfig(paths=str(prefix), in_memory=in_memory, split="8,2")
    parts = open_data(config, sequence=8)
    assert parts.validation is not None
    stream = build_stream(config, parts.train, OrderSpec(8, 1, 100, None))
    return Loader(stream, 4, 1), parts.validation


def truncate(file: Path) -> None:
    os.truncate(file, 100)


def grow(file: Path) -> None:
    with file.open("ab") as handle:
        handle.write(b"more")


def rewrite(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))
    os.utime(file, ns=(0, 12345))


CHANGES = {
    "cut": (truncate, "from 4000 bytes to 100"),
    "longer": (grow, "from 4000 bytes to 4004"),
    "written": (rewrite, "was written to during the run"),
    "gone": (Path.unlink, "was removed while the run was reading it"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_ends_the_run_with_a_sentence(tmp_path: Path, change: object, words: str) -> None:
    loader, held = make_loader(write(tmp_path / "set"))
    loader.step_batches(0)
    assert callable(change)
    change(tmp_path / "set.bin")
    for read in (
        lambda: loader.step_batches(4),
        lambda: list(validation_batches(held, sequence=8, windows=4, batch=4)),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert words in str(caught.value)
        assert str(tmp_path / "set.bin") in str(caught.value)
        assert "resumes from the last checkpoint" in str(caught.value)
        assert caught.value.exit is Exit.DATA


def test_the_training_loop_gets_the_sentence_from_the_thread(tmp_path: Path) -> None:
    loader, _ = make_loader(write(tmp_path / "set"))
    stream = loader.starting_at(Progress())
    next(stream)
    truncate(tmp_path / "set.bin")
    with pytest.raises(UserError, match="changed during the run"):
        list(itertools.islice(stream, 20))


def test_what_is_in_memory_may_change_on_disk(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set")
    loader, held = make_loader(prefix, in_memory=True)
    before = loader.step_batches(0)[0].tokens_BT
    (tmp_path / "set.bin").unlink()
    assert (loader.step_batches(0)[0].tokens_BT == before).all()
    assert list(validation_batches(held, sequence=8, windows=4, batch=4))


def test_of_many_files_each_has_its_turn(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(2 * FILES_PER_STEP + 3)]
    for file in files:
        file.write_bytes(b"1234")
    watch = TokenFileWatch(files)
    for _ in range(10):
        watch.check()
    truncate(files[-1])
    turns = (watch.check() for _ in range(4))
    with pytest.raises(UserError):
        list(turns)
    with pytest.raises(UserError):
        watch.check_all()
