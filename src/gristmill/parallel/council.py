"""What the processes of a run agree on, over the host network: small facts, as JSON.

Gradients and activations travel in groups of their own, on the devices' network. A council is for
the few words beside them, and it may be used by one thread only: whoever works in the background
has a council of its own. A council of one answers itself.

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


class Council:
    """All processes of a run; `group` is one on the CPU, None where there is one process."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def gather(self, fact: Any) -> list[Any]:
        """What every process says, by rank; all of them hear it."""
        if self.group is None:
            return [fact]
        mine = torch.frombuffer(bytearray(json.dumps(fact).encode()), dtype=torch.uint8)
        length = torch.tensor([len(mine)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self.group)
        longest = max(int(one) for one in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded, group=self.group)
        return [
            json.loads(bytes(text[: int(one)].tolist()))
            for text, one in zip(texts, lengths, strict=True)
        ]

    def tell(self, fact: Any) -> Any:
        """What the first process says; the others' word is not asked for."""
        return self.gather(fact if self.leads else None)[0]

    def any(self, yes: bool) -> bool:
        """Whether it is so for any process."""
        return any(self.gather(yes))

    def wait(self) -> None:
        """Return when all have come here."""
        if self.group is not None:
            self.gather(None)

    def by_first(self, act: Callable[[], Any]) -> Any:
        """What the first process does for all; all hear what came of it."""
        return self.by_all(act if self.leads else lambda: None)[0]

    def by_all(self, act: Callable[[], Any]) -> list[Any]:
        """What every process does; all hear what came of it, by rank, if none failed."""
        defect: Exception | None = None
        try:
            words = {"result": act()}
        except UserError as error:
            words = _refusal(error)
        except OSError as error:
            what, where = f"the disk refused: {error.strerror}", str(error.filename)
            words = _refusal(UserError(what, where=where, exit=Exit.STORAGE))
        except Exception as error:  # raised below, when the others know of it
            defect, words = error, {"defect": f"{type(error).__name__}: {error}"}
        told = self.gather(words)
        if defect is not None:
            raise defect
        _raise_failures(told)
        return [one["result"] for one in told]


def _refusal(error: UserError) -> dict[str, Any]:
    problems = [astuple(problem) for problem in error.problems]
    return {"refused": problems, "exit": int(error.exit), "host": socket.gethostname()}


def _raise_failures(told: Sequence[dict[str, Any]]) -> None:
    for rank, words in enumerate(told):
        if "defect" in words:
            raise UserError(f"rank {rank} failed: {words['defect']}", exit=Exit.PEER)
    refused = {rank: words for rank, words in enumerate(told) if "refused" in words}
    if not refused:
        return
    rank, words = next(iter(refused.items()))
    problems = [Problem(*values) for values in words["refused"]]
    if len(told) > 1:
        others = f" (and {len(refused) - 1} other ranks)" if len(refused) > 1 else ""
        who = f"rank {rank} on {words['host']}{others}"
        problems = [Problem(f"{who}: {one.what}", one.where, one.remedy) for one in problems]
    raise RefusedError(problems, exit=Exit(words["exit"]))
