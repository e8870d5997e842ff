"""The application that a web server runs: paths, and the handlers that answer them.

    METHOD  path  what it is counted under  handler

A path may hold a part in braces, which the handler finds in the scope's `path_params`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from gristmill.base.errors import optional
from gristmill.web.call import Call, Receive, Scope, Send
from gristmill.web.refusals import RefusalError
from gristmill.web.service import Handler, Service

EXTRA = "serve"
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class RouteEntry(NamedTuple):
    """One row of the table of routes."""

    method: str
    path: str
    label: str
    handler: Handler


class _Endpoint:
    """A route as an application of its own, which may watch whether the client leaves."""

    def __init__(self, service: Service, entry: RouteEntry) -> None:
        self._service, self._entry = service, entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler, label = self._entry.handler, self._entry.label
        await self._service.answer(scope, receive, send, handler, label)


def build_app(
    service: Service, table: Sequence[RouteEntry], *, prefix: str, purpose: str
) -> ASGIApp:
    """An application of these routes. `prefix` is what clients leave out by mistake; `purpose` is
    what the packages are needed for, if they are missing."""
    routing = optional("starlette.routing", extra=EXTRA, purpose=purpose)
    routes = [
        routing.Route(entry.path, _Endpoint(service, entry), methods=[entry.method])
        for entry in table
    ]
    router = routing.Router(routes, redirect_slashes=False)
    paths = {entry.path for entry in table}

    async def refuse(call: Call, body: dict[str, Any]) -> None:
        path, method = call.scope["path"], call.scope["method"]
        others = (
            route for route in routes if route.matches(call.scope)[0] is routing.Match.PARTIAL
        )
        allowed = sorted({name for route in others for name in route.methods})
        if allowed:
            what = f"{path} takes {' and '.join(allowed)}, not {method}"
            raise RefusalError(405, what, headers={"Allow": ", ".join(allowed)})
        hint = f"; there is something at {prefix}{path}" if f"{prefix}{path}" in paths else ""
        raise RefusalError(404, f"there is nothing at {path[:200]}{hint}", code="not_found")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # Of WebSockets and the like there are none.
            return
        matches = (route.matches(scope)[0] for route in routes)
        if any(match is routing.Match.FULL for match in matches):
            await router(scope, receive, send)
        else:
            await service.answer(scope, receive, send, refuse, "other", takes_json=False)

    return respond
