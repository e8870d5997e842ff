"""Completions and answers, whole and as streams."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from gristmill.model import Model

PROMPT = "the mill turns"
HELLO = [{"role": "user", "content": "the mill"}]
SEED = 6
VARIED = {"temperature": 3.0, "seed": 5, "logit_bias": {"256": -100}}
"""Draws bytes that are no characters, too, but never the end."""


def complete(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"model": "mill", "prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def answer(server: Any, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", {"model": "mill", "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def events(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, end = answer.text.split("\n\n")
    assert end == "" and lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


# ------------------------------------------------------------------ completions


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_completion_is_what_the_engine_gives(server: Any, mill: Path, temperature: float) -> None:
    value = complete(server, max_tokens=12, temperature=temperature, seed=SEED, top_k=30)
    model = Model.open(mill, device="cpu")
    (choice,) = value["choices"]
    assert choice == {
        "index": 0,
        "text": model.generate(PROMPT, tokens=12, temperature=temperature, top_k=30, seed=SEED),
        "finish_reason": "length",
        "logprobs": None,
    }
    assert value["object"] == "text_completion" and value["model"] == "mill"
    assert value["seed"] == SEED
    assert value["usage"] == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 12,
        "total_tokens": len(PROMPT) + 12,
    }


def test_a_completion_has_16_tokens_if_nothing_is_said(server: Any) -> None:
    assert complete(server, temperature=0)["usage"]["completion_tokens"] == 16


def test_fields_that_nobody_knows_and_nulls_are_ignored(server: Any) -> None:
    plain = complete(server, temperature=0)["choices"]
    nulls = dict.fromkeys(("stop", "n", "seed", "logit_bias", "stream", "stream_options", "top_k"))
    extra = {"user": "me", "wings": 2, "store": True, "metadata": {}, "tools": [], **nulls}
    assert complete(server, temperature=0, **extra)["choices"] == plain


def test_a_text_of_the_same_seed_is_the_same_alone_whole_and_streamed(server: Any) -> None:
    alone = complete(server, max_tokens=40, **VARIED)["choices"][0]["text"]
    several = complete(server, max_tokens=40, n=4, prompt=["a", PROMPT], **VARIED)["choices"]
    assert [choice["index"] for choice in several] == list(range(8))
    assert several[4]["text"] == alone
    assert len({choice["text"] for choice in several}) == 8
    body = {"prompt": PROMPT, "max_tokens": 40, "stream": True, **VARIED}
    chunks = events(server.post("/v1/completions", body))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == alone


def test_the_same_seed_gives_the_same_text_on_both_routes(server: Any) -> None:
    first, second = (answer(server, max_tokens=20, **VARIED) for _ in range(2))
    assert first["choices"] == second["choices"]
    chat = Model.open(server_run(server), device="cpu").chat(template="plain")
    ids = chat.encoder.encode_prompt([*chat.messages, message("user", "the mill")])
    same = complete(server, prompt=ids, max_tokens=20, **VARIED)
    assert same["choices"][0]["text"] == first["choices"][0]["message"]["content"]


def server_run(server: Any) -> str:
    return str(server.parts.registry.loaded[0].opened.stored.run)


def message(role: str, content: str) -> Any:
    from gristmill.text.chat.conversations import Message

    return Message(role, content)


def test_without_a_seed_texts_differ_and_can_be_had_again(server: Any) -> None:
    first, second = (complete(server, max_tokens=30, temperature=2) for _ in range(2))
    assert first["choices"] != second["choices"]
    again = complete(server, max_tokens=30, temperature=2, seed=first["seed"])
    assert again["choices"] == first["choices"]


def test_negative_seeds_are_seeds(server: Any) -> None:
    texts = [complete(server, seed=seed)["choices"][0]["text"] for seed in (-1, -1, -2)]
    assert texts[0] == texts[1] != texts[2]


def test_prompts_may_be_ids_and_lists(server: Any) -> None:
    ids = list(PROMPT.encode())
    whole = complete(server, temperature=0)["choices"][0]["text"]
    for prompt in (ids, [PROMPT], [ids], [ids, PROMPT]):
        texts = [
            choice["text"] for choice in complete(server, prompt=prompt, temperature=0)["choices"]
        ]
        assert set(texts) == {whole}
    assert complete(server, prompt="")["usage"]["prompt_tokens"] == 1  # the end of another text


def test_too_many_tokens_are_cut_to_the_context(server: Any) -> None:
    for wanted in (10**6, 2**31, 2**63 - 1, 10**30):
        value = complete(server, max_tokens=wanted, temperature=0, ignore_eos=True)
        assert value["choices"][0]["finish_reason"] == "length"
        assert value["usage"]["total_tokens"] == 128 + 1  # nothing has to come after the last
    full = complete(server, prompt="x" * 128, max_tokens=5)
    assert full["usage"]["completion_tokens"] == 1


def test_so_are_those_of_chats(server: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = answer(server, **{name: 10**18}, ignore_eos=True)
        assert value["choices"][0]["finish_reason"] == "length"
        assert value["usage"]["total_tokens"] == 129


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-9])
def test_the_smallest_top_p_leaves_the_likeliest_token(server: Any, top_p: float) -> None:
    """In fp32 it would be zero, and no token would be left."""
    made = complete(server, temperature=2, top_p=top_p, ignore_eos=True)
    likeliest = complete(server, temperature=0, ignore_eos=True)
    assert made["choices"][0]["text"] == likeliest["choices"][0]["text"]


@pytest.mark.parametrize("factor", [0.01, 100])
def test_the_ends_of_what_may_be_asked_for_give_texts(server: Any, factor: float) -> None:
    ends = {"temperature": 100, "repetition_penalty": factor, "min_p": 1, "ignore_eos": True}
    assert complete(server, **ends)["usage"]["completion_tokens"] == 16
    hot = complete(server, temperature=100, repetition_penalty=factor, regex="[ab]{9}")
    assert set(hot["choices"][0]["text"]) <= set("ab")


def test_an_answer_fills_the_context_if_nothing_is_said(server: Any) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert answer(server, ignore_eos=True, **{name: 3})["usage"]["completion_tokens"] == 3
    assert answer(server, ignore_eos=True)["usage"]["total_tokens"] == 129


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(server: Any) -> None:
    refused = server.post("/v1/completions", {"prompt": "x" * 129})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert "129 tokens" in error["message"] and "128" in error["message"]
    assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    long = [{"role": "user", "content": "x" * 200}]
    for stream in (False, True):
        refused = server.post("/v1/chat/completions", {"messages": long, "stream": stream})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_are_cut_off(server: Any, stream: bool) -> None:
    whole = complete(server, max_tokens=60, temperature=0)["choices"][0]["text"]
    stop = whole[7:10]
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stop": [stop, "never"], "n": 2}
    if stream:
        chunks = events(server.post("/v1/completions", {**body, "stream": True}))
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
        assert ends.count("stop") == 2 and ends.count("length") == 0
    else:
        choices = complete(server, **body)["choices"]
        texts = [choice["text"] for choice in choices]
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
    assert texts == [whole[: whole.index(stop)]] * 2


def test_ids_that_end_texts(server: Any) -> None:
    whole = complete(server, max_tokens=60, temperature=0)["choices"][0]["text"]
    letter = whole[3]
    ended = complete(server, max_tokens=60, temperature=0, stop_token_ids=[ord(letter)])
    assert ended["choices"][0]["text"] == whole[: whole.index(letter)]
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == whole.index(letter) + 1


def test_the_end_of_text_ends_it_unless_it_is_ignored(server: Any) -> None:
    forced = {"logit_bias": {"256": 100}, "temperature": 0, "max_tokens": 5}
    ended = complete(server, **forced)
    assert ended["choices"][0] | {"logprobs": None} == {
        "index": 0, "text": "", "finish_reason": "stop", "logprobs": None,
    }  # fmt: skip
    ignored = complete(server, ignore_eos=True, **forced)
    assert ignored["choices"][0]["finish_reason"] == "length"
    assert ignored["usage"]["completion_tokens"] == 5


def test_bias_and_penalties_reach_the_engine(server: Any) -> None:
    only = complete(server, logit_bias={"122": 100}, temperature=0, max_tokens=5)
    assert only["choices"][0]["text"] == "zzzzz"
    plain = complete(server, temperature=0, max_tokens=60)["choices"][0]["text"]
    for name, value in (
        ("presence_penalty", 2), ("frequency_penalty", 2), ("repetition_penalty", 1.8),
    ):  # fmt: skip
        assert (
            complete(server, temperature=0, max_tokens=60, **{name: value})["choices"][0]["text"]
            != plain
        )
    for limits in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
        assert complete(server, max_tokens=60, seed=1, **limits)["choices"][0]["text"] == plain


def test_no_half_characters_are_streamed(server: Any) -> None:
    """A bias lets only the bytes of two characters be drawn, which often form none."""
    bias = {str(byte): 100 for byte in "é磨".encode()}
    body = {"prompt": PROMPT, "logit_bias": bias, "max_tokens": 100, "seed": 3}
    whole = complete(server, **body)["choices"][0]["text"]
    chunks = events(server.post("/v1/completions", {**body, "stream": True}))
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    # A piece that ended inside a character would have a replacement in its place.
    assert "".join(pieces) == whole
    assert "é" in whole


def test_the_best_of_several_is_the_likeliest(server: Any) -> None:
    several = complete(server, n=6, logprobs=0, max_tokens=8, **VARIED)["choices"]
    means = [sum(one["logprobs"]["token_logprobs"]) / 8 for one in several]
    best = complete(server, n=2, best_of=6, max_tokens=8, **VARIED)
    ranked = sorted(range(6), key=lambda number: -means[number])
    assert [one["text"] for one in best["choices"]] == [several[n]["text"] for n in ranked[:2]]
    assert [one["index"] for one in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"]["completion_tokens"] == 48


# ------------------------------------------------------------------ log-probabilities


def test_log_probabilities_of_prompt_and_text(server: Any, mill: Path) -> None:
    value = complete(server, echo=True, logprobs=3, max_tokens=6, temperature=0)
    (choice,) = value["choices"]
    table = choice["logprobs"]
    assert choice["text"].startswith(PROMPT) and len(choice["text"]) == len(PROMPT) + 6
    assert "".join(table["tokens"]) == choice["text"]
    assert table["text_offset"] == list(range(len(choice["text"])))
    loaded = Model.open(mill, device="cpu").loaded
    ids = torch.tensor([list(choice["text"].encode())])
    with torch.inference_mode():
        log_probs = loaded.model(ids)[0].log_softmax(1)
    assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
    for place, id in enumerate(ids[0].tolist()[1:], start=1):
        row = log_probs[place - 1]
        assert table["token_logprobs"][place] == pytest.approx(float(row[id]), abs=1e-4)
        top = table["top_logprobs"][place]
        assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-4)
        assert top[chr(id)] == table["token_logprobs"][place]
        assert len(top) in (3, 4)


def test_log_probabilities_of_a_prompt_alone(server: Any) -> None:
    both = complete(server, echo=True, logprobs=1, max_tokens=1, temperature=0)["choices"][0]
    alone = complete(server, echo=True, logprobs=1, max_tokens=0)
    (choice,) = alone["choices"]
    assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0
    for name, values in choice["logprobs"].items():
        assert values == both["logprobs"][name][:-1]
    one = complete(server, prompt=[7], echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert one["logprobs"]["token_logprobs"] == [None]
    assert complete(server, max_tokens=0)["choices"][0]["text"] == ""


def test_tokens_that_are_parts_of_characters_can_be_told_apart(server: Any) -> None:
    body = {"prompt": list("磨".encode()), "echo": True, "logprobs": 20, "max_tokens": 0}
    table = complete(server, **body)["choices"][0]["logprobs"]
    assert table["tokens"] == ["bytes:\\xe7", "bytes:\\xa3", "bytes:\\xa8"]
    assert table["text_offset"] == [0, 0, 0]
    assert all(len(top) in (20, 21) for top in table["top_logprobs"][1:])
    bias = {str(byte): 100 for byte in "磨".encode()}
    body = {"logit_bias": bias, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "seed": 1}
    for entry in answer(server, **body)["choices"][0]["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0


def test_log_probabilities_are_the_same_as_a_stream(server: Any) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 30, **VARIED}
    whole = answer(server, **body)["choices"][0]["logprobs"]["content"]
    chunks = events(
        server.post("/v1/chat/completions", {"messages": HELLO, "stream": True, **body})
    )
    tables = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for table in tables if table for entry in table["content"]] == whole
    assert len(whole) == 30


def test_tokens_of_a_stop_string_have_no_probabilities(server: Any) -> None:
    plain = complete(server, max_tokens=40, temperature=0)["choices"][0]["text"]
    stop = plain[5:8]
    cut = complete(server, max_tokens=40, temperature=0, stop=stop, logprobs=0)["choices"][0]
    assert "".join(cut["logprobs"]["tokens"]) == cut["text"] == plain[: plain.index(stop)]
    assert all(top is None for top in cut["logprobs"]["top_logprobs"])


def test_impossible_tokens_are_finite_in_json(server: Any) -> None:
    text = server.post(
        "/v1/completions", {"prompt": [256, 256], "echo": True, "logprobs": 2, "max_tokens": 4}
    ).text

    def refuse(name: str) -> float:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)


# ------------------------------------------------------------------ streams


@pytest.mark.parametrize("usage", [False, True])
def test_the_order_of_chunks(server: Any, usage: bool) -> None:
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 9, "n": 2, "stream": True, **VARIED}
    if usage:
        body["stream_options"] = {"include_usage": True}
    chunks = events(server.post("/v1/chat/completions", body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 18
        assert all(chunk["usage"] is None for chunk in chunks)
    for index in (0, 1):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant"}
        assert all(set(choice["delta"]) == {"content"} for choice in mine[1:-1])
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["delta"] == {} and mine[-1]["finish_reason"] == "length"


def test_a_stream_with_echo_begins_with_the_prompt(server: Any) -> None:
    body = {
        "prompt": PROMPT,
        "echo": True,
        "stream": True,
        "max_tokens": 4,
        "logprobs": 0,
        "seed": 1,
    }
    chunks = events(server.post("/v1/completions", body))
    assert chunks[0]["choices"][0]["text"].startswith(PROMPT)
    tokens = [t for c in chunks for t in c["choices"][0]["logprobs"]["tokens"]]
    assert "".join(tokens) == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    empty = events(server.post("/v1/completions", {**body, "max_tokens": 0}))
    assert [chunk["choices"][0]["finish_reason"] for chunk in empty] == [None, "length"]


# ------------------------------------------------------------------ chats


def test_a_whole_answer(server: Any) -> None:
    value = answer(server, max_tokens=7, temperature=0)
    assert value["object"] == "chat.completion"
    (choice,) = value["choices"]
    assert choice["message"]["role"] == "assistant" and len(choice["message"]["content"]) == 7
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("the ", "mill")]}]
    assert answer(server, messages=parts, max_tokens=7, temperature=0)["choices"] == [choice]
    developer, system = (
        answer(server, messages=[{"role": role, "content": "grind"}, *HELLO], temperature=0)
        for role in ("developer", "system")
    )
    assert developer["choices"] == system["choices"]


def test_an_answer_is_continued_where_it_was_cut(server: Any) -> None:
    whole = answer(server, max_tokens=20, temperature=0)["choices"][0]["message"]["content"]
    begun = [*HELLO, {"role": "assistant", "content": whole[:8]}]
    rest = answer(server, messages=begun, max_tokens=12, temperature=0, continue_final_message=True)
    assert whole[:8] + rest["choices"][0]["message"]["content"] == whole
    another = answer(server, messages=begun, max_tokens=12, temperature=0)
    assert another["usage"]["prompt_tokens"] > rest["usage"]["prompt_tokens"]


# ------------------------------------------------------------------ forms of text


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "[0-9]{3}-[0-9]{2}"},
        {"guided_regex": "[0-9]{3}-[0-9]{2}"},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99}},
            }
        },
    ],
    ids=["regex", "guided_regex", "json_object", "json_schema"],
)
def test_texts_of_a_form(server: Any, wanted: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    choices = answer(server, n=2, max_tokens=100, seed=1, **wanted)["choices"]
    for choice in choices:
        text = choice["message"]["content"]
        if "response_format" not in wanted:
            assert text[3] == "-" and (text[:3] + text[4:]).isdigit() and len(text) == 6
        elif choice["finish_reason"] == "stop":
            json.loads(text)
    refused = server.post("/v1/completions", {"prompt": "a", "regex": "(["})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "regex"


def test_plain_text_is_a_form(server: Any) -> None:
    plain = answer(server, temperature=0, max_tokens=4)
    form = {"response_format": {"type": "text"}}
    assert answer(server, temperature=0, max_tokens=4, **form)["choices"] == plain["choices"]


# ------------------------------------------------------------------ tokens


def test_tokens_of_a_text_and_of_messages(server: Any) -> None:
    value = server.post("/tokenize", {"model": "mill", "text": "Mühle"}).json()
    assert value["ids"] == list("Mühle".encode())
    assert value["count"] == 6 and value["context"] == 128
    assert value["tokens"] == ["M", "\ufffd", "\ufffd", "h", "l", "e"]
    back = server.post("/detokenize", {"model": "mill", "ids": value["ids"]}).json()
    assert back == {"text": "Mühle"}
    chat = server.post("/tokenize", {"messages": HELLO}).json()
    assert chat["count"] == answer(server, max_tokens=1)["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {"text": ""}).json()["ids"] == []


def test_nothing_that_is_sampled_is_random_beyond_its_seed(server: Any) -> None:
    values = [complete(server, max_tokens=25, logprobs=5, **VARIED)["choices"] for _ in range(3)]
    assert all(one == other for one, other in pairwise(values))
    assert all(math.isfinite(x) for x in values[0][0]["logprobs"]["token_logprobs"])
