"""What the processes of a run agree on over the host network: small facts, as JSON.

Gradients and activations travel in groups of their own, on the devices' network. A control group is
for everything small beside them, and belongs to one thread: work in the background has a control
group of its own. A control group of one process answers itself.

What one process cannot do for a reason that the user can mend is refused by all of them together,
so that none waits for the others.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
import torch.distributed as dist

from gristmill.base.errors import Exit, Problem, UserError


class RefusedError(UserError):
    """Something that some process could not do, and that all have given up."""


class ControlGroup:
    """All processes of a run; `group` is one on the CPU, None where there is one process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    def all_gather(self, fact: Any) -> list[Any]:
        """What every process says, by rank, on all of them."""
        if self.group is None:
            return [fact]
        mine = _encoded(fact)
        longest, lengths = self._lengths(mine)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, _padded(mine, longest), group=self.group)
        return [_decoded(text, length) for text, length in zip(texts, lengths, strict=True)]

    def gather(self, fact: Any) -> list[Any]:
        """What every process says, by rank, on rank 0; an empty list on the others. What each of
        many processes says may be long: nobody else has to hear it."""
        if self.group is None:
            return [fact]
        mine = _encoded(fact)
        longest, lengths = self._lengths(mine)
        texts = None
        if self.is_rank0:
            texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.gather(_padded(mine, longest), texts, dst=0, group=self.group)
        return [_decoded(text, n) for text, n in zip(texts or (), lengths, strict=False)]

    def broadcast(self, fact: Any) -> Any:
        """What rank 0 says; what the others would say is not asked for."""
        if self.group is None:
            return fact
        mine = _encoded(fact if self.is_rank0 else None)
        length = torch.tensor([len(mine)])
        dist.broadcast(length, src=0, group=self.group)
        text = mine if self.is_rank0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, src=0, group=self.group)
        return _decoded(text, int(length))

    def any(self, yes: bool) -> bool:
        """Whether it is so for any process."""
        if self.group is None:
            return yes
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def barrier(self) -> None:
        """Return when all have come here."""
        self.any(False)

    def on_rank0(self, act: Callable[[], Any]) -> Any:
        """What rank 0 does for all; all hear what came of it."""
        result, failure, defect = _tried(act) if self.is_rank0 else (None, None, None)
        self._raise_failures(failure, defect)
        return self.broadcast(result)

    def on_all_ranks(self, act: Callable[[], Any]) -> list[Any]:
        """What every process does. If none failed, rank 0 hears what came of it, by rank."""
        result, failure, defect = _tried(act)
        self._raise_failures(failure, defect)
        return self.gather(result)

    def _lengths(self, mine: torch.Tensor) -> tuple[int, list[int]]:
        own, all_of = torch.tensor([len(mine)]), torch.zeros(self.size, dtype=torch.int64)
        dist.all_gather(list(all_of.split(1)), own, group=self.group)
        return int(all_of.max()), all_of.tolist()

    def _raise_failures(self, failure: dict[str, Any] | None, defect: Exception | None) -> None:
        """Raise on all processes what went wrong on any of them."""
        if not self.any(failure is not None):
            return
        told = self.all_gather(failure)
        if defect is not None:
            raise defect
        raise _joined(told)


def _encoded(fact: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor, length: int) -> Any:
    return json.loads(text[:length].numpy().tobytes())


def _padded(text: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: len(text)] = text
    return padded


def _tried(act: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None, Exception | None]:
    """The result of an act, or how it failed; a defect is also given as it is."""
    try:
        return act(), None, None
    except UserError as error:
        return None, _refusal(error), None
    except OSError as error:
        what, where = f"the disk refused: {error.strerror}", str(error.filename)
        return None, _refusal(UserError(what, where=where, exit=Exit.STORAGE)), None
    except Exception as error:  # raised when the others know of it
        return None, {"defect": f"{type(error).__name__}: {error}"}, error


def _refusal(error: UserError) -> dict[str, Any]:
    problems = [astuple(problem) for problem in error.problems]
    return {"refused": problems, "exit": int(error.exit), "host": socket.gethostname()}


def _joined(told: Sequence[dict[str, Any] | None]) -> UserError:
    """One error for what the processes, by rank, say of their failures."""
    failed = {rank: failure for rank, failure in enumerate(told) if failure is not None}
    for rank, failure in failed.items():
        if "defect" in failure:
            return UserError(f"rank {rank} failed: {failure['defect']}", exit=Exit.PEER)
    rank, failure = next(iter(failed.items()))
    problems = [Problem(*values) for values in failure["refused"]]
    if len(told) > 1:
        others = f" (and {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
        who = f"rank {rank} on {failure['host']}{others}"
        problems = [Problem(f"{who}: {one.what}", one.where, one.remedy) for one in problems]
    return RefusedError(problems, exit=Exit(failure["exit"]))
