"""The thread in which a model computes.

    event loop    submit(request, deliver) ──> inbox ──> Engine.step()   worker thread
                  deliver(news)  <── once for each step ──'

Everything that touches the model happens in this thread: the engine's steps, and jobs, such as the
log-probabilities of a prompt, whose parts are computed between steps. What is new after a step goes
to the event loop in one call. If the loop falls behind, the thread waits for it: so what was drawn
and not yet delivered stays little, however many clients there are.

If the engine raises an exception, the requests that it had are failed, and the next ones get a new
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from gristmill.generate.engine import Engine
from gristmill.generate.request import Finish, Generation, Request, TokenProbability

MOST_UNDELIVERED = 8
"""Steps that the event loop may be behind."""
_CHECK_SECONDS = 0.5
"""How often a thread that waits for the event loop checks whether it should end."""

Result = TypeVar("Result")


class News(NamedTuple):
    """What is new about a request."""

    ids: list[int]
    probabilities: list[TokenProbability]
    finish: Finish | None
    defect: bool = False
    """Whether the engine itself failed."""
    error: str | None = None
    """Why no token could be chosen."""


@dataclass(eq=False)
class Ticket:
    """A request that was handed to a worker."""

    request: Request
    deliver: Callable[[News], None]
    """Called in the event loop."""
    generation: Generation | None = None
    read: int = 0
    """Probabilities that were delivered."""
    ended: bool = False
    """Set in the event loop: no more news."""


@dataclass(eq=False)
class _Job:
    """Something to compute between steps, part by part."""

    parts: Iterator[Any]
    future: asyncio.Future[list[Any]]
    done: list[Any]


class Worker:
    """Computes with one model."""

    def __init__(self, build: Callable[[], Engine], *, log: Callable[[str], None]) -> None:
        """`build` makes the engine, in the thread."""
        self._build, self._log = build, log
        self._loop = asyncio.get_running_loop()
        self._engine: Engine | None = None
        self._tickets: dict[Generation, Ticket] = {}
        self._jobs = deque[_Job]()
        self._inbox = deque[Callable[[], None]]()
        self._wake = threading.Condition()
        self._undelivered = threading.BoundedSemaphore(MOST_UNDELIVERED)
        self._closing = False
        self.pending = 0
        """Requests and jobs that have not ended; counted in the event loop."""
        self.tokens = 0
        """Tokens that were drawn, also those that nobody waited for any more."""
        self._thread = threading.Thread(target=self._run, name="gristmill engine", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ in the event loop

    def submit(self, request: Request, deliver: Callable[[News], None]) -> Ticket:
        """Hand a request over."""
        ticket = Ticket(request, deliver)
        self.pending += 1
        self._tell(lambda: self._begin(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request; its slot is free before the next step."""
        if not ticket.ended:
            self._end(ticket)
            self._tell(lambda: self._cancel(ticket))

    async def compute(self, parts: Iterator[Result]) -> list[Result]:
        """What an iterator gives, each part computed in the thread between two steps."""
        job = _Job(parts, self._loop.create_future(), [])
        self.pending += 1
        try:
            self._tell(lambda: self._jobs.append(job))
            return await job.future
        finally:
            self.pending -= 1

    @property
    def active(self) -> int:
        """Slots that are taken."""
        engine = self._engine
        return 0 if engine is None else engine.active

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        engine = self._engine
        return 0 if engine is None else engine.waiting

    def close(self) -> None:
        """End the thread; it must have nothing to do."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended and its memory is free; not for the event loop."""
        self._thread.join(seconds)

    def _tell(self, act: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(act)
            self._wake.notify()

    def _end(self, ticket: Ticket) -> None:
        ticket.ended = True
        self.pending -= 1

    def _deliver(self, batch: list[tuple[Ticket, News]]) -> None:
        self._undelivered.release()
        for ticket, news in batch:
            if ticket.ended:
                continue
            if news.finish is not None:
                self._end(ticket)
            try:
                ticket.deliver(news)
            except Exception as error:
                self._log(f"a request failed: {_last_lines(error)}")

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            # Before anybody waits for it.
            self._engine = self._build()
            if self._engine.decoder.runs_in_graphs:
                self._engine.warm_up()
        except Exception as error:
            self._fail(error)
        while self._wait():
            try:
                self._step()
            except Exception as error:
                self._fail(error)
        self._engine = None

    def _wait(self) -> bool:
        """Wait for something to do, and take what came in; False at the end."""
        with self._wake:
            while not (self._inbox or self._jobs or self._busy() or self._closing):
                self._wake.wait()
            if self._closing:
                return False
            acts = list(self._inbox)
            self._inbox.clear()
        for act in acts:
            try:
                act()
            except Exception as error:
                self._fail(error)
        return True

    def _busy(self) -> bool:
        return self._engine is not None and self._engine.busy

    def _begin(self, ticket: Ticket) -> None:
        if ticket.ended:
            return
        try:
            if self._engine is None:
                self._engine = self._build()
            ticket.generation = self._engine.submit(ticket.request)
        except Exception:
            self._publish([(ticket, News([], [], "error", defect=True))])
            raise
        self._tickets[ticket.generation] = ticket

    def _cancel(self, ticket: Ticket) -> None:
        generation = ticket.generation
        if generation is not None and self._tickets.pop(generation, None) is not None:
            assert self._engine is not None
            self._engine.cancel(generation)

    def _step(self) -> None:
        if self._jobs:
            self._compute(self._jobs.popleft())
        if not self._busy():
            return
        assert self._engine is not None
        batch = []
        for generation in self._engine.step():
            ids = generation.new_ids()
            self.tokens += len(ids)
            ticket = self._tickets.get(generation)
            if ticket is not None and (ids or generation.finish is not None):
                # Of a token that was not finite there is no probability.
                probabilities = generation.probabilities[ticket.read :]
                ticket.read += len(probabilities)
                batch.append(
                    (ticket, News(ids, probabilities, generation.finish, error=generation.error))
                )
            if generation.finish is not None:
                self._tickets.pop(generation, None)
        self._publish(batch)

    def _compute(self, job: _Job) -> None:
        """One part of a job; the next job has its turn before the next part."""
        if job.future.cancelled():
            return
        try:
            part = next(job.parts)
        except StopIteration:
            self._call(lambda: _settle(job, None))
            return
        except Exception as error:
            reason = error
            self._log(f"a request failed: {_last_lines(error)}")
            self._call(lambda: _settle(job, reason))
            return
        job.done.append(part)
        self._jobs.append(job)

    def _publish(self, batch: list[tuple[Ticket, News]]) -> None:
        if not batch:
            return
        while not self._undelivered.acquire(timeout=_CHECK_SECONDS):
            if self._closing:
                return
        self._call(lambda: self._deliver(batch))

    def _call(self, act: Callable[[], object]) -> None:
        """Call something in the event loop."""
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:  # the loop is closed: the program ends
            self._closing = True

    def _fail(self, error: Exception) -> None:
        """Fail all requests that the engine has: nobody knows in what state it is."""
        self._log(f"the engine failed: {_last_lines(error)}")
        tickets, self._tickets, self._engine = self._tickets, {}, None
        self._publish([(ticket, News([], [], "error", defect=True)) for ticket in tickets.values()])


def _settle(job: _Job, error: Exception | None) -> None:
    """Tell who waits for a job that it is done."""
    if job.future.done():
        return
    if error is None:
        job.future.set_result(job.done)
    else:
        job.future.set_exception(error)


def _last_lines(error: Exception) -> str:
    """An error with where it happened, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    places = itertools.islice(reversed(frames), 3)
    where = ", ".join(f"{frame.name} at {frame.filename}:{frame.lineno}" for frame in places)
    return " ".join(f"{type(error).__name__}: {error} (in {where})".split())
