"""Control messages between the processes of a run: small JSON values over gloo.

Gradients and activations use their own process groups on the device network. A control group
carries small messages and belongs to one thread; background threads have groups of their own. With
a single process nothing is sent.

If one process raises a UserError, all processes raise it together, so that none waits for the
others.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit, Problem, UserError

_POLL = 0.002
"""Seconds between two checks of a collective that can be interrupted."""


class RefusedError(UserError):
    """A failure on some rank, raised on all ranks."""


class ControlGroup:
    """Messages between all processes of a run; `group` is a gloo group, None for a single process.
    `interrupt` is called while waiting, and raises to stop that."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self.group, self.interrupt = group, interrupt
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on all ranks."""
        if self.group is None:
            return [value]
        padded, lengths = self._padded(value)
        texts = [torch.empty_like(padded) for _ in lengths]
        self._finish(dist.all_gather(texts, padded, group=self.group, async_op=True))
        return [_decoded(text, length) for text, length in zip(texts, lengths, strict=True)]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank, on rank 0; an empty list on the others. Suits long
        values."""
        if self.group is None:
            return [value]
        padded, lengths = self._padded(value)
        texts = [torch.empty_like(padded) for _ in lengths] if self.is_rank0 else None
        self._finish(dist.gather(padded, texts, group_dst=0, group=self.group, async_op=True))
        return [_decoded(text, n) for text, n in zip(texts or (), lengths, strict=False)]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.group is None:
            return value
        text = _encoded(value if self.is_rank0 else None)
        length = torch.tensor([len(text)])
        self._finish(dist.broadcast(length, group_src=0, group=self.group, async_op=True))
        text = text if self.is_rank0 else torch.empty(int(length), dtype=torch.uint8)
        self._finish(dist.broadcast(text, group_src=0, group=self.group, async_op=True))
        return _decoded(text, int(length))

    def any(self, yes: bool) -> bool:
        """Whether any process passes True."""
        if self.group is None:
            return yes
        flag = torch.tensor([int(yes)])
        self._finish(dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group, async_op=True))
        return bool(flag)

    def barrier(self) -> None:
        """Wait for all processes."""
        self.any(False)

    def on_rank0(self, act: Callable[[], Any]) -> Any:
        """Call a function on rank 0; all ranks get its result or its failure."""
        result, failure, defect = _tried(act) if self.is_rank0 else (None, None, None)
        self._raise_failures(failure, defect)
        return self.broadcast(result)

    def on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        """Call a function on every rank. All raise if any fails; rank 0 gets the results."""
        result, failure, defect = _tried(act)
        self._raise_failures(failure, defect)
        return self.gather(result)

    def _finish(self, work: dist.Work | None) -> None:
        """Wait for a collective."""
        wait_for(work, self.interrupt, group=self.group)

    def _padded(self, value: Any) -> tuple[torch.Tensor, list[int]]:
        """A value as bytes, padded to the longest of any process, and the lengths of all."""
        text = _encoded(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        counted = torch.tensor([len(text)])
        parts = list(lengths.split(1))
        self._finish(dist.all_gather(parts, counted, group=self.group, async_op=True))
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(text)] = text
        return padded, lengths.tolist()

    def _raise_failures(self, failure: dict[str, Any] | None, defect: Exception | None) -> None:
        """Raise on all processes if any of them failed."""
        if not self.any(failure is not None):
            return
        failures = self.all_gather(failure)
        if defect is not None:
            raise defect
        raise _joined(failures)


UNFINISHED: list[tuple[dist.Work, dist.ProcessGroup | None]] = []
"""Unfinished collectives, including abandoned ones. They keep their groups alive: destroying a
group waits for its collectives while it holds the GIL."""


def wait_for(
    work: dist.Work | None,
    interrupt: Callable[[], None] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Wait for a collective of a group, unless `interrupt` raises."""
    assert work is not None, "this process is a member of the group"
    if interrupt is not None:
        entry = (work, group)
        UNFINISHED.append(entry)
        while not work.is_completed():
            interrupt()
            time.sleep(_POLL)
        with contextlib.suppress(ValueError):
            UNFINISHED.remove(entry)
    work.wait()


def _encoded(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor, length: int) -> Any:
    return json.loads(text[:length].numpy().tobytes())


def _tried(act: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None, Exception | None]:
    """The result of a call, or its failure as JSON, with the exception if it is a bug."""
    try:
        return act(), None, None
    except UserError as error:
        return None, _refusal(error), None
    except OSError as error:
        # Some errors of the standard library have a message only.
        what = f"the disk refused: {error.strerror or error}"
        return None, _refusal(UserError(what, where=error.filename, exit=Exit.STORAGE)), None
    except Exception as error:  # raised after the others know of it
        return None, {"defect": f"{type(error).__name__}: {error}"}, error


def _refusal(error: UserError) -> dict[str, Any]:
    problems = [astuple(problem) for problem in error.problems]
    return {"refused": problems, "exit": int(error.exit), "host": socket.gethostname()}


def _joined(failures: Sequence[dict[str, Any] | None]) -> UserError:
    """One error from the failures of all processes, by rank."""
    failed = {rank: failure for rank, failure in enumerate(failures) if failure is not None}
    for rank, failure in failed.items():
        if "defect" in failure:
            return UserError(f"rank {rank} failed: {failure['defect']}", exit=Exit.PEER)
    rank, failure = next(iter(failed.items()))
    problems = [Problem(*values) for values in failure["refused"]]
    # If all ranks report the same, it is not the fault of one.
    if any(one is None or one["refused"] != failure["refused"] for one in failures):
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        who = f"rank {rank} on {failure['host']}{others}"
        problems = [Problem(f"{who}: {one.what}", one.where, one.remedy) for one in problems]
    return RefusedError(problems, exit=Exit(failure["exit"]))
