"""Downstream tasks along a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EvaluationRecord, EventRecord, StepRecord, ValidationRecord
from gristmill.train.run import Run
from gristmill.train.samples import Sample

TEXTS = [{"text": f"the mill {word} corn"} for word in ("grinds", "turns", "wants")]


@pytest.fixture
def tasks(tmp_path: Path) -> tuple[Path, Path]:
    good, long = tmp_path / "told.jsonl", tmp_path / "long.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
    long.write_text(json.dumps({"context": "a", "continuation": "b" * 4000}) + "\n")
    return good, long


def test_scores_are_recorded_and_kept(
    make_run: Callable[..., RunConfig], tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    names = json.dumps([str(file) for file in tasks])
    settings = ("evaluate.every=2 steps", f"evaluate.tasks={names}", "evaluate.items=2")
    config = make_run('train.until="5 steps"', *settings)
    Run(config).train()
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = [one for one in records if isinstance(one, EvaluationRecord)]
    assert [(one.step, one.metric) for one in found] == [
        (step, metric) for step in (2, 4, 5) for metric in ("acc", "perplexity")
    ]
    assert {one.name for one in found} == {"told"} and {one.items for one in found} == {2}
    kept = json.loads((tmp_path / "run" / "evals" / "step-00000004-told.json").read_text())
    assert kept["measures"]["perplexity"]["value"] == pytest.approx(found[3].value)
    warnings = [one.text for one in records if isinstance(one, EventRecord) and "long" in one.text]
    assert len(warnings) == 1 and "more than the model's context" in warnings[0]
    validation = next(one for one in records if isinstance(one, ValidationRecord))
    assert validation.bits_per_byte == pytest.approx(validation.loss / 0.6931472, rel=0.05)


def test_a_kill_before_the_last_evaluation_is_made_good(
    make_run: Callable[..., RunConfig],
    tmp_path: Path,
    tasks: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last step is saved, because a save was due, and neither evaluated nor sampled yet."""
    config = make_run(
        'train.until="4 steps"',
        'checkpoint.every="2 steps"',
        "checkpoint.background=false",
        "evaluate.every=3 steps",
        f"evaluate.tasks={json.dumps([str(tasks[0])])}",
        "sample.every=3 steps",
        'sample.prompts=["the"]',
        "sample.tokens=4",
    )

    class KilledError(BaseException):
        pass

    def die(self: object, *, finished: bool) -> None:
        raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(Sample, "at_end", die)
        with pytest.raises(KilledError):
            Run(config).train()
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()

    def evaluated() -> list[tuple[int, str]]:
        records = read_metrics(tmp_path / "run" / "metrics.jsonl")
        found = [one for one in records if isinstance(one, EvaluationRecord)]
        return [(one.step, one.metric) for one in found]

    before = evaluated()
    assert before == [(3, "acc"), (3, "perplexity")]
    for _ in range(2):
        assert Run(config).train().exit is Exit.DONE
        assert evaluated() == [*before, (4, "acc"), (4, "perplexity")]
        assert (tmp_path / "run" / "samples" / "step-00000004.txt").is_file()
    validations = [
        one.step
        for one in read_metrics(tmp_path / "run" / "metrics.jsonl")
        if isinstance(one, ValidationRecord)
    ]
    assert validations.count(4) == 1


@pytest.mark.slow
def test_training_is_not_changed_by_tasks(
    make_run: Callable[..., RunConfig], tmp_path: Path, tasks: tuple[Path, Path]
) -> None:
    names = [str(tasks[0])]
    if importlib.util.find_spec("lm_eval"):
        # The harness has a loop, seeds and a mode of the model of its own.
        names.append(str(tmp_path / "told.yaml"))
        Path(names[1]).write_text(
            "task: told_by_the_harness\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {tasks[0]}}}}}\n"
            "output_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: ' corn'\n"
            "metric_list: [{metric: acc}]\n"
        )
    losses = []
    for extra in ((), ("evaluate.every=1 steps", f"evaluate.tasks={json.dumps(names)}")):
        folder = tmp_path / f"run-{len(extra)}"
        words = ('train.until="4 steps"', f'folder="{folder}"', "model.dropout=0.2", *extra)
        Run(make_run(*words)).train()
        records = read_metrics(folder / "metrics.jsonl")
        losses.append([one.loss for one in records if isinstance(one, StepRecord)])
    assert losses[0] == losses[1]
    assert {one.name for one in records if isinstance(one, EvaluationRecord)} >= {"told"}


def test_missing_data_is_told_before_the_first_step(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = make_run("evaluate.every=1 steps", 'evaluate.tasks=["lambada=nowhere.jsonl"]')
    with pytest.raises(UserError, match=r"nowhere.jsonl: there is no such file"):
        Run(config).train()
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
