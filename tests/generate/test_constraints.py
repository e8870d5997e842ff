"""Texts that must match a form."""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("llguidance")

from gristmill.base.errors import DataError, UserError
from gristmill.config.model import GPTConfig
from gristmill.generate.constraints import Constraint
from gristmill.generate.engine import Engine
from gristmill.generate.request import Request
from gristmill.generate.sampling import Sampling
from gristmill.generate.text import TextGenerator
from gristmill.models.build import build_model
from gristmill.text.tokenizers.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["rye", "oats"]}, "sacks": {"type": "integer", "maximum": 99}},
    "required": ["name", "sacks"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    config = GPTConfig(layers=1, heads=2, width=16, context=128, init_std=0.3, tie_head=False)
    model = build_model(config, vocab=TOKENIZER.size, device=torch.device("cpu"))
    model.initialise(0)
    return TextGenerator(model, TOKENIZER)


def texts(generator: TextGenerator, constraint: Constraint | None, **sampling: float) -> list[str]:
    chosen = Sampling(temperature=1.0, top_k=0, **sampling)  # type: ignore[arg-type]
    return generator.texts(
        "the mill ", tokens=100, sampling=chosen, samples=8, constraint=constraint
    )


def test_every_text_matches_an_expression_as_a_whole(generator: TextGenerator) -> None:
    pattern = "[a-c]{3,5}-[0-9]{1,4}"
    made = texts(generator, Constraint.regex(pattern, TOKENIZER))
    assert all(re.fullmatch(pattern, text) for text in made)
    assert len(set(made)) > 4
    assert not any(re.fullmatch(pattern, text) for text in texts(generator, None))


def test_every_text_is_json_that_fits_its_schema(generator: TextGenerator) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for text in texts(generator, Constraint.json_schema(SCHEMA, TOKENIZER)):
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text == json.dumps(json.loads(text))  # without blanks at will


def test_a_json_object_is_one(generator: TextGenerator) -> None:
    made = texts(generator, Constraint.json_object(TOKENIZER), top_p=0.5)
    assert all(text.startswith("{") for text in made)


def test_a_text_with_a_form_is_the_same_beside_others(generator: TextGenerator) -> None:
    constraint = Constraint.regex("[a-z ]{10,30}", TOKENIZER)
    sampling, ends = Sampling(seed=3), frozenset({TOKENIZER.end_of_text})

    def made(others: int) -> list[int]:
        engine = Engine(generator.model, slots=4)
        asked = [
            engine.submit(Request([7, 8], 40, sampling, ends=ends, matcher=constraint.matcher()))
        ]
        asked += [engine.submit(Request([number], 30, sampling)) for number in range(others)]
        while engine.busy:
            engine.step()
        return asked[0].ids

    assert made(0) == made(1) == made(6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constraint.regex("(", TOKENIZER), "this form cannot be used: unclosed group"),
        (lambda: Constraint.json_schema("{", TOKENIZER), "this schema is not JSON"),
        (lambda: Constraint.json_schema("[1]", TOKENIZER), "a schema must be a JSON object"),
        (lambda: Constraint.json_schema("true", TOKENIZER), "a schema must be a JSON object"),
        (lambda: Constraint.json_schema({"type": "sack"}, TOKENIZER), "Invalid type: sack"),
        (lambda: Constraint.regex("a" * 70_000, TOKENIZER), "more than 65536"),
    ],
)
def test_a_bad_form_is_refused(make: object, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make()  # type: ignore[operator]


def test_a_form_that_cannot_go_on_is_an_error_of_that_text_alone(
    generator: TextGenerator,
) -> None:
    class Stuck:
        error = "it is stuck"

        def allowed(self) -> torch.Tensor:
            return torch.zeros(TOKENIZER.size, dtype=torch.bool)

        def append(self, id: int) -> None:
            pass

    engine = Engine(generator.model, slots=2)
    stuck = engine.submit(Request([1], 5, Sampling(), matcher=Stuck()))
    other = engine.submit(Request([1], 5, Sampling()))
    while engine.busy:
        engine.step()
    assert (stuck.finish, other.finish, len(other.ids)) == ("error", "length", 5)
    with pytest.raises(DataError, match="it is stuck"):
        stuck.require_token()
