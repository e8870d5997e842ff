"""Several sequences at once, each as if it were alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from gristmill.config.hf import HFConfig
from gristmill.config.lora import LoraConfig
from gristmill.config.model import GPTConfig
from gristmill.generate.engine import Engine
from gristmill.generate.request import Generation, Request
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_model
from gristmill.models.decoding import CacheDecoder, affordable_slots
from gristmill.models.spec import CausalLM
from gristmill.models.torch_decoding import TorchDecoder

VOCAB, CONTEXT = 257, 300
GREEDY = Sampling(temperature=0)
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "modern": {
        "positions": "rotary",
        "norm": "rmsnorm",
        "qk_norm": True,
        "kv_heads": 1,
        "activation": "swiglu",
        "window": 40,
        "value_embeddings": 1,
        "attention_gate": True,
        "logit_cap": 30.0,
    },
    "lora": {"lora": LoraConfig(rank=2, alpha=4.0)},
}


def make_model(kind: str = "gpt2") -> CausalLM:
    config = GPTConfig(
        layers=2, heads=2, width=32, context=CONTEXT, init_std=0.3, tie_head=False, **KINDS[kind]
    )
    model = build_model(config, vocab=VOCAB, device=torch.device("cpu"))
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    return model


@pytest.fixture(scope="module", params=list(KINDS))
def model(request: pytest.FixtureRequest) -> CausalLM:
    return make_model(request.param)


def random_ids(count: int, seed: int = 0) -> list[int]:
    drawn = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    return list(map(int, drawn))


def run(engine: Engine, requests: list[Request]) -> list[Generation]:
    asked = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return asked


def test_greedy_ids_are_those_without_a_cache(model: CausalLM) -> None:
    prompts = [random_ids(count, seed=count) for count in (1, 20, 200, 400)]
    slots = Engine(model, slots=3)
    assert isinstance(slots.decoder, CacheDecoder if model.adapters else TorchDecoder)
    # Beyond the context: the window slides.
    got = slots.generate(prompts, tokens=150, sampling=GREEDY)
    plain = Engine(model, cached=False)
    for prompt, ids in zip(prompts, got, strict=True):
        assert plain.generate([prompt], tokens=150, sampling=GREEDY)[0] == ids
        assert len(set(ids)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_seed_gives_the_same_text_in_any_company(model: CausalLM, dtype: torch.dtype) -> None:
    """In another order, beside others, and with some that leave."""
    chosen = random.Random(0)
    prompts = [random_ids(chosen.choice([1, 5, 40, 130, 260]), seed=n) for n in range(12)]
    requests = [
        Request(
            chosen.choice(prompts),
            chosen.randrange(1, 30),
            Sampling(
                temperature=chosen.choice([0.0, 0.7, 1.0]),
                top_k=chosen.choice([0, 20]),
                top_p=chosen.choice([1.0, 0.9]),
                min_p=chosen.choice([0.0, 0.02]),
                repetition_penalty=chosen.choice([1.0, 1.2]),
                seed=seed,
            ),
            log_probs=chosen.choice([None, 2]),
        )
        for seed in range(40)
    ]

    def texts(order: list[int]) -> dict[int, list[int]]:
        engine = Engine(model, slots=6, dtype=dtype)
        asked: dict[int, Generation] = {}
        waiting = list(order)
        while waiting or engine.busy:
            for number in waiting[: chosen.randrange(1, 7)]:
                asked[number] = engine.submit(requests[number])
                waiting.remove(number)
                if chosen.random() < 0.3:
                    guest = engine.submit(requests[chosen.randrange(40)])
                    for _ in range(chosen.randrange(4)):
                        engine.step()
                    engine.cancel(guest)
            engine.step()
        return {number: generation.ids for number, generation in asked.items()}

    order = list(range(len(requests)))
    first = texts(order)
    chosen.shuffle(order)
    assert texts(order) == first
    alone = Engine(model, slots=6, dtype=dtype)
    for number in order[:8]:
        assert run(alone, [requests[number]])[0].ids == first[number]


def test_who_leaves_frees_a_slot_at_once() -> None:
    engine = Engine(make_model(), slots=2)
    stays, leaves, waits = (
        engine.submit(Request([seed], 20, Sampling(seed=seed))) for seed in range(3)
    )
    engine.step()
    assert (engine.active, engine.waiting) == (2, 1)
    engine.cancel(leaves)
    assert engine.active == 1
    engine.step()
    assert (engine.active, engine.waiting) == (2, 0)
    while engine.busy:
        engine.step()
    assert [one.finish for one in (stays, leaves, waits)] == ["length", "cancelled", "length"]
    assert len(leaves.ids) < 3


def test_a_common_beginning_is_computed_once() -> None:
    model = make_model()
    engine = Engine(model, slots=3)
    chunk, start = engine.decoder.chunk, random_ids(290)
    requests = [Request([*start[:280], seed], 5, Sampling(seed=seed)) for seed in range(4)]
    computed = run(engine, requests)
    assert computed[0].shared == 0
    # The others begin when the first one's prompt is there; whole chunks are shared.
    later = run(engine, requests)
    assert {one.shared for one in later} == {280 - 280 % chunk}
    apart = [run(Engine(model, slots=3), [request])[0] for request in requests]
    assert [one.ids for one in computed] == [one.ids for one in apart]
    assert [one.ids for one in later] == [one.ids for one in apart]


def test_long_prompts_do_not_keep_others_waiting() -> None:
    engine = Engine(make_model(), slots=2)
    first = engine.submit(Request([1], 10, GREEDY))
    engine.step()
    long = engine.submit(Request(random_ids(290), 2, GREEDY))
    before = len(first.ids)
    engine.step()
    # A part of the prompt was computed, and a token of the other one.
    assert len(first.ids) == before + 1 and not long.ids


def test_texts_end_where_they_may_or_must() -> None:
    engine = Engine(make_model(), slots=2)
    free = run(engine, [Request([5], 30, GREEDY)])[0]
    end = free.ids[11]
    stopped = run(engine, [Request([5], 30, GREEDY, ends=frozenset({end}))])[0]
    assert stopped.finish == "stop"
    assert stopped.ids == free.ids[: free.ids.index(end) + 1]
    # One that does not slide ends with the context; a full prompt has room for one token.
    for length, tokens in ((290, 11), (CONTEXT, 1)):
        full = run(engine, [Request(random_ids(length), 50, GREEDY)])[0]
        assert (full.finish, len(full.ids)) == ("length", tokens)


def test_probabilities_are_those_of_the_model(model: CausalLM) -> None:
    """Before temperature, penalties and bias."""
    prompt = random_ids(12)
    sampling = Sampling(temperature=0.5, top_k=3, bias={7: 5.0}, presence_penalty=1.0)
    made = run(Engine(model), [Request(prompt, 6, sampling, log_probs=4)])[0]
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([[*prompt, *made.ids]]))
    log_probs_TV = logits[0].log_softmax(-1)
    assert len(made.probabilities) == 6
    for at, (id, found) in enumerate(zip(made.ids, made.probabilities, strict=True)):
        row_V = log_probs_TV[len(prompt) - 1 + at]
        assert found.id == id
        assert found.log_prob == pytest.approx(float(row_V[id]), abs=1e-4)
        best = row_V.topk(4)
        assert [pair[0] for pair in found.likeliest] == best.indices.tolist()
        values = [pair[1] for pair in found.likeliest]
        assert values == pytest.approx(best.values.tolist(), abs=1e-4)


def test_penalties_and_bias() -> None:
    model, prompt = make_model(), random_ids(20)
    engine = Engine(model, slots=2)
    plain = run(engine, [Request(prompt, 40, GREEDY)])[0].ids

    def with_sampling(**settings: Any) -> list[int]:
        return run(engine, [Request(prompt, 40, Sampling(temperature=0, **settings))])[0].ids

    assert with_sampling(bias={9: 100.0}) == [9] * 40
    assert plain[0] not in with_sampling(bias={plain[0]: -100.0})
    often = max(plain.count(id) for id in plain)
    assert max(map(with_sampling(frequency_penalty=2.0).count, plain)) < max(often, 2)
    # Ids of the prompt are penalised by repetition alone.
    strong = with_sampling(repetition_penalty=50.0)
    assert not set(strong) & set(prompt)
    assert with_sampling(presence_penalty=0.0) == plain


def test_as_many_slots_as_memory_has_room_for() -> None:
    model = make_model()
    one = model.slot_bytes(100, dtype=torch.float32)
    assert one == 2 * 2 * 32 * 100 * 4

    def slots(budget: int) -> int:
        return affordable_slots(model, 8, capacity=100, dtype=torch.float32, budget=budget)

    assert [slots(one // 2), slots(3 * one), slots(100 * one)] == [1, 3, 8]


@pytest.mark.parametrize("kind", ["gpt_neox", "mistral"])
def test_models_of_transformers_generate_what_they_do_there(kind: str) -> None:
    pytest.importorskip("transformers")
    table = {
        "model_type": kind,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    if kind == "mistral":
        table |= {"num_key_value_heads": 1, "sliding_window": 8}
    config = HFConfig(hf_config=table)  # type: ignore[call-arg]
    model = build_model(config, vocab=VOCAB, device=torch.device("cpu"))
    model.initialise(0)
    model.eval()
    prompts = [random_ids(count, seed=count) for count in (3, 17)]
    got = Engine(model, slots=2).generate(prompts, tokens=20, sampling=GREEDY)
    for prompt, ids in zip(prompts, got, strict=True):
        expected = model.inner.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        assert expected[0, len(prompt) :].tolist() == ids


def test_a_warm_engine_gives_the_same_texts() -> None:
    model = make_model()
    requests = [Request([0] * count, 8, Sampling(seed=count)) for count in (1, 8, 20)]
    warm = Engine(model, slots=2)
    warm.warm_up()
    assert not warm.busy
    cold = run(Engine(model, slots=2), requests)
    assert [one.ids for one in run(warm, requests)] == [one.ids for one in cold]
    Engine(model, capacity=2).warm_up()  # the smallest there is
