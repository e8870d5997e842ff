"""Continuing ids and text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gristmill.base.errors import UserError
from gristmill.config.model import GPTConfig
from gristmill.generate.engine import Engine, window_start
from gristmill.generate.sampling import Sampling, draw, uniform_numbers
from gristmill.generate.text import TextGenerator, TextWriter
from gristmill.models.build import build_model
from gristmill.models.gpt import GPT
from gristmill.text.tokenizers.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

GREEDY = Sampling(temperature=0)


def make_model(**settings: Any) -> GPT:
    sizes = {"layers": 2, "heads": 2, "width": 16, "context": 16}
    # Large weights and a head of its own keep greedy text from repeating one token.
    config = GPTConfig(**sizes, init_std=0.3, tie_head=False, **settings)
    model = build_model(config, vocab=257, device=torch.device("cpu"))
    model.initialise(0)
    return model


@pytest.mark.parametrize(
    "settings",
    [{}, {"positions": "rotary", "kv_heads": 1, "qk_norm": True, "norm": "rmsnorm"}],
    ids=["gpt2", "modern"],
)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 40])
def test_greedy_decoding_with_the_cache_equals_decoding_without(
    settings: dict[str, Any], prompt_length: int
) -> None:
    model = make_model(**settings)
    prompt = torch.randint(0, 257, (prompt_length,), generator=torch.Generator().manual_seed(1))
    results = [
        Engine(model, cached=cached).generate([prompt.tolist()], tokens=60, sampling=GREEDY)[0]
        for cached in (True, False)
    ]
    assert results[0] == results[1]
    assert len(results[0]) == 60  # far beyond the context of 16
    assert len(set(results[0])) > 5


def test_the_window_is_never_longer_than_the_context() -> None:
    for context in (1, 2, 7, 16):
        starts = [window_start(length, context) for length in range(1, 100)]
        assert starts == sorted(starts)
        seen = [length - start for length, start in zip(range(1, 100), starts, strict=True)]
        assert max(seen) <= context
        assert min(seen[context:]) >= context // 2


def test_the_same_seed_gives_the_same_text() -> None:
    generator = TextGenerator(make_model(), ByteTokenizer())
    texts = [
        generator.texts("mill", tokens=20, sampling=Sampling(seed=seed), samples=3)
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) == 3


def test_only_ids_of_the_tokenizer_are_drawn() -> None:
    model = make_model()
    hot = Sampling(temperature=50.0, top_k=0)
    (drawn,) = Engine(model, ids=7).generate([[1]], tokens=80, sampling=hot)
    assert set(drawn) == set(range(7))


def test_the_model_is_left_as_it_was() -> None:
    model = make_model(dropout=0.5)
    model.train()
    Engine(model).generate([[1]], tokens=3, sampling=GREEDY)
    assert model.training


def probabilities(sampling: Sampling, logits: list[float], draws: int = 4000) -> torch.Tensor:
    uniform = uniform_numbers(0, 0, draws).tolist()
    ids = torch.tensor([draw(torch.tensor(logits), sampling, number) for number in uniform])
    return torch.bincount(ids, minlength=len(logits)) / draws


def test_temperature_top_k_and_top_p() -> None:
    logits = [2.0, 1.0, 0.0, -1.0]
    exact = torch.tensor(logits).softmax(0)
    plain = probabilities(Sampling(temperature=1.0, top_k=0), logits)
    assert torch.allclose(plain, exact, atol=0.03)
    cold = probabilities(Sampling(temperature=0.5, top_k=0), logits)
    assert torch.allclose(cold, (torch.tensor(logits) * 2).softmax(0), atol=0.03)
    two = probabilities(Sampling(temperature=1.0, top_k=2), logits)
    assert torch.allclose(two, torch.tensor(logits[:2] + [-99.0] * 2).softmax(0), atol=0.03)
    # 0.64 + 0.24 reach 0.8; the first alone does not.
    nucleus = probabilities(Sampling(temperature=1.0, top_k=0, top_p=0.8), logits)
    assert torch.allclose(nucleus, two, atol=0.03)
    assert probabilities(Sampling(temperature=1.0, top_k=0, top_p=0.1), logits)[0] == 1
    assert probabilities(Sampling(temperature=0), logits)[0] == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1.0}, "temperature must be from 0 to 100"),
        ({"temperature": math.nan}, "temperature must be from 0 to 100, not nan"),
        ({"temperature": 101.0}, "temperature must be from 0 to 100, not 101"),
        ({"repetition_penalty": 1e-3}, "repetition penalty must be from 0.01 to 100"),
        ({"temperature": math.inf}, "temperature must be from 0 to 100, not inf"),
        ({"seed": 2**64}, "seed must be from 0"),
        ({"top_k": -1}, "top-k must be 0"),
        ({"top_p": 0.0}, "top-p must be above 0"),
        ({"top_p": 1.5}, "top-p must be above 0 and at most 1"),
    ],
)
def test_wrong_sampling_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**values)


def write(writer: TextWriter, ids: Sequence[int]) -> list[str]:
    pieces = []
    for id in ids:
        pieces.append(writer.add(id))
        if writer.finished:
            return pieces
    return [*pieces, writer.rest()]


def writer(*stop: str, tokenizer: Tokenizer | None = None) -> TextWriter:
    tokenizer = tokenizer or ByteTokenizer()
    return TextWriter(tokenizer, ends={tokenizer.end_of_text}, stop=stop)


def test_text_comes_out_in_whole_characters() -> None:
    said = "Mühle 磨坊 🌾".encode()
    pieces = write(writer(), said)
    assert "".join(pieces) == "Mühle 磨坊 🌾"
    assert all("\ufffd" not in piece for piece in pieces)
    # What never becomes a character is said in the end.
    assert "".join(write(writer(), b"ab\xf0\x9f")) == "ab\ufffd"
    assert "".join(write(writer(), b"\xf0\x9fab")) == "\ufffdab"


@given(text=st.text(), ends=st.booleans())
def test_any_text_is_written_as_it_is(text: str, ends: bool) -> None:
    assert "".join(write(writer(), [*text.encode(), *[256] * ends])) == text


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    cut = min((text.find(word) for word in stop if word in text), default=len(text))
    # A string that is complete earlier wins, though another one begins before it.
    done = min((text.find(word) + len(word) for word in stop if word in text), default=len(text))
    seen = text[:done]
    cut = min((seen.find(word) for word in stop if word in seen), default=len(text))
    pieces = write(writer(*stop), text.encode())
    assert "".join(pieces) == text[:cut]


def test_stop_strings_and_end_of_text_end_a_sample() -> None:
    for said, text in (
        (b"grain STOP flour", "grain "),
        ([*b"STOthe STO end", 256], "STOthe STO end"),
        (b"ab" * 8, "ab" * 8),
    ):
        assert "".join(write(writer("STOP"), list(said))) == text


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-8])
def test_the_smallest_temperatures_take_the_likeliest_token(temperature: float) -> None:
    for sampling in (Sampling(temperature, top_k=0), Sampling(temperature, top_k=2, top_p=0.9)):
        assert probabilities(sampling, [-50.0, 30.0, 80.0, 79.0], draws=50)[2] == 1


def test_the_likeliest_token_is_always_left() -> None:
    assert draw(torch.tensor([1.0, 3.0, 2.0]), Sampling(top_p=1e-300), 0.99) == 1


@pytest.fixture
def beginning(tmp_path: Path) -> Path:
    """The folder of a tokenizer that puts <s> before every text."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the mill grinds corn"] * 3, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_prompt_begins_as_it_does_in_transformers(beginning: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = open_tokenizer(beginning)
    theirs = transformers.AutoTokenizer.from_pretrained(str(beginning))
    generator = TextGenerator(make_model(), tokenizer)
    for prompt in ("the corn", ""):
        assert generator.prompt_ids(prompt) == theirs(prompt).input_ids
    # Ids are taken as they are: a chat template writes its own beginning.
    assert generator.prompt_ids([5, 6]) == [5, 6]
    assert generator.prompt_ids([]) == [tokenizer.end_of_text]


def test_a_generated_control_token_is_no_text(beginning: Path) -> None:
    tokenizer = open_tokenizer(beginning)
    controls = tokenizer.control_tokens
    said = [*tokenizer.encode("the"), controls["<|turn|>"], *tokenizer.encode(" mill")]
    assert "".join(write(writer(tokenizer=tokenizer), said)) == "the mill"
    # It can be asked for as the end, and is then not looked for in the text.
    ends = TextGenerator(make_model(), tokenizer).ends_with(["<|turn|>"])
    assert "".join(write(TextWriter(tokenizer, ends=ends, stop=()), said)) == "the"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "drawn"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_token_is_chosen_from_logits_that_are_not_finite(sampling: Sampling, bad: float) -> None:
    model = make_model()
    with torch.no_grad():
        model.head.weight[4, 0] = bad
    with pytest.raises(UserError, match="NaN or infinite logits"):
        Engine(model).generate([[1]], tokens=1, sampling=sampling)
