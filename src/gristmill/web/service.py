"""Runs requests within their limits, and ends them in order when the server stops."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from gristmill.web.access import Access
from gristmill.web.call import CLIENT_LEFT, Call, ClientLeftError, Receive, Scope, Send
from gristmill.web.refusals import RefusalError, defect, unavailable

BODY_SECONDS = 30.0
"""Within which a client must have sent its request."""
_CLEAN_UP_SECONDS = 10.0

Handler = Callable[[Call, dict[str, Any]], Awaitable[None]]
"""Answers a call whose body is this JSON object."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request, and of all together."""

    body: int = 4 * 2**20
    """Bytes."""
    seconds: float = 600.0
    running: int = 4096
    """Requests at once, those included that wait for their turn."""


@dataclass(eq=False)
class _Running:
    """A request that is being answered."""

    aborted: asyncio.Future[None]


def counted_requests(count: int) -> str:
    """How many, in words for the log."""
    return "1 request" if count == 1 else f"{count} requests"


class Service:
    """What all routes share."""

    def __init__(
        self, *, access: Access, limits: RequestLimits, log: Callable[[str], None]
    ) -> None:
        self.requests = Counter[tuple[str, int]]()
        """How many were answered, by route and status."""
        self.draining = False
        self._access, self._limits, self._log = access, limits, log
        self._running = dict[_Running, None]()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and wait for those that run; after so long they are ended."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            self._log(f"cut short after {seconds:g}s: {counted_requests(self.running)}")
            for one in self._running:
                if not one.aborted.done():
                    one.aborted.set_result(None)
            await self._idle.wait()

    # ------------------------------------------------------------------ a request

    async def answer(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        handler: Handler,
        route: str,
        *,
        takes_json: bool = True,
    ) -> None:
        """Answer one request; `route` is what it is counted under. Without `takes_json` the body
        is not looked at."""
        call = Call(scope, receive, send)
        try:
            self._access.check(call)
            if route != "/health":
                self._admit()
            await self._run(call, handler, takes_json and call.scope["method"] == "POST")
        except RefusalError as error:
            await self._refuse(call, error)
        except ClientLeftError:
            call.status = CLIENT_LEFT
        except Exception as error:
            self._log("a request failed:\n" + "".join(traceback.format_exception(error)).rstrip())
            await self._refuse(call, defect())
        finally:
            self.requests[route, call.status or CLIENT_LEFT] += 1

    def _admit(self) -> None:
        if self.draining:
            raise _stopping()
        if self.running >= self._limits.running:
            raise unavailable("the server has too many requests", code="overloaded")

    async def _refuse(self, call: Call, error: RefusalError) -> None:
        try:
            await call.refuse(error)
        except ClientLeftError:
            call.status = CLIENT_LEFT

    async def _run(self, call: Call, handler: Handler, takes_json: bool) -> None:
        loop = asyncio.get_running_loop()
        running = _Running(loop.create_future())
        self._running[running] = None
        self._idle.clear()
        tasks = list[asyncio.Future[Any]]()
        try:
            reading = loop.create_task(self._body(call, takes_json))
            tasks = [reading]
            await asyncio.wait([*tasks, running.aborted], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                raise _stopping()
            body = reading.result()
            work = asyncio.ensure_future(handler(call, body))
            left = loop.create_task(call.left())
            tasks += [work, left]
            done, _ = await asyncio.wait(
                {work, left, running.aborted},
                timeout=self._limits.seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work in done or (left in done and call.ended):
                # After an answer the connection counts as closed, too; the rest is cleaning up.
                await work
            elif left in done:
                raise ClientLeftError
            elif running.aborted in done:
                raise _stopping()
            else:
                what = f"the request took longer than {self._limits.seconds:g} seconds"
                raise RefusalError(504, what, code="timeout")
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLEAN_UP_SECONDS)
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.exception()  # was told, or came of ending it
            running.aborted.cancel()
            del self._running[running]
            if not self._running:
                self._idle.set()

    async def _body(self, call: Call, takes_json: bool) -> dict[str, Any]:
        try:
            async with asyncio.timeout(min(BODY_SECONDS, self._limits.seconds)):
                if takes_json:
                    return await call.json(self._limits.body)
                await call.body(self._limits.body)
                return {}
        except TimeoutError:
            raise RefusalError(408, "the body did not come in time", code="timeout") from None


def _stopping() -> RefusalError:
    return unavailable("the server is shutting down", code="draining", seconds=5)
