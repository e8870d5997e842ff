"""Generation in CUDA graphs: the same texts in any company, equal to those without a cache."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from gristmill.config.model import GPTConfig
from gristmill.generate.engine import Engine
from gristmill.generate.graphs import BURST, GraphSteps
from gristmill.generate.request import Generation, Request
from gristmill.generate.sampling import Sampling
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
VOCAB, CONTEXT = 5000, 256
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module", params=["gpt2", "modern"])
def model(request: pytest.FixtureRequest) -> GPT:
    modern = {
        "positions": "rotary",
        "norm": "rmsnorm",
        "qk_norm": True,
        "kv_heads": 2,
        "bias": False,
        "activation": "swiglu",
        "attention_gate": True,
        "value_embeddings": 1,
        "logit_cap": 30.0,
    }
    config = GPTConfig(
        layers=3,
        heads=4,
        width=256,
        context=CONTEXT,
        init_std=0.1,
        tie_head=False,
        **(modern if request.param == "modern" else {}),
    )
    built = build_model(config, vocab=VOCAB, device=CUDA)
    built.initialise(0)
    return built


def random_ids(count: int, seed: int = 0) -> list[int]:
    drawn = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    return list(map(int, drawn))


def run(engine: Engine, requests: list[Request]) -> list[Generation]:
    asked = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return asked


def test_greedy_ids_are_those_without_a_cache(model: GPT) -> None:
    prompts = [random_ids(count, seed=count) for count in (1, 20, 100, 300)]
    cached = Engine(model, slots=3)
    assert isinstance(cached._steps, GraphSteps)
    # Beyond the context: the window slides.
    got = cached.generate(prompts, tokens=200, sampling=GREEDY)
    plain = Engine(model, cached=False)
    for prompt, ids in zip(prompts, got, strict=True):
        assert plain.generate([prompt], tokens=200, sampling=GREEDY)[0] == ids
        assert len(set(ids)) > 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_seed_gives_the_same_text_in_any_company(model: GPT, dtype: torch.dtype) -> None:
    chosen = random.Random(0)
    prompts = [random_ids(chosen.choice([1, 5, 16, 40, 130]), seed=n) for n in range(20)]
    requests = [
        Request(
            chosen.choice(prompts),
            chosen.randrange(1, 60),
            Sampling(
                temperature=chosen.choice([0.0, 0.7, 1.0]),
                top_k=chosen.choice([0, 20, 200]),
                top_p=chosen.choice([1.0, 0.9]),
                min_p=chosen.choice([0.0, 0.02]),
                repetition_penalty=chosen.choice([1.0, 1.2]),
                seed=seed,
            ),
            log_probs=chosen.choice([None, None, None, 3]),
        )
        for seed in range(200)
    ]

    def texts(order: list[int], slots: int) -> dict[int, list[int]]:
        engine = Engine(model, slots=slots, dtype=dtype)
        asked: dict[int, Generation] = {}
        waiting = list(order)
        while waiting or engine.busy:
            for number in waiting[: chosen.randrange(1, 9)]:
                asked[number] = engine.submit(requests[number])
                waiting.remove(number)
            engine.step()
        return {number: generation.ids for number, generation in asked.items()}

    order = list(range(len(requests)))
    first = texts(order, 32)
    chosen.shuffle(order)
    assert texts(order, 5) == first
    assert texts(order, 1) == first


def test_drawn_ids_and_their_probabilities_are_those_of_the_cpu(model: GPT) -> None:
    """In fp32 only a draw next to a border could differ."""
    on_cpu = build_model(model.config, vocab=VOCAB, device=torch.device("cpu"))
    on_cpu.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    requests = [
        Request(
            random_ids(30, seed=seed),
            25,
            Sampling(
                top_k=40, top_p=0.9, seed=seed, presence_penalty=0.5, bias={seed: 1.0, 7: -100.0}
            ),
            log_probs=2,
        )
        for seed in range(8)
    ]
    ours = run(Engine(model, slots=4), requests)
    theirs = run(Engine(on_cpu, slots=4), requests)
    same = sum(one.ids == other.ids for one, other in zip(ours, theirs, strict=True))
    assert same >= 7
    for one, other in zip(ours, theirs, strict=True):
        if one.ids == other.ids:
            for mine, its in zip(one.probabilities, other.probabilities, strict=True):
                assert mine.log_prob == pytest.approx(its.log_prob, abs=1e-3)
                assert mine.likeliest[0][1] == pytest.approx(its.likeliest[0][1], abs=1e-3)


def test_a_text_follows_its_form_beside_others(model: GPT) -> None:
    class OnlyEven:
        error = None

        def allowed(self) -> torch.Tensor:
            return torch.arange(VOCAB) % 2 == 0

        def append(self, id: int) -> None:
            assert id % 2 == 0

    engine = Engine(model, slots=4)
    formed = [engine.submit(Request([1], 20, Sampling(seed=3), matcher=OnlyEven()))]
    formed += [engine.submit(Request([n], 30, Sampling(seed=n))) for n in range(5)]
    while engine.busy:
        engine.step()
    assert len(formed[0].ids) == 20
    alone = run(Engine(model, slots=1), [Request([1], 20, Sampling(seed=3), matcher=OnlyEven())])
    assert alone[0].ids == formed[0].ids
    # Whoever has the slot next is free again.
    after = run(engine, [Request([n], 30, Sampling(seed=n)) for n in range(5)])
    assert [one.ids for one in after] == [one.ids for one in formed[1:]]


def test_a_prompt_that_is_known_is_not_computed_again(model: GPT) -> None:
    prompt = random_ids(120)
    engine = Engine(model, slots=2)
    first = run(engine, [Request(prompt, 10, Sampling(seed=1))])[0]
    longer = [*prompt, *first.ids]
    shared, plain = (
        run(one, [Request(longer, 10, Sampling(seed=2))])[0]
        for one in (engine, Engine(model, slots=2))
    )
    assert shared.ids == plain.ids
    assert (shared.shared, plain.shared) == (len(longer) - 1, 0)


@pytest.fixture
def _no_waiting() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waiting")
def test_steps_do_not_wait_for_the_device(model: GPT) -> None:
    engine = Engine(model, slots=4)
    requests = [Request(random_ids(20, seed=n), 60, Sampling(top_p=0.9, seed=n)) for n in range(4)]
    expected = [one.ids for one in run(engine, requests)]
    asked = [engine.submit(request) for request in requests]
    torch.cuda.set_sync_debug_mode("error")
    while engine.busy:
        engine.step()
    torch.cuda.set_sync_debug_mode("default")
    assert [one.ids for one in asked] == expected


def test_a_burst_ends_where_its_text_does(model: GPT) -> None:
    engine = Engine(model, slots=2)
    for count in (1, 2, BURST, BURST + 2, 3 * BURST):
        first, second = run(engine, [Request([5], count, GREEDY), Request([5], count + 3, GREEDY)])
        assert len(first.ids) == count and second.ids[:count] == first.ids
    end = run(engine, [Request([5], 30, GREEDY)])[0].ids[11]
    stopped = run(engine, [Request([5], 30, GREEDY, ends=frozenset({end}))])[0]
    assert stopped.finish == "stop" and stopped.ids[-1] == end and len(stopped.ids) <= 12


def test_no_token_comes_of_logits_that_are_not_finite(model: GPT) -> None:
    broken = build_model(model.config, vocab=VOCAB, device=CUDA)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.head.weight[17, 0] = torch.nan
    assert run(Engine(broken), [Request([1], 5, Sampling())])[0].finish == "error"
