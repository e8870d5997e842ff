"""The plan of a job: nodes and time for a number of hours, and a warning when time is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.base.units import parse_seconds
from gristmill.cli.launch_plan import time_warning, with_hours
from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig

RUN = """
name = "planned"
folder = "{folder}"
preset = "gpt2-xl"
model.vocab = 50257
precision.compute = "bf16"
data = {{ paths = "none", tokenizer = "gpt2" }}
train = {{ until = "50B tokens", batch = 512, micro_batch = 4 }}
parallel.dp_shard = 8
launch = {{ gpu = "h100-80gb", gpus_per_node = 8 }}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def run(folder: Path, *settings: str) -> RunConfig:
    return load_text(RUN.format(folder=folder), settings, place="test")


def test_more_nodes_for_less_time(folder: Path) -> None:
    chosen = {}
    for hours in ("36", "1d", "12h"):
        config, words = with_hours(run(folder), hours)
        assert config.launch is not None and config.launch.time is not None
        chosen[hours] = config.launch.nodes
        limit = 36 * 3600 if hours == "36" else parse_seconds(hours)
        assert parse_seconds(config.launch.time) <= limit
        assert f"launch.nodes = {config.launch.nodes}" in words
        # The time is enough by its own plan, and one node less would not be.
        assert time_warning(config) is None
    assert chosen["36"] < chosen["1d"] < chosen["12h"]


def test_fewer_nodes_than_chosen_would_not_do(folder: Path) -> None:
    config, _ = with_hours(run(folder), "9h")
    assert config.launch is not None and config.launch.nodes > 1
    fewer = run(folder, f"launch.nodes={config.launch.nodes // 2}", 'launch.time="9h"')
    warning = time_warning(fewer)
    assert warning is not None and "launch.time is 9h" in warning


def test_the_processes_of_a_node_are_filled_in(folder: Path) -> None:
    config, _ = with_hours(run(folder, "launch.gpus_per_node=unset"), "2d")
    assert config.launch is not None
    assert (config.launch.processes_per_node, config.launch.gpus_per_node) == (8, None)


def test_what_is_saved_is_not_planned_again(folder: Path) -> None:
    short = run(folder, "launch.nodes=2", 'launch.time="8h"')
    first = time_warning(short)
    assert first is not None
    jobs = int(re.findall(r"about (\d+) jobs", first)[0])
    assert jobs >= 3
    # Of 95,368 steps.
    (folder / "checkpoints" / "step-00080000").mkdir(parents=True)
    assert time_warning(short) is None


def test_a_job_that_is_not_queued_again_says_how_far_it_comes(folder: Path) -> None:
    warning = time_warning(
        run(folder, "launch.nodes=2", 'launch.time="8h"', "launch.requeue=false")
    )
    assert warning is not None
    share = int(re.findall(r"after (\d+)% of its steps", warning)[0])
    assert 5 < share < 60


def test_a_job_that_cannot_work_is_told(folder: Path) -> None:
    warning = time_warning(run(folder, "train.micro_batch=64", 'launch.time="8h"'))
    assert warning is not None and "most of it activations" in warning


@pytest.mark.parametrize(
    ("settings", "hours", "where"),
    [
        ((), "1", "--hours"),
        ((), "soon", "--hours"),
        (("launch.gpu=unset",), "24", "launch.gpu"),
        (("launch.gpu=h900",), "24", "launch.gpu"),
        (("train.micro_batch=64",), "24", "--hours"),
    ],
)
def test_what_cannot_be_is_refused(
    folder: Path, settings: tuple[str, ...], hours: str, where: str
) -> None:
    with pytest.raises(UserError) as refused:
        with_hours(run(folder, *settings), hours)
    assert where in str(refused.value)


def test_nothing_is_said_without_the_kind_of_gpus(folder: Path) -> None:
    assert time_warning(run(folder, "launch.gpu=unset", 'launch.time="1h"')) is None
    assert time_warning(run(folder)) is None
