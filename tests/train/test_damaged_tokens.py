"""Runs whose token files are damaged end with a sentence."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gristmill.base.errors import DataError, Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.data.intact import ContentCheck
from gristmill.train.run import Run

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def reversed_ids(tokens: Path, tmp_path: Path) -> Path:
    """A copy of the token set with all ids in reverse order: every one of them is a valid id."""
    for file in tokens.parent.glob("tiny.*"):
        copy = shutil.copytree if file.is_dir() else shutil.copy
        copy(file, tmp_path / file.name.replace("tiny", "reversed"))
    ids = np.fromfile(tmp_path / "reversed.bin", "<u2")
    ids[::-1].tofile(tmp_path / "reversed.bin")
    return tmp_path / "reversed"


@pytest.mark.parametrize("setting", ["paths", "validation"])
def test_damage_is_found_before_the_first_step(
    make_run: MakeRun, reversed_ids: Path, tmp_path: Path, setting: str
) -> None:
    config = make_run()
    update = {setting: str(reversed_ids), "split": "9,1" if setting == "paths" else None}
    config = config.model_copy(update={"data": config.data.model_copy(update=update)})
    with pytest.raises(UserError, match=r"reversed.bin: the content is not what was") as caught:
        Run(config).train()
    assert caught.value.exit is Exit.DATA
    assert not (tmp_path / "run").exists()


def test_damage_in_a_large_set_ends_the_run(
    make_run: MakeRun, reversed_ids: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, compare = threading.Event(), ContentCheck._compare

    def late(self: ContentCheck) -> None:
        arrived.wait()
        compare(self)

    start = functools.partialmethod(ContentCheck.start, at_once=0)
    monkeypatch.setattr(ContentCheck, "start", start)
    monkeypatch.setattr(ContentCheck, "_compare", late)
    config = make_run(f"data.paths={reversed_ids}", 'train.until="100k steps"')
    threading.Timer(0.2, arrived.set).start()
    with pytest.raises(DataError, match=r"steps 0 to [0-9]+ may have trained on it") as caught:
        Run(config).train()
    assert caught.value.exit is Exit.DATA
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "failed" and "reversed.bin" in status["error"]


def test_the_check_can_be_turned_off(make_run: MakeRun, reversed_ids: Path) -> None:
    config = make_run(f"data.paths={reversed_ids}", "data.verify=false")
    assert Run(config).train().exit is Exit.DONE


def test_an_id_outside_the_vocabulary_ends_the_run(make_run: MakeRun, reversed_ids: Path) -> None:
    ids = np.fromfile(reversed_ids.with_suffix(".bin"), "<u2")
    ids[::5] = 300
    ids.tofile(reversed_ids.with_suffix(".bin"))
    config = make_run(f"data.paths={reversed_ids}", "data.verify=false")
    with pytest.raises(DataError, match=r"reversed.bin: token \d+ is the id 300, outside the voc"):
        Run(config).train()
