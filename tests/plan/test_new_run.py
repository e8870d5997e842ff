"""The choices of a new run: each follows from the text, the machine and the time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.base.errors import UserError
from gristmill.config.load import load_text, preset_names
from gristmill.config.model import GPTConfig
from gristmill.config.rules import config_warnings
from gristmill.plan.hardware import open_hardware
from gristmill.plan.machine import Machine
from gristmill.plan.new_file import expected, file_text
from gristmill.plan.new_run import (
    GOOD_EPOCHS,
    MAX_EPOCHS,
    TOKENS_PER_PARAMETER,
    DataFacts,
    NewRun,
    RunGoal,
    choose_batch,
    choose_run,
    choose_split,
    learning_rate,
    round_down,
)

H200 = Machine(open_hardware("h200"), 1, "one h200", "by the figures of h200")
EIGHT = replace(H200, count=8, described="8 x h200")
LAPTOP = Machine(open_hardware("cpu"), 1, "8 cores", "by the table")
HOUR = 3600.0


def choose(
    tokens: int | None = None,
    *,
    machine: Machine = H200,
    vocab: int = 50257,
    hours: float | None = 3.0,
    horizon: int | None = None,
    **asked: object,
) -> NewRun:
    seconds = None if hours is None else hours * HOUR
    goal = RunGoal("mill", "tokens/mill", machine, seconds=seconds, tokens=horizon, **asked)
    return choose_run(
        goal, lambda model: DataFacts(vocab, tokens), find_model=lambda name, where: Path(name)
    )


def text_of(run: NewRun) -> str:
    return file_text(
        run, command_line="gristmill new", facts=["So much."], commands=["do"], schema=False
    )


def test_more_time_and_more_text_choose_larger_models() -> None:
    sizes = [choose(hours=hours).config.preset for hours in (0.01, 1, 4, 400)]
    assert sizes == ["modern-nano", "modern-mini", "modern-small", "modern-xl"]
    texts = [choose(tokens, hours=400).parameters for tokens in (10**6, 10**9, 10**10)]
    assert texts == sorted(texts) and len(set(texts)) == 3


def test_a_chosen_size_gets_its_tokens_and_the_next_one_would_not() -> None:
    run = choose(2 * 10**9, hours=5)
    assert run.tokens >= TOKENS_PER_PARAMETER * run.parameters
    assert run.seconds <= 5 * HOUR * 1.05
    names = [name for name in preset_names() if name.startswith("modern-")]
    larger = choose(2 * 10**9, hours=5, preset=names[names.index(str(run.config.preset)) + 1])
    assert larger.tokens < TOKENS_PER_PARAMETER * larger.parameters


@pytest.mark.parametrize("tokens", [20_000, 200_000, 10**9])
def test_a_text_is_repeated_four_times_at_most(tokens: int) -> None:
    """More would overfit, whatever the size of the model and however much time there is."""
    for preset in (None, "modern-mini"):
        run = choose(tokens, vocab=1024, hours=100, preset=preset)
        assert run.epochs is not None and 0.85 * GOOD_EPOCHS < run.epochs < 1.1 * GOOD_EPOCHS
    asked = choose(tokens, vocab=1024, hours=None, horizon=tokens * MAX_EPOCHS)
    assert asked.epochs is not None and asked.epochs > 0.9 * MAX_EPOCHS


def test_time_that_a_small_text_leaves_over_is_told_of() -> None:
    run = choose(200_000, vocab=1024, hours=3)
    assert run.config.preset == "modern-nano" and run.seconds < 3 * HOUR
    (told,) = [line for line in expected(run) if "more text would use the rest" in line]
    assert "of 3h00m00s over" in told and told.count(".") == 1
    assert told.replace(" ", "") in text_of(run).replace("\n#", "").replace(" ", "")
    for other in (
        choose(10**11, hours=1),  # the time limits
        choose(200_000, vocab=1024, hours=None, horizon=10**6),
        choose(200_000, vocab=1024, overrides=('train.until="1k steps"',)),
    ):
        assert not any("use the rest" in line for line in expected(other))


@pytest.mark.parametrize("machine", [H200, LAPTOP], ids=["gpu", "laptop"])
@pytest.mark.parametrize("minutes", [2, 10, 180])
def test_the_time_is_that_of_the_whole_command(minutes: float, machine: Machine) -> None:
    run = choose(machine=machine, vocab=4096, hours=minutes / 60)
    parts = run.training_seconds * run.validation_factor + run.overhead.total
    assert run.seconds == parts <= minutes * 60
    share = minutes * 60 / 5
    slower = replace(machine, imports=machine.imports + share)
    late = choose(machine=slower, vocab=4096, hours=minutes / 60, preset=run.config.preset)
    assert late.tokens < run.tokens and late.seconds <= minutes * 60
    assert late.overhead.start == run.overhead.start + share


def test_a_time_in_which_nothing_can_start_is_told_of() -> None:
    run = choose(hours=10 / HOUR)
    assert run.seconds > 10 and run.resolved.steps >= 1
    assert any(line.startswith("That is more than the 10.0s there are") for line in expected(run))
    assert not any(line.startswith("That is more") for line in expected(choose()))


def test_what_is_asked_for_is_done() -> None:
    run = choose(10**5, hours=None, preset="gpt2-small", horizon=10**9)
    assert str(run.config.train.until) == "1B tokens" and run.config.preset == "gpt2-small"


def test_a_run_that_does_not_fit_is_refused() -> None:
    small = replace(H200, hardware=replace(H200.hardware, memory=12 * 2**30), described="one card")
    with pytest.raises(UserError, match="gpt2-xl does not fit into the memory of one card"):
        choose(preset="gpt2-xl", machine=small)
    assert choose(10**10, hours=1000, machine=small).layout is not None


def test_a_large_model_is_divided_over_the_devices() -> None:
    cards = replace(EIGHT, hardware=open_hardware("h100-80gb"))
    run = choose(preset="gpt3-7.5b", machine=cards, hours=24)
    assert run.config.parallel.dp_shard == 8 and "dp_shard = 8" in text_of(run)
    assert run.config.train.batch is not None and run.config.train.batch % 8 == 0


def test_too_little_text_is_refused() -> None:
    with pytest.raises(UserError, match="about 200 tokens are too few"):
        choose(200)


@pytest.mark.parametrize("machine", [H200, EIGHT, LAPTOP], ids=["gpu", "gpus", "laptop"])
@pytest.mark.parametrize("tokens", [None, 1000, 10**5, 10**8, 10**11])
@pytest.mark.parametrize("hours", [0.001, 0.5, 100])
def test_every_file_loads_to_its_run_without_a_warning(
    tokens: int | None, hours: float, machine: Machine
) -> None:
    run = choose(tokens, hours=hours, machine=machine, vocab=4096)
    assert load_text(text_of(run), place="run.toml") == run.config
    assert config_warnings(run.config, run.resolved) == []
    assert all(len(line) <= 100 for line in text_of(run).splitlines())
    assert list(expected(run))


@pytest.mark.parametrize("name", ["gpt2-nano", "gpt2-medium", "portable-small", "gpt3-1.7b"])
def test_every_kind_of_preset_has_its_optimizer(name: str) -> None:
    run = choose(10**9, preset=name, hours=24)
    assert load_text(text_of(run), place="run.toml") == run.config
    assert ("optim" in run.settings) is not name.startswith("portable")
    assert config_warnings(run.config, run.resolved) == []


def test_settings_take_part_in_the_choice() -> None:
    run = choose(10**8, overrides=("data.sequence=64", "optim.type=sgd", "data.split=8,2"))
    assert run.resolved.sequence == 64 and run.config.optim.type == "sgd"
    assert run.config.data.split == "8,2" and "split" not in run.settings["data"]
    with pytest.raises(UserError, match="did you mean"):
        choose(overrides=("train.bacth=8",))


def test_a_validation_set_of_its_own() -> None:
    run = choose(10**8, validation="tokens/held")
    assert run.config.data.validation == "tokens/held" and run.config.data.split is None
    assert run.training_tokens == 10**8


def test_without_a_tokenizer_no_text_is_written() -> None:
    assert choose(10**8, has_tokenizer=False).config.sample is None


def test_splits_hold_out_enough_and_not_too_much() -> None:
    for tokens, sequence in itertools.product((10**3, 10**4, 10**6, 10**8, 10**10), (128, 1024)):
        split, length = choose_split(tokens, sequence=sequence)
        held = tokens * float(split.split(",")[1]) / sum(map(float, split.split(",")))
        assert held >= 2 * (length + 1) or length == 32
        assert length <= sequence
    assert choose_split(None, sequence=1024) == ("99,1", 1024)
    assert choose_split(10**10, sequence=1024) == ("999,1", 1024)


def test_batches_grow_with_the_run_and_suit_the_devices() -> None:
    horizons = (10**5, 10**7, 10**9, 10**10, 10**11)
    batches = [choose_batch(tokens, sequence=1024, devices=1) for tokens in horizons]
    assert batches == sorted(batches) and batches[0] == 8 and batches[3] == 512
    assert choose_batch(10**9, sequence=1024, devices=6) % 6 == 0
    assert choose_batch(10**6, sequence=128, devices=1) == 8


def test_rates_fall_with_the_size() -> None:
    rates = [learning_rate(10**size) for size in range(6, 12)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 3e-3
    assert learning_rate(124 * 10**6) == 6e-4


def test_amounts_are_round() -> None:
    assert [round_down(n) for n in (7, 42, 123, 9_876_543, 0.2)] == [7, 42, 120, 9_800_000, 1]


def test_a_model_of_another_library_is_not_sized() -> None:
    assert isinstance(choose().config.model, GPTConfig)
    with pytest.raises(UserError, match="model"):
        choose(overrides=("model.hf=nobody/nothing",))
