"""A checkpoint whose bytes are as they were written, but whose content cannot be used, is set aside
like a damaged one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from gristmill.base.errors import Exit, UserError
from gristmill.config.schema import RunConfig
from gristmill.track.metrics import read_metrics
from gristmill.track.records import EventRecord
from gristmill.train.run import Run

if TYPE_CHECKING:
    from conftest import Content

MakeRun = Callable[..., RunConfig]
Rewrite = Callable[..., None]
SETTINGS = ('train.until="6 steps"', 'checkpoint.every="3 steps"', 'validate.every="6 steps"')


def put(table: str, name: str, value: Any) -> Callable[[Content], None]:
    return lambda content: getattr(content, table).__setitem__(name, value)


def fill(table: str, name: str, value: float) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        getattr(content, table)[name].view(-1)[-1] = value

    return change


def nested(content: Content) -> None:
    content.state = "[" * 50_000 + "]" * 50_000


def a_list(content: Content) -> None:
    content.state = [content.state]


CHANGES: dict[str, tuple[Callable[[Content], Any], str]] = {
    "shape": (
        put("optimizer", "exp_avg/norm.weight", torch.zeros(3)),
        "exp_avg/norm.weight has shape (3,), not (16,)",
    ),
    "rank": (
        put("optimizer", "exp_avg_sq/embedding.weight", torch.zeros(384)),
        "exp_avg_sq/embedding.weight has shape (384,), not (384, 16)",
    ),
    "width": (
        put("optimizer", "exp_avg_sq/embedding.weight", torch.zeros(384, 8)),
        "exp_avg_sq/embedding.weight has shape (384, 8), not (384, 16)",
    ),
    "scalar": (
        put("optimizer", "step/norm.weight", torch.zeros(2)),
        "step/norm.weight has shape (2,), not ()",
    ),
    "dtype": (
        put("optimizer", "exp_avg/norm.weight", torch.zeros(16, dtype=torch.bfloat16)),
        "exp_avg/norm.weight is stored as torch.bfloat16, not torch.float32",
    ),
    "weight dtype": (
        put("model", "norm.weight", torch.zeros(16, dtype=torch.int64)),
        "norm.weight is stored as torch.int64, not torch.float32",
    ),
    "kind": (
        lambda content: content.optimizer.pop("exp_avg/norm.weight"),
        "there is no exp_avg/norm.weight",
    ),
    "parameter": (
        lambda content: [content.optimizer.pop(f"{kind}/norm.weight") for kind in ADAM],
        "there is no exp_avg_sq/norm.weight",
    ),
    "nan moment": (
        fill("optimizer", "exp_avg_sq/norm.weight", torch.nan),
        "NaN or infinite numbers in exp_avg_sq/norm.weight",
    ),
    "infinite weight": (
        fill("model", "blocks.1.mlp.up.weight", -torch.inf),
        "NaN or infinite numbers in blocks.1.mlp.up.weight",
    ),
    "list": (a_list, "its content is not a table"),
    "nesting": (nested, "nested too deeply"),
    "steps": (
        lambda content: content.state["progress"].update(steps=-5),
        "progress.steps is -5",
    ),
    "other step": (
        lambda content: content.state["progress"].update(steps=3),
        "progress.steps is 3, but the name of the folder says 6",
    ),
    "table": (put("state", "identity", None), "identity is None, not a table"),
    "counter": (
        lambda content: content.state["counters"].update(nan="7"),
        "counters.nan is '7'",
    ),
    "best": (put("state", "best", {"step": 900, "loss": 1.0}), "a later step"),
    "best loss": (put("state", "best", {"step": 3, "loss": "1"}), "not a step and its loss"),
    "layout": (put("state", "layout", {"tp": "two"}), "not the sizes of a mesh"),
}
ADAM = ("step", "exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of 6 steps with checkpoints at 3 and 6, by their optimizer, once they were made."""
    return {"root": tmp_path_factory.mktemp("trained")}


@pytest.fixture
def copy_of(trained: dict[str, Path], make_run: MakeRun, tmp_path: Path) -> Callable[..., Path]:
    def copy(*settings: str) -> Path:
        key = " ".join(settings)
        if key not in trained:
            Run(make_run(*SETTINGS, *settings)).train()
            trained[key] = trained["root"] / str(len(trained))
            shutil.move(tmp_path / "run", trained[key])
        shutil.copytree(trained[key], tmp_path / "run")
        return tmp_path / "run/checkpoints/step-00000006"

    return copy


