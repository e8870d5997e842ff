"""Many clients at once, and clients that do not behave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

BODY = {"prompt": "the mill", "max_tokens": 4, "seed": 1}


async def ask_many(url: str, count: int) -> Counter[int]:
    """The statuses of so many requests at once, half of them streams; all texts are the same."""
    statuses, texts = Counter[int](), set[str]()
    limits = httpx.Limits(max_connections=None)

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        stream = number % 2 == 0
        answer = await client.post("/v1/completions", json={**BODY, "stream": stream})
        statuses[answer.status_code] += 1
        if answer.status_code != 200:
            assert int(answer.headers["retry-after"]) > 0
        elif stream:
            *chunks, done, end = answer.text.split("\n\n")
            assert done == "data: [DONE]" and end == ""
            values = (json.loads(chunk.removeprefix("data: ")) for chunk in chunks)
            texts.add("".join(value["choices"][0]["text"] for value in values))
        else:
            texts.add(answer.json()["choices"][0]["text"])

    client = httpx.AsyncClient(base_url=url, timeout=90, limits=limits)
    async with client, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(ask(client, number))
    assert len(texts) == 1
    return statuses


def test_200_clients_at_once(mill: Path, serve_models: Callable[..., Any]) -> None:
    server = serve_models(mill)
    statuses = asyncio.run(ask_many(server.url, 200))
    assert statuses == {200: 200}
    server.until(server.idle)
    metrics = server.get("/metrics").text
    assert 'gristmill_requests_total{route="/v1/completions",status="200"} 200' in metrics
    assert "gristmill_time_to_first_token_seconds_count 200" in metrics
    assert f"gristmill_prompt_tokens_total {200 * len('the mill')}" in metrics
    assert 'gristmill_slots_used{model="mill"} 0' in metrics


@pytest.mark.slow
def test_1000_clients_at_once(mill: Path, serve_models: Callable[..., Any]) -> None:
    server = serve_models(mill, queue=100)
    statuses = asyncio.run(ask_many(server.url, 1000))
    assert set(statuses) <= {200, 429} and statuses[200] >= 104
    server.until(server.idle)
    large = serve_models(mill, queue=1000)
    assert asyncio.run(ask_many(large.url, 1000)) == {200: 1000}


def connect(server: Any, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read yet."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    raw.settimeout(90)
    content = json.dumps(body).encode()
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(content), content)
    )
    return raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slot(
    mill: Path, serve_models: Callable[..., Any], gate: Any, stream: bool
) -> None:
    server = serve_models(mill, slots=1)
    server.until(lambda: bool(server.parts.registry.loaded))
    worker = server.parts.registry.loaded[0].worker
    gate.close()
    raws = [connect(server, {**BODY, "n": 2, "stream": stream}) for _ in range(3)]
    server.until(lambda: worker.active == 1 and worker.waiting == 5)
    for raw in raws:
        raw.close()
    # Though nothing has been computed since.
    server.until(server.idle)
    assert worker.waiting == 0
    gate.open()
    assert server.post("/v1/completions", BODY).status_code == 200
    status = 'gristmill_requests_total{route="/v1/completions",status="499"} 3'
    assert status in server.get("/metrics").text


def test_a_client_that_leaves_a_stream_frees_its_slot(server: Any, gate: Any) -> None:
    raw = connect(server, {**BODY, "max_tokens": 100, "ignore_eos": True, "stream": True})
    answer = b""
    while b"data: " not in answer:
        answer += raw.recv(1000)
        gate.close()
    server.until(lambda: server.parts.service.running == 1)
    raw.close()
    server.until(server.idle)
    gate.open()


def test_readers_that_do_not_read_stop_nobody(
    mill: Path, serve_models: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given up when they have read nothing for a while."""
    from gristmill.web import call

    monkeypatch.setattr(call, "STALL_SECONDS", 1.0)
    # Otherwise the kernel takes megabytes for a client that reads nothing.
    server = serve_models(mill, slots=4, send_buffer=65536)
    body = {**BODY, "prompt": ["a"] * 8, "max_tokens": 120, "logprobs": 20, "stream": True}
    slow = [connect(server, {**body, "ignore_eos": True}) for _ in range(3)]
    assert server.post("/v1/completions", BODY).status_code == 200
    server.until(server.idle)
    assert server.post("/v1/completions", BODY).status_code == 200
    for raw in slow:
        raw.close()
    assert re.search(r'status="499"} 3', server.get("/metrics").text) is not None


def test_half_a_request_holds_nothing(server: Any) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for begun in (
        b"", b"POST /v1/comp", b"\x16\x03\x01\x02", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 50,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000,
    ):  # fmt: skip
        with socket.create_connection((host, int(port))) as raw, contextlib.suppress(OSError):
            raw.sendall(begun)
    server.until(server.idle)
    assert server.get("/health").json() == {"status": "ok"}
