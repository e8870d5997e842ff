"""Loss, perplexity and bits per byte."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import LoadedModel, open_model
from gristmill.config.model import GPTConfig
from gristmill.config.schema import RunConfig
from gristmill.evaluate.loss import evaluate_loss, evaluation_ids
from gristmill.models.build import build_model
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

CPU = torch.device("cpu")


@pytest.fixture
def loaded() -> LoadedModel:
    config = GPTConfig(layers=1, heads=2, width=16, context=10)
    model = build_model(config, vocab=257, device=CPU)
    model.initialise(0)
    return LoadedModel(model.eval(), ByteTokenizer(), Path("nowhere"))


@pytest.mark.parametrize("length", [2, 10, 11, 12, 57])
def test_every_token_but_the_first_is_predicted_once(loaded: LoadedModel, length: int) -> None:
    ids = np.random.default_rng(0).integers(0, 256, length)
    total, at = 0.0, 0
    while at < length - 1:
        window = torch.tensor(ids[at : at + 11])[None]
        logits = loaded.model(window[:, :-1])
        total += functional.cross_entropy(logits[0], window[0, 1:], reduction="sum").item()
        at += 10
    result = evaluate_loss(loaded, ids, batch=3)
    assert result.tokens == length - 1
    assert result.loss == pytest.approx(total / (length - 1), rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    assert result.bits_per_byte == pytest.approx(result.loss / math.log(2))  # one byte a token


def test_results_and_their_errors_do_not_depend_on_the_batch(loaded: LoadedModel) -> None:
    ids = np.random.default_rng(0).integers(0, 256, 157)
    single, *others = (evaluate_loss(loaded, ids, batch=batch) for batch in (1, 3, 8, 100))
    # 15 whole windows and one of the remaining tokens.
    assert len(single.measures["loss"].items) == 16
    deviation = np.std(single.measures["loss"].items, ddof=1)
    assert single.measures["loss"].stderr == pytest.approx(deviation / 4)
    for other in others:
        for name, measure in single.measures.items():
            assert other.measures[name].value == pytest.approx(measure.value, rel=1e-6)
            assert other.measures[name].stderr == pytest.approx(measure.stderr, rel=1e-4)
            assert other.measures[name].items == pytest.approx(measure.items, rel=1e-5)


def test_a_short_text_has_no_standard_error(loaded: LoadedModel) -> None:
    found = evaluate_loss(loaded, np.arange(70), batch=2)
    assert len(found.measures["loss"].items) == 7
    assert {one.stderr for one in found.measures.values()} == {None}


def test_end_of_text_has_no_bytes(loaded: LoadedModel) -> None:
    result = evaluate_loss(loaded, np.array([65, 66, 256, 67, 256]))
    assert result.bits_per_byte == pytest.approx(result.loss * 4 / 2 / math.log(2))


def test_too_little_text(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="fewer than two tokens"):
        evaluate_loss(loaded, np.array([1]))


def test_an_id_outside_the_vocabulary_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="the id 999 is outside the vocabulary of 257"):
        evaluate_loss(loaded, np.array([1, 2, 999, 4]))


def test_a_run_is_evaluated_on_its_own_validation_text(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from gristmill.train.run import Run

    Run(make_run('train.until="2 steps"')).train()
    opened = open_model(str(tmp_path / "run"), device=CPU)
    chosen = evaluation_ids(opened, data=None, text=None)
    assert chosen.name.endswith("tiny (held out)")
    whole = evaluation_ids(opened, data=make_run().data.paths, text=None)
    assert np.array_equal(whole.ids[-len(chosen.ids) :], chosen.ids)
    assert 0.05 < len(chosen.ids) / len(whole.ids) < 0.15
    (tmp_path / "a.txt").write_text("corn")
    text = evaluation_ids(opened, data=None, text=[str(tmp_path / "a.txt")])
    assert text.ids.tolist() == [*b"corn", 256]


def test_what_a_tokenizer_puts_before_a_text_is_given_and_not_predicted(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    class Beginning(ByteTokenizer):
        prefix = (1, 2)

    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    opened = replace(loaded, tokenizer=Beginning())
    text = evaluation_ids(opened, text=[str(tmp_path / "*.txt")])
    assert text.ids.tolist() == [1, 2, *b"aaa", 256, 1, 2, *b"bbb", 256]
    assert text.predicted is not None and text.starts.tolist() == [0, 6]
    found = evaluate_loss(opened, text.ids, predicted=text.predicted)
    assert found.tokens == 8
    losses = functional.cross_entropy(
        loaded.model(torch.tensor(text.ids[None, :10]))[0],
        torch.tensor(text.ids[1:11]),
        reduction="none",
    )
    predicted = losses[torch.tensor(text.predicted[1:11])].sum().item()
    rest = functional.cross_entropy(
        loaded.model(torch.tensor(text.ids[None, 10:11]))[0], torch.tensor(text.ids[11:])
    ).item()
    assert found.loss == pytest.approx((predicted + rest) / 8, rel=1e-5)


def test_text_must_be_named_for_a_model_without_a_run(loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match="--data PREFIX or --text FILE"):
        evaluation_ids(loaded, data=None, text=None)


@pytest.mark.parametrize("order", ["shuffled", "megatron"])
def test_a_model_that_keeps_documents_apart_is_evaluated_so(
    make_run: Callable[..., RunConfig], tmp_path: Path, order: str
) -> None:
    from gristmill.train.run import Run

    Run(make_run('train.until="2 steps"', "data.documents=masked", f"data.order={order}")).train()
    opened = open_model(str(tmp_path / "run"), device=CPU)
    chosen = evaluation_ids(opened, data=None, text=None)
    assert (chosen.rules.doc_starts, chosen.rules.attention) == ("files", True)
    bounds = [*chosen.starts.tolist(), len(chosen.ids)]
    assert bounds[0] == 0
    assert all(chosen.ids[end - 1] == 256 for end in bounds[1:])
    apart = evaluate_loss(opened, chosen.ids, rules=chosen.rules, starts=chosen.starts)
    joined = evaluate_loss(opened, chosen.ids)
    assert apart.tokens == joined.tokens and apart.loss != joined.loss

    # One window that holds the end of one document and the beginning of the next.
    begin = int(chosen.starts[1])
    ids, starts = chosen.ids[begin - 6 : begin + 6], np.array([0, 6])
    both = evaluate_loss(opened, ids, rules=chosen.rules, starts=starts)
    first = evaluate_loss(opened, ids[:7])
    second = evaluate_loss(opened, ids[6:])
    assert both.loss * 11 == pytest.approx(first.loss * 6 + second.loss * 5, rel=1e-5)


def test_text_of_several_files_is_several_documents(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    from gristmill.train.run import Run

    Run(make_run('train.until="2 steps"', "data.reset_attention=true")).train()
    opened = open_model(str(tmp_path / "run"), device=CPU)
    files = []
    for name in ("corn", "flour"):
        (tmp_path / f"{name}.txt").write_text(name)
        files.append(str(tmp_path / f"{name}.txt"))
    text = evaluation_ids(opened, data=None, text=files)
    assert text.starts.tolist() == [0, 5]
    assert (text.rules.doc_starts, text.rules.positions) == ("ids", False)
    assert evaluate_loss(opened, text.ids, rules=text.rules).tokens == 10