def warnings(folder: Path) -> str:
    records = read_metrics(folder / "metrics.jsonl")
    told = [one for one in records if isinstance(one, EventRecord) and one.level == "warning"]
    return "\n".join(record.text for record in told)


@pytest.mark.parametrize("change", CHANGES)
def test_the_one_before_an_unusable_checkpoint_is_resumed(
    copy_of: Callable[..., Path], make_run: MakeRun, tmp_path: Path, rewrite: Rewrite, change: str
) -> None:
    newest = copy_of()
    apply, said = CHANGES[change]
    rewrite(newest, apply)
    assert Run(make_run(*SETTINGS)).train().step == 6
    text = warnings(tmp_path / "run")
    assert "skipped damaged checkpoint step-00000006" in text and said in text
    assert (newest.parent / "damaged-step-00000006").is_dir()
    again = load_file(newest / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in again.values())


@pytest.mark.parametrize(
    ("name", "kind"), [("norm.weight", "exp_avg_sq"), ("blocks.0.mlp.up.weight", "momentum")]
)
def test_every_role_of_muon_has_its_kinds(
    copy_of: Callable[..., Path],
    make_run: MakeRun,
    tmp_path: Path,
    rewrite: Rewrite,
    name: str,
    kind: str,
) -> None:
    muon = 'optim.type="muon"'
    newest = copy_of(muon)
    rewrite(newest, lambda content: content.optimizer.pop(f"{kind}/{name}"))
    Run(make_run(*SETTINGS, muon)).train()
    assert f"there is no {kind}/{name}" in warnings(tmp_path / "run")


@pytest.mark.parametrize("scale", [{}, {"scale": -1, "clean": 0, "patience": 2}, "large"])
def test_an_unusable_loss_scale_is_found(
    copy_of: Callable[..., Path], make_run: MakeRun, tmp_path: Path, rewrite: Rewrite, scale: Any
) -> None:
    newest = copy_of('precision.compute="fp16"')
    rewrite(newest, lambda content: content.state["strategy"].update(loss_scale=scale))
    Run(make_run(*SETTINGS, 'precision.compute="fp16"')).train()
    assert "loss scale" in warnings(tmp_path / "run")


def test_nothing_changes_if_all_are_unusable(
    copy_of: Callable[..., Path], make_run: MakeRun, tmp_path: Path, rewrite: Rewrite
) -> None:
    for path in copy_of().parent.glob("step-*"):
        rewrite(path, fill("model", "norm.weight", torch.nan))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="every checkpoint of this run is damaged") as error:
        Run(make_run(*SETTINGS)).train()
    assert error.value.exit is Exit.STORAGE
    assert str(error.value).count("NaN or infinite numbers in norm.weight") == 2
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_checkpoint_of_another_version_is_refused_and_stays(
    copy_of: Callable[..., Path], make_run: MakeRun, rewrite: Rewrite
) -> None:
    """A program that is older than the checkpoint must not go back to an older one."""
    newest = copy_of()
    rewrite(newest, put("state", "version", 3))
    with pytest.raises(UserError, match="this program reads"):
        Run(make_run(*SETTINGS)).train()
    assert newest.is_dir()


def step_after_resuming(config: RunConfig) -> int:
    return Run(config).train().step


@pytest.mark.slow
def test_all_ranks_reject_what_one_of_them_cannot_use(
    copy_of: Callable[..., Path],
    crowd: Callable[..., list[Any]],
    make_run: MakeRun,
    tmp_path: Path,
    rewrite: Rewrite,
) -> None:
    """The last row of the embedding belongs to the second rank alone."""
    newest = copy_of()
    rewrite(newest, fill("model", "embedding.weight", torch.nan))
    config = make_run(*SETTINGS, "parallel.dp_shard=2", 'parallel.timeout="30s"')
    assert crowd(2, step_after_resuming, config) == [6, 6]
    text = warnings(tmp_path / "run")
    assert "NaN or infinite numbers in embedding.weight" in text
    assert "it is now damaged-step-00000006" in text
