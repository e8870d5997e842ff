"""Clients that people use: the openai package, curl, lm-evaluation-harness."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from gristmill.model import Model

HELLO: Any = [{"role": "user", "content": "the mill"}]


@pytest.fixture
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mill", "mill@100", "mill@50"]
    assert client.models.retrieve("mill@50").owned_by == "gristmill"


def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model="mill", prompt="the", max_tokens=9, seed=1, logprobs=2)
    (choice,) = made.choices
    assert choice.finish_reason in ("length", "stop") and choice.logprobs is not None
    assert choice.logprobs.tokens is not None and made.usage is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    chunks = client.completions.create(
        model="mill", prompt="the", max_tokens=9, seed=1, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_chats(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="mill", messages=HELLO, max_tokens=9, seed=1, logprobs=True, top_logprobs=2
    )
    text = made.choices[0].message.content
    assert text and made.choices[0].logprobs and made.choices[0].logprobs.content
    chunks = list(
        client.chat.completions.create(
            model="mill",
            messages=HELLO,
            max_completion_tokens=9,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert chunks[-1].usage is not None and chunks[-1].usage == made.usage


def test_fields_beyond_the_interface(client: openai.OpenAI) -> None:
    made = client.completions.create(
        model="mill", prompt="the", temperature=5, extra_body={"top_k": 1, "ignore_eos": True}
    )
    greedy = client.completions.create(
        model="mill", prompt="the", temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.choices[0].text == greedy.choices[0].text


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="mill", prompt="the", temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nothing", prompt="the")


def test_api_keys(mill: Path, serve_models: Callable[..., Any]) -> None:
    server = serve_models(mill, keys=(b"secret",))
    for key in ("secret", "public"):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            if key == "secret":
                assert client.models.list().data
            else:
                with pytest.raises(openai.AuthenticationError):
                    client.models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl(server: Any) -> None:
    body = json.dumps({"prompt": "the", "max_tokens": 3, "stream": True})
    done = subprocess.run(
        ["curl", "-sN", f"{server.url}/v1/completions", "-d", body],
        capture_output=True,
        text=True,
        check=True,
        timeout=90,
    )
    assert done.stdout.endswith("data: [DONE]\n\n")
    large = "x" * (5 * 2**20)
    refused = subprocess.run(
        ["curl", "-s", "-w", "%{http_code}", f"{server.url}/tokenize", "--data-binary", "@-"],
        input=large,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert refused.stdout.endswith("413")


def test_lm_evaluation_harness(
    server: Any, mill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores the same task by way of the server, and with the model itself."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    rows = [
        {
            "question": "the mill",
            "options": [" turns and grinds", " xqz vvv", " corn"],
            "answer": 0,
        },
        {"question": "water runs", "options": [" wheel below", " below the wheel"], "answer": 1},
        {"question": "the corn", "options": [" into flour", " kkkk", " ü磨 ?"], "answer": 0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": "milling",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }
    (tmp_path / "milling.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval.api.instance import Instance
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    harness: Any = LocalCompletionsAPI(
        model="mill",
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        max_length=128,
        batch_size=2,
    )

    # Without a tokenizer the harness does not know where a continuation begins.
    harness.tokenized_requests, harness.tokenizer_backend = True, "huggingface"
    harness.tok_encode = lambda text, **options: list(text.encode())
    harness.tokenizer = type("Bytes", (), {"eos_token_id": 256, "eos_token": "<|endoftext|>"})()
    pairs = [(row["question"], option) for row in rows for option in row["options"]]  # type: ignore[attr-defined]
    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    scores = harness.loglikelihood(asked)
    model = Model.open(mill, device="cpu").loaded.model
    from gristmill.evaluate.scoring import Continuation, score

    own = score(
        model,
        [
            [Continuation((*question.encode(), *option.encode()), len(question.encode()))]
            for question, option in pairs
        ],
    )
    for (log_prob, greedy), (mine,) in zip(scores, own, strict=True):
        assert log_prob == pytest.approx(mine.log_prob, abs=1e-3)
        assert greedy == mine.greedy
    manager = TaskManager(include_path=str(tmp_path))
    report: Any = simple_evaluate(
        model=harness, tasks=["milling"], task_manager=manager, log_samples=False
    )
    results = Model.open(mill, device="cpu").evaluate(tasks=str(tmp_path / "milling.yaml"))
    for name, measure in results[0].measures.items():
        assert report["results"]["milling"][f"{name},none"] == pytest.approx(measure.value)
    assert {"acc", "acc_norm"} <= set(results[0].measures)
