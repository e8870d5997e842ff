"""Workers agree on the step after which all of them stop, without a collective in every step.

Workers are not at the same step, and between two exchanges they do not meet. A thread of each
process gathers a small message from all others a few times a second:

    a process is asked to stop      all threads learn it from the next message
    the message after that          each reports the step it is in, and holds at the end of it
    the same message, gathered      all stop after the largest of these steps

A process that holds may already be the cause why another waits for an exchange, but that one's
thread reports all the same; so no process holds for longer than a message takes.
"""

from __future__ import annotations

import threading

from gristmill.distributed.control import ControlGroup

INTERVAL = 0.2
"""Seconds between two messages."""


class StopAgreement:
    """Agrees with all other processes on the last step; `control` is used for nothing else."""

    def __init__(self, control: ControlGroup, *, interval: float = INTERVAL) -> None:
        self.control, self.interval = control, interval
        self._condition = threading.Condition()
        self._step = 0
        """The step that this process is in, or will begin next."""
        self._asked, self._closing = False, False
        self._holding = False
        """Whether `_step` was reported as the one to hold at."""
        self._stop_step: int | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stop agreement", daemon=True)

    def start(self, step: int) -> None:
        """Begin, before this step."""
        self._step = step
        if self.control.size > 1:
            self._thread.start()

    def after_step(self, step: int, *, asked: bool) -> int | None:
        """The step after which all processes stop, once they agree on one. `asked`: this process
        was asked to stop."""
        if self.control.size == 1:
            return step if asked else None
        with self._condition:
            self._asked = self._asked or asked
            while self._holding and self._stop_step is None and self._failure is None:
                self._condition.wait(self.interval)
            if self._failure is not None:
                raise self._failure
            self._step = step + 1
            return self._stop_step

    def close(self) -> None:
        """Leave, together with all others."""
        with self._condition:
            self._closing = True
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._exchange():
                threading.Event().wait(self.interval)
        except BaseException as error:
            with self._condition:
                self._failure = error
                self._condition.notify_all()

    def _exchange(self) -> bool:
        """Exchange one message with all others; returns whether to go on."""
        with self._condition:
            mine = [self._step, self._asked, self._holding, self._closing]
        gathered = self.control.all_gather(mine)
        with self._condition:
            if self._stop_step is None and all(holding for _, _, holding, _ in gathered):
                self._stop_step = max(step for step, *_ in gathered)
                self._condition.notify_all()
            elif any(asked for _, asked, _, _ in gathered):
                self._asked = self._holding = True
        return not all(closing for *_, closing in gathered)
