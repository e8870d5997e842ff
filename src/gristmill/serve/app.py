"""The routes.

GET  /v1/models · /v1/models/ID     POST /v1/completions · /v1/chat/completions
GET  /health · /metrics             POST /tokenize · /detokenize
GET  / · /static/NAME               the page
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from gristmill.base.errors import optional
from gristmill.serve.asking import encode_messages, encode_prompts, require_ids
from gristmill.serve.call import Call, Receive, Scope, Send
from gristmill.serve.fields import Fields
from gristmill.serve.metrics import CONTENT_TYPE, Metrics, ModelState
from gristmill.serve.page_files import send_page
from gristmill.serve.protocol import parse_ids, parse_messages
from gristmill.serve.refusals import RefusalError, bad_request, no_model
from gristmill.serve.registry import ModelInfo, Registry
from gristmill.serve.service import Handler, Service
from gristmill.serve.texts import Texts

EXTRA = "serve"
PURPOSE = "serving a model"
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class App:
    """What the routes lead to."""

    def __init__(self, service: Service, registry: Registry, metrics: Metrics) -> None:
        self.service, self.registry, self.metrics = service, registry, metrics
        texts = Texts(registry, metrics)
        self.routes: list[tuple[str, str, str, Handler]] = [
            ("GET", "/", "/", self._page),
            ("GET", "/static/{name}", "/static", self._static),
            ("GET", "/health", "/health", self._health),
            ("GET", "/metrics", "/metrics", self._metrics),
            ("GET", "/v1/models", "/v1/models", self._models),
            ("GET", "/v1/models/{id:path}", "/v1/models", self._model),
            ("POST", "/v1/completions", "/v1/completions", texts.complete),
            ("POST", "/v1/chat/completions", "/v1/chat/completions", texts.chat),
            ("POST", "/tokenize", "/tokenize", self._tokenize),
            ("POST", "/detokenize", "/detokenize", self._detokenize),
        ]

    async def _health(self, call: Call, body: dict[str, Any]) -> None:
        status = "draining" if self.service.draining else "ok"
        await call.reply_json({"status": status})

    async def _metrics(self, call: Call, body: dict[str, Any]) -> None:
        models = [
            ModelState(one.name, one.slots, one.worker.active, one.worker.waiting)
            for one in {one.name: one for one in self.registry.loaded}.values()
        ]
        text = self.metrics.text(models, running=self.service.running)
        await call.reply(text.encode(), kind=CONTENT_TYPE)

    # ------------------------------------------------------------------ models

    async def _models(self, call: Call, body: dict[str, Any]) -> None:
        models = [_listed(info) for info in await self.registry.infos()]
        await call.reply_json({"object": "list", "data": models})

    async def _model(self, call: Call, body: dict[str, Any]) -> None:
        wanted = call.scope["path_params"]["id"]
        for info in await self.registry.infos():
            if info.id == wanted:
                await call.reply_json(_listed(info))
                return
        raise no_model(wanted)

    # ------------------------------------------------------------------ tokens

    async def _tokenize(self, call: Call, body: dict[str, Any]) -> None:
        fields = Fields(body)
        opened = await self.registry.opened(fields.text("model"))
        if fields.has("messages"):
            messages = parse_messages(fields)
            ids = await encode_messages(opened, messages, continues=False)
        else:
            text = fields.text("text")
            text = fields.text("prompt") if text is None else text
            if text is None:
                raise bad_request("text is missing", param="text")
            ids = (await encode_prompts(opened, [text]))[0] if text else []
            if not fields.boolean("add_special_tokens", default=True):
                ids = ids[len(opened.tokenizer.prefix) :]
        tokens = [opened.texts.text_of(id) for id in ids]
        await call.reply_json(
            {"ids": ids, "count": len(ids), "context": opened.context, "tokens": tokens}
        )

    async def _detokenize(self, call: Call, body: dict[str, Any]) -> None:
        fields = Fields(body)
        opened = await self.registry.opened(fields.text("model"))
        ids = parse_ids(fields, "ids")
        require_ids(ids, opened, param="ids")
        await call.reply_json({"text": opened.tokenizer.decode(ids)})

    # ------------------------------------------------------------------ the page

    async def _page(self, call: Call, body: dict[str, Any]) -> None:
        await send_page(call, "chat.html")

    async def _static(self, call: Call, body: dict[str, Any]) -> None:
        await send_page(call, call.scope["path_params"]["name"])


def _listed(info: ModelInfo) -> dict[str, Any]:
    return {**asdict(info), "object": "model", "owned_by": "gristmill"}


class _Endpoint:
    """A route as an application of its own, which may watch whether the client leaves."""

    def __init__(self, service: Service, handler: Handler, route: str) -> None:
        self._service, self._handler, self._route = service, handler, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._service.answer(scope, receive, send, self._handler, self._route)


def build_app(app: App) -> ASGIApp:
    """The application that a web server runs."""
    routing = optional("starlette.routing", extra=EXTRA, purpose=PURPOSE)
    routes = [
        routing.Route(path, _Endpoint(app.service, handler, label), methods=[method])
        for method, path, label, handler in app.routes
    ]
    router = routing.Router(routes, redirect_slashes=False)
    paths = {path for _, path, _, _ in app.routes}

    async def refuse(call: Call, body: dict[str, Any]) -> None:
        path, method = call.scope["path"], call.scope["method"]
        others = (
            route for route in routes if route.matches(call.scope)[0] is routing.Match.PARTIAL
        )
        allowed = sorted({name for route in others for name in route.methods})
        if allowed:
            what = f"{path} takes {' and '.join(allowed)}, not {method}"
            raise RefusalError(405, what, headers={"Allow": ", ".join(allowed)})
        # Clients that were given an address without /v1 look here.
        hint = f"; there is something at /v1{path}" if f"/v1{path}" in paths else ""
        raise RefusalError(404, f"there is nothing at {path[:200]}{hint}", code="not_found")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Of WebSockets and the like there are none.
            return
        matches = (route.matches(scope)[0] for route in routes)
        if any(match is routing.Match.FULL for match in matches):
            await router(scope, receive, send)
        else:
            await app.service.answer(scope, receive, send, refuse, "other", takes_json=False)

    return respond
