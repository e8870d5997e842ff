"""The check that systems measured side by side compute the same tells what it has to tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gristmill.config.load import load_text
from gristmill.config.schema import RunConfig

pytest.importorskip("transformers")

import same_function as module


def run(*, activation: str = "gelu", **settings: object) -> RunConfig:
    text = f"""
name = "check"
[model]
layers = 3
heads = 4
width = 64
context = 32
vocab = 300
activation = "{activation}"
[data]
paths = "none"
[train]
until = "1 steps"
batch = 2
[runtime]
device = "cpu"
"""
    return load_text(text, [f"model.{k}={v}" for k, v in settings.items()], place="test")


@pytest.mark.parametrize(
    ("activation", "bias"),
    [
        ("gelu", "true"),
        ("gelu_tanh", "false"),
        pytest.param("gelu", "false", marks=pytest.mark.slow),
        pytest.param("gelu_tanh", "true", marks=pytest.mark.slow),
    ],
)
def test_the_same_function_is_seen_as_such(activation: str, bias: str) -> None:
    [found] = module.compare_functions(run(activation=activation, bias=bias), nanogpt=None)
    assert (found.peer, found.same, found.activation) == ("transformers", True, activation)
    assert found.difference < module.TOLERANCE / 5


@pytest.mark.parametrize(
    "settings",
    [{"activation": "relu2"}, {"attention_scale": 0.26}, {"attention_scale": 5.0}],
    ids=str,
)
def test_another_function_is_told_apart(settings: dict[str, Any]) -> None:
    [found] = module.compare_functions(run(**settings), nanogpt=None)
    assert not found.same and found.difference > 100 * module.TOLERANCE


def test_the_two_gelus_are_told_apart() -> None:
    config = module.small_copy(run(activation="gelu"))
    ours = module.large_weights(config)
    theirs = module.transformers_logits(config, ours)
    assert module.compare("transformers", ours, theirs, activation="gelu").same
    assert not module.compare("transformers", ours, theirs, activation="gelu_tanh").same


def test_a_difference_ends_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = module.Comparison("transformers", 0.5, "gelu")
    monkeypatch.setattr(module, "compare_functions", lambda config, nanogpt: [other])
    with pytest.raises(SystemExit, match="not to be compared with ours: transformers"):
        module.check_same_function({"gristmill": run()}, nanogpt=Path())
    assert "transformers computes ANOTHER FUNCTION than ours" in capsys.readouterr().out
