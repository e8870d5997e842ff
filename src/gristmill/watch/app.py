"""The routes of the live page.

GET  /api/runs · /api/events                    all runs: their rows, and what becomes new in them
GET  /api/curves · /api/settings                of some runs; POST /api/curves for long questions
GET  /api/run/ID · ID/log · ID/samples          one run
POST /api/run/ID/action                         only with --control
GET  / · /static/NAME · /health                 the page
"""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from gristmill.watch.control import Control, parse_action, request_action
from gristmill.watch.curves import AXES, MOST_POINTS, CurveQuery, Held, answer
from gristmill.watch.details import compared_settings, log_tail, run_details, samples_of
from gristmill.watch.live import Broadcast
from gristmill.watch.run import WatchedRun
from gristmill.watch.watcher import Watcher
from gristmill.web.call import Call
from gristmill.web.fields import Fields
from gristmill.web.page_files import PageFiles
from gristmill.web.refusals import RefusalError, bad_request
from gristmill.web.routes import RouteEntry

PAGES = PageFiles(
    *("gristmill.watch", "gristmill.report", "gristmill.web"),
    page="watch.html",
    instead="This server has no page; its runs are listed at /api/runs.",
)
_MOST_LINES = 5000
_MOST_RUNS = 1000
_MOST_NAMES = 200
_BINARY = "application/octet-stream"


class WatchApp:
    """What the routes lead to."""

    def __init__(self, watcher: Watcher, broadcast: Broadcast, control: Control) -> None:
        self._watcher, self._broadcast, self._control = watcher, broadcast, control
        self.routes = [
            RouteEntry(*row)
            for row in (
                ("GET", "/", "/", self._page),
                ("GET", "/static/{name}", "/static", self._static),
                ("GET", "/health", "/health", self._health),
                ("GET", "/api/runs", "/api/runs", self._runs),
                ("GET", "/api/events", "/api/events", self._events),
                ("GET", "/api/curves", "/api/curves", self._curves),
                ("POST", "/api/curves", "/api/curves", self._posted_curves),
                ("GET", "/api/settings", "/api/settings", self._settings),
                ("GET", "/api/run/{id}", "/api/run", self._run),
                ("GET", "/api/run/{id}/log", "/api/run", self._log),
                ("GET", "/api/run/{id}/samples", "/api/run", self._samples),
                ("POST", "/api/run/{id}/action", "/api/run", self._action),
            )
        ]

    async def _page(self, call: Call, body: dict[str, Any]) -> None:
        await PAGES.send_page(call)

    async def _static(self, call: Call, body: dict[str, Any]) -> None:
        await PAGES.send_named(call)

    async def _health(self, call: Call, body: dict[str, Any]) -> None:
        await call.reply_json({"status": "ok"})

    # ------------------------------------------------------------------ all runs

    async def _runs(self, call: Call, body: dict[str, Any]) -> None:
        version, rows = self._watcher.rows()
        allowed = self._control.token is not None
        places = [str(root) for root in self._watcher.roots]
        await call.reply_json(
            {"runs": rows, "control": allowed, "version": version, "places": places}
        )

    async def _events(self, call: Call, body: dict[str, Any]) -> None:
        given = call.headers.get("last-event-id") or Query(call).text("version") or ""
        await self._broadcast.stream(call, int(given) if given.isdecimal() else None)

    # ------------------------------------------------------------------ some runs

    async def _curves(self, call: Call, body: dict[str, Any]) -> None:
        query = Query(call)
        held = (one.split(":") for one in query.list("since"))
        await self._answer_curves(
            call,
            {
                "runs": query.list("runs"),
                "names": query.list("names"),
                "x": query.text("x"),
                "points": query.number("points"),
                "from": query.number("from"),
                "to": query.number("to"),
                # A name may hold colons.
                "since": [_since_of(parts) for parts in held],
            },
        )

    async def _posted_curves(self, call: Call, body: dict[str, Any]) -> None:
        await self._answer_curves(call, body)

    async def _answer_curves(self, call: Call, values: dict[str, Any]) -> None:
        fields = Fields(values)
        runs = self._named(_texts(fields, "runs", _MOST_RUNS))
        axis = fields.text("x") or "step"
        if axis not in AXES:
            raise fields.wrong("x", f"one of {', '.join(AXES)}")
        points = fields.number("points", low=2, high=MOST_POINTS) or 600
        query = CurveQuery(
            names=_texts(fields, "names", _MOST_NAMES),
            axis=axis,
            points=int(points),
            low=fields.number("from", low=-1e300),
            high=fields.number("to", low=-1e300),
            held=_held(fields),
        )
        content = await asyncio.to_thread(answer, runs, query)
        await call.reply(content, kind=_BINARY, headers={"cache-control": "no-store"})

    async def _settings(self, call: Call, body: dict[str, Any]) -> None:
        query = Query(call)
        given = query.list("runs") if query.text("runs") else list(self._watcher.runs)
        runs = self._named(given)
        every = query.text("all") == "1"
        settings = await asyncio.to_thread(compared_settings, runs, every=every)
        await call.reply_json({"runs": [run.id for run in runs], "settings": settings})

    def _named(self, ids: list[str]) -> list[WatchedRun]:
        """Runs by their ids; those that are gone are left out, since that happens at any time."""
        known = self._watcher.runs
        return [known[id] for id in dict.fromkeys(ids) if id in known]

    # ------------------------------------------------------------------ one run

    def _one(self, call: Call) -> WatchedRun:
        run = self._watcher.runs.get(call.scope["path_params"]["id"])
        if run is None:
            what = "there is no such run, or it was removed"
            raise RefusalError(404, what, code="run_not_found")
        return run

    async def _run(self, call: Call, body: dict[str, Any]) -> None:
        await call.reply_json(await asyncio.to_thread(run_details, self._one(call)))

    async def _log(self, call: Call, body: dict[str, Any]) -> None:
        lines = Query(call).number("lines") or 200
        count = int(min(max(lines, 1), _MOST_LINES))
        tail = await asyncio.to_thread(log_tail, self._one(call).folder.log, count)
        await call.reply_json({"lines": tail})

    async def _samples(self, call: Call, body: dict[str, Any]) -> None:
        run, step = self._one(call), Query(call).number("step")
        if step is None:
            raise bad_request("step is missing", param="step")
        texts = await asyncio.to_thread(samples_of, run, int(step))
        await call.reply_json({"step": int(step), "texts": texts})

    async def _action(self, call: Call, body: dict[str, Any]) -> None:
        self._control.check(call)
        run, request = self._one(call), parse_action(body)
        file = await asyncio.to_thread(request_action, run, request)
        await call.reply_json({"asked": request, "file": file.name})


