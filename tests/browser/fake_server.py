"""A stand-in for the server, so that tests decide what it answers, when, and how it fails.

It keeps to the HTTP contract of the real one: the same paths, fields and errors. Its words depend
on nothing but the model, the text so far and the seed, so a text that is stopped and continued is
the text in one go.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

import gristmill

PACKAGE = Path(gristmill.__file__).parent
PAGES = PACKAGE / "serve" / "pages"
SHARED = PACKAGE / "web" / "pages"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
WORDS = "the mill turns and grinds the corn into flour while water runs below the wheel".split()
MARKUP = [
    "<img src=x ",
    "onerror=\"document.title='broken'\">",
    "<script>",
    "alert(1)",
    "</script>",
]
HALVES = ["A ", "\ufffd", "\ufffd", " mill", " \ufffd", "\ufffd", "."]
"""A windmill's picture of 4 bytes comes in two tokens, and so does an é after a space."""
HALF_BYTES = b"\xf0\x9f"
HALVES_TEXT = ["A ", "", "🌬", " mill", "", " é", "."]


Scores = list[tuple[str, float]]
"""A token that was drawn, then others, each with its log probability."""


def _model(name: str, **values: Any) -> dict[str, Any]:
    about = {"object": "model", "created": 1_700_000_000, "owned_by": "gristmill", "context": 1024}
    rest = {"chat": True, "parameters": 133_248, "loaded": True, "step": None, "run": None}
    return {"id": name, **about, **rest, **values}


MODELS = [
    _model("tour", step=400, run="runs/tour"),
    _model("tour@200", step=200, run="runs/tour"),
    _model("tour@100", step=100, run="runs/tour", loaded=False),
    _model("base", chat=False, context=256, parameters=124_439_808),
]


@dataclass
class Plan:
    """What a test wants of the next answers; `FakeServer.reset` brings back the usual."""

    key: str | None = None
    models: list[dict[str, Any]] = field(default_factory=lambda: MODELS)
    refuse: list[tuple[int, str, dict[str, str]]] = field(default_factory=list)
    """Statuses, messages and headers of the next requests for text, instead of answers."""
    code: str | None = None
    """What their errors have as `code`."""
    fail_after: int | None = None
    """Tokens after which a stream breaks off with an error."""
    cut_after: int | None = None
    """Tokens after which the connection ends without a word."""
    hold_after: int | None = None
    """Tokens after which a stream waits for `FakeServer.release`."""
    length: int = 12
    """Tokens after which an answer ends by itself."""
    script: list[str] | None = None
    """The tokens of the next answers."""
    unlikely: bool = False
    """Whether chats draw what is not among the likeliest tokens that they tell."""
    delay: float = 0
    """Seconds from one token to the next."""


class FakeServer:
    """A server in a thread of this process."""

    markup = "".join(MARKUP)

    def __init__(self) -> None:
        self.plan = Plan()
        self.bodies: list[dict[str, Any]] = []
        self.abandoned = 0
        self._open = threading.Event()
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def reset(self) -> None:
        self.release()
        self.plan = Plan()
        self.bodies = []
        self.abandoned = 0
        self._open = threading.Event()

    def release(self) -> None:
        """Let streams that wait go on."""
        self._open.set()

    def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(self._app(), log_level="error", timeout_graceful_shutdown=1)
        server = self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        self._thread.daemon = True
        self._thread.start()
        wait_until(lambda: server.started)

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self.release()
        self._server.should_exit = True
        self._thread.join(10)
        self._server = None

    def _app(self) -> Starlette:
        routes = [
            Route("/", self._page),
            Route("/static/{name}", self._static),
            Route("/health", lambda request: JSONResponse({"status": "ok"})),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
        ]
        # Once more below a path, as behind a proxy that serves other things too.
        return Starlette(routes=[*routes, Mount("/below/a/path", routes=routes)])

    async def _page(self, request: Request) -> Response:
        return FileResponse(PAGES / "chat.html", headers={"Content-Security-Policy": POLICY})

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        file = next(
            (folder / name for folder in (PAGES, SHARED) if (folder / name).is_file()), PAGES
        )
        if not file.is_file():
            return _error(404, "no such file")
        return FileResponse(file, headers={"Content-Security-Policy": POLICY})

    def _barred(self, request: Request) -> bool:
        given = request.headers.get("Authorization")
        return self.plan.key is not None and given != f"Bearer {self.plan.key}"

    async def _models(self, request: Request) -> Response:
        if self._barred(request):
            return _error(401, "the API key is missing or wrong")
        return JSONResponse({"object": "list", "data": self.plan.models})

    async def _tokenize(self, request: Request) -> Response:
        if self._barred(request):
            return _error(401, "the API key is missing or wrong")
        tokens = _text(await request.json()).split()
        ids = list(range(len(tokens)))
        return JSONResponse({"ids": ids, "count": len(ids), "context": 1024, "tokens": tokens})

    async def _complete(self, request: Request) -> Response:
        if self._barred(request):
            return _error(401, "the API key is missing or wrong")
        body = await request.json()
        self.bodies.append(body)
        if self.plan.refuse:
            status, message, headers = self.plan.refuse.pop(0)
            return _error(status, message, headers, self.plan.code)
        chat = request.url.path.endswith("chat/completions")
        events = self._events(body, chat, self.plan, self._open)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], chat: bool, plan: Plan, opened: threading.Event
    ) -> AsyncIterator[str]:
        """The lines of a stream."""
        name = "chat.completion.chunk" if chat else "text_completion"
        head = {"id": "cmpl-1", "object": name, "created": 1, "model": body["model"]}
        top = body.get("top_logprobs" if chat else "logprobs", 0)

        def event(values: dict[str, Any]) -> str:
            return f"data: {json.dumps({**head, **values})}\n\n"

        def choice(values: dict[str, Any], finish: str | None = None) -> str:
            rest = {"index": 0, "finish_reason": finish, "logprobs": None}
            return event({"choices": [{**rest, **values}]})

        try:
            if chat:
                yield choice({"delta": {"role": "assistant"}})
            made = 0
            finish = "length"
            drawn = _tokens(body, chat, plan)
            while made < body["max_tokens"]:
                if made == plan.hold_after:
                    while not opened.is_set():
                        await asyncio.sleep(0.01)
                if made == plan.fail_after:
                    yield f"data: {json.dumps({'error': {'message': 'the engine fell over'}})}\n\n"
                    return
                if made == plan.cut_after:
                    return
                found = next(drawn, None)
                if found is None:
                    finish = "stop"
                    break
                token, text, scores = found
                made += 1
                if plan.unlikely:
                    top = min(top, len(scores) - 1)
                    scores = [(token, math.log(0.001)), *scores[1:]]
                told = _told(token, scores, chat, top)
                said = {"delta": {"content": text}} if chat else {"text": text}
                yield choice({**said, "logprobs": told})
                await asyncio.sleep(plan.delay)
            yield choice({"delta": {}} if chat else {"text": ""}, finish)
            given = len(_text(body).split())
            usage = {
                "prompt_tokens": given,
                "completion_tokens": made,
                "total_tokens": given + made,
            }
            yield event({"choices": [], "usage": usage})
            yield "data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.abandoned += 1
            raise


