"""Models by name, loaded and dropped, and newer checkpoints of a run."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gristmill.base.errors import UserError
from gristmill.checkpoint.model import StoredModel
from gristmill.generate.request import Generation
from gristmill.model import Model


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def body(model: str | None = None) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {"prompt": "the mill", "max_tokens": 30, "seed": 5, **named}


def sampled(run: Path, step: int) -> str:
    model = Model.open(run, checkpoint=step, device="cpu")
    return model.generate("the mill", tokens=30, temperature=1.0, top_k=0, seed=5)


@pytest.fixture
def copy(mill: Path, tmp_path: Path) -> Path:
    """A run folder to do things to."""
    return Path(shutil.copytree(mill, tmp_path / "copy"))


def hide(run: Path, step: int) -> Callable[[], None]:
    """Take a checkpoint away; call what is returned to commit it again."""
    path, aside = run / f"checkpoints/step-{step:08d}", run / f"step-{step}-aside"
    path.rename(aside)
    return lambda: aside.rename(path) and None


def test_the_list_of_models(server: Any) -> None:
    server.post("/v1/completions", body("mill"))
    models = {model["id"]: model for model in server.get("/v1/models").json()["data"]}
    assert list(models) == ["mill", "mill@100", "mill@50"]
    newest = models["mill"]
    assert newest["step"] == 150 and newest["loaded"] and newest["context"] == 128
    assert newest["object"] == "model" and newest["owned_by"] == "gristmill"
    assert newest["run"] == "mill" and newest["chat"] and newest["parameters"] > 10_000
    assert server.get("/v1/models/mill@100").json()["step"] == 100
    assert server.get("/v1/models/nothing").status_code == 404


def test_models_are_loaded_when_asked_for_and_dropped_by_use(
    mill: Path, serve_models: Callable[..., Any]
) -> None:
    server = serve_models(mill, f"other={mill}", loaded=2)
    for name, step in (("mill", 150), ("mill@50", 50), ("other", 150), ("mill@100", 100)):
        assert text_of(server.post("/v1/completions", body(name))) == sampled(mill, step)
    loaded = [one.name for one in server.parts.registry.loaded]
    assert sorted(loaded) == ["mill@100", "other"]
    assert [line for line in server.log if line.startswith("dropped")] == [
        "dropped mill", "dropped mill@50",
    ]  # fmt: skip
    unnamed = server.post("/v1/completions", body())
    assert unnamed.status_code == 400 and unnamed.json()["error"]["param"] == "model"


def test_a_model_in_use_is_not_dropped(
    mill: Path, serve_models: Callable[..., Any], gate: Any
) -> None:
    server = serve_models(mill, loaded=1)
    server.post("/v1/completions", body("mill"))
    gate.close()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.post, "/v1/completions", body("mill"))
        server.until(lambda: server.parts.registry.loaded[0].users == 1)
        second = pool.submit(server.post, "/v1/completions", body("mill@50"))
        server.until(lambda: server.parts.service.running == 2)
        server.wait(asyncio.sleep(0))
        assert [one.name for one in server.parts.registry.loaded] == ["mill"]
        gate.open()
        assert text_of(first.result()) == sampled(mill, 150)
        assert text_of(second.result()) == sampled(mill, 50)


def test_requests_at_once_load_a_model_once(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = list[object](), StoredModel.load

    def counted(stored: StoredModel, device: Any) -> Any:
        loads.append(stored.step)
        return load(stored, device)

    monkeypatch.setattr(StoredModel, "load", counted)
    server = serve_models(mill, loaded=3)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(
            lambda name: server.post("/v1/completions", body(name)), ["mill", "mill@50"] * 6
        )
        assert len({text_of(answer) for answer in answers}) == 2
    assert sorted(loads) == [50, 150]


def test_another_model_is_served_while_one_is_loaded(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    loading, goes_on, load = threading.Event(), threading.Event(), StoredModel.load

    def slow(stored: StoredModel, device: Any) -> Any:
        if stored.step == 50:
            loading.set()
            goes_on.wait(300)
        return load(stored, device)

    monkeypatch.setattr(StoredModel, "load", slow)
    server = serve_models(mill)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, "/v1/completions", body("mill@50"))
        loading.wait(300)
        assert text_of(server.post("/v1/completions", body("mill"))) == sampled(mill, 150)
        assert not waiting.done()
        goes_on.set()
        assert text_of(waiting.result()) == sampled(mill, 50)


def test_a_newer_checkpoint_takes_over_while_requests_run(
    copy: Path, serve_models: Callable[..., Any], gate: Any
) -> None:
    show = hide(copy, 150)
    server = serve_models(copy)
    assert text_of(server.post("/v1/completions", body())) == sampled(copy, 100)
    gate.close()
    with ThreadPoolExecutor(12) as pool:
        old = [pool.submit(server.post, "/v1/completions", body()) for _ in range(6)]
        server.until(lambda: server.parts.registry.loaded[0].users == 6)
        show()
        server.wait(server.parts.registry.take_over())
        assert [one.opened.step for one in server.parts.registry.loaded] == [150, 100]
        new = [pool.submit(server.post, "/v1/completions", body()) for _ in range(6)]
        server.until(lambda: server.parts.service.running == 12)
        gate.open()
        assert {text_of(one.result()) for one in old} == {sampled(copy, 100)}
        assert {text_of(one.result()) for one in new} == {sampled(copy, 150)}
    server.until(lambda: len(server.parts.registry.loaded) == 1)
    models = server.get("/v1/models").json()["data"]
    assert [(one["id"], one["step"]) for one in models] == [
        ("copy", 150), ("copy@100", 100), ("copy@50", 50),
    ]  # fmt: skip


def test_a_damaged_newest_checkpoint_is_passed_over_once(
    copy: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    show = hide(copy, 150)
    server = serve_models(copy)
    assert text_of(server.post("/v1/completions", body())) == sampled(copy, 100)
    show()
    file = copy / "checkpoints/step-00000150/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    opened, open_model = list[object](), Model.open

    def counted(*args: Any, **options: Any) -> Model:
        opened.append(args)
        return open_model(*args, **options)

    monkeypatch.setattr(Model, "open", counted)
    for _ in range(3):
        server.wait(server.parts.registry.take_over())
    assert len(opened) == 1
    assert sum("step-00000150 is damaged" in line for line in server.log) == 1
    assert text_of(server.post("/v1/completions", body())) == sampled(copy, 100)
    refused = server.post("/v1/completions", body("copy@150"))
    assert refused.status_code == 503
    assert str(copy) not in refused.text


def test_checkpoints_that_were_deleted(copy: Path, serve_models: Callable[..., Any]) -> None:
    server = serve_models(copy, loaded=1)
    assert text_of(server.post("/v1/completions", body("copy@50"))) == sampled(copy, 50)
    expected = sampled(copy, 50)
    shutil.rmtree(copy / "checkpoints/step-00000050")
    assert text_of(server.post("/v1/completions", body("copy@50"))) == expected
    server.post("/v1/completions", body("copy"))  # the other is dropped
    assert server.post("/v1/completions", body("copy@50")).status_code == 404


def test_names_that_two_models_have(mill: Path, serve_models: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="two models are called 'mill'"):
        serve_models(mill, mill)
    with pytest.raises(UserError, match="holds no @"):
        serve_models(f"a@b={mill}")
    with pytest.raises(UserError):
        serve_models(mill / "nothing")
    with pytest.raises(UserError, match="whose checkpoints are all served") as wrong:
        serve_models(f"{mill}@50")
    assert "clients ask for mill@50" in (wrong.value.problems[0].remedy or "")
    server = serve_models(mill / "checkpoints/step-00000050")
    assert [one["id"] for one in server.get("/v1/models").json()["data"]] == ["mill@50"]
    assert text_of(server.post("/v1/completions", body("mill@50"))) == sampled(mill, 50)


def test_a_model_without_a_template_takes_completions_only(
    mill: Path, serve_models: Callable[..., Any]
) -> None:
    server = serve_models(mill, template=None)
    assert not server.get("/v1/models/mill").json()["chat"]
    messages = [{"role": "user", "content": "a"}]
    refused = server.post("/v1/chat/completions", {"messages": messages})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "no_chat_template"
    assert text_of(server.post("/v1/completions", body()))


# ------------------------------------------------------------------ when an engine fails


def test_an_engine_that_fails_fails_its_requests_only(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.generate.engine import Engine

    server = serve_models(mill)
    step = Engine.step

    def broken(engine: Engine) -> list[Generation]:
        raise RuntimeError("the device is on fire in /secret/place")

    monkeypatch.setattr(Engine, "step", broken)
    for stream in (False, True):
        failed = server.post("/v1/completions", {**body(), "stream": stream})
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        assert "secret" not in failed.text
    assert any("on fire" in line for line in server.log)
    monkeypatch.setattr(Engine, "step", step)
    assert text_of(server.post("/v1/completions", body())) == sampled(mill, 150)
    server.until(server.idle)


def test_an_engine_that_fails_during_a_stream_says_so_in_it(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gristmill.generate.engine import Engine

    server = serve_models(mill)
    assert server.post("/v1/completions", body()).status_code == 200  # it has warmed up
    step, left, seen = Engine.step, [5], threading.Event()

    def broken(engine: Engine) -> list[Generation]:
        left[0] -= 1
        if left[0] < 0:
            # Not before something was sent, or the answer would be an error from the start.
            seen.wait(60)
            raise RuntimeError("no more")
        return step(engine)

    monkeypatch.setattr(Engine, "step", broken)
    asked = {**body(), "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=asked) as failed:
        assert failed.status_code == 200
        pieces = failed.iter_text()
        text = next(pieces)
        seen.set()
        text += "".join(pieces)
    *chunks, last, end = text.split("\n\n")
    assert chunks and end == ""
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_logits_that_are_not_finite_fail_one_request(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, gate: Any
) -> None:
    from gristmill.generate import steps

    server, start = serve_models(mill), steps.HostSteps.start

    def sometimes(own: Any, slots: Sequence[int]) -> Any:
        decode = own._decoder.decode

        def spoilt(slots: Sequence[int], tokens: Any, lengths: Any) -> Any:
            logits_RV = decode(slots, tokens, lengths).clone()
            bad = [own._rows[slot].request.sampling.seed == 13 for slot in slots]
            logits_RV[bad] = float("nan")
            return logits_RV

        with monkeypatch.context() as patch:
            patch.setattr(own._decoder, "decode", spoilt)
            return start(own, slots)

    monkeypatch.setattr(steps.HostSteps, "start", sometimes)
    server.until(lambda: bool(server.parts.registry.loaded))
    gate.close()
    with ThreadPoolExecutor(4) as pool:
        seeds = (5, 13, 5)
        answers = [
            pool.submit(server.post, "/v1/completions", {**body(), "seed": seed}) for seed in seeds
        ]
        server.until(lambda: server.parts.registry.loaded[0].worker.active == 3)
        gate.open()
        good, bad, other = (one.result() for one in answers)
    assert text_of(good) == text_of(other) == sampled(mill, 150)
    assert bad.status_code == 500
    assert "NaN" in bad.json()["error"]["message"]
