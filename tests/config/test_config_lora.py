"""Settings of LoRA: what they amount to, and what is refused when a run file is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.config.load import dump_run, load_text
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig
from gristmill.config.schema import RunConfig, parse_model

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "vocab_size": 300,
    "activation_function": "gelu_new",
}
RUN = """\
name = "tuned"
[model]
start = "{start}"
[model.lora]
rank = 8
[data]
paths = "tokens"
[train]
until = "10 steps"
batch = 4
"""


@pytest.fixture
def start(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return tmp_path


def load(start: Path, *words: str) -> RunConfig:
    return load_text(RUN.format(start=start), words, place="run.toml")


def test_what_is_not_given_follows(start: Path) -> None:
    config = load(start)
    lora = config.model.lora
    assert lora is not None and (lora.effective_alpha, lora.scale, lora.layers) == (16, 2, ("*",))
    assert isinstance(config.model, GPTConfig) and config.model.layers == 2
    assert config.model.identity()["lora"] == {"rank": 8, "alpha": 16.0, "layers": ["*"]}
    given = load(start, "model.lora.alpha=4", 'model.lora.layers=["qkv"]').model.lora
    assert given is not None and given.scale == 0.5


def test_a_written_run_file_loads_to_the_same_settings(start: Path) -> None:
    config = load(start, 'model.lora.layers=["qkv","mlp.*"]', "model.lora.dropout=0.1")
    assert load_text(dump_run(config), place="again.toml") == config
    stored = json.loads(json.dumps(config.model.model_dump(exclude_none=True)))
    assert parse_model(stored) == config.model


def test_a_run_of_adapters_is_a_start_without_them(start: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.toml").write_text(dump_run(load(start)))
    text = RUN.format(start=run).replace("[model.lora]\nrank = 8\n", "")
    config = load_text(text, place="run.toml")
    assert config.model.lora is None and config.model.start == str(run)


@pytest.mark.parametrize(
    ("pattern", "chosen"),
    [
        ("*", 8),
        ("qkv", 2),
        ("attention.*", 4),
        ("blocks.1.*", 4),
        ("blocks.0.mlp.up", 1),
        ("*.out", 2),
        ("kv", 0),
        ("head", 0),
    ],
)
def test_patterns_choose_layers(pattern: str, chosen: int) -> None:
    model = GPTConfig(layers=2, heads=2, width=32, context=8)
    lora = LoraConfig(rank=2, layers=(pattern,))
    assert sum(map(lora.chosen, model.linears())) == chosen
    assert bool(list(lora.problems(model.linears()))) == (chosen == 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (['model.lora.layers=["q_proj"]'], r"layers: 'q_proj' matches no linear layer .*\n.*qkv"),
        (['model.lora.layers=["qkv","head"]'], "'head' matches no linear layer in a block"),
        (["model.lora.layers=[]"], "model.lora.layers: tuple should have at least 1 item"),
        (["model.lora.rank=33"], r"rank: 33 is more than blocks.0.attention.qkv has: 32 inputs"),
        (["model.lora.rank=0"], "model.lora.rank: input should be greater than or equal to 1"),
        (
            ["model.lora.ranks=4"],
            r"lora.ranks: there is no such setting\n.*did you mean rank",
        ),
        (["model.lora.rank=unset"], "model.lora.rank: this setting is required"),
        (['optim.type="muon"'], r"optim.type: Muon is made for whole matrices.*\n.*adamw"),
        (["parallel.tp=2"], "parallel.tp: adapters are not divided"),
        (["parallel.pp=2"], "parallel.pp: adapters are not divided"),
        (["parallel.gossip.topology=ring"], "parallel.gossip: workers exchange all weights"),
        (['parallel.local.every="3 steps"'], "parallel.local: workers exchange all weights"),
        (['precision={compute="bf16",fp8=["head"]}'], "precision.fp8: needs trainable layers"),
    ],
)
def test_what_cannot_act_is_refused(start: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(start, *words)


def test_there_must_be_weights_to_adapt(start: Path) -> None:
    sizes = ("layers=2", "heads=2", "width=32", "context=8")
    words = ["model.start=unset", *(f"model.{size}" for size in sizes)]
    with pytest.raises(UserError, match=r"model.lora: there are no weights.*\n.*model.start$"):
        load(start, *words)
    hf = RUN.replace("start =", "hf =").format(start=start)
    with pytest.raises(UserError, match=r"model.lora: there are no weights.*\n.*pretrained"):
        load_text(hf, place="run.toml")
    config = load_text(hf, ["model.init=pretrained"], place="run.toml")
    assert config.model.initial_weights == str(start)
