"""Runs with other orders, several token sets and documents kept apart: they resume exactly too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.tokens.format import NewSet
from gristmill.tokens.store import create_tokens, find_manifest, open_tokens
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Runs

MakeRun = Callable[..., RunConfig]


@pytest.fixture
def second(tokens: Path, tmp_path: Path) -> Path:
    """Another set of the same tokenizer: every other document of the first."""
    reader, manifest = open_tokens(tokens), find_manifest(tokens)
    assert manifest is not None
    writer = create_tokens(
        NewSet(
            tmp_path / "second",
            vocab_size=257,
            end_of_text=256,
            tokenizer=manifest.tokenizer,
            format="megatron",
        )
    )
    bounds = [*reader.document_starts.tolist(), len(reader)]
    for number in range(0, len(bounds) - 1, 2):
        begin, end = bounds[number], bounds[number + 1]
        writer.add(reader.read(begin, end - begin))
    writer.finish()
    return tmp_path / "second"


SETTINGS = {
    "sequential": ["data.order=sequential"],
    "megatron": ["data.order=megatron", "data.seed=1234"],
    "masked": ["data.documents=masked", "train.accumulate=2"],
    "switches": [
        "data.order=megatron",
        "data.reset_attention=true",
        "data.reset_positions=true",
        "data.mask_end_of_text=true",
    ],
    "in memory": ["data.in_memory=true"],
    "sampled softmax": ["train.sampled_softmax=64"],
    "by weight": ['data.paths={{"{tokens}"=3,"{second}"=1}}'],
    "exhaustive": ['data.paths=["{tokens}","{second}"]', "data.blend=exhaustive"],
    "megatron by weight": ["data.order=megatron", 'data.paths={{"{tokens}"=3,"{second}"=1}}'],
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_stopped_and_resumed_equals_uninterrupted(
    make_run: MakeRun,
    tokens: Path,
    second: Path,
    stop_after: Callable[[int], None],
    settings: list[str],
    runs: Runs,
) -> None:
    words = [word.format(tokens=tokens, second=second) for word in settings]
    whole, parted = make_run(*words, folder="whole"), make_run(*words, folder="parted")
    assert Run(whole).train().exit is Exit.DONE
    stop_after(5)
    first = Run(parted).train()
    assert (first.exit, first.step) == (Exit.STOPPED, 5)
    stop_after(1000)
    last = Run(parted).train()
    assert last.exit is Exit.DONE
    assert whole.folder is not None and parted.folder is not None
    runs.assert_same(Path(whole.folder), Path(parted.folder))


def test_keeping_documents_apart_changes_the_loss(make_run: MakeRun, runs: Runs) -> None:
    joined = Run(make_run(folder="joined")).train()
    masked = Run(make_run("data.documents=masked", folder="masked")).train()
    assert runs.history(joined.folder)[0] != runs.history(masked.folder)[0]


def test_a_sampled_softmax_estimates_the_loss(make_run: MakeRun, runs: Runs) -> None:
    full = Run(make_run(folder="full")).train()
    sampled = Run(make_run("train.sampled_softmax=192", folder="sampled")).train()
    exact, estimate = (runs.history(one.folder) for one in (full, sampled))
    assert exact[0] == estimate[0], "validation before the first step uses the whole vocabulary"
    assert exact[1]["kind"] == "step"
    assert exact[1]["loss"] != estimate[1]["loss"]
    assert estimate[1]["loss"] == pytest.approx(exact[1]["loss"], rel=0.02)


def test_megatrons_order_is_prolonged_where_that_does_not_change_it(make_run: MakeRun) -> None:
    Run(make_run("data.order=megatron", 'train.until="4 steps"')).train()
    assert Run(make_run("data.order=megatron", 'train.until="6 steps"')).train().step == 6
    longer = ["data.order=megatron", 'train.until="300 steps"', "train.time_limit=1s"]
    with pytest.raises(UserError) as caught:
        Run(make_run(*longer)).train()
    assert "data.samples (epochs): was ['1'] and is now ['3" in str(caught.value)
    assert Run(make_run(*longer, "data.samples=24")).train().step > 6


@pytest.mark.parametrize("change", ['data.paths={{"{tokens}"=2,"{second}"=1}}', "data.seed=7"])
def test_another_mixture_or_seed_is_another_run(
    make_run: MakeRun, tokens: Path, second: Path, change: str
) -> None:
    blend = f'data.paths={{"{tokens}"=3,"{second}"=1}}'
    Run(make_run(blend, 'train.until="2 steps"')).train()
    word = change.format(tokens=tokens, second=second)
    with pytest.raises(UserError, match="cannot be resumed with these settings"):
        Run(make_run(blend, word, 'train.until="3 steps"')).train()


def test_a_large_index_is_kept_in_the_run_or_where_the_user_says(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.data.build.WORTH_CACHING", 10)
    few = 'train.until="2 steps"'
    Run(make_run("data.order=megatron", few)).train()
    assert len(list((tmp_path / "run" / "index").glob("*/shuffle.npy"))) == 1
    shared = tmp_path / "shared"
    for folder in ("one", "two"):
        words = ("data.order=megatron", f"data.cache={shared}", few)
        Run(make_run(*words, folder=folder)).train()
        assert not (tmp_path / folder / "index").exists()
    assert len(list(shared.glob("*/shuffle.npy"))) == 1
