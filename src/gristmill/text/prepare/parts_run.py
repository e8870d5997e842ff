"""All parts of a preparation, run by an engine until they are done.

    parts that are done   kept, if the same command made them from the same text
    all others            an engine runs them: one command for each, `prepare … --parts 8 --part 3`
    one that dies         runs again and resumes, a few times at most
    one that hangs        is ended, and runs again likewise
    one that lags         likewise, once, if the engine may choose another machine
    one that fails        not again: bad data, a full disk or a wrong command stay what they are

An engine (`TaskEngine`) knows numbers and commands only. Whether a part is done is decided by its
files, so nothing is lost and nothing done twice if this process is killed.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gristmill.base.errors import Exit, Problem, UserError
from gristmill.base.exits import read_exit_report, read_remedy
from gristmill.base.locks import OutputLock
from gristmill.base.units import format_seconds
from gristmill.text.prepare.dedup_parts import signed_part
from gristmill.text.prepare.dedup_request import signed_file
from gristmill.text.prepare.deduplicate import whole_name_of
from gristmill.text.prepare.journal import Cursor, SetCounts, journal_file
from gristmill.text.prepare.part_status import PartsState, log_file, read_record, saved_counts
from gristmill.text.prepare.request import PrepareRequest
from gristmill.text.prepare.signing import DedupProgress, signed_so_far
from gristmill.text.prepare.work_plan import WorkPlan
from gristmill.text.tokenizers.tokenizer import Tokenizer
from gristmill.tokens.convert import CopyProgress

_PERMANENT = (
    Exit.USAGE, Exit.DATA, Exit.INTERNAL, Exit.DEVICE, Exit.STORAGE, Exit.REFUSED, Exit.CONFIG,
)  # fmt: skip
"""Failures that another attempt would meet again."""
_OF_ONE_PART = (Exit.DATA, Exit.INTERNAL)
"""Permanent endings that the other parts need not meet."""
_LINGERING = 150.0
"""Seconds for which the lock of a process that is gone may be seen, on a network file system."""
_AGAIN = 5.0
"""Seconds between attempts to get such a lock."""
_COUNT_EVERY = 2.0
"""Seconds between looks at what the running parts have saved."""
_MAX_NAMED = 5
_HANGS = 900.0
"""Seconds without a word from a running part, after which it is ended."""
_LAGS = 2.0
"""A part lags if it needs longer than this many times the usual time of a part for what is left."""
_LAGS_LEAST = 120.0
"""Seconds for which a part must have run to be taken for one that lags."""


class TaskEngine(Protocol):
    """A way to run commands somewhere that differ in a number alone.

    An engine is made with the command, to which the number is appended as the last argument, and
    with the log of each number, to which the output is appended.
    """

    @property
    def name(self) -> str:
        """What `--engine` calls it."""

    @property
    def poll_seconds(self) -> float:
        """How long to wait between two polls."""

    def attach(self, jobs: Mapping[str, Any]) -> Collection[int]:
        """The tasks, waiting or running, that an earlier process has submitted, from what `jobs`
        returned to it; from now on they are polled."""

    def start(self, numbers: Sequence[int]) -> None:
        """Run tasks as soon as there is room for them, first or again."""

    def jobs(self) -> Mapping[str, Any]:
        """What `attach` needs, as JSON; asked for after each start."""

    def poll(self) -> Mapping[int, int | None]:
        """The tasks that have ended since the last poll: their exit status, minus the signal that
        ended them, or None if that is not known, as when a machine is lost."""

    @property
    def running(self) -> Collection[int]:
        """The tasks that were running at the last poll; the others wait."""

    @property
    def chooses_machine(self) -> bool:
        """Whether a task that is started again may run on another machine."""

    def end(self, number: int) -> None:
        """End one running task; `poll` tells when it has ended."""

    def stop(self) -> str:
        """Stop all tasks, or leave them to themselves; says which."""


@dataclass(frozen=True)
class PartsProgress:
    """How far a preparation in parts is."""

    parts: int
    done: int
    running: int
    failed: int
    counts: SetCounts
    """What all parts together have saved."""
    new_text_bytes: int
    """Without what was done before this process began."""
    bytes_done: int
    bytes_total: int
    """Both are bytes on disk."""
    seconds: float
    stage: str = ""
    """What is done to all parts before anything else is; "" for the preparation itself."""


@dataclass(frozen=True)
class PartsListener:
    """Callbacks for progress, and for messages to the user."""

    progress: Callable[[PartsProgress], None] = lambda state: None
    copying: Callable[[CopyProgress], None] = lambda state: None
    verifying: Callable[[int, int], None] = lambda done, total: None
    deduplicating: Callable[[DedupProgress], None] = lambda state: None
    note: Callable[[str], None] = lambda message: None


class PartsRun:
    """All parts, run by an engine until they are done."""

    stage = ""

    def __init__(
        self,
        requests: Sequence[PrepareRequest],
        plans: Sequence[WorkPlan],
        tokenizer: Tokenizer,
        engine: TaskEngine,
        state: PartsState,
        attempts: int,
        listener: PartsListener,
    ) -> None:
        self._requests = {part.part.number: part for part in requests}
        self._plans = dict(zip(self._requests, plans, strict=True))
        self._tokenizer = tokenizer
        self._engine = engine
        self._state = state
        self._attempts = attempts
        self._listener = listener
        self._began = time.perf_counter()
        self._done: dict[int, SetCounts] = {}
        self._begun: set[int] = set()
        """Parts that the engine has, waiting or running."""
        self._tries: Counter[int] = Counter()
        self._lost: dict[int, float] = {}
        """When a process was lost that may have held the lock of a part."""
        self._refused: set[int] = set()
        self._again: dict[int, float] = {}
        """When to try to get such a lock again."""
        self._failures: dict[int, UserError] = {}
        self._since: dict[int, float] = {}
        """When each running part was first seen to run."""
        self._took: list[float] = []
        """Seconds of the parts that are done."""
        self._ended: set[int] = set()
        """Parts that were ended because they hung or lagged, until they begin again."""
        self._lagged: set[int] = set()
        """Parts that were ended once because they lagged."""
        self._saved: dict[int, tuple[SetCounts, int]] = {}
        """What unfinished parts have saved, and the bytes on disk that they have read."""

    def run(self) -> int:
        """Run all parts that are not done; the bytes of text that this process got done."""
        state, engine, now = self._state, self._engine, time.monotonic()
        if state.jobs and state.engine != engine.name:
            raise UserError(
                f"parts may still run that --engine {state.engine} has started",
                where=str(state.path),
                remedy=f"give the same command with --engine {state.engine}; interrupting it stops "
                "them",
                exit=Exit.REFUSED,
            )
        if state.engine:
            self._lost = dict.fromkeys(self._requests, now)
        for number in self._requests:
            self._look(number)
        known = f", {len(self._done):,} done before" if self._done else ""
        stage = f"{self.stage} " if self.stage else ""
        self._listener.note(f"{stage}{len(self._requests):,} parts{known}")
        before = self._count().text_bytes
        state.engine, state.failed = engine.name, {}
        try:
            self._begun = set(engine.attach(state.jobs)) - self._done.keys()
            self._start(sorted(self._requests.keys() - self._done.keys() - self._begun))
            self._wait(before)
        except BaseException:
            stopped = engine.stop()
            if stopped:
                self._listener.note(stopped)
            state.jobs = engine.jobs()
            state.save()
            raise
        # Nothing runs any more, and the next run of the same parts must not wait for it.
        state.jobs = engine.jobs()
        state.save()
        return self._count().text_bytes - before

    def _look(self, number: int) -> bool:
        """Whether a part is done."""
        part = self._requests[number]
        record, asked = read_record(part.name), part.as_json(self._tokenizer)
        saved = saved_counts(part.name)
        if record and not saved and (not part.overwrite or record.request == asked):
            mine = record.same_request(part, asked)
            if mine and record.holds(part, self._plans[number].ids):
                self._done[number] = record.counts
                self._saved.pop(number, None)
                return True
        if saved:
            self._saved[number] = saved[0], self._bytes_read(number, saved[1])
        return False

    def _journal_of(self, number: int) -> Path:
        """The file that shows that a part goes on."""
        return journal_file(self._requests[number].name)

    def _bytes_read(self, number: int, cursor: Cursor) -> int:
        spans = self._plans[number].spans
        read = sum(span.disk for span in spans[: cursor.span])
        if cursor.position is not None and cursor.span < len(spans):
            span = spans[cursor.span]
            read += min(max(cursor.position - span.begin, 0), span.disk)
        return read

    def _count(self) -> SetCounts:
        saved = [counts for counts, _ in self._saved.values()]
        return sum([*self._done.values(), *saved], SetCounts())

    def _start(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._engine.start(numbers)
            self._begun.update(numbers)
        self._state.jobs = self._engine.jobs()
        self._state.save()

    def _wait(self, before: int) -> None:
        """Wait until nothing is left to run, and start again what may succeed then."""
        count_at = 0.0
        while self._begun or self._again:
            ended, now = self._engine.poll(), time.monotonic()
            again = [number for number, due in self._again.items() if now >= due]
            for number in again:
                del self._again[number]
            for number, status in ended.items():
                self._begun.discard(number)
                if (since := self._since.pop(number, None)) is not None and not status:
                    self._took.append(now - since)
                if not self._look(number) and self._after(number, status):
                    again.append(number)
            if again:
                self._start(sorted(again))
            if any(error.exit not in _OF_ONE_PART for error in self._failures.values()):
                break
            if now >= count_at or ended:
                count_at = now + _COUNT_EVERY
                for number in self._engine.running:
                    self._look(number)
                    self._since.setdefault(number, now)
                self._report(before)
                self._end_stragglers(now)
            time.sleep(self._engine.poll_seconds)
        if self._failures:
            raise self._failure()

    def _end_stragglers(self, now: float) -> None:
        """End parts that hang or lag; they begin again and resume from what they have saved."""
        for number in set(self._engine.running) - self._ended:
            why = self._why_behind(number, now)
            if why is not None and self._tries[number] + 1 < self._attempts:
                self._ended.add(number)
                self._listener.note(f"part {self._requests[number].part} {why}; it is started anew")
                self._engine.end(number)

    def _why_behind(self, number: int, now: float) -> str | None:
        """Why a running part is ended; None if it goes well."""
        name, ran = self._requests[number].name, now - self._since[number]
        quiet = time.time() - max(map(_changed, (self._journal_of(number), log_file(name))))
        if min(quiet, ran) > _HANGS:
            return f"has written nothing for {format_seconds(quiet)}"
        waiting = len(self._begun) > len(self._engine.running)
        if waiting or number in self._lagged or not self._engine.chooses_machine:
            return None
        total, (_, read) = self._plans[number].bytes_total, self._saved.get(number, (None, 0))
        if len(self._took) < len(self._requests) / 2 or ran < _LAGS_LEAST or not total:
            return None
        usual, left = statistics.median(self._took), 1 - read / total
        if ran * left <= _LAGS * usual * (1 - left):
            return None
        self._lagged.add(number)
        return f"lags behind: {read / total:.0%} after {format_seconds(ran)}"

    def _after(self, number: int, status: int | None) -> bool:
        """Whether to run a part again that has ended without being done."""
        part, now = self._requests[number], time.monotonic()
        if number in self._ended:
            self._ended.discard(number)
            self._lost[number] = now
            self._tries[number] += 1
            return True
        if status == Exit.REFUSED and now < self._lost.get(number, -_LINGERING) + _LINGERING:
            # Perhaps for the lock, which may be gone by now.
            first, self._refused = number not in self._refused, {*self._refused, number}
            if first or OutputLock(part.name, purpose="prepare").path.exists():
                self._again[number] = now + _AGAIN
                return False
        permanent = status in _PERMANENT
        if not permanent:
            self._lost[number] = now
            self._tries[number] += 1
        log, words = log_file(part.name), _ending(status)
        again = not permanent and self._tries[number] < self._attempts
        if again:
            count = f"attempt {self._tries[number] + 1} of {self._attempts}"
            self._listener.note(f"part {part.part} ended {words}; {count} begins")
            return True
        what = read_exit_report(log, errors_only=not permanent) or f"it ended {words}"
        if status == Exit.DONE:
            what = "what it made is not what its sources give now"
        if not permanent:
            what += f", after {self._attempts} attempts"
        exit = Exit(status) if permanent and status is not None else Exit.PEER
        remedy = read_remedy(log) or "run the same command again to try once more"
        text = f"part {part.part} failed: {what}; its log is {log}"
        self._failures[number] = UserError(text, remedy=remedy, exit=exit)
        self._state.failed[str(number)] = what
        self._state.save()
        others = len(self._begun) + len(self._again)
        if others and exit in _OF_ONE_PART:
            self._listener.note(f"{text}; {others:,} others continue")
        return False

    def _failure(self) -> UserError:
        """The error for all parts that failed."""
        errors = [error for _, error in sorted(self._failures.items())]
        problems = [problem for error in errors[:_MAX_NAMED] for problem in error.problems]
        if len(errors) > _MAX_NAMED:
            problems.append(Problem(f"{len(errors) - _MAX_NAMED:,} more parts failed"))
        return UserError(problems, exit=errors[0].exit)

    def _report(self, before: int) -> None:
        counts = self._count()
        read = sum(plan.bytes_total or 0 for n, plan in self._plans.items() if n in self._done)
        self._listener.progress(
            PartsProgress(
                parts=len(self._requests),
                done=len(self._done),
                running=len(set(self._engine.running) - self._done.keys()),
                failed=len(self._failures),
                counts=counts,
                new_text_bytes=counts.text_bytes - before,
                bytes_done=read + sum(size for _, size in self._saved.values()),
                bytes_total=sum(plan.bytes_total or 0 for plan in self._plans.values()),
                seconds=time.perf_counter() - self._began,
                stage=self.stage,
            )
        )


class SigningRun(PartsRun):
    """The run before duplicates are known: a part is done when it is signed."""

    stage = "signing"

    def all_done(self) -> bool:
        """Whether nothing is to be run."""
        return all(self._look(number) for number in self._requests)

    def _look(self, number: int) -> bool:
        part, plan = self._requests[number], self._plans[number]
        if signed_part(part, plan, self._tokenizer):
            self._done[number] = SetCounts()
            self._saved.pop(number, None)
            return True
        if cursor := signed_so_far(self._journal_of(number)):
            self._saved[number] = SetCounts(), self._bytes_read(number, cursor)
        return False

    def _journal_of(self, number: int) -> Path:
        part = self._requests[number]
        return signed_file(whole_name_of(part), number, part.part.of)


def _changed(file: Path) -> float:
    """When a file was written last; 0 if it is not there."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _ending(status: int | None) -> str:
    if status is None:
        return "with its machine"
    return f"by signal {-status}" if status < 0 else f"with exit status {status}"