class Query:
    """The part of an address after the question mark."""

    def __init__(self, call: Call) -> None:
        text = call.scope.get("query_string", b"").decode("latin-1")
        try:
            self._values = parse_qs(text, max_num_fields=100)
        except ValueError:
            raise bad_request("the address has too many fields") from None

    def text(self, name: str) -> str | None:
        values = self._values.get(name)
        return values[-1] if values else None

    def list(self, name: str) -> list[str]:
        """Values that are separated by commas."""
        return [one for one in (self.text(name) or "").split(",") if one]

    def number(self, name: str) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            raise bad_request(f"{name} must be a number", param=name) from None
        if value != value or abs(value) > 1e300:
            raise bad_request(f"{name} must be a finite number", param=name)
        return value


def _texts(fields: Fields, key: str, most: int) -> list[str]:
    values = fields.get(key)
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        raise fields.wrong(key, "a list of names")
    if len(values) > most:
        raise bad_request(f"{key} has more than {most} entries", param=key)
    return list(dict.fromkeys(values))


def _since_of(parts: list[str]) -> list[Any]:
    """run:name:generation:count, and perhaps :revision; a name may hold colons."""
    tail = len(parts)
    while tail > 2 and len(parts) - tail < 3 and parts[tail - 1].isdecimal():
        tail -= 1
    numbers = [int(one) for one in parts[tail:]]
    return [parts[0], ":".join(parts[1:tail]), *numbers]


def _held(fields: Fields) -> dict[tuple[str, str], Held]:
    entries = fields.get("since") if fields.has("since") else []
    held: dict[tuple[str, str], Held] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        one = entry if isinstance(entry, list) else []
        numbers = one[2:]
        good = len(numbers) in (2, 3) and all(type(number) is int for number in numbers)
        if not good or not all(isinstance(text, str) for text in one[:2]):
            raise bad_request(
                "since must hold run, name, generation and count, and perhaps revision",
                param="since",
            )
        held[one[0], one[1]] = Held(*numbers)
    return held
