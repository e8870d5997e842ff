"""Parts of a preset that are left out: dropped because they no longer act, or `unset`."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.config.file_schema import run_file_schema
from gristmill.config.load import dump_run, load_preset, load_text
from gristmill.config.model import GPTConfig
from gristmill.config.optim import AdamWConfig, CosineSchedule, MuonConfig
from gristmill.config.resolve import resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig

BASE = """\
name = "trial"
preset = "modern-small"

[data]
paths = "tokens/books"

[train]
until = "1k steps"
batch = 12
"""


def load(added: str = "", *words: str) -> RunConfig:
    return load_text(BASE + added, words, place="run.toml")


def frozen(config: RunConfig) -> dict[str, Any]:
    """What the run folder would hold, which must be a run as it is."""
    text = dump_run(config)
    assert load_text(text, place="frozen") == config.model_copy(update={"preset": None})
    return tomllib.loads(text)


# ------------------------------------------------------------------ what no longer acts


@pytest.mark.parametrize("in_file", [True, False])
def test_what_a_preset_says_of_a_part_goes_with_the_part(in_file: bool) -> None:
    if in_file:
        config = load("[model]\nvalue_embeddings = 0\nattention_gate = false\n")
    else:
        config = load("", "model.value_embeddings=0", "model.attention_gate=false")
    assert isinstance(config.optim, MuonConfig)
    assert (config.optim.table_lr, config.optim.vector_lr) == (None, None)
    assert not {"table_lr", "vector_lr"} & set(frozen(config)["optim"])
    assert config.optim.embedding_lr == load_preset("modern-small")["optim"]["embedding_lr"]


def test_several_settings_of_one_part_go_together() -> None:
    written = frozen(load("", "model.tie_head=true"))
    assert "head_std" not in written["model"] and "head_lr" not in written["optim"]
    assert written["optim"]["table_lr"] == load_preset("modern-small")["optim"]["table_lr"]


def test_what_the_user_wrote_and_does_nothing_stays_refused() -> None:
    with pytest.raises(UserError) as caught:
        load("[optim]\ntable_lr = 0.1\n", "model.value_embeddings=0", "model.tie_head=true")
    assert [problem.where for problem in caught.value.problems] == ["run.toml:11: optim.table_lr"]


def test_other_mistakes_are_told_beside_what_is_dropped() -> None:
    with pytest.raises(UserError) as caught:
        load("", "model.value_embeddings=0", "model.heads=5")
    assert [problem.where for problem in caught.value.problems] == [
        "command line 'model.heads=5': model.heads"
    ]


# ------------------------------------------------------------------ what is unset


@pytest.mark.parametrize("name", ["logit_cap", "attention_scale", "embedding_std", "zero_init"])
def test_a_preset_s_setting_can_be_taken_away(name: str) -> None:
    default = GPTConfig.model_fields[name].default
    assert getattr(load().model, name) != default
    by_word, by_file = load("", f"model.{name}=unset"), load(f'[model]\n{name} = "unset"\n')
    assert getattr(by_word.model, name) == getattr(by_file.model, name) == default
    assert frozen(by_word) == frozen(by_file)
    assert "unset" not in dump_run(by_word)


def test_a_word_takes_away_what_file_and_preset_say() -> None:
    assert load("[model]\nlogit_cap = 3.0\n").model.logit_cap == 3
    assert load("[model]\nlogit_cap = 3.0\n", "model.logit_cap=unset").model.logit_cap is None


def test_a_word_gives_back_what_the_file_took_away() -> None:
    file = '[model]\nlogit_cap = "unset"\n'
    assert load(file, "model.logit_cap=30.0").model.logit_cap == 30
    words = ("model.logit_cap=unset", "model.logit_cap=7.0")
    assert load("", *words).model.logit_cap == 7
    assert load("", *reversed(words)).model.logit_cap is None


def test_without_its_type_a_table_is_of_the_default_type() -> None:
    assert load("", "optim.type=unset").optim == AdamWConfig()
    assert load("", "schedule.type=unset").schedule == CosineSchedule()
    kept = load("", "preset=gpt2-small", "optim.type=unset", "optim.lr=1e-3").optim
    assert kept == AdamWConfig(lr=1e-3)
    file = '[schedule]\ntype = "cosine"\nmin_lr = 1e-5\n'
    assert load(file, "schedule.type=unset").schedule == CosineSchedule(min_lr=1e-5)
    words = ("schedule.type=unset", "schedule.min_lr=unset")
    assert load("", *words).schedule == CosineSchedule()
    file = '[optim]\ntype = "unset"\nlr = 1e-3\n'
    for word in ("adamw", "unset"):
        assert load(file, f"optim.type={word}").optim == AdamWConfig(lr=1e-3)


def test_a_setting_that_is_gone_may_be_there_as_long_as_it_did_nothing() -> None:
    assert load("[model]\nshortcut = false\nshifted_keys = 0\n") == load()
    for name, value in (("shortcut", "true"), ("shifted_keys", "4")):
        with pytest.raises(UserError, match=rf"model\.{name}: there is no such setting"):
            load(f"[model]\n{name} = {value}\n")


def test_a_table_that_need_not_be_there_can_be_taken_away() -> None:
    file = '[train.ramp]\nstart = 4\nby = 4\nover = 0.3\n[sample]\nevery = "5 steps"\n'
    assert load(file).train.ramp is not None
    config = load(file, "train.ramp=unset", "sample=unset")
    assert config.train.ramp is None and config.sample is None


def test_preset_and_start_can_be_taken_away() -> None:
    sizes = "[model]\nlayers = 2\nheads = 2\nwidth = 32\ncontext = 64\n"
    config = load(sizes, "preset=unset")
    assert config.preset is None and config.optim == AdamWConfig()
    assert load('[model]\nstart = "nowhere"\n', "model.start=unset").model.start is None


def test_to_take_away_what_nobody_set_is_no_mistake() -> None:
    assert load("", "model.kv_heads=unset").model.kv_heads is None


def test_editors_accept_unset_where_there_is_a_default() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = run_file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    good = frozen(load("", "schedule.decay=1"))
    for key in ("logit_cap", "bias", "positions", "init_std"):
        good["model"][key] = "unset"
    jsonschema.validate({**good, "sample": "unset"}, schema)
    for wrong in ({"optim": "unset"}, {"model": {**good["model"], "layers": "unset"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **wrong}, schema)


# ------------------------------------------------------------------ rates and scales


def test_a_preset_s_rate_is_not_taken_for_another_scale() -> None:
    with pytest.raises(UserError) as caught:
        load("", "optim.scale=rms")
    assert str(caught.value).startswith("preset modern-small: optim.lr: 0.02, which is for scale")
    with pytest.raises(UserError, match=r"optim\.lr: 0\.02, which"):
        load("", "optim.scale=rms", "optim.lr=unset")
    assert load("", "optim.scale=rms", "optim.lr=0.02").optim.lr == 0.02
    assert frozen(load("[optim]\nlr = 1e-3\n", "optim.scale=rms"))["optim"]["scale"] == "rms"


# ------------------------------------------------------------------ doubts


def doubted(*words: str) -> list[str]:
    config = load("", *words)
    return config_warnings(config, resolve(config, vocab=10))


def test_momentum_that_rises_longer_than_the_run_is_doubted() -> None:
    assert doubted() == []
    assert doubted("train.until=300 steps") == []
    assert doubted("train.until=150 steps") == [
        "optim.momentum_warmup, 300 steps, is longer than the run: momentum ends at 0.9 instead of "
        "0.95"
    ]
    assert len(doubted("optim.momentum_warmup=2M tokens", "train.until=100 steps")) == 1
    assert doubted("train.until=150 steps", "optim.momentum=0.8") == []
    assert doubted("train.until=150 steps", "optim.type=adamw") == []


def test_a_second_target_that_a_layout_does_not_have_is_doubted() -> None:
    second = "train.mtp=0.5"
    assert doubted(second) == doubted(second, "parallel.tp=2") == []
    assert doubted("train.mtp=0", "parallel.cp=2") == []
    (doubt,) = doubted(second, "parallel.cp=2")
    assert doubt.startswith("train.mtp has no effect with context parallelism")
    (doubt,) = doubted(second, 'runtime.device="xla"')
    assert doubt.startswith("train.mtp has no effect on XLA devices")


def test_a_decay_may_be_the_whole_run() -> None:
    assert frozen(load("", "schedule.decay=1"))["schedule"]["decay"] == 1.0
