"""The routes.

GET  /v1/models · /v1/models/ID     POST /v1/completions · /v1/chat/completions
GET  /health · /metrics             POST /tokenize · /detokenize
GET  / · /static/NAME               the page
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gristmill.serve.asking import encode_messages, encode_prompts, require_ids
from gristmill.serve.metrics import CONTENT_TYPE, Metrics, ModelState
from gristmill.serve.protocol import parse_ids, parse_messages
from gristmill.serve.registry import ModelInfo, Registry, no_model
from gristmill.serve.texts import Texts
from gristmill.web.call import Call
from gristmill.web.fields import Fields
from gristmill.web.page_files import PageFiles
from gristmill.web.refusals import bad_request
from gristmill.web.routes import RouteEntry
from gristmill.web.service import Service

PAGES = PageFiles(
    *("gristmill.serve", "gristmill.web"),
    page="chat.html",
    instead="This server has OpenAI's interface; its models are listed at /v1/models.",
)


class App:
    """What the routes lead to."""

    def __init__(self, service: Service, registry: Registry, metrics: Metrics) -> None:
        self.service, self.registry, self.metrics = service, registry, metrics
        texts = Texts(registry, metrics)
        self.routes = [
            RouteEntry(*row)
            for row in (
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
            )
        ]

    async def _health(self, call: Call, body: dict[str, Any]) -> None:
        status = "draining" if self.service.draining else "ok"
        await call.reply_json({"status": status})

    async def _metrics(self, call: Call, body: dict[str, Any]) -> None:
        models = [
            ModelState(one.name, one.slots, one.worker.active, one.worker.waiting)
            for one in {one.name: one for one in self.registry.loaded}.values()
        ]
        text = self.metrics.text(
            models, requests=self.service.requests, running=self.service.running
        )
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
        await PAGES.send_page(call)

    async def _static(self, call: Call, body: dict[str, Any]) -> None:
        await PAGES.send_named(call)


def _listed(info: ModelInfo) -> dict[str, Any]:
    return {**asdict(info), "object": "model", "owned_by": "gristmill"}