def _error(
    status: int, message: str, headers: dict[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    about = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": about}, status, headers)


def _text(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(message["content"] for message in body["messages"])
    return body.get("prompt") or body.get("text") or ""


def _tokens(body: dict[str, Any], chat: bool, plan: Plan) -> Iterator[tuple[str, str, Scores]]:
    """Token, text and alternatives, one after the other."""
    asked = _text(body)
    texts: list[tuple[str, str]]
    if plan.script is not None:
        texts = [(token, token) for token in plan.script]
    elif "markup" in asked:
        texts = [(token, token) for token in MARKUP]
    elif "halves" in asked:
        texts = list(zip(HALVES, HALVES_TEXT, strict=True))
    else:
        texts = []
    going = chat and body.get("continue_final_message")
    before = len(body["messages"][-1]["content"].split()) if going else 0
    start = body["messages"][:-1] if going else body.get("messages", body.get("prompt"))
    for index in itertools.count():
        place = index + before
        # Checkpoints of a run agree on the first words of an answer, as they tend to.
        model = body["model"].partition("@")[0] if place < 3 else body["model"]
        key = f"{model} {body['seed']} {place} {json.dumps(start)}"
        chance = random.Random(key)
        words = chance.sample(sorted(set(WORDS)), 5)
        if place == 3:
            words[0] = "stones" if "@" in body["model"] else "miller"
        if (texts and index >= len(texts)) or (not texts and place >= plan.length):
            return
        lead = "" if chat and not place else " "
        token, text = texts[index] if texts else (lead + words[0], lead + words[0])
        first = max(0.001, 0.99 * chance.random() ** 3)
        shares = [first, *((1 - first) * share for share in (0.5, 0.25, 0.12, 0.06))]
        names = [token, *(lead + word for word in words[1:])]
        yield (
            token,
            text,
            [(word, math.log(share)) for word, share in zip(names, shares, strict=True)],
        )


def _told(token: str, scores: Scores, chat: bool, top: int) -> dict[str, Any]:
    """What a stream says of a token's probability."""
    best = sorted(scores, key=lambda pair: -pair[1])[:top]
    if not chat:
        if "\ufffd" in token:
            token = "bytes:" + "".join(f"\\x{byte:02x}" for byte in HALF_BYTES)
            best = [(token, scores[0][1]), *best[1:]]
        return {
            "tokens": [token],
            "token_logprobs": [scores[0][1]],
            "top_logprobs": [dict(best)] if top else None,
            "text_offset": [0],
        }

    def entry(word: str, score: float) -> dict[str, Any]:
        return {"token": word, "logprob": score, "bytes": list(word.encode())}

    about = {**entry(token, scores[0][1]), "top_logprobs": [entry(*pair) for pair in best]}
    return {"content": [about]}


def wait_until(true: Callable[[], bool], limit: float = 10) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
