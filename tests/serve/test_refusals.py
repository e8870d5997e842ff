"""What is refused: wrong requests, too much at once, and those who may not ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gristmill.web.service import RequestLimits

HELLO = [{"role": "user", "content": "the mill"}]


def error_of(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    asked = answer.request.url.path
    own = error["message"].replace(asked, "").replace("/v1/", "").replace("/v1", "")
    assert "/" not in own
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("temperature", 1e999),
        ("temperature", 10**400), ("top_p", 0), ("top_p", 1.5), ("top_p", [1]), ("top_k", 1.5),
        ("top_k", -2), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", "1"), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"),
        ("temperature", 101),
        ("repetition_penalty", 1e-30), ("repetition_penalty", 1e30), ("n", 0), ("n", 17),
        ("n", True), ("best_of", 17), ("seed", 1.5),
        ("seed", 2**64), ("stop", 5), ("stop", ["a", 1]), ("stop", ["a"] * 17),
        ("stop", "x" * 257), ("stop", "\ud800"), ("stop_token_ids", 5), ("stop_token_ids", ["a"]),
        ("stop_token_ids", [257]), ("logit_bias", []), ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}), ("logit_bias", {"300": 1}),
        ("logprobs", 21), ("logprobs", "all"), ("echo", "yes"), ("stream", 1), ("stream", "true"),
        ("stream_options", []), ("ignore_eos", 1), ("suffix", "end"), ("prompt", 5),
        ("prompt", []), ("prompt", [[]]), ("prompt", [1.5]), ("prompt", [257]), ("prompt", [-1]),
        ("prompt", ["a", 1]), ("prompt", {}), ("prompt", None), ("model", 5), ("min_tokens", 3),
        ("response_format", "json"), ("regex", 5),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(server: Any, field: str, value: object) -> None:
    body = {"model": "mill", "prompt": "a", field: value}
    text = json.dumps(body).replace("Infinity", "1e999")
    error = error_of(server.post("/v1/completions", text.encode()))
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": ["a", "\udc00"]}, "prompt[1]"),
        ({"n": 16, "prompt": ["a"] * 2048}, "prompt"),
    ],
)
def test_fields_inside_and_together(server: Any, values: dict[str, Any], param: str) -> None:
    text = json.dumps({"prompt": "a", **values}).encode()
    assert error_of(server.post("/v1/completions", text))["param"] == param


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0]"),
        ({"messages": HELLO * 5000}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "assistant", "content": "a"}], "continue_final_message": True},
         "messages"),
    ],
)  # fmt: skip
def test_wrong_chats(server: Any, values: dict[str, Any], param: str) -> None:
    body = {"messages": HELLO, "max_tokens": 1, **values}
    assert error_of(server.post("/v1/chat/completions", body))["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", b"", "the body is empty: send a JSON object"),
        ("/v1/completions", {}, "prompt is missing: it must be a string"),
        ("/v1/completions", {"prompt": []}, "such prompts, not []"),
        ("/v1/completions", {"prompt": "a", "stop": ["a", 1]}, 'strings, not ["a", 1]'),
        ("/v1/completions", {"prompt": "a", "max_tokens": -1}, "must be 0 or more, not -1"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, "must be token ids, not 'a'"),
        ("/v1/completions", {"prompt": "a", "model": "mule"}, "there is no model 'mule'; /v1/mo"),
        ("/v1/completions", {"prompt": "a", "temperature": 101}, "from 0 to 100, not 101"),
        ("/v1/chat/completions", {"messages": []}, "at least one message, not []"),
        ("/v1/chat/completions", {}, "messages is missing: it must be an array"),
        ("/detokenize", {}, "ids is missing: it must be an array of token ids"),
    ],
)
def test_what_is_said_about_a_wrong_request(
    server: Any, path: str, body: object, words: str
) -> None:
    assert words in error_of(server.post(path, body), 404 if "mule" in words else 400)["message"]


def test_errors_come_before_a_stream_begins(server: Any) -> None:
    body = {"prompt": "a", "stream": True, "temperature": -1}
    assert error_of(server.post("/v1/completions", body))["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"5", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}',
        b"[" * 200_000, b'{"a":' * 100_000, b'{"max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"prompt": "a", }', b"{'prompt': 'a'}",
    ],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_what_is_no_json_object(server: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error_of(server.post(path, body))


def test_tokens_that_there_are_not(server: Any) -> None:
    for ids in ([257], [-1], ["a"], 5, None):
        assert error_of(server.post("/detokenize", {"ids": ids}))["param"] == "ids"
    for body in ({}, {"text": 5}, {"messages": []}):
        error_of(server.post("/tokenize", body))


def test_addresses_and_methods_that_there_are_not(server: Any) -> None:
    for path in ("/v1", "/v1/nothing", "/v1/completions/", "/static/", "/docs"):
        assert error_of(server.get(path), 404)["type"] == "not_found_error"
    assert server.get("/v1/completions").headers["allow"] == "POST"
    for path in ("/v1/models", "/v1/models/mill", "/health", "/static/chat.js"):
        # Also without a body, which nobody looks at.
        refused = server.post(path, b"")
        error_of(refused, 405)
        assert refused.headers["allow"] == "GET, HEAD"
    bodies: tuple[Any, ...] = ({}, b"")
    for body in bodies:
        refused = server.post("/chat/completions", body)
        assert "there is something at /v1/chat" in error_of(refused, 404)["message"]
    with server.client() as client:
        for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
            refused = client.request(method, "/v1/completions", headers={"Origin": "http://a.b"})
            error_of(refused, 405)
            assert not any(name.startswith("access-control") for name in refused.headers)
        head = client.head("/health")
        assert head.status_code == 200 and head.content == b""
    for model in ("nothing", "mill@5", "mill@010", "mill@", "..", "mill@99999999999999"):
        refused = server.post("/v1/completions", {"model": model, "prompt": "a"})
        error = error_of(refused, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"


def test_no_file_beside_the_page_is_sent(server: Any) -> None:
    for name in (
        "../app.py", "%2e%2e/app.py", "..%2fapp.py", "app.py", "__init__.py", "%00", "/etc/passwd",
        "%2e%2e", "%2e", "x" * 5000,
    ):  # fmt: skip
        assert server.get(f"/static/{name}").status_code == 404


def test_the_page_has_its_headers(server: Any) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    if "etag" in page.headers:
        again = server.get("/", headers={"If-None-Match": page.headers["etag"]})
        assert again.status_code == 304 and again.content == b""


# ------------------------------------------------------------------ too much


@pytest.fixture(scope="module")
def small(mill: Path, serve_models: Callable[..., Any]) -> Any:
    """A server that takes little."""
    return serve_models(mill, slots=1, queue=2, limits=RequestLimits(body=2048))


def test_large_bodies_are_refused(small: Any) -> None:
    body = json.dumps({"prompt": "a" * 3000}).encode()
    assert "2048" in error_of(small.post("/v1/completions", body), 413)["message"]
    # Nobody knows how large this one becomes.
    pieces = (b"x" * 100_000 for _ in range(100))
    with small.client() as client:
        error_of(client.post("/v1/completions", content=pieces), 413)
    with socket.create_connection(small.url.removeprefix("http://").split(":")) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        raw.sendall(b"Content-Length: 100000000000\r\n\r\n{")
        assert b" 413 " in raw.recv(100)
    assert small.get("/health").json() == {"status": "ok"}


def test_a_full_queue_says_when_to_come_again(small: Any, gate: Any) -> None:
    small.post("/v1/completions", {"prompt": "a"})
    gate.close()
    with small.client() as client:
        with client.stream(
            "POST", "/nothing-yet", json={}
        ):  # the connection is there before the queue is full
            pass
        waiting = [small_begin(small) for _ in range(3)]
        small.until(lambda: small.parts.registry.loaded[0].worker.pending == 3)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert error_of(refused, 429)["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        for path, given, param in (
            ("/v1/completions", {"prompt": "a", "n": 4}, "n"),
            ("/v1/completions", {"prompt": "a", "best_of": 4}, "best_of"),
            ("/v1/completions", {"prompt": ["a"] * 4}, "prompt"),
            ("/v1/chat/completions", {"messages": HELLO, "n": 4}, "n"),
        ):
            error = error_of(client.post(path, json=given))
            assert "asks for 4 texts" in error["message"] and "at most 3" in error["message"]
            assert error["param"] == param
        metrics = small.get("/metrics").text
        assert 'gristmill_queue{model="mill"} 2' in metrics
        assert 'gristmill_slots_used{model="mill"} 1' in metrics
    gate.open()
    for one in waiting:
        assert one.recv(15) == b"HTTP/1.1 200 OK"
        one.close()
    small.until(small.idle)


def small_begin(server: Any) -> socket.socket:
    """A request, of which nothing is read yet."""
    host, port = server.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    return raw


def test_requests_take_no_longer_than_they_may(
    mill: Path, serve_models: Callable[..., Any], gate: Any
) -> None:
    server = serve_models(mill, limits=RequestLimits(seconds=1.0))
    server.until(lambda: bool(server.parts.registry.loaded))
    gate.close()
    error = error_of(server.post("/v1/completions", {"prompt": "a"}), 504)
    assert error["code"] == "timeout"
    server.until(server.idle)
    gate.open()
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_only_so_many_requests_run(mill: Path, serve_models: Callable[..., Any], gate: Any) -> None:
    server = serve_models(mill, limits=RequestLimits(running=1))
    server.until(lambda: bool(server.parts.registry.loaded))
    gate.close()
    waiting = small_begin(server)
    server.until(lambda: server.parts.service.running == 1)
    refused = server.post("/v1/completions", {"prompt": "a"})
    assert error_of(refused, 503)["code"] == "overloaded"
    assert server.get("/health").status_code == 200
    gate.open()
    assert b"200 OK" in waiting.recv(100)


# ------------------------------------------------------------------ who may ask


@pytest.fixture(scope="module")
def locked(mill: Path, serve_models: Callable[..., Any]) -> Any:
    return serve_models(mill, keys=(b"first key", "zweiter Schlüssel".encode()))


def test_api_keys(locked: Any) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    for key in ("first key", "zweiter Schlüssel"):
        header = {"Authorization": f"Bearer {key}".encode()}
        assert locked.post("/v1/completions", body, headers=header).status_code == 200
    wrong = [{}, *({"Authorization": text} for text in ("Bearer", "first key",
             "Basic first key", "Bearer first", "Bearer first key2", "Bearer x"))]  # fmt: skip
    for header in wrong:
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
            ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/metrics"), ("GET", "/else"),
        ):  # fmt: skip
            with locked.client() as client:
                refused = client.request(method, path, headers=header)
            assert error_of(refused, 401)["code"] == "invalid_api_key"
            assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health"):
        assert locked.get(path).status_code == 200
    assert locked.get("/static/nothing.js").status_code == 404


def test_only_names_of_this_machine_reach_a_local_server(server: Any) -> None:
    port = server.url.rpartition(":")[2]
    for host in ("localhost", "127.0.0.1", "[::1]", "mill.localhost", "LOCALHOST", "127.8.8.8"):
        for name in (host, f"{host}:{port}"):
            assert server.get("/health", headers={"Host": name}).status_code == 200
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "10.0.0.1", ""):
        answer = server.get("/v1/models", headers={"Host": host})
        assert error_of(answer, 403)["code"] == "wrong_host"


def test_pages_of_other_sites_may_not_ask(server: Any) -> None:
    header = {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"}
    answer = server.post("/v1/completions", {"prompt": "a"}, headers=header)
    assert error_of(answer, 403)["code"] == "cross_site"
    same = server.post("/tokenize", {"text": "a"}, headers={"Sec-Fetch-Site": "same-origin"})
    assert same.status_code == 200
    assert not any(name.startswith("access-control") for name in same.headers)
    assert server.get("/", headers=header).status_code == 200  # a link
