"""What processes tell one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from gristmill.parallel.council import Council


def meet() -> dict[str, Any]:
    council = Council(dist.group.WORLD)
    council.wait()
    return {
        "gathered": council.gather({"rank": council.rank, "words": "ä" * council.rank}),
        "told": council.tell(f"from {council.rank}"),
        "any": council.any(council.rank == 2),
        "none": council.any(False),
        "leads": council.leads,
    }


def test_all_hear_the_same(crowd: Callable[..., list[Any]]) -> None:
    answers = crowd(3, meet)
    for rank, answer in enumerate(answers):
        assert answer["gathered"] == [{"rank": n, "words": "ä" * n} for n in range(3)]
        assert answer["told"] == "from 0"
        assert answer["any"] and not answer["none"]
        assert answer["leads"] == (rank == 0)


def test_one_process_answers_itself() -> None:
    council = Council()
    council.wait()
    assert council.gather([1]) == [[1]] and council.tell(2) == 2 and council.leads
    assert council.any(True) and not council.any(False)
