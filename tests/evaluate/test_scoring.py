"""Log-likelihoods of continuations: shared prefixes, batches, long texts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from gristmill.base.errors import DataError, UserError
from gristmill.config.model import GPTConfig
from gristmill.evaluate import scoring
from gristmill.evaluate.scoring import Continuation, Truncation, common_length, score
from gristmill.models.build import build_model
from gristmill.models.spec import CausalLM

CPU = torch.device("cpu")
MODELS = {
    "gpt2": {},
    "rotary": {"positions": "rotary", "norm": "rmsnorm", "kv_heads": 1},
    "short windows": {"positions": "rotary", "window": 8},
    "capped": {"logit_cap": 5.0},
}


def make(vocab: int = 60, **settings: object) -> CausalLM:
    config = GPTConfig(layers=2, heads=2, width=16, context=48, **settings)
    model = build_model(config, vocab=vocab, device=CPU)
    model.initialise(0)
    for parameter in model.parameters():
        # Initial logits are nearly equal, and would hide mistakes.
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return model.eval()


def questions(count: int, seed: int = 0) -> list[list[Continuation]]:
    rng = random.Random(seed)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(60) for _ in range(length))

    found = []
    for _ in range(count):
        context = ids(rng.randint(1, 30))
        options = rng.choice((1, 2, 4))
        found.append(
            [
                Continuation((*context, *ids(rng.randint(1, 9))), len(context))
                for _ in range(options)
            ]
        )
    # Contexts that differ after a common beginning, with the same continuation.
    begin, end = ids(15), ids(3)
    contexts = [begin + ids(4), begin + ids(6)]
    found.append([Continuation(context + end, len(context)) for context in contexts])
    # Options of one token: their inputs are the same.
    found.append([Continuation((*begin, letter), len(begin)) for letter in (3, 5, 8)])
    return found


def expected(model: CausalLM, one: Continuation) -> tuple[float, bool]:
    """One sequence at a time, with all logits."""
    with torch.inference_mode():
        log_probs = model(torch.tensor([one.ids[:-1]]))[0].double().log_softmax(-1)
    places = range(one.start, len(one.ids))
    total = sum(log_probs[i - 1, one.ids[i]].item() for i in places)
    return total, all(log_probs[i - 1].argmax().item() == one.ids[i] for i in places)


def assert_right(model: CausalLM, asked: Sequence[Sequence[Continuation]]) -> None:
    for options, scores in zip(asked, score(model, asked), strict=True):
        assert len(options) == len(scores)
        for one, found in zip(options, scores, strict=True):
            total, greedy = expected(model, one)
            assert found.log_prob == pytest.approx(total, abs=2e-4)
            assert found.greedy is greedy and found.tokens == len(one.ids) - one.start


@pytest.mark.parametrize("kind", MODELS)
def test_scores_are_those_of_one_sequence_at_a_time(kind: str) -> None:
    assert_right(make(**MODELS[kind]), questions(40))


def test_greedy_continuations_are_found() -> None:
    model, ids = make(), [7, 3, 9]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    other = [*ids[:-1], (ids[-1] + 1) % 60]
    (found,) = score(model, [[Continuation(tuple(ids), 3), Continuation(tuple(other), 3)]])
    assert [one.greedy for one in found] == [True, False]


def test_small_batches_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make(), questions(15)
    whole = score(model, asked)
    monkeypatch.setitem(scoring.LIMITS, "cpu", scoring.BatchLimits(1, 1, 1))
    for ours, theirs in zip(score(model, asked), whole, strict=True):
        assert [o.log_prob for o in ours] == pytest.approx([t.log_prob for t in theirs], abs=1e-4)


def test_a_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, positions = make(), list[int]()
    forward = model.forward

    def counted(tokens_BT: torch.Tensor, **options: object) -> object:
        positions.append(tokens_BT.numel())
        return forward(tokens_BT, **options)

    monkeypatch.setattr(model, "forward", counted)
    context = tuple(range(30))
    score(model, [[Continuation((*context, 40 + i, i, i), 30) for i in range(4)]])
    # 29 once, then for each of four options the last id of the context and two more.
    assert positions == [29, 4 * 3]


def test_a_batch_that_needs_too_much_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = make(), questions(12)
    computed, sizes = scoring._computed, list[int]()

    def small(model: CausalLM, batch: list[object]) -> object:
        if len(batch) > 3:
            raise torch.OutOfMemoryError
        sizes.append(len(batch))
        return computed(model, batch)

    monkeypatch.setattr(scoring, "_computed", small)
    assert_right(model, asked)
    assert max(sizes) <= 3


def test_long_contexts_lose_their_beginning() -> None:
    model, truncation = make(), Truncation()
    ids = tuple(i % 60 for i in range(80))
    ((found,),) = score(model, [[Continuation(ids, 75)]], truncation=truncation)
    total, _ = expected(model, Continuation(ids[-49:], 75 - (80 - 49)))
    assert found.log_prob == pytest.approx(total, abs=1e-4)
    assert truncation.count == 1


def test_a_continuation_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="60 tokens, more than the model's context of 48"):
        score(make(), [[Continuation(tuple([1] * 80), 20)]])


def test_logits_that_are_not_finite_are_refused() -> None:
    model = make()
    torch.nn.init.constant_(model.get_parameter("norm.weight"), torch.nan)
    with pytest.raises(DataError, match="NaN or infinite"):
        score(model, [[Continuation((1, 2, 3), 1)]])


def test_common_length() -> None:
    assert common_length([(1, 2, 3), (1, 2, 4), (1, 2)]) == 2
    assert common_length([(1, 2), (1, 2)]) == 2
    assert common_length([(5,), (6,)]) == 0
