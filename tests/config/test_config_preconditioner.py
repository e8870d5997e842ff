"""Settings of preconditioners: numbers over a run, layers by name, and what does not fit."""

from __future__ import annotations

import pytest

from gristmill.base.errors import UserError
from gristmill.base.units import Progress
from gristmill.config.load import dump_run, load_text
from gristmill.config.lora import LinearShape
from gristmill.config.model import GPTConfig
from gristmill.config.optim import KfacConfig, SoapConfig
from gristmill.config.resolve import resolve
from gristmill.config.rules import config_warnings
from gristmill.config.schema import RunConfig
from gristmill.plan.preconditioner import describe_preconditioner, kfac_cost, preconditioner_bytes

RUN = """
name = "trial"
model = { layers = 2, heads = 2, width = 8, context = 16 }
data.paths = "tokens/books"
train = { until = "100 steps", batch = 2 }
[optim.preconditioner]
type = "kfac"
"""


def load(*words: str, added: str = "") -> RunConfig:
    return load_text(RUN + added, words, place="run.toml")


def kfac(*words: str, added: str = "") -> KfacConfig:
    settings = load(*words, added=added).optim.preconditioning
    assert isinstance(settings, KfacConfig)
    return settings


def linears(*words: str) -> dict[str, LinearShape]:
    model = load(*words).model
    assert isinstance(model, GPTConfig)
    return model.linears()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_every_base_optimizer_takes_one(optimizer: str) -> None:
    config = load(f'optim.type="{optimizer}"', 'optim.preconditioner.type="kfac"')
    assert isinstance(config.optim.preconditioning, KfacConfig)
    assert load_text(dump_run(config), (), place="again.toml") == config


def test_a_number_may_change_along_the_run() -> None:
    settings = kfac(added='damping = { "0 tokens" = 0.5, "1k tokens" = 0.1 }\nfactor_every = 3')
    for tokens, expected in ((0, 0.5), (999, 0.5), (1000, 0.1), (5000, 0.1)):
        assert settings.damping.at(Progress(1, 1, tokens)) == expected
    assert settings.factor_every.at(Progress(7)) == 3
    again = load_text(dump_run(load(added="damping = 2")), (), place="again.toml")
    assert isinstance(again.optim.preconditioning, KfacConfig)
    assert again.optim.preconditioning.damping.values == (2.0,)


def test_another_type_replaces_the_table() -> None:
    config = load('optim.preconditioner.type="soap"', added="damping = 0.5")
    assert isinstance(config.optim.preconditioning, SoapConfig)
    assert kfac("optim.preconditioner.decay=0.5", added="damping = 0.5").damping.values == (0.5,)


MISTAKES = {
    'damping = { "5 steps" = 1.0 }': 'damping: the first number must be from "0 steps" on',
    'damping = { "0 steps" = 1.0, "9 tokens" = 2.0 }': "in one unit and in ascending order",
    'damping = { "0 steps" = 1.0, "0 steps " = 2.0 }': "in one unit and in ascending order",
    'damping = { "0" = 1.0 }': "'0' is not a duration",
    "damping = {}": 'damping: the first number must be from "0 steps" on',
    "damping = 0": "damping: must be above 0 (it is 0)",
    "damping = true": "must be a number, not True",
    "damping = inf": "must be above 0",
    "decay = 1": "must be below 1",
    "decay = -0.1": "must be at least 0",
    "factor_every = 0": "must be at least 1",
    "factor_every = 1.5": "must be a whole number, not 1.5",
    'factor_every = "10 steps"': "must be a whole number, not '10 steps'",
    'skip = ["mlp.upp"]': "'mlp.upp' matches no linear layer in a block of this model\n"
    "    there are: blocks.*.mlp.up",
    'skip = ["*"]': "leaves no layer to precondition",
    "worker_fraction = 2.0": "less than or equal to 1",
}


@pytest.mark.parametrize(("added", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistakes(added: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(added=added)
    assert message in str(caught.value)
    assert "optim.preconditioner" in str(caught.value)


REFUSED = {
    "optim.preconditioner": (
        ('optim.type="accum-adamw"', 'optim.preconditioner.type="kfac"'),
        "optim has it with type = 'adamw' or 'adam' or 'sgd' or 'muon'",
    ),
    "parallel.schedule": (
        ("parallel.pp=2", "model.layers=4", 'parallel.schedule="zero-bubble"'),
        'choose "1f1b" or "interleaved"',
    ),
    "optim.preconditioner.type": (("model.lora.rank=2",), "leave one of the two out"),
}


@pytest.mark.parametrize("where", REFUSED)
def test_what_does_not_go_with_kfac(where: str) -> None:
    words, message = REFUSED[where]
    with pytest.raises(UserError) as caught:
        load_text(RUN, words, place="run.toml")
    assert where in str(caught.value)
    assert message in str(caught.value)


def test_a_model_without_linear_layers_is_refused() -> None:
    (problem,) = kfac().problems([])
    assert "the blocks of this model have none" in problem.what


def test_a_table_without_a_type_says_what_is_missing() -> None:
    text = RUN.replace('type = "kfac"', "damping = 0.5")
    with pytest.raises(UserError, match="does not say its type\n    give 'kfac' or 'soap'"):
        load_text(text, (), place="run.toml")


MORE_OFTEN = "optim.preconditioner.inverse_every=50"


def test_intervals_longer_than_the_run_are_doubted() -> None:
    def warnings(*words: str) -> list[str]:
        config = load(*words)
        return config_warnings(config, resolve(config, vocab=257))

    assert warnings("optim.preconditioner.inverse_every=99") == []
    (seldom,) = warnings("optim.preconditioner.inverse_every=100")
    assert "inverse_every, 100 steps, is as long as the run or longer" in seldom
    (clipped,) = warnings('optim.type="sgd"', 'optim.preconditioner.type="kfac"', MORE_OFTEN)
    assert "set train.clip = 0" in clipped
    (twice,) = warnings("optim.preconditioner.inverse_every=5")
    assert "invert the same factors again" in twice


# ------------------------------------------------------------------ memory and communication

ELEMENTS = 2 * (9**2 + 3 * 8**2 + 9**2 + 8**2 + 9**2 + 32**2 + 33**2 + 8**2)
"""Factors of two blocks: (x, 1) of 8 and 1, of 32 and 1, and outputs; query, key, value apart."""


def test_bytes_by_formula() -> None:
    config = load('optim.preconditioner.method="inverse"')
    assert preconditioner_bytes(config.optim, linears()) == 2 * 4 * ELEMENTS
    one = kfac_cost(kfac('optim.preconditioner.method="inverse"'), linears(), 1)
    assert (one.held, one.collected, one.inverses, one.gradients) == (
        8 * ELEMENTS,
        4 * ELEMENTS,
        0,
        0,
    )


def test_the_grid_trades_memory_for_communication() -> None:
    costs = [
        kfac_cost(
            kfac(f"optim.preconditioner.worker_fraction={fraction}"),
            linears(),
            4,
        )
        for fraction in (0.0, 0.5, 1.0)
    ]
    assert [one.held for one in costs] == sorted(one.held for one in costs)
    assert [-one.gradients for one in costs] == sorted(-one.gradients for one in costs)
    assert (costs[0].inverses, costs[2].gradients) == (0, 0)
    text = describe_preconditioner(load().optim, linears(), processes=4)
    assert text is not None
    assert "K-FAC for 8 layers" in text
    assert "sent in each step" in text
